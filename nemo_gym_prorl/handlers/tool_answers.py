# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What an error status of a tool is: something for the policy to read, or a machine's failure.

To Gym's own agent it is always an observation. Then a gateway that is overrun, or a tool that is broken for everybody,
makes the policy fail its task, and that is trained on as a reward of 0. So here

- a refusal (429, 503) was made before any work, and the call is made again a few times;
- what a gateway says of a server behind it (502, 504, 520 to 530) may come after the work. A tool call cannot be
  repeated, so the attempt has failed, and with it what it did to its sandbox is gone;
- a 500 is the tool's own. One may be due to the arguments and is an observation. A tool that answers nothing else any
  more, be it one rollout that is told so or several, is broken.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.handlers.gym_http import CookieJar, GymServer, HttpAnswer


BROKEN_AFTER = 3
"""Answers of 500 to one rollout, one after the other, after which a tool counts as broken: two may be the arguments'
fault."""
BROKEN_FOR_ALL_AFTER = 16
"""The same over all rollouts: each of several policies may make a mistake, but not so many in a row."""

_REFUSALS = frozenset({429, 503})
_GATEWAYS = frozenset({502, 504, *range(520, 531)})
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
_LONGEST_S = 15.0
"""A pause that a refusal may ask for (``Retry-After``)."""


@dataclass(slots=True)
class Trouble:
    """What one rollout has had with tools so far.

    Attributes:
        in_row: answers of 500 since any other one, by tool.
        refused_s: seconds of pauses after refusals, which are not the agent's time.
    """

    in_row: Counter[str] = field(default_factory=Counter)
    refused_s: float = 0.0
    _until: float = 0.0

    async def pause(self, seconds: float) -> None:
        """Wait after a refusal. Calls of one turn may wait at the same time, which is one time."""
        now = time.monotonic()
        self.refused_s += max(0.0, now + seconds - max(now, self._until))
        self._until = max(self._until, now + seconds)
        await asyncio.sleep(seconds)


class ToolAnswers:
    """The tools of one environment, as all of its rollouts call them.

    Attributes:
        errors: answers with a status of 429, or of 500 and above, by status.
    """

    def __init__(self) -> None:
        self.errors: Counter[int] = Counter()
        self._in_row: Counter[str] = Counter()
        """Answers of 500 since any other one, by tool."""

    async def call(
        self, server: GymServer, tool: str, arguments: bytes, cookies: CookieJar, trouble: Trouble
    ) -> HttpAnswer:
        """Call a tool; again after a pause if it refuses, a few times. What comes back is an observation.

        Args:
            server: the environment.
            tool: its name.
            arguments: as JSON.
            cookies: of the rollout's session.
            trouble: the rollout's, which is kept up to date.

        Raises:
            InfrastructureError: the answer says nothing about the policy, or there is none.
        """
        for pause in (*_PAUSES_S, None):
            answer = await server.post(f"/{tool}", arguments, cookies)
            if answer.status == 429 or answer.status >= 500:
                self.errors[answer.status] += 1
            if answer.status not in _REFUSALS or pause is None:
                break
            asked = answer.headers.get("Retry-After", "")
            pause = min(max(pause, float(asked) if asked.isdecimal() else 0.0), _LONGEST_S)
            await trouble.pause(pause)
        if answer.status in _REFUSALS | _GATEWAYS:
            raise InfrastructureError(f"tool {tool!r}: HTTP {answer.status}: {answer.said(500)}")
        for count in (self._in_row, trouble.in_row):
            count[tool] = count[tool] + 1 if answer.status == 500 else 0
            if not count[tool]:
                del count[tool]
        failed = max(self._in_row[tool], trouble.in_row[tool])
        if trouble.in_row[tool] >= BROKEN_AFTER or self._in_row[tool] >= BROKEN_FOR_ALL_AFTER:
            raise InfrastructureError(
                f"tool {tool!r} is broken: it has answered with HTTP 500 {failed} times in a row, and now: "
                f"{answer.said(500)}"
            )
        return answer
