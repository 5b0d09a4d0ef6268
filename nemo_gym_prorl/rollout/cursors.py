# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Places in a service's logs, as a caller holds them: opaque text. A restart makes it invalid, but for places in a log
of outcomes that is in a journal.

Whatever else a service counts it counts from nothing when it starts. So a cursor carries the epoch in which it was
given: one of another epoch is an error that says so, and never a place in the wrong log, which would be a gap that
nobody notices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from nemo_gym_prorl.failures import CallerError


_FORM = re.compile(r"(?:([0-9a-z]+)-)?([0-9]{1,18})", re.ASCII)


class CursorExpired(CallerError):
    """What lies behind the cursor is not all there any more; the follower has missed outcomes and must list afresh."""

    http_status = 410
    problem = "cursor-expired"


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place behind the ``position`` first entries of a log.

    Attributes:
        epoch: of the service that gave it; empty in a bare number, which belongs to no epoch. Only the bare ``0``, the
            beginning, holds in each.
        position: entries before it.
    """

    epoch: str
    position: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.position}" if self.epoch else str(self.position)

    @classmethod
    def parse(cls, text: str, field: str = "after") -> Self:
        """A cursor from its text.

        Raises:
            CallerError: it is none; names ``field``.
        """
        if (match := _FORM.fullmatch(text)) is None:
            raise CallerError(f"{text[:100]!r} is no cursor; send one as the service gave it, or 0", field=field)
        return cls(match[1] or "", int(match[2]))

    def within(self, epoch: str, first: int, end: int) -> int:
        """The position in a log of this ``epoch`` that holds entries ``first`` to ``end``.

        Raises:
            CursorExpired: it is of another epoch, or what lies behind it is forgotten.
            CallerError: it lies beyond the end, where no cursor was ever given.
        """
        if self.epoch != epoch and (self.epoch or self.position):
            raise CursorExpired(
                f"{self} was given by a service that has been restarted; list again and follow from the new cursor",
                field="after",
            )
        if self.position < first:
            raise CursorExpired(
                f"what lies behind {self} is partly forgotten, up to {epoch}-{first}; list again and follow from the "
                "new cursor",
                field="after",
            )
        if self.position > end:
            raise CallerError(f"{self} lies beyond the end of the log, {epoch}-{end}", field="after")
        return self.position
