# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym's routes of the agent: what ``/run`` answers where a rollout failed, and ``/v1/responses``."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.agent.run_rows import run_status
from nemo_gym_prorl.failures import Failure, FailureKind, Origin, Stage
from tests.agent.peers import COLLECTED, ROW, Environment, Policy, deployment, hang, once, status, until


TOKENS = {"output": [{"type": "message", "generation_token_ids": [1]}]}
FAILURES = st.builds(
    Failure,
    st.sampled_from(FailureKind),
    st.sampled_from(Origin),
    st.none() | st.sampled_from(Stage),
    st.text(),
    st.booleans(),
)
RESPONSES = st.sampled_from([None, {}, {"output": None}, {"output": []}, {"output": [{"type": "message"}]}, TOKENS])


@given(FAILURES, RESPONSES)
def test_a_trainer_gets_200_for_what_it_can_mask_and_train_around_only(failure: Failure, response: Any) -> None:
    answered = run_status({**ROW, "_ng_task_index": 3, "_rowidx": 1}, failure, response)
    if answered == 200:
        assert failure.origin is Origin.AGENT
        assert response is TOKENS
    assert answered in (200, 422, 503)


@pytest.mark.parametrize(
    ("trouble", "settings", "expected", "kind"),
    [
        ({"environment": {"/seed_session": status(500)}}, {}, 503, "provider_unavailable"),
        ({"environment": {"/seed_session": status(422)}}, {}, 422, "bad_row"),
        ({"policy": {"/v1/responses": status(500)}}, {}, 503, "agent_request_failed"),
        ({"policy": {"/v1/responses": hang(60)}}, {"budgets": {"run": 0.3}}, 503, "agent_timeout"),
        ({"environment": {"/count": hang(60)}}, {"budgets": {"run": 1.0}}, 200, "agent_timeout"),
        ({"environment": {"/verify": status(500)}}, {}, 503, "verifier_error"),
        ({"environment": {"/verify": status(422)}}, {}, 422, "verifier_error"),
    ],
)
async def test_each_kind_of_failed_row(
    trouble: dict[str, Any], settings: dict[str, Any], expected: int, kind: str
) -> None:
    environment = Environment(instead=trouble.get("environment", {}))
    policy = Policy(instead=trouble.get("policy", {}))
    async with deployment(environment, policy, **settings) as at:
        code, body, headers = await at.post("/run", {**ROW, "_rowidx": 4})
        assert code == expected, body
        if expected == 200:
            assert body["instance_config"]["mask_sample"] is True
            assert body["failure_kind"] == kind
            assert body["response"]["output"][0]["generation_token_ids"], "the turns' tokens came along"
        else:
            assert headers["content-type"] == "application/problem+json"
            assert headers["x-prorl-failure-kind"] == kind
            assert ("retry-after" in headers) == (expected == 503)
        masked = await at.run({**COLLECTED, "instance_config": {"image": "x"}})
        assert masked["mask_sample"] is True
        assert masked["instance_config"] == {"image": "x", "mask_sample": True}
        assert masked["failure_kind"] == kind
        assert masked.get("_ng_failure_terminal", False) == (expected == 422)


@pytest.mark.parametrize("by", ["run", "api"])
async def test_a_row_of_a_failures_file_can_be_submitted_as_it_is(by: str) -> None:
    """It is sampled again, and nothing of the failure goes along: neither its mask nor its id."""
    environment = Environment(instead={"/verify": once(status(503))})
    sent = {**COLLECTED, "task": 7, "instance_config": {"image": "x"}, "rollout": {"group": "mine", "priority": 3}}
    async with deployment(environment, max_attempts=1) as at:
        failed = await at.run(sent)
        assert (failed["failure_kind"], failed["mask_sample"]) == ("verifier_error", True)
        if by == "run":
            again = await at.run(failed)
            about = again["rollout"]
        else:
            code, about, _ = await at.post("/v1/rollouts", {"row": failed, "id": "again"})
            assert code == 202, about
            while about["state"] != "succeeded":
                about = await at.get("/v1/rollouts/again?wait=10")
            again = about["result"]
    calls = zip(environment.calls, environment.bodies, strict=True)
    seeded = [body for (_, path), body in calls if path == "/seed_session"]
    assert (again["reward"], about["group"], about["environment"]) == (1.0, "mine", failed["rollout"]["environment"])
    assert about["id"] != failed["rollout"]["id"]
    assert not {"mask_sample", "failure_kind", "failure_reason", "_ng_failure_class"} & again.keys()
    assert again["instance_config"] == {"image": "x"}
    assert seeded == [{name: value for name, value in sent.items() if name != "rollout"}] * 2


async def test_a_row_that_is_none_is_a_masked_row_for_the_collector() -> None:
    bad = {"responses_create_params": {"input": 7}}
    async with deployment() as at:
        code, problem, _ = await at.post("/run", bad)
        assert (code, problem["errors"][0]["field"].split(".")[:2]) == (422, ["responses_create_params", "input"])
        masked = await at.run({**COLLECTED, **bad})
        assert masked["_ng_failure_terminal"] is True
        assert "input" in masked["failure_reason"]


async def test_a_row_is_named_grouped_and_cancelled_by_its_group() -> None:
    """/run answers at once, the tool call ends, and the trainer's client may send the row again."""
    environment = Environment(instead={"/count": hang(60)})
    async with deployment(environment) as at:
        wishes = {"id": "step 7 · prompt 3", "group": "prompt-3", "client": "trainer", "priority": 2}
        running = asyncio.ensure_future(at.post("/run", {**ROW, "rollout": wishes}))
        await until(lambda: "/count" in environment.paths())
        [job] = (await at.get("/v1/rollouts?group=prompt-3"))["rollouts"]
        assert {name: job[name] for name in wishes} == wishes
        code, answer, _ = await at.post("/v1/rollouts/cancel", {"group": "prompt-3"})
        assert (code, [each["state"] for each in answer["rollouts"]]) == (200, ["cancelled"])
        code, problem, headers = await running
        assert (code, headers["x-prorl-failure-kind"]) == (503, "cancelled")
        assert wishes["id"] in problem["detail"]
        environment.instead.clear()
        again = await at.run({**ROW, "rollout": wishes})
        assert again["rollout"]["group"] == "prompt-3"
        assert "rollout" not in environment.bodies[environment.paths().index("/seed_session")], "not the environment's"


async def test_a_wrong_wish_names_its_field() -> None:
    async with deployment() as at:
        for wishes, field in [
            ("me", "rollout"),
            ({"budgets": {"run": -1}}, "rollout.budgets.run"),
            ({"group": ""}, "rollout.group"),
            ({"row": {}}, "rollout.row"),
            ({"environment": "nope"}, "environment"),
            ({"environment": "seeded_session"}, "environment"),
        ]:
            code, problem, _ = await at.post("/run", {**ROW, "rollout": wishes})
            assert (code, field in problem["detail"]) == (422, True), wishes
        assert at.environment.calls == []


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


@pytest.mark.parametrize(
    ("environment", "policy", "expected", "kind"),
    [
        ({"/count": hang(60)}, {}, 504, "agent_timeout"),
        ({}, {"/v1/responses": status(500)}, 503, "agent_request_failed"),
        ({}, {"/v1/responses": status(422)}, 422, "bad_row"),
    ],
    ids=["slow", "model-500", "model-422"],
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
