# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What of a rollout goes to whom: tokens, and the mask of a verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from fastapi.responses import JSONResponse

from nemo_gym_prorl.dapo.scoring import usage_of
from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.rollout.api.schemas import TokenForm
from nemo_gym_prorl.rollout.gym_rows import TurnTokens, is_masked
from tests.agent.peers import ROW, Environment, Policy, deployment, experts


class Telling(Policy):
    """A model server that puts a turn's tokens on its last item, as Gym's own does, and keeps nothing."""

    async def _turn(self, rollout: str) -> Any:
        number = self.taken[rollout]
        body = orjson.loads((await super()._turn(rollout)).body)
        body["output"][-1] |= {
            "prompt_token_ids": list(range(3 * number + 2)),
            "generation_token_ids": [3 * number + 2],
            "generation_log_probs": [-0.5],
        }
        return JSONResponse(body)


@pytest.mark.parametrize("policy", [Policy, lambda: Telling(defers=False)], ids=["keeps them", "tells them"])
async def test_everybody_is_sent_what_they_need(policy: Callable[[], Policy]) -> None:
    async with deployment(policy=policy()) as at, RolloutClient(at.url) as client:
        row = await at.run(ROW)
        submitted = await client.submit(ROW)
        await client.wait(submitted.id)
        packed = await client.get(submitted.id, tokens=TokenForm.PACKED)
        in_full = await client.get(submitted.id)
        verified = [body for body in at.environment.bodies if body and "response" in body]
        asked = [body["input"] for body in at.policy.bodies if body and "input" in body]
    assert len(verified) == 2
    sent = [[item["type"] for item in items if item.get("type")] for items in asked[1:3]]
    assert (sent == [["function_call_output"]] * 2) == (policy is Policy), "only what is new, where tokens are kept"
    assert not any(name in json.dumps(verified) for name in ("token_ids", "log_probs"))
    for output in (row["response"]["output"], (in_full.result or {})["response"]["output"]):
        tokens = [(item["prompt_token_ids"], item["generation_token_ids"]) for item in output[::2]]
        assert tokens == [(list(range(end)), [end]) for end in (2, 5, 8)]
        assert [item["generation_log_probs"] for item in output[::2]] == [[-0.5]] * 3
    rates = (row["rollout"]["token_in_rate"], packed.token_in_rate)
    assert rates == ((0.5, 0.5) if policy is Policy else (None, None))
    assert in_full.tokens is None
    turns = [TurnTokens.unpack(turn.model_dump()) for turn in packed.tokens or ()]
    assert [(turn.item, turn.kept, [*turn.observed], [*turn.sampled]) for turn in turns] == [
        (0, 0, [0, 1], [2]),
        (2, 3, [3, 4], [5]),
        (4, 6, [6, 7], [8]),
    ]
    assert [[*turn.log_probs] for turn in turns] == [[-0.5]] * 3
    assert "token_ids" not in json.dumps(packed.result)
    assert usage_of(packed).length == 3


@pytest.mark.parametrize("branches", [(0, 1, 0), (0, 1, 1), (1, 0, 1)])
async def test_turns_of_two_branches_have_the_prompts_they_were_sampled_from(branches: tuple[int, ...]) -> None:
    sequences = [
        {"ids": [*range(9)], "log_probs": [-0.5] * 9},
        {"ids": [0, 1, 2, *b"xyzuvw"], "log_probs": [-1.5] * 9},
    ]

    class Branching(Policy):
        def _tokens(self, rollout: str) -> Any:
            kept = super()._tokens(rollout)
            for branch, answer in zip(branches, kept["answers"].values(), strict=True):
                answer["sequence"] = branch
            return {**kept, "sequences": sequences}

    async with deployment(policy=Branching()) as at:
        row = await at.run(ROW)
    for branch, end, item in zip(branches, (2, 5, 8), row["response"]["output"][::2], strict=True):
        ids, log_probs = sequences[branch]["ids"], sequences[branch]["log_probs"]
        assert (item["prompt_token_ids"], item["generation_token_ids"]) == (ids[:end], [ids[end]])
        assert item["generation_log_probs"] == [log_probs[end]]


async def test_what_another_rollout_of_the_row_had_to_train_on_is_not_this_ones() -> None:
    async with deployment() as at:
        row = await at.run(ROW | {"training_traces": {"traces": []}, "task": 7})
    assert row["reward"] == 1.0
    assert row["task"] == 7
    assert "training_traces" not in row


async def test_experts_of_a_mixture_go_with_the_tokens() -> None:
    async with deployment(policy=Policy(mixture=True)) as at, RolloutClient(at.url) as client:
        row = await at.run(ROW)
        submitted = await client.submit(ROW)
        await client.wait(submitted.id)
        packed = await client.get(submitted.id, tokens=TokenForm.PACKED)
        verified = [body for body in at.environment.bodies if body and "response" in body]
    assert "routed_experts" not in json.dumps(verified)
    told = [item["routed_experts"] for item in row["response"]["output"][::2]]
    assert told == [experts(0, end) for end in (3, 6, 9)], "as NeMo RL reads them: of the whole prompt"
    turns = [turn.routed_experts for turn in packed.tokens or ()]
    assert turns == [experts(0, 3), experts(2, 6), experts(5, 9)], "each once, but for the seams"


def shortened(response: dict[str, Any]) -> dict[str, Any]:
    return {"response": {**response, "output": response["output"][-1:]}}


@pytest.mark.parametrize("kept", [shortened, lambda _: {}, lambda _: {"response": []}], ids=["some", "none", "a list"])
async def test_a_verdict_on_other_items_has_those_that_were_sampled(kept: Callable[[Any], dict[str, Any]]) -> None:
    environment = Environment()
    environment.instead["/verify"] = lambda: {"reward": 1.0, **kept(environment.bodies[-1]["response"])}
    async with deployment(environment) as at:
        row = await at.run(ROW)
    sampled = [item["generation_token_ids"] for item in row["response"]["output"] if "generation_token_ids" in item]
    assert sampled == [[2], [5], [8]]


GYM = {"mask_sample": True}
NEMO_RL = {"instance_config": {"mask_sample": True, "image": "x"}}


@pytest.mark.parametrize("said", [GYM, NEMO_RL, {}, {"mask_sample": False, "instance_config": None}])
async def test_both_who_read_a_mask_find_it(said: dict[str, Any]) -> None:
    environment = Environment()
    environment.instead["/verify"] = lambda: {**environment.bodies[-1], "reward": 0.5, **said}
    wanted = is_masked(said)
    async with deployment(environment) as at:
        _, job, _ = await at.post("/v1/rollouts", {"row": ROW, "id": "mine"})
        while job["state"] != "succeeded":
            job = await at.get("/v1/rollouts/mine?wait=10")
        for row in (await at.run(ROW), job["result"]):
            assert row["reward"] == 0.5
            assert bool(row.get("mask_sample")) == wanted
            assert bool((row.get("instance_config") or {}).get("mask_sample")) == wanted
        assert (job["reward"], job["masked"]) == (0.5, wanted)
        if said is NEMO_RL:
            assert job["result"]["instance_config"]["image"] == "x"
