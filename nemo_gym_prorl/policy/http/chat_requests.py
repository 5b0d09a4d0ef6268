# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Chat completions: from request fields to a turn, and from an answer to the response.

Requests of the other APIs are first converted to the fields of chat completions (:mod:`.fields`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from time import time
from typing import Any

import orjson

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.engines.engine import Sampling
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.http.fields import ENGINE_FIELDS, check_fields
from nemo_gym_prorl.policy.text.template import Message
from nemo_gym_prorl.policy.turns import PolicyAnswer, TurnRequest


def turn_request(
    chat: Mapping[str, Any],
    messages: Sequence[Message],
    instructions: str | None = None,
    *,
    template_variables: Mapping[str, Any],
    extra_body: Mapping[str, Any],
) -> TurnRequest:
    """Return the turn that a request in the fields of chat completions asks for, without rollout and previous answer.

    ``template_variables`` and ``extra_body`` are defaults, which the request's own override.

    Raises:
        CallerError: a field is invalid.
    """
    check_fields(chat)
    tools = list(offered_tools(chat))
    with conversion_errors():
        # Lone surrogates and excessive nesting would otherwise fail later, with an error that names no field.
        orjson.dumps((messages, tools, instructions))
    metadata = chat.get("metadata") or {}
    given = chat.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise CallerError("must be an object", field="chat_template_kwargs")
    variables = deepcopy(dict(template_variables)) | given
    variables |= _metadata_object(metadata, "chat_template_kwargs")
    extra = deepcopy(dict(extra_body)) | _metadata_object(metadata, "extra_body")
    extra |= {name: chat[name] for name in ENGINE_FIELDS if chat.get(name) is not None}
    if metadata:
        extra["metadata"] = metadata
    stop = chat.get("stop") or ()
    return TurnRequest(
        rollout="",
        messages=messages,
        instructions=instructions,
        tools=tools,
        tool_choice=_tool_choice(chat, tools),
        parallel=chat.get("parallel_tool_calls") is not False,
        effort=chat.get("reasoning_effort"),
        sampling=Sampling(
            max_tokens=_first(chat.get("max_completion_tokens"), chat.get("max_tokens")),
            temperature=chat.get("temperature"),
            top_p=chat.get("top_p"),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            seed=chat.get("seed"),
            extra=extra,
        ),
        template_variables=variables,
    )


def completion(answer: PolicyAnswer, model: str, *, tokens: bool, logprobs: bool) -> dict[str, Any]:
    """Return a chat completions response, on demand with Gym's token fields in the message, and with log-probs."""
    message = dict(answer.message)
    sampled = len(answer.turn.sampled) if answer.turn else 0
    if tokens and answer.turn is not None:
        message |= {
            "prompt_token_ids": answer.turn.prompt(),
            "generation_token_ids": list(answer.turn.sampled),
            "generation_log_probs": list(answer.turn.log_probs),
        }
    finish = "length" if answer.finish is not Finish.STOP else "tool_calls" if answer.parsed.calls else "stop"
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "message": message}
    if logprobs and answer.turn is not None:
        # vLLM's form with return_tokens_as_token_ids; a token's text may be an incomplete character.
        pairs = zip(answer.turn.sampled, answer.turn.log_probs, strict=True)
        content = [{"token": f"token_id:{one}", "logprob": value, "top_logprobs": []} for one, value in pairs]
        choice["logprobs"] = {"content": content, "refusal": None}
    return {
        "id": answer.id,
        "object": "chat.completion",
        "created": int(time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": answer.prompt_tokens + sampled,
        },
    }


_CONVERSION_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@contextmanager
def conversion_errors() -> Iterator[None]:
    """Report errors of Gym's converters, which do not validate their input, as errors of the request."""
    try:
        yield
    except _CONVERSION_ERRORS as error:
        raise CallerError(
            f"the conversation is invalid: {type(error).__name__}: {str(error)[:500]}", field="body"
        ) from error


def offered_tools(chat: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the tools of a request in the form for engines, without ``strict``.

    ``strict`` is for OpenAI's own servers, and templates would write the field into the prompt. Gym's ``vllm_model``
    removes the field as well.

    Raises:
        CallerError: a tool has no name.
    """
    for index, tool in enumerate(chat.get("tools") or ()):
        function = tool.get("function") or {}
        if not function.get("name"):
            raise CallerError("a tool needs a name", field=f"tools.{index}.name")
        yield {**tool, "function": {name: value for name, value in function.items() if name != "strict"}}


def _tool_choice(chat: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str | Mapping[str, Any] | None:
    choice: str | Mapping[str, Any] | None = chat.get("tool_choice")
    if choice in (None, "auto"):
        return None
    named = [{"type": "function", "function": {"name": tool["function"]["name"]}} for tool in tools]
    if choice == "none" or (tools and choice == "required") or choice in named:
        return choice
    raise CallerError("must be 'auto', 'none', 'required', or a function among the tools", field="tool_choice")


def _metadata_object(metadata: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return a JSON object that Gym's agents pass in a request's metadata."""
    try:
        settings = json.loads(metadata.get(name, "{}"))
    except (ValueError, RecursionError) as error:
        raise CallerError(f"not JSON: {error}", field=f"metadata.{name}") from error
    if not isinstance(settings, dict):
        raise CallerError("must be a JSON object", field=f"metadata.{name}")
    return settings


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
