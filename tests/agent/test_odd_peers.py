# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Servers that answer what does not fit, and cookies: nothing of it ends up in a row that is trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from nemo_gym_prorl.agent.gym_http import Address, CookieJar, GymServer
from nemo_gym_prorl.http.client import HttpClient
from tests.agent.peers import COLLECTED, ROW, Environment, Policy, deployment, experts, once, status, until
from tests.rollout.serving import serve


class Forgetful(Policy):
    """Keeps the tokens of all turns but the second, as a server that was replaced by another kind."""

    async def _turn(self, rollout: str) -> Any:
        number, answer = self.taken[rollout], await super()._turn(rollout)
        if number == 1:
            del answer.headers["X-Rollout-Tokens"]
        return answer


class Repetitive(Policy):
    """Gives each answer the same id."""

    async def _turn(self, rollout: str) -> Any:
        answer = await super()._turn(rollout)
        return JSONResponse({**json.loads(answer.body), "id": "resp0"}, headers={"X-Rollout-Tokens": "deferred"})


class Lying(Policy):
    """Has other tokens than it sampled."""

    bend: Callable[[dict[str, Any]], Any] = staticmethod(dict)

    def _tokens(self, rollout: str) -> Any:
        return self.bend(super()._tokens(rollout))


class Careless(Policy):
    """Its first call is odd."""

    bend: Callable[[dict[str, Any]], Any] = staticmethod(dict)

    async def _turn(self, rollout: str) -> Any:
        number, answer = self.taken[rollout], await super()._turn(rollout)
        told = json.loads(answer.body)
        if number == 0:
            self.bend(told["output"][0])
        return JSONResponse(told, headers={"X-Rollout-Tokens": "deferred"})


@pytest.mark.parametrize(
    ("bend", "seen"),
    [
        (lambda call: call.update(arguments="{"), "Invalid tool call arguments"),
        (lambda call: call.update(arguments={}), "/count"),
        (lambda call: call.update(name=["count"]), "Not Found"),
        (lambda call: call.update(call_id=5), "/count"),
        (lambda call: [call.pop(name) for name in ("arguments", "name", "call_id")], "Invalid tool call arguments"),
    ],
)
async def test_a_call_without_a_field_is_the_policys_act(bend: Callable[[dict[str, Any]], Any], seen: str) -> None:
    policy = Careless(turns=2)
    policy.bend = bend
    async with deployment(policy=policy) as at:
        done = await at.run(ROW)
    called, observed, _ = done["response"]["output"]
    assert (done["reward"], done["rollout"].get("failed_attempts", [])) == (1.0, [])
    assert seen in observed["output"]
    assert called["call_id"] == observed["call_id"]
    assert all(isinstance(called[name], str) for name in ("arguments", "name", "call_id"))


def places(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda kept: {**kept, "answers": {name: place | changes for name, place in kept["answers"].items()}}


def sequence(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda kept: {**kept, "sequences": [kept["sequences"][0] | changes]}


async def test_a_policy_that_lost_what_it_kept_is_not_asked_to_go_on() -> None:
    """It is sent what is new alone, so it would answer without the turn in between."""
    policy = Forgetful(turns=4)
    async with deployment(policy=policy) as at:
        code, said, _ = await at.post("/run", ROW)
    assert (code, said["type"]) == (503, "urn:nemo-gym-prorl:problem:session_lost")
    assert policy.paths().count("/v1/responses") == 2


async def test_two_answers_of_one_id_are_no_rollout() -> None:
    async with deployment(policy=Repetitive()) as at:
        code, said, _ = await at.post("/run", ROW)
    assert code == 503
    assert "'resp0'" in said["detail"]


async def test_tokens_that_do_not_fit_are_no_tokens() -> None:
    bent = [
        lambda kept: {**kept, "answers": {}},
        places(start=0),
        places(start=100, end=200),
        places(sequence=1),
        places(weight_versions=[1, 2, 3]),
        sequence(log_probs=[-0.5]),
        sequence(ids=[True] * 9),
        sequence(ids=[-1] * 9),
        sequence(ids=[2**31] * 9),
        places(routed_experts="eight"),
        places(routed_experts=experts(0, 1)),
    ]
    policy = Lying()
    async with deployment(policy=policy) as at:
        assert (await at.run(ROW))["reward"] == 1.0
        for number, policy.bend in enumerate(bent):
            code, _, headers = await at.post("/run", ROW)
            assert (code, headers.get("x-prorl-failure-kind")) == (503, "agent_request_failed"), number


async def test_a_verdict_without_the_response_loses_no_tokens() -> None:
    environment = Environment()
    async with deployment(environment) as at:
        for verdict in ({"reward": 1}, {"reward": 1, "response": []}):
            environment.instead["/verify"] = lambda verdict=verdict: JSONResponse(verdict)
            done = await at.run(ROW)
            assert (done["reward"], done["response"]["output"][-1]["generation_token_ids"]) == (1, [8]), verdict


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


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["session=s1; path=/; httponly; samesite=lax"], {"session": "s1"}),
        (["a=1; Expires=Wed, 01 Jan 2031 00:00:00 GMT", "a=2"], {"a": "2"}),
        (['quoted="x;y"; path=/', "plain=1"], {"quoted": "x;y", "plain": "1"}),
        (["nameless", "=value"], {}),
    ],
)
async def test_a_jar_takes_what_was_set(given: list[str], kept: dict[str, str]) -> None:
    app = FastAPI()
    sent: list[str | None] = []

    @app.post("/")
    async def route(request: Request) -> Response:
        sent.append(request.headers.get("cookie"))
        response = Response()
        for cookie in given:
            response.headers.append("Set-Cookie", cookie)
        return response

    http, jar = HttpClient(), CookieJar()
    async with serve(app) as url:
        server = GymServer("environment", Address(url), http)
        await server.post("/", {}, jar)
        await server.post("/", {}, jar)
        await http.close()
    assert jar.values == kept
    assert sent == [None, jar.header().get("Cookie")]
