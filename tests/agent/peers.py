# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Fake environment and model servers on sockets that fail on demand, and an agent server in front of both."""

import asyncio
from base64 import b64encode
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar
from urllib.parse import urlsplit

import aiohttp
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

from nemo_gym_prorl.agent.agent_service import AgentService
from nemo_gym_prorl.agent.gym_environments import ServiceConfig
from nemo_gym_prorl.http.problems import add_problem_handlers
from nemo_gym_prorl.servers.agent_server import ProRLAgent, ProRLAgentConfig
from tests.rollout.serving import serve
from tests.rollout.serving import until as until


ROW = {"responses_create_params": {"input": "count to three"}}
COLLECTED = {**ROW, "_ng_task_index": 0, "_ng_rollout_index": 0}


@dataclass
class Peer:
    """Fake server. ``instead`` overrides answers by path, or by method and path; ``*`` matches any text."""

    calls: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    instead: dict[str, Callable[[], Any]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def paths(self, method: str = "POST") -> list[str]:
        return [path for used, path in self.calls if used == method]

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
        async def any_route(request: Request) -> Response:
            path = request.scope["raw_path"].decode()
            body = await request.body()
            self.calls.append((request.method, path))
            self.headers.append(dict(request.headers))
            self.bodies.append((await request.json()) if body else None)
            self.counts[path] += 1
            called = (f"{request.method} {path}", path)
            troubles = (
                trouble
                for pattern, trouble in self.instead.items()
                if any(fnmatchcase(call, pattern) for call in called)
            )
            troubled = next(troubles, None)
            answer = troubled() if troubled is not None else self.answer(request.method, path, request)
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer is None:
                answer = self.answer(request.method, path, request)
                answer = await answer if asyncio.iscoroutine(answer) else answer
            return answer if isinstance(answer, Response) else JSONResponse(answer)

        return app

    def answer(self, method: str, path: str, request: Request) -> Any:
        raise NotImplementedError


@dataclass
class Environment(Peer):
    """Fake resources server."""

    seeded: dict[str, Any] = field(default_factory=lambda: {"release_path": "/give_back"})
    seeds: int = 0
    closed: int = 0

    def answer(self, method: str, path: str, request: Request) -> Any:
        if path == "/seed_session":
            self.seeds += 1
            response = JSONResponse(self.seeded)
            response.set_cookie("session", str(self.seeds))
            return response
        if path == "/close_session":
            self.closed += 1
        if path == "/verify":
            return {**self.bodies[-1], "reward": 1.0}
        return {"done": path}


@dataclass
class Policy(Peer):
    """Fake model server that keeps tokens, as ``prorl_model`` does. Each turn but the last calls a tool."""

    turns: int = 3
    tool: str = "count"
    defers: bool = True
    versions: bool = False
    mixture: bool = False
    calls_at_once: int = 1
    taken: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    turn_s: float = 0.0
    says: Callable[[str], str] = lambda rollout: "three"

    def answer(self, method: str, path: str, request: Request) -> Any:
        if path == "/v1/responses":
            return self._turn(request.headers["x-rollout-id"])
        if path.endswith("/tokens"):
            return self._tokens(request.url.path.split("/")[3])
        return {}

    async def _turn(self, rollout: str) -> Any:
        await asyncio.sleep(self.turn_s)
        number = self.taken[rollout]
        self.taken[rollout] += 1
        last = number + 1 == self.turns
        item: dict[str, Any] = {"id": f"i{number}", "status": "completed"}
        if last:
            text = {"type": "output_text", "text": self.says(rollout), "annotations": []}
            item |= {"type": "message", "role": "assistant", "content": [text]}
        else:
            item |= {"type": "function_call", "name": self.tool, "arguments": "{}", "call_id": f"c{number}"}
        more = (
            []
            if last
            else [{**item, "id": f"i{number}.{n}", "call_id": f"c{number}.{n}"} for n in range(1, self.calls_at_once)]
        )
        body = {
            "id": f"resp{number}",
            "created_at": 0,
            "model": "policy",
            "object": "response",
            "output": [item, *more],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "tools": [],
        }
        return JSONResponse(body, headers={"X-Rollout-Tokens": "deferred"} if self.defers else None)

    def _tokens(self, rollout: str) -> Any:
        taken = self.taken[rollout] if rollout in self.taken else max(self.taken.values(), default=0)
        answers: dict[str, Any] = {}
        for number in range(taken):
            answers[f"resp{number}"] = {"sequence": 0, "start": 3 * number + 2, "end": 3 * number + 3}
            if self.versions:
                answers[f"resp{number}"]["weight_versions"] = [f"w{number}", f"w{number + 1}"]
            if self.mixture:
                answers[f"resp{number}"]["routed_experts"] = experts(max(3 * number - 1, 0), 3 * number + 3)
        ids = list(range(3 * taken))
        sequence = {"ids": ids, "log_probs": [-0.5] * len(ids)}
        return {"sequences": [sequence], "answers": answers, "token_in_rate": 0.5}


def experts(first: int, end: int) -> str:
    """Of these tokens; each has its id as its only expert."""
    return f"nrlre1:int8:{end - first}x1x1:{b64encode(bytes(range(first, end))).decode()}"


def hang(seconds: float) -> Callable[[], Any]:
    """Wait, then answer as ever."""

    async def wait() -> None:
        await asyncio.sleep(seconds)

    return wait


def status(code: int, **headers: str) -> Callable[[], Response]:
    """Answer with that status."""
    return lambda: Response(f"status {code}", code, {name.replace("_", "-"): text for name, text in headers.items()})


def once(trouble: Callable[[], Any]) -> Callable[[], Any]:
    """The first call only."""
    left = [trouble]
    return lambda: left.pop()() if left else None


class Hasty(ProRLAgentConfig):
    """Retries at once, and looks often whether a server is back."""

    retry_delay_s: ClassVar[float] = 0.01
    probe_s: ClassVar[float] = 0.1


def reference(name: str) -> dict[str, str]:
    return {"type": "resources_servers", "name": name}


def address(url: str) -> dict[str, Any]:
    """Return a server's block of settings."""
    parts = urlsplit(url)
    return {"entrypoint": "app.py", "host": parts.hostname, "port": parts.port}


@dataclass
class Deployment:
    """URLs of the agent and of its policy, its peers, and a client."""

    url: str
    policy_url: str
    environment: Environment
    policy: Policy
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any, dict[str, str]]:
        async with self.http.post(f"{self.url}{path}", json=body, **options) as answer:
            headers = {name.lower(): value for name, value in answer.headers.items()}
            return answer.status, await answer.json(content_type=None), headers

    async def run(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row that must be answered with 200."""
        code, body, _ = await self.post("/run", row)
        assert code == 200, body
        return dict(body)

    async def get(self, path: str) -> Any:
        async with self.http.get(f"{self.url}{path}") as answer:
            return await answer.json()


@asynccontextmanager
async def deployment(
    environment: Environment | None = None,
    policy: Policy | None = None,
    keys: dict[str, str] | None = None,
    further: dict[str, Environment] | None = None,
    elsewhere: dict[str, dict[str, Any]] | None = None,
    **settings: Any,
) -> AsyncIterator[Deployment]:
    """The real agent over the two peers, and further resources servers by name: peers, and addresses ``elsewhere``,
    which replace peers; one try unless told otherwise."""
    environment, policy, keys = environment or Environment(), policy or Policy(), keys or {}
    async with AsyncExitStack() as stack:
        blocks = dict(elsewhere or {})
        peers = {**(further or {}), "environment": environment, "policy_model": policy}
        for name, peer in peers.items():
            if name not in blocks:
                blocks[name] = address(await stack.enter_async_context(serve(peer.app())))
        if "environment" in keys:
            blocks["environment"]["control_token"] = keys["environment"]
        if "policy_model" in keys:
            blocks["policy_model"]["policy"] = {"control_token": keys["policy_model"]}
        merged = {name: {"resources_servers": {"some_environment": block}} for name, block in blocks.items()}
        merged["policy_model"] = {"responses_api_models": {"prorl_model": blocks["policy_model"]}}
        config = Hasty(
            name="agent",
            entrypoint="app.py",
            host="127.0.0.1",
            port=1,
            model_server={"type": "responses_api_models", "name": "policy_model"},
            **{"max_attempts": 1, "resources_server": reference("environment"), **settings},
        )
        client = ServerClient(
            head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=OmegaConf.create(merged)
        )
        url = await stack.enter_async_context(serve(ProRLAgent(config=config, server_client=client).setup_webserver()))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        policy_url = "http://{host}:{port}".format(**blocks["policy_model"])
        yield Deployment(url, policy_url, environment, policy, http)


@asynccontextmanager
async def agent_service(
    config: ServiceConfig, servers: dict[str, Any], model: str
) -> AsyncIterator[tuple[AgentService, str]]:
    """Run the agent's service, without Gym's server around it, over these servers; yield it and its URL."""
    service, app = AgentService(config, OmegaConf.create(servers), model=model), FastAPI()
    app.include_router(service.router())
    app.add_api_route("/run", service.run, methods=["POST"])
    add_problem_handlers(app)
    async with serve(app) as url:
        try:
            yield service, url
        finally:
            await service.close()
