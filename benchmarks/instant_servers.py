# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Model server and environment that answer at once, to measure only the agent server that calls them.

The routes are those that a Gym agent calls: ``/seed_session``, ``/v1/responses`` (a tool call, then a message),
``/lookup`` and ``/verify``. Run ``python -m benchmarks.instant_servers PORT``.
"""

from __future__ import annotations

import asyncio
import sys

import orjson

from benchmarks.stand_in_engine import Connection


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
        **{"input_tokens": 1000, "output_tokens": 100, "total_tokens": 1100},
        **{"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}},
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
    if path == "/v1/responses":
        return SECOND_TURN if b"function_call_output" in body else FIRST_TURN
    if path == "/lookup":
        return b"42"
    if path == "/verify":
        return orjson.dumps({**orjson.loads(body), "reward": 1.0})
    return b"{}"


async def serve(port: int) -> None:
    class Instant:
        def answer(self, path: str, body: bytes) -> tuple[int, bytes, float]:
            return 200, answer(path, body), 0.0

    await asyncio.get_running_loop().create_server(lambda: Connection(Instant()), "127.0.0.1", port, backlog=4096)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
