# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How the launcher is compiled, by the build (``setup.py``) and by tests that leave a wall out of it.

The compiler is Zig's C compiler from PyPI, which needs nothing of the machine and knows all architectures. Of its
headers only those of the kernel are used; there is no C library in the program. It takes some 0.3 s each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path


KERNEL_HEADERS = {"x86_64": "x86-linux-any", "aarch64": "aarch64-linux-any"}
"""Architectures, and where the compiler has the kernel's headers for each."""

_FLAGS = (
    *("-std=c11", "-Os", "-s", "-static", "-nostdlib", "-nostdinc", "-ffreestanding"),
    *(
        "-fno-stack-protector",
        "-fno-pie",
        "-fno-asynchronous-unwind-tables",
        "-fno-unwind-tables",
        "-Wall",
        "-Wextra",
        "-Werror",
    ),
)


def compile_for(machine: str, source: Path, target: Path, cache: Path | None = None) -> None:
    """Compile the launcher for an architecture of :data:`HEADERS`; sooner after others with a ``cache`` that is kept.

    Raises:
        subprocess.CalledProcessError: there is an error in it.
    """
    import ziglang

    library = Path(ziglang.__file__).parent / "lib"
    includes = ["include", f"libc/include/{machine}-linux-musl", "libc/include/generic-musl"]
    includes += [f"libc/include/{KERNEL_HEADERS[machine]}", "libc/include/any-linux-any"]
    with tempfile.TemporaryDirectory() as passing:
        kept = str(cache or passing)
        subprocess.run(
            [
                *(sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-musl", *_FLAGS),
                *("-iquote", str(Path(__file__).parent)),
                *(word for folder in includes for word in ("-isystem", str(library / folder))),
                *("-o", str(target), str(source)),
            ],
            # The user's own cache stays as it is.
            env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": kept, "ZIG_LOCAL_CACHE_DIR": kept},
            check=True,
        )
