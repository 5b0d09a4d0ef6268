# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Harbor task folders as a :class:`~nemo_gym_prorl.tasks.task.Task`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.harbor.agent_phase import AgentPhase, SetupFailed
from nemo_gym_prorl.tasks.harbor.grading import Grader, HarborWork
from nemo_gym_prorl.tasks.harbor.located_task import LocatedTask
from nemo_gym_prorl.tasks.harbor.task_folder import SUBMIT_DESCRIPTION, TOOLS
from nemo_gym_prorl.tasks.harbor.verification import VerifierSettings
from nemo_gym_prorl.tasks.task import Grade, OpenSandbox, SandboxNeeds
from nemo_gym_prorl.tasks.workbench import Workbench
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits, Workspace


NEXT_STEP = "Submitted. Step {number} of {count} follows.\n\n{instruction}"
SETUP_FAILED = "Submitted. The next step could not be set up, so the task is over: answer without calling a tool."


class HarborTools(Workspace):
    """Shell, editor and ``submit`` of one session. ``submit`` ends a step, takes a snapshot and begins the next step.

    Attributes:
        phase: the agent's phase; ``None`` before :meth:`begin`.
        failed: why the next step could not be set up; empty otherwise.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.phase: AgentPhase | None = None
        self.failed = ""
        self._submitting = asyncio.Lock()
        self._submitted_steps = 0

    @property
    def snapshots(self) -> Sequence[str]:
        return self.phase.snapshots if self.phase else ()

    async def call(self, tool: str, arguments: object) -> str:
        async with self._submitting:
            if tool == "submit" and self.phase and not self.phase.is_last and not self.over:
                return await self._end_step(self.phase)
        return await super().call(tool, arguments)

    def tool_use(self) -> Mapping[str, Mapping[str, int]]:
        used = {tool: dict(counts) for tool, counts in super().tool_use().items()}
        if self._submitted_steps:
            submits = used.setdefault("submit", {"calls": 0, "errors": 0, "timeouts": 0, "cut": 0})
            submits["calls"] += self._submitted_steps
        return used

    async def begin(self, phase: AgentPhase) -> None:
        """Close the sessions of the tools; new sessions run as the phase's user in its working folder."""
        self.phase = phase
        await self.close()
        self.work_in(phase.folder, user=phase.user)

    async def _end_step(self, phase: AgentPhase) -> str:
        self._submitted_steps += 1
        await phase.finish()
        user = phase.user
        try:
            instruction = await phase.begin_next()
        except SetupFailed as error:
            self.failed, self.over = error.reason, True
            return SETUP_FAILED
        if phase.user != user:
            await self.begin(phase)
        return NEXT_STEP.format(number=phase.number + 1, count=len(phase.task.steps), instruction=instruction)


class HarborToolSet(Workbench):
    """Tool set that opens :class:`HarborTools`."""

    workspace = HarborTools


class HarborTasks:
    """Harbor task folders.

    Args:
        root: base folder of a relative ``harbor.folder`` in rows.
        variables: environment variables of the server that ``env`` tables of tasks may use.
        snapshot_name: prefix of the names of snapshots.
    """

    def __init__(
        self,
        tools: ToolLimits,
        verifier: VerifierSettings,
        *,
        root: Path,
        variables: Mapping[str, str],
        snapshot_name: str,
    ) -> None:
        self.tools = HarborToolSet(TOOLS, "/", tools, submit_description=SUBMIT_DESCRIPTION)
        self._strict = verifier.strict
        self._root = root
        self._variables = variables
        self._snapshot_name = snapshot_name
        self._grader = Grader(verifier, snapshot_name)

    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds:
        return self._located(row).needs()

    def time_limit_s(self, row: Mapping[str, Any]) -> float | None:
        return self._located(row).agent_total_s()

    async def prepare(self, row: Mapping[str, Any], tools: HarborTools) -> None:
        """Set up the sandbox for the first step. Raises CallerError if the task's folder has changed, or if ``strict``
        lacks a working folder."""
        task = self._located(row)
        await asyncio.to_thread(task.check_folder)
        phase = AgentPhase(task, tools.sandbox, self._snapshot_name)
        await phase.set_up()
        if self._strict is True and phase.folder == "/":
            raise CallerError(
                "strict grading needs a working folder; set it, or the server's strict: auto",
                field="harbor.config.environment.workdir",
            )
        await tools.begin(phase)

    async def artefacts(self, row: Mapping[str, Any], tools: HarborTools) -> HarborWork:
        """End the current step and return the snapshots of all steps."""
        assert tools.phase is not None
        if not tools.failed:
            await tools.phase.finish()
        return HarborWork(tools.phase.folder, tuple(tools.phase.snapshots), tools.phase.snapshots, tools.failed)

    async def grade(
        self, row: Mapping[str, Any], artefacts: HarborWork, response: Mapping[str, Any], open_sandbox: OpenSandbox
    ) -> Grade:
        return await self._grader.grade(self._located(row), artefacts, open_sandbox)

    async def aclose(self) -> None:
        await self._grader.aclose()

    def _located(self, row: Mapping[str, Any]) -> LocatedTask:
        return LocatedTask.of(row, self._root, self._variables)
