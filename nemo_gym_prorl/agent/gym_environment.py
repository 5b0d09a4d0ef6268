# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The default handler: drives *any* Gym resources server through the three stages.

    INIT   POST /seed_session                      on the resources server
    RUN    POST /v1/responses on the model server, then POST /<tool> on the resources server, until done
           POST <release path>                     where the server named one when it was seeded
    EVAL   POST /verify
    end    POST /close_session                     where the server has it (Gym ≥ 0.7, and our own)

It does what Gym's ``simple_agent`` does with the same replies, so rewards are the same, and adds what a service needs:
limits on turns and tokens, a clean end at context overflow, partial trajectories, and failures that are failures.

Server-side release is an extension that unmodified servers never see: a server whose ``/seed_session`` answers with a
``release_path`` is told, before EVAL, that the agent is done, and answers when the agent's sandbox is gone.

A session that the server made is always given back, also one whose seeding was given up before its answer came.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import Any

from nemo_gym_prorl.agent.checkpoints import CheckpointRecorder, GymCheckpoint
from nemo_gym_prorl.agent.conversation import Conversation, waited
from nemo_gym_prorl.agent.gym_http import LEASE_HEADER, BackgroundCleanup, CookieJar, GymServer, json_of, require_ok
from nemo_gym_prorl.agent.run_rows import empty_response, failure_row
from nemo_gym_prorl.agent.tool_loop import LoopLimits, ToolAnswers, ToolErrorState, ToolLoop
from nemo_gym_prorl.failures import (
    BudgetExceeded,
    CallerError,
    Failure,
    FailureKind,
    InfrastructureError,
    Stage,
    TaskError,
)
from nemo_gym_prorl.rollout.handler_calls import start_eager_task
from nemo_gym_prorl.rollout.job import Checkpoint, Job, Outcome, Trajectory, Verdict, failure_state
from nemo_gym_prorl.rollout.storage.checkpoints import restart_without_checkpoint


LATE_SEED_S = 600.0
"""How long a server may still answer a ``/seed_session`` that nobody waits for, before its session is left to it."""

_CLOSE = "/close_session"
_NO_CLOSE = "has no /close_session"
_LEASES = "ends what its callers have left"
_PATH = re.compile(r"(?:/[A-Za-z0-9._~-]+)+/?")


class OnTimeout(StrEnum):
    """What becomes of a rollout whose RUN budget is used up, if its turns so far are there with their tokens. Where
    not a single turn was complete it fails, whatever is asked for: there is nothing to train on."""

    MASK = "mask"
    """It fails as ``agent_timeout``: a masked row that keeps its turns."""
    SCORE = "score"
    """It is scored as it is."""
    ZERO = "zero"
    """Its reward is 0, and it counts like any other."""


def after_timeout(wanted: OnTimeout, job: Job, *, settled: bool) -> Trajectory | Verdict | None:
    """What is asked for, where there is something to train on.

    Args:
        wanted: the environment's choice.
        job: whose RUN budget is used up; its ``finish_reason`` says so unless it fails.
        settled: the tokens of its turns are there.

    Returns:
        What EVAL is to score, or a verdict without EVAL; ``None`` for a failure.
    """
    if wanted is OnTimeout.MASK or job.trajectory is None or not (settled and job.progress.turns):
        return None
    job.progress.finish_reason = "timeout"
    if wanted is OnTimeout.ZERO:
        return Verdict(0.0, {**job.row, "response": job.trajectory.response, "reward": 0.0})
    return job.trajectory


@dataclass(frozen=True, slots=True)
class GymContext:
    """What the service tells a handler about its environment.

    Attributes:
        resources: the resources server; ``None`` where the environment names none.
        model: the policy.
        further_models: other servers of it, which share its rollouts (:meth:`model_of`).
        environment: its name in the service.
        config: the handler's own configuration, as its ``Config`` has it.
        limits: of the tool loop.
        on_timeout: what becomes of a rollout whose RUN budget is used up.
        scores_groups_of: how many siblings the resources server scores together.
        settle_s: how long a rollout that was cut short may take to fetch the tokens of its turns, or to give back the
            session that it was getting; must be less than the pipeline's grace for cancelled stages.
        cleanup: what is said to servers behind a rollout's back.
        tools: what the environment's tools answer to all of its rollouts.
        checkpoint_turns: after so many turns each, a checkpoint is taken; ``None`` for none.
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
    tools: ToolAnswers = field(default_factory=ToolAnswers)
    further_models: tuple[GymServer, ...] = ()
    checkpoint_turns: int | None = None

    @property
    def models(self) -> tuple[GymServer, ...]:
        """All servers of the policy."""
        return (self.model, *self.further_models)

    def model_of(self, job: Job) -> GymServer:
        """The model server that keeps a rollout's tokens. Siblings meet at one, since they share a prompt; which one
        the hash of their name with the server's says, so that one server more moves few of them."""
        name = job.group or job.id
        return max(self.models, key=lambda server: sha256(f"{server.name} {name}".encode(errors="replace")).digest())


@dataclass(slots=True)
class GymSession:
    """One rollout's session at its resources server.

    Attributes:
        cookies: what the server knows it by.
        release_path: where the server wants to be told that the agent is done.
        awaits_verdict: RUN came to its end, so EVAL still needs the session.
        settled: the trajectory has the tokens of its turns, where the model server keeps them.
        closed: the server was told that it is over.
        unscored: what becomes of a rollout that is scored for its siblings' sake only, since its time was up.
        trouble: what RUN has had with tools.
        checkpoint_path: where the server keeps the session, if it can.
        checkpoint: what it began from.
        lease: by which the server keeps it, where that can.
    """

    cookies: CookieJar
    release_path: str | None = None
    awaits_verdict: bool = False
    settled: bool = False
    closed: bool = False
    unscored: Verdict | BudgetExceeded | None = None
    trouble: ToolErrorState = field(default_factory=ToolErrorState)
    checkpoint_path: str | None = None
    checkpoint: Checkpoint | None = None
    lease: str = field(default_factory=lambda: uuid.uuid4().hex)


class GymEnvironmentHandler:
    """See the module's description.

    Args:
        context: the servers and limits, and for a handler derived from this one its configuration.

    Raises:
        CallerError: the environment has no resources server.
    """

    name = "gym_environment"

    def __init__(self, context: GymContext) -> None:
        if context.resources is None:
            raise CallerError(f"handler {self.name!r} needs one", field="resources_server")
        self._server = context.resources
        self.context = context
        self._life = uuid.uuid4().hex[:12]

    async def init(self, job: Job) -> GymSession:
        """Seed a session. Cut short, it is given back before this ends, unless the server takes long to seed it: then
        behind the rollout's back.

        Raises:
            CallerError: the server refuses the row; its message is passed on.
            InfrastructureError: the server fails or cannot be reached, or names a release path that is none.
        """
        seeding = start_eager_task(self._seed_or_resume(job))
        try:
            return await asyncio.shield(seeding)
        except asyncio.CancelledError:
            if not seeding.cancelled():
                late = self._take_back(job, seeding)
                late_s = self.context.settle_s if _LEASES in self._server.traits else LATE_SEED_S
                back = self.context.cleanup.start(f"job {job.id}: giving its late session back", late, late_s)
                await asyncio.wait({back}, timeout=self.context.settle_s)
            raise

    async def run(self, job: Job, session: GymSession) -> Trajectory:
        """Run the tool loop; ``job.trajectory`` grows with each turn. Cut short, it has the tokens of its turns too,
        if the model server gives them in time."""
        params = job.row["responses_create_params"]
        job.trajectory = trajectory = Trajectory(empty_response(params), evidence=session)
        conversation = Conversation(self.context.model_of(job), self._attempt_id(job), job.group, job.run)
        loop = ToolLoop(
            self._server,
            session.cookies,
            conversation,
            self.context.limits,
            job.progress,
            hidden=[path for path in (session.release_path, session.checkpoint_path) if path],
            tools=self.context.tools,
            trouble=session.trouble,
        )
        try:
            keeper = self._keeper(job, session, conversation)
            pending = await keeper.restore(params, trajectory.response) if keeper else None
            await loop.run(params, trajectory.response, pending, keeper.after_turn if keeper else None)
            await conversation.settle()
        except BaseException:
            session.settled = await self._settle_in_time(job, conversation)
            raise
        finally:
            job.progress.weight_versions = conversation.weight_versions
            job.progress.log_probs = conversation.log_probs
            for step, told in zip(job.progress.steps, conversation.weight_versions, strict=False):
                step["weights"] = (told["first"], told["last"])
            # Never in the rollout's own time: it is finished whether or not the server forgets it.
            self.context.cleanup.start(f"job {job.id}: forgetting it", conversation.forget())
        session.awaits_verdict = True
        return trajectory

    def timed_out(self, job: Job, session: GymSession) -> Trajectory | Verdict | None:
        """See :func:`~.timeouts.after_timeout`. Where siblings are scored together each takes part in that."""
        then = after_timeout(self.context.on_timeout, job, settled=session.settled)
        if self.context.scores_groups_of > 1 and job.trajectory is not None and not isinstance(then, Trajectory):
            session.unscored = then or BudgetExceeded(Stage.RUN, job.budgets.run)
            then = job.trajectory
        session.awaits_verdict = isinstance(then, Trajectory)
        return then

    async def waited(self, job: Job) -> float:
        """Seconds of this RUN attempt in which the policy could not act, or waited for a tool that refused to work;
        0.0 if the model server does not tell.

        Raises:
            InfrastructureError: it cannot be reached.
        """
        refused_s: float = job.session.trouble.refused_s
        return refused_s + await waited(self.context.model_of(job), self._attempt_id(job))

    async def release(self, job: Job, session: GymSession) -> None:
        """Tell a server that asked for it that the agent is done; where nothing will be scored, that all is over."""
        try:
            if session.release_path is not None:
                answer = await self._server.post(session.release_path, {}, session.cookies)
                what = f"release at {self._server.name}"
                require_ok(answer, what, FailureKind.SESSION_RELEASE_FAILED, InfrastructureError)
        except BaseException:
            self._close_behind(job, session)
            raise
        if not session.awaits_verdict:
            await self._close(session)

    async def eval(self, job: Job, trajectory: Trajectory) -> Verdict:
        """Verify.

        Raises:
            TaskError: the verifier refuses the rollout, or answers without a reward.
            InfrastructureError: it fails, cannot be reached, or does not know the session any more.
            BudgetExceeded: RUN's was used up, and only its siblings wanted this to be scored.
        """
        server, session = self._server, trajectory.evidence
        what = f"{server.name} /verify"
        place = self._place_in_cohort(job)
        try:
            row = {**job.row, **place, "response": trajectory.response}
            answer = await server.post("/verify", row, session.cookies)
            require_ok(answer, what, FailureKind.VERIFIER_ERROR, TaskError)
        except InfrastructureError as error:
            if error.kind in (FailureKind.SESSION_LOST, FailureKind.SESSION_EXPIRED):
                self._close_behind(
                    job, session
                )  # the next attempt has one of its own; the server may still keep a part
            raise
        result = json_of(answer, what, FailureKind.VERIFIER_ERROR)
        reward = result.get("reward") if isinstance(result, dict) else None
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise TaskError(f"{what} answered without a number in `reward`: {answer.text(500)}")
        for name in place.keys() & result.keys():
            del result[name]
            if name in job.row:
                result[name] = job.row[name]
        if not _has_items(result.get("response"), trajectory):
            result["response"] = trajectory.response  # whoever reads the row needs it, and its tokens
        self._close_behind(job, session)
        unscored: Verdict | BudgetExceeded | None = session.unscored
        if isinstance(unscored, BudgetExceeded):
            raise unscored
        return unscored or Verdict(float(reward), result)

    async def end_scoring(self, job: Job) -> None:
        """Close the session: a verdict that nobody waits for any more goes on until then, in sandboxes of its own."""
        if job.trajectory is not None:
            await self._close(job.trajectory.evidence)

    async def unreachable(self) -> dict[str, Collection[Stage]]:
        """Which of the servers do not answer now, and what needs them."""
        needed: list[tuple[GymServer, Collection[Stage]]] = [
            (self._server, [*Stage]),
            *((model, [Stage.RUN]) for model in self.context.models),
        ]
        answering = await asyncio.gather(*(server.answers() for server, _ in needed))
        return {
            server.name: stages for (server, stages), answers in zip(needed, answering, strict=True) if not answers
        }

    def on_failure(self, job: Job, stage: Stage | None, failure: Failure) -> Outcome:
        """A masked row that carries whatever was sampled, and no reward that anybody could train on."""
        if job.trajectory is not None:
            response = job.trajectory.response
            self._close_behind(job, job.trajectory.evidence)
        else:
            response = empty_response(job.row["responses_create_params"])
        return Outcome(failure_state(failure), failure_row(job.row, response, failure), failure=failure)

    async def forget(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Have what is kept for checkpoints erased."""
        await self._tell_keeper(checkpoints, "forget")

    async def renew(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Have it count as new."""
        await self._tell_keeper(checkpoints, "renew")

    async def _tell_keeper(self, checkpoints: Sequence[Checkpoint], what: str) -> None:
        kept: dict[str, list[str]] = {}
        for checkpoint in checkpoints:
            if (snapshot := checkpoint.state.session["snapshot"]) is not None:
                kept.setdefault(checkpoint.state.path, []).append(snapshot)
        for path, snapshots in kept.items():
            answer = await self._server.post(f"{path}/{what}", {"snapshots": snapshots}, CookieJar())
            require_ok(answer, f"{self._server.name} {path}/{what}", FailureKind.PROVIDER_UNAVAILABLE)

    def unpack(self, packed: bytes) -> GymCheckpoint:
        """The state of a checkpoint that another service has taken."""
        return GymCheckpoint.unpack(packed)

    async def _seed_or_resume(self, job: Job) -> GymSession:
        """A session that goes on from the job's latest checkpoint that is still there; else a fresh one.

        Raises:
            CallerError: the job was forked where there is none any more, or the server refuses the row.
        """
        gone = ""
        while (checkpoint := job.latest_checkpoint) is not None:
            path = f"{checkpoint.state.path}/resume"
            asked = {"row": job.row, "checkpoint": checkpoint.state.session}
            try:
                session = await self._seed(job, path, asked)
            except CallerError as error:
                gone = error.reason
                job.drop_checkpoint(checkpoint)
                continue
            session.checkpoint = checkpoint
            job.resume_at(checkpoint)
            return session
        if gone or job.forked_from is not None:
            restart_without_checkpoint(job, gone)
        return await self._seed(job, "/seed_session", job.row)

    async def _seed(self, job: Job, path: str, asked: dict[str, Any]) -> GymSession:
        server = self._server
        session = GymSession(CookieJar())
        what = f"{server.name} {path}"
        answer = await server.call("POST", path, asked, session.cookies, {LEASE_HEADER: session.lease})
        require_ok(answer, what, FailureKind.PROVIDER_UNAVAILABLE)
        try:
            body = json_of(answer, what, FailureKind.PROVIDER_UNAVAILABLE)
            told = body if isinstance(body, dict) else {}
            for name in ("release_path", "checkpoint_path", "lease_path"):
                if (there := told.get(name)) is not None and not (isinstance(there, str) and _PATH.fullmatch(there)):
                    raise InfrastructureError(f"{what} named a {name} that is no path of that server: {there!r:.200}")
        except InfrastructureError:
            self.context.cleanup.start(f"a session at {server.name}", self._close(session))
            raise
        session.release_path, session.checkpoint_path = told.get("release_path"), told.get("checkpoint_path")
        if (lease_path := told.get("lease_path")) is not None:
            server.traits.add(_LEASES)
            self.context.cleanup.leases[session.lease] = job, server, lease_path
        return session

    def _keeper(self, job: Job, session: GymSession, conversation: Conversation) -> CheckpointRecorder | None:
        """What takes the rollout's checkpoints, or has it begin from one."""
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
            lambda: session.trouble.refused_s,
            session.checkpoint,
        )

    def _attempt_id(self, job: Job) -> str:
        """What a model server knows this attempt by. The next one samples anew; the same id at another agent, before
        a restart of this one, or of a job that was delivered, is another rollout."""
        return f"{job.id}.{self._life}.{job.number}.{job.times[Stage.RUN].attempts}"

    def _place_in_cohort(self, job: Job) -> dict[str, Any]:
        """What a verifier that compares siblings tells them by, in the words of Gym 0.7 and 0.4: a cohort that is
        scored again, after a failure, is another one, so that it never mixes with what is left of the first."""
        if job.member is None:
            return {}
        cohort = f"{job.group}.{self._life}.{job.member.cohort}"
        gym_07 = {"_ng_group_id": cohort, "_ng_group_attempt": 0, "_ng_rollout_index": job.member.index}
        return {**gym_07, "prompt_id": cohort}

    async def _take_back(self, job: Job, seeding: asyncio.Future[GymSession]) -> None:
        await self.release(job, await seeding)

    async def _settle_in_time(self, job: Job, conversation: Conversation) -> bool:
        """Whether the tokens came in time."""
        settled = False

        async def settle() -> None:
            nonlocal settled
            await conversation.settle()
            settled = True

        settling = self.context.cleanup.start(f"job {job.id}: its tokens", settle())
        await asyncio.wait({settling}, timeout=self.context.settle_s)
        settling.cancel()  # a row that is out must not change any more
        return settled

    async def _close(self, session: GymSession) -> None:
        """Tell a server that has the route that the session is over, once. A server that takes no empty body for it
        keeps nothing by cookie."""
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

    def _close_behind(self, job: Job, session: GymSession) -> None:
        if not session.closed:
            self.context.cleanup.start(f"job {job.id}: closing its session", self._close(session))


def _has_items(response: Any, trajectory: Trajectory) -> bool:
    """Whether a response has the items that the tokens of a trajectory belong to."""
    if not isinstance(response, dict) or not trajectory.tokens:
        return isinstance(response, dict)
    sent, output = trajectory.response["output"], response.get("output")
    return (
        isinstance(output, list)
        and len(output) == len(sent)
        and all(_kind(output[turn.item]) == _kind(sent[turn.item]) for turn in trajectory.tokens)
    )


def _kind(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else None
