# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Lifecycle of an environment's sessions: seed, tool calls, release, grade, close.

Invariants:

- A session owns at most one sandbox, the agent's. Grading runs in other sandboxes after the agent's sandbox is gone.
  Sessions of rows without a sandbox have the same lifecycle.
- Release, verify and close are idempotent, and may be called concurrently and in any order.
- A session whose seeding is abandoned is not prepared further, and its sandbox is stopped.
- Closing a session cancels extraction and grading, and returns after the grading sandboxes are gone.
- Snapshots that tools and artefacts own are deleted after grading, or when the session closes.
- A policy that exceeds its sandbox's limits, or whose answer cannot be read, gets the reward 0. The session does not
  fail.
- An unexpected exception of a task is an infrastructure failure and never a reward.
- A session is closed after ``session_ttl_s`` without a call. A session with a lease is also closed after
  :data:`LEASE_SWEEPS` sweeps without renewal.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast
from weakref import WeakValueDictionary

from nemo_gym_prorl.async_tasks import is_cancelled
from nemo_gym_prorl.failures import AgentError, CallerError, FailureKind, InfrastructureError, RolloutError, TaskError
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.sandbox_lifecycle import SandboxLifecycle, ShieldedTasks
from nemo_gym_prorl.tasks.task import (
    EXHAUSTED,
    Grade,
    OpenTools,
    SandboxNeeds,
    Task,
    UnreadableAnswer,
    offered_tools,
    task_errors,
)


logger = logging.getLogger(__name__)
type _Row = Mapping[str, Any]

MAX_CLOSED_KEYS = 100_000
"""Number of closed caller-chosen keys that are remembered, so that a delayed seed cannot reopen a session."""

LEASE_SWEEPS = 6
"""Sweeps without renewal until a lease expires. A suspended server does not sweep, so its leases stay valid."""

EXHAUSTED_OBSERVATION = "Error: {reason}. Its files are gone, and the task is over: answer without calling a tool."


@dataclass(slots=True)
class _Session[Opened: OpenTools, Artefacts]:
    """State of a session. The agent's sandbox and tools are available until the release sets ``open`` to false."""

    row: Mapping[str, Any]
    needs: SandboxNeeds | None
    sandbox: Sandbox | None
    tools: Opened
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    open: bool = True
    artefacts: Artefacts | None = None
    lost: RolloutError | None = None
    fault: AgentError | None = None
    work: asyncio.Task[Any] | None = None  # cancelled when the session is closed
    uses: set[asyncio.Task[Any]] = field(default_factory=set)  # cancelled when the session is released
    grade: Grade | None = None
    egress: list[dict[str, Any]] = field(default_factory=list)
    last_used: float = field(default_factory=time.monotonic)
    calls: int = 0
    claims: int = 0  # successful seeds, without those whose caller was cancelled
    lease: str | None = None
    sweeps: int = 0  # since the last renewal of the lease

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a running call, during which the session does not count as unused."""
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1
            self.last_used = time.monotonic()

    @property
    def snapshots(self) -> set[str]:
        """Names of the snapshots that tools and artefacts own."""
        return {name for part in (self.tools, self.artefacts) for name in getattr(part, "snapshots", ())}


class Sessions[Opened: OpenTools, Artefacts]:
    """Sessions of one environment, by key.

    Args:
        task: validates rows, prepares sessions, and extracts and grades artefacts.
        sandboxes, max_starts: see :class:`.SandboxLifecycle`.
        ttl_s: seconds without a call after which a session is closed.
    """

    def __init__(
        self, task: Task[Opened, Artefacts], sandboxes: Any, *, max_starts: int = 4, ttl_s: float = 3600.0
    ) -> None:
        self._task = task
        self._ttl_s = ttl_s
        self._work = ShieldedTasks()
        self._sandboxes = SandboxLifecycle(sandboxes, max_starts=max_starts, tasks=self._work)
        self._sessions: dict[str, _Session[Opened, Artefacts]] = {}
        self._seeding = WeakValueDictionary[str, asyncio.Lock]()
        """Lock of each key that is being seeded."""
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._closing = False

    @property
    def resumes(self) -> bool:
        return bool(getattr(self._task, "resumes", False))

    @property
    def snapshots(self) -> list[str]:
        """Names of the snapshots that live sessions own."""
        return [name for session in self._sessions.values() for name in session.snapshots]

    async def seed(
        self,
        key: str,
        row: Mapping[str, Any],
        *,
        once: bool = False,
        checkpoint: Mapping[str, Any] | None = None,
        lease: str | None = None,
        binds: Sequence[str] | None = None,
    ) -> None:
        """Start a session: its sandbox, if the row needs one, its tools and the task's initial files.

        Seeding an open session again with the same row only sets the lease. Another row or a checkpoint replaces the
        session.

        Args:
            key: identifies the session in further calls.
            row: row of the environment's data set.
            once: whether the caller chose the key; such a key cannot be seeded again after :meth:`close`.
            checkpoint: result of :meth:`checkpoint` for the same row, to resume from.
            lease: lease that the caller renews with :meth:`renew` while the session is in use; ``None`` without one.
            binds: host mounts for an agent program, for which no shell is started; ``None`` without a program.

        Raises:
            CallerError: the row is invalid, the key was closed, or the checkpoint's snapshot cannot be restored.
            InfrastructureError: the sandbox could not be started or prepared, or the server is shutting down.
        """
        with task_errors("the row could not be validated", FailureKind.ENVIRONMENT_ERROR):
            needs = self._task.needs(row)
        if needs is not None and binds:
            needs = replace(needs, binds=[*(needs.binds or ()), *binds])
        task = self._work.spawn(self._seed(key, row, needs, once, checkpoint, program=binds is not None))
        try:
            session = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            task.add_done_callback(lambda _: self._work.spawn(self._close_unclaimed(key, task)))
            raise
        session.lease = lease

    async def checkpoint(self, key: str, name: str) -> dict[str, Any]:
        """Save the session between two tool calls, so that another session can resume from the checkpoint.

        Args:
            name: label for the snapshot of the sandbox's files.

        Returns:
            ``state`` of the tools, names of ``lost`` parts, ``snapshot`` (a name; ``None`` without a sandbox), and its
            ``size`` in bytes.

        Raises:
            CallerError: the task does not support checkpoints, or a file cannot be saved.
            InfrastructureError: ``session_lost``: the session is unknown or released, or the sandbox has ended.
        """
        session = self._require(key)
        sandbox = session.sandbox
        if not self.resumes:
            raise CallerError("sessions of this environment do not support checkpoints")
        with session.in_use():
            if not session.open:
                raise session.lost or InfrastructureError("the session was released", kind=FailureKind.SESSION_LOST)
            state, lost = await session.tools.save()
            if sandbox is None:
                return {"state": state, "lost": lost, "snapshot": None, "size": 0}
            try:
                kept = await sandbox.checkpoint(name)
            except AgentError as error:
                raise CallerError(error.reason) from error
            lost += ["programs"] if kept.programs else []
            return {"state": state, "lost": lost, "snapshot": kept.name, "size": kept.size}

    async def call(self, key: str, tool: str, arguments: object) -> str:
        """Execute a tool call of the policy and return the observation, also if the policy exceeds a sandbox limit;
        raises ``session_lost`` if the session is unknown or released, or the sandbox has ended."""
        session = self._require(key)
        with session.in_use():
            if not session.open and not session.tools.over:
                raise session.lost or InfrastructureError("the session was released", kind=FailureKind.SESSION_LOST)
            try:
                return await session.tools.call(tool, arguments)
            except AgentError as error:
                session.fault = error
                return EXHAUSTED_OBSERVATION.format(reason=error.reason)

    async def use[T](
        self, key: str, lease: str | None, work: Callable[[Opened, Sandbox | None], Coroutine[Any, Any, T]]
    ) -> T:
        """Run ``work`` with the tools and the sandbox of a session; releasing the session cancels ``work``. An
        AgentError of ``work`` is raised, and the session is graded as exhausted.

        Policies do not know the lease, so they cannot make this call.
        """
        session = self._require(key)
        if lease is None or lease != session.lease:
            raise CallerError("needs the lease that the session was seeded with")
        released = session.lost or InfrastructureError("the session was released", kind=FailureKind.SESSION_LOST)
        if not session.open:
            raise released
        with session.in_use():
            session.uses.add(task := self._work.spawn(work(session.tools, session.sandbox)))
            task.add_done_callback(session.uses.discard)
            try:
                return await task
            except AgentError as error:
                session.fault = error
                raise
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                raise released from None

    async def release(self, key: str) -> None:
        """Extract the artefacts, and return once the agent's sandbox has stopped; raises ``session_release_failed`` if
        it does not stop. Unknown keys are ignored."""
        session = self._sessions.get(key)
        if session is not None:
            await asyncio.shield(self._work.spawn(self._release(session, keep=True)))

    async def close(self, key: str, *, once: bool = False) -> None:
        """Delete a session; errors as of :meth:`release`. A key with ``once`` cannot be seeded again."""
        if once:
            self._closed[key] = None
            while len(self._closed) > MAX_CLOSED_KEYS:
                self._closed.popitem(last=False)
        await asyncio.shield(self._work.spawn(self._close(key)))

    async def verify(self, key: str, response: Mapping[str, Any]) -> Grade:
        """Release and grade the session with the policy's last Responses object. Further calls return the same grade.

        Raises:
            TaskError: no policy could be graded on this row.
            InfrastructureError: ``session_lost``: no artefacts exist; ``provider_unavailable`` or ``verifier_error``:
                grading failed.
        """
        return await asyncio.shield(self._work.spawn(self._verify(self._require(key), response)))

    def usage(self, key: str) -> tuple[Mapping[str, Mapping[str, int]], list[dict[str, Any]]]:
        """Return call counts by tool, and network connections by host; empty if not counted or the key is unknown."""
        if (session := self._sessions.get(key)) is None:
            return {}, []
        return session.tools.tool_use(), session.egress

    def renew(self, leases: Collection[str]) -> None:
        for session in self._sessions.values():
            if session.lease in leases:
                session.sweeps = 0

    def sweep(self) -> None:
        """Start closing sessions that were unused for too long or whose lease has expired."""
        horizon = time.monotonic() - self._ttl_s
        for key, session in self._sessions.items():
            session.sweeps += session.lease is not None
            if session.sweeps == LEASE_SWEEPS:
                logger.warning("closing session %s: its caller did not renew the lease", key)
            elif not session.calls and session.last_used < horizon:
                logger.warning("closing session %s: unused for %g s", key, self._ttl_s)
            else:
                continue
            self._work.spawn(self._close_quietly(key))

    async def aclose(self) -> None:
        """Close all sessions; sandboxes that are starting are awaited and stopped."""
        self._closing = True
        await asyncio.gather(*map(self._close_quietly, list(self._sessions)))
        await self._work.drain()

    def _require(self, key: str) -> _Session[Opened, Artefacts]:
        session = self._sessions.get(key)
        if session is None:
            raise InfrastructureError(
                "unknown session: it was never seeded, was closed, or the server was restarted",
                kind=FailureKind.SESSION_LOST,
            )
        return session

    def _refuse_closed(self, key: str, once: bool) -> None:
        if once and key in self._closed:
            raise CallerError("this session was closed; choose another id", field="resources_session_id")

    async def _seed(
        self, key: str, row: _Row, needs: SandboxNeeds | None, once: bool, checkpoint: _Row | None, *, program: bool
    ) -> _Session[Opened, Artefacts]:
        async with self._seeding.setdefault(key, asyncio.Lock()):
            session = self._sessions.get(key)
            if session is None or not session.open or session.row != row or checkpoint is not None:
                await self.close(key)
                self._refuse_closed(key, once)
                session = await self._start(row, needs, checkpoint, program=program)
                if self._closing or (once and key in self._closed):
                    await self._end(session.sandbox, session.tools)
                    self._refuse_closed(key, once)
                    raise InfrastructureError("the server is shutting down", kind=FailureKind.SHUTDOWN)
                self._sessions[key] = session
            session.claims += 1
            return session

    async def _close_unclaimed(self, key: str, seeding: asyncio.Task[_Session[Opened, Artefacts]]) -> None:
        """Close a session of a cancelled seed, unless another seed of the same session succeeded."""
        async with self._seeding.setdefault(key, asyncio.Lock()):
            if not seeding.cancelled() and seeding.exception() is None:
                session = seeding.result()
                session.claims -= 1
                if not session.claims and self._sessions.get(key) is session:
                    await self._close_quietly(key)

    async def _close(self, key: str) -> None:
        session = self._sessions.get(key)
        if session is None:
            return
        # A verification that still waits for the release has no task to cancel, but fails because of ``lost``.
        session.lost = session.lost or InfrastructureError("the session was closed", kind=FailureKind.SESSION_LOST)
        if session.work is not None:
            session.work.cancel()
        await self._release(session, keep=False)
        await self._sandboxes.delete_snapshots(session.snapshots)
        self._sessions.pop(key, None)

    async def _verify(self, session: _Session[Opened, Artefacts], response: Mapping[str, Any]) -> Grade:
        with session.in_use():
            await self._release(session, keep=True)
            async with session.lock:
                if session.grade is None:
                    session.grade = await self._until_closed(session, self._grade(session, response))
                    await self._sandboxes.delete_snapshots(session.snapshots)
                    session.artefacts = None
                return session.grade

    async def _until_closed[T](self, session: _Session[Opened, Artefacts], work: Coroutine[Any, Any, T]) -> T:
        session.work = task = self._work.spawn(work)
        try:
            return await task
        except (RolloutError, asyncio.CancelledError):
            if session.lost is not None:
                raise session.lost from None
            raise
        finally:
            session.work = None

    async def _start(
        self, row: _Row, needs: SandboxNeeds | None, checkpoint: _Row | None, *, program: bool
    ) -> _Session[Opened, Artefacts]:
        snapshot = checkpoint["snapshot"] if checkpoint else None
        sandbox = None if needs is None else await self._sandboxes.start(needs, snapshot)
        tools = None
        try:
            with task_errors("the session could not be prepared", FailureKind.ENVIRONMENT_ERROR):
                tools = await self._task.tools.open(sandbox, needs)
                if checkpoint is None:
                    await self._task.prepare(row, tools)
                else:
                    await tools.resume(checkpoint["state"], checkpoint["lost"])
                if not program:
                    await tools.start_sessions(offered_tools(row))
        except BaseException:
            await self._end(sandbox, tools)
            raise
        return _Session(row, needs, sandbox, tools)

    async def _release(self, session: _Session[Opened, Artefacts], *, keep: bool) -> None:
        uses = [use for use in session.uses if use.cancel()]
        await asyncio.gather(*uses, return_exceptions=True)
        async with session.lock:
            session.last_used = time.monotonic()
            if not session.open:
                return
            try:
                if keep and session.lost is None:
                    with task_errors("the artefacts could not be extracted", FailureKind.SESSION_LOST):
                        taking = self._task.artefacts(session.row, session.tools)
                        session.artefacts = await self._until_closed(session, taking)
                    if session.sandbox is not None and not await session.sandbox.has_room():
                        # Without free space on the disk, the policy's files may be incomplete.
                        raise InfrastructureError("the disk that sandboxes are kept on is full")
            except AgentError as error:
                session.fault = error
            except TaskError as error:
                session.lost = error
            except RolloutError as error:
                # No artefacts are left to grade, so only the whole rollout can be retried.
                session.lost = InfrastructureError(error.reason, kind=FailureKind.SESSION_LOST)
            except BaseException as error:
                session.lost = InfrastructureError(
                    f"the artefacts were not extracted: {error!r}", kind=FailureKind.SESSION_LOST
                )
                raise
            finally:
                sandbox, session.sandbox, session.open = session.sandbox, None, False
                try:
                    if keep and sandbox is not None:
                        with suppress(RolloutError):  # without a live sandbox, there is nothing to read
                            session.egress = await sandbox.egress()
                finally:
                    await self._end(sandbox, session.tools)

    async def _end(self, sandbox: Sandbox | None, tools: Opened | None) -> None:
        try:
            if sandbox is not None:
                await self._sandboxes.stop(sandbox)
        finally:
            if tools is not None:
                await tools.close()

    async def _grade(self, session: _Session[Opened, Artefacts], response: Mapping[str, Any]) -> Grade:
        if session.fault is not None:
            return _grade_of(session.fault)
        if session.lost is not None:
            raise session.lost

        open_sandbox = partial(self._sandboxes.opened, session.needs or SandboxNeeds())
        with task_errors("grading failed", FailureKind.VERIFIER_ERROR):
            artefacts = cast(Artefacts, session.artefacts)  # None only if the task extracted None
            try:
                grade = await self._task.grade(session.row, artefacts, response, open_sandbox)
            except AgentError as error:
                return _grade_of(error)
            if isinstance(grade, Grade):
                return grade
            raise TypeError(f"{type(self._task).__name__}.grade() returned no Grade but {type(grade).__name__}")

    async def _close_quietly(self, key: str) -> None:
        try:
            await self.close(key)
        except InfrastructureError:
            logger.exception("could not close session %s", key)
            self._sessions.pop(key, None)


def _grade_of(fault: AgentError) -> Grade:
    return Grade(0.0, "unreadable" if isinstance(fault, UnreadableAnswer) else EXHAUSTED, fault.reason)
