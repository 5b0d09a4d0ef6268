# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Who gives up in an unlucky moment leaves nothing behind: no sandbox, no program, no open file, nothing stopped."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.compose import snapshots
from nemo_gym_prorl.sandbox.container import Container
from nemo_gym_prorl.sandbox.sessions.bash_channel import BashChannel
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from nemo_gym_prorl.sandbox.supervisor import creation, lifecycle, sandbox
from nemo_gym_prorl.sandbox.supervisor.client import Link
from tests.sandbox.requests import request_for


pytestmark = pytest.mark.sandbox


async def test_an_end_that_is_asked_for_as_the_turn_comes_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be up, while its end waits for that of its first process for ever."""
    client: Any = Mock()
    box = sandbox.Sandbox("b-1", tmp_path, request_for(), [client], [])
    children = Mock(fork=Mock(side_effect=OSError))
    boxes = lifecycle.Sandboxes(tmp_path, children, None, AsyncMock())
    boxes._all[box.name], boxes._creation = box, AsyncMock()
    monkeypatch.setattr(boxes, "_accepted", lambda *_order: box)
    others = [boxes._starts.of(str(number)) for number in range(2 * creation.AT_ONCE)]
    for other in others:
        await other.__aenter__()
    creating = asyncio.create_task(boxes.create(client, request_for(), []))
    await asyncio.sleep(0.01)
    await others[0].__aexit__(None, None, None)
    closing = asyncio.create_task(boxes.destroy(box.name))
    boxes._close(box)
    with pytest.raises(sandbox.NoSandbox):
        await creating
    await closing
    boxes._creation.create.assert_not_called()


async def nothing_left(container: Container, program: str, files: int) -> None:
    """Wait until no such program runs inside, and see that this process has no more open files than before."""
    async with asyncio.timeout(10):
        while (await container.run(f"pgrep -x {program}")).exit_code == 0:
            await asyncio.sleep(0.02)
    assert open_files() == files


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_a_shell_that_is_given_up_while_it_starts_is_ended(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    await container.run("true")
    connect = BashChannel.connect

    def give_up(self: BashChannel, pid: int, terminal: int) -> None:
        connect(self, pid, terminal)
        starting.cancel()

    monkeypatch.setattr(BashChannel, "connect", give_up)
    files = open_files()
    starting = asyncio.create_task(Shell.start(container))
    await asyncio.wait([starting])
    assert starting.cancelled()
    await nothing_left(container, "bash", files)


async def test_files_of_an_answer_that_comes_too_late_by_nothing_are_closed(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heard in the very turn of the loop in which who asked is cancelled."""
    await container.run("true")
    settle = Link._settle

    def give_up(self: Link, message: Any, files: list[int]) -> None:
        settle(self, message, files)
        if files:
            opening.cancel()

    monkeypatch.setattr(Link, "_settle", give_up)
    files = open_files()
    opening = asyncio.create_task(container.spawn(["sleep", "100"], terminal=(24, 80)))
    await asyncio.wait([opening])
    assert opening.cancelled()
    await nothing_left(container, "sleep", files)


async def beats(container: Container) -> bool:
    """Whether what was started in it before runs."""
    with contextlib.suppress(InfrastructureError):
        return bool((await container.run("rm -f /tmp/beats; sleep 0.1; cat /tmp/beats")).stdout)
    return False


@pytest.mark.parametrize("act", ["pause", "snapshot"])
async def test_a_sandbox_whose_pause_is_given_up_goes_on(container: Container, tmp_path: Path, act: str) -> None:
    await container.run("(while :; do echo >> /tmp/beats; sleep 0.01; done >/dev/null 2>&1 &)")
    for delay_s in (0.001, 0.004):
        acting = container.pause() if act == "pause" else snapshots.take(container, tmp_path, "x")
        giving_up = asyncio.ensure_future(acting)
        await asyncio.sleep(delay_s)
        giving_up.cancel()
        await asyncio.wait([giving_up])
        assert giving_up.cancelled()
        assert not container.paused
        async with asyncio.timeout(5):
            # As long as it is on its way to be paused nothing is started in it.
            while not await beats(container):
                await asyncio.sleep(0.05)
