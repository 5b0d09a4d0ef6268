# SPDX-License-Identifier: Apache-2.0
"""Every field of a request is served or refused by its name; none is dropped in silence.

The three APIs ask for the same things under different names, so each is read into the fields of chat completions,
beside which :func:`check` leaves nothing: what an engine can be told is told to it, what is done anyway may be asked
for, and everything else is refused with what to do about it.
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
    "include": ([],),
    "modalities": (["text"],),
    "n": (1,),
    "service_tier": ("auto", "default", "standard_only"),
    "store": (False,),
    "stream": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}
"""What is done whether or not it is asked for."""

_UNKNOWN = "is not served here; what only the engine knows goes into metadata.extra_body"
_TEXT = "text goes in and comes out, and nothing else"
_WHOLE = "answers come whole"
_SHORTER = "history is never cut: have the agent shorten it"
_WHY: Mapping[str, str] = {
    "audio": _TEXT,
    "background": "an answer is waited for",
    "context_management": _SHORTER,
    "conversation": "no conversation is kept under a name: use previous_response_id, or send it whole",
    "include": "nothing can be added to an answer; log-probs of tokens come with their ids",
    "max_tool_calls": "tools are called by the agent, which can count",
    "modalities": _TEXT,
    "n": "a rollout has one continuation: ask for n rollouts, not for n choices",
    "prompt": "there are no stored prompts: send the messages",
    "store": "nothing is stored beyond the rollout",
    "stream": _WHOLE,
    "stream_options": _WHOLE,
    "top_logprobs": "only the log-probs of the tokens that were sampled are known",
    "truncation": _SHORTER,
    "verbosity": "no template knows it: ask for it in the messages",
}


def refuse(field: str, why: str | None = None) -> CallerError:
    """The error for a field that nobody here can serve."""
    return CallerError(why or f"{_WHY.get(field.rpartition('.')[2], _UNKNOWN)}: leave it out", field=field)


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
            raise refuse(name)
    listed = given.get("tools")
    for index, tool in enumerate(listed if isinstance(listed, list) else ()):
        if isinstance(tool, dict) and tool.get("type") not in tools:
            raise refuse(f"tools.{index}.type", f"{tool.get('type')!r} is none: only functions can be called")


_OF_RESPONSES: Mapping[str, str] = {"max_output_tokens": "max_tokens"}
_SAME = frozenset({"temperature", "top_p", "metadata", "parallel_tool_calls", "user"})
_READ = {*_OF_RESPONSES, *_SAME, "input", "instructions", "model", "previous_response_id", "tools", "store"}


def of_responses(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request of the Responses API, but for input and tools, as chat completions have them.

    Raises:
        CallerError: one cannot be served.
    """
    check(body, {*_READ, "text", "reasoning", "tool_choice"})
    chat = {name: body[name] for name in _SAME if body.get(name) is not None}
    chat |= {ours: body[name] for name, ours in _OF_RESPONSES.items() if body.get(name) is not None}
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = _tool_choice(body["tool_choice"])
    text, reasoning = dict(body.get("text") or {}), dict(body.get("reasoning") or {})
    if (form := text.pop("format", None)) is not None:
        chat["response_format"] = _response_format(form, "text.format")
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    _nothing_else("text", text)
    # Thoughts come as summaries, whole.
    _nothing_else("reasoning", reasoning, effort=lambda _: True, summary=lambda value: value == "auto")
    return chat


_OF_MESSAGES: Mapping[str, str] = {"stop_sequences": "stop", "top_k": "top_k"}
_BY_GYM = {"model", "messages", "system", "max_tokens", "temperature", "top_p", "tools", "tool_choice", "stream"}


def of_messages(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request of the Messages API that Gym's converter leaves out, as chat completions have them.

    Raises:
        CallerError: one cannot be served.
    """
    check(body, {*_BY_GYM, *_OF_MESSAGES, "metadata", "thinking", "output_config"}, (None, "custom"))
    stops = body.get("stop_sequences")
    if stops is not None and not (isinstance(stops, list) and all(isinstance(one, str) for one in stops)):
        raise CallerError("must be a list of texts", field="stop_sequences")
    chat = {ours: body[name] for name, ours in _OF_MESSAGES.items() if body.get(name) is not None}
    about, config, thinking = (_object(body, name) for name in ("metadata", "output_config", "thinking"))
    if (user := about.pop("user_id", None)) is not None:
        chat["user"] = user
    _nothing_else("metadata", about)
    if (form := config.pop("format", None)) is not None:
        chat["response_format"] = _response_format(form, "output_config.format")
    effort = config.pop("effort", None)
    _nothing_else("output_config", config)
    if (kind := thinking.pop("type", None)) is not None:
        if kind not in ("enabled", "disabled", "adaptive"):
            raise refuse("thinking.type", "must be 'enabled', 'disabled' or 'adaptive'")
        effort = "none" if kind == "disabled" else effort or "medium"
    if (budget := thinking.pop("budget_tokens", None)) is not None:
        chat["thinking_token_budget"] = budget
    _nothing_else("thinking", thinking)
    if effort is not None:
        chat["reasoning_effort"] = effort
    choice = _object(body, "tool_choice")
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    return chat


def _object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name) or {}
    if not isinstance(value, dict):
        raise CallerError("must be an object", field=name)
    return dict(value)


def _nothing_else(name: str, given: Mapping[str, Any], **served: Callable[[Any], bool]) -> None:
    for key, value in given.items():
        fits = served.get(key, lambda value, key=key: value in _ANYWAY.get(key, ()))
        if value is not None and not fits(value):
            raise refuse(f"{name}.{key}")


def _tool_choice(choice: object) -> object:
    """Of the Responses API, as chat completions have it; what is none of the known forms stays."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(form: object, field: str) -> dict[str, Any]:
    """A format of the other APIs, whose schema lies beside its type, as chat completions have it."""
    match form:
        case {"type": "text" | "json_object" as kind}:
            return {"type": kind}
        case {"type": "json_schema", "schema": schema, **more}:
            return {"type": "json_schema", "json_schema": {"name": "answer", **more, "schema": schema}}
    raise refuse(field, "must be text, json_object, or json_schema with a schema")
