# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The agent's /v1/responses: the tool loop in a session that the caller seeded, with the bounds of any rollout."""

import asyncio
from typing import Any

import pytest

from tests.handlers.peers import Environment, Policy, deployment, hang, status, until


PARAMS = {"input": "count to three"}


async def test_the_loop_runs_in_the_callers_session() -> None:
    async with deployment() as at:
        async with at.http.post(f"{at.url}/v1/responses", json=PARAMS, cookies={"session": "theirs"}) as answer:
            response, cookies = await answer.json(), answer.cookies
        assert [item["type"] for item in response["output"]] == ["function_call", "function_call_output"] * 2 + [
            "message"
        ]
        assert response["output"][0]["generation_token_ids"] == [2]
        assert cookies["session"].value == "theirs"
        assert at.environment.paths() == ["/count", "/count"], "neither seeded, released, scored nor closed"
        assert all("session=theirs" in headers["cookie"] for headers in at.environment.headers)
        [job] = (await at.get("/v1/rollouts"))["rollouts"]
        assert (job["state"], job["reward"]) == ("succeeded", None)


async def test_what_is_no_request_is_422_and_names_the_field() -> None:
    wrong = {b"{}": "input", b"": "body", b"[]": "body", b'{"input": 7}': "input", b'{"input": "\xff"}': "body"}
    async with deployment() as at:
        for body, field in wrong.items():
            async with at.http.post(f"{at.url}/v1/responses", data=body) as answer:
                assert (answer.status, answer.content_type) == (422, "application/problem+json"), body
                [error, *_] = (await answer.json())["errors"]
            assert error["field"].split(".")[0] == field, body
        assert at.policy.calls == []


async def test_it_takes_a_place_in_the_run_pool() -> None:
    policy = Policy(turns=1, turn_s=0.2)
    async with deployment(policy=policy, stages={"run": 2}) as at:
        answers = await asyncio.gather(*(at.post("/v1/responses", PARAMS) for _ in range(8)))
    assert [code for code, _, _ in answers] == [200] * 8
    assert policy.most_in_flight == 2


@pytest.mark.parametrize(
    ("environment", "policy", "expected", "kind"),
    [
        ({"/count": hang(60)}, {}, 504, "agent_timeout"),
        ({}, {"/v1/responses": status(500)}, 503, "agent_request_failed"),
        ({}, {"/v1/responses": status(404)}, 503, "agent_request_failed"),
        ({}, {"/v1/responses": status(422)}, 422, "bad_row"),
    ],
    ids=["slow", "model-500", "model-404", "model-422"],
)
async def test_failures_are_honest_statuses(environment: Any, policy: Any, expected: int, kind: str) -> None:
    async with deployment(
        Environment(instead=environment), Policy(instead=policy), budgets={"run": 1.0}, max_attempts=3
    ) as at:
        code, problem, headers = await at.post("/v1/responses", PARAMS)
        assert (code, headers["x-prorl-failure-kind"]) == (expected, kind)
        assert headers["content-type"] == "application/problem+json"
        assert problem["status"] == expected
        assert at.policy.counts["/v1/responses"] == 1, "what its tools did stays done: it is not tried again"


async def test_a_caller_that_hangs_up_ends_it() -> None:
    environment = Environment(instead={"/count": hang(60)})
    async with deployment(environment, caller_grace_s=0.2) as at:
        calling = asyncio.create_task(at.post("/v1/responses", PARAMS))
        await until(lambda: at.environment.counts["/count"] == 1)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

        async def cancelled() -> None:
            while (await at.get("/v1/rollouts?state=cancelled"))["rollouts"] == []:
                await asyncio.sleep(0.05)

        await asyncio.wait_for(cancelled(), 30)
        await until(lambda: len(at.policy.paths("DELETE")) == 1)
