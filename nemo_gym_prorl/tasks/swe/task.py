# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Software engineering as a :class:`~nemo_gym_prorl.tasks.task.Task`: a repository with an issue, and hidden tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from nemo_gym_prorl.network_access import HOST
from nemo_gym_prorl.tasks import require_extras
from nemo_gym_prorl.tasks.swe.changes import ProtectedFiles, Solution
from nemo_gym_prorl.tasks.swe.grading import Grader
from nemo_gym_prorl.tasks.swe.instance import SweInstance, SweLimits, SweRow
from nemo_gym_prorl.tasks.swe.patches import Base, PatchExtractionError, Repositories
from nemo_gym_prorl.tasks.task import Grade, OpenSandbox, SandboxNeeds
from nemo_gym_prorl.tasks.workbench import Workbench, workbench_schemas
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits, Workspace


TOOLS = ("bash", "str_replace_editor", "submit")

SUBMIT_DESCRIPTION = "Hand in the repository as it is now and end the task."

SYSTEM_PROMPT = """\
You are a software engineer. The repository is in {folder}. Look at it, find what the issue below is about, and \
change the code so that it is solved. Tests that you do not see decide; changes to tests do not count. There is no \
one to ask. When you are done, call `submit`."""


def tool_schemas() -> list[dict[str, Any]]:
    return workbench_schemas(TOOLS, SUBMIT_DESCRIPTION)


def make_row(instance_id: str, image: str, instance: SweInstance) -> dict[str, Any]:
    """Return a row of ``prorl_swe``, without the task's fields that have default values."""
    return {
        "responses_create_params": {
            "input": [
                {"role": "system", "content": SYSTEM_PROMPT.format(folder=instance.repo_folder)},
                {"role": "user", "content": instance.problem_statement},
            ],
            "tools": tool_schemas(),
            "parallel_tool_calls": False,
        },
        "data_source": instance.dataset,
        "instance_id": instance_id,
        "image": image,
        "swe": instance.model_dump(mode="json", exclude_defaults=True),
    }


SUBMIT_REPLY = "Submitted. The repository is tested as it is now. The task is over: answer without calling a tool."


class SoftwareEngineering:
    """Software engineering tasks graded by hidden tests; needs the extra ``swe``."""

    def __init__(self, tools: ToolLimits, limits: SweLimits) -> None:
        require_extras("swe")
        self._repositories = Repositories(limits)
        self._grader = Grader(self._repositories, limits)
        self._bases: WeakKeyDictionary[Workspace, Base] = WeakKeyDictionary()  # a session has one workspace
        self.tools = Workbench(TOOLS, "/", tools, submit_description=SUBMIT_DESCRIPTION, submit_reply=SUBMIT_REPLY)

    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds:
        return SweRow.parse(row).needs()

    async def prepare(self, row: Mapping[str, Any], tools: Workspace) -> None:
        """Replace the repository's history by one commit, and activate the image's environment for the tools."""
        instance = SweRow.parse(row).swe
        base, _ = await self._repositories.prepare(tools.sandbox, instance, hide=True)
        tools.work_in(instance.repo_folder, base.variables)
        self._bases[tools] = base

    async def artefacts(self, row: Mapping[str, Any], tools: Workspace) -> Solution | PatchExtractionError:
        swe = SweRow.parse(row).swe
        try:
            return await self._repositories.extract(tools.sandbox, swe, self._bases[tools], ProtectedFiles(swe))
        except PatchExtractionError as error:
            return error

    async def grade(
        self,
        row: Mapping[str, Any],
        artefacts: Solution | PatchExtractionError,
        response: Mapping[str, Any],
        open_sandbox: OpenSandbox,
    ) -> Grade:
        asked = SweRow.parse(row)
        needs = replace(self.needs(row), network=HOST) if asked.swe.tests_network else None
        return await self._grader.grade(asked, artefacts, partial(open_sandbox, needs))

    async def aclose(self) -> None:
        await self._grader.aclose()
