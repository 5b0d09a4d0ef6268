# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Programs of a few instructions, for images of tests."""

from __future__ import annotations

import os
import struct


_WAITING = {
    # again: mov eax, 34 (pause); syscall; jmp again
    "x86_64": (62, bytes.fromhex("b822000000 0f05 ebf7")),
    # again: mov x0..x4, 0; mov x8, 73 (ppoll); svc 0; b again
    "aarch64": (183, struct.pack("<8I", *range(0xD2800000, 0xD2800005), 0xD2800928, 0xD4000001, 0x17FFFFF9)),
}


def executable(body: bytes, machine: int = 62) -> bytes:
    """One that begins with the first instruction of ``body``, which is position-independent."""
    size = 64 + 56 + len(body)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, machine, 1, size - len(body), 64, 0, 0, 64, 56, 1, 0, 0, 0
    )
    return header + struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, size, size, 0x10000) + body


def waiting() -> bytes:
    """One that says nothing and does not end."""
    machine, code = _WAITING[os.uname().machine]
    return executable(code, machine)
