# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Print the table of ``docs/model-server.md``: which published chat templates the service supports, and how far.

    python -m tests.policy.model_table FOLDER

The folder holds templates as ``.jinja`` files, as llama.cpp collects them. A model's text is taken from its own
template. Token ids are those of a byte-level tokenizer with the template's special tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.text.formats import FORMATS
from nemo_gym_prorl.policy.text.parsers import Parsed, TurnFormat, parse
from nemo_gym_prorl.policy.text.renderer import Renderer
from nemo_gym_prorl.policy.text.template import ChatTemplate, with_reasoning
from nemo_gym_prorl.policy.text.turn_boundary import end_of_turn
from nemo_gym_prorl.policy.text.validate_template import validate_template
from tests.policy.call_texts import ARGUMENTS, PROPERTIES
from tests.policy.families import TOOLS as LOOK
from tests.policy.tokenizers import tokenizer_of
from tests.policy.transitions import SHAPES, Setting, Tally, tally_of, transitions


USER = {"role": "user", "content": "q"}
RESULT = "Seenthat"
_PROPERTIES = {name: {**PROPERTIES[name], "description": name} for name in ARGUMENTS}
_EDIT = {"description": "Edit.", "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["text"]}}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "edit", **_EDIT}}]
EOS = {
    "ByteDance-Seed-OSS": "<seed:eos>",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "<|END_OF_TURN_TOKEN|>",
    "Cohere2MoE": "<|END_OF_TURN_TOKEN|>",
    "Kimi-K3": "<|end_of_msg|>",
    "MiniMax-M1": "<end_of_sentence>",
    "MiniMax-M2": "[e~[",
    "MiniMax-M3": "[e~[",
    "poolside-Laguna-S-2.1": "</assistant>",
    "poolside-Laguna-XS-2.1": "</assistant>",
    "poolside-Laguna-XS.2": "</assistant>",
    "Reka-Edge": "<sep>",
    "tencent-Hy3": "<｜hy_eos:opensource｜>",
}
"""End-of-turn tokens that do not look like special tokens, from the models' configurations."""
SOME: list[Setting] = [(False, 1, False), (True, 1, False, True), (True, 3, True)]
"""Settings for many templates: one of the three has reasoning, and one long texts."""


def renderer_of(source: str, kind: str, eos: str = "") -> Renderer:
    """Return a template with a tokenizer that has the template's special tokens and an end of turn."""
    if eos:
        tokenizer = tokenizer_of(kind, source, "<s>", names=[eos])
        return Renderer(tokenizer, ChatTemplate(source, bos_token="<s>", eos_token=eos))
    tokenizer = tokenizer_of(kind, source, "</s><s>")
    found = Renderer(tokenizer, ChatTemplate(source, bos_token="<s>", eos_token="</s>"))
    stops = _stops(found)
    eos = "<|endoftext|>" if "phi" in source.lower() else next(iter(stops), "</s>")
    tokenizer = tokenizer_of(kind, source, "</s><s>", *stops, eos)
    return Renderer(tokenizer, ChatTemplate(source, bos_token="<s>", eos_token=eos))


def _stops(renderer: Renderer) -> list[str]:
    """Return the tokens at which answers and calls of a template end."""
    asked, stops = {"role": "user", "content": "Askone"}, []
    function = {"name": "look", "arguments": '{"what": "Sayone"}'}
    calls = [{"id": "callid001", "type": "function", "function": function}]
    call = {"role": "assistant", "content": "", "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": "callid001", "name": "look", "content": "Askone"}

    def behind(*messages: dict[str, Any], tools: Sequence[dict[str, Any]], prompt: bool) -> list[str]:
        try:
            _, found, tail = renderer.template.render(messages, tools, prompt=prompt).rpartition("Sayone")
        except CallerError:
            return []
        return renderer.tokenizer.special_pattern.findall(tail.partition("Askone")[0]) if found else []

    for turn, new, tools, which in (
        ({"role": "assistant", "content": "Sayone"}, asked, (), 0),
        (call, result, LOOK, -1),
    ):
        gap = behind(asked, turn, new, tools=tools, prompt=True)
        last = behind(asked, turn, tools=tools, prompt=False)
        # Some close a conversation's last turn only where another one is opened.
        ends = [one for one in last if one in gap] or behind(asked, turn, tools=tools, prompt=True)[:1] or gap[:1]
        stops += [one for one in ends[which:][:1] if one in gap and one not in stops]
    return stops


def _seams(renderer: Renderer, eos: str, shapes: Sequence[str], offered: Sequence[Any]) -> Tally:
    """Tally a template's turn boundaries for models that stop at the template's end of turn."""
    shown = [with_reasoning] if renderer.reasoning_marker != "<think>" else []
    stops = [eos] if eos else _stops(renderer)
    return tally_of(renderer, transitions(renderer.template, stops, shapes, SOME, offered, *shown))


def _calls(count: int) -> list[dict[str, Any]]:
    arguments = [ARGUMENTS, {"text": "two"}][:count]
    return [
        {"id": f"callid{at:03}", "type": "function", "function": {"name": "edit", "arguments": json.dumps(one)}}
        for at, one in enumerate(arguments)
    ]


def _conversation(count: int, content: str, result: str = RESULT) -> list[dict[str, Any]]:
    calls = _calls(count)
    results = [{"role": "tool", "tool_call_id": one["id"], "name": "edit", "content": result} for one in calls]
    return [USER, {"role": "assistant", "content": content, "tool_calls": calls}, *results]


def _bodies(renderer: Renderer, count: int) -> Iterator[tuple[str, str]]:
    """Yield the template's text of a turn with calls up to each possible end, and the token at that end."""
    messages = _conversation(count, "")
    prompt = renderer.template.render(messages[:1], TOOLS, prompt=True)
    full = renderer.template.render(messages, TOOLS, prompt=True)
    start = next((at for at, pair in enumerate(zip(prompt, full, strict=False)) if pair[0] != pair[1]), len(prompt))
    start = len(prompt) if full.startswith(prompt) else full.rfind("\n", 0, start) + 1
    written = full[start : full.index(RESULT)]
    for token in renderer.tokenizer.special_pattern.finditer(written):
        yield written[: token.start()], token[0]
    yield written, ""


def _read(renderer: Renderer, form: TurnFormat, count: int) -> tuple[str, Parsed] | None:
    """Return the first of these texts that is parsed as the original calls."""
    wanted = [("edit", ARGUMENTS), ("edit", {"text": "two"})][:count]
    for cut in (True, False):
        for body, _ in _bodies(renderer, count):
            rest = body.rpartition(form.think[1])[2]
            parsed = parse(rest, form, TOOLS, cut=cut)
            if [(one.name, json.loads(one.arguments)) for one in parsed.calls if not one.malformed] == wanted:
                return rest, parsed
    return None


def _cut(form: TurnFormat, body: str) -> bool:
    """Return whether every beginning of the call is parsed as malformed."""
    end = body.index("return {")
    return all(
        not [one for one in parse(body[:length], form, TOOLS, cut=True).calls if not one.malformed]
        for length in range(end + len("return {"))
    )


def _after_thought(form: TurnFormat, body: str) -> bool:
    thought = f"{form.think[0]}hm{form.think[1]}"
    if form.split is not None:
        thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    parsed = parse(f"{thought}{body}", form, TOOLS)
    return parsed.reasoning == "hm" and [one.malformed for one in parsed.calls] == [None]


def _empty_result(renderer: Renderer) -> bool:
    """Return whether the continuation after a call with an empty result equals the template's."""
    messages = [with_reasoning(one) for one in _conversation(1, "", "")]
    full = renderer.template.render(messages, TOOLS, prompt=True)
    special = renderer.tokenizer.special_pattern
    ending = end_of_turn(lambda said, prompt: renderer.template.render(said, prompt=prompt), special)
    turns = list(_bodies(renderer, 1))
    for body, end in [(body, end) for body, end in turns if end and end in ending] or turns:
        sampled = renderer.tokenizer.encode(body + end)
        got = renderer.render_continuation(messages[:2], messages[2:], TOOLS, sampled=sampled, finish=Finish.STOP)
        text = renderer.tokenizer.decode(got.ids)
        if full.endswith(text) and full.removesuffix(text).endswith(end):
            return True
    return False


def row(file: Path) -> list[str]:
    """Return the cells of one template."""
    source, eos = file.read_text(), EOS.get(file.stem, "")
    renderer = renderer_of(source, "bytes", eos)
    try:
        form = validate_template(renderer)
    except CallerError as error:
        why = error.reason.split("turn by turn: ")[-1].split(". Set another")[0].splitlines()[0]
        return ["refused", why[:90].replace("|", "\\|"), *[""] * 5]
    name = next(name for name, known in FORMATS.items() if known == replace(form, think=known.think))
    if not renderer.shows_tools or name == "plain":
        seams = _seams(renderer, eos, SHAPES[:1], ((),))
        return ["shows no tools", *["–"] * 5, f"{seams.right} of {seams.right + seams.wrong}"]
    one, two = _read(renderer, form, 1), None
    if not renderer.single_call_only:
        two = _read(renderer, form, 2)
    seams = _seams(renderer, eos, SHAPES[1:], ((), LOOK))
    yes = {True: "yes", False: "**no**"}
    return [
        f"`{name}`",
        yes[one is not None],
        "one a turn" if renderer.single_call_only or (one and not two) else yes[two is not None],
        yes[one is not None and _cut(form, one[0])],
        yes[one is not None and _after_thought(form, one[0])],
        yes[_empty_result(renderer)],
        f"{seams.right} of {seams.right + seams.wrong}"
        + (f", {seams.rewritten} rewritten" if seams.rewritten else ""),
    ]


def main(folder: str) -> None:
    heads = ["template", "`tool_call_parser`", "every JSON type", "two calls", "cut call", "after a thought"]
    print("|", " | ".join([*heads, "empty result", "seams"]), "|")
    print("|", " | ".join(["---"] * 8), "|")
    for file in sorted(Path(folder).glob("*.jinja"), key=lambda one: one.stem.lower()):
        print("|", " | ".join([file.stem, *row(file)]), "|", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
