# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Stand-in engine with a scripted policy: the turns of a rollout call ``bash`` once each, and the last turn answers.

A turn has a random number of tokens and takes as many decoding steps. The log has the times at which the engine worked
for each rollout, so all stacks are measured at the same point: the engine.

Run: ``python -m benchmarks.stack_engine PORT MODEL_FOLDER``. ``POST /script`` with the fields of :class:`Script`
starts a new log, ``GET /log`` returns it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass

import orjson
from tokenizers import Tokenizer

from benchmarks.stand_in_engine import Engine, Sampled, pieces, serve, tokenizer_in


TASK = "Task number %06d."
"""Text in the first message of a rollout, which identifies the rollout."""
DONE = "all is printed"
"""Last line of a command's output."""
COMMAND = "cat <<'END'\n{}\n# " + DONE + "\nEND"
CODE_TOKENS = (60, 100, 150, 220)
"""Tokens of the code in a command. With escapes and the call's JSON, turns have 110 to 350."""
PER_TURN, FIRST = 400, 1800
"""Estimated tokens of a turn with its observation, and of a first prompt, for requests without token ids."""


@dataclass(frozen=True, slots=True)
class Script:
    """Behaviour of the engine.

    Attributes:
        turns: turns of a rollout with a tool call.
        command: command of each turn; empty for commands that print code.
        step_s: seconds of a decoding step, independent of the requests in flight, so that a stack gains nothing by
            keeping fewer requests in flight.
    """

    turns: int = 20
    command: str = ""
    step_s: float = 0.0


class ScriptedEngine(Engine):
    """Engine that plays a :class:`Script`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, 0.0)
        codes = [code for tokens in CODE_TOKENS for code in pieces(tokenizer, tokens, seed=tokens)]
        self._commands = [self._call(COMMAND.format(code)) for code in codes]
        self._calls = self._commands
        self._answer = Sampled(tokenizer, "", "", "All of it is printed now, so this task is done.")
        self._end = b",%d," % tokenizer.token_to_id("<|im_end|>")
        self._script = Script()
        self._rollouts: dict[bytes, int] = {}
        self._log: list[tuple[int, int, float, float]] = []

    def answer(self, path: str, body: bytes) -> tuple[int, bytes, float]:
        if path == "/script":
            self._script, self._log, self._rollouts = Script(**orjson.loads(body)), [], {}
            self._calls = [self._call(self._script.command)] if self._script.command else self._commands
            return 200, b"{}", 0.0
        if path == "/log":
            return 200, orjson.dumps(self._log), 0.0
        return super().answer(path, body)

    def sample(self, number: int, body: bytes) -> tuple[Sampled, float]:
        """Return the turn that follows a prompt, and the seconds until its answer."""
        if (start := body.find(b'"prompt":[')) >= 0:
            second = body.find(self._end, body.find(self._end, start) + 1)  # end of the first user message
            name, turn = body[start:second], (body.count(self._end, start) - 2) // 2
        else:
            at = body.find(TASK.split("%")[0].encode())
            name, turn = body[at : at + len(TASK % 0)], body.count(b'"assistant"')
        # Rollouts are numbered by arrival, so each run plays the same set of turns whatever the rollouts' names.
        rollout = self._rollouts.setdefault(name, len(self._rollouts))
        done = turn >= self._script.turns
        one = self._answer if done else self._calls[(rollout + turn * 31) % len(self._calls)]
        delay_s = one.count * self._script.step_s
        now = time.perf_counter()
        self._log.append((rollout, turn, now, now + delay_s))
        return one, delay_s

    def _call(self, command: str) -> Sampled:
        return Sampled(self.tokenizer, "bash", "command", command)

    @staticmethod
    def length(body: bytes) -> int:
        """Return the estimated tokens of a conversation, by its number of turns."""
        return FIRST + PER_TURN * body.count(b'"assistant"')


if __name__ == "__main__":
    asyncio.run(serve([int(sys.argv[1])], ScriptedEngine(tokenizer_in(sys.argv[2]))))
