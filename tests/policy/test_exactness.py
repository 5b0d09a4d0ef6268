# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""200 rollouts on a real vLLM: training data equals the sampled tokens and log-probs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer as FastTokenizer

from nemo_gym_prorl.http.client import HttpClient
from nemo_gym_prorl.policy.engines.engine import Sampling
from nemo_gym_prorl.policy.engines.protocols import VllmCompletions
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.metrics import PolicyMetrics
from nemo_gym_prorl.policy.pool.dispatcher import BackendDispatcher
from nemo_gym_prorl.policy.pool.pool import BackendPool
from nemo_gym_prorl.policy.service import PolicyService
from nemo_gym_prorl.policy.text.formats import FORMATS
from nemo_gym_prorl.policy.text.renderer import Renderer
from nemo_gym_prorl.policy.text.tokenizer import Tokenizer
from nemo_gym_prorl.policy.text.turn_scanner import parse
from nemo_gym_prorl.policy.turns import PolicyAnswer, TurnRequest
from tests.policy.engines import MODEL
from tests.policy.families import FAMILIES, TOOLS, Family, some_words


pytestmark = pytest.mark.engine
ROLLOUTS = 200
TURNS = 4
TOLERANCE = 1e-3
"""Largest difference between a recorded log-prob and the teacher-forced one."""


@dataclass
class Run:
    """One rollout, with the agent's messages and the service's answers."""

    family: Family
    service: PolicyService
    name: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    answers: list[PolicyAnswer] = field(default_factory=list)

    async def play(self, rng: random.Random) -> None:
        """Play an ordinary agent that executes calls, reports broken calls, and asks on after an answer."""
        self.messages.append({"role": "user", "content": some_words(rng)})
        for _ in range(TURNS):
            sampling = Sampling(max_tokens=64, temperature=1.0, seed=rng.getrandbits(31))
            request = TurnRequest(self.name, tuple(self.messages), tools=TOOLS, sampling=sampling)
            answer = await self.service.turn(request)
            self.answers.append(answer)
            self.messages.append(dict(answer.message))
            for call, parsed in zip(answer.message.get("tool_calls", ()), answer.parsed.calls, strict=True):
                seen = f"not understood: {parsed.malformed}" if parsed.malformed else some_words(rng)
                self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": seen})
            if not answer.parsed.calls:
                self.messages.append({"role": "user", "content": some_words(rng)})


@pytest.fixture(scope="module")
def runs(engine_url: str, model_folder: Path) -> list[Run]:
    return asyncio.run(play_all(engine_url, model_folder))


async def play_all(engine_url: str, model_folder: Path) -> list[Run]:
    """Play all rollouts, 32 at a time, over all template families."""
    tokenizer = Tokenizer(FastTokenizer.from_file(str(model_folder / "tokenizer.json")))
    gate = asyncio.Semaphore(32)
    async with contextlib.AsyncExitStack() as stack:
        connections = await stack.enter_async_context(HttpClient())
        services = {}
        for family in FAMILIES.values():
            pool = BackendPool()
            dispatcher = BackendDispatcher(pool, VllmCompletions(connections, MODEL))
            dispatcher.apply(pool.add("a", engine_url))
            dispatcher.start()  # else a backend that fails once stays down
            stack.push_async_callback(dispatcher.aclose)
            renderer = family.renderer(tokenizer)
            services[family.name] = PolicyService(
                dispatcher, PolicyMetrics(pool), renderer=renderer, form=FORMATS[family.tool_format]
            )
        played = [
            Run(family, services[family.name], f"r{index}")
            for index, family in zip(range(ROLLOUTS), itertools.cycle(FAMILIES.values()))
        ]

        async def play(run: Run, seed: int) -> None:
            async with gate:
                await run.play(random.Random(seed))

        await asyncio.gather(*(play(run, seed) for seed, run in enumerate(played)))
    return played


def renderer_of(run: Run) -> Renderer:
    assert run.service.renderer is not None
    return run.service.renderer


async def teacher_forced(session: aiohttp.ClientSession, url: str, ids: list[int]) -> list[float]:
    """Return the engine's log-prob of each token given the tokens before it; 0 for the first."""
    body = {"model": MODEL, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        scored = (await response.json())["choices"][0]["prompt_logprobs"]
    return [0.0] + [scored[at][str(ids[at])]["logprob"] for at in range(1, len(ids))]


async def test_every_rollout_is_one_exact_prefix_chain(runs: list[Run]) -> None:
    for run in runs:
        assert run.service.ledger(run.name).branches == 1
        for earlier, later in itertools.pairwise(run.answers):
            assert later.turn.prompt()[: earlier.turn.end] == earlier.turn.prompt() + list(earlier.turn.sampled)


async def test_the_engine_scores_the_sequences_as_it_sampled_them(
    runs: list[Run], engine_url: str, record_property: Any
) -> None:
    worst, tokens = 0.0, 0
    async with aiohttp.ClientSession() as session:
        for run in runs:
            (sequence,) = run.service.ledger(run.name).sequences()
            forced = await teacher_forced(session, engine_url, list(sequence.ids))
            pairs = zip(forced, sequence.log_probs, sequence.mask, strict=True)
            differences = [abs(a - b) for a, b, trained in pairs if trained]
            tokens += len(differences)
            worst = max(worst, *differences)
    print(f"\n{tokens} sampled tokens of {len(runs)} rollouts, log-probs differ by at most {worst:.1e}")
    record_property("max_abs_log_prob_difference", worst)
    assert worst <= TOLERANCE


async def test_the_agent_saw_what_the_tokens_say(runs: list[Run]) -> None:
    for run in runs:
        tokenizer = renderer_of(run).tokenizer
        opened = run.family.name == "opened"
        for answer in run.answers:
            ids, cut = list(answer.turn.sampled), answer.finish is Finish.LENGTH
            if answer.finish is Finish.STOP:
                assert tokenizer.decode(ids[-1:]) in tokenizer.special.values()
                ids.pop()
            text = tokenizer.decode(ids)
            again = parse(text, FORMATS[run.family.tool_format], TOOLS, in_reasoning=opened, cut=cut)
            thought = again.reasoning and tokenizer.strip_special_tokens(again.reasoning)
            assert (thought, again.calls) == (answer.parsed.reasoning, answer.parsed.calls)
            assert tokenizer.strip_special_tokens(again.content) == answer.parsed.content
            if not again.calls and again.reasoning is None:
                assert again.content == text


async def test_the_rollouts_had_calls_broken_calls_thoughts_and_unicode(runs: list[Run]) -> None:
    for family in FAMILIES.values():
        parsed = [answer.parsed for run in runs if run.family is family for answer in run.answers]
        assert any(p.calls and not any(call.malformed for call in p.calls) for p in parsed), family.name
        assert any(call.malformed for p in parsed for call in p.calls), family.name
        assert any(ord(letter) > 0xFF for p in parsed for call in p.calls for letter in call.arguments), family.name
        if family.thinks:
            assert any(p.reasoning for p in parsed), family.name
