# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Where the programs run that make images for root: a user namespace whose root is nobody on this machine.

What makes an image runs commands of strangers (``%post`` and ``%setup`` of a definition file) and reads their files
(layers of a registry, a squashfs). Run by root as they are, such commands would be root's. So they get a block of host
ids that nobody has: inside, there is a root who may install packages and give files to other users; outside, he is a
stranger. Invariants:

- they may write below the folder they work in, which is given to them, and where any stranger may (``/tmp``);
- of the folders above it, and above whatever else they need, that strangers may not enter they see just that much: the
  rest of root's home folder, say, is not there;
- nothing they start outlives them: they have a PID namespace of their own, which ends with its first process.

The network is the machine's: packages come from there. Ordinary users have no use for this; what they run is theirs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from nemo_gym_prorl.sandbox.images.rootfs import everything
from nemo_gym_prorl.sandbox.isolation import syscalls, user_ids


_PACKAGES = str(Path(__file__).parents[4])
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from nemo_gym_prorl.sandbox.images.building import build_namespace
sys.exit(build_namespace.main(sys.argv[1:]))
"""


def confined(command: Sequence[str], work: Path, seen: Sequence[Path]) -> list[str]:
    """The command line that runs ``command`` so.

    Args:
        command: what to run; its program is found by its absolute path.
        work: the folder to work in, which it is given with all that is in it.
        seen: files and folders that it reads, wherever they lie; root's are its own there.
    """
    paths = [str(path) for path in (work, *seen)]
    return [sys.executable, "-ISc", _PROGRAM, _PACKAGES, *paths, "--", *command]


def main(arguments: Sequence[str]) -> int:
    """Run what :func:`confined` was given; its exit code."""
    split = arguments.index("--")
    work, *seen = map(Path, arguments[:split])
    # As a sandbox with several users has.
    first = user_ids.draw(several=True)
    ids = [(0, first, user_ids.BLOCK)]
    owner = user_ids.namespace(lambda pid: user_ids.write_maps(pid, ids, ids))
    _give(work, first)
    syscalls.private_mounts()
    _show(work, seen, owner)
    os.setns(owner)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.chdir(work)
    os.unshare(os.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        _become(arguments[split + 1 :])
    with contextlib.suppress(KeyboardInterrupt):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF
    return 130


def _become(command: Sequence[str]) -> NoReturn:
    """Become the first process of the PID namespace, which ends with us."""
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.unshare(os.CLONE_NEWNS)
        syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NOEXEC)
        os.execv(command[0], list(command))
    except OSError as error:
        print(f"{command[0]}: {error}", file=sys.stderr)
    finally:
        os._exit(127)


def _give(work: Path, owner: int) -> None:
    for _path, name, folder in everything(work):
        os.chown(name, owner, owner, dir_fd=folder, follow_symlinks=False)


def take_back(work: Path) -> None:
    """By root: close a folder that was given away, so that nobody who was handed it names what is in it."""
    os.chown(work, os.geteuid(), os.getegid())
    work.chmod(0o700)


def _show(work: Path, seen: Sequence[Path], owner: int) -> None:
    """Let ``owner``'s root get to what he needs, and to nothing else that strangers may not get to."""
    # By their descriptors, since what covers the walls covers them, too.
    held = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in dict.fromkeys((work, *seen))}
    walls = {wall for path in held if (wall := syscalls.walled_in(path))}
    for wall in walls:
        syscalls.mount("tmpfs", str(wall), "tmpfs", syscalls.MS_NOSUID, "mode=755,size=1m")
    for path, descriptor in held.items():
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                path.mkdir()
            else:
                path.touch()
        source = f"/proc/self/fd/{descriptor}"
        try:
            syscalls.mount_for(source, str(path), None if path == work else owner)
        except OSError:
            # An old kernel or an odd file system: what all may read can be read as it is, too.
            syscalls.bind(source, str(path))
        os.close(descriptor)
