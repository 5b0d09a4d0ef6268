# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym's own commands, run to their end as a user runs them beside a deployment."""

import asyncio
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from nemo_gym_prorl.deployment.gym_cli import MARK_NAME, DeploymentError, GymCli
from nemo_gym_prorl.processes import ProcessMark


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command said, and how long it took."""

    output: str
    seconds: float


def server_process(mark: ProcessMark, name: str) -> int | None:
    """Process id of a server, which is not its restarter's; ``None`` while there is none."""
    wanted = f"NEMO_GYM_CONFIG_PATH={name}".encode()
    for pid, command in mark.processes().items():
        if command.endswith("app.py") and "restarter" not in command and not command.startswith("/bin/bash"):
            environ = Path(f"/proc/{pid}/environ")
            if environ.exists() and wanted in environ.read_bytes().split(b"\0"):
                return pid
    return None


async def gym(cli: GymCli, *arguments: str, timeout_s: float = 600.0) -> Ended:
    """Run ``gym`` with these words; whatever it started is killed at its end.

    Raises:
        DeploymentError: it took too long, or failed.
    """
    command, env, cwd = await cli.command(*arguments)
    start, mark = time.monotonic(), ProcessMark(MARK_NAME, uuid.uuid4().hex)
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env=env | {mark.name: mark.value},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.shield(mark.kill(settle_s=1.0))
    said = output.decode(errors="replace")
    if process.returncode:
        raise DeploymentError(f"gym {' '.join(arguments)} ended with status {process.returncode}:\n{said[-8000:]}")
    return Ended(said, time.monotonic() - start)
