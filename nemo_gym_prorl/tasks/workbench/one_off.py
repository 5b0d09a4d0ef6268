# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``bash`` and ``python`` of a sandbox that has no sessions: each call is a process of its own, and the model is told.

What comes back has the same format as that of :mod:`.consoles`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from nemo_gym_prorl.tasks.workbench.observations import (
    FAILED,
    OK,
    ONLY_FILES,
    Output,
    error,
    exit_code,
    observation,
    restarted,
    timed_out,
)
from nemo_gym_prorl.tasks.workbench.tools import BashArguments, PythonArguments


Ask = Callable[[Mapping[str, Any], float], Awaitable[dict[str, Any] | None]]
"""Asks the program inside the sandbox, within so many seconds; ``None`` if it was killed there."""


class Processes:
    """The two tools.

    Args:
        ask: carries out a request.
        limit: bytes of an observation.
    """

    def __init__(self, ask: Ask, limit: int) -> None:
        self._ask = ask
        self._limit = limit

    async def bash(self, arguments: BashArguments, timeout_s: float) -> str:
        """One call of ``bash``; returns the observation."""
        if arguments.restart:
            return self._said(Output(), restarted("shell"))
        if arguments.command is None:
            return error("no command is running that could take input.", limit=self._limit)
        return await self._run(["bash", "-c", arguments.command], "", timeout_s, exit_code)

    async def python(self, arguments: PythonArguments, timeout_s: float) -> str:
        """One call of ``python``; returns the observation."""
        if arguments.code is None:
            return self._said(Output(), restarted("kernel"))
        return await self._run(["python3", "-"], arguments.code, timeout_s, lambda code: FAILED if code else OK)

    async def _run(self, argv: list[str], stdin: str, timeout_s: float, status: Callable[[int], str]) -> str:
        request = {"op": "run", "argv": argv, "stdin": stdin, "timeout_s": timeout_s, "limit": self._limit}
        match await self._ask(request, timeout_s):
            case None:
                reason = "the command killed the process that reports on it; its output is lost."
            case {"timed_out": True, "head": str(head), "omitted": int(omitted), "tail": str(tail)}:
                return self._said(Output(head, max(0, omitted), tail), timed_out(timeout_s))
            case {"exit_code": int(code), "head": str(head), "omitted": int(omitted), "tail": str(tail)}:
                # As a shell would say it: 128 + N after signal N.
                return self._said(Output(head, max(0, omitted), tail), status(code if code >= 0 else 128 - code))
            case answer:
                reason = str(answer.get("problem", "something else answered for the command."))
        return error(reason, limit=self._limit)

    def _said(self, output: Output, status: str) -> str:
        return observation(output, status, [ONLY_FILES], limit=self._limit)
