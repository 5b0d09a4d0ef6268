# SPDX-License-Identifier: Apache-2.0
"""Start gates across processes: bounds that hold, places that come back, nobody who waits for ever."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox import gates
from nemo_gym_prorl.sandbox.gates import Gate, StartGates


REPOSITORY = Path(__file__).parents[2]

MANY = """
import asyncio, os, sys
from pathlib import Path
from nemo_gym_prorl.sandbox.gates import StartGates
async def one(state, inside):
    async with StartGates.of(state).start(Path("/image"), 3):
        mark = inside / f"{os.getpid()}-{id(object())}-{asyncio.current_task().get_name()}"
        mark.touch()
        print(len(list(inside.iterdir())))
        await asyncio.sleep(0.01)
        mark.unlink()
async def main():
    await asyncio.gather(*(one(Path(sys.argv[1]), Path(sys.argv[2])) for _ in range(20)))
asyncio.run(main())
"""


def test_all_processes_together_keep_to_the_bound(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    command = [sys.executable, "-c", MANY, str(tmp_path), str(inside)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) for _ in range(3)]
    seen = [int(line) for process in processes for line in process.communicate(timeout=60)[0].split()]
    assert len(seen) == 60
    assert max(seen) <= 3
    assert [process.returncode for process in processes] == [0, 0, 0]


async def test_the_first_start_of_an_image_is_alone_and_those_after_it_are_not(tmp_path: Path) -> None:
    starts = StartGates.of(tmp_path)
    image, inside, together = Path("/image"), 0, []

    async def one() -> None:
        nonlocal inside
        async with starts.start(image, 8):
            inside += 1
            together.append(inside)
            await asyncio.sleep(0.05)
            inside -= 1

    await asyncio.gather(*(one() for _ in range(5)))
    assert together[:2] == [1, 1], "the second one starts when the first is up"
    assert max(together) > 1


async def test_a_failed_first_start_does_not_count(tmp_path: Path) -> None:
    starts = StartGates.of(tmp_path)
    with pytest.raises(RuntimeError, match="failed"):
        async with starts.start(Path("/image"), 8):
            raise RuntimeError("failed")
    async with starts.start(Path("/image"), 8):
        waiting = asyncio.create_task(starts.start(Path("/image"), 8).__aenter__())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        async with starts.start(Path("/other"), 8):
            pass
    await asyncio.wait_for(waiting, 10)


async def test_a_killed_holder_gives_its_place_back(tmp_path: Path) -> None:
    gate = Gate(tmp_path, "gate", 1, 30.0)
    program = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(); sys.stdout.flush()"
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", f"{program}; time.sleep(1000)", str(tmp_path / "gate-0")), stdout=subprocess.PIPE
    )
    assert holder.stdout
    await holder.stdout.readline()
    waiting = asyncio.create_task(gate.enter())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    holder.kill()
    await holder.communicate()
    Gate.leave(await asyncio.wait_for(waiting, 10))


async def test_a_place_comes_back_though_a_forked_child_has_the_file_too(tmp_path: Path) -> None:
    gate = Gate(tmp_path, "gate", 1, 30.0)
    place = await gate.enter()
    copy = os.dup(place)
    Gate.leave(place)
    Gate.leave(await asyncio.wait_for(gate.enter(), 10))
    os.close(copy)


async def test_the_first_to_come_is_the_first_to_go_and_who_leaves_the_line_is_not_missed(tmp_path: Path) -> None:
    gate = Gate(tmp_path, "gate", 1, 30.0)
    held, order = await gate.enter(), []

    async def one(number: int) -> None:
        place = await gate.enter()
        order.append(number)
        Gate.leave(place)

    tasks = [asyncio.create_task(one(number)) for number in range(4)]
    await asyncio.sleep(0.02)
    tasks[0].cancel()
    tasks[2].cancel()
    Gate.leave(held)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [1, 3]


async def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "PATIENCE_S", {"image": 0.05, "machine": 0.1})
    starts = StartGates.of(tmp_path)
    async with starts.start(Path("/image"), 1):
        # The image's gate is left after a while, the machine's says what is wrong.
        with pytest.raises(InfrastructureError, match="concurrent_starts"):
            async with starts.start(Path("/image"), 1):
                pass


async def test_a_disk_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(InfrastructureError, match="PRORL_STATE"):
        await Gate(tmp_path, "gate", 1, 1.0).enter()
