# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Large blocks that are freed go back to the system, whatever lies between them, or are there for the next ones."""

import subprocess
import sys

import pytest


HOLES = """
import os
from nemo_gym_prorl.serving.memory import map_large_blocks

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if {held}:
    assert map_large_blocks()
del_me = bytearray(31 * 2**20)  # one large block that is freed is enough to raise glibc's threshold
del del_me
before = resident()
blocks = [bytearray(b"x" * 500_000) for _ in range(200)]
full = resident() - before
del blocks[::2]
print((resident() - before) / full)
"""


@pytest.mark.parametrize(("held", "least", "most"), [(True, 0.4, 0.6), (False, 0.9, 1.1)])
def test_every_other_block_that_is_freed_is_given_back(held: bool, least: float, most: float) -> None:
    """Without the switch nothing comes back: the heap has holes. That is what the switch is for."""
    done = subprocess.run(
        [sys.executable, "-c", HOLES.format(held=held)], capture_output=True, text=True, check=True, timeout=60
    )
    assert least < float(done.stdout) < most


PASSING = """
import resource
from nemo_gym_prorl.serving.memory import map_large_blocks, recycle_large_blocks

assert {switch}()
text = b"x" * 500_000
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    text + b"y"
before = faults()
for _ in range(100):
    text + b"y"
print((faults() - before) / 100)
"""


@pytest.mark.parametrize(("switch", "least", "most"), [("map_large_blocks", 100, 200), ("recycle_large_blocks", 0, 1)])
def test_a_block_that_comes_and_goes_is_the_same_one(switch: str, least: int, most: int) -> None:
    """Page faults for each."""
    done = subprocess.run(
        [sys.executable, "-c", PASSING.format(switch=switch)], capture_output=True, text=True, check=True, timeout=60
    )
    assert least <= float(done.stdout) <= most
