# SPDX-License-Identifier: Apache-2.0
"""The life of coding sessions: seeded, worked in, released, graded, closed.

Invariants:

- A session owns at most one sandbox, and it is the agent's. Grading happens in sandboxes of its own, after the agent's
  is gone.
- Release, verify and close may come in any order, more than once and at the same time; each does its work once.
- Work on sandboxes runs to its end though its caller is cancelled, since a sandbox whose start was cut off half-way is
  nobody's any more. A session whose seeding nobody waited for is closed at once.
- What the agent did to its sandbox is scored: one that it used up is a reward of 0, never a lost session.
- Whoever vanishes is swept: a session that nobody touched for ``ttl_s`` is closed.
- Starts of sandboxes, the costliest thing here, are bounded by one semaphore for agents and graders together.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from nemo_gym_prorl.failures import AgentError, CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.tasks.code.grading import Grade, GradingLimits, Reason, grade
from nemo_gym_prorl.tasks.code.humaneval import Problem, problem_for
from nemo_gym_prorl.tasks.code.tools import SOLUTION_FILE, BadArguments, parse_arguments
from nemo_gym_prorl.tasks.code.workspace import Artefact, Equipment, ToolLimits, Workspace
from nemo_gym_prorl.tasks.sandbox import Sandbox


logger = logging.getLogger(__name__)

REMEMBERED_CLOSES = 100_000
"""How many closed caller-assigned sessions are remembered, so that a late seed can't bring one back."""

EXHAUSTED = "Error: {reason}. Its files are gone, and the task is over: answer without calling a tool."
SUBMITTED = f"Submitted. {SOLUTION_FILE} is tested as it is now. The task is over: answer without calling a tool."
ALREADY_SUBMITTED = "Error: the solution was submitted already, the workspace is closed."


@dataclass(frozen=True, slots=True)
class CodeLimits:
    """Bounds of the environment.

    Attributes:
        tools: of one tool call.
        grading: of one candidate.
        max_sandbox_starts: how many sandboxes may be starting at a time.
        stop_timeout_s: seconds that a sandbox may take to stop.
        session_ttl_s: seconds after which an untouched session is closed.
    """

    tools: ToolLimits = field(default_factory=ToolLimits)
    grading: GradingLimits = field(default_factory=GradingLimits)
    max_sandbox_starts: int = 4
    stop_timeout_s: float = 60.0
    session_ttl_s: float = 3600.0


@dataclass(slots=True)
class _Session:
    problem: Problem
    sandbox: Sandbox | None
    workspace: Workspace
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    submitted: bool = False
    artefact: Artefact | None = None
    lost: InfrastructureError | None = None
    exhausted: str | None = None
    verdict: Grade | None = None
    touched: float = field(default_factory=time.monotonic)
    calls: int = 0
    claimed: bool = False


@dataclass(slots=True)
class _Seeding:
    """Whoever seeds one key, one after the other."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    seeds: int = 0


class CodeSessions:
    """All sessions of one environment.

    Args:
        start_sandbox: starts a fresh sandbox, all of one image; whatever it raises counts as ``provider_unavailable``.
        root: a folder of each sandbox that uploads reach; the agent works in ``<root>/workspace``.
        limits: bounds.
    """

    def __init__(self, start_sandbox: Callable[[], Awaitable[Sandbox]], root: str, limits: CodeLimits) -> None:
        self._start_sandbox = start_sandbox
        self._root = root.rstrip("/")
        self._limits = limits
        self._starts = asyncio.Semaphore(limits.max_sandbox_starts)
        self._sessions: dict[str, _Session] = {}
        self._seeding: dict[str, _Seeding] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._equipment: Equipment | None = None

    async def seed(self, key: str, row: Mapping[str, Any], *, once: bool = False) -> None:
        """Start a session: a sandbox with the problem's stub in it.

        Seeding a live session again with the same task does nothing; with another task it replaces the session.

        Args:
            key: the session's key.
            row: the dataset row.
            once: the caller chose the key, and a key that was closed stays closed.

        Raises:
            CallerError: the row names no problem, or the key was closed.
            InfrastructureError: no sandbox could be had.
        """
        problem = problem_for(row)
        task = self._spawn(self._seed(key, problem, once))
        try:
            session = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda _: self._spawn(self.close_unclaimed(key)))
            raise
        session.claimed = True

    async def call(self, key: str, tool: str, arguments: object) -> str:
        """One tool call; returns the observation.

        Raises:
            InfrastructureError: ``session_lost``.
        """
        session = self._require(key)
        session.calls += 1
        try:
            if session.submitted:
                return ALREADY_SUBMITTED
            if session.sandbox is None:
                raise session.lost or InfrastructureError(
                    "the session was released; tools no longer work", kind=FailureKind.SESSION_LOST
                )
            if tool == "submit":
                try:
                    parse_arguments(tool, arguments)
                except BadArguments as error:
                    return str(error)
                session.submitted = True
                return SUBMITTED
            try:
                return await session.workspace.call(tool, arguments)
            except AgentError as error:
                session.exhausted = error.reason
                return EXHAUSTED.format(reason=error.reason)
        finally:
            session.calls -= 1
            session.touched = time.monotonic()

    async def release(self, key: str) -> None:
        """Take the solution out and destroy the agent's sandbox; returns when it is gone. Unknown keys are no error.

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
            while len(self._closed) > REMEMBERED_CLOSES:
                self._closed.popitem(last=False)
        await asyncio.shield(self._spawn(self._close(key)))

    async def close_unclaimed(self, key: str) -> None:
        """Close a session whose seeding brought nobody an answer."""
        session = self._sessions.get(key)
        if session is not None and not session.claimed:
            await self._close_quietly(key)

    async def verify(self, key: str) -> Grade:
        """Grade the session's solution, once; asked again, the same verdict.

        Raises:
            InfrastructureError: ``session_lost``: nothing is left to grade; ``provider_unavailable`` or
                ``verifier_error``: it could not be graded.
        """
        return await asyncio.shield(self._spawn(self._verify(self._require(key))))

    async def sweep(self) -> int:
        """Close the sessions that nobody touched for the time to live; returns how many."""
        horizon = time.monotonic() - self._limits.session_ttl_s
        idle = [key for key, session in self._sessions.items() if not session.calls and session.touched < horizon]
        for key in idle:
            logger.warning("session %s was not touched for %g s and is closed", key, self._limits.session_ttl_s)
            await self._close_quietly(key)
        return len(idle)

    async def aclose(self) -> None:
        """Close all sessions; sandboxes that are just starting are awaited and stopped."""
        self._closing = True
        await asyncio.gather(*(self._close_quietly(key) for key in list(self._sessions)))
        while self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def live_sandboxes(self) -> int:
        """How many sessions hold a sandbox."""
        return sum(session.sandbox is not None for session in self._sessions.values())

    def _require(self, key: str) -> _Session:
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

    async def _seed(self, key: str, problem: Problem, once: bool) -> _Session:
        async with self._one_at_a_time(key):
            session = self._sessions.get(key)
            if session is not None and session.problem is problem and session.sandbox is not None:
                return session
            if session is not None:
                await self._close(key)
            self._refuse_closed(key, once)
            session = await self._start(problem)
            if self._closing or (once and key in self._closed):
                await self._stop(session)
                self._refuse_closed(key, once)
                raise InfrastructureError("the server is shutting down", kind=FailureKind.SHUTDOWN)
            self._sessions[key] = session
            return session

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
        if session is not None:
            await self._release(session, keep=False)
            self._sessions.pop(key, None)

    async def _verify(self, session: _Session) -> Grade:
        await self._release(session, keep=True)
        async with session.lock:
            session.touched = time.monotonic()
            if session.verdict is None:
                session.verdict = await self._grade(session)
                session.artefact = None
            return session.verdict

    async def _start(self, problem: Problem) -> _Session:
        sandbox = await self._open()
        workspace = Workspace(sandbox, f"{self._root}/workspace", self._limits.tools)
        session = _Session(problem, sandbox, workspace)
        try:
            if self._equipment is None:
                self._equipment = await workspace.look()
                if not self._equipment.kernel:
                    logger.warning("the sandbox image has no ipykernel: the python tool keeps nothing between calls")
            await workspace.prepare({SOLUTION_FILE: problem.stub}, self._equipment)
        except BaseException:
            await self._stop(session)
            raise
        return session

    async def _open(self) -> Sandbox:
        async with self._starts:
            try:
                return await self._start_sandbox()
            except Exception as error:
                raise InfrastructureError(
                    f"no sandbox could be started: {type(error).__name__}: {error}",
                    kind=FailureKind.PROVIDER_UNAVAILABLE,
                    field=getattr(error, "field", None),
                ) from error

    async def _release(self, session: _Session, *, keep: bool) -> None:
        async with session.lock:
            session.touched = time.monotonic()
            if session.sandbox is None:
                return
            try:
                if keep and session.artefact is None:
                    session.artefact = await session.workspace.take_artefact()
            except InfrastructureError as error:
                # Whatever it was, nothing is left to grade: only the whole rollout can be tried again.
                session.lost = InfrastructureError(error.reason, kind=FailureKind.SESSION_LOST)
            except AgentError as error:
                session.exhausted = error.reason
            finally:
                await self._stop(session)

    async def _stop(self, session: _Session) -> None:
        sandbox, session.sandbox = session.sandbox, None
        if sandbox is not None:
            try:
                await self._stop_sandbox(sandbox)
            finally:
                await session.workspace.close()

    async def _stop_sandbox(self, sandbox: Sandbox) -> None:
        try:
            async with asyncio.timeout(self._limits.stop_timeout_s):
                await sandbox.stop()
        except (RuntimeError, OSError) as error:
            raise InfrastructureError(
                f"a sandbox could not be stopped: {type(error).__name__}: {error}",
                kind=FailureKind.SESSION_RELEASE_FAILED,
            ) from error

    @asynccontextmanager
    async def _grading_sandbox(self) -> AsyncIterator[Sandbox]:
        sandbox = await self._open()
        try:
            yield sandbox
        finally:
            await self._stop_sandbox(sandbox)

    async def _grade(self, session: _Session) -> Grade:
        if session.exhausted is not None:
            return Grade(Reason.EXHAUSTED, session.exhausted)
        if session.lost is not None:
            raise session.lost
        artefact = session.artefact or Artefact(None, "nothing was taken out of the sandbox")
        if artefact.source is None:
            return Grade(Reason.NO_SOLUTION, artefact.problem or "")
        return await grade(self._grading_sandbox, session.problem, artefact.source, self._limits.grading, self._root)

    async def _close_quietly(self, key: str) -> None:
        try:
            await self.close(key)
        except InfrastructureError:
            logger.exception("closing session %s", key)
            self._sessions.pop(key, None)
