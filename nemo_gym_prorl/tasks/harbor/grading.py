# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Grade a Harbor rollout: verify its steps in order, and attribute a missing verdict.

A control run first shows that the tests can be passed on this machine: the task's own solution is run and verified,
once per image, digest and tools. If the solution earns no reward in two attempts, every rollout of the task fails with
a :class:`TaskError`: the tests may need a network, or processes of the agent, which have ended. Refusing only failed
rollouts would bias the sample.

If the solution gets a verdict, but the agent's work gets none in two verifications, the agent prevented the verdict
and gets reward 0. Without a solution, a missing verdict is a :class:`TaskError`.

``strict: auto`` grades positive rewards again in the mode ``strict``, if the task's own solution earns its reward in
that mode too. So files outside of the working folder earn a reward only in tasks whose solution needs such files.
"""

from __future__ import annotations

import asyncio
import logging
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from nemo_gym_prorl.failures import AgentError, CallerError, TaskError
from nemo_gym_prorl.tasks.harbor.agent_phase import AgentPhase, SetupFailed
from nemo_gym_prorl.tasks.harbor.artifacts import Archives, keep
from nemo_gym_prorl.tasks.harbor.located_task import LocatedTask
from nemo_gym_prorl.tasks.harbor.rewards import Outcome, below_minimum, scalar, total
from nemo_gym_prorl.tasks.harbor.verification import (
    TIMED_OUT,
    GradingMode,
    VerifierSettings,
    collected,
    modes_of,
    step_name,
    verify,
)
from nemo_gym_prorl.tasks.task import EXHAUSTED, Grade, OpenSandbox


logger = logging.getLogger(__name__)

RETRY_CONTROL_S = 600.0
"""Seconds before a control run without a reward is repeated: the machine may have been at fault."""

DETAIL_CHARS = 1000


class HarborVerdict(StrEnum):
    """Verdicts on Harbor tasks."""

    PASSED = "passed"
    """The reward is at least 1."""
    PARTIAL = "partial"
    FAILED = "failed"
    """The reward is at most 0."""
    TAMPERED = "tampered"
    """The tests gave no verdict on the agent's work, but give one on the task's own solution."""
    EXHAUSTED = EXHAUSTED


@dataclass(slots=True)
class HarborWork:
    """Result of the agent's phase.

    Attributes:
        states: names of the snapshots after the steps that have ended, in order.
        snapshots: names of all snapshots to delete with the session: ``states``, and those of control runs.
        failed: why the next step could not be set up; empty otherwise.
    """

    folder: str
    states: Sequence[str]
    snapshots: list[str]
    failed: str = ""


@dataclass(frozen=True, slots=True)
class _Control:
    """Result of a control run."""

    problem: str = ""  # why the solution earns no reward
    works_strictly: bool = False  # in the mode ``strict`` the solution earns no less, or at least 1
    snapshots: list[str] = field(default_factory=list)  # until a rollout takes them over to delete them


@dataclass(frozen=True, slots=True)
class _Verified:
    """Result of verifying the steps."""

    rewards: Sequence[Mapping[str, float]]  # by key, for each step that counts
    outcomes: Sequence[Outcome]  # of each step that was verified
    note: str = ""  # why later steps do not count, or why there is no verdict
    no_verdict: bool = False


class Grader:
    """Grader of rollouts; see the module."""

    def __init__(self, settings: VerifierSettings, snapshot_name: str) -> None:
        self._settings = settings
        self._snapshot_name = snapshot_name
        self._controls: dict[tuple[str, ...], tuple[float, asyncio.Task[_Control]]] = {}

    async def grade(self, task: LocatedTask, work: HarborWork, open_sandbox: OpenSandbox) -> Grade:
        """Grade a rollout.

        Raises:
            TaskError: the task's own solution earns no reward here, or there is neither a verdict nor a solution.
            InfrastructureError: the machine failed.
        """
        strict = self._settings.strict is True
        control = _Control()
        if task.has_solution:
            control = await self._control(task, work, open_sandbox)
            if control.problem:
                raise TaskError(
                    f"{task.row.instance_id}: the task's own solution earns nothing here: {control.problem}; "
                    f"{self._advice(task)}the tests may also need services of the agent, which do not run during them"
                )
        verified = await self._verified(task, work, strict, open_sandbox)
        # Only positive rewards are graded strictly, since the mode can only lower a reward. If the solution earns less
        # in that mode, the first verdict stands: a lower reward would not be the agent's fault, and bias the sample.
        if control.works_strictly and not verified.no_verdict and self._scalar(task, verified) > 0:
            strict = True
            verified = await self._verified(task, work, strict, open_sandbox)
        fields = self._fields(task, verified, modes_of(task, strict))
        if self._settings.artifacts_folder is not None:
            fields["artifacts"] = await self._keep(task, work, open_sandbox)
        if verified.no_verdict:
            return Grade(0.0, HarborVerdict.TAMPERED, verified.note[:DETAIL_CHARS], fields)
        reward = self._scalar(task, verified)
        verdict = HarborVerdict.FAILED if reward <= 0 else HarborVerdict.PARTIAL
        return Grade(reward, HarborVerdict.PASSED if reward >= 1 else verdict, verified.note[:DETAIL_CHARS], fields)

    async def _keep(self, task: LocatedTask, work: HarborWork, open_sandbox: OpenSandbox) -> list[dict[str, Any]]:
        """Write the artifacts of all steps to a new folder; return the manifests, with ``destination`` on the host."""
        prefix = re.sub(r"[^A-Za-z0-9_.-]", "-", task.row.instance_id)[:100]
        target = Path(await asyncio.to_thread(tempfile.mkdtemp, "", f"{prefix}-", self._settings.artifacts_folder))
        kept = []
        for step, state in zip(task.steps, work.states, strict=False):
            step_folder = target / "steps" / step.name if step else target
            archives: Archives = {}
            async with AsyncExitStack() as stack:
                collecting = collected(task, step, state, work.folder, open_sandbox, self._settings)
                try:
                    archives = await stack.enter_async_context(collecting)
                except (AgentError, SetupFailed) as error:
                    logger.warning("%s: no artifacts can be kept: %s", step_folder, error.reason)
                manifest = await asyncio.to_thread(keep, task.artifacts(step), archives, step_folder / "artifacts")
            kept += [entry | {"destination": str(step_folder / entry["destination"])} for entry in manifest]
        return kept

    def _advice(self, task: LocatedTask) -> str:
        needs = task.row.harbor.downloads
        advice = []
        if needs.sets and self._settings.verifier_tools is None:
            advice.append("the tests install Python packages, so set verifier_tools (prorl image tools); ")
        if needs.apt:
            advice.append(f"the tests install {', '.join(needs.apt)}, which the image could hold; ")
        if needs.urls:
            advice.append(f"the tests download {', '.join(needs.urls)}; ")
        if task.row.network is None:
            advice.append("the task sets no network: the server's is none by default, where Harbor's is public; ")
        return "".join(advice)

    def _fields(self, task: LocatedTask, verified: _Verified, modes: Sequence[GradingMode]) -> dict[str, Any]:
        steps = [
            {"name": step_name(step), "rewards": dict(rewards)}
            for step, rewards in zip(task.steps, verified.rewards, strict=False)
        ]
        strategy = task.config.multi_step_reward_strategy
        return {
            "rewards": {} if verified.no_verdict else total(verified.rewards, strategy),
            "steps": steps,
            "grading_mode": modes[0].value,
            "verifier_output": verified.outcomes[-1].output if verified.outcomes else "",
        }

    def _scalar(self, task: LocatedTask, verified: _Verified) -> float:
        """Return the reward for training: the mean of the steps or the last step's; steps that do not count give 0."""
        key = self._settings.reward_key
        steps = [{key: scalar(rewards, key) or 0.0} for rewards in verified.rewards]
        return total(steps, task.config.multi_step_reward_strategy)[key]

    async def _verified(
        self, task: LocatedTask, work: HarborWork, strict: bool, open_sandbox: OpenSandbox
    ) -> _Verified:
        """Verify the steps, again if a verdict is missing. Raises TaskError without a verdict and without a solution;
        with a solution, the agent is charged for a missing verdict."""
        verified = await self._verify_steps(task, work, strict, open_sandbox)
        if not verified.no_verdict:
            return verified
        if not task.has_solution:
            output = verified.outcomes[-1].output[-DETAIL_CHARS:] if verified.outcomes else ""
            raise TaskError(
                f"{task.row.instance_id}: the tests gave no verdict ({verified.note}), and there is no solution to "
                f"compare with; {self._advice(task)}the tests' output ended with: {output}"
            )
        if verified.note.startswith(TIMED_OUT):
            # A second timeout may exceed EVAL's budget: an agent could get a failed rollout instead of the reward 0.
            return verified
        # The machine may have been at fault for the first result.
        return await self._verify_steps(task, work, strict, open_sandbox)

    async def _verify_steps(
        self, task: LocatedTask, work: HarborWork, strict: bool, open_sandbox: OpenSandbox
    ) -> _Verified:
        rewards: list[Mapping[str, float]] = []
        outcomes: list[Outcome] = []
        notes: list[str] = []
        for step, mode, state in zip(task.steps, modes_of(task, strict), work.states, strict=False):
            outcome = await verify(task, step, state, mode, work.folder, open_sandbox, self._settings)
            outcomes.append(outcome)
            if outcome.rewards is None:
                return _Verified(rewards, outcomes, outcome.problem, no_verdict=True)
            rewards.append(outcome.rewards)
            notes += {outcome.problem} - {"", *notes}
            if note := below_minimum(outcome.rewards, step.min_reward if step else None):
                return _Verified(rewards, outcomes, "; ".join([*notes, f"step {step_name(step)}: {note}"]))
        if work.failed:
            return _Verified(rewards, outcomes, work.failed, no_verdict=True)
        # A step that the agent did not begin counts as 0, so that ending early does not raise the mean.
        missing = len(task.steps) - len(work.states)
        if missing:
            notes.append(f"{missing} of {len(task.steps)} steps were not begun")
        return _Verified([*rewards, *([{}] * missing)], outcomes, "; ".join(notes))

    async def _control(self, task: LocatedTask, work: HarborWork, open_sandbox: OpenSandbox) -> _Control:
        """Return the result of the task's control run, which continues if a waiting rollout is cancelled."""
        harbor = task.row.harbor
        key = (task.row.image, harbor.digest, str(self._settings.verifier_tools))
        began, playing = self._controls.get(key, (0.0, None))
        if playing is None or _is_stale(playing, began):
            playing = asyncio.create_task(self._play_solution(task, open_sandbox))
            self._controls[key] = time.monotonic(), playing
            playing.add_done_callback(partial(self._forget_failed, key))
        control = await asyncio.shield(playing)
        work.snapshots += control.snapshots
        control.snapshots.clear()
        return control

    def _forget_failed(self, key: tuple[str, ...], playing: asyncio.Task[_Control]) -> None:
        """Forget a control run that raised; the traceback would keep the results of all waiting rollouts in memory."""
        failed = playing.cancelled() or playing.exception() is not None
        if failed and self._controls.get(key, (0.0, None))[1] is playing:
            del self._controls[key]

    async def aclose(self) -> None:
        """End the control runs."""
        playing = [task for _, task in self._controls.values() if not task.done()]
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)

    async def _play_solution(self, task: LocatedTask, open_sandbox: OpenSandbox) -> _Control:
        control = await self._try_solution(task, open_sandbox)
        if control.problem:  # racy tests may fail on a loaded machine
            failed, control = control, await self._try_solution(task, open_sandbox)
            control.snapshots.extend(failed.snapshots)
        return control

    async def _try_solution(self, task: LocatedTask, open_sandbox: OpenSandbox) -> _Control:
        snapshots: list[str] = []
        ended = ""
        try:
            async with open_sandbox(task.needs()) as sandbox:
                phase = AgentPhase(task, sandbox, self._snapshot_name)
                snapshots = phase.snapshots
                await phase.set_up()
                ended = f"; the solution ended with {await phase.solve()}"
                await phase.finish()
                while not phase.is_last:
                    await phase.begin_next()
                    ended = f"; the solution ended with {await phase.solve()}"
                    await phase.finish()
        except (AgentError, CallerError, SetupFailed) as error:
            return _Control(f"no verdict: it could not be played: {error.reason}", snapshots=snapshots)
        played = HarborWork(phase.folder, snapshots, [])
        verified = await self._verify_steps(task, played, self._settings.strict is True, open_sandbox)
        output = verified.outcomes[-1].output[-DETAIL_CHARS:] if verified.outcomes else ""
        ended += f"; the tests' output ended with: {output}" if output else ""
        if verified.no_verdict:
            return _Control(f"no verdict ({verified.note}){ended}", snapshots=snapshots)
        reward = self._scalar(task, verified)
        if reward <= 0:
            return _Control(f"reward {reward:g}{ended}", snapshots=snapshots)
        is_open = (
            self._settings.strict == "auto" and GradingMode.STRICT in modes_of(task, True) and phase.folder != "/"
        )
        works_strictly, tries = False, 2 if is_open else 0
        while tries and not works_strictly:
            tries -= 1
            again = await self._verify_steps(task, played, True, open_sandbox)
            works_strictly = not again.no_verdict and self._scalar(task, again) >= min(reward, 1)
        return _Control(works_strictly=works_strictly, snapshots=snapshots)


def _is_stale(playing: asyncio.Task[_Control], began: float) -> bool:
    """Return whether a control run must be repeated: it raised, or earned no reward :data:`RETRY_CONTROL_S` ago."""
    if not playing.done():
        return False
    if playing.cancelled() or playing.exception() is not None:
        return True
    return bool(playing.result().problem) and time.monotonic() > began + RETRY_CONTROL_S
