# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tool parsers, in a process of vLLM's own environment."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tests.policy.engines import vllm_python


PROGRAM = """
import json, logging, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers.abstract_tool_parser import ToolParserManager
logging.disable()
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
fast = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
fast.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in json.loads(sys.argv[1])])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast)
for line in sys.stdin:
    name, text, tools = json.loads(line)
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "q"}], tools=tools or None)
    parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
    print(parser.extract_tool_calls(text, request).model_dump_json(), file=answers, flush=True)
"""


class VllmParser:
    """Context manager over vLLM's parsers with one tokenizer of bytes and markers."""

    def __init__(self, *markers: str) -> None:
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", str(vllm_python()), "-c", PROGRAM, json.dumps(markers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd="/",
        )
        self._lock = threading.Lock()

    def __call__(
        self, name: str, text: str, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str | None, list[dict[str, Any]]]:
        """Return the remaining text and the calls that the named parser finds, in OpenAI's chat format."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps([name, text, tools]) + "\n")
            self._process.stdin.flush()
            found = json.loads(self._process.stdout.readline())
        return found["content"], found["tool_calls"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
