# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a rollout, in one vocabulary.

Three questions are kept apart, because mixing them is how infrastructure trouble ends up as reward 0:

- *What happened?* A failure **kind**: one of the low-cardinality names of NeMo Gym 0.7's ``failure_kinds.py``, also
  used on Gym 0.4, which does not define them yet, or ``bad_row``. Safe as a metric label.
- *Whose fault is it?* An **origin**: infrastructure, agent, task or caller. It decides whether a retry can help.
- *What is the detail?* A **reason**, free text for people, never a label.

Exceptions are classified exactly once, where a stage ends (:func:`classify`). Whatever has a :class:`Failure` has no
reward: a failed rollout is masked, retried or dropped, never scored.
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar


MACHINE_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE}
)
"""System calls' errors that are nobody's request's fault: the same may well succeed elsewhere."""

FAILURE_KIND_HEADER = "X-ProRL-Failure-Kind"
"""Response header of a server whose answer is its own trouble rather than an observation or a reward."""


class FailureKind(StrEnum):
    """How a rollout can end without a reward: names of NeMo Gym 0.7's shared vocabulary, and ``bad_row``."""

    BAD_ROW = "bad_row"
    """The row itself is wrong. Gym's vocabulary has no name for this: there it is any request that failed."""

    TRANSPORT_UNREACHABLE = "transport_unreachable"
    TRANSPORT_PEER_DROP = "transport_peer_drop"
    TRANSPORT_TIMEOUT = "transport_timeout"
    AGENT_RUN_ERROR = "agent_run_error"
    AGENT_REQUEST_FAILED = "agent_request_failed"
    AGENT_TIMEOUT = "agent_timeout"
    VERIFIER_ERROR = "verifier_error"
    PROVIDER_UNAVAILABLE = "provider_unavailable"
    PROVIDER_QUOTA_EXHAUSTED = "provider_quota_exhausted"
    PROVIDER_OOM_KILLED = "provider_oom_killed"
    SESSION_LOST = "session_lost"
    SESSION_EXPIRED = "session_expired"
    SESSION_RELEASE_FAILED = "session_release_failed"
    CANCELLED = "cancelled"
    KILL_SHAPED = "kill_shaped"
    SHUTDOWN = "shutdown"
    COHORT_INCOMPLETE = "cohort_incomplete"


class Origin(StrEnum):
    """Whose doing a failure is."""

    INFRASTRUCTURE = "infrastructure"
    """A machine, network, sandbox or server of ours. The same rollout may well succeed elsewhere or later."""
    AGENT = "agent"
    """What the policy did: ran out of its time, say. Doing it again is a new sample, not a retry."""
    TASK = "task"
    """The task itself is broken: a row whose tests cannot run for anybody."""
    CALLER = "caller"
    """The request was wrong, or the caller took it back."""


class Stage(StrEnum):
    """The three stages of a rollout that do work; waiting between them is nobody's time."""

    INIT = "init"
    RUN = "run"
    EVAL = "eval"


class RolloutError(Exception):
    """Base of every error that this package raises on purpose.

    Args:
        reason: what happened and how to mend it, for a person.
        kind: the failure kind; each subclass has a default.
    """

    origin = Origin.INFRASTRUCTURE
    default_kind = FailureKind.AGENT_RUN_ERROR
    field: str | None = None

    def __init__(self, reason: str, *, kind: FailureKind | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind or self.default_kind


class InfrastructureError(RolloutError):
    """A machine, network, sandbox or server failed; retried within the job's attempts.

    Args:
        reason: what happened and how to mend it, for a person.
        kind: the failure kind.
        server: name of the server whose connection failed, as the handler's ``unreachable`` names it; no new rollout
            begins while it cannot be reached. ``None`` if it was not a connection that failed.
        field: what is wrong in the configuration of a server of ours, e.g. ``"image"``; ``None`` if nothing is.
    """

    origin = Origin.INFRASTRUCTURE
    default_kind = FailureKind.PROVIDER_UNAVAILABLE

    def __init__(
        self, reason: str, *, kind: FailureKind | None = None, server: str | None = None, field: str | None = None
    ) -> None:
        super().__init__(reason, kind=kind)
        self.server = server
        self.field = field


class AgentError(RolloutError):
    """The agent's own doing ended the rollout."""

    origin = Origin.AGENT
    default_kind = FailureKind.AGENT_RUN_ERROR


class TaskError(RolloutError):
    """The task cannot be run or scored by anybody; a retry would only repeat it."""

    origin = Origin.TASK
    default_kind = FailureKind.VERIFIER_ERROR


class CallerError(RolloutError):
    """The request is wrong.

    Attributes:
        http_status: with which a server of ours answers.
        problem: stable name of the problem document (``nemo_gym_prorl.http.problems``).
        retry_after_s: when asking again can help; ``None`` if it cannot.

    Args:
        reason: what is wrong and how to mend it.
        field: path of the offending field, e.g. ``"row.responses_create_params"``; ``None`` if it is not one field.
    """

    origin = Origin.CALLER
    default_kind = FailureKind.BAD_ROW
    http_status: ClassVar[int] = 422
    problem: ClassVar[str] = "invalid-request"
    retry_after_s: ClassVar[int | None] = None

    def __init__(self, reason: str, *, field: str | None = None, kind: FailureKind | None = None) -> None:
        super().__init__(f"{field}: {reason}" if field else reason, kind=kind)
        self.complaint = reason
        self.field = field


class BudgetExceeded(RolloutError):
    """A stage used up its time budget. What that means depends on the stage: see :func:`classify`."""

    def __init__(self, stage: Stage, budget_s: float) -> None:
        super().__init__(f"{stage} used up its budget of {budget_s:g} s", kind=_BUDGET_KINDS[stage])
        self.stage = stage
        self.budget_s = budget_s
        # A slow agent is the agent's doing; slow set-up and slow scoring are not.
        self.origin = Origin.AGENT if stage is Stage.RUN else Origin.INFRASTRUCTURE


class JobCancelled(RolloutError):
    """The job was cancelled: by its caller, because the caller is gone, or by a drain."""

    origin = Origin.CALLER
    default_kind = FailureKind.CANCELLED


_BUDGET_KINDS = {
    Stage.INIT: FailureKind.PROVIDER_UNAVAILABLE,
    Stage.RUN: FailureKind.AGENT_TIMEOUT,
    Stage.EVAL: FailureKind.VERIFIER_ERROR,
}

_UNEXPECTED_KINDS = {
    Stage.INIT: FailureKind.PROVIDER_UNAVAILABLE,
    Stage.RUN: FailureKind.AGENT_RUN_ERROR,
    Stage.EVAL: FailureKind.VERIFIER_ERROR,
}


_TEXT_LIMIT = 8_000
_TRACEBACK_LIMIT = 4_000
_UNREACHABLE = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})


@dataclass(frozen=True, slots=True)
class Failure:
    """One classified failure of one attempt.

    Attributes:
        kind: what happened.
        origin: whose doing it is.
        stage: where it happened; ``None`` while the job waited in a queue.
        reason: free text for a person; always text that UTF-8 can carry, of bounded length.
        timed_out: a stage budget ran out; the job ends as ``timed_out`` rather than ``failed``.
        server: the server whose connection failed, if its handler named one.
        traceback: the end of the traceback of an exception that nobody raised on purpose.
    """

    kind: FailureKind
    origin: Origin
    stage: Stage | None
    reason: str
    timed_out: bool = False
    server: str | None = None
    traceback: str | None = None

    @property
    def retryable(self) -> bool:
        """Only infrastructure is worth a second try; the cap on tries is the job's own."""
        return self.origin is Origin.INFRASTRUCTURE

    @property
    def connection_lost(self) -> bool:
        """The connection to a server that has a name failed: it may be gone for everybody."""
        return self.server is not None


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of a complaint about an unknown name: the nearest known name, and all of them."""
    from difflib import get_close_matches  # the supervisor of sandboxes, which never suggests, is to stay small

    known = sorted(known)
    nearest = get_close_matches(name, known, 1, 0.5)
    hint = f"; the nearest: {nearest[0]}" if nearest else ""
    return f"{hint}; there are: {', '.join(known) or 'none'}"


def classify(error: BaseException, stage: Stage | None) -> Failure:
    """Turn whatever a stage raised into one :class:`Failure`; never raises, whatever the exception is like.

    Our own errors say what they are. Foreign ones are judged by type: a time-out or a broken connection is transport;
    anything else is a defect of a handler or server, which is infrastructure, since it says nothing about the policy.
    Of several that were raised together (an exception group) one of ours counts first.
    """
    if isinstance(error, BaseExceptionGroup):
        leaves = _leaves(error)
        return classify(next((leaf for leaf in leaves if isinstance(leaf, RolloutError)), leaves[0]), stage)
    unexpected = unexpected_kind(stage)
    if isinstance(error, RolloutError):
        return Failure(
            _member(FailureKind, getattr(error, "kind", None), unexpected),
            _member(Origin, error.origin, Origin.INFRASTRUCTURE),
            stage,
            clean_text(getattr(error, "reason", None) or _text(error)),
            timed_out=isinstance(error, BudgetExceeded),
            server=clean_text(server) if (server := getattr(error, "server", None)) is not None else None,
        )
    # The supervisor of sandboxes, which has no such loop and is forked all the time, is to stay small.
    from asyncio import CancelledError

    if isinstance(error, CancelledError):
        return Failure(FailureKind.CANCELLED, Origin.CALLER, stage, "cancelled")
    reason = clean_text(f"{type(error).__name__}: {_text(error)}")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        reason = f"this process has no file descriptor left; raise the limit of open files (ulimit -n): {reason}"
        return Failure(FailureKind.PROVIDER_QUOTA_EXHAUSTED, Origin.INFRASTRUCTURE, stage, reason)
    if isinstance(error, TimeoutError):
        return Failure(FailureKind.TRANSPORT_TIMEOUT, Origin.INFRASTRUCTURE, stage, reason)
    if isinstance(error, OSError) and _refused(error):
        return Failure(FailureKind.TRANSPORT_UNREACHABLE, Origin.INFRASTRUCTURE, stage, reason)
    if isinstance(error, ConnectionError):
        return Failure(FailureKind.TRANSPORT_PEER_DROP, Origin.INFRASTRUCTURE, stage, reason)
    trace = clean_text("".join(traceback.format_exception(error)), _TRACEBACK_LIMIT, end=True)
    return Failure(unexpected, Origin.INFRASTRUCTURE, stage, reason, traceback=trace)


def drop_tracebacks(error: BaseException | None) -> None:
    """Let go of the frames that an error has gone through, once it is classified: whatever they worked on stays else
    until the collector of cycles comes, since most of them hold the task or the future that holds the error."""
    todo, seen = [error], set[int]()
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        todo += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]


def unexpected_kind(stage: Stage | None) -> FailureKind:
    """The kind of a failure in a stage that nobody foresaw."""
    return _UNEXPECTED_KINDS[stage] if stage else FailureKind.AGENT_RUN_ERROR


def _refused(error: OSError) -> bool:
    # A client library's own OSError has the number, but is none of Python's subclasses.
    return isinstance(error, ConnectionRefusedError) or error.errno in _UNREACHABLE


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def _member[E: StrEnum](enum: type[E], value: Any, default: E) -> E:
    """``value`` as a member; a plug-in may have written anything."""
    try:
        return enum(value)
    except ValueError:
        return default


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be had)"


def is_text(value: str) -> bool:
    """Whether UTF-8 can carry it: half a surrogate pair it cannot."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def clean_text(text: Any, limit: int = _TEXT_LIMIT, *, end: bool = False) -> str:
    """Text of bounded length that UTF-8 can carry: file names and terminals bring lone surrogates."""
    text = str(text).encode("utf-8", "backslashreplace").decode()
    if len(text) <= limit:
        return str(text)
    return f"…{text[-limit:]}" if end else f"{text[:limit]}…"
