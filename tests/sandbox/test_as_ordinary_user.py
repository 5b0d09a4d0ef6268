# SPDX-License-Identifier: Apache-2.0
"""Every test of this folder once more, as a user without any right; in parts, that others may run meanwhile."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.images.cache import cache_dir
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from tests.sandbox.database import ensure_database_image


ACCOUNT = pwd.getpwnam("games")
USER = ACCOUNT.pw_uid
"""Somebody every system knows, since Apptainer wants to know its user, and nobody who runs anything."""

HERE = Path(__file__).parent
PARTS = 4


@pytest.mark.sandbox
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="this is an ordinary user already")
@pytest.mark.parametrize("part", range(PARTS))
def test_everything_works_for_an_ordinary_user(image: Path, runtime: Runtime, part: int) -> None:
    files = sorted(str(file) for file in HERE.glob("test_*.py") if file != Path(__file__))[part::PARTS]
    with contextlib.suppress(InfrastructureError):
        # The user can't make images in root's cache.
        ensure_database_image(runtime)
    home = Path(tempfile.mkdtemp(prefix="prorl-u-"))
    # Who is in a sandbox with several users has no rights by a group that none of them is in.
    os.chown(home, USER, ACCOUNT.pw_gid)
    try:
        done = subprocess.run(
            [
                *(sys.executable, str(HERE / "as_user.py"), str(USER)),
                *(sys.executable, "-m", "pytest", "-q", "-x", "--reruns=1", "-p", "no:cacheprovider"),
                *("--basetemp", str(home / "t")),
                *files,
            ],
            cwd=HERE.parents[1],
            env={
                "PATH": os.pathsep.join([str(runtime.path.parent), os.environ["PATH"]]),
                "HOME": str(home),
                "TMPDIR": str(home),
                "PRORL_CACHE": str(cache_dir()),
                "PYTHONPATH": str(HERE.parents[1]),
                "PYTHONDONTWRITEBYTECODE": "1",
                "HYPOTHESIS_STORAGE_DIRECTORY": str(home / "hypothesis"),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    finally:
        shutil.rmtree(home)
