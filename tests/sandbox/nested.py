# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``nested.py [--root] [--enter FOLDER [--covered FOLDER]] COMMAND...``: run it as in a container.

In a user namespace of this user, as he is or as its root, with no new privileges, as enroot and Pyxis have it: who is
no root there has no capability, and for who is, calls that change owners or users are said to have succeeded. With
``--enter`` the root folder is another, in which the machine's kernel file systems are to be seen, and of its disk only
what these tests need; ``--covered`` hides a part of them, as hooks of drivers do.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_gym_prorl import syscall_filter
from nemo_gym_prorl.sandbox.images.entries import cache_dir
from nemo_gym_prorl.sandbox.isolation import seccomp, syscalls
from nemo_gym_prorl.sandbox.isolation.user_ids import IdSpan, write_id_maps
from nemo_gym_prorl.sandbox.runtime.apptainer import ROOT_CACHE
from nemo_gym_prorl.tasks.code.inside.process_hardening import filter_calls


HERE = Path(__file__)

PRETENDED = {
    "x86_64": (92, 93, 94, 105, 106, 113, 114, 116, 117, 119, 260),
    "aarch64": (54, 55, 143, 144, 145, 146, 147, 149, 159),
}
"""``chown`` and ``setuid`` with their kin."""

MS_NODEV = 4


def command(*options: str) -> list[str]:
    """What to put before a command."""
    return [sys.executable, str(HERE), *options]


def enter_namespace(uids: Sequence[IdSpan], gids: Sequence[IdSpan]) -> None:
    """Become a user of a new user namespace, mapped from outside where this process may not do it itself."""
    ready, done, pid = os.pipe(), os.pipe(), os.getpid()
    child = os.fork()
    if child == 0:
        os.read(ready[0], 1)
        try:
            write_id_maps(pid, uids, gids, deny_groups=True)
            os.write(done[1], b"\n")
        finally:
            os._exit(0)
    os.unshare(os.CLONE_NEWUSER)
    os.write(ready[1], b"\n")
    os.close(done[1])
    assert os.read(done[0], 1), "it could not be mapped"
    os.waitpid(child, 0)
    for descriptor in (*ready, done[0]):
        os.close(descriptor)


def enter_root(image: Path, covered: Sequence[str]) -> None:
    """Have the folders of an image for root, with what the tests need in it, and no other of the machine's."""
    syscalls.unshare_mounts()
    home = os.environ.get("TMPDIR", "/tmp")
    root = Path("/tmp")
    seen = [sys.prefix, sys.base_prefix, HERE.parents[2], cache_dir(), ROOT_CACHE, "/etc/passwd", "/etc/group"]
    sources = {str(path): str(path) for path in seen if Path(path).exists()}
    sources |= {f"/{entry.name}": str(entry) for entry in image.iterdir() if entry.is_dir() and not entry.is_symlink()}
    held = {
        path: syscalls.open_tree(sources[path]) for path in sorted(sources) if path not in ("/tmp", "/root", "/var")
    }
    kernels = {path: syscalls.open_tree(path, recursive=True) for path in ("/proc", "/sys", "/dev")}
    syscalls.set_mount_attributes(kernels["/sys"], syscalls.ATTRIBUTE_RDONLY)
    links = {entry.name: entry.readlink() for entry in image.iterdir() if entry.is_symlink()}
    syscalls.mount("tmpfs", str(root), "tmpfs", syscalls.MS_NOSUID | MS_NODEV, "mode=755")
    for name, target in links.items():
        (root / name).symlink_to(target)
    for path, tree in (held | kernels).items():
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.startswith("/etc/"):
            place.touch()
        else:
            place.mkdir(exist_ok=True)
        syscalls.move_mount(tree, str(place))
    for path in ("tmp", "var/tmp", home.lstrip("/")):
        (root / path).mkdir(parents=True, exist_ok=True)
    for place in covered:
        syscalls.mount("tmpfs", str(root / place.lstrip("/")), "tmpfs", 0, "size=4k")
    os.chdir(root)
    pivot_root = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
    syscalls._check(syscalls._libc.syscall(pivot_root, b".", b"."), "pivot_root")
    syscalls.unmount(".")
    os.chdir(HERE.parents[2])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", action="store_true")
    parser.add_argument("--enter", type=Path)
    parser.add_argument("--covered", action="append", default=[])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    inside = (0, 0) if options.root else (os.geteuid(), os.getegid())
    spans = [[(own, outside, 1)] for own, outside in zip(inside, (os.geteuid(), os.getegid()), strict=True)]
    enter_namespace(*spans)
    if options.enter:
        enter_root(options.enter, options.covered)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    if options.root:
        table = seccomp.TABLES[os.uname().machine]
        filter_calls(
            syscall_filter.compile_filter(
                table.audit, dict.fromkeys(PRETENDED[os.uname().machine], syscall_filter._ERRNO), 1 << 12
            )
        )
    else:
        for capability in range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
            syscalls.prctl(syscalls.PR_CAPBSET_DROP, capability)
    os.execvp(options.command[0], options.command)


if __name__ == "__main__":
    main()
