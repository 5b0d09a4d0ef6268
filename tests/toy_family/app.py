# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Toy environment with an image per row: count the image's Python packages."""

from collections.abc import Mapping
from typing import Any, ClassVar

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.servers.task_server import TaskServer
from nemo_gym_prorl.tasks.task import ExtractedFile, Grade, OpenSandbox, SandboxNeeds
from nemo_gym_prorl.tasks.workbench import Workbench
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits, Workspace


COUNT = "python3 -c 'from importlib.metadata import distributions as d; print(len(list(d())))'"


class Packages:
    """Task of counting packages."""

    def __init__(self, limits: ToolLimits) -> None:
        self.tools = Workbench(("bash", "submit"), "/work", limits)

    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds:
        if not isinstance(row.get("image"), str):
            raise CallerError("must name the row's image", field="image")
        return SandboxNeeds(image=row["image"], network=row.get("network"))

    async def prepare(self, row: Mapping[str, Any], tools: Workspace) -> None:
        await tools.write({"count": "unknown\n"})

    async def artefacts(self, row: Mapping[str, Any], tools: Workspace) -> ExtractedFile:
        return await tools.extract_file("count", limit=100)

    async def grade(
        self, row: Mapping[str, Any], artefacts: ExtractedFile, response: Mapping[str, Any], open_sandbox: OpenSandbox
    ) -> Grade:
        async with open_sandbox() as sandbox:
            count = int((await sandbox.exec(COUNT)).stdout or "")  # an exception here is never a reward
        if artefacts.content is None:
            return Grade(0.0, "no_answer", artefacts.problem or "")
        right = artefacts.content.split() == [b"%d" % count]
        return Grade(float(right), "right" if right else "wrong", f"the image has {count}", {"packages": count})


class ToyServer(TaskServer):
    """Server of the toy environment."""

    rows_name_images: ClassVar[bool] = True

    def make_task(self) -> Packages:
        return Packages(self.config.tool_limits)


if __name__ == "__main__":
    ToyServer.run_webserver()
