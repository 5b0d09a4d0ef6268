# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Servers that answer what does not fit: nothing of it ends up in a row that is trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse

from tests.agent.peers import COLLECTED, ROW, Environment, Policy, deployment, experts, once, status, until


class Lying(Policy):
    """Has other tokens than it sampled."""

    bend: Callable[[dict[str, Any]], Any] = staticmethod(dict)

    def _tokens(self, rollout: str) -> Any:
        return self.bend(super()._tokens(rollout))


def places(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda kept: {**kept, "answers": {name: place | changes for name, place in kept["answers"].items()}}


def sequence(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda kept: {**kept, "sequences": [kept["sequences"][0] | changes]}


async def test_tokens_that_do_not_fit_are_no_tokens() -> None:
    bent = [
        lambda kept: {**kept, "answers": {}},
        places(start=0),
        places(start=100, end=200),
        sequence(log_probs=[-0.5]),
        sequence(ids=[-1] * 9),
        places(routed_experts=experts(0, 1)),
    ]
    policy = Lying()
    async with deployment(policy=policy) as at:
        assert (await at.run(ROW))["reward"] == 1.0
        for number, policy.bend in enumerate(bent):
            code, _, headers = await at.post("/run", ROW)
            assert (code, headers.get("x-prorl-failure-kind")) == (503, "agent_request_failed"), number


async def test_a_scored_rollout_without_any_token_is_nothing_for_a_trainer() -> None:
    def nothing() -> Response:
        return Response('{"detail": "longer than the maximum context length"}', 400)

    async with deployment(policy=Policy(instead={"/v1/responses": nothing})) as at:
        code, said, _ = await at.post("/run", ROW)
        assert (code, "the prompt fills the policy's context" in said["detail"]) == (422, True)
        assert (await at.run(COLLECTED))["rollout"]["finish_reason"] == "context_overflow"


async def test_a_context_that_ends_in_mid_rollout_leaves_tokens_to_train_on() -> None:
    policy = Policy()
    full = {"id": "full", "output": [{"type": "message"}], "incomplete_details": {"reason": "max_output_tokens"}}
    last = JSONResponse({**full, "usage": {"output_tokens": 0}}, headers={"X-Rollout-Tokens": "deferred"})
    policy.instead["/v1/responses"] = lambda: last if policy.paths().count("/v1/responses") == 3 else None
    async with deployment(policy=policy) as at:
        done = await at.run(ROW)
    assert done["rollout"]["finish_reason"] == "context_overflow"
    assert [bool(item.get("generation_token_ids")) for item in done["response"]["output"][::2]] == [True, True, False]


async def test_a_tool_of_an_endless_name_is_an_observation() -> None:
    """As a path, a server would drop the connection for it: the policy could call for a new try by that."""
    environment = Environment()
    async with deployment(environment, Policy(tool="x" * 66_000)) as at:
        done = await at.run(ROW)
    assert done["rollout"]["failed_attempts"] == []
    assert "Not Found" in done["response"]["output"][1]["output"]
    assert environment.paths() == ["/seed_session", "/give_back", "/verify", "/close_session"]


async def test_an_id_that_is_used_again_is_another_rollout_for_the_model_server() -> None:
    """Its place of the first time is given back behind its back, perhaps when the second runs; and another agent may
    have a job of the same name."""
    policy = Policy()
    async with deployment(policy=policy) as at, deployment(policy=policy) as other:
        for agent in (at, at, other):
            await agent.run({**ROW, "rollout": {"id": "mine"}})
        await until(lambda: len(policy.paths("DELETE")) == 3)
    assert len(set(policy.paths("DELETE"))) == 3


async def test_a_session_that_its_verifier_says_is_lost_is_closed_before_another_is_made() -> None:
    environment = Environment(instead={"/verify": once(status(410))})
    async with deployment(environment, max_attempts=2) as at:
        done = await at.run(ROW)
        await until(lambda: environment.paths().count("/close_session") == 2)
    assert done["rollout"]["failed_attempts"] == ["session_lost"]
    closed = [
        sent["cookie"]
        for sent, (_, path) in zip(environment.headers, environment.calls, strict=True)
        if path == "/close_session"
    ]
    assert sorted(closed) == ["session=1", "session=2"]
