# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A root folder that is small enough to be packed, pulled and unpacked many times."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from nemo_gym_prorl.sandbox.images import rootfs
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime


PROGRAMS = ("dash", "id", "ls", "mkdir", "cat", "sleep", "cp", "chmod", "chown", "touch", "setpriv", "setsid", "env")


def make_tiny_root(image: Path, root: Path) -> None:
    """Fill ``root`` with a few programs of a root folder that has more, and the libraries that they load."""
    for name in ("usr/bin", "usr/lib", "usr/lib64", "etc", "tmp", "root", "dev", "proc", "sys", "var/tmp"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for program in PROGRAMS:
        shutil.copy(image / "usr/bin" / program, root / "usr/bin" / program)
        for name in _libraries(image / "usr/bin" / program):
            found = next((image / "usr").rglob(name))
            target = root / found.relative_to(image)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(found, target)
    (root / "usr/bin/sh").symlink_to("dash")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")


def _libraries(program: Path) -> list[str]:
    """Names of the libraries that a program loads, with its loader."""
    listing = subprocess.check_output(["ldd", str(program)], text=True)
    return [Path(line.split()[0]).name for line in listing.splitlines() if "=>" in line or "/ld-" in line]


def pack(root: Path, target: Path, runtime: Runtime) -> None:
    """Make a SIF of a root folder as it is, by hand: the runtime's own builder puts folders of its own into it."""
    found = shutil.which("mksquashfs") or next(runtime.path.parents[1].glob("lib*/**/apptainer/bin/mksquashfs"))
    partition = target.with_suffix(".squashfs")
    options = ("-noappend", "-quiet", "-no-progress", "-all-root", "-no-xattrs", "-comp", "gzip")
    subprocess.run([found, root, partition, *options], check=True, stdout=subprocess.DEVNULL)
    content = partition.read_bytes()
    partition.unlink()
    arch = next(number for number, name in rootfs._SIF_PROCESSORS.items() if name == os.uname().machine)
    table, begin = 4096, 1 << 16
    extra = rootfs._PARTITION.pack(rootfs._SQUASHFS, rootfs._SYSTEM, arch)
    group = -0x0FFFFFFF
    entry = (rootfs._PARTITION_KIND, True, 1, group, 0, begin, len(content), len(content), 0, 0, 0, 0, b"root", extra)
    described = rootfs._DESCRIPTOR.pack(*entry)
    sizes = (0, 0, 0, 1, table, len(described), begin, len(content))
    launcher = b"#!/usr/bin/env run-singularity\n"
    header = rootfs._HEADER.pack(launcher, b"SIF_MAGIC\0", b"01", arch, os.urandom(16), *sizes)
    target.write_bytes((header.ljust(table, b"\0") + described).ljust(begin, b"\0") + content)


def wait_until_nothing_runs_for(folder: Path, patience_s: float = 60.0) -> None:
    """Wait until no process, inside a container or outside, has the folder among its arguments or variables."""
    deadline = time.monotonic() + patience_s
    while running := _running_for(folder):
        assert time.monotonic() < deadline, f"for nobody there still runs {running}"
        time.sleep(0.1)


def _running_for(folder: Path) -> dict[int, bytes]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # It may have ended just now, or be somebody else's.
            with suppress(OSError):
                text = (entry / "cmdline").read_bytes()
                if str(folder).encode() in text + (entry / "environ").read_bytes():
                    found[int(entry.name)] = text
    return found
