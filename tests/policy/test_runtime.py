# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""From the start of the policy side to its first turn: invalid configurations, missing engines, keys, and runs."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response

from nemo_gym_prorl.cli.scripted.server import ScriptedConfig, serve
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.http.problems import problem_of
from nemo_gym_prorl.policy.engines.engine import (
    BackendFailed,
    Misconfigured,
    RequestRefused,
    Sampling,
    checked_url,
)
from nemo_gym_prorl.policy.http.api import add_control_routes
from nemo_gym_prorl.policy.pool.backend import Health
from nemo_gym_prorl.policy.runtime import HostRefused, PolicyConfig, PolicyRuntime
from nemo_gym_prorl.policy.turns import TurnRequest
from tests.policy.engines import MODEL, free_port
from tests.policy.runtimes import hosted
from tests.policy.scripted_engine import completion, nemo_rl_server, says
from tests.rollout.serving import serve as serving


HI = [{"role": "user", "content": "hi"}]


# What must be there


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"tokenizer": "{tmp}/nowhere"}, "tokenizer"),
        ({"engine": "vllm"}, "tokenizer: engine 'vllm' needs a tokenizer"),
        ({"tokenizer": "{words}", "chat_template": "{tmp}/none.jinja"}, "chat_template: no file"),
        ({"tool_call_parser": "xml"}, "tool_call_parser: 'xml' is none of"),
        ({"api_key": ["one", "two"]}, "api_key: 2 keys for 1 backends"),
    ],
)
async def test_what_cannot_work_ends_the_start(policy: dict[str, Any], said: str, words: str, tmp_path: Path) -> None:
    policy = {k: v.format(tmp=tmp_path, words=words) if isinstance(v, str) else v for k, v in policy.items()}
    with pytest.raises(CallerError, match=said):
        async with hosted("http://127.0.0.1:1", **policy):
            pass


# What the engines are


async def answer_later(host: PolicyRuntime) -> asyncio.Task[Any]:
    turn = TurnRequest("r", HI, sampling=Sampling(max_tokens=4, temperature=1.0))

    async def ask() -> Any:
        return await host.service.turn(turn)

    asked = asyncio.create_task(ask())
    await asyncio.sleep(0)
    return asked


async def test_an_engine_that_never_comes_fails_a_turn_in_time() -> None:
    async with hosted(f"http://127.0.0.1:{free_port()}", unreachable_s=0.3) as host:
        with pytest.raises(BackendFailed, match=r"no engine served for 0\.3 s") as caught:
            await asyncio.wait_for(await answer_later(host), 20)
    assert problem_of(caught.value).headers == {"X-ProRL-Failure-Kind": "provider_unavailable; final"}


def sglang(seen: list[dict[str, Any]] | None = None) -> FastAPI:
    about = {"output_token_logprobs": [[-0.5, 1, None]], "finish_reason": {"type": "length"}}
    return says("/generate", lambda _: {"meta_info": about}, seen)


def vllm() -> FastAPI:
    return says("/v1/completions", lambda _: completion(token_ids=[1, 1]))


async def test_an_engine_that_nobody_named_is_vllm_or_refused(words: str, caplog: pytest.LogCaptureFixture) -> None:
    """With a tokenizer the default is vLLM by tokens. An engine with chat completions only is NeMo RL's."""
    async with serving(nemo_rl_server([])) as url:
        async with hosted(url) as host:
            with pytest.raises(Misconfigured, match=r"policy\.engine: .* has no /v1/completions, .* not 'vllm_chat'"):
                await asyncio.wait_for(await answer_later(host), 20)
        assert "so it is not 'vllm_chat'" in caplog.text, "said at the start"
        async with hosted(url, engine="nemo_rl") as host:
            assert list((await (await answer_later(host))).turn.sampled) == [3, 4]
    async with serving(sglang()) as url:
        async with hosted(url, tokenizer=words) as host:
            with pytest.raises(Misconfigured, match="so it is not 'vllm'"):
                await asyncio.wait_for(await answer_later(host), 20)
        async with hosted(url, tokenizer=words, engine="sglang") as host:
            assert list((await (await answer_later(host))).turn.sampled) == [1]
    async with serving(vllm()) as url, hosted(url, tokenizer=words) as host:
        assert list((await (await answer_later(host))).turn.sampled) == [1, 1]
    config = ScriptedConfig()
    async with serve(config) as url, hosted(url, model=config.model) as host:
        assert (await (await answer_later(host))).turn.sampled


async def test_a_backend_of_another_kind_is_refused() -> None:
    both = says("/v1/completions", lambda _: completion())
    both.add_api_route("/v1/chat/completions", lambda: {}, methods=["POST"])
    async with (
        serving(nemo_rl_server([])) as nemo_rl,
        serving(vllm()) as other,
        serving(both) as real,
        hosted(nemo_rl, engine="nemo_rl") as host,
    ):
        for url in (other, real):
            with pytest.raises(CallerError, match=r"url: policy\.engine: .*, so it is not 'nemo_rl'"):
                await host.add(url)
        assert list(host.pool.backends) == ["backend0"]


async def test_sglang_is_told_what_is_left_of_the_context(words: str) -> None:
    seen: list[dict[str, Any]] = []
    app = sglang(seen)
    cards = {"data": [{"id": "adapter", "max_model_len": 7}, {"id": MODEL, "max_model_len": 100}]}
    app.add_api_route("/v1/models", lambda: cards)
    async with serving(app) as url, hosted(url, engine="sglang", tokenizer=words) as host:
        for asked in (None, 5, 500):
            await host.service.turn(TurnRequest(f"r{asked}", HI, sampling=Sampling(max_tokens=asked)))
    assert [body["sampling_params"]["max_new_tokens"] for body in seen] == [98, 5, 98]


# Whose fault a 500 is


async def test_a_refused_sampling_parameter_is_the_requests_fault_and_takes_nothing_down() -> None:
    """NeMo RL's engine asserts its profile (HTTP 500), and has no /health."""
    asked: list[dict[str, Any]] = []
    async with serving(nemo_rl_server(asked)) as url, hosted(url, engine="nemo_rl") as host:
        service = host.service
        wrong = TurnRequest("wrong", HI, sampling=Sampling(temperature=0.1))
        with pytest.raises(RequestRefused, match="sampling parameters differ from the training profile"):
            await asyncio.wait_for(service.turn(wrong), 20)
        assert len(asked) == 1, "probes are refused twice, and then one request as it should be is not"
        assert host.pool.backends["backend0"].health is Health.UP
        right = TurnRequest("right", HI, sampling=Sampling(temperature=1.0))
        assert list((await service.turn(right)).turn.sampled) == [3, 4]


async def test_an_engine_without_health_comes_back_after_it_was_gone(caplog: pytest.LogCaptureFixture) -> None:
    """The log states once why turns wait."""
    port = free_port()
    async with hosted(f"http://127.0.0.1:{port}", engine="nemo_rl") as host:
        asked = await answer_later(host)
        async with asyncio.timeout(60):
            while host.pool.backends["backend0"].health is not Health.DOWN:
                await asyncio.sleep(0.01)
        served = uvicorn.Server(uvicorn.Config(nemo_rl_server([]), host="127.0.0.1", port=port, log_level="warning"))
        running = asyncio.create_task(served.serve())
        try:
            assert list((await asyncio.wait_for(asked, 30)).turn.sampled) == [3, 4]
        finally:
            served.should_exit = True
            await running
        assert host.pool.backends["backend0"].health is Health.UP
    said = [record.getMessage() for record in caplog.records if record.name.endswith("dispatcher")]
    assert re.fullmatch(r"engine http://127\.0\.0\.1:\d+ is down, its turns wait: .*", said[0])
    assert re.fullmatch(r"engine http://127\.0\.0\.1:\d+ answers again", *said[1:])


async def test_an_engine_that_answers_every_request_with_an_error_is_no_fault_of_any() -> None:
    broken = says("/v1/chat/completions", lambda _: Response("broken", status_code=500))
    async with serving(broken) as url, hosted(url, engine="nemo_rl") as host:
        turn = host.service.turn(TurnRequest("r", HI))
        with pytest.raises(BackendFailed, match="answered 500: broken"):
            await asyncio.wait_for(turn, 20)
        async with serving(nemo_rl_server([])) as good:
            await host.add(good, "good")
            turns = [TurnRequest(f"r{i}", HI, sampling=Sampling(temperature=1.0)) for i in range(4)]
            service = host.service
            answers = await asyncio.gather(*(service.turn(turn) for turn in turns))
        assert all(list(answer.turn.sampled) == [3, 4] for answer in answers)


# Who gets which key


async def test_keys_go_where_they_belong() -> None:
    seen: dict[str, str | None] = {}

    def engine(name: str) -> FastAPI:
        app = says("/v1/chat/completions", lambda _: Response("busy", status_code=503), published=False)

        @app.middleware("http")
        async def look(request: Request, call_next: Any) -> Any:
            seen[name] = request.headers.get("authorization")
            seen[f"{name} header"] = request.headers.get("x-secret")
            return await call_next(request)

        return app

    async with (
        serving(engine("one")) as one,
        serving(engine("two")) as two,
        serving(engine("added")) as added,
        serving(engine("keyed")) as keyed,
        hosted(one, two, engine="vllm_chat", api_key=["k1", "k2"], headers={"X-Secret": "s"}) as host,
    ):
        service = host.service
        await host.add(added)
        await host.add(keyed, api_key="k3")
        for backend in host.pool.backends.values():
            assert not await service.engine.can_sample(backend.url)
    assert seen == {
        "one": "Bearer k1",
        "one header": "s",
        "two": "Bearer k2",
        "two header": "s",
        "added": None,
        "added header": None,
        "keyed": "Bearer k3",
        "keyed header": None,
    }


async def test_backends_may_be_added_on_known_and_allowed_hosts_only() -> None:
    config = {"engine": "vllm_chat", "backend_hosts": ["10.1.*", "gpu7"]}
    async with hosted("http://trusted:8000/v1", **config) as host:
        for allowed in (
            "http://127.0.0.1:1",
            "http://[::1]:1",
            "http://trusted:9/v1",
            "http://10.1.2.3",
            "http://GPU7:1",
        ):
            await host.add(allowed)
        for refused in ("http://10.2.0.1:1", "http://evil", "http://trusted.evil", "http://169.254.169.254"):
            with pytest.raises(HostRefused, match=r"add it to policy\.backend_hosts"):
                await host.add(refused)


@pytest.mark.parametrize(
    "url",
    [
        "not a url",
        "ftp://h",
        "http://trusted@evil/",
        "http://h\n.evil/",
    ],
)
def test_what_is_no_url_of_a_backend_is_refused(url: str) -> None:
    with pytest.raises(CallerError, match="url: "):
        checked_url(url)


# Runs, and control routes


@pytest.mark.parametrize(
    ("update", "met"),
    [("label", {"y"}), ("resume", {"y"}), ("resume without a label", {"x", "y"})],
)
async def test_new_weights_have_engines_of_their_run_met_again(update: str, met: set[str]) -> None:
    host = PolicyRuntime(PolicyConfig(base_url=[], model="m", engine="vllm_chat"))
    async with host.lifespan():
        # The load reports, which also forget an engine that does not answer, come later.
        urls = {run: f"http://127.0.0.1:1/{run}" for run in ("x", "y")}
        for run, url in urls.items():
            await host.add(url, run=run)
            host.engine.contexts[url] = 100
        if update == "label":
            host.label("2", run="x")
        else:
            await host.resume(weight_version="2" if update == "resume" else None, run="x")
        assert {run for run, url in urls.items() if url in host.engine.contexts} == met


async def test_the_control_routes() -> None:
    host = PolicyRuntime(PolicyConfig(base_url=[], model=MODEL, engine="vllm_chat", control_token="secret"))
    app = FastAPI()
    add_control_routes(app, host)
    async with serving(app) as url, aiohttp.ClientSession() as http:

        async def call(method: str, path: str, body: Any = None, token: str = "secret") -> tuple[int, Any]:
            headers = {"Authorization": f"Bearer {token}"}
            async with http.request(method, f"{url}{path}", json=body, headers=headers) as response:
                return response.status, await response.json()

        status, said = await call(
            "POST", "/v1/backends", {"url": "http://127.0.0.1:1", "id": "a", "weight_version": "1"}
        )
        assert (status, said["weight_version"]) == (201, "1")
        status, said = await call("POST", "/v1/backends", {"url": "http://127.0.0.1:2", "id": "a"})
        assert (status, said["detail"]) == (409, "id: a backend 'a' exists already: choose another id")
        assert await call("POST", "/v1/backends/pause", {}) == (200, {"drained": True})
        _, said = await call("POST", "/v1/backends/resume", {"weight_version": "2"})
        assert said["backends"][0]["weight_version"] == "2"
        assert (await call("DELETE", "/v1/backends/a?drain=true"))[1] == {"id": "a", "draining": True}
        assert (await call("GET", "/v1/backends"))[1]["backends"][0]["draining"]
        assert (await call("DELETE", "/v1/backends/b"))[0] == 404
        assert (await call("GET", "/v1/rollouts/r/tokens"))[0] == 410
        assert await call("DELETE", "/v1/rollouts/r") == (200, {"rollout": "r"})
        assert await call("DELETE", "/v1/backends") == (200, {"backends": []})
        async with http.get(f"{url}/metrics") as response:
            told = await response.text()
        assert 'prorl_policy_waiting{run=""} 0.0' in told
        assert "# TYPE prorl_policy_migrations_total counter" in told
        assert "# TYPE prorl_policy_failovers_total counter" in told
