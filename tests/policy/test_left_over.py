# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""An engine that was started without its tool parser is told from a policy that talks about calls."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.policy.engines.engine import Misconfigured
from nemo_gym_prorl.policy.text.formats import FORMATS
from nemo_gym_prorl.policy.text.parsers import unparsed_tool_call
from nemo_gym_prorl.policy.turns import TurnRequest
from tests.policy.families import TOOLS
from tests.policy.hosts import hosted
from tests.policy.probes import answer_of, is_probe
from tests.policy.test_engines import says
from tests.policy.test_parsers import BAD, GOOD
from tests.policy.vllm_parser import VllmParser
from tests.rollout.serving import serve as serving


CALL = GOOD["hermes"]
NOT_LEFT = [
    "42",
    f"I could write {CALL} and then wait.",
    f"This is how one looks:\n```xml\n{CALL}\n```",
    f"This is how one looks:\n```\n{CALL}",
    f"`{CALL.replace(chr(10), '')}`",
    CALL.replace("look", "submit"),
    CALL.replace('"what": "é"', '"what": '),
    f"{CALL}\n<tool_call>\nlook again\n</tool_call>",
    '<tool_call>{"name": "look"}</tool_call>',
    '<tool_call>{"name": "look", "parameters": {"what": "é"}}</tool_call>',
]


@pytest.mark.parametrize("tool_format", GOOD)
def test_a_call_at_the_end_is_left_over(tool_format: str) -> None:
    assert unparsed_tool_call(GOOD[tool_format], FORMATS[tool_format], {"look"}) == "look"
    assert unparsed_tool_call(GOOD[tool_format], FORMATS[tool_format], {"touch"}) is None
    assert unparsed_tool_call(GOOD[tool_format], FORMATS["plain"], {"look"}) is None


@pytest.mark.parametrize("before", ["Let me see.\n", "", "`ls` and ```sh\nls\n``` first. "])
def test_what_is_said_before_a_call_is_no_excuse(before: str) -> None:
    assert unparsed_tool_call(f"{before}{CALL}\n{CALL}\n", FORMATS["hermes"], {"look"}) == "look"


@pytest.mark.parametrize("content", NOT_LEFT)
def test_talk_about_calls_and_mistakes_are_the_policys(content: str) -> None:
    assert unparsed_tool_call(content, FORMATS["hermes"], {"look"}) is None


@pytest.mark.parametrize("tool_format", BAD)
def test_malformed_calls_are_the_policys(tool_format: str) -> None:
    for content, _ in BAD[tool_format]:
        assert unparsed_tool_call(content, FORMATS[tool_format], {"look"}) is None


@given(st.text(), st.sampled_from(sorted(FORMATS)))
def test_any_text_has_an_answer(content: str, tool_format: str) -> None:
    unparsed_tool_call(content, FORMATS[tool_format], {"look"})


def engine(turns: list[dict[str, Any]]) -> Any:
    """Takes turns apart itself, and says these."""
    left = iter(turns)

    def answer(body: dict[str, Any]) -> Any:
        if is_probe(body):
            return answer_of(body)
        logged = {"content": [{"token": "token_id:3", "logprob": -0.5}]}
        turn = next(left)
        message = {"role": "assistant", "prompt_token_ids": [len(body["messages"])], **turn}
        reason = turn.pop("finish", "tool_calls" if turn.get("tool_calls") else "stop")
        return {"choices": [{"message": message, "logprobs": logged, "finish_reason": reason}]}

    return says("/v1/chat/completions", answer, published=False)


PARSED = {
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"what": "é"}'}}],
}
LEFT = {"content": f"<think>where?</think>{CALL}"}


@pytest.mark.parametrize("kind", ["nemo_rl", "vllm_chat"])
@pytest.mark.parametrize("tool_format", GOOD)
async def test_an_engine_without_its_parser_is_an_error_of_the_deployment(kind: Any, tool_format: str) -> None:
    """`tool_call_parser` is the format in which a call is looked for; with `plain` none is."""
    request = TurnRequest("r", [{"role": "user", "content": "?"}], tools=TOOLS)
    async with (
        serving(engine([{"content": GOOD[tool_format]}] * 2)) as url,
        hosted(url, engine=kind, tool_call_parser=tool_format) as host,
        hosted(url, engine=kind, tool_call_parser="plain") as plain,
    ):
        with pytest.raises(Misconfigured, match=r"tool_parser: .*call of look.*chat_kwargs\.tool_parser"):
            await host.service.turn(request)
        assert (await plain.service.turn(request)).parsed.content == GOOD[tool_format]


@pytest.mark.parametrize(
    ("turn", "request_fields"),
    [
        (LEFT, {}),
        (LEFT, {"tools": TOOLS, "tool_choice": "none"}),
        (LEFT | {"finish": "length"}, {"tools": TOOLS}),
        ({"content": f"<think>{CALL}"}, {"tools": TOOLS}),
        ({"content": "see", "reasoning_content": CALL}, {"tools": TOOLS}),
    ],
)
async def test_where_nothing_was_to_be_parsed_nothing_is_left_over(
    turn: dict[str, Any], request_fields: dict[str, Any]
) -> None:
    async with serving(engine([turn])) as url, hosted(url, engine="nemo_rl") as host:
        request = TurnRequest("r", [{"role": "user", "content": "?"}], **request_fields)
        assert not (await host.service.turn(request)).parsed.calls


async def test_what_an_engine_with_a_parser_leaves_is_the_policys() -> None:
    async with serving(engine([PARSED, LEFT])) as url, hosted(url, engine="nemo_rl") as host:
        service = host.service
        question = [{"role": "user", "content": "?"}]
        assert (await service.turn(TurnRequest("one", question, tools=TOOLS))).parsed.calls
        assert not (await service.turn(TurnRequest("two", question, tools=TOOLS))).parsed.calls


@pytest.mark.engine
def test_whatever_vllms_own_parser_leaves_is_no_error_of_the_deployment() -> None:
    """Else a policy would be sampled again for what it says."""
    pieces = ["<tool_call>", "</tool_call>", '{"name": "look", ', '"arguments": ', '{"what": "é"}', "{}", "}", "NaN"]
    pieces += ['"parameters": ', '"name": "look"', "```", "`", "\n", '"\x01"', "1e400", "'", "text", CALL, " "]
    chance = random.Random(0)
    texts = ["".join(chance.choices(pieces, k=chance.randrange(1, 12))) for _ in range(1_500)]
    texts += [*NOT_LEFT, CALL]
    with VllmParser("<tool_call>", "</tool_call>") as parser:
        parsed = [bool(parser("hermes", text)[1]) for text in texts]
    left = [unparsed_tool_call(text, FORMATS["hermes"], {"look"}) is not None for text in texts]
    wrong = [text for text, theirs, ours in zip(texts, parsed, left, strict=True) if ours and not theirs]
    assert not wrong
    assert sum(left) > 20, "too few to tell"
