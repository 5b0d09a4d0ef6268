# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""One Ray for all of a test process' Gym deployments, as a training job has it before Gym comes.

A third of what a deployment costs to start is a Ray of its own, and on a busy machine Ray's processes miss the fixed
time that it gives them. Whole deployments from nothing are in the tests of ``prorl serve``, of the README's lines and
of an owner that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_gym_prorl.processes import ProcessMark, reaper_command
from tests.deployment.raylets import ENVIRONMENT


PROGRAM = """
import signal, ray
print(ray.init(num_cpus=1, include_dashboard=False).address_info["gcs_address"], flush=True)
signal.pause()
"""
SETTINGS = ENVIRONMENT | {"RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(80 * 1024 * 1024)}
TRIES = 3


@contextlib.contextmanager
def ray_cluster() -> Iterator[str]:
    """The override that makes Gym use it. It ends with this process, however that ends."""
    for _ in range(TRIES):
        with _started() as address:
            if address:
                yield f"++ray_head_node_address={address}"
                return
    pytest.fail("Ray did not start")


@contextlib.contextmanager
def _started() -> Iterator[str]:
    mark = ProcessMark("PRORL_TEST_RAY", os.urandom(8).hex())
    # Not below pytest's folder: the path of a Unix socket must be short. The reaper removes it.
    folder = Path(tempfile.mkdtemp(prefix="prorl-ray-", dir="/tmp"))
    process = subprocess.Popen(
        reaper_command(mark, [sys.executable, "-c", PROGRAM], sys.executable, folder),
        env=os.environ | SETTINGS | {"RAY_TMPDIR": str(folder), mark.name: mark.value},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        # What else Ray says goes there, too.
        address = next((line.strip() for line in process.stdout if line[:1].isdigit()), "")
        yield address
    finally:
        process.terminate()
        process.wait(60)
        assert asyncio.run(mark.kill(settle_s=0)) == {}
