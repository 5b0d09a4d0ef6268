# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tool parsers, in a process of vLLM's own environment, which no other can share."""

from __future__ import annotations

import json
import subprocess
import threading
from types import TracebackType
from typing import Any, Self

from tests.policy.engines import vllm_python


PROGRAM = """
import json, logging, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from vllm.tool_parsers.abstract_tool_parser import ToolParserManager
logging.disable()
class Tokenizer: pass
parser = ToolParserManager.get_tool_parser(sys.argv[1])(Tokenizer())
for line in sys.stdin:
    print(parser.extract_tool_calls(json.loads(line), None).model_dump_json(), file=answers, flush=True)
"""


class VllmParser:
    """A parser by vLLM's name for it; a context manager."""

    def __init__(self, name: str) -> None:
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", str(vllm_python()), "-c", PROGRAM, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd="/",
        )
        self._lock = threading.Lock()

    def __call__(self, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """What is left of a text, and the calls that were in it, in OpenAI's chat format."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(text) + "\n")
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
