# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sessions in a sandbox, and attribution of a failed session to the agent or the infrastructure.

If a session's program exits or is missing, but has worked in the sandbox before or is in the image, the agent broke
the program. If the program was killed or does not reply in time, the machine may be the cause.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

from nemo_gym_prorl.failures import CallerError, RolloutError
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxBroken, SandboxLost


if TYPE_CHECKING:
    from nemo_gym_prorl.sandbox.container import Container
    from nemo_gym_prorl.sandbox.supervisor.client import SandboxProcess


async def blame_agent(container: Container, program: str, process: SandboxProcess | None, trouble: str) -> None:
    """Raise an agent failure if programs of the agent are the cause of a session's ``program`` not starting. The
    ``process`` is ``None`` if it could not be started.

    Raises:
        SandboxBroken: the agent broke the program.
    """
    if process is not None and (not process.ended.done() or process.ended.result() == -signal.SIGKILL):
        return
    if program in container.sessions_started or await asyncio.to_thread(_in_image, container, program):
        raise SandboxBroken(f"{program} does not start in the sandbox any more: {trouble}; start a new sandbox")


def session_end_error(
    container: Container, session: str, process: SandboxProcess | None, *, killed_here: bool
) -> RolloutError:
    """Return the error for a request to a ``shell`` or ``kernel`` that has ended, while the sandbox is up.

    Args:
        process: the session's process, which has ended; ``None`` if the session was closed.
        killed_here: whether the server killed the process, such as at a time limit.

    Raises:
        AgentError: programs in the sandbox have ended the sandbox.
        SandboxLost: the sandbox has ended otherwise.
    """
    container.check_alive()
    if process is None:
        return CallerError(f"the {session} is closed; restart it")
    if not killed_here and process.ended.done() and process.ended.result() == -signal.SIGKILL:
        return SandboxLost(f"the {session} was killed; restart it")
    return SandboxBroken(f"the {session} has ended; restart it")


def _in_image(container: Container, program: str) -> bool:
    """Return whether an unpacked image has the program on the sandbox's PATH; ``False`` for a SIF."""
    root = container.spec.image.resolve()
    for folder in container.environment.get("PATH", os.defpath).split(":"):
        candidate = (root / folder.lstrip("/")).resolve()
        if candidate.is_relative_to(root) and os.path.lexists(candidate / program):
            return True
    return False
