# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A model and an environment that answer at once, so that what is left to measure is the agent in front of them.

One bare ASGI application speaks the routes that a Gym agent calls: ``/seed_session``, ``/v1/responses`` (first turn a
tool call, second a message), ``/lookup``, ``/verify``. Bodies are built once. Run: ``python instant_servers.py PORT``.
"""

from __future__ import annotations

import sys
from typing import Any

import orjson
import uvicorn


TOKENS = {
    "prompt_token_ids": list(range(1000)),
    "generation_token_ids": list(range(100)),
    "generation_log_probs": [-0.5] * 100,
}
ENVELOPE = {
    "id": "resp_1",
    "created_at": 1,
    "model": "instant",
    "object": "response",
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "tools": [],
    "usage": {
        "input_tokens": 1000,
        "output_tokens": 100,
        "total_tokens": 1100,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    },
}
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_1",
    "name": "lookup",
    "arguments": '{"key": "answer"}',
    "status": "completed",
    **TOKENS,
}
MESSAGE = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "42", "annotations": []}],
    **TOKENS,
}
FIRST_TURN = orjson.dumps({**ENVELOPE, "output": [CALL]})
SECOND_TURN = orjson.dumps({**ENVELOPE, "output": [MESSAGE]})


def answer(path: str, body: bytes) -> bytes:
    """The answer of a route."""
    if path == "/v1/responses":
        return SECOND_TURN if b"function_call_output" in body else FIRST_TURN
    if path == "/lookup":
        return b"42"
    if path == "/verify":
        return orjson.dumps({**orjson.loads(body), "reward": 1.0})
    return b"{}"


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """The application."""
    if scope["type"] != "http":
        return
    body = b""
    more = True
    while more:
        event = await receive()
        body += event.get("body", b"")
        more = event.get("more_body", False)
    content = answer(scope["path"], body)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
        (b"set-cookie", b"session=s; path=/; httponly"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
