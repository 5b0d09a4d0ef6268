# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""From a table of verdicts about system calls to a program that the kernel runs before each of them.

Pure: bytes out, nothing is installed here; for sandboxes, and for what graders run in them. The kernel's own library
for this is not on every machine, and a sandbox must not depend on one; what is needed of it is this page. The number
of a call is found by binary search, so that a call costs the same few instructions wherever it stands in the table;
what depends on the number alone, the kernel works out once and then does not ask again (Linux 5.11).

Arguments are compared by their lower 32 bits, which is all that the kernel itself reads of those we look at: a rule
over 64 bits could be passed by with something in the upper half. Both architectures store the lower half first.
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
"""As if the caller lacked the right."""

UNKNOWN = _ERRNO | errno.ENOSYS
"""As if the kernel were too old to have it: programs then do it another way."""

MASK_32 = 0xFFFFFFFF

_LOAD, _AND, _GOTO, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
"""Where in what the kernel shows of a call."""

_FURTHEST = 255
"""Instructions that a conditional jump can skip."""


@dataclass(frozen=True, slots=True)
class ArgumentRule:
    """A verdict that depends on an argument.

    Attributes:
        index: which argument, from 0.
        values: what the argument, less the bits that are not in ``mask``, is compared with.
        then: the verdict if it is one of them.
        otherwise: the verdict if not.
        mask: the bits that count.
    """

    index: int
    values: frozenset[int]
    then: FilterAction
    otherwise: FilterAction
    mask: int = MASK_32


FilterAction = int | ArgumentRule

_Instruction = tuple[int, int, int, int]
"""Operation, instructions to skip if true, and if false, operand."""


def compile_filter(architecture: int, verdicts: Mapping[int, FilterAction], last: int) -> bytes:
    """The program for calls of one architecture; those of any other end the process.

    Args:
        architecture: by the kernel's audit numbers.
        verdicts: of each call that is not simply allowed, by its number.
        last: calls with higher numbers are :data:`UNKNOWN`.
    """
    found = _search(_spans(verdicts, last))
    start = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_IF_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, KILL)]
    return b"".join(struct.pack("=HBBI", *each) for each in [*start, (_LOAD, 0, 0, _NUMBER_AT), *found])


def _spans(verdicts: Mapping[int, FilterAction], last: int) -> list[tuple[int, FilterAction]]:
    """First number and verdict of each run of numbers with the same one, in order."""
    spans: list[tuple[int, FilterAction]] = []
    for number in range(last + 1):
        verdict = verdicts.get(number, ALLOW)
        if not spans or spans[-1][1] != verdict:
            spans.append((number, verdict))
    return [*spans, (last + 1, UNKNOWN)]


def _search(spans: Sequence[tuple[int, FilterAction]]) -> list[_Instruction]:
    if len(spans) == 1:
        return _leaf(spans[0][1])
    middle = len(spans) // 2
    below, above = _search(spans[:middle]), _search(spans[middle:])
    if len(below) <= _FURTHEST:
        return [(_IF_AT_LEAST, len(below), 0, spans[middle][0]), *below, *above]
    return [(_IF_AT_LEAST, 0, 1, spans[middle][0]), (_GOTO, 0, 0, len(below)), *below, *above]


def _leaf(verdict: FilterAction) -> list[_Instruction]:
    if isinstance(verdict, int):
        return [(_RETURN, 0, 0, verdict)]
    values, otherwise = sorted(verdict.values), _leaf(verdict.otherwise)
    return [
        (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * verdict.index),
        (_AND, 0, 0, verdict.mask),
        *((_IF_EQUAL, len(values[place:]) - 1 + len(otherwise), 0, value) for place, value in enumerate(values)),
        *otherwise,
        *_leaf(verdict.then),
    ]
