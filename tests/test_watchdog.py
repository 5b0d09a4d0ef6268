# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A hung test ends its process, with a stack that names where it hangs."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest


HEADER = """
import asyncio, contextlib, re, threading, time
import pytest

async def hangs_here():
    await asyncio.Event().wait()
"""
HUNG = {
    "an exception that another task takes": """
async def test_it():
    asyncio.create_task(spins())
    await hangs_here()

async def spins():
    while True:
        for _ in range(300_000):
            pass
        await asyncio.sleep(0)
""",
    "the interpreter's lock": """
def test_hangs_here():
    re.match("(a*)*$", "a" * 60 + "b")
""",
}


@pytest.mark.parametrize("how", HUNG)
async def test_a_hung_test_ends_with_a_stack(how: str, tmp_path: Path) -> None:
    file = tmp_path / "test_hung.py"
    file.write_text(HEADER + HUNG[how])
    options = ["--timeout=1", "-p", "tests.watchdog", "-p", "no:cacheprovider", "-n", "0", "-x"]
    options += ["-o", "asyncio_mode=auto", "--rootdir", str(tmp_path), "-c", os.devnull, str(file)]
    ran = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", *options),
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PRORL_TEST_GRACE_S": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(60):
            told, _ = await ran.communicate()
    finally:
        if ran.returncode is None:
            ran.kill()
    assert ran.returncode
    assert "hangs_here" in told.decode()
