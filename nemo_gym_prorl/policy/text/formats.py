# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Turn formats of the model families, by vLLM's parser names.

Each entry follows the family's own chat template and model card. ``tests/policy`` compares the entries with these and
with vLLM's parsers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from nemo_gym_prorl.policy.text.call_readers import (
    ParameterTags,
    elements,
    gemma,
    harmony,
    json_until,
    named_json,
    python_list,
    tagged,
)
from nemo_gym_prorl.policy.text.turn_scanner import ReaderResult, ToolSchemas, TurnFormat


def _marked(opening: str, closing: str, **more: object) -> TurnFormat:
    return TurnFormat(re.compile(re.escape(opening)), json_until(closing), **more)  # type: ignore[arg-type]


_PLAIN = TurnFormat(re.compile(r"(?!)"), lambda text, opening, schemas: ReaderResult([], 0), unmarked=True)

_LLAMA = re.compile(
    r"<\|python_tag\|>|(?=\{\s*(?:\"type\"\s*:\s*\"function\"\s*,\s*)?"
    r"\"name\"\s*:\s*\"[^\"]{0,200}\"\s*,\s*\"(?:parameters|arguments)\"\s*:)"
)

_MISTRAL_HEAD = r"\s*+(?P<name>[^\[{]{0,200})(?:\[CALL_ID\](?P<id>[^\[{]{0,200}))?\[ARGS\]"
_MISTRAL, _MISTRAL_NEWER = named_json(_MISTRAL_HEAD), re.compile(_MISTRAL_HEAD)


_MISTRAL_OLDER = json_until()


def _mistral(text: str, opening: re.Match[str], schemas: ToolSchemas) -> ReaderResult:
    """Read Mistral's calls: newer models write a name before ``[ARGS]``, older models a list of JSON objects."""
    newer = _MISTRAL_NEWER.match(text, opening.end())
    return (_MISTRAL if newer else _MISTRAL_OLDER)(text, opening, schemas)


_FUNCTION = ParameterTags(
    parameter=r"<parameter=(?P<key>[^>\n]{1,200})>",
    value_end=r"</parameter>",
    call_end=r"</function>",
    block_end=r"</tool_call>",
    lines=True,
)
_KEY_VALUE = r"<arg_key{0}>(?P<key>[^<>]{{1,200}})</arg_key{0}>\s*<arg_value{0}>"


def _dsml(block: str, space: str = "") -> TurnFormat:
    """Return a turn format in DeepSeek's markup (from V3.2 on), with calls inside a tag named ``block``."""
    mark = f"｜DSML｜{space}"
    return TurnFormat(
        re.compile(rf'(?:<{mark}{block}>\s*)?<{mark}invoke name="(?P<name>[^"<>]{{0,200}})">|<{mark}{block}>'),
        tagged(
            ParameterTags(
                rf'<{mark}parameter name="(?P<key>[^"]{{1,200}})"(?: string="(?P<kind>[^"]*)")?>',
                rf"</{mark}parameter>",
                rf"</{mark}invoke>",
                rf"</{mark}{block}>",
            )
        ),
    )


_M3 = "]<]minimax[>["  # MiniMax M3 writes this mark before each tag

FORMATS: Mapping[str, TurnFormat] = {
    "hermes": _marked("<tool_call>", "</tool_call>"),
    "qwen3_coder": TurnFormat(
        re.compile(r"(?:<tool_call>\s*)?<function=(?P<name>[^<>\n]{0,200})>|<tool_call>"), tagged(_FUNCTION)
    ),
    "llama3_json": TurnFormat(_LLAMA, json_until(), unmarked=True),
    "mistral": TurnFormat(
        re.compile(r"\[TOOL_CALLS\]"), _mistral, ("[THINK]", "[/THINK]"), call_id_pattern=re.compile(r"[A-Za-z0-9]{9}")
    ),
    "pythonic": TurnFormat(
        re.compile(r"\A\s*+(?:(?:<\|python_tag\|>|<\|python_start\|>)\s*+)?(?=\[\s*+[^\W\d][\w.-]*+\s*+\()"),
        python_list(),
        unmarked=True,
    ),
    "deepseek_v3": TurnFormat(
        re.compile(r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>function<｜tool▁sep｜>"),
        named_json(
            r"(?P<name>[^\n<]{0,200})\n(?:```json\n)?",
            r"<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
            fence=r"```",
        ),
    ),
    "deepseek_v31": TurnFormat(
        re.compile(r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"),
        named_json(r"(?P<name>[^\n<]{0,200})<｜tool▁sep｜>", r"<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?"),
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", " "),
    "glm45": TurnFormat(
        re.compile(r"<tool_call>(?P<name>[^<\n]{0,200})"),
        tagged(ParameterTags(_KEY_VALUE.format(""), r"</arg_value>", r"</tool_call>")),
    ),
    "hy_v3": TurnFormat(
        re.compile(r"(?:<tool_calls(?::\w+)?>\s*)?<tool_call(?::\w+)?>(?P<name>[^<\n]{0,200})<tool_sep(?::\w+)?>"),
        tagged(
            ParameterTags(
                _KEY_VALUE.format(r"(?::\w+)?"),
                r"</arg_value(?::\w+)?>",
                r"</tool_call(?::\w+)?>",
                r"</tool_calls(?::\w+)?>",
            )
        ),
        ("<think:opensource>", "</think:opensource>"),
    ),
    "kimi_k2": TurnFormat(
        re.compile(r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>"),
        named_json(
            r"(?P<id>[^<]{1,300})<\|tool_call_argument_begin\|>",
            r"<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
        ),
        call_id_pattern=re.compile(r"functions\.[\w.-]+:\d+"),
    ),
    "kimi_k3": TurnFormat(
        re.compile(
            r'(?:<\|open\|>tools<\|sep\|>\s*)?<\|open\|>call tool="(?P<name>[^"<>]{0,200})"[^<]*<\|sep\|>'
            r"|<\|open\|>tools<\|sep\|>"
        ),
        tagged(
            ParameterTags(
                r'<\|open\|>argument key="(?P<key>[^"]{1,200})"(?: type="(?P<kind>[^"]*)")?[^<]*<\|sep\|>',
                r"<\|close\|>argument<\|sep\|>",
                r"<\|close\|>call<\|sep\|>",
                r"<\|close\|>tools<\|sep\|>",
            )
        ),
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        dropped_markers=re.compile(r"<\|(?:open|close)\|>(?:response|message)<\|sep\|>"),
    ),
    "minimax_m2": TurnFormat(
        re.compile(r'(?:<minimax:tool_call>\s*)?<invoke name="?(?P<name>[^"<>]{0,200})"?>|<minimax:tool_call>'),
        tagged(
            ParameterTags(
                r'<parameter name="?(?P<key>[^">]{1,200})"?>', r"</parameter>", r"</invoke>", r"</minimax:tool_call>"
            )
        ),
    ),
    "minimax_m3": TurnFormat(
        re.compile(rf'(?:{re.escape(_M3)}<tool_call>\s*)?{re.escape(_M3)}<invoke name="?(?P<name>[^"<>]{{0,200}})"?>'),
        elements(_M3, "</invoke>", "</tool_call>"),
        ("<mm:think>", "</mm:think>"),
    ),
    "minicpm5": TurnFormat(
        re.compile(r'<function name="(?P<name>[^"<>]{0,200})">'),
        tagged(ParameterTags(r'<param name="(?P<key>[^"]{1,200})">', r"</param>", r"</function>", cdata=True)),
    ),
    "seed_oss": TurnFormat(
        re.compile(r"(?:<seed:tool_call>\s*)?<function=(?P<name>[^<>\n]{0,200})>|<seed:tool_call>"),
        tagged(ParameterTags(_FUNCTION.parameter, _FUNCTION.value_end, _FUNCTION.call_end, r"</seed:tool_call>")),
        ("<seed:think>", "</seed:think>"),
    ),
    "gemma4": TurnFormat(
        re.compile(r"<\|tool_call>call:(?P<name>[^{<]{0,200})\{"),
        gemma("<tool_call|>"),
        ("<|channel>thought\n", "<channel|>"),
    ),
    "granite": _marked("<|tool_call|>", ""),
    "nemotron_v2": _marked("<TOOLCALL>", "</TOOLCALL>"),
    "cohere_command3": _marked(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        think=("<|START_THINKING|>", "<|END_THINKING|>"),
        dropped_markers=re.compile(r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>"),
    ),
    "apriel": _marked(
        "<tool_calls>",
        "</tool_calls>",
        think=("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
        dropped_markers=re.compile(r"\[(?:BEGIN|END) FINAL RESPONSE\]"),
    ),
    "apertus": _marked("<|tools_prefix|>", "<|tools_suffix|>", think=("<|inner_prefix|>", "<|inner_suffix|>")),
    "gigachat3": TurnFormat(
        re.compile(r"<\|function_call\|>|(?:<\|message_sep\|>\s*)?function call<\|role_sep\|>\n"),
        json_until("<|message_sep|>"),
    ),
    "solar_open": TurnFormat(
        re.compile(r"(?:<\|tool_calls\|>)?<\|tool_call:begin\|>"),
        named_json(
            r"(?P<id>[^<]{0,200})<\|tool_call:name\|>(?P<name>[^<]{0,200})<\|tool_call:args\|>",
            r"<\|tool_call:end\|>(?:<\|calls\|>)?",
        ),
    ),
    "lfm2": TurnFormat(re.compile(r"<\|tool_call_start\|>"), python_list("<|tool_call_end|>")),
    "openai": TurnFormat(re.compile(r"(?!)"), _PLAIN.read, split=harmony),
    "plain": _PLAIN,
}
"""Formats by vLLM's parser name; ``plain`` reads no calls. Detection takes the first that reads a template's call."""

SAME_AS: Mapping[str, str] = {
    "llama_json": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "olmo3": "pythonic",
    "qwen3_json": "hermes",
    "granite4": "hermes",
    "longcat": "hermes",
    "qwen3_xml": "qwen3_coder",
    "nemotron_v3": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "mimo": "qwen3_coder",
    "glm47": "glm45",
    "ling3": "glm45",
    "poolside_v1": "glm45",
    "nemotron_json": "nemotron_v2",
}
"""Aliases of formats: other parser names of vLLM, and names of earlier versions."""


REASONING_MARKERS = (
    *dict.fromkeys(form.think for form in FORMATS.values() if form.think != FORMATS["plain"].think),
    FORMATS["plain"].think,
)
"""All pairs of reasoning markers, the most common pair last."""


def format_named(name: str) -> TurnFormat | None:
    """Return the format with this name or alias; ``None`` if there is none."""
    return FORMATS.get(SAME_AS.get(name, name))
