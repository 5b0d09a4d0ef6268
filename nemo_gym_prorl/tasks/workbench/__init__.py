# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tool set of a task: shell, Python, editor and ``submit``, with one :class:`.Workspace` per session.

The required programs are probed in the first sandbox of each image.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import FurtherTool, SandboxNeeds
from nemo_gym_prorl.tasks.workbench.observations import TOOLS, tool_schema
from nemo_gym_prorl.tasks.workbench.workspace import SUBMITTED, InstalledPrograms, ToolLimits, Workspace, probe_image


logger = logging.getLogger(__name__)


class Workbench:
    """Shell, Python, editor and ``submit``; a :class:`~nemo_gym_prorl.tasks.task.ToolSet`.

    Args:
        tools: names from :data:`.observations.TOOLS`.
        folder: absolute path of the working folder in the sandbox.
        limits: limits of tool calls.
        submit_description: description of ``submit`` for the policy; ``None`` for a general description.
        submit_reply: observation of ``submit``.
        further: tools besides these, which need no sandbox.

    Raises:
        ValueError: two tools have the same name.
    """

    workspace: ClassVar[type[Workspace]] = Workspace

    def __init__(
        self,
        tools: Sequence[str],
        folder: str,
        limits: ToolLimits,
        *,
        submit_description: str | None = None,
        submit_reply: str = SUBMITTED,
        further: Sequence[FurtherTool] = (),
    ) -> None:
        self._tools = tuple(tools)
        self._folder = folder
        self._limits = limits
        self._submit_reply = submit_reply
        self._further = {str(tool.schema["name"]): tool for tool in further}
        self._schemas = [*workbench_schemas(tools, submit_description), *(tool.schema for tool in further)]
        if len({schema["name"] for schema in self._schemas}) < len(self._schemas):
            raise ValueError("two tools have the same name; rename one")
        self._installed: dict[str | None, InstalledPrograms] = {}

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        return self._schemas

    async def open(self, sandbox: Sandbox | None, needs: SandboxNeeds | None) -> Workspace:
        """Open the tools in a sandbox; see :meth:`.ToolSet.open`. The task must have asked for a sandbox."""
        if sandbox is None or needs is None:
            raise ValueError("the tools of a workbench need a sandbox: Task.needs must return SandboxNeeds")
        for tool in self._further.values():
            await tool.prepare()
        installed = self._installed.get(needs.image)
        if installed is None:
            installed = await probe_image(sandbox)
            self._require(installed, needs)
            self._installed[needs.image] = installed
        return self.workspace(sandbox, self._folder, self._limits, installed, self._submit_reply, self._further)

    def _require(self, installed: InstalledPrograms, needs: SandboxNeeds) -> None:
        wanted = {"bash": ("bash", installed.bash), "python": ("python3", installed.python)}
        if missing := [program for tool, (program, there) in wanted.items() if tool in self._tools and not there]:
            reason = f"the image lacks {' and '.join(missing)}, required by the tools {', '.join(self._tools)}"
            if needs.image is None:
                raise InfrastructureError(reason, field="image")
            raise CallerError(reason, field="image")
        if "python" in self._tools and not installed.kernel:
            named = "the server's image" if needs.image is None else f"the image {needs.image}"
            logger.warning("%s has no IPython: the python tool keeps nothing between calls", named)


def workbench_schemas(tools: Sequence[str], submit_description: str | None = None) -> list[dict[str, Any]]:
    return [tool_schema(name, TOOLS[name], submit_description if name == "submit" else None) for name in tools]
