# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Agents of all manners on one policy service: their messages, and the resulting ledger."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.engines.engine import Sampling
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.http.api import SavedRollout, trajectory
from nemo_gym_prorl.policy.runtime import PolicyRuntime
from nemo_gym_prorl.policy.service import PolicyService
from nemo_gym_prorl.policy.tokens.conversations import saved_turns
from nemo_gym_prorl.policy.turns import PolicyAnswer, RolloutGone, RolloutTaken, TurnRequest
from tests.policy.families import TEMPLATES, TOOLS
from tests.policy.runtimes import hosted
from tests.policy.scripted_engine import ScriptedEngine, saved
from tests.policy.tokenizers import tokenizer_of
from tests.rollout.serving import serve as serving


class Agent:
    """Agent that sends its whole conversation."""

    def __init__(self, service: PolicyService, name: str = "r") -> None:
        self.service = service
        self.name = name
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "box"}]

    async def ask(self, **changes: Any) -> PolicyAnswer:
        request = {"messages": tuple(self.messages), "tools": TOOLS, "sampling": TWENTY} | changes
        return await self.service.turn(TurnRequest(self.name, **request))

    def goes_on(self, answer: PolicyAnswer, **changes: Any) -> None:
        asked = {"role": "user", "content": [{"type": "text", "text": "and?"}]}
        self.messages += [{**answer.message, **changes}, asked]


THINKING = TEMPLATES / "thinking.jinja"
BYTES = tokenizer_of("bytes", *(path.read_text() for path in TEMPLATES.glob("*.jinja")), "<|im_end|>", "</s>")
TWENTY = Sampling(max_tokens=20)
"""The scripted engine answers twenty letters that the prompt determines."""


def text_of(template: Path) -> str:
    return template.read_text()


@contextlib.asynccontextmanager
async def started(folder: Path, template: Path = THINKING, **config: Any) -> AsyncIterator[PolicyRuntime]:
    tokenizer = saved(folder, BYTES, text_of(template))
    async with (
        serving(ScriptedEngine(BYTES, finish="length").app()) as url,
        hosted(url, tokenizer=tokenizer, **config) as host,
    ):
        yield host


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Agent]:
    async with started(tmp_path) as host:
        yield Agent(host.service)


async def test_an_agent_may_tidy_up_what_it_was_told(agent: Agent) -> None:
    first = await agent.ask()
    agent.goes_on(first, content=f"  {first.parsed.content} \n")
    second = await agent.ask()
    assert second.turn.parent is first.turn
    agent.goes_on(second)
    agent.messages[1] = {"role": "assistant", "content": "something else entirely"}
    third = await agent.ask()
    assert third.turn.parent is None


async def test_only_what_is_new_may_be_sent(agent: Agent) -> None:
    first = await agent.ask()
    second = await agent.ask(messages=[{"role": "user", "content": "and?"}], after=first.id)
    assert second.turn.parent is first.turn
    told = trajectory(agent.service, "r")
    (sequence,) = told["sequences"]
    place = told["answers"][second.id]
    assert sequence["ids"][place["start"] : place["end"]] == list(second.turn.sampled)
    assert list(sequence["ids"][: place["start"]]) == second.turn.prompt()
    with pytest.raises(CallerError, match="previous_response_id: the rollout has no answer 'resp_x'"):
        await agent.ask(after="resp_x")


def restored(service: PolicyService, name: str, after: str | None = None) -> SavedRollout:
    """Return a saved rollout after a round trip over JSON."""
    state = service.rollout(name)
    turns = [*saved_turns(state.answers, after)]
    return SavedRollout.model_validate_json(orjson.dumps({"run": None, "began": state.began, "turns": turns}))


@pytest.mark.parametrize("template", ["thinking", "opened", "numbered", "dated"])
async def test_a_rollout_goes_on_elsewhere_as_it_would_have_here(template: str, tmp_path: Path) -> None:
    path = TEMPLATES / f"{template}.jinja"
    async with (
        started(tmp_path, template=path) as one,
        started(tmp_path, template=path) as other,
    ):
        one.pool.label("step-3")
        here, there, saved = Agent(one.service), Agent(other.service, "other"), []
        last = await here.ask()
        for number in range(3):
            saved += restored(one.service, "r", after=saved[-1].id if saved else None).turns
            new = [{"role": "user", "content": f"and then {number}?"}]
            last = await here.ask(messages=new, after=last.id)
        assert len(saved) == 3
        other.service.restore("other", None, one.service.rollout("r").began, saved)
        again = await there.ask(messages=new, after=saved[-1].id)
        assert again.turn.sequence() == last.turn.sequence()
        assert again.turn.observed == last.turn.observed
        told = [trajectory(host.service, name) for host, name in ((one, "r"), (other, "other"))]
        mine, its = (list(about["answers"].values())[:3] for about in told)
        assert its == mine
        assert mine[0]["weight_versions"] == ["step-3", "step-3"]
        with pytest.raises(RolloutTaken, match="already"):
            other.service.restore("other", None, one.service.rollout("r").began, saved)


@pytest.mark.parametrize(
    "wrong",
    [
        {"observed": []},
        {"sampled": [-1], "log_probs": [0.0]},
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        {"routed_experts": "none"},
    ],
)
async def test_what_is_no_turn_is_not_restored(agent: Agent, wrong: dict[str, Any]) -> None:
    await agent.ask()
    [turn] = restored(agent.service, "r").turns
    bad = turn.model_copy(update=wrong)
    with pytest.raises(CallerError, match="turns: 'resp_"):
        agent.service.restore("other", None, agent.service.rollout("r").began, [bad])
    with pytest.raises(RolloutGone):
        agent.service.rollout("other")


async def test_only_one_line_can_be_saved(agent: Agent) -> None:
    first = await agent.ask()
    agent.goes_on(first)
    await agent.ask()
    await agent.ask()
    with pytest.raises(CallerError, match="does not continue"):
        restored(agent.service, "r")


async def test_a_history_from_elsewhere_is_taken_over_by_its_token_ids(agent: Agent, tmp_path: Path) -> None:
    first = await agent.ask()
    fields = {
        "prompt_token_ids": first.turn.prompt(),
        "generation_token_ids": list(first.turn.sampled),
        "generation_log_probs": list(first.turn.log_probs),
    }
    agent.goes_on(first, **fields)
    async with started(tmp_path) as host:
        agent.service = host.service
        second = await agent.ask()
        assert second.turn.prompt()[: first.turn.end] == first.turn.sequence()
        agent.goes_on(second)
        assert (await agent.ask()).turn.parent is second.turn


@pytest.mark.parametrize(("history", "branches"), [("keep", 1), ("branch", 2)])
async def test_a_template_that_drops_thoughts(tmp_path: Path, history: str, branches: int) -> None:
    async with started(
        tmp_path,
        history=history,
        template=TEMPLATES / "opened.jinja",
        tool_call_parser="plain",
    ) as host:
        agent = Agent(host.service)
        first = await agent.ask()
        assert first.parsed.reasoning is not None
        agent.goes_on(first)
        await agent.ask()
        assert agent.service.ledger("r").branches == branches
        metrics = host.metrics.exposition()
        assert b"prorl_policy_history_rewrites_total 1.0" in metrics
        retokenised = 0.0 if history == "keep" else 20.0
        assert f"prorl_policy_retokenised_tokens_total {retokenised}".encode() in metrics


async def test_a_finished_rollout_costs_nothing(agent: Agent) -> None:
    await agent.ask()
    pool = agent.service.dispatcher.pool
    agent.service.finish("r")
    assert not pool.backends["backend0"].live
    with pytest.raises(CallerError, match="unknown rollout 'r'"):
        agent.service.ledger("r")


async def test_a_forgotten_rollout_is_refused_rather_than_read_from_its_text(tmp_path: Path) -> None:
    async with started(tmp_path, keep_s=0.001) as host:
        agent, other = Agent(host.service), Agent(host.service, "other")
        first = await agent.ask()
        await other.ask()
        with pytest.raises(CallerError, match=r"rollout: the tokens of 'r' were forgotten after 0\.001 s"):
            await agent.ask(messages=[{"role": "user", "content": "and?"}], after=first.id)
        agent.goes_on(first)
        with pytest.raises(CallerError, match="were forgotten"):
            await agent.ask()
        agent.messages = agent.messages[:1]
        assert (await agent.ask()).turn is not None


async def test_instructions_are_there_once_however_the_conversation_is_sent(agent: Agent) -> None:
    first = await agent.ask(instructions="be brief")
    more = [{"role": "user", "content": "and?"}]
    second = await agent.ask(messages=more, after=first.id, instructions="be brief")
    assert agent.service.renderer is not None
    text = agent.service.renderer.tokenizer.decode(second.turn.prompt())
    assert text.count("be brief") == 1
    agent.goes_on(first)
    assert (await agent.ask(instructions="be brief")).turn.parent is first.turn
    with pytest.raises(CallerError, match="instructions: differ from those that the rollout began with"):
        await agent.ask(messages=more, after=first.id, instructions="be long")


@pytest.mark.parametrize(("history", "branches"), [("keep", 1), ("branch", 2)])
async def test_other_tools_than_before_are_another_history(tmp_path: Path, history: str, branches: int) -> None:
    async with started(tmp_path, history=history) as host:
        agent = Agent(host.service)
        agent.goes_on(await agent.ask())
        await agent.ask(tools=[])
        assert agent.service.ledger("r").branches == branches
        assert agent.service.rollout("r").counts["rewrites"] == 1
        assert agent.service.rollout("r").counts["retokenised"] == (0 if history == "keep" else 20)


async def test_branches_are_counted_by_their_reason(tmp_path: Path) -> None:
    async with started(tmp_path) as host:
        agent = Agent(host.service)
        agent.goes_on(await agent.ask())
        agent.goes_on(await agent.ask())
        await agent.ask()
        agent.messages[0] = {"role": "user", "content": "another question"}
        await agent.ask()
        await agent.ask(messages=({"role": "user", "content": "box"},))
        metrics = host.metrics.exposition().decode()
        assert 'prorl_policy_forks_total{why="edited"} 1.0' in metrics
        assert 'prorl_policy_forks_total{why="again"} 1.0' in metrics
        assert agent.service.rollout("r").counts["retokenised"] == 40, "both turns of the edited history"


async def test_other_variables_rewrite_the_past_of_a_turn_that_was_continued_before(tmp_path: Path) -> None:
    """The record of a prompt is kept; rendering the prompt again would use the new variables."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ greeting or 'none' }}\n" + (TEMPLATES / "chatml.jinja").read_text())
    async with started(tmp_path, template=template, history="branch") as host:
        agent = Agent(host.service)
        first = await agent.ask(template_variables={"greeting": "good morning"})
        new = [{"role": "user", "content": "go on"}]
        same = [
            await agent.ask(messages=new, after=first.id, template_variables={"greeting": "good morning"})
            for _ in range(2)
        ]
        assert [answer.turn and answer.turn.parent for answer in same] == [first.turn, first.turn]
        other = await agent.ask(messages=new, after=first.id, template_variables={"greeting": "good night"})
        assert other.turn
        assert other.turn.parent is None
        assert agent.service.rollout("r").counts["rewrites"] == 1


async def test_a_full_context_ends_the_rollout_typed_and_without_tokens(agent: Agent) -> None:
    agent.messages[0]["content"] = "box " * 30_000
    answer = await agent.ask()
    assert (answer.finish, answer.turn, answer.message["content"]) == (Finish.CONTEXT, None, "")
