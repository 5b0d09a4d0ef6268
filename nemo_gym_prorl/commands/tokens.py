# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl show --tokens``: what a trainer is given, token by token: id, text, mask, log-prob, weight version.

A turn shows what it adds to the turns before it. The text is made of the ids, never the other way round: that is the
point of looking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.rows import WISHES, is_masked
from nemo_gym_prorl.rollout.steps import Step, items, part, read_turns, turns
from nemo_gym_prorl.rollout.tokens import Turn, take_tokens
from nemo_gym_prorl.scripted.text import MODEL_NAME, decode_ids


ENDS = 12
"""How many tokens are shown at each end of what was observed and of what was sampled, without ``--full``."""

Spelling = Callable[[int, int | None], str]
"""The text of an id behind another one, with what a terminal would obey made visible."""


def print_tokens(console: Console, row: dict[str, Any], tokenizer: Path | None, *, full: bool) -> None:
    """Print the tokens of a row by turn.

    Args:
        console: where.
        row: takes its tokens off.
        tokenizer: of the model: its ``tokenizer.json``, or the folder with it; ``None`` shows ids alone.
        full: leave nothing out.

    Raises:
        CallerError: it has no tokens, or there is no such tokenizer.
    """
    spelling = _spelling(row, tokenizer)
    output, steps = items(part(row, "response", "output")), [turn.step for turn in read_turns(row)]
    grouped = turns(output, [step["items"] for step in steps if step])
    number_of = {id(item): number for number, group in enumerate(grouped) for item in group}
    sampled = take_tokens({"output": output})
    if not sampled:
        raise CallerError("has no tokens: nothing was sampled, or its model server tells none", field="--tokens")
    masked = is_masked(row) or bool(part(row, WISHES, "masked"))
    if masked:
        console.print("masked: nobody is to train on it", style="yellow")
    if spelling is None:
        console.print("no text: give the model's tokenizer.json, or its folder, as --tokenizer", style="dim")
    length = 0
    ids: Sequence[int] = []
    for turn in sampled:
        number = number_of[id(output[turn.item])]
        weights = _weights(steps[number])
        rewritten = f", the last {length - turn.kept} before it are gone" if turn.kept < length else ""
        title = f"turn {number + 1}: {len(turn.observed)} observed, {len(turn.sampled)} sampled{rewritten}"
        console.print(Rule(title, align="left", characters="─"))
        ids = [*ids[: turn.kept], *turn.observed, *turn.sampled]
        for line, own in _lines(turn, ids, spelling, weights, masked=masked, full=full):
            console.out(line, style=None if own else "dim", highlight=False)
        length = len(ids)


def _lines(
    turn: Turn, ids: Sequence[int], spelling: Spelling | None, weights: str, *, masked: bool, full: bool
) -> Iterator[tuple[str, bool]]:
    """A line for each token, and whether it was sampled: columns of one width, since a table of a library takes a
    millisecond for each of thousands, and shortens numbers where the terminal is narrow."""
    start = turn.kept + len(turn.observed)
    spans = ((turn.kept, start), (start, len(ids)))
    shown = [(place, last - first) for first, last in spans for place in _shown(first, last, full=full)]
    texts = {}
    if spelling is not None:
        texts = {at: spelling(ids[at], ids[at - 1] if at else None) for at, _ in shown if at is not None}
    width = max(map(len, (*texts.values(), "text"))) if texts else 0

    def line(at: str, one: str, text: str, mask: str, log_prob: str, of: str) -> str:
        middle = f"  {text:<{width}}" if texts else ""
        return f"{at:>6} {one:>7}{middle}  {mask:>4}  {log_prob:>9}  {of}".rstrip()

    yield line("at", "id", "text", "mask", "log-prob", "weights"), True
    for at, count in shown:
        if at is None:
            yield f"{'':>6} … {count - 2 * ENDS}, see --full", False
            continue
        own = at >= start
        log_prob, of = (f"{turn.log_probs[at - start]:.4f}", weights) if own else ("", "")
        yield line(str(at), str(ids[at]), texts.get(at, ""), str(int(own and not masked)), log_prob, of), own


def _shown(first: int, last: int, *, full: bool) -> Iterator[int | None]:
    """Places to show; ``None`` where others are left out."""
    if full or last - first <= 2 * ENDS + 1:
        yield from range(first, last)
        return
    yield from range(first, first + ENDS)
    yield None
    yield from range(last - ENDS, last)


def _weights(step: Step | None) -> str:
    """The label of a turn's weights; of two, if they changed in mid-turn."""
    told = step.get("weights") if step else None
    labels: list[Any] = [*dict.fromkeys(told or ())]
    return " … ".join("?" if label is None else repr(str(label))[1:-1] for label in labels)


def _spelling(row: Mapping[str, Any], tokenizer: Path | None) -> Spelling | None:
    if tokenizer is None:
        scripted = part(row, "response", "model") == MODEL_NAME
        return (lambda one, _: _plain(repr(decode_ids([one]))[2:-1])) if scripted else None
    from tokenizers import Tokenizer as FastTokenizer

    from nemo_gym_prorl.policy.text.tokenizer import Tokenizer

    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        fast = FastTokenizer.from_file(str(file))
    except Exception as error:  # it raises nothing more precise
        raise CallerError(f"{file} is no tokenizer: {error}", field="--tokenizer") from None
    reader = Tokenizer(fast)

    def spelt(one: int, behind: int | None) -> str:
        text = reader.decode([one], behind)
        # Part of a character: by its name, which says which.
        return _plain(repr((fast.id_to_token(one) or text) if "\ufffd" in text else text)[1:-1])

    return spelt


def _plain(text: str) -> str:
    return text.replace(" ", "·")
