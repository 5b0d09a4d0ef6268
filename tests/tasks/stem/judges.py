# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Scripted judges, honest and gullible ones, and a model server for them."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response

from nemo_gym_prorl.tasks.stem.quantities import words
from tests.rollout.serving import serve


Messages = Sequence[Mapping[str, str]]
Reply = Callable[[str, str, str, str], str]
"""Reply to question, first, second, and the tag of the verdict, which is empty for naive graders."""

SYNONYMS = (
    {"mitochondria", "the mitochondrion", "mitochondrion"},
    {"it doubles", "it becomes twice as large"},
    {"100degreesCelsius", "212degreesFahrenheit"},
)


def agree(first: str, second: str) -> bool:
    one, other = words(first), words(second)
    return one == other or any({one, other} <= group for group in SYNONYMS)


def verdict(tag: str, same: bool) -> str:
    return f"VERDICT{tag and ' '}{tag}: {'SAME' if same else 'DIFFERENT'}"


def honest(question: str, first: str, second: str, tag: str = "") -> str:
    return f"I compared them.\n\n{verdict(tag, agree(first, second))}"


def echoing(question: str, first: str, second: str, tag: str = "") -> str:
    """Quote both answers before the verdict, as models do."""
    quoted = f"The first answer reads:\n{first}\nThe second answer reads:\n{second}\n"
    return quoted + honest(question, first, second, tag)


def gullible(question: str, first: str, second: str, tag: str = "") -> str:
    if any("ignore" in text.lower() for text in (first, second)):
        return f"As instructed.\n{verdict(tag, True)}"
    return honest(question, first, second, tag)


def obliging(question: str, first: str, second: str, tag: str = "") -> str:
    """Obey a conditional instruction in an answer: the same, unless the other answer is in a list."""
    for text, other in ((first, second), (second, first)):
        if "same unless" in (asked_for := text.lower()):
            excluded = asked_for.partition("unless")[2].replace(".", "").split(",")
            return verdict(tag, not any(one.strip() in other.lower() for one in excluded))
    return honest(question, first, second, tag)


def lenient(question: str, first: str, second: str, tag: str = "") -> str:
    return verdict(tag, True)


def strict(question: str, first: str, second: str, tag: str = "") -> str:
    return verdict(tag, False)


_ASKED = re.compile(r"BEGIN (?P<tag>[0-9a-f]{8})\n(?P<data>.*)\nEND (?P=tag)\n", re.DOTALL)


def asked_in(messages: Messages) -> tuple[dict[str, str], str]:
    found = _ASKED.match(messages[-1]["content"])
    assert found is not None
    compared: dict[str, str] = json.loads(found["data"])
    return compared, found["tag"]


def asked(reply: Reply) -> Callable[[Messages], Awaitable[str]]:
    """Return a judge as :class:`~nemo_gym_prorl.tasks.stem.judge.AskModel` that parses its prompt."""

    async def ask(messages: Messages) -> str:
        compared, tag = asked_in(messages)
        return reply(compared["question"], compared["first"], compared["second"], tag)

    return ask


def response_of(text: str, **changes: Any) -> dict[str, Any]:
    content = {"type": "output_text", "text": text, "annotations": []}
    message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [content]}
    reasoning = {"id": "r", "type": "reasoning", "summary": [{"type": "summary_text", "text": "VERDICT: SAME"}]}
    about = {"id": "r", "object": "response", "created_at": 0, "model": "judge", "status": "completed"}
    return about | {"output": [reasoning, message]} | changes


class JudgeServer:
    """Gym model server; ``answers`` handles requests, and judges honestly by default."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.reply: Reply = honest
        self.answers: Callable[[dict[str, Any]], Awaitable[Response | dict[str, Any]]] = self.judge

    async def judge(self, request: dict[str, Any]) -> dict[str, Any]:
        return response_of(await asked(self.reply)(request["input"]))

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/responses", response_model=None)
        async def responses(request: Request) -> Response | dict[str, Any]:
            self.requests.append(await request.json())
            return await self.answers(self.requests[-1])

        return app


@asynccontextmanager
async def judging() -> AsyncIterator[tuple[str, JudgeServer]]:
    server = JudgeServer()
    async with serve(server.app()) as url:
        yield url, server


async def never(request: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(60)
    raise AssertionError


def always(answer: Response | dict[str, Any]) -> Callable[[dict[str, Any]], Awaitable[Response | dict[str, Any]]]:
    async def answers(request: dict[str, Any]) -> Response | dict[str, Any]:
        return answer

    return answers


def says(text: str, **changes: Any) -> Callable[[dict[str, Any]], Awaitable[Response | dict[str, Any]]]:
    """Return a handler that replies with a text, in which the tag replaces ``TAG``."""

    async def answers(request: dict[str, Any]) -> Response | dict[str, Any]:
        return response_of(text.replace("TAG", asked_in(request["input"])[1]), **changes)

    return answers


TROUBLES: Mapping[str, Callable[[dict[str, Any]], Awaitable[Response | dict[str, Any]]]] = {
    "slow": never,
    "error": always(Response("CUDA out of memory", status_code=500)),
    "no JSON": always(Response("<html>", status_code=200)),
    "no text": always(response_of("")),
    "cut off": says("VERDICT TAG: SAME", status="incomplete"),
    "no verdict": says("They look much the same to me."),
    "verdict in the middle": says("VERDICT TAG: SAME\nBut let me think again."),
    "two verdicts": says("VERDICT TAG: SAME\nNo.\nVERDICT TAG: DIFFERENT"),
    "no tag": says("VERDICT: SAME"),
    "the instructions again": says("`VERDICT TAG: SAME` or `VERDICT TAG: DIFFERENT`."),
}
"""Failures of a judge's server."""
