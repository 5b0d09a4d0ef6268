# SPDX-License-Identifier: Apache-2.0
"""Token ids as the text that they are on the wire, written once and appended to.

A prompt of 64k tokens is 400 KB of JSON, in the request to the engine, in the engine's answer, in ours to the agent
and in what the agent sends back, in every turn. As a list of numbers it would be written and read each time. As text
it is copied and compared, which takes microseconds. Nothing is read out of the text: the ledger's numbers are what
counts, and the text is made of them.

Pure: no task, socket, clock or thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import orjson

from nemo_gym_prorl.policy.tokens.ledger import Turn


class Prompt(Sequence[int]):
    """The ids of a prompt: a turn's whole sequence and what is new after it.

    Args:
        before: the turn that it continues, if any.
        new: the ids after that.
        text: all of them in decimal, between commas.
    """

    __slots__ = ("_ids", "before", "new", "text")

    def __init__(self, before: Turn | None, new: Sequence[int], text: bytes) -> None:
        self.before = before
        self.new = new
        self.text = text
        self._ids: list[int] | None = None

    def __len__(self) -> int:
        return (self.before.end if self.before else 0) + len(self.new)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        return self.ids()[at]

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids())

    def ids(self) -> list[int]:
        """The numbers."""
        if self._ids is None:
            self._ids = [*(self.before.sequence() if self.before else ()), *self.new]
        return self._ids


def text_of_ids(ids: Sequence[int]) -> bytes:
    """Ids in decimal, between commas."""
    return ids.text if isinstance(ids, Prompt) else orjson.dumps(list(ids))[1:-1]


class IdTexts:
    """The texts of a rollout's turns: all of it for the turn asked for last, lengths alone for those before it."""

    def __init__(self) -> None:
        self._tip: Turn | None = None
        self._text = b""
        self._lengths: dict[Turn, int] = {}
        self._sampled: dict[Turn, bytes] = {}

    def prompt(self, before: Turn | None, new: Sequence[int]) -> Prompt:
        """What follows a turn, as a prompt."""
        text = self._upto(before) if before is not None else b""
        return Prompt(before, new, _joined(text, new))

    def before(self, turn: Turn) -> bytes:
        """The text of a turn's prompt."""
        text = self._upto(turn)
        return text[: self._lengths[turn]]

    def reaching(self, turn: Turn, tip: Turn) -> tuple[bytes, int]:
        """The text of a sequence, and how much of it is the prompt of a turn on the way.

        Args:
            turn: the turn.
            tip: one that continues it, or itself.
        """
        text = self._upto(tip)
        return text, self._lengths[turn]

    def sampled(self, turn: Turn) -> bytes:
        """What follows the ids of a turn's prompt, where its three token fields are written as JSON."""
        if turn not in self._sampled:
            log_probs = [float(one) for one in turn.log_probs]
            self._sampled[turn] = b'],"generation_token_ids":%b,"generation_log_probs":%b' % (
                orjson.dumps(turn.sampled),
                orjson.dumps(log_probs),
            )
        return self._sampled[turn]

    def _upto(self, turn: Turn) -> bytes:
        missing: list[Turn] = []
        one: Turn | None = turn
        while one is not None and one is not self._tip:
            missing.append(one)
            one = one.parent
        text = self._text if one is not None else b""
        for after in reversed(missing):
            asked = _joined(text, after.observed)
            text = _joined(asked, after.sampled)
            self._lengths[after] = len(asked)
        self._tip, self._text = turn, text
        return text


def _joined(text: bytes, ids: Sequence[int]) -> bytes:
    if not ids:
        return text
    more = orjson.dumps(ids)[1:-1]
    return b"%b,%b" % (text, more) if text else more
