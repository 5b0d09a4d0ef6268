# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Riddles in sandboxes as a Gym resources server: a folder, a shell, and a code to be found."""

from collections.abc import Mapping
from typing import Any, ClassVar

from examples.tiny_dapo.riddles import Riddle
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.images.building.default import DEFAULT
from nemo_gym_prorl.task_server import TaskServer
from nemo_gym_prorl.tasks.final_answer import final_message
from nemo_gym_prorl.tasks.task import Grade, OpenSandbox, SandboxNeeds
from nemo_gym_prorl.tasks.workbench.workbench import Workbench
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits, Workspace


class Riddles:
    """The task."""

    def __init__(self, limits: ToolLimits) -> None:
        self.tools = Workbench(("bash",), "/sandbox", limits)

    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds:
        _riddle(row)
        return SandboxNeeds()

    async def prepare(self, row: Mapping[str, Any], tools: Workspace) -> None:
        await tools.write(_riddle(row).files)

    async def artefacts(self, row: Mapping[str, Any], tools: Workspace) -> None:
        """None: the answer is in what the policy says."""

    async def grade(
        self, row: Mapping[str, Any], artefacts: None, response: Mapping[str, Any], open_sandbox: OpenSandbox
    ) -> Grade:
        said, code = final_message(response).strip(), _riddle(row).code
        verdict = "right" if said == code else "wrong" if said else "no_answer"
        return Grade(float(said == code), verdict, f"it said {said[:40]!r}, the code is {code}")


class RiddleServer(TaskServer):
    """The server."""

    own_image: ClassVar[str] = DEFAULT

    def make_task(self) -> Riddles:
        return Riddles(self.config.tool_limits)


def _riddle(row: Mapping[str, Any]) -> Riddle:
    try:
        return Riddle.of_row(row)
    except (KeyError, TypeError) as error:
        raise CallerError(f"it must have kind, name, other and code: {error}", field="riddle") from error


if __name__ == "__main__":
    RiddleServer.run_webserver()
