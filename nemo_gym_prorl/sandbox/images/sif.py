# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a Singularity image file says about itself, read without the runtime.

A file that was cut short, is for another processor or is no image at all is found here, in some 50 µs, and not by a
runtime that fails in its own words after a mount. Pure but for :func:`read`, which reads the first 64 KiB.

The format: a header of 128 bytes, then a table of descriptors, then what they describe. Numbers are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from nemo_gym_prorl.failures import CallerError


MAGIC = b"SIF_MAGIC\0"

MACHINES = {
    b"01": "i686",
    b"02": "x86_64",
    b"03": "armv7l",
    b"04": "aarch64",
    b"05": "ppc64",
    b"06": "ppc64le",
    b"11": "s390x",
    b"12": "riscv64",
}
"""The header's numbers of processors, by the names that ``uname -m`` has for them."""

_HEADER = struct.Struct("<32s10s3s3s16s8q")
_DESCRIPTOR = struct.Struct("<i?iiiqqqqqqq128s384s")
_PARTITION = struct.Struct("<ii3s")
_READ = 1 << 16
_PARTITION_KIND = 0x4004
_SQUASHFS = 1
_SYSTEM = 2


@dataclass(frozen=True, slots=True)
class Sif:
    """An image file.

    Attributes:
        machine: the processor it is for, as ``uname -m`` says it; empty if it does not say.
        identity: the random number that it got when it was made.
        offset: where its root file system begins; ``None`` if that is not squashfs, or encrypted.
        size: how many bytes belong to it.
    """

    machine: str
    identity: str
    offset: int | None
    size: int


def is_sif(head: bytes) -> bool:
    """Whether a file that begins so is meant to be one."""
    return head[32:42] == MAGIC


def parse(head: bytes) -> Sif:
    """Read the beginning of an image file.

    Raises:
        ValueError: it is not one, or its table is damaged; says what is wrong.
    """
    if len(head) < _HEADER.size or not is_sif(head):
        raise ValueError("not a Singularity image file")
    header = _HEADER.unpack_from(head)
    arch, identity = header[3].rstrip(b"\0"), header[4].hex()
    total, table = header[8], header[9]
    if not 0 <= total * _DESCRIPTOR.size <= len(head) - table or table < _HEADER.size:
        raise ValueError("its table of contents is damaged or cut off")
    offset, size = None, table + total * _DESCRIPTOR.size
    system = False
    for number in range(total):
        kind, used, *_ids, at, length = _DESCRIPTOR.unpack_from(head, table + number * _DESCRIPTOR.size)[:7]
        if not used:
            continue
        size = max(size, at + length)
        if kind == _PARTITION_KIND:
            extra = _DESCRIPTOR.unpack_from(head, table + number * _DESCRIPTOR.size)[-1]
            file_system, role, own_arch = _PARTITION.unpack_from(extra)
            if role == _SYSTEM:
                system = True
                arch = own_arch.rstrip(b"\0") or arch
                offset = at if file_system == _SQUASHFS else None
    if not system:
        raise ValueError("there is no root file system in it")
    return Sif(MACHINES.get(arch, ""), identity, offset, size)


def read(path: Path, machine: str) -> Sif:
    """Read and check an image file that is to be started on this ``machine``.

    Raises:
        CallerError: it can't be read, is damaged or cut short, or for another processor; for the field ``image``.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_READ)
            length = file.seek(0, 2)
    except PermissionError as error:
        raise CallerError(f"{path} can't be read by you: chmod a+r it", field="image") from error
    except OSError as error:
        raise CallerError(f"{path}: {error.strerror}", field="image") from error
    try:
        found = parse(head)
    except ValueError as error:
        raise CallerError(f"{path} is no usable image: {error}; build or pull it again", field="image") from error
    if length < found.size:
        raise CallerError(
            f"{path} is cut short ({length} of {found.size} bytes); copy, build or pull it again", field="image"
        )
    if found.machine not in ("", machine):
        raise CallerError(f"{path} is for {found.machine}, but this machine is {machine}", field="image")
    return found
