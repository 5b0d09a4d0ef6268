# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl show``: one rollout for a person to read: what was asked, thought, called and observed, and how it ended.

What a model or a sandbox has written is printed as text and nothing else: control characters, which a terminal would
obey, are made visible.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError
from rich.console import Console
from rich.highlighter import JSONHighlighter
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from nemo_gym_prorl.commands.jobs import connect
from nemo_gym_prorl.commands.rows import json_lines
from nemo_gym_prorl.commands.tokens import print_tokens
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.schemas import FailureView, JobView
from nemo_gym_prorl.rollout.steps import items, part, text_of, turns


SHORT_LINES = 16
SHORT_CHARACTERS = 1600
"""How much of a text is shown without ``--full``; its middle is left out."""

_NO_VERDICT = {"reward", "response", "responses_create_params", "rollout", "mask_sample"}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What a terminal obeys, also by turning the direction of what follows."""
_CONTENT = {"message", "reasoning", "function_call", "function_call_output"}


@dataclass(frozen=True, slots=True)
class Look:
    """How to show a rollout: nothing left out, as JSON, its tokens, with the text that a tokenizer gives them."""

    full: bool = False
    as_json: bool = False
    tokens: bool = False
    tokenizer: Path | None = None


async def show(url: str | None, token: str | None, what: str, look: Look) -> None:
    """Print a rollout of a service, by id, or of a file of results, ``FILE`` or ``FILE:LINE``.

    Raises:
        CallerError: the file has no such line, or it is no rollout; its tokens are wanted, and it has none.
    """
    console = Console(highlight=False)
    path, line = _file(what)
    if path is not None:
        found = read_rollouts(path)
        if line is None and len(found) != 1 and not look.as_json:
            console.print(_contents(found))
            return
        rows = [_line(path, found, line)] if line is not None else list(found.values())
    else:
        async with connect(url, token) as client:
            job = await client.get(what)
        rows = [{**(job.result or {}), "rollout": job.model_dump(mode="json", exclude={"result"})}]
    for row in rows:
        if look.as_json:
            text = orjson.dumps(row, option=orjson.OPT_INDENT_2).decode()
            text = _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
            # Not print_json, which reads it and writes it anew.
            console.print(JSONHighlighter()(Text(text)), soft_wrap=True)
        elif look.tokens:
            print_tokens(console, row, look.tokenizer, full=look.full)
        else:
            Page(console, look.full).print(row)


class Page:
    """Prints rollouts.

    Args:
        console: where.
        full: leave nothing out.
    """

    def __init__(self, console: Console, full: bool) -> None:
        self._console, self._full = console, full

    def print(self, row: Mapping[str, Any]) -> None:
        """One rollout: its head, the conversation, the verdict."""
        job = _view(row)
        self._head(row, job)
        self._input(part(row, "responses_create_params", "input"))
        for number, turn in enumerate(turns(items(part(row, "response", "output"))), 1):
            self._turn(number, turn)
        self._end(row, job)

    def _head(self, row: Mapping[str, Any], job: JobView | None) -> None:
        if job is None:
            self._say(f"reward {row.get('reward')}", "bold")
            return
        reward = "" if job.reward is None else f", reward {job.reward:g}"
        self._say(f"{job.id}: {job.state}{reward}", "bold")
        group = f", group {job.group}" if job.group else ""
        ended = f", {job.finish_reason}" if job.finish_reason else ""
        self._say(f"{job.handler}, client {job.client}{group}", "dim")
        self._say(f"{job.turns} turns, {job.tool_calls} tool calls{ended}", "dim")
        table = Table("stage", box=None, pad_edge=False)
        for column in ("worked", "waited", "attempts"):
            table.add_column(column, justify="right")
        for stage, time in job.timings.items():
            table.add_row(stage.value, f"{time.worked_s:.2f} s", f"{time.waited_s:.2f} s", str(time.attempts))
        self._console.print(table)

    def _input(self, given: Any) -> None:
        messages = items([{"role": "user", "content": given}] if isinstance(given, str) else given)
        if messages:
            self._console.print(Rule("input", align="left", characters="─"))
        for message in messages:
            self._item(message)

    def _turn(self, number: int, items: Sequence[Mapping[str, Any]]) -> None:
        self._console.print(Rule(f"turn {number}{_tokens(items)}", align="left", characters="─"))
        for item in items:
            self._item(item)

    def _item(self, item: Mapping[str, Any]) -> None:
        match item.get("type", "message"):
            case "reasoning":
                self._block("thought", text_of(item.get("summary")) or text_of(item.get("content")), "italic dim")
            case "function_call":
                self._call(item)
            case "function_call_output":
                self._block("observed", text_of(item.get("output")), "")
            case "message":
                self._block(str(item.get("role", "assistant")), text_of(item.get("content")), "")
            case other:
                about = {key: value for key, value in item.items() if not key.endswith(("_ids", "_log_probs"))}
                self._block(str(other), orjson.dumps(about).decode(), "")

    def _call(self, item: Mapping[str, Any]) -> None:
        self._say(f"calls {item.get('name')}" + (" (malformed)" if item.get("status") == "incomplete" else ""), "cyan")
        arguments = str(item.get("arguments", ""))
        try:
            parsed = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            parsed = None
        if not isinstance(parsed, dict):
            self._body(arguments, "")
            return
        for name, value in parsed.items():
            text = value if isinstance(value, str) else orjson.dumps(value).decode()
            if "\n" in text:
                self._body(f"{name}:", "cyan")
                self._body(text, "", indent=4)
            else:
                self._body(f"{name}: {text}", "")

    def _end(self, row: Mapping[str, Any], job: JobView | None) -> None:
        verdict = {
            key: value
            for key, value in row.items()
            if key not in _NO_VERDICT and not key.startswith("_") and isinstance(value, str | int | float | bool)
        }
        if job is not None and job.failure is None and job.state.terminal:
            self._console.print(Rule("verdict", align="left", characters="─"))
            self._say(f"reward {job.reward:g}" if job.reward is not None else "no reward", "bold green")
        for key, value in verdict.items():
            self._body(f"{key}: {value}", "")
        if job is None:
            return
        for failure, times in told_once(job):
            ended = failure == job.failure
            title = job.state.value.replace("_", " ") if ended else "an attempt failed"
            self._failure(title if times == 1 else f"{title}, {times} attempts", failure)
        if not job.state.terminal:
            self._say("it has not ended; what it did is shown when it has", "yellow")

    def _failure(self, title: str, failure: FailureView) -> None:
        where = f" in {failure.stage}" if failure.stage else ""
        self._console.print(Rule(f"{title}{where}", align="left", characters="─", style="red"))
        self._say(f"{failure.kind} ({failure.origin})", "red")
        self._body(failure.reason, "")
        if failure.traceback:
            self._body(failure.traceback, "dim")

    def _block(self, title: str, text: str, style: str) -> None:
        self._say(title, "cyan")
        self._body(text, style)

    def _say(self, text: str, style: str) -> None:
        self._console.print(Text(visible(text), style=style))

    def _body(self, text: str, style: str, indent: int = 2) -> None:
        shown = text if self._full else shorten(text)
        self._console.print(Padding(Text(visible(shown.rstrip("\n")), style=style), (0, 0, 0, indent)))


def told_once(job: JobView) -> list[tuple[FailureView, int]]:
    """What went wrong, oldest first, and how many attempts ended so; why the rollout has failed comes last."""
    times = Counter(failure.model_dump_json() for failure in job.failed_attempts)
    last = [] if job.failure is None else [job.failure]
    told = {failure.model_dump_json(): failure for failure in [*job.failed_attempts, *last]}
    return sorted(((failure, times[key] or 1) for key, failure in told.items()), key=lambda each: each[0] in last)


def shorten(text: str, lines: int = SHORT_LINES, characters: int = SHORT_CHARACTERS) -> str:
    """Beginning and end of a text, and how much is left out between them."""
    all_lines = text.splitlines()
    if len(all_lines) > lines:
        head, tail = all_lines[: lines - lines // 4], all_lines[-(lines // 4) :]
        left_out = len(all_lines) - len(head) - len(tail)
        text = "\n".join([*head, f"[… {left_out} lines]", *tail])
    if len(text) > characters:
        head_size, tail_size = characters * 3 // 4, characters // 4
        left_out = len(text) - head_size - tail_size
        text = f"{text[:head_size]}\n[… {left_out} characters]\n{text[-tail_size:]}"
    return text


def visible(text: str) -> str:
    """Text that a terminal shows and does not obey."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r\n", "\n"))


def _tokens(items: Sequence[Mapping[str, Any]]) -> str:
    for item in items:
        if isinstance(item.get("generation_token_ids"), list):
            prompt = len(item.get("prompt_token_ids") or ())
            return f": {prompt} tokens of prompt, {len(item['generation_token_ids'])} sampled"
    return ""


def _view(row: Mapping[str, Any]) -> JobView | None:
    """How the rollout came about, if the file says so; Gym's own results do not."""
    try:
        return JobView.model_validate(row.get("rollout"))
    except ValidationError:
        return None


def _file(what: str) -> tuple[Path | None, int | None]:
    name, colon, line = what.rpartition(":")
    if colon and line.isdecimal() and Path(name).is_file():
        return Path(name), int(line)
    if Path(what).is_file():
        return Path(what), None
    if what.endswith(".jsonl") or name.endswith(".jsonl"):
        raise CallerError("there is no such file", field=what)
    return None, None


def read_rollouts(path: Path) -> dict[int, dict[str, Any]]:
    """The rollouts of a file of results by line, also while it is being written.

    Raises:
        CallerError: a line is none; names it.
    """
    found: dict[int, dict[str, Any]] = {}
    for number, row in json_lines(path, growing=True):
        if isinstance(row, CallerError):
            raise CallerError(row.reason, field=f"{path}:{number}")
        if not isinstance(row, dict) or not row.keys() & {"response", "rollout"}:
            raise CallerError("is no rollout", field=f"{path}:{number}")
        found[number] = row
    return found


def _line(path: Path, found: Mapping[int, dict[str, Any]], line: int) -> dict[str, Any]:
    if line not in found:
        raise CallerError(f"there is no rollout in this line; the file has {len(found)}", field=f"{path}:{line}")
    return found[line]


def _contents(found: Mapping[int, dict[str, Any]]) -> Table:
    """What is in a file of several rollouts."""
    table = Table(box=None, pad_edge=False)
    table.add_column("line", justify="right")
    table.add_column("rollout", overflow="fold")
    table.add_column("state")
    table.add_column("reward", justify="right")
    table.add_column("turns", justify="right")
    for number, row in found.items():
        job = _view(row)
        about = str(row.get("task_id", "")) if job is None else job.id
        count = sum(1 for _ in turns(items(part(row, "response", "output"))))
        reward = row.get("reward") if job is None else job.reward
        state = "" if job is None else job.state.value
        score = f"{reward:g}" if isinstance(reward, int | float) else str(reward or "")
        cells = (str(number), about, state, score, str(count))
        table.add_row(*(Text(visible(cell)) for cell in cells))
    return table
