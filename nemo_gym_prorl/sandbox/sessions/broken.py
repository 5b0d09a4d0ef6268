# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Whose doing it is that the program of a session does not start, or has ended: the image's, the agent's or the
machine's.

A program that ended by itself, or is not there, has been broken by the agent if it worked in that sandbox before, or
if the image has it. One that was killed, or does not answer in time, may have been so by the machine.
"""

from __future__ import annotations

import asyncio
import os
import signal

from nemo_gym_prorl.failures import CallerError, RolloutError
from nemo_gym_prorl.sandbox.container import Container
from nemo_gym_prorl.sandbox.supervisor.client import Process
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxBroken, SandboxLost


async def blame_agent(container: Container, program: str, process: Process | None, trouble: str) -> None:
    """Judge a session whose program did not start.

    Args:
        container: where.
        program: its name.
        process: what was started of it; ``None`` if nothing could be.
        trouble: what was seen.

    Raises:
        SandboxBroken: it is the agent's doing.
    """
    if process is not None and (not process.ended.done() or process.ended.result() == -signal.SIGKILL):
        return
    if program in container.worked or await asyncio.to_thread(_in_image, container, program):
        raise SandboxBroken(f"{program} does not start in the sandbox any more: {trouble}")


def session_end_error(container: Container, session: str, process: Process | None, *, ours: bool) -> RolloutError:
    """Why nothing can be asked of a session any more.

    Args:
        container: where.
        session: what to call it.
        process: its program, which has ended; ``None`` if the session was closed.
        ours: we have killed it, because the agent's time was up.

    Raises:
        AgentError: its sandbox has ended, by what ran in it.
        SandboxLost: its sandbox has ended otherwise.
    """
    container.check_alive()
    if process is None:
        return CallerError(f"the {session} is closed; restart it")
    if not ours and process.ended.done() and process.ended.result() == -signal.SIGKILL:
        return SandboxLost(f"the {session} was killed; restart it")
    return SandboxBroken(f"the {session} has ended; restart it")


def _in_image(container: Container, program: str) -> bool:
    """Whether the image is a folder that has the program on its PATH; of one in a file nothing is known."""
    root = container.spec.image.resolve()
    for folder in container.environment.get("PATH", os.defpath).split(":"):
        place = (root / folder.lstrip("/")).resolve()
        if place.is_relative_to(root) and os.path.lexists(place / program):
            return True
    return False
