# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A server process that tests kill: starts hostile sandboxes, prints their pids, and waits."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import get_args

from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.limits import rlimits
from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from nemo_gym_prorl.sandbox.spec import Start
from nemo_gym_prorl.sandbox.supervisor import client, state_dir


async def busy_sandbox(image: Path, start: Start) -> Shell:
    """A sandbox with a daemon, a stopped process and a shell whose command ignores what it can."""
    shell = await Shell.start(await Container.start(ContainerSpec(image=image, start=start), require_runtime()))
    await shell.run("(setsid sh -c 'trap \"\" HUP TERM INT; while :; do sleep 1; done' >/dev/null 2>&1 &)")
    await shell.run("sleep 1000 & kill -STOP $!; head -c 3000000 /dev/urandom > /tmp/junk")
    await shell.run("trap '' INT HUP TERM; sleep 1000", silence_s=0.05)
    return shell


async def main() -> None:
    way = next(way for way in get_args(Start) if way == sys.argv[3])
    rlimits.raise_supervisor_file_limit()
    gate = asyncio.Semaphore(8)

    async def make() -> Shell:
        async with gate:
            return await busy_sandbox(Path(sys.argv[1]), way)

    shells = await asyncio.gather(*(make() for _ in range(int(sys.argv[2]))))
    supervisor = client.own_supervisor
    assert supervisor
    inits = [space.init for space in state_dir.pid_namespaces_of(supervisor.folder)]
    assert all(is_init(pid) for pid in inits)
    print(
        json.dumps(
            {
                "server": os.getpid(),
                "supervisor": supervisor.popen.pid,
                "folder": str(supervisor.folder),
                "inits": inits,
            }
        ),
        flush=True,
    )
    results = await asyncio.gather(*(outcome(shell) for shell in shells))
    print(json.dumps(results), flush=True)
    await asyncio.sleep(1000)


def is_init(pid: int) -> bool:
    """Whether a process is the first of its PID namespace."""
    status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    return next(line for line in status.splitlines() if line.startswith("NSpid")).split()[-1] == "1"


async def outcome(shell: Shell) -> str:
    """How the command of a shell ends, in one word."""
    try:
        action = await shell.wait(timeout_s=1000, silence_s=None)
    except Exception as error:
        return type(error).__name__
    return "exited" if action.exited else "finished"


asyncio.run(main())
