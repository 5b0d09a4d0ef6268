# SPDX-License-Identifier: Apache-2.0
"""What is removed when there is too much. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something that takes room: when it was last used, and whether it must stay."""

    name: str
    bytes: int
    last_use: float
    kept: bool


def least_used(
    candidates: Iterable[Candidate], *, max_bytes: int | None = None, before: float | None = None
) -> list[str]:
    """The names of what goes, the least recently used first: all that was last used before ``before``, and then as
    much as it takes for the rest to fit into ``max_bytes``. What must stay does, and counts."""
    everything = sorted(candidates, key=lambda one: (one.last_use, one.name))
    total = sum(one.bytes for one in everything)
    doomed = []
    for one in everything:
        old = before is not None and one.last_use < before
        if one.kept or not (old or (max_bytes is not None and total > max_bytes)):
            continue
        doomed.append(one.name)
        total -= one.bytes
    return doomed
