# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Evasion of limits, and the reports of limits that a sandbox has reached."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor import client
from nemo_gym_prorl.sandbox.supervisor.protocol import SHORTAGES, SandboxExhausted, SandboxRefused
from tests.conftest import tiered
from tests.sandbox.running import until


pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120), pytest.mark.usefixtures("way")]

WITHOUT_A_NAME = """
import os, time
for number in range(4):
    file = os.open("/tmp/file", os.O_RDWR | os.O_CREAT)
    os.unlink("/tmp/file")
    os.write(file, b"x" * (8 << 20))
time.sleep(60)
"""

MEMORY_FILES = """
import os, time
kept = []
for number in range(30):
    file = os.memfd_create(str(number))
    os.write(file, bytes(10 << 20))
    kept.append(file)
time.sleep(60)
"""


def after_the_first_thread(text: str) -> str:
    """Return a program that goes on in another thread when its first thread has ended."""
    return f"""
import ctypes, os, threading
threading.Thread(target=exec, args=({text!r}, {{}})).start()
ctypes.CDLL(None).syscall({{"x86_64": 60}}.get(os.uname().machine, 93), 0)
"""


def program(text: str) -> str:
    return f"python3 - <<'END'\n{text}\nEND"


@pytest.mark.parametrize(
    "evasion",
    tiered([WITHOUT_A_NAME, MEMORY_FILES, after_the_first_thread(WITHOUT_A_NAME)], [WITHOUT_A_NAME]),
    ids=["without a name", "of memory", "after the first thread"],
)
async def test_nothing_that_is_written_goes_uncounted(evasion: str, image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image, disk_mib=10), runtime) as container:
        with pytest.raises(SandboxExhausted, match="disk: "):
            await container.run(program(evasion), timeout_s=40)


@pytest.mark.parametrize(
    ("limit", "command", "note"),
    [
        ({"memory_mib": 8}, "(for i in $(seq 300); do setsid sleep 100 & done) >/dev/null 2>&1", "memory"),
        ({"disk_mib": 20}, "head -c 30000000 /dev/zero > /tmp/f", "file size"),
        ({"disk_mib": 20}, "truncate -s 20M /tmp/f; sleep 1", "file size"),
        ({"shared_memory_mib": 8}, "head -c 20000000 /dev/zero > /dev/shm/f; sleep 1", "shared memory"),
    ],
    ids=["small programs", "written file", "file of a hole", "shared memory"],
)
async def test_a_limit_that_costs_no_sandbox_leaves_a_note(
    image: Path, runtime: Runtime, limit: dict[str, Any], command: str, note: str
) -> None:
    """Also the memory of many programs that are smaller than the first process."""
    async with await Container.start(ContainerSpec(image=image, **limit), runtime) as container:
        with contextlib.suppress(SandboxExhausted):  # a file of that size may be all that it may write
            await container.run(command, timeout_s=40)
        notes = (note, "disk") if "disk_mib" in limit else note
        await until(lambda: any(one.startswith(notes) for one in container.notes))
        if "disk_mib" not in limit:
            assert (await container.run("echo fine")).stdout == "fine\n"


async def test_a_full_process_table_is_the_agents_doing(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image, processes=60), runtime) as container:
        await container.run("for i in $(seq 100); do setsid sleep 100 >/dev/null 2>&1 & done")
        with pytest.raises(SandboxExhausted, match="processes"):
            await container.run("ls | cat")
        assert container.alive
        assert container.notes == ["processes: all of 60 in use"]


async def test_a_table_with_room_for_little_takes_many_commands_at_once(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image, processes=60), runtime) as container:
        done = await asyncio.gather(*(container.run("echo fine") for _ in range(20)))
        assert [one.stdout for one in done] == ["fine\n"] * 20
        assert container.notes == []


@pytest.mark.parametrize("number", SHORTAGES)
def test_what_the_machine_is_short_of_is_nobodys_wrong_request(number: int) -> None:
    error = client._reply_error({"error": "no", "errno": number})
    assert isinstance(error, SandboxRefused)
    assert SHORTAGES[number] in error.reason
    assert error.number == 0, "with a number it would be taken for the request's fault"
