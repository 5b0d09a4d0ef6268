# SPDX-License-Identifier: Apache-2.0
"""The program that is a sandbox's first process for the rest of its life: one that waits, and does nothing else.

It takes a few pages of memory, and tells those inside nothing (:mod:`.tiny_elf`).
"""

from __future__ import annotations

import errno
import os
import struct

from nemo_gym_prorl.sandbox.isolation.scripting import tiny_elf


NAME = "sandbox"

_CODE = {
    # again: mov eax, 34 (pause); syscall; jmp again
    "x86_64": bytes.fromhex("b822000000 0f05 ebf7"),
    # again: mov x0..x4, 0; mov x8, 73 (ppoll); svc 0; b again
    "aarch64": struct.pack("<8I", *range(0xD2800000, 0xD2800005), 0xD2800928, 0xD4000001, 0x17FFFFF9),
}
"""The program for each architecture."""


def make() -> int:
    """The program, as a descriptor to be executed.

    Raises:
        OSError: it is not known for this architecture, or this machine's memory files can't be executed.
    """
    machine = os.uname().machine
    if machine not in _CODE:
        raise OSError(errno.ENOSYS, f"there is no program for {machine}")
    return tiny_elf.load(NAME, tiny_elf.image(tiny_elf.MACHINES[machine], _CODE[machine]))
