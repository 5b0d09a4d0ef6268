# SPDX-License-Identifier: Apache-2.0
"""Chat-template families with different quirks, over one tokenizer, and conversations to try them with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_gym_prorl.policy.chat import ChatTemplate, Renderer, Tokenizer


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
    """One template and what a model trained on it would write.

    Attributes:
        name: file of the template.
        tool_format: parser for its tool calls.
        stop: token that ends a turn.
        call: a tool call, as the model writes it, with one ``%s`` for the value of ``what``.
        thinks: whether the model thinks aloud.
        call_stop: token that ends a turn with a tool call, if another one.
    """

    name: str
    tool_format: str
    stop: str
    call: str
    thinks: bool = False
    call_stop: str | None = None

    def renderer(self, tokenizer: Tokenizer) -> Renderer:
        source = (TEMPLATES / f"{self.name}.jinja").read_text()
        return Renderer(tokenizer, ChatTemplate(source, bos_token="<|begin_of_text|>"))


HERMES = '\n<tool_call>\n{"name": "look", "arguments": {"what": "%s"}}\n</tool_call>'
FAMILIES = {
    family.name: family
    for family in [
        Family("chatml", "hermes", "<|im_end|>", HERMES),
        Family("thinking", "hermes", "<|im_end|>", HERMES, thinks=True),
        Family(
            "headers",
            "llama_json",
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
    """An assistant message with one tool call, as agents send it."""
    function = {"name": "look", "arguments": json.dumps({"what": what}, ensure_ascii=False)}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "abcdefgh1", "type": "function", "function": function}],
    }
