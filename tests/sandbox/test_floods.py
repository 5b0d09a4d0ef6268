# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A program that says more than anybody can read, by any way out of its sandbox, and what its neighbours have of it.

All sandboxes of a server share its event loop. So a flood costs nobody anything if each turn of the loop takes a
bounded piece of it, and if what is kept of it is bounded, too: else each piece costs more than the one before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tracemalloc
from asyncio import events
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.shell import Shell


pytestmark = pytest.mark.sandbox

MOST_A_CALLBACK = 2 << 20
"""Bytes that one callback of the loop may read: sixteen reads of 64 KiB are usual."""

MOST_KEPT = 16 << 20
"""Bytes by which all that Python holds may grow."""

ENOUGH = 24 << 20
"""Bytes of a flood after which it has shown what it does; more than may be kept."""

SHELL_FLOODS = {
    "marks": "tr '\\0' '\\036' < /dev/zero",
    "bash's own errors": "while :; do echo xxxxxxxxxxxxxxxx; done >&10 2>/dev/null & yes",
    "prompts": 'PS1=$(head -c 60000 /dev/zero | tr "\\0" x); yes',
}


class Turns:
    """What the callbacks of the loop read: in all, and most in one."""

    def __init__(self) -> None:
        self.total = self.most = self._now = 0

    def begin(self) -> None:
        """A callback begins."""
        self._now = 0

    def add(self, count: int) -> None:
        """It has read so many bytes."""
        self._now += count
        self.total += count
        self.most = max(self.most, self._now)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    counted = Turns()
    run, read = events.Handle._run, os.read

    def counting_run(handle: Any) -> None:
        counted.begin()
        run(handle)

    def counting_read(file: int, most: int) -> bytes:
        data = read(file, most)
        counted.add(len(data))
        return data

    class CountingSocket(socket.socket):
        def recv(self, *arguments: Any) -> bytes:
            data = super().recv(*arguments)
            counted.add(len(data))
            return data

        def recvmsg(self, *arguments: Any) -> Any:
            message = super().recvmsg(*arguments)
            counted.add(len(message[0]))
            return message

    monkeypatch.setattr(events.Handle, "_run", counting_run)
    monkeypatch.setattr(os, "read", counting_read)
    monkeypatch.setattr(socket, "socket", CountingSocket)
    return counted


@contextlib.asynccontextmanager
async def neighbours(image: Path, runtime: Runtime) -> AsyncIterator[tuple[Container, Shell]]:
    """A sandbox that will flood, and a shell in another."""
    async with (
        await Container.start(ContainerSpec(image=image), runtime) as hostile,
        await Container.start(ContainerSpec(image=image), runtime) as other,
        await Shell.start(other) as shell,
    ):
        yield hostile, shell


async def check(flood: asyncio.Task[Any], shell: Shell, turns: Turns) -> None:
    """While the flood goes on a neighbour's commands come to their end, and what is taken of it is bounded."""
    tracemalloc.start(1)
    try:
        before, done = turns.total, 0
        async with asyncio.timeout(100):
            while turns.total - before < ENOUGH or done < 20:
                assert not flood.done(), flood
                assert (await shell.run(f"echo $(({done} + 1))")).output == f"{done + 1}\n"
                done += 1
                await asyncio.sleep(0.01)
                assert tracemalloc.get_traced_memory()[1] < MOST_KEPT
    finally:
        tracemalloc.stop()
    assert turns.most < MOST_A_CALLBACK


@pytest.mark.parametrize("command", SHELL_FLOODS.values(), ids=SHELL_FLOODS)
async def test_a_shell_that_floods_its_terminal_slows_no_neighbour(
    command: str, image: Path, runtime: Runtime, turns: Turns
) -> None:
    async with neighbours(image, runtime) as (hostile, shell), await Shell.start(hostile) as flooding:
        flood = asyncio.create_task(flooding.run(command, timeout_s=200))
        await check(flood, shell, turns)
        flood.cancel()
        await asyncio.wait([flood])


async def test_a_command_that_floods_its_output_slows_no_neighbour(
    image: Path, runtime: Runtime, turns: Turns
) -> None:
    async with neighbours(image, runtime) as (hostile, shell):
        flood = asyncio.create_task(hostile.run("yes & yes >&2", timeout_s=200))
        await check(flood, shell, turns)
        flood.cancel()
        await asyncio.wait([flood])
