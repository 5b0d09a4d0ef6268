# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Token ids as the text that they are on the wire: prompts that are appended to, and tokens that agents send back.

A prompt of 64k tokens is 400 KB of JSON, in the request to the engine, in the engine's answer, in ours to the agent
and in what the agent sends back, in every turn. As text, ids are copied and compared, which takes microseconds. No
number is read out of the text: the ledger's numbers count, and the text is made of them.

Gym's agents send each turn's prompt, ids and log-probs with the whole history. :func:`strip_known_tokens` compares
these with what was written, byte for byte, and cuts them out before the rest is read as JSON. A turn that differs in
any byte is not cut out, and is read in full. Pure: no task, socket, clock or thread.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import overload

import orjson

from nemo_gym_prorl.policy.tokens.ledger import TokenLedger, Turn


BRANCHES = 4
"""Of so many branches the texts are kept, those that were asked for last: an agent goes on from one of them."""


class Prompt(Sequence[int]):
    """The ids of a prompt: a turn's whole sequence and what is new after it.

    Args:
        before: the turn that it continues, if any.
        new: the ids after that.
        parts: all of them as a list in JSON, in parts.
    """

    __slots__ = ("_ids", "before", "new", "parts")

    def __init__(self, before: Turn | None, new: Sequence[int], parts: Sequence[bytes]) -> None:
        self.before = before
        self.new = new
        self.parts = parts
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


def json_of_ids(ids: Sequence[int]) -> Sequence[bytes]:
    """Ids as a list in JSON, in parts."""
    return ids.parts if isinstance(ids, Prompt) else (orjson.dumps(list(ids)),)


class IdTexts:
    """The texts of a rollout's sequences, each appended to as its branch grows: a prompt of any length is put together
    of three pieces. A text that is not kept is written again when it is asked for."""

    def __init__(self) -> None:
        self._texts: OrderedDict[Turn, bytes] = OrderedDict()
        self._lengths: dict[Turn, int] = {}
        self._sampled: dict[Turn, bytes] = {}

    def prompt(self, before: Turn | None, new: Sequence[int]) -> Prompt:
        """What follows a turn, as a prompt."""
        added = _added(new, first=before is None)
        return Prompt(before, new, (added, b"]") if before is None else (self._upto(before), added, b"]"))

    def before(self, turn: Turn) -> bytes:
        """The text of a turn's prompt: a list that is not closed."""
        text = self._upto(turn)
        return text[: self._lengths[turn]]

    def reaching(self, tip: Turn) -> tuple[bytes, Mapping[Turn, int]]:
        """The text of a turn's whole sequence, and how much of it is the prompt of each turn on the way."""
        return self._upto(tip), self._lengths

    def sampled(self, turn: Turn) -> bytes:
        """What follows the ids of a turn's prompt, where its three token fields are written as JSON."""
        if turn not in self._sampled:
            self._sampled[turn] = b'],"generation_token_ids":%b,"generation_log_probs":%b' % (
                orjson.dumps(turn.sampled.tolist()),
                orjson.dumps(turn.log_probs.tolist()),
            )
        return self._sampled[turn]

    def _upto(self, tip: Turn) -> bytes:
        """A list that is not closed, of all ids up to the end of a turn."""
        missing: list[Turn] = []
        turn: Turn | None = tip
        while turn is not None and turn not in self._texts:
            missing.append(turn)
            turn = turn.parent
        parts = [b"" if turn is None else self._texts.pop(turn)]
        length = len(parts[0])
        for one in reversed(missing):
            observed = _added(one.observed.tolist(), first=one.parent is None)
            sampled = _added(one.sampled.tolist(), first=False)
            self._lengths[one] = length + len(observed)
            length = self._lengths[one] + len(sampled)
            parts += (observed, sampled)
        whole = self._texts[tip] = b"".join(parts)
        if len(self._texts) > BRANCHES:
            self._texts.popitem(last=False)
        return whole


def _added(ids: Sequence[int], *, first: bool) -> bytes:
    """Ids at the beginning of a list, which is never empty, or behind others."""
    if not ids:
        return b"[" if first else b""
    text = orjson.dumps(ids)[:-1]
    return text if first else b",%b" % text[1:]


MARK = f"turn of {uuid.uuid4().hex}"
"""The field in the place of a known turn's tokens, with its number among those found. No caller knows the name."""

_NAME = b'"prompt_token_ids":'


def strip_known_tokens(body: bytes, ledger: TokenLedger, texts: IdTexts) -> tuple[bytes, list[Turn]] | None:
    """A request without the tokens of the turns that it repeats, and those turns in their order.

    Returns:
        ``None`` where it has tokens that are not those of one branch from its first turn on.
    """
    at = body.find(_NAME)
    if at < 0:
        return body, []
    for leaf in islice(_latest(ledger), BRANCHES):
        if (found := _along(body, at, leaf.path(), texts)) is not None:
            return found
    return None


def _latest(ledger: TokenLedger) -> list[Turn]:
    return list(ledger.leaves())[::-1]


def _along(body: bytes, at: int, path: Sequence[Turn], texts: IdTexts) -> tuple[bytes, list[Turn]] | None:
    parts, end, number = [], 0, 0
    text, lengths = texts.reaching(path[-1])
    # No string can hold the name with bare quotes, so each of these is a field.
    while at >= 0:
        if number == len(path):
            return None
        turn, start = path[number], at + len(_NAME)
        length, rest = lengths[turn], texts.sampled(turn)
        with memoryview(text)[:length] as ids:
            known = bool(turn.sampled) and body.startswith(ids, start) and body.startswith(rest, start + length)
        if not known:
            return None
        parts.append(b'%b"%b":%d' % (body[end:at], MARK.encode(), number))
        end = start + length + len(rest)
        at, number = body.find(_NAME, end), number + 1
    return b"".join([*parts, body[end:]]), list(path[:number])
