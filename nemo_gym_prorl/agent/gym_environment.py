# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Default handler: drives any Gym resources server through the three stages.

    INIT   POST /seed_session                      on the resources server
    RUN    POST /v1/responses on the model server, then POST /<tool> on the resources server, until done
           POST <release path>                     if the server named a ``release_path`` in INIT
    EVAL   POST /verify
    end    POST /close_session                     if the server has the route (Gym ≥ 0.7, and this project's servers)

The handler treats replies as Gym's ``simple_agent`` does, so rewards are equal. The handler also limits turns and
tokens, ends a rollout at context overflow, keeps partial trajectories, and reports infrastructure errors as failures.

Release is an extension that unmodified servers never see. A server whose answer to ``/seed_session`` has a
``release_path`` gets a POST there before EVAL, and answers when the agent's sandbox is deleted.

Every session is closed, including a session whose seeding was cancelled before the server answered.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from nemo_gym_prorl.agent.conversation import Conversation, fetch_waited_s
from nemo_gym_prorl.agent.gym_http import (
    LEASE_HEADER,
    BackgroundCleanup,
    CookieJar,
    GymServer,
    require_json,
    require_ok,
)
from nemo_gym_prorl.agent.run_rows import empty_response, failure_row, has_items
from nemo_gym_prorl.agent.session_checkpoints import CheckpointRecorder, GymCheckpoint
from nemo_gym_prorl.agent.tool_loop import EnvironmentTools, LoopLimits, ToolErrorState, ToolLoop
from nemo_gym_prorl.async_tasks import start_eager_task
from nemo_gym_prorl.failures import (
    BudgetExceeded,
    CallerError,
    Failure,
    FailureKind,
    InfrastructureError,
    Stage,
    TaskError,
)
from nemo_gym_prorl.rollout.job import Checkpoint, Job, Outcome, Trajectory, Verdict, failure_state
from nemo_gym_prorl.rollout.storage.checkpoints import restart_without_checkpoint


LATE_SEED_S = 600.0
"""Seconds within which a cancelled ``/seed_session`` must answer and its session be closed: the longest start of a
sandbox. Servers with leases end such a session themselves."""

_CLOSE = "/close_session"
_NO_CLOSE = "has no /close_session"
_LEASES = "ends sessions whose lease lapses"
_PATH = re.compile(r"(?:/[A-Za-z0-9._~-]+)+/?")


class OnTimeout(StrEnum):
    """Policy for rollouts that exceed the RUN time budget.

    A rollout without a complete turn, or whose tokens cannot be fetched, fails under every policy: there is nothing to
    train on.
    """

    MASK = "mask"
    """Fail the rollout as ``agent_timeout``: a masked row that keeps its turns."""
    SCORE = "score"
    """Score the rollout in its current state."""
    ZERO = "zero"
    """Reward the rollout with 0, without EVAL."""


def _after_timeout(policy: OnTimeout, job: Job, *, has_tokens: bool) -> Trajectory | Verdict | None:
    """Apply the policy to a rollout that exceeded its RUN budget, and set its ``finish_reason`` unless it fails.

    Args:
        policy: the environment's policy.
        job: the rollout.
        has_tokens: whether the tokens of the rollout's turns have been fetched.

    Returns:
        A trajectory for EVAL to score, a verdict that needs no EVAL, or ``None`` if the rollout fails.
    """
    if policy is OnTimeout.MASK or job.trajectory is None or not (has_tokens and job.progress.turns):
        return None
    job.progress.finish_reason = "timeout"
    if policy is OnTimeout.ZERO:
        return Verdict(0.0, {**job.row, "response": job.trajectory.response, "reward": 0.0})
    return job.trajectory


@dataclass(frozen=True, slots=True)
class GymContext:
    """Servers and settings of one environment, passed to its handler.

    Attributes:
        resources: the resources server; ``None`` if the environment names none.
        model: the first model server of the policy.
        further_models: more model servers of the policy; rollouts are spread over all of them (:meth:`model_of`).
        environment: the environment's name in the service.
        config: the handler's configuration: an instance of its ``Config``, or a dict for a handler without ``Config``.
        limits: limits of the tool loop.
        on_timeout: policy for rollouts that exceed the RUN time budget.
        scores_groups_of: number of rollouts of a group that the resources server scores together.
        settle_s: seconds that a cancelled rollout may take to fetch its tokens, or to close the session of a cancelled
            INIT; must be less than the pipeline's grace for cancelled stages.
        cleanup: sends best-effort cleanup requests in the background.
        tools: the environment's tools, shared by its rollouts.
        checkpoint_turns: turns between two checkpoints; ``None`` to take no checkpoints.
    """

    resources: GymServer | None
    model: GymServer
    environment: str = ""
    config: Any = None
    limits: LoopLimits = field(default_factory=LoopLimits)
    on_timeout: OnTimeout = OnTimeout.MASK
    scores_groups_of: int = 1
    settle_s: float = 3.0
    cleanup: BackgroundCleanup = field(default_factory=BackgroundCleanup)
    tools: EnvironmentTools = field(default_factory=EnvironmentTools)
    further_models: tuple[GymServer, ...] = ()
    checkpoint_turns: int | None = None

    @property
    def models(self) -> tuple[GymServer, ...]:
        return (self.model, *self.further_models)

    def model_of(self, job: Job) -> GymServer:
        """Return the model server of a rollout.

        Rollouts of a group share a prompt, so all of them use one server. Rendezvous hashing of group and server names
        selects the server, so adding a server moves few groups.
        """
        name = job.group or job.id
        return max(self.models, key=lambda server: sha256(f"{server.name} {name}".encode(errors="replace")).digest())


@dataclass(slots=True)
class GymSession:
    """Session of one rollout at its resources server.

    Attributes:
        cookies: cookies that identify the session.
        release_path: path to POST when the agent is done; ``None`` if the server named none.
        awaits_verdict: whether EVAL still needs the session.
        has_tokens: after a failed or cancelled RUN, whether the tokens of its complete turns were fetched.
        closed: whether a close request was sent, or must never be sent.
        unscored: final result of a timed-out rollout that EVAL scores only because its group is scored together.
        tool_errors: tool errors of the rollout.
        checkpoint_path: path to POST to save the session; ``None`` if the server cannot save sessions.
        program_path: path to POST to run a program in the session's sandbox; ``None`` if the server runs none.
        row_fields: fields that the handler adds to the verdict's row.
        checkpoint: checkpoint from which the session was resumed; ``None`` for a new session.
        lease: id that the service renews; a server with leases ends the session once the lease lapses.
    """

    cookies: CookieJar
    release_path: str | None = None
    awaits_verdict: bool = False
    has_tokens: bool = False
    closed: bool = False
    unscored: Verdict | BudgetExceeded | None = None
    tool_errors: ToolErrorState = field(default_factory=ToolErrorState)
    checkpoint_path: str | None = None
    program_path: str | None = None
    row_fields: dict[str, Any] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    lease: str = field(default_factory=lambda: uuid.uuid4().hex)


class GymEnvironmentHandler:
    """Handler of an environment behind a Gym resources server.

    Args:
        context: servers and limits; for a subclass also its configuration.

    Raises:
        CallerError: the environment has no resources server.
    """

    name = "gym_environment"
    seed_headers: Mapping[str, str] = MappingProxyType({})
    """Extra headers of the request that seeds or resumes a session."""

    def __init__(self, context: GymContext) -> None:
        if context.resources is None:
            raise CallerError(f"handler {self.name!r} needs a resources server", field="resources_server")
        self._server = context.resources
        self.context = context
        self._instance_id = uuid.uuid4().hex[:12]

    async def init(self, job: Job) -> GymSession:
        """Seed a session, or resume it from the job's latest checkpoint.

        When cancelled, wait up to ``settle_s`` until the session is closed; after that, a background task closes it.

        Raises:
            CallerError: the server refuses the row (with the server's message), or a fork has no checkpoint left.
            InfrastructureError: the server fails, cannot be reached, or returns an invalid path or time limit.
        """
        seeding = start_eager_task(self._seed_or_resume(job))
        try:
            return await asyncio.shield(seeding)
        except asyncio.CancelledError:
            if not seeding.cancelled():
                closing = self._release_late(job, seeding)
                limit_s = self.context.settle_s if _LEASES in self._server.traits else LATE_SEED_S
                task = self.context.cleanup.start(
                    f"job {job.id}: closing the session of its cancelled INIT", closing, limit_s
                )
                await asyncio.wait({task}, timeout=self.context.settle_s)
            raise

    async def run(self, job: Job, session: GymSession) -> Trajectory:
        """Run the tool loop; ``job.trajectory`` grows with each turn.

        When cancelled, fetch the tokens of the complete turns if the model server returns them within ``settle_s``.
        """
        params = job.row["responses_create_params"]
        job.trajectory = trajectory = Trajectory(empty_response(params), evidence=session)
        conversation = Conversation(self.context.model_of(job), self._attempt_id(job), job.group, job.run)
        loop = ToolLoop(
            self._server,
            session.cookies,
            conversation,
            self.context.limits,
            job.progress,
            hidden=[path for path in (session.release_path, session.checkpoint_path, session.program_path) if path],
            tools=self.context.tools,
            errors=session.tool_errors,
        )
        try:
            recorder = self._checkpoint_recorder(job, session, conversation)
            pending = await recorder.restore(params, trajectory.response) if recorder else None
            await loop.run(params, trajectory.response, pending, recorder.after_turn if recorder else None)
            await conversation.fetch_tokens(trajectory)
        except BaseException:
            fetch = partial(conversation.fetch_tokens, trajectory)
            session.has_tokens = await self._fetch_tokens_in_time(job, fetch)
            raise
        finally:
            job.progress.weight_versions = conversation.weight_versions
            job.progress.log_probs = conversation.log_probs
            job.progress.token_in_rate = conversation.token_in_rate
            for step, versions in zip(job.progress.steps, conversation.weight_versions, strict=False):
                step["weights"] = (versions["first"], versions["last"])
            # In the background, because the rollout's result does not depend on the deletion.
            self.context.cleanup.start(f"job {job.id}: deleting its tokens", conversation.forget())
        session.awaits_verdict = True
        return trajectory

    def timed_out(self, job: Job, session: GymSession) -> Trajectory | Verdict | None:
        """Apply the environment's policy (:class:`OnTimeout`).

        In a group that is scored together, a timed-out rollout takes part in EVAL even if its own result is fixed.
        """
        result = _after_timeout(self.context.on_timeout, job, has_tokens=session.has_tokens)
        if self.context.scores_groups_of > 1 and job.trajectory is not None and not isinstance(result, Trajectory):
            session.unscored = result or BudgetExceeded(Stage.RUN, job.budgets.run)
            result = job.trajectory
        session.awaits_verdict = isinstance(result, Trajectory)
        return result

    async def waited(self, job: Job) -> float:
        """Return the seconds of this RUN attempt in which the agent waited for a backend or for an overloaded tool;
        raise an ``InfrastructureError`` if the model server cannot be reached."""
        refused_s: float = job.session.tool_errors.refused_s
        return refused_s + await fetch_waited_s(self.context.model_of(job), self._attempt_id(job))

    async def release(self, job: Job, session: GymSession) -> None:
        """Post to the server's ``release_path``, if any, and close the session unless EVAL needs it. Raise an
        ``InfrastructureError`` if either fails; EVAL does not run then."""
        try:
            if session.release_path is not None:
                answer = await self._server.post(session.release_path, {}, session.cookies)
                what = f"release at {self._server.name}"
                require_ok(answer, what, FailureKind.SESSION_RELEASE_FAILED, InfrastructureError)
        except BaseException:
            self._close_in_background(job, session)
            raise
        if not session.awaits_verdict:
            await self._close(session)

    async def eval(self, job: Job, trajectory: Trajectory) -> Verdict:
        """Post the trajectory to ``/verify`` and return the verdict.

        Raises:
            TaskError: the verifier refuses the rollout, or answers without a reward.
            InfrastructureError: the verifier fails, cannot be reached, or has lost the session.
            BudgetExceeded: the rollout exceeded its RUN budget, and was scored only for the rest of its group.
        """
        server, session = self._server, trajectory.evidence
        what = f"{server.name} /verify"
        group_fields = self._group_fields(job)
        try:
            row = {**job.row, **group_fields, "response": trajectory.response}
            answer = await server.post("/verify", row, session.cookies)
            require_ok(answer, what, FailureKind.VERIFIER_ERROR, TaskError)
        except InfrastructureError as error:
            if error.kind in (FailureKind.SESSION_LOST, FailureKind.SESSION_EXPIRED):
                # The next attempt seeds its own session; the server may still hold a sandbox of this session.
                self._close_in_background(job, session)
            raise
        result = require_json(answer, what, FailureKind.VERIFIER_ERROR)
        reward = result.get("reward") if isinstance(result, dict) else None
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise TaskError(f"{what} answered without a number in `reward`: {answer.text(500)}")
        for name in group_fields.keys() & result.keys():
            del result[name]
            if name in job.row:
                result[name] = job.row[name]
        if not has_items(result.get("response"), trajectory):
            result["response"] = trajectory.response  # the verifier dropped items that carry tokens
        result |= session.row_fields
        self._close_in_background(job, session)
        unscored: Verdict | BudgetExceeded | None = session.unscored
        if isinstance(unscored, BudgetExceeded):
            raise unscored
        return unscored or Verdict(float(reward), result)

    async def end_scoring(self, job: Job) -> None:
        """Close the session of an abandoned EVAL, which ends a verifier that still runs in its own sandboxes."""
        if job.trajectory is not None:
            await self._close(job.trajectory.evidence)

    async def unreachable(self) -> dict[str, Collection[Stage]]:
        needed: list[tuple[GymServer, Collection[Stage]]] = [
            (self._server, [*Stage]),
            *((model, [Stage.RUN]) for model in self.context.models),
        ]
        reachable = await asyncio.gather(*(server.is_reachable() for server, _ in needed))
        return {server.name: stages for (server, stages), ok in zip(needed, reachable, strict=True) if not ok}

    def on_failure(self, job: Job, stage: Stage | None, failure: Failure) -> Outcome:
        """Return a masked row with the turns sampled so far, and close the session in the background."""
        if job.trajectory is not None:
            response = job.trajectory.response
            self._close_in_background(job, job.trajectory.evidence)
        else:
            response = empty_response(job.row["responses_create_params"])
        return Outcome(failure_state(failure), failure_row(job.row, response, failure), failure=failure)

    async def forget(self, checkpoints: Sequence[Checkpoint]) -> None:
        await self._post_snapshots(checkpoints, "forget")

    async def renew(self, checkpoints: Sequence[Checkpoint]) -> None:
        await self._post_snapshots(checkpoints, "renew")

    async def _post_snapshots(self, checkpoints: Sequence[Checkpoint], action: str) -> None:
        by_path: dict[str, list[str]] = {}
        for checkpoint in checkpoints:
            if (snapshot := checkpoint.state.session["snapshot"]) is not None:
                by_path.setdefault(checkpoint.state.path, []).append(snapshot)
        for path, snapshots in by_path.items():
            answer = await self._server.post(f"{path}/{action}", {"snapshots": snapshots}, CookieJar())
            require_ok(answer, f"{self._server.name} {path}/{action}", FailureKind.PROVIDER_UNAVAILABLE)

    def unpack(self, packed: bytes) -> GymCheckpoint:
        return GymCheckpoint.unpack(packed)

    async def _seed_or_resume(self, job: Job) -> GymSession:
        """Resume the session from the latest checkpoint that the server accepts, else seed a new session; raise a
        ``CallerError`` for a fork without a checkpoint or a refused row."""
        refusal = ""
        while (checkpoint := job.latest_checkpoint) is not None:
            path = f"{checkpoint.state.path}/resume"
            body = {"row": job.row, "checkpoint": checkpoint.state.session}
            try:
                session = await self._seed(job, path, body)
            except CallerError as error:
                refusal = error.reason
                job.drop_checkpoint(checkpoint)
                continue
            session.checkpoint = checkpoint
            job.resume_at(checkpoint)
            return session
        if refusal or job.forked_from is not None:
            restart_without_checkpoint(job, refusal)
        return await self._seed(job, "/seed_session", job.row)

    async def _seed(self, job: Job, path: str, body: dict[str, Any]) -> GymSession:
        server = self._server
        session = GymSession(CookieJar())
        what = f"{server.name} {path}"
        answer = await server.call(
            "POST", path, body, session.cookies, {LEASE_HEADER: session.lease, **self.seed_headers}
        )
        require_ok(answer, what, FailureKind.PROVIDER_UNAVAILABLE)
        try:
            content = require_json(answer, what, FailureKind.PROVIDER_UNAVAILABLE)
            reply = content if isinstance(content, dict) else {}
            for name in ("release_path", "checkpoint_path", "lease_path", "program_path"):
                value = reply.get(name)
                if value is not None and not (isinstance(value, str) and _PATH.fullmatch(value)):
                    raise InfrastructureError(f"{what} answered with an invalid {name}: {value!r:.200} is not a path")
            if (limit_s := reply.get("time_limit_s")) is not None:
                job.budgets = job.budgets.model_copy(update={"run": min(limit_s, job.budgets.run)})
        except Exception:
            self.context.cleanup.start(f"closing a session at {server.name}", self._close(session))
            raise
        session.release_path, session.checkpoint_path = reply.get("release_path"), reply.get("checkpoint_path")
        session.program_path = reply.get("program_path")
        if (lease_path := reply.get("lease_path")) is not None:
            server.traits.add(_LEASES)
            self.context.cleanup.leases[session.lease] = job, server, lease_path
        return session

    def _checkpoint_recorder(
        self, job: Job, session: GymSession, conversation: Conversation
    ) -> CheckpointRecorder | None:
        every, path = self.context.checkpoint_turns, session.checkpoint_path
        if path is None or (every is None and session.checkpoint is None):
            return None
        return CheckpointRecorder(
            self._server,
            path,
            session.cookies,
            conversation,
            job.progress,
            every,
            job.keep_checkpoint,
            lambda: session.tool_errors.refused_s,
            session.checkpoint,
        )

    def _attempt_id(self, job: Job) -> str:
        """Return the id of the current RUN attempt at the model server. The id is unique over attempts, agents and
        restarts, so tokens of two attempts never mix."""
        return f"{job.id}.{self._instance_id}.{job.number}.{job.times[Stage.RUN].attempts}"

    def _group_fields(self, job: Job) -> dict[str, Any]:
        """Return the fields by which a verifier groups rollouts, named as in Gym 0.7 and in Gym 0.4; empty for a job
        that is scored alone. A cohort that is scored again has a new id, so a verifier never mixes rollouts of both
        tries."""
        if job.member is None:
            return {}
        cohort = f"{job.group}.{self._instance_id}.{job.member.cohort}"
        gym_07 = {"_ng_group_id": cohort, "_ng_group_attempt": 0, "_ng_rollout_index": job.member.index}
        return {**gym_07, "prompt_id": cohort}

    async def _release_late(self, job: Job, seeding: asyncio.Future[GymSession]) -> None:
        await self.release(job, await seeding)

    async def _fetch_tokens_in_time(self, job: Job, fetch_tokens: Callable[[], Awaitable[None]]) -> bool:
        fetched = False

        async def fetch() -> None:
            nonlocal fetched
            await fetch_tokens()
            fetched = True

        task = self.context.cleanup.start(f"job {job.id}: fetching its tokens", fetch())
        await asyncio.wait({task}, timeout=self.context.settle_s)
        task.cancel()  # a delivered row must not change
        return fetched

    async def _close(self, session: GymSession) -> None:
        """Post to ``/close_session`` once, if the server has the route. Gym's route accepts an empty body, so a 422
        comes from another route of that name, and there is nothing to close."""
        server = self._server
        if session.closed or _NO_CLOSE in server.traits:
            return
        session.closed = True
        self.context.cleanup.leases.pop(session.lease, None)
        answer = await server.post(_CLOSE, {}, session.cookies)
        if answer.status in (404, 405, 422):
            server.traits.add(_NO_CLOSE)
            return
        require_ok(answer, f"{server.name} {_CLOSE}", FailureKind.SESSION_RELEASE_FAILED, InfrastructureError)

    def _close_in_background(self, job: Job, session: GymSession) -> None:
        if not session.closed:
            self.context.cleanup.start(f"job {job.id}: closing its session", self._close(session))
