# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Chat-template families over one tokenizer, and the text that models of each family write."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_gym_prorl.policy.text.renderer import Renderer
from nemo_gym_prorl.policy.text.template import ChatTemplate
from nemo_gym_prorl.policy.text.tokenizer import Tokenizer


TEMPLATES = Path(__file__).parent / "templates"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at something.",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
        },
    }
]


@dataclass(frozen=True)
class Family:
    """One template and the text of a model trained on it.

    Attributes:
        name: file of the template.
        tool_format: parser of its tool calls.
        stop: token that ends a turn.
        call: a tool call, with one ``%s`` for the value of ``what``.
        thinks: whether the model writes reasoning.
        call_stop: token that ends a turn with a tool call, if it differs.
    """

    name: str
    tool_format: str
    stop: str
    call: str
    thinks: bool = False
    call_stop: str | None = None

    def template(self) -> ChatTemplate:
        return ChatTemplate((TEMPLATES / f"{self.name}.jinja").read_text(), bos_token="<|begin_of_text|>")

    def renderer(self, tokenizer: Tokenizer) -> Renderer:
        return Renderer(tokenizer, self.template())


HERMES = '\n<tool_call>\n{"name": "look", "arguments": {"what": "%s"}}\n</tool_call>'
FAMILIES = {
    family.name: family
    for family in [
        Family("chatml", "hermes", "<|im_end|>", HERMES),
        Family("thinking", "hermes", "<|im_end|>", HERMES, thinks=True),
        Family(
            "headers",
            "llama3_json",
            "<|eot_id|>",
            '{"name": "look", "parameters": {"what": "%s"}}',
            call_stop="<|eom_id|>",
        ),
        Family(
            "brackets",
            "mistral",
            "</s>",
            '[TOOL_CALLS] [{"name": "look", "arguments": {"what": "%s"}, "id": "abcdefgh1"}]',
        ),
        Family("opened", "hermes", "<|end|>", HERMES.replace("\n", ""), thinks=True),
        Family("turns", "hermes", "<end_of_turn>", HERMES.replace("\n", "")),
        Family(
            "xml",
            "qwen3_coder",
            "<|im_end|>",
            "\n<tool_call>\n<function=look>\n<parameter=what>\n%s\n</parameter>\n</function>\n</tool_call>",
        ),
    ]
}


def call_message(what: str, content: str = "") -> dict[str, Any]:
    """Return an assistant message with one tool call, as agents send it."""
    function = {"name": "look", "arguments": json.dumps({"what": what}, ensure_ascii=False)}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "abcdefgh1", "type": "function", "function": function}],
    }


WORDS = [
    *("box", "door", "façade", "日本語", "naïve", "Ωmega", "🙂", "smörgås", "lamp", "key"),
    *("café", "wheel", "coat", "ünder", "stone", "glass", "北", "frog", "🐸", "train"),
]


def some_words(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 4)))


def lessons(seed: int = 0, conversations: int = 150) -> list[tuple[str, str]]:
    """Return prompts and replies that teach a tiny model every family's formats: calls, broken calls, answers."""
    rng = random.Random(seed)
    lines = []
    for family in FAMILIES.values():
        template = family.template()
        for _ in range(conversations):
            messages: list[dict[str, Any]] = [{"role": "user", "content": some_words(rng)}]
            for _ in range(rng.randint(1, 5)):
                prompt = template.render(messages, TOOLS, prompt=True)
                thought = f"{some_words(rng)}\n</think>\n\n" if family.thinks else ""
                if family.thinks and not prompt.endswith("<think>\n"):
                    thought = f"<think>\n{thought}"
                what = some_words(rng)
                if rng.random() < 0.3:
                    lines.append((prompt, f"{thought}{what}{family.stop}"))
                    messages += [{"role": "assistant", "content": what}, {"role": "user", "content": some_words(rng)}]
                    continue
                call = family.call % what
                if rng.random() < 0.15:
                    call = call.replace('": "', '": ', 1).replace("<parameter=what>", "")
                lines.append((prompt, f"{thought}{call}{family.call_stop or family.stop}"))
                result = {"role": "tool", "tool_call_id": "abcdefgh1", "content": some_words(rng)}
                messages += [call_message(what), result]
    rng.shuffle(lines)
    return lines
