# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sessions in a sandbox, and whom the failure of a session's program is attributed to.

The agent broke a program that exited or is missing, if the program worked in the sandbox before or the image has it.
The machine may have caused it if the program was killed or does not answer in time.
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
    """Raise if the agent is the cause of a session's program not starting.

    Args:
        container: the sandbox.
        program: name of the program.
        process: the program's process; ``None`` if it could not be started.
        trouble: observed failure, for the message.

    Raises:
        SandboxBroken: the agent broke the program.
    """
    if process is not None and (not process.ended.done() or process.ended.result() == -signal.SIGKILL):
        return
    if program in container.sessions_started or await asyncio.to_thread(_in_image, container, program):
        raise SandboxBroken(f"{program} does not start in the sandbox any more: {trouble}; start a new sandbox")


def session_end_error(
    container: Container, session: str, process: SandboxProcess | None, *, ours: bool
) -> RolloutError:
    """Return the error for a request to a session that has ended.

    Args:
        session: name of the session in messages.
        process: the session's program, which has ended; ``None`` if the session was closed.
        ours: whether this process killed the program, at a time limit.

    Raises:
        AgentError: programs in the sandbox have ended the sandbox.
        SandboxLost: the sandbox has ended otherwise.
    """
    container.check_alive()
    if process is None:
        return CallerError(f"the {session} is closed; restart it")
    if not ours and process.ended.done() and process.ended.result() == -signal.SIGKILL:
        return SandboxLost(f"the {session} was killed; restart it")
    return SandboxBroken(f"the {session} has ended; restart it")


def _in_image(container: Container, program: str) -> bool:
    """Return whether the image is a folder with the program on its PATH; ``False`` for an image file."""
    root = container.spec.image.resolve()
    for folder in container.environment.get("PATH", os.defpath).split(":"):
        place = (root / folder.lstrip("/")).resolve()
        if place.is_relative_to(root) and os.path.lexists(place / program):
            return True
    return False
