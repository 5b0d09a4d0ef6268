# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tokens that an agent sends back, known by their bytes.

Gym's agents send each turn's prompt, ids and log-probs with the whole history, in every turn: at 64k tokens of context
that are 20 MB of numbers, which we wrote ourselves. They are compared with what was written and cut out before anybody
reads the rest as JSON. What is not to the byte a turn of the rollout is not cut out, and is read in full.

Pure: no task, socket, clock or thread.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import islice

from nemo_gym_prorl.policy.tokens.ledger import TokenLedger, Turn
from nemo_gym_prorl.policy.tokens.prompt import BRANCHES, IdTexts


MARK = f"turn of {uuid.uuid4().hex}"
"""The field in the place of a known turn's tokens, with its number among those found. No caller knows the name."""

_NAME = b'"prompt_token_ids":'


def without_tokens(body: bytes, ledger: TokenLedger, texts: IdTexts) -> tuple[bytes, list[Turn]] | None:
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
