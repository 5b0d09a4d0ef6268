# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``as_user.py UID COMMAND...``: become an ordinary user who can read the tools and owns the cache, then run it.

The user has a group beside his own, as users have, which opens what others' files let that group do.

Root's own folders are closed to everybody else, and the interpreter, the runtime and the image may lie there. So the
command runs in a mount namespace where an empty folder covers each closed one, and just these are to be seen in it.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nemo_gym_prorl.sandbox.images.entries import cache_dir
from nemo_gym_prorl.sandbox.isolation.syscalls import first_untraversable_parent, mount, mount_as_owner, unshare_mounts
from nemo_gym_prorl.sandbox.isolation.user_ids import create_single_user_namespace
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime


ACCOUNT = pwd.getpwnam("games")
USER = ACCOUNT.pw_uid
"""An account that every system has and that runs no programs; Apptainer needs an account."""

HERE = Path(__file__).parent

HOME = "{home}"

OTHER_GROUP = 1_999_999_999
"""A group that no account has."""


def run_tests(runtime: Runtime, *words: str, first: Sequence[str] = ()) -> str:
    """Run pytest with these words as the user; ``first`` is what starts that as root. Returns what it says."""
    usual = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--basetemp={HOME}/t")
    return run(runtime, sys.executable, *usual, *words, first=first)


def run(runtime: Runtime, *command: str, first: Sequence[str] = ()) -> str:
    """Run a command as the user, in a folder of his own, which :data:`HOME` in it stands for; ``first`` is what starts
    that as root. Returns what it says, if it succeeds."""
    home = Path(tempfile.mkdtemp(prefix="prorl-u-", dir="/tmp"))
    # Who is in a sandbox with several users has no rights by a group that none of them is in.
    os.chown(home, USER, ACCOUNT.pw_gid)
    try:
        done = subprocess.run(
            [
                *first,
                *(sys.executable, __file__, str(USER)),
                *(word.replace(HOME, str(home)) for word in command),
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
        return done.stdout
    finally:
        shutil.rmtree(home)


def main() -> None:
    uid, command = int(sys.argv[1]), sys.argv[2:]
    gid = pwd.getpwuid(uid).pw_gid
    cache = cache_dir()
    needed = [Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2], cache]
    owner = create_single_user_namespace(0, uid, gid)
    walls = {path: wall for path in needed if (wall := first_untraversable_parent(path)) or path == cache}
    unshare_mounts()
    # Never removed from here: the real folders are to be seen below it.
    temporary = tempfile.mkdtemp()
    held = {path: Path(temporary, str(number)) for number, path in enumerate(walls)}
    for path, place in held.items():
        place.mkdir()
        mount_as_owner(str(path), str(place), owner if path == cache else None)
    for wall in {wall for wall in walls.values() if wall}:
        mount("tmpfs", str(wall), "tmpfs", 0, "mode=755,size=64k")
    for path, place in held.items():
        path.mkdir(parents=True, exist_ok=True)
        mount_as_owner(str(place), str(path), None)
    os.setgroups([OTHER_GROUP])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
