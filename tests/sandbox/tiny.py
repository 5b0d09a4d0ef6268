# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A root folder that is small enough to be packed, pulled and unpacked many times."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


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
