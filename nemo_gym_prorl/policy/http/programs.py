# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Request and answer formats for finished agent programs, which are not written for this server.

A request is a program's if it has a capability key, the URL of a rollout, or asks for a stream. Such a request loses
unsupported fields, instead of being refused. Errors have the form of the programs' APIs, so that clients show the
message and retry retryable failures. A stream repeats a complete answer, because a turn's tokens enter the ledger
together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson
from starlette.responses import Response

from nemo_gym_prorl.http.problem_document import TYPE_PREFIX, Problem
from nemo_gym_prorl.http.problems import answer_to
from nemo_gym_prorl.policy.calls import LEFT_OUT, refuse
from nemo_gym_prorl.policy.http.fields import leave_out_unserved


SEPARATOR = "__"
"""Separator of namespace and tool in the name of a function."""
_BLOCKS = ("text", "thinking", "tool_use", "tool_result")
_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


def adapt_responses(body: dict[str, Any]) -> dict[str | None, dict[str, str]]:
    """Remove unsupported fields and tools from a program's request of the Responses API; leave other requests alone.

    Each tool of a namespace becomes a function, whose name joins both names with :data:`SEPARATOR`.

    Returns:
        namespace and tool name by the function's name, to restore in the items of calls.
    """
    spaces: dict[str | None, dict[str, str]] = {}
    if LEFT_OUT.get() is None:
        return spaces
    body.pop("stream", None)
    tools: Any = body.get("tools")
    for tool in list(tools) if isinstance(tools, list) else ():
        match tool:
            case {"type": "namespace", "name": str(space), "tools": [*inner]}:
                tools.remove(tool)
                for one in (one for one in inner if isinstance(one, dict)):
                    name = f"{space}{SEPARATOR}{one.get('name')}"
                    spaces[name] = {"namespace": space, "name": str(one.get("name"))}
                    tools.append({"strict": None, **one, "name": name})
    leave_out_unserved("responses", body)
    return spaces


def adapt_messages(api: str, body: dict[str, Any]) -> None:
    """Remove unsupported fields from a program's request of chat completions or the Messages API."""
    if LEFT_OUT.get() is None:
        return
    leave_out_unserved(api, body)
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            message["content"] = _known(message["content"], _BLOCKS)
            for block in message["content"]:
                if isinstance(block.get("content"), list):
                    block["content"] = _known(block["content"], ("text",))


def _known(blocks: list[Any], kinds: tuple[str, ...]) -> list[Any]:
    kept = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in kinds:
            kept.append(block)
        else:
            refuse("messages.content", "only text is supported", str(kind))
    return kept


def program_error(error: Exception) -> Response:
    """Return the answer to an error in the form that clients of all three APIs read."""
    answer = answer_to(error)
    problem = Problem.model_validate_json(bytes(answer.body))
    kind = _ERROR_TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    fields = {"type": kind, "code": problem.type.removeprefix(TYPE_PREFIX), "message": problem.detail, "param": None}
    headers = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
    return Response(orjson.dumps({"type": "error", "error": fields}), problem.status, headers, "application/json")


def responses_stream(answer: Mapping[str, Any]) -> Response:
    def events() -> Iterator[dict[str, Any]]:
        yield {"type": "response.created", "response": {**answer, "status": "in_progress", "output": []}}
        for index, item in enumerate(answer["output"]):
            yield {"type": "response.output_item.added", "output_index": index, "item": item}
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        yield {"type": "response.completed", "response": {**answer, "status": "completed"}}

    return _stream(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events())


def chat_stream(answer: Mapping[str, Any], *, usage: bool) -> Response:
    """Return a chat completion as a stream, with the usage if the client asked for it."""
    chunk = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    (choice,) = answer["choices"]
    delta = {name: value for name, value in choice["message"].items() if name in ("role", "content") and value}
    delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(choice["message"].get("tool_calls") or ())]
    chunks = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        *([{"choices": [], "usage": answer["usage"]}] if usage else ()),
    ]
    return _stream([*(b"data: %b\n\n" % orjson.dumps(chunk | one) for one in chunks), b"data: [DONE]\n\n"])


def _stream(events: Iterable[bytes]) -> Response:
    return Response(b"".join(events), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
