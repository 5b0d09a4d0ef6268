# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Environment my_environment: the policy computes a sum with a shell and writes the sum into a file."""

from collections.abc import Mapping
from typing import Any, ClassVar

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.servers.task_server import TaskServer
from nemo_gym_prorl.tasks.task import ExtractedFile, Grade, OpenSandbox, SandboxNeeds
from nemo_gym_prorl.tasks.workbench import Workbench
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits, Workspace


class Sums:
    """Task: the policy writes the sum of a row's numbers into the file ``answer``."""

    def __init__(self, limits: ToolLimits) -> None:
        self.tools = Workbench(("bash", "submit"), "/work", limits)

    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds:
        if type(row.get("answer")) is not int:  # `isinstance` would accept True
            raise CallerError("must be the sum as an integer", field="answer")
        return SandboxNeeds()

    async def prepare(self, row: Mapping[str, Any], tools: Workspace) -> None:
        await tools.write({"answer": "unknown\n"})

    async def artefacts(self, row: Mapping[str, Any], tools: Workspace) -> ExtractedFile:
        return await tools.extract_file("answer", limit=100)

    async def grade(
        self, row: Mapping[str, Any], artefacts: ExtractedFile, response: Mapping[str, Any], open_sandbox: OpenSandbox
    ) -> Grade:
        if artefacts.content is None:
            return Grade(0.0, "no_answer", artefacts.problem or "")
        right = artefacts.content.split() == [b"%d" % row["answer"]]
        return Grade(float(right), "right" if right else "wrong", f"the sum is {row['answer']}")


class Server(TaskServer):
    """Gym resources server of :class:`Sums`."""

    own_image: ClassVar[str] = "default"  # a small Linux with Python; "kernel" also has IPython and numpy

    def make_task(self) -> Sums:
        return Sums(self.config.tool_limits)


if __name__ == "__main__":
    Server.run_webserver()
