# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Compile a table of rules for system calls into a seccomp BPF program.

Pure: this module returns bytes and installs no filter. Sandboxes and graders inside of sandboxes install the programs.
The package compiles filters itself because libseccomp is not on every machine.

The program finds the number of a system call by binary search. From Linux 5.11 on, the kernel caches results that
depend on the number alone.

The program compares the lower 32 bits of arguments. The kernel ignores the upper bits of the arguments that have rules
here, so a rule over 64 bits could be bypassed by setting an upper bit. Both supported architectures are little-endian:
the lower half comes first.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


ALLOW = 0x7FFF0000
KILL = 0x80000000
_ERRNO = 0x00050000

REFUSE = _ERRNO | errno.EPERM
"""Action: the call fails with ``EPERM``, as for a caller without permission."""

UNKNOWN = _ERRNO | errno.ENOSYS
"""Action: the call fails with ``ENOSYS``, as on a kernel that lacks the call; programs then use a fallback."""

MASK_32 = 0xFFFFFFFF
"""Mask of all argument bits that a rule can compare."""

_LOAD, _AND, _GOTO, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
"""Byte offsets in ``struct seccomp_data``."""

_MAX_JUMP = 255
"""Maximum number of instructions that a conditional jump can skip: its offset has 8 bits."""


@dataclass(frozen=True, slots=True)
class ArgumentRule:
    """Rule that chooses the action by one argument of the system call.

    Attributes:
        index: position of the argument, from 0.
        values: values to compare the masked argument with.
        then: action or rule if the masked argument is one of ``values``.
        otherwise: action or rule if the masked argument is another value.
        mask: bits of the argument that are compared.
    """

    index: int
    values: frozenset[int]
    then: FilterAction
    otherwise: FilterAction
    mask: int = MASK_32


FilterAction = int | ArgumentRule

_Instruction = tuple[int, int, int, int]
"""BPF instruction: operation code, jump offset if true, jump offset if false, operand."""


def compile_filter(architecture: int, actions: Mapping[int, FilterAction], last: int) -> bytes:
    """Return the BPF program for one architecture; a system call of another architecture kills the process.

    Args:
        architecture: the kernel's audit number of the architecture (``AUDIT_ARCH_*``).
        actions: action by number of the system call; calls without an action are allowed.
        last: highest known number of a system call; higher numbers are :data:`UNKNOWN`.
    """
    found = _search(_spans(actions, last))
    start = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_IF_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, KILL)]
    return b"".join(struct.pack("=HBBI", *each) for each in [*start, (_LOAD, 0, 0, _NUMBER_AT), *found])


def _spans(actions: Mapping[int, FilterAction], last: int) -> list[tuple[int, FilterAction]]:
    spans: list[tuple[int, FilterAction]] = []
    for number in range(last + 1):
        action = actions.get(number, ALLOW)
        if not spans or spans[-1][1] != action:
            spans.append((number, action))
    return [*spans, (last + 1, UNKNOWN)]


def _search(spans: Sequence[tuple[int, FilterAction]]) -> list[_Instruction]:
    if len(spans) == 1:
        return _leaf(spans[0][1])
    middle = len(spans) // 2
    below, above = _search(spans[:middle]), _search(spans[middle:])
    if len(below) <= _MAX_JUMP:
        return [(_IF_AT_LEAST, len(below), 0, spans[middle][0]), *below, *above]
    return [(_IF_AT_LEAST, 0, 1, spans[middle][0]), (_GOTO, 0, 0, len(below)), *below, *above]


def _leaf(action: FilterAction) -> list[_Instruction]:
    if isinstance(action, int):
        return [(_RETURN, 0, 0, action)]
    values, otherwise = sorted(action.values), _leaf(action.otherwise)
    return [
        (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * action.index),
        (_AND, 0, 0, action.mask),
        *((_IF_EQUAL, len(values[index:]) - 1 + len(otherwise), 0, value) for index, value in enumerate(values)),
        *otherwise,
        *_leaf(action.then),
    ]
