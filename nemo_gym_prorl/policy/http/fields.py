# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Every field of a request is served or refused by its name; none is dropped in silence.

The three APIs ask for the same things under different names, so each is read into the fields of chat completions, by a
table of its own. What an engine can be told is told to it, what is done anyway may be asked for, and everything else
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from nemo_gym_prorl.failures import CallerError


FOR_ENGINES = frozenset(
    {
        *("frequency_penalty", "presence_penalty", "logit_bias", "response_format"),
        *("top_k", "thinking_token_budget", "user"),
    }
)
"""Fields that engines are told as they are."""

_SERVED = FOR_ENGINES | {
    *("messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "seed", "logprobs"),
    *("tools", "tool_choice", "parallel_tool_calls", "metadata", "chat_template_kwargs", "reasoning_effort"),
}

_ANYWAY: Mapping[str, Collection[object]] = {
    "background": (False,),
    "cache_control": ({"type": "ephemeral"}, {"type": "ephemeral", "ttl": "5m"}),
    "context_management": ({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},),
    "include": ([],),
    "modalities": (["text"],),
    "n": (1,),
    "reasoning.summary": ("auto",),  # thoughts come as summaries, whole
    "service_tier": ("auto", "default", "standard_only"),
    "store": (False,),
    "stream": (False,),
    "text.verbosity": ("medium",),
    "thinking.display": ("summarized", "updates"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}
"""What is done whether or not it is asked for."""


def check(
    given: Mapping[str, Any], served: Collection[str] = _SERVED, tools: Collection[str | None] = ("function",)
) -> None:
    """Refuse what is neither served nor done anyway.

    Args:
        given: fields and their values; ``None`` asks for nothing.
        served: those that are read elsewhere; by default those of chat completions.
        tools: the types of tools that are functions.

    Raises:
        CallerError: there is one; it is named.
    """
    for name, value in given.items():
        if value is not None and name not in served and value not in _ANYWAY.get(name, ()):
            raise CallerError(
                "is not served here: leave it out; what only the engine knows goes into metadata.extra_body",
                field=name,
            )
    listed = given.get("tools")
    for index, tool in enumerate(listed if isinstance(listed, list) else ()):
        if isinstance(tool, dict) and tool.get("type") not in tools:
            raise CallerError(
                f"{tool.get('type')!r} is none: only functions can be called", field=f"tools.{index}.type"
            )


def _as_it_is(value: Any, field: str) -> Any:
    return value


def _tool_choice(choice: Any, field: str) -> Any:
    """Of the Responses API, as chat completions have it; what is none of the known forms stays."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(form: Any, field: str) -> dict[str, Any]:
    """A format of the other APIs, whose schema lies beside its type, as chat completions have it."""
    match form:
        case {"type": "text" | "json_object" as kind}:
            return {"type": kind}
        case {"type": "json_schema", "schema": schema, **more}:
            return {"type": "json_schema", "json_schema": {"name": "answer", **more, "schema": schema}}
    raise CallerError("must be text, json_object, or json_schema with a schema", field=field)


def _texts(value: Any, field: str) -> list[str]:
    if not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
        raise CallerError("must be a list of texts", field=field)
    return value


def _thinking(kind: Any, field: str) -> str | None:
    """The effort to think that is meant; ``None`` where another field may say how much."""
    if kind not in ("enabled", "disabled", "adaptive"):
        raise CallerError("must be 'enabled', 'disabled' or 'adaptive'", field=field)
    return "none" if kind == "disabled" else None


type _Table = Mapping[str, tuple[str, Callable[[Any, str], Any]]]
"""By a field's name, dotted where it is in an object: how chat completions call it, and how it is read."""

_OF_RESPONSES: _Table = {
    **{name: (name, _as_it_is) for name in ("temperature", "top_p", "metadata", "parallel_tool_calls", "user")},
    "max_output_tokens": ("max_tokens", _as_it_is),
    "reasoning.effort": ("reasoning_effort", _as_it_is),
    "text.format": ("response_format", _response_format),
    "tool_choice": ("tool_choice", _tool_choice),
}
_OF_MESSAGES: _Table = {
    "metadata.user_id": ("user", _as_it_is),
    "output_config.effort": ("reasoning_effort", _as_it_is),
    "output_config.format": ("response_format", _response_format),
    "stop_sequences": ("stop", _texts),
    "thinking.budget_tokens": ("thinking_token_budget", _as_it_is),
    "thinking.type": ("thinking", _thinking),
    "top_k": ("top_k", _as_it_is),
}


def of_responses(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request of the Responses API, but for input and tools, as chat completions have them.

    Raises:
        CallerError: one cannot be served.
    """
    return _read(body, _OF_RESPONSES, ("input", "instructions", "model", "previous_response_id", "tools", "store"))


def of_messages(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request of the Messages API that Gym's converter leaves out, as chat completions have them.

    Raises:
        CallerError: one cannot be served.
    """
    by_gym = ("model", "messages", "system", "max_tokens", "temperature", "top_p", "tools", "tool_choice", "stream")
    chat = _read(body, _OF_MESSAGES, by_gym, (None, "custom"))
    if "thinking" in chat:
        chat["reasoning_effort"] = chat.pop("thinking") or chat.get("reasoning_effort", "medium")
    if (body.get("tool_choice") or {}).get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    return chat


def _read(
    body: Mapping[str, Any], table: _Table, elsewhere: Collection[str], tools: Collection[str | None] = ("function",)
) -> dict[str, Any]:
    """What a table tells of a request, whose other fields are read elsewhere."""
    objects = {name.partition(".")[0] for name in table if "." in name}
    given: dict[str, Any] = {}
    for name, value in body.items():
        if name not in objects or value is None:
            given[name] = value
        elif isinstance(value, dict):
            given |= {f"{name}.{inner}": one for inner, one in value.items()}
        else:
            raise CallerError("must be an object", field=name)
    check(given, {*table, *elsewhere}, tools)
    return {chat: read(given[name], name) for name, (chat, read) in table.items() if given.get(name) is not None}
