# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A folder of ours in a sandbox, beside the repository, by which everything is done there: files, and scripts."""

from __future__ import annotations

import secrets
import shlex

from nemo_gym_prorl.tasks.sandbox import ExecResult, KnowsWhoseDoing, Sandbox
from nemo_gym_prorl.tasks.workbench.workspace import Taken, ToolLimits, Workspace


LONGEST_LISTING = 64 << 20
"""Most bytes of a repository's listing: some 500,000 files."""

BASH = "bash --noprofile --norc"


class NotTaken(Exception):
    """What the policy left can't be taken out, by its own doing; says why."""


class WorkFolder:
    """The folder.

    Args:
        sandbox: where it is.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.path = f"/tmp/prorl-{secrets.token_hex(8)}"
        self._files = Workspace(sandbox, self.path, ToolLimits())
        self.write = self._files.write

    async def take(self, name: str, *, limit: int) -> Taken:
        """A file in it, or of any absolute path."""
        return await self._files.take(name, limit=limit)

    async def text(self, name: str) -> str:
        """A file in it that has to be there.

        Raises:
            NotTaken: it is not.
        """
        taken = await self.take(name, limit=LONGEST_LISTING)
        if taken.content is None:
            raise NotTaken(taken.problem or name)
        return taken.content.decode("utf-8", "backslashreplace")

    async def run(self, script: str, *arguments: str, timeout_s: float, shell: str = "sh") -> ExecResult:
        """A script, whose first argument is the folder."""
        words = " ".join(map(shlex.quote, (script, "_", self.path, *arguments)))
        return await self.sandbox.exec(f"exec {shell} -c {words}", cwd="/", timeout_s=timeout_s)

    async def step(self, script: str, *arguments: str, timeout_s: float) -> None:
        """A script where the policy has been: that it fails is the policy's doing if the sandbox lives.

        Raises:
            NotTaken: it failed.
            AgentError: the policy used up its sandbox.
            InfrastructureError: the sandbox is gone.
        """
        done = await self.run(script, *arguments, timeout_s=timeout_s)
        if done.return_code == 0 and done.error_type is None:
            return
        await self.require_sandbox()
        raise NotTaken(f"the repository can't be read: {end_of(done)}")

    async def require_sandbox(self) -> None:
        """See that the sandbox lives, if it can tell.

        Raises:
            AgentError: what ran in it has ended it.
            InfrastructureError: it ended otherwise.
        """
        if isinstance(self.sandbox, KnowsWhoseDoing):
            await self.sandbox.check()


def end_of(done: ExecResult) -> str:
    """What there is to say of a script that failed."""
    return (done.stderr or "").strip()[-500:] or f"exit code {done.return_code}"
