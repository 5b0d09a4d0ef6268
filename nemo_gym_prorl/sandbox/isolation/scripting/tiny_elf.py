# SPDX-License-Identifier: Apache-2.0
"""Executables of a few hundred bytes in memory files: the programs of ours that stand in for a forked Python.

A forked Python would do, but takes megabytes of the supervisor's memory along, which are copied page by page as either
side changes them. That nobody may read the file makes the kernel treat the process as one whose memory and paths are
nobody's but its owner's: no program of a sandbox can trace it, though all have the same user id.
"""

from __future__ import annotations

import os
import struct

from nemo_gym_prorl.sandbox.isolation import syscalls


CODE_AT = 0x400000
DATA_AT = 0x600000
"""Where code and data are in memory, whatever the size of pages (64 KiB at most)."""

MACHINES = {"x86_64": 62, "aarch64": 183}
"""Their numbers in executables."""

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_LOADED, _READ_AND_EXECUTE, _READ_AND_WRITE, _PAGE = 1, 5, 6, 0x10000


def image(machine: int, code: bytes, data: bytes = b"", memory: int = 0) -> bytes:
    """An executable that begins with the first instruction of ``code``.

    Args:
        machine: of :data:`MACHINES`.
        code: position-independent.
        data: found at :data:`DATA_AT`.
        memory: bytes that can be written from there on.
    """
    count = 2 if memory else 1
    start = _HEADER.size + count * _SEGMENT.size
    size = start + len(code)
    entry = CODE_AT + start
    identity = b"\x7fELF\x02\x01\x01"
    file = _HEADER.pack(
        identity, 2, machine, 1, entry, _HEADER.size, 0, 0, _HEADER.size, _SEGMENT.size, count, 0, 0, 0
    )
    file += _SEGMENT.pack(_LOADED, _READ_AND_EXECUTE, 0, CODE_AT, CODE_AT, size, size, _PAGE)
    if not memory:
        return file + code
    file += _SEGMENT.pack(_LOADED, _READ_AND_WRITE, _PAGE, DATA_AT, DATA_AT, len(data), memory, _PAGE)
    return (file + code).ljust(_PAGE, b"\0") + data


def load(name: str, file: bytes) -> int:
    """An executable in a memory file that nobody may read or ever change, as a descriptor.

    Raises:
        OSError: this machine's memory files can't be executed.
    """
    memory = syscalls.executable_memory(name)
    try:
        os.write(memory, file)
        os.fchmod(memory, 0o111)
        syscalls.seal(memory)
    except OSError:
        os.close(memory)
        raise
    return memory
