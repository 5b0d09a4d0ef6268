# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Whose fault an answer of a server is, and what a server may not make the agent do."""

import asyncio
from typing import Any

import pytest

from nemo_gym_prorl.agent import tool_loop
from tests.agent.gym_host import free_port
from tests.agent.peers import (
    COLLECTED,
    ROW,
    Deployment,
    Environment,
    Policy,
    address,
    deployment,
    once,
    reference,
    status,
    until,
)
from tests.rollout.serving import serve


SEED, TURN, VERIFY = "/seed_session", "/v1/responses", "/verify"
NO_ENGINE = "provider_unavailable"


@pytest.mark.parametrize(
    ("path", "answer", "failed", "attempts"),
    [
        (SEED, status(307, Location="/elsewhere"), None, ["provider_unavailable"]),
        (SEED, status(401), None, ["provider_unavailable"]),
        (TURN, status(410), None, ["session_lost"]),
        (VERIFY, status(500), None, ["verifier_error"]),
        (SEED, status(400), "bad_row", ["bad_row"]),
        (TURN, status(422), "bad_row", ["bad_row"]),
        (VERIFY, status(422), "verifier_error", ["verifier_error"]),
        (SEED, status(422, X_ProRL_Failure_Kind="verifier_error"), "verifier_error", ["verifier_error"]),
        (TURN, status(500, X_ProRL_Failure_Kind="provider_unavailable"), None, ["provider_unavailable"]),
        (TURN, status(500, X_ProRL_Failure_Kind="provider_unavailable; final"), NO_ENGINE, [NO_ENGINE]),
    ],
    ids=["redirect", "key", "forgotten", "verifier", "row", "turn", "verdict", "task", "engine", "no engine"],
)
async def test_the_deployments_faults_are_tried_again_and_the_rows_are_not(
    path: str, answer: Any, failed: str | None, attempts: list[str]
) -> None:
    """The answer comes once: a row that is tried again is scored."""
    environment, policy = Environment(), Policy()
    peer = policy if path == TURN else environment
    peer.instead[path] = once(answer)
    async with deployment(environment, policy, max_attempts=2) as at:
        done = await at.run(COLLECTED)
    assert (done.get("failure_kind"), done["rollout"]["failed_attempts"]) == (failed, attempts)
    assert done["reward"] == (0.0 if failed else 1.0)
    assert done.get("_ng_failure_terminal", False) == (failed not in (None, NO_ENGINE))
    assert "/elsewhere" not in peer.paths(), "redirects are not followed"


async def metrics_of(at: Deployment) -> str:
    async with at.http.get(f"{at.url}/metrics") as answer:
        return await answer.text()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that refuses is asked again at once, as often as ever."""
    monkeypatch.setattr(tool_loop, "_PAUSES_S", (0.0,) * len(tool_loop._PAUSES_S))


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(("code", "calls"), [(503, 5), (502, 1)])
async def test_a_gateway_before_a_tool_is_no_reward(code: int, calls: int) -> None:
    environment = Environment(instead={"/count": status(code)})
    async with deployment(environment, max_attempts=2) as at:
        answered, problem, _ = await at.post("/run", ROW)
        told = (await at.get("/status"))["environments"]["environment"]["tool_errors"]
        metrics = await metrics_of(at)
    assert (answered, str(code) in problem["detail"]) == (503, True)
    assert (environment.seeds, environment.counts["/count"]) == (2, 2 * calls), (
        "the rollout is done anew, with a bound"
    )
    assert "/verify" not in environment.paths()
    assert told == {str(code): 2 * calls}
    assert f'prorl_tool_errors_total{{environment="environment",status="{code}"}} {2.0 * calls}' in metrics


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(("code", "attempts"), [(429, 1), (502, 2)])
async def test_a_tool_that_comes_back_costs_no_reward(code: int, attempts: int) -> None:
    """What was refused is asked again; what may have been done begins anew, in a session where it was not."""
    environment = Environment(instead={"/count": once(status(code, Retry_After="0"))})
    async with deployment(environment, max_attempts=2) as at:
        done = await at.run(ROW)
    assert (done["reward"], done["rollout"]["tool_calls"], environment.seeds) == (1.0, 2, attempts)
    observed = [item["output"] for item in done["response"]["output"] if item["type"] == "function_call_output"]
    assert observed == ['{"done":"/count"}'] * 2


async def test_a_pause_after_a_refusal_is_not_the_agents_time() -> None:
    environment = Environment(instead={"/count": once(status(429, Retry_After="2"))})
    async with deployment(environment, budgets={"run": 1.5}) as at:
        done = await at.run(ROW)
    assert (done["reward"], done["rollout"]["finish_reason"]) == (1.0, "stop")
    assert done["rollout"]["seconds"]["run"]["waited"] >= 1.4, "as far as it had gone when the budget was used up"


async def test_a_connection_that_a_tool_drops_is_no_reward() -> None:
    async def dropping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if b"/count " not in request.split(b"\r\n")[0]:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(dropping, "127.0.0.1", 0)
    where = address(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with server, deployment(elsewhere={"dropping": where}, resources_server=reference("dropping")) as at:
        done = await at.run(COLLECTED)
    assert (done["failure_kind"], done["mask_sample"]) == ("transport_peer_drop", True)


async def test_rollouts_wait_for_a_server_that_is_down_and_lose_no_attempt() -> None:
    """Each has one attempt, with which it gets its session."""
    environment, port = Environment(), free_port()
    late = address(f"http://127.0.0.1:{port}")
    async with deployment(elsewhere={"late": late}, resources_server=reference("late"), max_attempts=1) as at:
        runs = [asyncio.create_task(at.run(COLLECTED)) for _ in range(3)]
        async with asyncio.timeout(60):
            while "prorl_server_unreachable{" not in await metrics_of(at):
                await asyncio.sleep(0.02)
        assert not any(run.done() for run in runs)
        async with serve(environment.app(), port):
            await asyncio.gather(*runs)
    assert environment.seeds == 3


async def test_one_500_of_a_tool_is_an_observation_and_a_tool_that_gives_no_other_is_broken() -> None:
    environment = Environment(instead={"/count": status(500)})
    async with deployment(environment, Policy(turns=2)) as at:
        for _ in range(tool_loop.BROKEN_FOR_ALL_AFTER - 1):
            done = await at.run(ROW)
            assert done["reward"] == 1.0
            assert done["response"]["output"][1]["output"] == "status 500"
        broken = await at.run(COLLECTED)
        assert "'count' is broken" in broken["failure_reason"]
        assert (broken["failure_kind"], broken["mask_sample"]) == ("provider_unavailable", True)
        del environment.instead["/count"]
        assert (await at.run(ROW))["reward"] == 1.0, "it works again"
        environment.instead["/count"] = status(500)
        assert (await at.run(ROW))["reward"] == 1.0, "and is counted anew"


async def test_a_tool_that_is_broken_for_one_rollout_only_is_broken() -> None:
    environment, policy = Environment(), Policy(turns=5)
    environment.instead["/count"] = lambda: status(500)() if "session=1" in environment.headers[-1]["cookie"] else None
    async with deployment(environment, policy, max_attempts=2) as at:
        done = await at.run(ROW)
    assert (done["reward"], done["rollout"]["failed_attempts"]) == (1.0, ["provider_unavailable"])
    assert environment.counts["/count"] == 3 + 4


async def test_an_environments_own_kinds_are_believed_and_none_makes_a_rollout_vanish() -> None:
    own = ("session_lost", "provider_oom_killed", "verifier_error")
    async with deployment() as at:
        for kind in (*own, "cancelled", "agent_timeout", "nonsense"):
            at.environment.instead["/verify"] = status(500, **{"X_ProRL_Failure_Kind": kind})
            done = await at.run(COLLECTED)
            assert done["failure_kind"] == (kind if kind in own else "provider_unavailable"), kind
            assert ("_ng_no_persist" in done, done["rollout"]["state"]) == (False, "failed"), kind


async def test_a_release_path_is_a_path_of_that_server() -> None:
    elsewhere = ("@127.0.0.1:9/x", "//127.0.0.1:9/x", "http://127.0.0.1:9/x")
    async with deployment() as at:
        for path in (*elsewhere, "/x?y", "/%2e", 7):
            at.environment.seeded = {"release_path": path}
            at.environment.calls.clear()
            assert "release_path" in (await at.run(COLLECTED))["failure_reason"], path
            await until(lambda: "/close_session" in at.environment.paths())
            assert at.environment.paths() == ["/seed_session", "/close_session"], "nobody acted, the session is over"


async def test_a_release_path_is_no_tool() -> None:
    """A policy that could call it would end its own sandbox, and so trade a reward for a failure."""
    async with deployment(policy=Policy(tool="give_back")) as at:
        done = await at.run(ROW)
        observed = [item["output"] for item in done["response"]["output"] if item["type"] == "function_call_output"]
    assert all("Not Found" in text for text in observed)
    assert at.environment.counts["/give_back"] == 1, "called by the agent alone"


async def test_no_proxy_of_the_environment_stands_between(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with deployment() as at:
        assert (await at.run(ROW))["reward"] == 1.0


async def test_each_server_is_shown_its_own_key_and_no_other() -> None:
    for keys in ({"policy_model": "for-the-policy"}, {"environment": "for-the-environment"}):
        async with deployment(keys=keys) as at:
            await at.run(ROW)
            await until(lambda at=at: "DELETE" in {method for method, _ in at.policy.calls})
        for name, peer in (("environment", at.environment), ("policy_model", at.policy)):
            shown = f"Bearer {keys[name]}" if name in keys else None
            assert {headers.get("authorization") for headers in peer.headers} == {shown}
