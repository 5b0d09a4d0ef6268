# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Riddles: find a code of four characters in a folder with a shell.

Three kinds of riddles, each with a typical mistake of a policy that ignores the shell's output:

- **read**: a file contains the code. Mistake: answer without reading the file.
- **follow**: a file names another file, which contains the code. Mistake: answer with that name.
- **repair**: a script fails because the file that it prints has another name. Mistake: give up at the error.

Codes and names are random, so only the shell reveals a code, and held-out riddles are new to the policy.
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from nemo_gym_prorl.sandbox.images.builder import DEFAULT
from nemo_gym_prorl.servers.task_server import TaskServer
from nemo_gym_prorl.tasks.final_answer import last_message_text
from nemo_gym_prorl.tasks.task import Grade, OpenSandbox, SandboxNeeds
from nemo_gym_prorl.tasks.workbench import Workbench, workbench_schemas
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits, Workspace


QUESTIONS = {"read": "What does %s say?", "follow": "Where does %s lead?", "repair": "What does running %s print?"}
GAVE_UP = "none"
MAX_TURN_TOKENS = 64  # three times the length of a right turn


def draw_name(rng: random.Random) -> str:
    """Draw a file name of a letter and a digit."""
    return rng.choice(string.ascii_lowercase) + rng.choice(string.digits)


def draw_code(rng: random.Random) -> str:
    """Draw a code of two pairs of a letter and a digit."""
    return draw_name(rng) + draw_name(rng)


@dataclass(frozen=True, slots=True)
class Riddle:
    """Question about files, with a code as its answer.

    Attributes:
        kind: key of :data:`QUESTIONS`.
        name: file that the question names.
        other: second file, which the first file names or prints; does not exist in riddles of kind ``repair``.
        code: right answer.
    """

    kind: str
    name: str
    other: str
    code: str

    @classmethod
    def draw(cls, rng: random.Random) -> Riddle:
        name = other = draw_name(rng)
        while other == name:
            other = draw_name(rng)
        return cls(rng.choice([*QUESTIONS]), name, other, draw_code(rng))

    @property
    def question(self) -> str:
        return QUESTIONS[self.kind] % self.name

    @property
    def files(self) -> dict[str, str]:
        """Files of the sandbox's folder: text by path."""
        code = self.code + "\n"
        return {
            "read": {self.name: code},
            "follow": {self.name: self.other + "\n", self.other: code},
            "repair": {self.name: f"cat {self.other}\n", f"{self.other}.bak": code},
        }[self.kind]

    def row(self) -> dict[str, Any]:
        """Return a Gym dataset row."""
        params = {
            "input": [{"role": "user", "content": self.question}],
            "max_output_tokens": MAX_TURN_TOKENS,
            "tools": workbench_schemas(("bash",)),
        }
        return {"responses_create_params": params, "riddle": asdict(self)}


def draw_riddles(count: int, seed: str) -> list[Riddle]:
    """Draw ``count`` riddles with different codes; the same riddles for the same seed."""
    rng, riddles = random.Random(seed), dict[str, Riddle]()
    while len(riddles) < count:
        riddle = Riddle.draw(rng)
        riddles.setdefault(riddle.code, riddle)
    return [*riddles.values()]


class Riddles:
    """Task whose rows are riddles, graded by the policy's last message."""

    def __init__(self, limits: ToolLimits) -> None:
        self.tools = Workbench(("bash",), "/sandbox", limits)

    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds:
        return SandboxNeeds()

    async def prepare(self, row: Mapping[str, Any], tools: Workspace) -> None:
        await tools.write(Riddle(**row["riddle"]).files)

    async def artefacts(self, row: Mapping[str, Any], tools: Workspace) -> None:
        """Return nothing, because only the last message is graded."""

    async def grade(
        self, row: Mapping[str, Any], artefacts: None, response: Mapping[str, Any], open_sandbox: OpenSandbox
    ) -> Grade:
        answer, code = last_message_text(response).strip(), Riddle(**row["riddle"]).code
        verdict = "right" if answer == code else "wrong" if answer else "no_answer"
        return Grade(float(answer == code), verdict, f"the answer is {answer[:40]!r}, the code is {code}")


class RiddleServer(TaskServer):
    own_image: ClassVar[str] = DEFAULT

    def make_task(self) -> Riddles:
        return Riddles(self.config.tool_limits)
