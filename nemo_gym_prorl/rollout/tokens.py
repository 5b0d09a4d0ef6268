# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A rollout's tokens once each, apart from the text that they stand for.

Gym has them on the output items, and each turn's prompt in full: of 50 turns that is the conversation 50 times over,
which only who asks for Gym's rows has to have. Here a turn is what it adds to the turn before: so they are kept, go to
a trainer, and are held there. An environment that scores the text is sent none.

What is made of items gives the same items again, whatever their prompts have in common. Pure.
"""

from __future__ import annotations

import math
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import ne
from typing import Any

import orjson

from nemo_gym_prorl.rollout.rows import lasting_json
from nemo_gym_prorl.serving.routed_experts import RoutedExperts, continued


_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
NO_TOKENS = b"[]"


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy. Its prompt is the first ``kept`` tokens of the turn before (the last one that sampled
    any), with that turn's own, and what was observed since.

    Attributes:
        item: which of the response's output items has the turn's tokens.
        kept: all that the turn before had, unless the history was rewritten.
        observed: ids that the policy was shown (int32).
        sampled: ids that it sampled (int32).
        log_probs: of each sampled id (float64).
        routed_experts: of at least its own ids and the last one that was kept, as text
            (:mod:`~nemo_gym_prorl.serving.routed_experts`); ``None`` where nobody tells.
    """

    item: int
    kept: int
    observed: array[int]
    sampled: array[int]
    log_probs: array[float]
    routed_experts: str | None = None

    @classmethod
    def unpacked(cls, told: Mapping[str, Any]) -> Turn:
        """The turn that :func:`packed` wrote.

        Raises:
            ValueError: its numbers are none, or there is not a log-prob for each sampled id.
        """
        observed, sampled, log_probs = array("i"), array("i"), array("d")
        for numbers, name in ((observed, "observed"), (sampled, "sampled"), (log_probs, "log_probs")):
            numbers.frombytes(b64decode(told[name], validate=True))
        if len(sampled) != len(log_probs):
            raise ValueError(f"{len(sampled)} ids were sampled but {len(log_probs)} log-probs came with them")
        return cls(told["item"], told["kept"], observed, sampled, log_probs, told.get("routed_experts"))


def packed(turns: Iterable[Turn]) -> bytes:
    """Turns as JSON: numbers as base64 of their bytes, the lowest first."""
    return lasting_json(
        [
            {
                "item": turn.item,
                "kept": turn.kept,
                "observed": b64encode(turn.observed.tobytes()).decode(),
                "sampled": b64encode(turn.sampled.tobytes()).decode(),
                "log_probs": b64encode(turn.log_probs.tobytes()).decode(),
                **({"routed_experts": turn.routed_experts} if turn.routed_experts is not None else {}),
            }
            for turn in turns
        ]
    )


def take_tokens(response: object) -> list[Turn]:
    """Take the token fields off the output items of a response.

    All stay where they are if one item has others than ids, a log-prob for each that was sampled, and the experts of
    each where there are any: who trusts them must see them all.
    """
    items = _output(response)
    turns: list[Turn] = []
    before: list[int] = []
    for place, item in enumerate(items):
        if not isinstance(item, dict) or not any(item.get(name) is not None for name in _FIELDS):
            continue
        turn = _turn(place, item, before)
        if turn is None:
            return []
        turns.append(turn)
        if turn.sampled:
            before = item["prompt_token_ids"] + item["generation_token_ids"]
    for turn in turns:
        for name in (*_FIELDS, "routed_experts"):
            items[turn.item].pop(name, None)
    return turns


def put_tokens(response: object, turns: Iterable[Turn]) -> None:
    """Put tokens on the items that they were taken off; the result is for orjson, which copies what is written."""
    items = _output(response)
    ids, text = array("i"), b""
    experts: str | None = None
    for turn in turns:
        kept, its_text = ids, text
        if turn.kept < len(ids):
            kept = ids[: turn.kept]
            its_text = _text(kept)
        prompt = its_text + _text(turn.observed)
        if turn.item < len(items) and isinstance(items[turn.item], dict):
            items[turn.item] |= {
                "prompt_token_ids": orjson.Fragment(b"[%b]" % prompt[:-1]),
                "generation_token_ids": turn.sampled.tolist(),
                "generation_log_probs": turn.log_probs.tolist(),
            }
            tokens = len(kept) + len(turn.observed) + len(turn.sampled)
            if (its_experts := continued(experts, turn.routed_experts, tokens)) is not None:
                items[turn.item]["routed_experts"] = its_experts
            if turn.sampled:
                experts = its_experts
        if turn.sampled:
            ids, text = kept + turn.observed + turn.sampled, prompt + _text(turn.sampled)


def _output(response: object) -> list[Any]:
    output = response.get("output") if isinstance(response, dict) else None
    return output if isinstance(output, list) else []


def _turn(place: int, item: Mapping[str, Any], before: list[int]) -> Turn | None:
    prompt, sampled, log_probs = (item.get(name) for name in _FIELDS)
    if not (isinstance(prompt, list) and isinstance(sampled, list) and isinstance(log_probs, list)):
        return None
    if len(sampled) != len(log_probs):
        return None
    kept = len(before)
    if prompt[:kept] != before:
        kept = next(compress(count(), map(ne, prompt, before)), min(len(prompt), kept))
    observed = prompt[kept:]
    if not set(map(type, [*observed, *sampled])) <= {int} or not set(map(type, log_probs)) <= {int, float}:
        return None
    experts = item.get("routed_experts")
    try:
        turn = Turn(place, kept, array("i", observed), array("i", sampled), array("d", log_probs), experts)
        if experts is not None and RoutedExperts.read(experts).rows < len(observed) + len(sampled) + bool(kept):
            return None
    except (OverflowError, TypeError, ValueError):
        return None
    fine = min((*turn.observed, *turn.sampled), default=0) >= 0 and all(map(math.isfinite, turn.log_probs))
    return turn if fine else None


def _text(ids: Sequence[int]) -> bytes:
    """Ids as in a list in JSON, each with its comma."""
    return orjson.dumps(list(ids))[1:-1] + b"," if ids else b""
