# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Accounts and logins in a sandbox of the default image with several users."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from nemo_gym_prorl.sandbox.container import Completed, Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation import user_ids
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.shell import Shell


pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(300)]

WHY_NOT = user_ids.multi_user_error()
SEVERAL_USERS = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


async def done(container: Container, script: str, timeout_s: float = 60.0) -> str:
    """What a script of which each command must succeed has to say."""
    completed: Completed = await container.run(f"set -e\n{script}", timeout_s=timeout_s)
    assert completed.exit_code == 0, (script, completed.stdout[-2000:], completed.stderr[-2000:])
    return completed.stdout


@pytest_asyncio.fixture
async def machine(image: Path, runtime: Runtime) -> AsyncIterator[Container]:
    """A sandbox of the default image with several users."""
    async with await Container.start(ContainerSpec(image=image, users=True), runtime) as container:
        yield container


@SEVERAL_USERS
async def test_accounts(machine: Container) -> None:
    await done(
        machine, "useradd -m alice; groupadd crew; useradd -m -G crew -s /bin/bash bob; echo bob:word | chpasswd"
    )
    await done(machine, "su - alice -c 'umask 077; echo secret > ~/file'")
    assert (await machine.run("cat /home/alice/file", user="bob")).exit_code == 1
    assert (await machine.run("cat file", cwd="/home/alice", user="alice")).stdout == "secret\n"
    assert (
        await done(machine, "su bob -c 'id -nG; cat /etc/shadow || echo closed' 2>/dev/null") == "bob crew\nclosed\n"
    )
    await done(
        machine, "chown alice:crew /home/alice /home/alice/file; chmod 750 /home/alice; chmod 640 /home/alice/file"
    )
    assert (await machine.run("cat /home/alice/file", user="bob")).stdout == "secret\n"
    await done(machine, "usermod -l carol alice; passwd -l bob; userdel -r bob 2>/dev/null; test ! -e /home/bob")
    assert await done(machine, "stat -c %U /home/alice/file; getent shadow carol | cut -d: -f1") == "carol\ncarol\n"


@SEVERAL_USERS
async def test_a_shell_changes_its_user_and_comes_back(machine: Container) -> None:
    await done(machine, "useradd -m -s /bin/bash alice")
    async with await Shell.start(machine) as shell:
        assert (await shell.run("su - alice", silence_s=0.5)).waiting
        await shell.send("whoami; touch own; exit 3\n")
        back = await shell.wait()
        assert (back.exit_code, "alice" in back.output) == (3, True), back
        assert (await shell.run("whoami; stat -c %U ~alice/own")).output == "root\nalice\n"
