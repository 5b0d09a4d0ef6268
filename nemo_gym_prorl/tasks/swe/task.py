# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Software engineering as a :class:`~nemo_gym_prorl.tasks.task.Task`: a repository with an issue, and hidden tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from nemo_gym_prorl.tasks.extras import require_extras
from nemo_gym_prorl.tasks.swe.changes import Solution
from nemo_gym_prorl.tasks.swe.grading import Grader, GradingLimits
from nemo_gym_prorl.tasks.swe.instance import row_of
from nemo_gym_prorl.tasks.swe.paths import Protection
from nemo_gym_prorl.tasks.swe.repository import Base, PatchLimits, Repositories
from nemo_gym_prorl.tasks.swe.rows import HANDING_IN, TOOLS
from nemo_gym_prorl.tasks.swe.work_folder import NotTaken
from nemo_gym_prorl.tasks.task import Grade, OpenSandbox, SandboxNeeds
from nemo_gym_prorl.tasks.workbench.workbench import Workbench
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits, Workspace


HANDED_IN = "Submitted. The repository is tested as it is now. The task is over: answer without calling a tool."


class SoftwareEngineering:
    """The task.

    Args:
        tools: bounds of one tool call.
        patches: bounds of what is taken out.
        grading: bounds of grading.

    Raises:
        InfrastructureError: the extra ``swe`` is not installed.
    """

    def __init__(self, tools: ToolLimits, patches: PatchLimits, grading: GradingLimits) -> None:
        require_extras("swe")
        self._repositories = Repositories(patches)
        self._grader = Grader(self._repositories, grading)
        self._bases: WeakKeyDictionary[Workspace, Base] = WeakKeyDictionary()  # what its session's policy starts from
        self.tools = Workbench(TOOLS, "/", tools, handing_in=HANDING_IN, handed_in=HANDED_IN)

    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds:
        """What the row says.

        Raises:
            CallerError: the row is wrong; names the field.
        """
        asked = row_of(row)
        return SandboxNeeds(
            image=asked.image,
            network=asked.network,
            cpu=asked.cpu,
            memory_mib=asked.memory_mib,
            disk_gib=asked.disk_gib,
            processes=asked.processes,
        )

    async def prepare(self, row: Mapping[str, Any], tools: Workspace) -> None:
        """Make the repository ready, without its future, and activate what the image has."""
        instance = row_of(row).swe
        base, _ = await self._repositories.prepare(tools.sandbox, instance, hide=True)
        tools.work_in(instance.repo_folder, base.variables)
        self._bases[tools] = base

    async def artefacts(self, row: Mapping[str, Any], tools: Workspace) -> Solution | NotTaken:
        """What the policy changed."""
        instance = row_of(row).swe
        try:
            return await self._repositories.take(tools.sandbox, instance, self._bases[tools], Protection(instance))
        except NotTaken as error:
            return error

    async def grade(
        self,
        row: Mapping[str, Any],
        artefacts: Solution | NotTaken,
        response: Mapping[str, Any],
        open_sandbox: OpenSandbox,
    ) -> Grade:
        """Run the hidden tests; see :mod:`.grading`."""
        asked = row_of(row)
        needs = replace(self.needs(row), network=True) if asked.swe.tests_network else None
        return await self._grader.grade(asked, artefacts, partial(open_sandbox, needs))

    async def aclose(self) -> None:
        """End what grading has started."""
        await self._grader.aclose()
