# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Serve or refuse every field of a request by its name; no field is ignored.

The three APIs use different names for the same parameters. A table per API maps its fields to those of chat
completions. Fields of engines are passed on. Values that ask for existing behaviour are accepted, all other values are
refused. Requests of agent programs lose refused fields beforehand (:func:`leave_out_unserved`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.calls import refuse
from nemo_gym_prorl.policy.tokens.conversations import KNOWN_TURN, TOKEN_FIELDS


ENGINE_FIELDS = frozenset(
    {
        *("frequency_penalty", "presence_penalty", "logit_bias", "response_format"),
        *("top_k", "thinking_token_budget", "user"),
    }
)
"""Fields that are passed to engines unchanged."""

_SERVED = ENGINE_FIELDS | {
    *("messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "seed", "logprobs"),
    *("tools", "tool_choice", "parallel_tool_calls", "metadata", "chat_template_kwargs", "reasoning_effort"),
}

_TOKENS = frozenset({*TOKEN_FIELDS, KNOWN_TURN, "routed_experts"})
"""Fields of a message or item that hold sampled text or tokens."""

_NO_OP_VALUES: Mapping[str, Collection[object]] = {
    "background": (False,),
    "cache_control": ({"type": "ephemeral"}, {"type": "ephemeral", "ttl": "5m"}),
    "context_management": ({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},),
    "include": ([],),
    "modalities": (["text"],),
    "n": (1,),
    "reasoning.summary": ("auto",),  # the complete reasoning is returned as the summary
    "service_tier": ("auto", "default", "standard_only"),
    "store": (False,),
    "stream": (False,),
    "text.verbosity": ("medium",),
    "thinking.display": ("summarized", "updates"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}
"""Values that ask for behaviour that the service has anyway."""


def check_fields(
    given: Mapping[str, Any], served: Collection[str] = _SERVED, tools: Collection[str | None] = ("function",)
) -> None:
    """Refuse fields that are neither served nor no-ops.

    Args:
        given: fields and values; ``None`` counts as absent.
        served: names that the caller reads; by default those of chat completions.
        tools: types of tools that count as functions; ``None`` for tools without a type.

    Raises:
        CallerError: names the first refused field or tool.
    """
    for name, value in given.items():
        if not _is_served(name, value, served):
            raise CallerError(
                "is not served: leave it out, or put an engine's own field into metadata.extra_body",
                field=name,
            )
    listed = given.get("tools")
    for index, tool in enumerate(listed if isinstance(listed, list) else ()):
        if isinstance(tool, dict) and tool.get("type") not in tools:
            raise CallerError(
                f"{tool.get('type')!r} is not supported: only functions can be called", field=f"tools.{index}.type"
            )


def _is_served(name: str, value: object, served: Collection[str]) -> bool:
    return value is None or name in served or value in _NO_OP_VALUES.get(name, ())


def _unchanged(value: Any, field: str) -> Any:
    return value


def _tool_choice(choice: Any, field: str) -> Any:
    """Convert a tool choice of the Responses API to chat completions; unknown forms stay unchanged."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(form: Any, field: str) -> dict[str, Any]:
    """Convert a format of the other APIs, which have the schema next to ``type``, to chat completions."""
    match form:
        case {"type": "text" | "json_object" as kind}:
            return {"type": kind}
        case {"type": "json_schema", "schema": schema, **more}:
            return {"type": "json_schema", "json_schema": {"name": "answer", **more, "schema": schema}}
    raise CallerError("must be text, json_object, or json_schema with a schema", field=field)


def _strings(value: Any, field: str) -> list[str]:
    if not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
        raise CallerError("must be a list of texts", field=field)
    return value


def _thinking(kind: Any, field: str) -> str | None:
    """Return the reasoning effort ``none`` if thinking is disabled; ``None`` leaves the effort to another field."""
    if kind not in ("enabled", "disabled", "adaptive"):
        raise CallerError("must be 'enabled', 'disabled' or 'adaptive'", field=field)
    return "none" if kind == "disabled" else None


type _Table = Mapping[str, tuple[str, Callable[[Any, str], Any]]]
"""Name in chat completions and converter of the value, by a field's name; dotted names are fields of objects."""

_OF_RESPONSES: _Table = {
    **{name: (name, _unchanged) for name in ("temperature", "top_p", "metadata", "parallel_tool_calls", "user")},
    "max_output_tokens": ("max_tokens", _unchanged),
    "reasoning.effort": ("reasoning_effort", _unchanged),
    "text.format": ("response_format", _response_format),
    "tool_choice": ("tool_choice", _tool_choice),
}
_OF_MESSAGES: _Table = {
    "metadata.user_id": ("user", _unchanged),
    "output_config.effort": ("reasoning_effort", _unchanged),
    "output_config.format": ("response_format", _response_format),
    "stop_sequences": ("stop", _strings),
    "thinking.budget_tokens": ("thinking_token_budget", _unchanged),
    "thinking.type": ("thinking", _thinking),
    "top_k": ("top_k", _unchanged),
}
_READ_BY_GYM = ("model", "messages", "system", "max_tokens", "temperature", "top_p", "tools", "tool_choice", "stream")
_APIS: Mapping[str, tuple[_Table, Collection[str], Collection[str | None]]] = {
    "chat/completions": ({}, _SERVED, ("function",)),
    "messages": (_OF_MESSAGES, _READ_BY_GYM, (None, "custom")),
    "responses": (
        _OF_RESPONSES,
        ("input", "instructions", "model", "previous_response_id", "tools", "store"),
        ("function",),
    ),
}
"""Table, names of fields that other code reads, and types of tools that count as functions, by API."""


def chat_fields_of_responses(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the fields of a Responses API request, except input and tools, to chat completions.

    Raises:
        CallerError: names a field that cannot be served.
    """
    return _read(body, *_APIS["responses"])


def chat_fields_of_messages(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Messages API request that Gym's converter drops, as fields of chat completions.

    Raises:
        CallerError: names a field that cannot be served.
    """
    chat = _read(body, *_APIS["messages"])
    if "thinking" in chat:
        chat["reasoning_effort"] = chat.pop("thinking") or chat.get("reasoning_effort", "medium")
    if (body.get("tool_choice") or {}).get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    return chat


def _read(
    body: Mapping[str, Any], table: _Table, elsewhere: Collection[str], tools: Collection[str | None]
) -> dict[str, Any]:
    given = {field: holder[name] for field, holder, name in _fields(body, table)}
    check_fields(given, {*table, *elsewhere}, tools)
    return {chat: read(given[name], name) for name, (chat, read) in table.items() if given.get(name) is not None}


def leave_out_unserved(api: str, body: dict[str, Any]) -> None:
    """Remove the fields and tools of a program's request that its API does not serve."""
    table, elsewhere, types = _APIS[api]
    for field, holder, name in _fields(body, table):
        if not _is_served(field, holder[name], {*table, *elsewhere}):
            refuse(field, "is not served")
            del holder[name]
    if isinstance(tools := body.get("tools"), list):
        unknown = [tool for tool in tools if isinstance(tool, dict) and tool.get("type") not in types]
        for tool in unknown:
            refuse(str(tool.get("type")), "is not served")
        body["tools"] = [tool for tool in tools if tool not in unknown]


_NOT_FROM_PROGRAMS = ENGINE_FIELDS | {"temperature", "top_p", "seed", "logprobs", "metadata", "chat_template_kwargs"}
"""Fields of chat completions that the row of a rollout decides; a program decides tools, effort and stop strings."""


def leave_out_undecided(api: str, body: dict[str, Any]) -> None:
    """Remove fields that a program with a capability key must not set: sampling, and the tokens of earlier turns.

    The row decides sampling, and the ledger knows the tokens: a program could otherwise forge training data.
    """
    table = _APIS[api][0]
    for field, holder, name in _fields(body, table):
        if table.get(field, (field,))[0] in _NOT_FROM_PROGRAMS and holder[name] is not None:
            refuse(field, "is decided by the row")
            del holder[name]
    history = body.get("input" if api == "responses" else "messages")
    for message in history if isinstance(history, list) else ():
        for name in _TOKENS & message.keys() if isinstance(message, dict) else ():
            refuse(name, "is known to the ledger")
            del message[name]


def _fields(body: Mapping[str, Any], table: _Table) -> Iterator[tuple[str, Any, str]]:
    """Yield each field's dotted name, the object that holds the field, and the field's name in the object."""
    objects = {name.partition(".")[0] for name in table if "." in name}
    for name, value in list(body.items()):
        if name not in objects or value is None:
            yield name, body, name
        elif isinstance(value, dict):
            yield from ((f"{name}.{inner}", value, inner) for inner in list(value))
        else:
            raise CallerError("must be an object", field=name)
