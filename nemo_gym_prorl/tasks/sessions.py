# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The life of an environment's sessions: seeded, worked in, released, graded, closed.

Invariants:

- A session owns at most one sandbox, and it is the agent's. Grading happens in sandboxes of its own, after the agent's
  is gone. A session of a row that needs no sandbox lives the same life without one.
- Release, verify and close may come in any order, more than once and at the same time; each does its work once.
- Starts and ends of sandboxes run to their end though their caller is cancelled. A sandbox that does not stop is
  stopped again until it does.
- A session whose seeding nobody waits for is made ready no further, and its sandbox ends. Closing a session cuts short
  what is taken out of it and its grading: the sandboxes it is graded in are gone when it is.
- What the agent did to its sandbox is scored: one that it used up is a reward of 0, never a lost session.
- A task that raises what it should not is a failure of ours, never a reward.
- A session is closed when its caller vanishes: one with a lease when :data:`LEASE_SWEEPS` sweeps found that lease not
  renewed, any other when nobody touched it for ``session_ttl_s``.
- Starts of sandboxes, the costliest thing here, are bounded by one semaphore for agents and graders together. An image
  that is not here yet comes before that: a start with another image does not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from nemo_gym_prorl.failures import (
    AgentError,
    CallerError,
    FailureKind,
    InfrastructureError,
    RolloutError,
    TaskError,
)
from nemo_gym_prorl.tasks.sandbox import HasCheckpoints, HasDiskCheck, Sandbox
from nemo_gym_prorl.tasks.task import (
    EXHAUSTED,
    CountsToolCalls,
    Grade,
    OpenTools,
    ResumableTask,
    ResumableTools,
    SandboxNeeds,
    Task,
)


logger = logging.getLogger(__name__)

MAX_CLOSED_KEYS = 100_000
"""How many closed caller-assigned sessions are remembered, so that a late seed can't bring one back."""

LEASE_SWEEPS = 6
"""Sweeps without a renewal until a lease lapses. A server that stood still missed renewals, but made no sweeps."""

STOP_RETRY_S = 5.0  # before a sandbox is stopped again that did not stop

EXHAUSTED_OBSERVATION = "Error: {reason}. Its files are gone, and the task is over: answer without calling a tool."


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of the sessions.

    Attributes:
        max_sandbox_starts: how many sandboxes may be starting at a time.
        stop_timeout_s: seconds that a sandbox may take to stop.
        session_ttl_s: seconds after which an untouched session is closed.
    """

    max_sandbox_starts: int = 4
    stop_timeout_s: float = 60.0
    session_ttl_s: float = 3600.0


@dataclass(slots=True)
class _Session[Opened: OpenTools, Artefacts]:
    """A session; while it is open the agent works in it, and its sandbox lives, if it has one."""

    row: Mapping[str, Any]
    needs: SandboxNeeds | None
    sandbox: Sandbox | None
    tools: Opened
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    open: bool = True
    artefacts: Artefacts | None = None
    lost: RolloutError | None = None
    exhausted: str | None = None
    work: asyncio.Task[Any] | None = None  # is cut short when the session is closed
    grade: Grade | None = None
    touched: float = field(default_factory=time.monotonic)
    calls: int = 0
    claims: int = 0  # callers that seeded it
    lease: str | None = None
    sweeps: int = 0  # since the lease was renewed


@dataclass(slots=True)
class _Seeding:
    """Whoever seeds one key, one after the other."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    seeds: int = 0


class Sessions[Opened: OpenTools, Artefacts]:
    """All sessions of one environment.

    Args:
        task: the environment's.
        start_sandbox: starts a fresh sandbox, or one with files that were kept under a name. Whatever it raises but a
            :class:`CallerError`, which blames the row, counts as ``provider_unavailable``.
        limits: bounds.
        fetch_image: has the image of a sandbox here, where that may take long; fails as ``start_sandbox`` does.
    """

    def __init__(
        self,
        task: Task[Opened, Artefacts],
        start_sandbox: Callable[[SandboxNeeds, str | None], Awaitable[Sandbox]],
        limits: SessionLimits,
        fetch_image: Callable[[SandboxNeeds], Awaitable[None]] | None = None,
    ) -> None:
        self._task = task
        self._start_sandbox = start_sandbox
        self._fetch_image = fetch_image
        self._limits = limits
        self._starts = asyncio.Semaphore(limits.max_sandbox_starts)
        self._sessions: dict[str, _Session[Opened, Artefacts]] = {}
        self._seeding: dict[str, _Seeding] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    @property
    def resumes(self) -> bool:
        """Whether sessions can be kept, and go on elsewhere."""
        return isinstance(self._task, ResumableTask) and self._task.resumes

    async def seed(
        self,
        key: str,
        row: Mapping[str, Any],
        *,
        once: bool = False,
        checkpoint: Mapping[str, Any] | None = None,
        lease: str | None = None,
    ) -> None:
        """Start a session: its sandbox, if the row needs one, and its tools, with what the task puts there.

        Seeding a live session again with the same row does nothing; with another row, or from a checkpoint, it
        replaces the session.

        Args:
            key: the session's key.
            row: the dataset row.
            once: the caller chose the key, and a key that was closed stays closed.
            checkpoint: of another session of the same row, which this one goes on from.
            lease: what the caller will :meth:`renew` as long as it wants the session.

        Raises:
            CallerError: the row is wrong, or the key was closed, or the checkpoint is gone.
            InfrastructureError: no sandbox could be had, or it could not be made ready.
        """
        needs = self._task.needs(row)
        task = self._spawn(self._seed(key, row, needs, once, checkpoint))
        try:
            session = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            task.add_done_callback(lambda _: self._spawn(self._close_unclaimed(key, task)))
            raise
        session.lease = lease

    async def checkpoint(self, key: str, name: str) -> dict[str, Any]:
        """What another session can begin with that goes on from here; between two calls.

        Args:
            key: the session's key.
            name: under which its sandbox's files are kept.

        Raises:
            CallerError: sessions of this task or sandbox can't be kept, or what the policy wrote in this one.
            InfrastructureError: ``session_lost``.
        """
        session = self._require(key)
        sandbox, tools = session.sandbox, cast(OpenTools, session.tools)
        if not self.resumes or not isinstance(tools, ResumableTools):
            raise CallerError("sessions of this environment can't be kept")
        if sandbox is not None and not isinstance(sandbox, HasCheckpoints):
            raise CallerError("the files of this sandbox provider's sandboxes can't be kept")
        session.calls += 1
        try:
            if not session.open:
                raise session.lost or InfrastructureError("it was released", kind=FailureKind.SESSION_LOST)
            state, lost = await tools.save()
            if sandbox is None:
                return {"state": state, "lost": lost, "snapshot": None, "size": 0}
            try:
                kept = await sandbox.checkpoint(name)
            except AgentError as error:
                raise CallerError(error.reason) from error
            lost += ["programs"] if kept.programs else []
            return {"state": state, "lost": lost, "snapshot": kept.name, "size": kept.size}
        finally:
            session.calls -= 1
            session.touched = time.monotonic()

    async def call(self, key: str, tool: str, arguments: object) -> str:
        """One tool call; returns the observation.

        Raises:
            InfrastructureError: ``session_lost``.
        """
        session = self._require(key)
        session.calls += 1
        try:
            if not session.open and not session.tools.over:
                raise session.lost or InfrastructureError(
                    "the session was released; tools no longer work", kind=FailureKind.SESSION_LOST
                )
            try:
                return await session.tools.call(tool, arguments)
            except AgentError as error:
                session.exhausted = error.reason
                return EXHAUSTED_OBSERVATION.format(reason=error.reason)
        finally:
            session.calls -= 1
            session.touched = time.monotonic()

    async def release(self, key: str) -> None:
        """Take out what is to be graded and destroy the agent's sandbox; returns when it is gone.

        Unknown keys are no error.

        Raises:
            InfrastructureError: ``session_release_failed``, the sandbox could not be stopped.
        """
        session = self._sessions.get(key)
        if session is not None:
            await asyncio.shield(self._spawn(self._release(session, keep=True)))

    async def close(self, key: str, *, once: bool = False) -> None:
        """Drop everything of a session. Unknown keys are no error.

        Args:
            key: the session's key.
            once: the caller chose the key, and it must stay closed.

        Raises:
            InfrastructureError: ``session_release_failed``, the sandbox could not be stopped.
        """
        if once:
            self._closed[key] = None
            while len(self._closed) > MAX_CLOSED_KEYS:
                self._closed.popitem(last=False)
        await asyncio.shield(self._spawn(self._close(key)))

    async def verify(self, key: str, response: Mapping[str, Any]) -> Grade:
        """Grade the session, once; asked again, the same grade.

        Args:
            key: the session's key.
            response: the policy's last Responses object.

        Raises:
            TaskError: nobody could be graded on its row.
            InfrastructureError: ``session_lost``: nothing is left to grade; ``provider_unavailable`` or
                ``verifier_error``: it could not be graded.
        """
        return await asyncio.shield(self._spawn(self._verify(self._require(key), response)))

    def tool_use(self, key: str) -> Mapping[str, Mapping[str, int]]:
        """How the session's tools were used, by tool; empty where they don't count."""
        session = self._sessions.get(key)
        tools = session.tools if session is not None else None
        return tools.tool_use() if isinstance(tools, CountsToolCalls) else {}

    def renew(self, leases: Collection[str]) -> None:
        """Go on keeping the sessions with these leases."""
        for session in self._sessions.values():
            if session.lease in leases:
                session.sweeps = 0

    def sweep(self) -> None:
        """Begin to close the sessions whose callers have vanished."""
        horizon = time.monotonic() - self._limits.session_ttl_s
        for key, session in self._sessions.items():
            session.sweeps += session.lease is not None
            if session.sweeps == LEASE_SWEEPS:
                logger.warning("session %s is closed: its caller did not renew the lease", key)
            elif not session.calls and session.touched < horizon:
                logger.warning("session %s was not touched for %g s and is closed", key, self._limits.session_ttl_s)
            else:
                continue
            self._spawn(self._close_quietly(key))

    async def aclose(self) -> None:
        """Close all sessions; sandboxes that are just starting are awaited and stopped."""
        self._closing = True
        await asyncio.gather(*(self._close_quietly(key) for key in list(self._sessions)))
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _require(self, key: str) -> _Session[Opened, Artefacts]:
        session = self._sessions.get(key)
        if session is None:
            raise InfrastructureError(
                "this server knows no such session: it was never seeded, was closed, or the server was restarted",
                kind=FailureKind.SESSION_LOST,
            )
        return session

    def _refuse_closed(self, key: str, once: bool) -> None:
        if once and key in self._closed:
            raise CallerError("this session was closed; choose another id", field="resources_session_id")

    def _spawn[T](self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Whoever waits gets the error too; this line is for work whose caller is gone.
            logger.info("work on a session failed: %s", error)

    async def _seed(
        self,
        key: str,
        row: Mapping[str, Any],
        needs: SandboxNeeds | None,
        once: bool,
        checkpoint: Mapping[str, Any] | None,
    ) -> _Session[Opened, Artefacts]:
        async with self._one_at_a_time(key):
            session = self._sessions.get(key)
            if session is None or not session.open or session.row != row or checkpoint is not None:
                await self.close(key)
                self._refuse_closed(key, once)
                session = await self._start(row, needs, checkpoint)
                if self._closing or (once and key in self._closed):
                    await self._end(session.sandbox, session.tools)
                    self._refuse_closed(key, once)
                    raise InfrastructureError("the server is shutting down", kind=FailureKind.SHUTDOWN)
                self._sessions[key] = session
            session.claims += 1
            return session

    async def _close_unclaimed(self, key: str, seeding: asyncio.Task[_Session[Opened, Artefacts]]) -> None:
        """Close a session whose seeding brought nobody an answer."""
        async with self._one_at_a_time(key):
            if not seeding.cancelled() and seeding.exception() is None:
                session = seeding.result()
                session.claims -= 1
                if not session.claims and self._sessions.get(key) is session:
                    await self._close_quietly(key)

    @asynccontextmanager
    async def _one_at_a_time(self, key: str) -> AsyncIterator[None]:
        seeding = self._seeding.setdefault(key, _Seeding())
        seeding.seeds += 1
        try:
            async with seeding.lock:
                yield
        finally:
            seeding.seeds -= 1
            if not seeding.seeds:
                del self._seeding[key]

    async def _close(self, key: str) -> None:
        session = self._sessions.get(key)
        if session is None:
            return
        # For a verdict that has not begun yet, too: it may still wait for the agent's sandbox to go.
        session.lost = session.lost or InfrastructureError("the session was closed", kind=FailureKind.SESSION_LOST)
        if session.work is not None:
            session.work.cancel()
        await self._release(session, keep=False)
        self._sessions.pop(key, None)

    async def _verify(self, session: _Session[Opened, Artefacts], response: Mapping[str, Any]) -> Grade:
        session.calls += 1
        try:
            await self._release(session, keep=True)
            async with session.lock:
                if session.grade is None:
                    session.grade = await self._until_closed(session, self._grade(session, response))
                    session.artefacts = None
                return session.grade
        finally:
            session.calls -= 1
            session.touched = time.monotonic()

    async def _until_closed[T](self, session: _Session[Opened, Artefacts], work: Coroutine[Any, Any, T]) -> T:
        session.work = task = self._spawn(work)
        try:
            return await task
        except (RolloutError, asyncio.CancelledError):
            if session.lost is not None:
                raise session.lost from None
            raise
        finally:
            session.work = None

    async def _start(
        self, row: Mapping[str, Any], needs: SandboxNeeds | None, checkpoint: Mapping[str, Any] | None
    ) -> _Session[Opened, Artefacts]:
        snapshot = checkpoint["snapshot"] if checkpoint else None
        sandbox = None if needs is None else await self._start_uncancelled(needs, snapshot)
        tools = None
        try:
            with _as_infrastructure_error("the session could not be made ready", FailureKind.PROVIDER_UNAVAILABLE):
                tools = await self._task.tools.open(sandbox, needs)
                if checkpoint is None:
                    await self._task.prepare(row, tools)
                elif isinstance(resumable := cast(OpenTools, tools), ResumableTools):
                    await resumable.resume(checkpoint["state"], checkpoint["lost"])
        except BaseException:
            await self._end(sandbox, tools)
            raise
        return _Session(row, needs, sandbox, tools)

    async def _start_uncancelled(self, needs: SandboxNeeds, snapshot: str | None = None) -> Sandbox:
        """Start a sandbox; a cancelled caller waits until that sandbox is gone."""
        opening = self._spawn(self._open(needs, snapshot))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            await asyncio.shield(self._spawn(self._stop_opened(opening)))
            raise

    async def _stop_opened(self, opening: asyncio.Task[Sandbox]) -> None:
        await asyncio.wait({opening})
        if not opening.cancelled() and opening.exception() is None:
            await self._stop_sandbox(opening.result())

    async def _open(self, needs: SandboxNeeds, snapshot: str | None) -> Sandbox:
        try:
            if self._fetch_image is not None:
                await self._fetch_image(needs)
            async with self._starts:
                return await self._start_sandbox(needs, snapshot)
        except CallerError:
            raise
        except Exception as error:
            raise InfrastructureError(
                f"no sandbox could be started: {type(error).__name__}: {error}",
                kind=FailureKind.PROVIDER_UNAVAILABLE,
                field=getattr(error, "field", None),
            ) from error

    async def _release(self, session: _Session[Opened, Artefacts], *, keep: bool) -> None:
        async with session.lock:
            session.touched = time.monotonic()
            if not session.open:
                return
            try:
                if keep and session.lost is None:
                    with _as_infrastructure_error(
                        "nothing could be taken out of the session", FailureKind.SESSION_LOST
                    ):
                        taking = self._task.artefacts(session.row, session.tools)
                        session.artefacts = await self._until_closed(session, taking)
                    sandbox = session.sandbox
                    if sandbox is not None and isinstance(sandbox, HasDiskCheck) and not await sandbox.has_room():
                        # What is not there may not have found any.
                        raise InfrastructureError("the disk that sandboxes are kept on is full")
            except AgentError as error:
                session.exhausted = error.reason
            except TaskError as error:
                session.lost = error
            except RolloutError as error:
                # Whatever it was, nothing is left to grade: only the whole rollout can be tried again.
                session.lost = InfrastructureError(error.reason, kind=FailureKind.SESSION_LOST)
            except BaseException as error:
                session.lost = InfrastructureError(f"nothing was taken out: {error!r}", kind=FailureKind.SESSION_LOST)
                raise
            finally:
                sandbox, session.sandbox, session.open = session.sandbox, None, False
                await self._end(sandbox, session.tools)

    async def _end(self, sandbox: Sandbox | None, tools: Opened | None) -> None:
        try:
            if sandbox is not None:
                await asyncio.shield(self._spawn(self._stop_sandbox(sandbox)))
        finally:
            if tools is not None:
                await tools.close()

    async def _stop_sandbox(self, sandbox: Sandbox) -> None:
        stopping = self._spawn(sandbox.stop())
        try:
            async with asyncio.timeout(self._limits.stop_timeout_s):
                await asyncio.shield(stopping)
        except Exception as error:
            self._spawn(self._stop_again(sandbox, stopping))
            raise InfrastructureError(
                f"a sandbox could not be stopped: {type(error).__name__}: {error}",
                kind=FailureKind.SESSION_RELEASE_FAILED,
            ) from error

    async def _stop_again(self, sandbox: Sandbox, stopping: asyncio.Task[None]) -> None:
        await asyncio.wait({stopping})
        if stopping.cancelled() or stopping.exception() is not None:
            await asyncio.sleep(STOP_RETRY_S)
            await self._stop_sandbox(sandbox)

    async def _grade(self, session: _Session[Opened, Artefacts], response: Mapping[str, Any]) -> Grade:
        if session.exhausted is not None:
            return Grade(0.0, EXHAUSTED, session.exhausted)
        if session.lost is not None:
            raise session.lost

        @asynccontextmanager
        async def open_sandbox(needs: SandboxNeeds | None = None) -> AsyncIterator[Sandbox]:
            sandbox = await self._start_uncancelled(needs or session.needs or SandboxNeeds())
            try:
                yield sandbox
            finally:
                await asyncio.shield(self._spawn(self._stop_sandbox(sandbox)))

        with _as_infrastructure_error("it could not be graded", FailureKind.VERIFIER_ERROR):
            artefacts = cast(Artefacts, session.artefacts)  # None only if the task's own are
            grade = await self._task.grade(session.row, artefacts, response, open_sandbox)
            if not isinstance(grade, Grade):
                raise TypeError(f"{type(grade).__name__} is no Grade")
            return grade

    async def _close_quietly(self, key: str) -> None:
        try:
            await self.close(key)
        except InfrastructureError:
            logger.exception("closing session %s", key)
            self._sessions.pop(key, None)


@contextmanager
def _as_infrastructure_error(trouble: str, kind: FailureKind) -> Iterator[None]:
    """Whatever a task raises that is no error of ours becomes one."""
    try:
        yield
    except RolloutError:
        raise
    except (Exception, BaseExceptionGroup, GeneratorExit, asyncio.CancelledError) as error:
        logger.exception("%s", trouble)
        raise InfrastructureError(f"{trouble}: {type(error).__name__}: {error}", kind=kind) from error
