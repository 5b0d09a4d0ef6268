# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A server for the test that kills the supervisor of many: ``crowd.py IMAGE COUNT``.

With each line of input it makes so many sandboxes, in all ways, has a daemon and a command run in each, goes on
making, using and ending others beside them, and says where they are. When they are lost it says how everything ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path

from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation.user_ids import no_several_users
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime, require_runtime
from nemo_gym_prorl.sandbox.supervisor.rpc import own_supervisor
from nemo_gym_prorl.serving.process import raise_open_file_limit


AT_A_TIME = 8
"""Starts in flight, and others that are made and ended all the time."""

DAEMON = "(setsid sh -c 'trap \"\" HUP TERM INT; head -c 300000 /dev/urandom >/tmp/junk; sleep 999' >/dev/null 2>&1 &)"


def spec_of(number: int, image: Path) -> ContainerSpec:
    """One in twenty of the runtime's making, one in twenty with several users, the others as usual."""
    if number % 20 == 0:
        return ContainerSpec(image=image, start="runtime")
    return ContainerSpec(image=image, users=number % 20 == 10 and not no_several_users())


async def outcome(box: Container) -> str:
    """How a command ends that does not end by itself."""
    try:
        return f"finished: {await box.run('exec sleep 1000', timeout_s=None)}"
    except Exception as error:
        return type(error).__name__


async def churn(image: Path, runtime: Runtime, lost: asyncio.Event) -> str:
    """Make, use and end sandboxes until that fails, or the others are lost; returns with what."""
    try:
        while not lost.is_set():
            async with await Container.start(spec_of(random.randrange(1, 10), image), runtime) as box:
                done = await box.run("echo alive", timeout_s=60)
                assert done.stdout == "alive\n", done
        return "SandboxLost"
    except Exception as error:
        return type(error).__name__


async def one_round(image: Path, count: int, runtime: Runtime) -> Counter[str]:
    gate = asyncio.Semaphore(AT_A_TIME)

    async def make(number: int) -> Container:
        async with gate:
            box = await Container.start(spec_of(number, image), runtime)
            await box.run(DAEMON)
            return box

    boxes = await asyncio.gather(*(make(number) for number in range(count)))
    ends = [asyncio.create_task(outcome(box)) for box in boxes]
    lost = asyncio.Event()
    for box in boxes:
        box.on_end(lost.set)
    ends += [asyncio.create_task(churn(image, runtime, lost)) for _ in range(AT_A_TIME)]
    # Until the commands are under way.
    await boxes[-1].run("sleep 0.2")
    supervisor = own_supervisor._current
    assert supervisor
    facts = {"server": os.getpid(), "supervisor": supervisor.popen.pid, "folder": str(supervisor.folder)}
    print(json.dumps(facts), flush=True)
    return Counter(await asyncio.gather(*ends))


async def main() -> None:
    raise_open_file_limit()
    runtime = require_runtime()
    while await asyncio.to_thread(sys.stdin.readline):
        ends = await one_round(Path(sys.argv[1]), int(sys.argv[2]), runtime)
        print(json.dumps(ends), flush=True)


asyncio.run(main())
