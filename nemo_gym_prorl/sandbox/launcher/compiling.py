# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Compile the launcher, for the build (``setup.py``) and for tests that remove a protection from the source.

Zig's C compiler from PyPI compiles for all architectures on any machine. The launcher uses only the kernel's headers,
and no C library.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path


KERNEL_HEADERS = {"x86_64": "x86-linux-any", "aarch64": "aarch64-linux-any"}
"""Name, by architecture, of the folder with the kernel's headers in the compiler's ``libc/include``."""

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
    """Compile the launcher for an architecture; a ``cache`` folder of the compiler makes later compilations faster.

    Raises:
        subprocess.CalledProcessError: the source has an error.
    """
    import ziglang

    library = Path(ziglang.__file__).parent / "lib"
    includes = ["include", f"libc/include/{machine}-linux-musl", "libc/include/generic-musl"]
    includes += [f"libc/include/{KERNEL_HEADERS[machine]}", "libc/include/any-linux-any"]
    with tempfile.TemporaryDirectory() as temporary:
        cache_folder = str(cache or temporary)
        subprocess.run(
            [
                *(sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-musl", *_FLAGS),
                *("-iquote", str(Path(__file__).parent)),
                *(word for folder in includes for word in ("-isystem", str(library / folder))),
                *("-o", str(target), str(source)),
            ],
            # Otherwise Zig would write to caches in the user's home and in the working directory.
            env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache_folder, "ZIG_LOCAL_CACHE_DIR": cache_folder},
            check=True,
        )
