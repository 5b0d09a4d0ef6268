# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How rollouts end at their servers: tokens of what was complete, sessions given back, nothing kept for nobody."""

import asyncio
from typing import Any

import pytest

from nemo_gym_prorl.agent.conversation import fetch_waited_s
from nemo_gym_prorl.agent.gym_http import Address, GymServer
from nemo_gym_prorl.http.client import HttpClient
from tests.agent.peers import COLLECTED, ROW, Environment, Policy, deployment, hang, once, status, until


def sampled(row: dict[str, Any]) -> list[list[int]]:
    return [item["generation_token_ids"] for item in row["response"]["output"] if item.get("generation_token_ids")]


def deleted(policy: Policy) -> list[str]:
    return policy.paths("DELETE")


@pytest.mark.parametrize("at_once", [1, 3])
async def test_what_tools_had_answered_when_time_ran_out_is_in_the_row(at_once: int) -> None:
    policy, environment = Policy(calls_at_once=3), Environment()
    asked: list[int] = []

    def second_hangs() -> Any:
        asked.append(1)
        return hang(60)() if len(asked) == 2 else None

    environment.instead["/count"] = second_hangs
    settings = {"budgets": {"run": 1.0}, "tool_concurrency": at_once}
    async with deployment(environment, policy, **settings) as at:
        done = await at.run(COLLECTED)
    answered = [item["call_id"] for item in done["response"]["output"] if item["type"] == "function_call_output"]
    [step] = done["rollout"]["steps"]
    assert sorted(tool["call_id"] for tool in step["tools"]) == answered
    assert done["rollout"]["tool_calls"] == len(answered) == (1 if at_once == 1 else 2)


async def test_the_tokens_of_a_rollout_that_was_cancelled() -> None:
    environment = Environment(instead={"/count": hang(60)})
    async with deployment(environment) as at:
        running = asyncio.ensure_future(at.run({**COLLECTED, "rollout": {"id": "mine"}}))
        await until(lambda: "/count" in environment.paths())
        await at.post("/v1/rollouts/cancel", {"ids": ["mine"]})
        done = await running
        assert (done["failure_kind"], sampled(done)) == ("cancelled", [[2]])
        await until(lambda: len(deleted(at.policy)) == 1)
        assert deleted(at.policy)[0].startswith("/v1/rollouts/mine.")


@pytest.mark.parametrize("trouble", [status(500), hang(60)], ids=["500", "hangs"])
async def test_a_clean_up_that_fails_does_not_fail_what_is_finished(trouble: Any) -> None:
    policy = Policy(instead={"DELETE /v1/rollouts/mine.*": trouble})
    async with deployment(policy=policy, max_attempts=3) as at:
        done = await asyncio.wait_for(at.run({**ROW, "rollout": {"id": "mine"}}), 30)
        assert (done["reward"], done["rollout"]["failed_attempts"]) == (1.0, [])
        assert len(sampled(done)) == 3
        assert len(policy.paths("DELETE")) == 1


async def test_tokens_that_cannot_be_fetched_at_once_are_asked_for_again() -> None:
    policy = Policy(instead={"GET /v1/rollouts/mine.*/tokens": once(status(500))})
    async with deployment(policy=policy) as at:
        done = await at.run({**ROW, "rollout": {"id": "mine"}})
    assert (done["reward"], len(sampled(done))) == (1.0, 3)
    assert len([path for path in policy.paths("GET") if path.endswith("/tokens")]) == 2


async def test_a_model_server_that_knows_no_runs_samples_none() -> None:
    """It would do so with whatever policy it has."""
    async with deployment() as at:
        code, said, _ = await at.post("/run", {**ROW, "rollout": {"run": "mine"}})
        assert code == 503
        assert "does not support runs (the row names 'mine')" in said["detail"]


async def test_what_a_rollout_has_waited() -> None:
    async with deployment() as at, asyncio.timeout(30):
        http = HttpClient()
        model = GymServer("policy", Address(at.policy_url), http)
        at.policy.instead["/v1/rollouts/caf%C3%A9%201.1/waited"] = lambda: {"waited_s": 2.5}
        assert await fetch_waited_s(model, "café 1.1") == 2.5
        assert await fetch_waited_s(model, "unknown") == 0.0
        await http.close()


async def test_an_id_that_is_not_ascii_keeps_its_tokens() -> None:
    async with deployment() as at:
        done = await at.run({**ROW, "rollout": {"id": "café 1", "group": "größe"}})
        assert len(sampled(done)) == 3
        await until(lambda: len(deleted(at.policy)) == 1)
    sent = at.policy.headers[0]
    assert sent["x-rollout-id"].startswith("caf%C3%A9%201.")
    assert deleted(at.policy) == [f"/v1/rollouts/{sent['x-rollout-id']}"]
    assert sent["x-rollout-group"] == "gr%C3%B6%C3%9Fe"


# -- sessions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/verify", "/give_back"])
async def test_a_session_whose_rollout_failed_is_closed_once(path: str) -> None:
    environment = Environment(instead={path: status(500)})
    async with deployment(environment) as at:
        await at.run(COLLECTED)
        await until(lambda: "/close_session" in environment.paths())
    assert environment.counts["/close_session"] == 1


@pytest.mark.parametrize(("closes_s", "waited"), [(0.3, True), (30.0, False)])
async def test_who_cancels_a_rollout_that_is_scored_has_no_sandbox_left(closes_s: float, waited: bool) -> None:
    """Its verdict goes on behind a caller that is gone, until its session is closed."""
    environment = Environment(instead={"/verify": hang(30.0), "/close_session": hang(closes_s)})
    async with deployment(environment, release_timeout_s=1.0, cancel_grace_s=0.5) as at:
        running = asyncio.ensure_future(at.run({**COLLECTED, "rollout": {"id": "mine"}}))
        await until(lambda: "/verify" in environment.paths())
        await at.post("/v1/rollouts/cancel", {"ids": ["mine"]})
        assert (await running)["rollout"]["state"] == "cancelled"
        assert environment.counts["/close_session"] == 1
        assert (environment.closed == 1) == waited


async def test_a_server_that_closes_nothing_is_asked_once() -> None:
    environment = Environment(instead={"/close_session": status(404)})
    async with deployment(environment) as at:
        await at.run(ROW)
        await until(lambda: "/close_session" in environment.paths())
        assert [(await at.run(ROW))["reward"] for _ in range(3)] == [1.0] * 3
    assert environment.counts["/close_session"] == 1


@pytest.mark.parametrize(("how", "grace_s"), [("out of time", 5.0), ("cancelled", 0.2)])
async def test_a_session_that_comes_up_too_late_is_given_back(how: str, grace_s: float) -> None:
    """Before the row is answered, if it comes up within the grace: engines sleep when nothing is in flight."""
    environment = Environment(instead={"/seed_session": hang(0.7)})
    budgets = {"init": 0.2} if how == "out of time" else {}
    async with deployment(environment, budgets=budgets, cancel_grace_s=grace_s) as at:
        running = asyncio.ensure_future(at.run({**COLLECTED, "rollout": {"id": "mine"}}))
        await until(lambda: "/seed_session" in environment.paths())
        if how == "cancelled":
            await at.post("/v1/rollouts/cancel", {"ids": ["mine"]})
        assert (await running)["mask_sample"] is True
        assert ("/give_back" in environment.paths()) == (grace_s > 1), "no one waits longer for a server that is busy"
        await until(lambda: "/close_session" in environment.paths())
    assert environment.paths() == ["/seed_session", "/give_back", "/close_session"]
    assert "session=1" in environment.headers[-1]["cookie"], "with the session's own cookie"
