# SPDX-License-Identifier: Apache-2.0
"""Every test of this folder once more, as a user without any right."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nemo_gym_prorl.sandbox.cache import cache_dir
from nemo_gym_prorl.sandbox.runtime import Runtime


USER = pwd.getpwnam("games").pw_uid
"""Somebody every system knows, since Apptainer wants to know its user, and nobody who runs anything."""

HERE = Path(__file__).parent


@pytest.mark.sandbox
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="this is an ordinary user already")
def test_everything_works_for_an_ordinary_user(image: Path, runtime: Runtime) -> None:
    home = Path(tempfile.mkdtemp(prefix="prorl-u-"))
    os.chown(home, USER, USER)
    try:
        done = subprocess.run(
            [
                *(sys.executable, str(HERE / "as_user.py"), str(USER)),
                *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--basetemp", str(home / "t")),
                *(str(HERE), "--deselect", f"{Path(__file__)}"),
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
