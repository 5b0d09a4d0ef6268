# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Token ids as JSON text: prompts that grow by appending, and tokens that agents send back.

A prompt of 64k tokens is 400 KB of JSON. Each turn sends this JSON to the engine, and receives it from the engine and
from the agent. As text, ids can be copied and compared without parsing numbers. The ledger's numbers are the source of
truth, and the text is always written from the ledger.

Gym's agents send each turn's prompt, ids and log-probs with the whole history. :func:`strip_known_tokens` compares
these fields with the ledger's text byte for byte and cuts equal fields out before JSON parsing. If any byte differs,
the request is parsed in full. Pure: no task, socket, clock or thread.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import overload

import orjson

from nemo_gym_prorl.policy.tokens.ledger import LedgerTurn, TokenLedger


MAX_BRANCHES = 4
"""Maximum of branches whose texts are cached (LRU); an agent usually continues one of the latest branches."""


class Prompt(Sequence[int]):
    """Ids of a prompt: the whole sequence of a turn, and new ids after it.

    Args:
        before: the turn that the prompt continues, if any.
        new: the ids after that turn.
        parts: all ids as a JSON list, in parts.
    """

    __slots__ = ("_ids", "before", "new", "parts")

    def __init__(self, before: LedgerTurn | None, new: Sequence[int], parts: Sequence[bytes]) -> None:
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
        """Return all ids, built on first use."""
        if self._ids is None:
            self._ids = [*(self.before.sequence() if self.before else ()), *self.new]
        return self._ids


def json_parts(ids: Sequence[int]) -> Sequence[bytes]:
    return ids.parts if isinstance(ids, Prompt) else (orjson.dumps(list(ids)),)


class TokenTextCache:
    """Cached JSON texts of a rollout's sequences; an evicted text is written again on demand.

    A prompt of any length is the concatenation of a cached sequence, the new ids, and the closing bracket.
    """

    def __init__(self) -> None:
        self._texts: OrderedDict[LedgerTurn, bytes] = OrderedDict()
        self.prompt_lengths: dict[LedgerTurn, int] = {}
        """Length of a turn's prompt within the text of its sequence."""
        self._sampled: dict[LedgerTurn, bytes] = {}

    def prompt(self, before: LedgerTurn | None, new: Sequence[int]) -> Prompt:
        """Return the prompt that continues the turn ``before`` by new ids."""
        added = _list_items(new, first=before is None)
        return Prompt(before, new, (added, b"]") if before is None else (self.sequence_text(before), added, b"]"))

    def before(self, turn: LedgerTurn) -> bytes:
        """Return the text of a turn's prompt: a JSON list without its closing bracket."""
        text = self.sequence_text(turn)
        return text[: self.prompt_lengths[turn]]

    def sampled(self, turn: LedgerTurn) -> bytes:
        """Return the JSON after a turn's prompt ids: the closing bracket, and the two other token fields."""
        if turn not in self._sampled:
            self._sampled[turn] = b'],"generation_token_ids":%b,"generation_log_probs":%b' % (
                orjson.dumps(turn.sampled.tolist()),
                orjson.dumps(turn.log_probs.tolist()),
            )
        return self._sampled[turn]

    def sequence_text(self, tip: LedgerTurn) -> bytes:
        """Return all ids up to the end of a turn as a JSON list without its closing bracket."""
        missing: list[LedgerTurn] = []
        turn: LedgerTurn | None = tip
        while turn is not None and turn not in self._texts:
            missing.append(turn)
            turn = turn.parent
        parts = [b"" if turn is None else self._texts.pop(turn)]
        length = len(parts[0])
        for one in reversed(missing):
            observed = _list_items(one.observed.tolist(), first=one.parent is None)
            sampled = _list_items(one.sampled.tolist(), first=False)
            self.prompt_lengths[one] = length + len(observed)
            length = self.prompt_lengths[one] + len(sampled)
            parts += (observed, sampled)
        whole = self._texts[tip] = b"".join(parts)
        if len(self._texts) > MAX_BRANCHES:
            self._texts.popitem(last=False)
        return whole


def _list_items(ids: Sequence[int], *, first: bool) -> bytes:
    """Return ids as JSON list items, with the opening bracket if they are the first."""
    if not ids:
        return b"[" if first else b""
    text = orjson.dumps(ids)[:-1]
    return text if first else b",%b" % text[1:]


TURN_MARKER = f"turn of {uuid.uuid4().hex}"
"""Field that replaces a known turn's tokens by the turn's index in its branch; random, so no client can send it."""

PROMPT_IDS = b'"prompt_token_ids":'
"""Name of the first token field as JSON text; inside a JSON string the quotes would be escaped."""


def strip_known_tokens(
    body: bytes, ledger: TokenLedger, texts: TokenTextCache
) -> tuple[bytes, list[LedgerTurn]] | None:
    """Return a request with :data:`TURN_MARKER` in place of the tokens of known turns, and these turns in order.

    ``None`` if the request has any tokens other than those of one branch, from the branch's first turn on.
    """
    at = body.find(PROMPT_IDS)
    if at < 0:
        return body, []
    for leaf in list(ledger.leaves())[: -MAX_BRANCHES - 1 : -1]:
        if (found := _strip_branch(body, at, leaf.path(), texts)) is not None:
            return found
    return None


def _strip_branch(
    body: bytes, at: int, path: Sequence[LedgerTurn], texts: TokenTextCache
) -> tuple[bytes, list[LedgerTurn]] | None:
    parts, end, number = [], 0, 0
    text, lengths = texts.sequence_text(path[-1]), texts.prompt_lengths
    while at >= 0:
        if number == len(path):
            return None
        turn, start = path[number], at + len(PROMPT_IDS)
        length, rest = lengths[turn], texts.sampled(turn)
        with memoryview(text)[:length] as ids:
            known = bool(turn.sampled) and body.startswith(ids, start) and body.startswith(rest, start + length)
        if not known:
            return None
        parts.append(b'%b"%b":%d' % (body[end:at], TURN_MARKER.encode(), number))
        end = start + length + len(rest)
        at, number = body.find(PROMPT_IDS, end), number + 1
    return b"".join([*parts, body[end:]]), list(path[:number])
