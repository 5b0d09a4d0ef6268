# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Files in ``/proc`` whose contents are the word of whoever is looked at.

A process may tell the kernel where its variables and its command line begin and end (``PR_SET_MM_MAP``), and so have
them read as gigabytes by whoever looks for something among all processes of the machine. So no more is read of either
than a program can be given.
"""

from __future__ import annotations

import os


MOST = 6 << 20
"""Bytes of variables and arguments that Linux gives a program at most (``execve(2)``)."""


def variables(pid: int) -> list[bytes]:
    """The variables that a process was given, each as ``NAME=value``.

    Raises:
        OSError: it has ended, or is somebody else's.
    """
    return _beginning(f"/proc/{pid}/environ").split(b"\0")


def command_line(pid: int) -> bytes:
    """What a process says that it was started as: its arguments, each with a zero byte behind it.

    Raises:
        OSError: it has ended, or is somebody else's.
    """
    return _beginning(f"/proc/{pid}/cmdline")


def _beginning(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = bytearray()
        while len(found) < MOST and (chunk := os.read(descriptor, min(1 << 16, MOST - len(found)))):
            found += chunk
        return bytes(found)
    finally:
        os.close(descriptor)
