# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Failure kinds and origins, the hierarchy of errors, and their classification.

A failure has three parts:

- **kind**: the type of failure, one of the low-cardinality names of NeMo Gym 0.7's ``failure_kinds.py``, ``bad_row``
  or ``environment_error``. Kinds are safe as metric labels, and are the same with Gym 0.4, which defines none.
- **origin**: infrastructure, agent, task or caller. The origin decides whether a retry can help.
- **reason**: free text for people, never a label.

:func:`classify` turns each exception into a :class:`Failure` exactly once, where a stage ends. A rollout with a
failure has no reward: it is masked, retried or dropped, never scored.
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
"""Error numbers of system calls that the machine's state causes, not the request: a retry elsewhere may succeed."""

FAILURE_KIND_HEADER = "X-ProRL-Failure-Kind"
"""Response header that marks a response as a failure of the server, rather than an observation or a reward."""

FINAL = "; final"
"""Suffix of :data:`FAILURE_KIND_HEADER`'s value for failures that are not retried (``InfrastructureError.final``)."""


class FailureKind(StrEnum):
    """Types of failure: the failure kinds of NeMo Gym 0.7, and two of this package."""

    BAD_ROW = "bad_row"
    """The row or another part of the request is wrong. Not one of Gym's failure kinds."""
    ENVIRONMENT_ERROR = "environment_error"
    """The environment's own code failed before the policy's first turn. Not one of Gym's failure kinds."""

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
    """Party that caused a failure."""

    INFRASTRUCTURE = "infrastructure"
    """A machine, network, sandbox or server of the deployment. The same rollout may succeed elsewhere or later."""
    AGENT = "agent"
    """An action of the policy, such as using up its time. Another attempt would be a new sample, not a retry."""
    TASK = "task"
    """The task itself is broken, such as a row whose tests cannot run anywhere."""
    CALLER = "caller"
    """The request was wrong, or the rollout was cancelled."""


class Stage(StrEnum):
    """The three stages of a rollout that do work. Waiting between stages is charged to no budget."""

    INIT = "init"
    RUN = "run"
    EVAL = "eval"


class RolloutError(Exception):
    """Base class of this package's errors.

    Args:
        reason: the failure and its fix, for a person.
        kind: the failure kind; each subclass has a default.
    """

    origin = Origin.INFRASTRUCTURE
    default_kind = FailureKind.AGENT_RUN_ERROR
    kind = FailureKind.AGENT_RUN_ERROR  # of a plug-in's subclass that does not call this constructor
    reason = ""
    field: str | None = None

    def __init__(self, reason: str, *, kind: FailureKind | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = FailureKind(kind or self.default_kind)


class InfrastructureError(RolloutError):
    """A machine, network, sandbox or server failed. The pipeline retries within the job's attempts.

    Args:
        reason: the failure and its fix, for a person.
        kind: the failure kind.
        server: name of the server to which the connection failed, as the handler's ``unreachable`` reports it. No new
            rollout starts while that server is unreachable. ``None`` if no connection failed.
        field: the wrong field in the configuration of one of our servers, such as ``"image"``; ``None`` if no field is
            wrong.
        final: whether to fail the rollout without a retry, because the rollout has already waited as long as allowed.
    """

    origin = Origin.INFRASTRUCTURE
    default_kind = FailureKind.PROVIDER_UNAVAILABLE

    def __init__(
        self,
        reason: str,
        *,
        kind: FailureKind | None = None,
        server: str | None = None,
        field: str | None = None,
        final: bool = False,
    ) -> None:
        super().__init__(reason, kind=kind)
        self.server = server
        self.field = field
        self.final = final


class AgentError(RolloutError):
    """An action of the agent made the rollout fail, such as using up its time."""

    origin = Origin.AGENT
    default_kind = FailureKind.AGENT_RUN_ERROR


class TaskError(RolloutError):
    """The task cannot be run or scored anywhere, so a retry would fail again."""

    origin = Origin.TASK
    default_kind = FailureKind.VERIFIER_ERROR


class CallerError(RolloutError):
    """Invalid request.

    Attributes:
        http_status: HTTP status of the response.
        problem: stable name of the problem document (``nemo_gym_prorl.http.problems``).
        retry_after_s: seconds after which a retry can help; ``None`` if no retry can.

    Args:
        reason: the error and its fix.
        field: path of the wrong field, such as ``"row.responses_create_params"``; ``None`` if no single field is
            wrong.
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
    """A stage used up its time budget, in seconds. In RUN the policy causes this; in INIT and EVAL the infrastructure
    does, so the attempt is retried."""

    def __init__(self, stage: Stage, budget_s: float) -> None:
        super().__init__(f"{stage} used up its budget of {budget_s:g} s", kind=_BUDGET_KINDS[stage])
        self.stage = stage
        self.budget_s = budget_s
        self.origin = Origin.AGENT if stage is Stage.RUN else Origin.INFRASTRUCTURE


class JobCancelled(RolloutError):
    """The job was cancelled by its caller, the caller's disconnection, or the shutdown of its service."""

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


_MAX_REASON_CHARS = 8_000  # a reason may quote a program's output
_MAX_TRACEBACK_CHARS = 4_000  # the innermost frames show the bug
_UNREACHABLE = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})


@dataclass(frozen=True, slots=True)
class Failure:
    """One classified failure of one attempt.

    Attributes:
        kind: the failure kind.
        origin: the party that caused the failure.
        stage: the stage that failed; ``None`` while the job waited in a queue.
        reason: free text for a person, encodable as UTF-8 and of bounded length.
        timed_out: whether a stage's budget ran out; the job then ends as ``timed_out`` rather than ``failed``.
        server: name of the server to which the connection failed; ``None`` if the error named no server.
        traceback: end of the traceback of an exception that is a bug; ``None`` for other failures.
        final: whether an infrastructure failure is not retried (:class:`InfrastructureError`).
    """

    kind: FailureKind
    origin: Origin
    stage: Stage | None
    reason: str
    timed_out: bool = False
    server: str | None = None
    traceback: str | None = None
    final: bool = False

    @property
    def retryable(self) -> bool:
        """Return whether a retry can help: for infrastructure failures that are not ``final``."""
        return self.origin is Origin.INFRASTRUCTURE and not self.final

    @property
    def connection_lost(self) -> bool:
        """Return whether a connection to a known server failed; the server may be down for every rollout."""
        return self.server is not None


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known name, and all known names."""
    from difflib import get_close_matches  # lazy: the sandbox supervisor must stay small and never calls this

    known = sorted(known)
    nearest = get_close_matches(name, known, 1, 0.5)
    hint = f"; the nearest: {nearest[0]}" if nearest else ""
    return f"{hint}; there are: {', '.join(known) or 'none'}"


def classify(error: BaseException, stage: Stage | None) -> Failure:
    """Convert any exception of a stage into one :class:`Failure`; never raises. Errors of this package carry kind and
    origin. A cancellation has origin caller; other exceptions have origin infrastructure: exhausted descriptors,
    time-outs, failed connections, and bugs in a handler or server. An exception group is classified by its first error
    of this package, or by its first error if it has none of this package."""
    if isinstance(error, BaseExceptionGroup):
        leaves = _leaves(error)
        return classify(next((leaf for leaf in leaves if isinstance(leaf, RolloutError)), leaves[0]), stage)
    if isinstance(error, RolloutError):
        return Failure(
            error.kind,
            error.origin,
            stage,
            clean_text(error.reason or _text(error)),
            timed_out=isinstance(error, BudgetExceeded),
            server=clean_text(server) if (server := getattr(error, "server", None)) is not None else None,
            final=getattr(error, "final", False) is True,
        )
    # Lazy: the sandbox supervisor is forked often, must stay small and has no event loop.
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
    trace = clean_text("".join(traceback.format_exception(error)), _MAX_TRACEBACK_CHARS, end=True)
    return Failure(unexpected_kind(stage), Origin.INFRASTRUCTURE, stage, reason, traceback=trace)


def drop_tracebacks(error: BaseException | None) -> None:
    """Remove the tracebacks of a classified error, its causes and its group's errors. Most frames refer to the task or
    future that refers to the error, so their memory would otherwise stay until the cycle collector runs."""
    todo, seen = [error], set[int]()
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        todo += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]


def unexpected_kind(stage: Stage | None) -> FailureKind:
    return _UNEXPECTED_KINDS[stage] if stage else FailureKind.AGENT_RUN_ERROR


def _refused(error: OSError) -> bool:
    # aiohttp raises its own subclass of OSError with the errno, not a ConnectionRefusedError.
    return isinstance(error, ConnectionRefusedError) or error.errno in _UNREACHABLE


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(no text: str() of the exception failed)"


def is_text(value: str) -> bool:
    """Return whether UTF-8 can encode ``value``; a lone surrogate cannot be encoded."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def clean_text(text: Any, limit: int = _MAX_REASON_CHARS, *, end: bool = False) -> str:
    """Convert a value into text that UTF-8 can encode, and cut the text to its first ``limit`` characters, or with
    ``end`` to its last. Text from file names and terminals may contain lone surrogates."""
    text = str(text).encode("utf-8", "backslashreplace").decode()
    if len(text) <= limit:
        return str(text)
    return f"…{text[-limit:]}" if end else f"{text[:limit]}…"
