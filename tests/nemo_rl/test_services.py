# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Servers behind a run, without NeMo RL: selection, registration of engines, keys, and refusals."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI, HTTPException, Request
from nemo_gym import global_config, server_utils
from nemo_gym.config_types import BaseServerConfig
from omegaconf import OmegaConf

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.http.key_guard import KeyGuard
from nemo_gym_prorl.nemo_rl import services
from nemo_gym_prorl.nemo_rl.configuration import ProrlSettings
from nemo_gym_prorl.nemo_rl.services import Servers, configured_servers, gym_servers, select_servers, with_engines
from nemo_gym_prorl.servers.gym_client import send_keys
from tests.rollout.serving import serve


ENGINES = ("http://10.0.0.1:8000/v1", "http://10.0.0.2:8000/v1")


class Model:
    """Control routes of a model server, whose first ``failures`` listings fail with 503."""

    def __init__(self, *others: str) -> None:
        self.backends = {url: {"id": f"other{place}", "url": url, "run": None} for place, url in enumerate(others)}
        self.labels: dict[str, str | None] = {}
        self.failures = 0
        self.app = FastAPI()
        self.app.get("/v1/backends")(self.listing)
        self.app.post("/v1/backends", status_code=201)(self.add)
        self.app.delete("/v1/backends")(self.clear)
        self.app.post("/v1/backends/weight_version")(self.label)
        self.app.post("/v1/backends/share")(self.share)
        self.shares: list[Any] = []

    async def listing(self, run: str) -> dict[str, Any]:
        if self.failures:
            self.failures -= 1
            raise HTTPException(503, "not now")
        return {"backends": [backend for backend in self.backends.values() if backend["run"] == run]}

    async def add(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        url = body["url"]
        assert url not in self.backends
        self.backends[url] = {"id": f"b{len(self.backends)}", "url": url, "run": body["run"]}
        self.labels[url] = body["weight_version"]  # an engine must be labelled before its first turn
        return self.backends[url]

    async def clear(self, run: str) -> dict[str, Any]:
        self.backends = {url: known for url, known in self.backends.items() if known["run"] != run}
        return {"backends": []}

    async def share(self, request: Request) -> dict[str, Any]:
        self.shares.append(await request.json())
        return {}

    async def label(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        for known in self.backends.values():
            if body.get("run") == known["run"]:
                self.labels[known["url"]] = body["weight_version"]
        return {}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "PAUSE_S", 0.0)


async def test_engines_are_registered_once_labelled_and_taken_away() -> None:
    model = Model("http://10.9.9.9/v1")
    async with serve(model.app) as url:
        servers = with_engines(Servers((), (url,)), [*ENGINES, None], "run 1")
        for version in (3, 4):
            await asyncio.to_thread(servers.announce, version, needed=True)
            assert set(model.backends) == {"http://10.9.9.9/v1", *ENGINES}
            assert model.labels == dict.fromkeys(ENGINES, str(version)), "what others have there is not ours to label"
        model.backends.clear()  # restarted
        await asyncio.to_thread(servers.announce, 5)
        assert set(model.backends) == set(ENGINES)
        await asyncio.to_thread(servers.withdraw)
        assert not model.backends


async def test_a_server_is_told_again_and_then_left() -> None:
    model = Model()
    async with serve(model.app) as url:
        servers = with_engines(Servers((), (url,)), ENGINES, "run")
        model.failures = 2
        await asyncio.to_thread(servers.announce, 1)
        assert model.labels == dict.fromkeys(ENGINES, "1")
        model.failures = 3
        await asyncio.to_thread(servers.announce, 2)
        assert model.labels == dict.fromkeys(ENGINES, "1")
        model.failures = 3
        with pytest.raises(InfrastructureError, match="503"):
            await asyncio.to_thread(servers.announce, 3, needed=True)


async def test_all_servers_are_told_at_once_and_of_each_other() -> None:
    """A server that accepts connections and never answers delays no other."""
    slow, models = asyncio.Event(), [Model(), Model()]

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await slow.wait()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as dead:
        dead_url = f"http://127.0.0.1:{dead.sockets[0].getsockname()[1]}"
        async with serve(models[0].app) as one, serve(models[1].app) as two:
            servers = with_engines(Servers((), (dead_url, one, two)), ENGINES, "run")
            telling = asyncio.create_task(asyncio.to_thread(servers.announce, 7))
            async with asyncio.timeout(10):
                while not all(model.labels == dict.fromkeys(ENGINES, "7") for model in models):
                    await asyncio.sleep(0.02)
            assert not telling.done()
            slow.set()
            await telling
    assert [model.shares for model in models] == [[{"parts": 3, "run": "run"}]] * 2


def instance(process: str, name: str) -> dict[str, Any]:
    return {"process_name": process, "name": name, "url": f"http://127.0.0.1/{process}"}


POLICY = instance("policy_model", "prorl_model")
CODE, MATH = instance("code_agent", "prorl_agent"), instance("math_agent", "prorl_agent")


def test_ours_among_the_servers_of_a_deployment() -> None:
    found = select_servers([instance("code", "prorl_code"), CODE, POLICY], ProrlSettings(key_env="KEY"), "node")
    assert found == Servers(("http://127.0.0.1/code_agent",), ("http://127.0.0.1/policy_model",), "KEY", "node")
    found = select_servers([CODE, MATH, POLICY], ProrlSettings(agent="math_agent"), None)
    assert found.services == ("http://127.0.0.1/math_agent",)


@pytest.mark.parametrize("nodes", [("a", "a"), ("a", "b")], ids=["one node", "two nodes"])
async def test_shards_of_gym_are_called_where_they_can_be(
    monkeypatch: pytest.MonkeyPatch, nodes: tuple[str, str]
) -> None:
    """Newer versions of NeMo RL have several Gym actors."""
    monkeypatch.setattr("ray.get", lambda given: given)

    def head(number: int) -> FastAPI:
        app = FastAPI()
        found = [{**one, "url": f"{one['url']}-{number}"} for one in (CODE, POLICY)]
        app.get("/server_instances")(lambda: found)
        return app

    async with serve(head(0)) as first, serve(head(1)) as second:
        urls = [urlsplit(url) for url in (first, second)]
        places = [(url.hostname, url.port, node) for url, node in zip(urls, nodes, strict=True)]
        actors = [SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda _, at=at: at)) for at in places]
        asked = asyncio.to_thread(gym_servers, SimpleNamespace(all_handles=actors), ProrlSettings())
        if len({*nodes}) > 1:
            with pytest.raises(CallerError, match="on 2 nodes, and their servers listen on loopback") as error:
                await asked
            assert error.value.field == "env.nemo_gym.shards"
            return
        servers = await asked
    assert servers.services == ("http://127.0.0.1/code_agent-0", "http://127.0.0.1/code_agent-1")
    assert servers.models == ("http://127.0.0.1/policy_model-0", "http://127.0.0.1/policy_model-1")
    assert servers.node == "a"


@pytest.mark.parametrize(
    ("instances", "settings", "field", "says"),
    [
        ([CODE, MATH, POLICY], {}, "prorl.agent", "code_agent, math_agent"),
        ([POLICY], {}, "prorl.agent", "none"),
        ([CODE, POLICY], {"agent": "cod_agent"}, "prorl.agent", "'cod_agent' is no prorl_agent server"),
        ([CODE], {}, "env.nemo_gym.config_paths", "prorl_model.yaml"),
    ],
)
def test_a_deployment_that_does_not_fit_is_told_by_its_field(
    instances: list[dict[str, Any]], settings: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(CallerError, match=says) as error:
        select_servers(instances, ProrlSettings(**settings), None)
    assert error.value.field == field


async def test_services_elsewhere_are_asked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    app = FastAPI()

    @app.get("/status")
    @app.get("/v1/backends")
    async def guarded(request: Request) -> dict[str, Any]:
        if request.headers.get("Authorization") != "Bearer right":
            raise HTTPException(401, "send the key")
        return {}

    async with serve(app) as url:

        async def asked(*services: str, key_env: str | None = "PRORL_ANY_KEY") -> None:
            elsewhere = ProrlSettings(rollouts="service", services=services, models=(url,), key_env=key_env)
            await asyncio.to_thread(configured_servers, elsewhere)

        monkeypatch.setenv("PRORL_ANY_KEY", "right")
        await asked(url)
        for services, key_env, error, says in (
            (
                (url, "http://127.0.0.1:1"),
                "PRORL_ANY_KEY",
                InfrastructureError,
                "1:1/status failed without",
            ),
            ((f"{url}/other",), "PRORL_ANY_KEY", CallerError, "other/status failed with status 404"),
            ((url,), None, CallerError, "status 401: .*send the key"),
            ((url,), "PRORL_NO_SUCH_KEY", CallerError, "PRORL_NO_SUCH_KEY is not set"),
        ):
            with pytest.raises(error, match=says):
                await asked(*services, key_env=key_env)


async def test_each_server_gets_its_own_key_and_others_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTS_KEY", "s3cret")
    monkeypatch.setattr(server_utils, "request", server_utils.request)
    async with serve(echo("s3cret")) as guarded, serve(echo(None)) as open_to_all:
        config = OmegaConf.create({"agent": block(guarded, "${oc.env:AGENTS_KEY}"), "environment": block(open_to_all)})
        monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", config)
        client = server_utils.ServerClient(
            head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=config
        )

        async def seen(server: str, **options: Any) -> tuple[int, Any]:
            response = await client.post(server, url_path="/run", json={"row": 1}, **options)
            return response.status, await response.json()

        try:
            assert (await seen("agent"))[0] == 401
            send_keys()
            assert await seen("agent") == (200, ["Bearer s3cret", None, {"row": 1}])
            assert await seen("agent", headers={"X-Mine": "1"}) == (200, ["Bearer s3cret", "1", {"row": 1}])
            assert await seen("environment") == (200, [None, None, {"row": 1}])
        finally:
            await server_utils.get_global_aiohttp_client().close()
            monkeypatch.setattr(server_utils, "_GLOBAL_AIOHTTP_CLIENT", None)


def echo(key: str | None) -> FastAPI:
    """Answers with what it was shown."""
    app = FastAPI()
    app.add_middleware(KeyGuard, key=key)

    @app.post("/run")
    async def run(request: Request) -> list[Any]:
        return [request.headers.get("authorization"), request.headers.get("x-mine"), await request.json()]

    return app


def block(url: str, key: str | None = None) -> dict[str, Any]:
    """The configuration of a server that runs."""
    host, port = url.removeprefix("http://").split(":")
    return {"responses_api_agents": {"prorl_agent": {"host": host, "port": int(port), "control_token": key}}}
