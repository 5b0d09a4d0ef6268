# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Stand-in for vLLM that answers in the format of vLLM 0.32 at little CPU cost.

Completions and chat completions have texts, ids, log-probs, offsets and usage; completions also return the prompt's
ids, copied as bytes from the request. Sampled turns are built once: tool calls of about :data:`WRITTEN` tokens with
real code. Each answer is sent a fixed time after its request. The scripted policy of this package is no substitute,
since its tokens are bytes and it parses and writes JSON for each request.

Run: ``python -m benchmarks.stand_in_engine PORT,PORT,… DELAY_S MODEL_FOLDER``.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import sysconfig
from itertools import count
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


MODEL = "tiny"
CONTEXT = 131_072
WRITTEN = 320
OBSERVED = 320
"""Approximate tokens of a sampled turn and of an observation: a hundred turns have 64k tokens."""
VARIANTS = 16
"""Number of different sampled turns, used cyclically."""
TOOL = "python"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n\\nYou may call one or more functions.\\n\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not (loop.first and tools)) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}{% if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{ call.function.name }}{{ '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}{{ '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""Chat template in the style of Qwen 2.5's."""
_NUMBER = b"{number}"
"""Placeholder for the number of the request in a prepared answer."""
_SOURCES = [Path(sysconfig.get_path("stdlib"), f"{name}.py") for name in ("argparse", "ast", "inspect", "typing")]


def make_model(folder: Path) -> Tokenizer:
    """Train a byte-level BPE tokenizer on Python's own sources, and write it to the folder with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8192, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(source) for source in _SOURCES], trainer)
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def pieces(tokenizer: Tokenizer, tokens: int, seed: int) -> list[str]:
    """Return :data:`VARIANTS` excerpts of Python code of about ``tokens`` tokens each."""
    ids = [one for source in _SOURCES for one in tokenizer.encode(source.read_text()).ids]
    draw = random.Random(seed)
    starts = [draw.randrange(len(ids) - tokens) for _ in range(VARIANTS)]
    return [tokenizer.decode(ids[start : start + tokens]) for start in starts]


class Sampled:
    """Sampled turn as prepared parts of answers: a tool call with one argument, or a text if ``tool`` is empty."""

    def __init__(self, tokenizer: Tokenizer, tool: str, argument: str, text: str) -> None:
        arguments = json.dumps({argument: text}, ensure_ascii=False)
        said = f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>' if tool else text
        ids = tokenizer.encode(said + "<|im_end|>", add_special_tokens=False).ids
        log_probs = [round(random.Random(0).uniform(-2, 0), 8) for _ in ids]
        words = [tokenizer.decode([one], skip_special_tokens=False) for one in ids]
        self.count = len(ids)
        log = {
            "text_offset": [sum(map(len, words[:at])) for at in range(len(words))],
            "token_logprobs": log_probs,
            "tokens": words,
            "top_logprobs": [{word: value} for word, value in zip(words, log_probs, strict=True)],
        }
        choice = {"index": 0, "text": said + "<|im_end|>", "logprobs": log, "finish_reason": "stop", "token_ids": ids}
        choice |= dict.fromkeys(("stop_reason", "prompt_logprobs", "routed_experts"))
        self.choice = orjson.dumps(choice)[:-1]
        each = [
            {"token": f"token_id:{one}", "logprob": value, "bytes": list(word.encode()), "top_logprobs": []}
            for one, value, word in zip(ids, log_probs, words, strict=True)
        ]
        function = {"name": tool, "arguments": arguments}
        call = {"id": f"chatcmpl-tool-{_NUMBER.decode()}", "type": "function", "function": function}
        message = dict.fromkeys(("content", "refusal", "annotations", "audio")) | {"role": "assistant"}
        message |= {"tool_calls": [call]} if tool else {"content": text, "tool_calls": []}
        chat = {"index": 0, "message": message, "logprobs": {"content": each}, "stop_reason": None, "token_ids": None}
        self.chat = orjson.dumps(chat | {"finish_reason": "tool_calls" if tool else "stop"})


class Engine:
    """HTTP routes of the stand-in engine. ``delay_s``: seconds from a request for a completion to its answer."""

    def __init__(self, tokenizer: Tokenizer, delay_s: float) -> None:
        self.tokenizer, self.delay_s = tokenizer, delay_s
        self._sampled = [Sampled(tokenizer, TOOL, "code", code) for code in pieces(tokenizer, WRITTEN - 24, seed=1)]
        self._ids = b",".join(b"%05d" % (10_000 + one % 10_000) for one in range(CONTEXT))
        self._number = count()
        card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "root": MODEL, "parent": None}
        data = [card | {"max_model_len": CONTEXT, "permission": []}]
        self._fixed = {
            "/v1/models": orjson.dumps({"object": "list", "data": data}),
            "/version": b'{"version":"0.32.0"}',
            "/metrics": _metrics(),
            "/health": b"",
        }

    def answer(self, path: str, body: bytes) -> tuple[int, bytes, float]:
        if (write := {"/v1/completions": self._completion, "/v1/chat/completions": self._chat}.get(path)) is not None:
            number = next(self._number)
            one, delay_s = self.sample(number, body)
            return 200, write(number, one, body), delay_s
        if path == "/tokenize":
            return 200, self._tokens(body), 0.0
        return 200 if path in self._fixed else 404, self._fixed.get(path, b'{"detail":"Not Found"}'), 0.0

    def sample(self, number: int, _body: bytes) -> tuple[Sampled, float]:
        """Return the turn for a request, and the seconds until its answer."""
        return self._sampled[number % VARIANTS], self.delay_s

    @staticmethod
    def _completion(number: int, one: Sampled, body: bytes) -> bytes:
        start = body.index(b'"prompt":[') + 9
        prompt = body[start : body.index(b"]", start) + 1]
        head = b'{"id":"cmpl-%032x","object":"text_completion","created":1,"model":"tiny","choices":[' % number
        tail = b',"prompt_token_ids":' + prompt + b'}],"service_tier":null,"system_fingerprint":null,"usage":'
        return head + one.choice + tail + _usage(prompt.count(b",") + 1, one.count) + b',"kv_transfer_params":null}'

    def _chat(self, number: int, one: Sampled, body: bytes) -> bytes:
        head = b'{"id":"chatcmpl-%032x","object":"chat.completion","created":1,"model":"tiny","choices":[' % number
        tail = b'"prompt_logprobs":null,"prompt_token_ids":null,"kv_transfer_params":null}'
        usage = b'],"service_tier":null,"system_fingerprint":null,"usage":%s,' % _usage(self.length(body), one.count)
        return head + one.chat.replace(_NUMBER, b"%032x" % number, 1) + usage + tail

    def _tokens(self, body: bytes) -> bytes:
        if b'"messages"' not in body:
            ids = self.tokenizer.encode(orjson.loads(body)["prompt"], add_special_tokens=False).ids
            return orjson.dumps({"count": len(ids), "max_model_len": CONTEXT, "tokens": ids, "token_strs": None})
        length = self.length(body)
        form = b'{"count":%d,"max_model_len":%d,"tokens":[%s],"token_strs":null}'
        return form % (length, CONTEXT, self._ids[: 6 * length - 1])

    @staticmethod
    def length(body: bytes) -> int:
        """Return the estimated tokens of a conversation, by its number of turns."""
        return WRITTEN + OBSERVED + (WRITTEN + OBSERVED) * body.count(b'"assistant"')


def _usage(prompt: int, sampled: int) -> bytes:
    form = b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":null}'
    return form % (prompt, prompt + sampled, sampled)


def _metrics() -> bytes:
    """Return Prometheus metrics of load and cache, with as many histograms as vLLM has."""
    label = 'engine="0",model_name="tiny"'
    gauges = {"num_requests_running": 0.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.1}
    lines = [f"vllm:{name}{{{label}}} {value}" for name, value in gauges.items()]
    lines.append('vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="10000000"} 1.0')
    for number in range(20):
        lines += [f'vllm:histogram_{number}_bucket{{{label},le="{2.0**at}"}} 1.0' for at in range(20)]
    return ("\n".join(lines) + "\n").encode()


class Connection(asyncio.Protocol):
    """HTTP/1.1 server connection without pipelining; ``engine.answer`` returns the answers."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._path = engine, ""
        self._parts: list[bytes] = []
        self._missing: int | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._missing is None:
            self._parts.append(data)
            whole = b"".join(self._parts)
            end = whole.find(b"\r\n\r\n")
            if end < 0:
                self._parts = [whole]
                return
            head = whole[:end].decode("latin-1").lower()
            self._path = whole[:end].split(b" ", 2)[1].decode()
            length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
            self._parts, self._missing = [whole[end + 4 :]], length - (len(whole) - end - 4)
        else:
            self._parts.append(data)
            self._missing -= len(data)
        if self._missing <= 0:
            body, self._parts, self._missing = b"".join(self._parts), [], None
            status, content, delay_s = self._engine.answer(self._path, body)
            head = b"HTTP/1.1 %d OK\r\ncontent-type: application/json\r\n" % status
            answer = head + b"content-length: %d\r\n\r\n" % len(content) + content
            if delay_s:
                asyncio.get_running_loop().call_later(delay_s, self._transport.write, answer)
            else:
                self._transport.write(answer)


async def serve(ports: list[int], engine: Any) -> None:
    """Serve an engine on all these ports until the process ends."""
    for port in ports:
        loop = asyncio.get_running_loop()
        await loop.create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=4096)
    await asyncio.Event().wait()


def tokenizer_in(folder: str) -> Tokenizer:
    return Tokenizer.from_file(str(Path(folder, "tokenizer.json")))


if __name__ == "__main__":
    engine = Engine(tokenizer_in(sys.argv[3]), float(sys.argv[2]))
    asyncio.run(serve([int(port) for port in sys.argv[1].split(",")], engine))
