# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tool calls as each model family writes them, and a tool with parameters of every JSON type."""

from __future__ import annotations

import json
from typing import Any


PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "deep": {"type": "boolean"},
    "list": {"type": "array", "items": {"type": "integer"}},
    "map": {"type": "object", "properties": {"k": {"type": "string"}}},
    "maybe": {"type": ["string", "null"]},
    "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "mode": {"enum": ["1", "2"]},
    "kind": {"$ref": "#/$defs/kind"},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "description": "Edit something.",
            "parameters": {"type": "object", "properties": PROPERTIES, "$defs": {"kind": {"type": "string"}}},
        },
    },
    {
        "type": "function",
        "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
    },
]
ARGUMENTS: dict[str, Any] = {
    "text": '    return {"é": 1}\n',
    "count": 3,
    "share": 1.5,
    "deep": True,
    "list": [1, 2],
    "map": {"k": "5"},
}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _bare(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _tags(arguments: dict[str, Any], tag: str, close: str, *, line: str = "", typed: bool = False) -> str:
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    return "".join(
        tag.format(name, kind=(kinds[type(value)] if typed else str(isinstance(value, str)).lower()))
        + f"{line}{_bare(value)}{line}{close}\n"
        for name, value in arguments.items()
    )


def _elements(value: object) -> str:
    mark = "]<]minimax[>["
    if isinstance(value, dict):
        return "".join(f"{mark}<{name}>{_elements(one)}{mark}</{name}>" for name, one in value.items())
    if isinstance(value, list):
        return "".join(f"{mark}<item>{_elements(one)}{mark}</item>" for one in value)
    return _bare(value)


def _gemma(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_gemma(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else _json(value)


def function_element(name: str, arguments: dict[str, Any], line: str = "\n") -> str:
    parameters = _tags(arguments, "<parameter={0}>", "</parameter>", line=line)
    return f"<function={name}>\n{parameters}</function>"


def _pairs(name: str, arguments: dict[str, Any], suffix: str = "", sep: str = "") -> str:
    tag = f"<arg_key{suffix}>{{0}}</arg_key{suffix}>\n<arg_value{suffix}>"
    return f"<tool_call{suffix}>{name}{sep}\n{_tags(arguments, tag, f'</arg_value{suffix}>')}</tool_call{suffix}>"


def _invoke(name: str, arguments: dict[str, Any], mark: str = "", kinds: str = "") -> str:
    parameters = _tags(arguments, f'<{mark}parameter name="{{0}}"{kinds}>', f"</{mark}parameter>")
    return f'<{mark}invoke name="{name}">\n{parameters}</{mark}invoke>'


def _kimi_k3(name: str, arguments: dict[str, Any]) -> str:
    tag = '<|open|>argument key="{0}" type="{kind}"<|sep|>'
    parameters = _tags(arguments, tag, "<|close|>argument<|sep|>", typed=True).replace("<|sep|>\n<", "<|sep|><")
    return f'<|open|>call tool="{name}" index="1"<|sep|>{parameters.rstrip()}<|close|>call<|sep|>'


def _python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _object(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return _json({"name": name, key: arguments})


def written(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    match name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{_object(*call)}\n</tool_call>" for call in calls)
        case "qwen3_coder":
            return "\n".join(f"<tool_call>\n{function_element(*call)}\n</tool_call>" for call in calls)
        case "seed_oss":
            return "\n".join(
                f"<seed:tool_call>\n{function_element(*call, line='')}\n</seed:tool_call>" for call in calls
            )
        case "llama3_json":
            return "; ".join(_object(*call, "parameters") for call in calls)
        case "mistral":
            return "".join(f"[TOOL_CALLS]{tool}[ARGS]{_json(arguments)}" for tool, arguments in calls)
        case "pythonic":
            return f"[{', '.join(_python(*call) for call in calls)}]"
        case "lfm2":
            return f"<|tool_call_start|>[{', '.join(_python(*call) for call in calls)}]<|tool_call_end|>"
        case "deepseek_v3":
            parts = (f"function<｜tool▁sep｜>{tool}\n```json\n{_json(arguments)}\n```" for tool, arguments in calls)
        case "deepseek_v31":
            parts = (f"{tool}<｜tool▁sep｜>{_json(arguments)}" for tool, arguments in calls)
        case "deepseek_v32" | "deepseek_v4" | "deepseek_v41":
            block, mark = {
                "deepseek_v32": ("function_calls", "｜DSML｜"),
                "deepseek_v4": ("tool_calls", "｜DSML｜"),
                "deepseek_v41": ("calls", "｜DSML｜ "),
            }[name]
            body = "\n".join(_invoke(*call, mark=mark, kinds=' string="{kind}"') for call in calls)
            return f"<{mark}{block}>\n{body}\n</{mark}{block}>"
        case "glm45":
            return "\n".join(_pairs(*call) for call in calls)
        case "hy_v3":
            body = "\n".join(_pairs(*call, ":opensource", "<tool_sep:opensource>") for call in calls)
            return f"<tool_calls:opensource>\n{body}\n</tool_calls:opensource>"
        case "kimi_k2":
            body = "".join(
                f"<|tool_call_begin|>functions.{tool}:{index}<|tool_call_argument_begin|>{_json(arguments)}"
                "<|tool_call_end|>"
                for index, (tool, arguments) in enumerate(calls)
            )
            return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"
        case "kimi_k3":
            return f"<|open|>tools<|sep|>{''.join(_kimi_k3(*call) for call in calls)}<|close|>tools<|sep|>"
        case "minimax_m2":
            body = "\n".join(_invoke(*call) for call in calls)
            return f"<minimax:tool_call>\n{body}\n</minimax:tool_call>"
        case "minimax_m3":
            mark = "]<]minimax[>["
            body = "".join(
                f'{mark}<invoke name="{tool}">{_elements(arguments)}{mark}</invoke>\n' for tool, arguments in calls
            )
            return f"{mark}<tool_call>\n{body}{mark}</tool_call>"
        case "minicpm5":
            return "\n".join(
                f'<function name="{tool}">'
                + "".join(
                    f'<param name="{key}">'
                    + (f"<![CDATA[{value}]]>" if isinstance(value, str) else str(value))
                    + "</param>"
                    for key, value in arguments.items()
                )
                + "</function>"
                for tool, arguments in calls
            )
        case "gemma4":
            return "".join(f"<|tool_call>call:{tool}{_gemma(arguments)}<tool_call|>" for tool, arguments in calls)
        case "granite":
            return f"<|tool_call|>[{', '.join(_object(*call) for call in calls)}]"
        case "nemotron_v2":
            return f"<TOOLCALL>[{', '.join(_object(*call) for call in calls)}]</TOOLCALL>"
        case "cohere_command3":
            body = ",\n".join(
                _json({"tool_call_id": str(index), "tool_name": tool, "parameters": arguments})
                for index, (tool, arguments) in enumerate(calls)
            )
            return f"<|START_ACTION|>[\n{body}\n]<|END_ACTION|>"
        case "apriel":
            return f"<tool_calls>[{', '.join(_object(*call) for call in calls)}]</tool_calls>"
        case "apertus":
            body = ", ".join(_json({tool: arguments}) for tool, arguments in calls)
            return f"<|tools_prefix|>[{body}]<|tools_suffix|>"
        case "gigachat3":
            return "".join(f"<|function_call|>{_object(*call)}<|message_sep|>" for call in calls)
        case "solar_open":
            body = "".join(
                f"<|tool_call:begin|>id{index}<|tool_call:name|>{tool}<|tool_call:args|>{_json(arguments)}"
                "<|tool_call:end|>"
                for index, (tool, arguments) in enumerate(calls)
            )
            return f"<|tool_calls|>{body}"
        case "openai":
            return "<|start|>assistant".join(
                f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>{_json(arguments)}<|call|>"
                for tool, arguments in calls
            )
        case _:
            raise AssertionError(name)
    body = "".join(f"<｜tool▁call▁begin｜>{part}<｜tool▁call▁end｜>" for part in parts)
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"
