# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The servers behind a training run: where they are, which engines they sample from, which weights those have.

With ``rollouts: gym`` NeMo RL's actor has started them, and its head server knows their addresses; their engines are
the trainer's from the start. With ``rollouts: service`` they run elsewhere already, and know nothing of this trainer,
which may be one of several: its engines are registered there as backends of a run of its own, and taken away again
when it ends.

What is asked of them here is small and rare, so the calls block; whoever has an event loop makes them in a thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

import aiohttp

from nemo_gym_prorl.dapo.runner import CLOSE_S
from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError, RolloutError
from nemo_gym_prorl.http.key_guard import is_loopback
from nemo_gym_prorl.http.keys import authorization
from nemo_gym_prorl.nemo_rl.settings import ProrlSettings
from nemo_gym_prorl.policy.engines.engine import checked_url
from nemo_gym_prorl.rollout.api.client import ApiError, RolloutClient


LOG = logging.getLogger(__name__)

CALL_S = 30.0
"""How long a server may take to answer."""
TRIES = 3
_AT_ONCE = 64
"""Model servers that are called at a time."""
PAUSE_S = 1.0
"""Of an announcement: how often it is made, and the pause before it is made again."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Where the rollout services and the model servers behind them are.

    Attributes:
        services: URLs of ``prorl_agent``.
        models: URLs of ``prorl_model``.
        key_env: name of the environment variable with their key; the key itself goes nowhere with this.
        node: Ray's id of the node that they can be called from; ``None``: from anywhere.
        engines: URLs of the trainer's engines, where the model servers have to be told of them.
        run: under which that is; of this start of the trainer and no other, since weights of the same number differ.
    """

    services: tuple[str, ...]
    models: tuple[str, ...]
    key_env: str | None = None
    node: str | None = None
    engines: tuple[str, ...] = ()
    run: str | None = None

    @property
    def key(self) -> str | None:
        """The control token.

        Raises:
            CallerError: the variable is not set.
        """
        if self.key_env is None:
            return None
        key = os.environ.get(self.key_env)
        if not key:
            raise CallerError(f"the environment variable {self.key_env} is not set", field="prorl.key_env")
        return key

    def announce(self, version: int, *, needed: bool = False) -> None:
        """Tell the model servers which weights the engines have. Nothing is drained; turns in flight go on.

        A server that has begun a new life meanwhile is given the engines again. One that does not answer is told
        again, and then left: labels are for those who read the rows later, and training goes by the sampler's own.

        Args:
            version: of the weights.
            needed: a server that cannot be told is an error: it does not know any engine yet.

        Raises:
            CallerError: a server refuses that, and it is needed.
            InfrastructureError: it does not answer, and it is needed.
        """

        def tell(url: str) -> None:
            try:
                self._tell(url, str(version))
            except RolloutError as error:
                if needed:
                    raise
                LOG.warning("weights %d are not announced: %s", version, error)

        self._at_once(tell)

    def end_all(self, client: str) -> None:
        """Cancel every rollout of a client, whoever submitted it; returns when their sandboxes are gone.

        A service that can't be asked is told of, and left.
        """

        async def at_all() -> None:
            await asyncio.gather(*(self._end_at(url, client) for url in self.services))

        asyncio.run(at_all())

    async def _end_at(self, url: str, client: str) -> None:
        try:
            async with asyncio.timeout(CLOSE_S), RolloutClient(url, self.key) as service:
                running = [job.id async for job in service.every() if job.client == client and not job.state.terminal]
                for first in range(0, len(running), 1000):
                    await service.cancel(running[first : first + 1000])
        except (ApiError, RolloutError, aiohttp.ClientError, OSError, ValueError) as error:
            LOG.warning("rollouts of %s at %s may go on: %s", client, url, error or type(error).__name__)

    def withdraw(self) -> None:
        """The engines that :meth:`announce` registered are backends no more."""

        def withdraw(url: str) -> None:
            try:
                _call("DELETE", self._backends(url), self.key)
            except RolloutError as error:
                LOG.warning("an engine of this trainer is left behind as a backend: %s", error)

        if self.engines:
            self._at_once(withdraw)

    def _at_once(self, call: Callable[[str], None]) -> None:
        """At all model servers: one that does not answer holds up no other."""
        with ThreadPoolExecutor(min(len(self.models), _AT_ONCE) or 1) as threads:
            for _ in threads.map(call, self.models):
                pass

    def _tell(self, url: str, version: str) -> None:
        for _ in range(TRIES - 1):
            try:
                self._label(url, version)
            except InfrastructureError as error:
                LOG.warning("weights %s are announced again: %s", version, error)
                time.sleep(PAUSE_S)
            else:
                return
        self._label(url, version)

    def _label(self, url: str, version: str) -> None:
        route, body = f"{url}/v1/backends/weight_version", {"weight_version": version}
        if not self.engines:
            _call("POST", route, self.key, body)
            return
        body["run"] = self.run or ""
        share = {"parts": len(self.models), "run": body["run"]}
        _call("POST", f"{url}/v1/backends/share", self.key, share)
        known = {backend["url"] for backend in _call("GET", self._backends(url), self.key)["backends"]}
        for engine in self.engines:
            if engine not in known:
                _call("POST", f"{url}/v1/backends", self.key, body | {"url": engine})
        _call("POST", route, self.key, body)

    def _backends(self, url: str) -> str:
        """This run's, at a model server."""
        return f"{url}/v1/backends?run={quote(self.run or '', safe='')}"


def started_by_gym(gym: Any, settings: ProrlSettings) -> Servers:
    """The servers that NeMo RL's Gym actor has started, or those of its shards, as newer versions have them.

    Args:
        gym: its handle, or what has those of the shards.
        settings: which agent is meant, if there are several.

    Raises:
        CallerError: there is no such agent, or no model server of ours, or servers of several nodes are to be called
            that listen on loopback.
    """
    import ray

    def place(actor: Any) -> tuple[str, int, str]:
        # Goes to the actor by value, whose interpreter need not have this package.
        import ray

        return actor.node_ip, actor.head_server_port, ray.get_runtime_context().get_node_id()

    actors = getattr(gym, "all_handles", None) or [gym]
    places = ray.get([actor.__ray_call__.remote(place) for actor in actors])
    instances = [one for host, port, _ in places for one in _call("GET", f"http://{host}:{port}/server_instances")]
    first, *others = {node for *_, node in places}
    servers = servers_among(instances, settings, first)
    if others and any(is_loopback(urlsplit(url).hostname) for url in servers.services + servers.models):
        raise CallerError(
            f"its shards are on {1 + len(others)} nodes, and their servers listen on loopback; give each a host and a "
            "control_token, or take rollouts: service",
            field="env.nemo_gym.shards",
        )
    return replace(servers, node=None) if others else servers


def servers_among(instances: Sequence[Mapping[str, Any]], settings: ProrlSettings, node: str | None) -> Servers:
    """Ours among the servers of a Gym deployment, as its head server lists them.

    Raises:
        CallerError: there is no such agent, or no model server of ours.
    """
    agents: dict[str, list[str]] = {}
    for one in instances:
        if one["name"] == "prorl_agent":
            agents.setdefault(one["process_name"], []).append(one["url"])
    models = tuple(i["url"] for i in instances if i["name"] == "prorl_model")
    if settings.agent is None and len(agents) != 1:
        found = ", ".join(sorted(agents)) or "none"
        raise CallerError(f"it must name one of the prorl_agent servers in env.nemo_gym: {found}", field="prorl.agent")
    name = settings.agent or next(iter(agents))
    if name not in agents:
        raise CallerError(
            f"{name!r} is none of the prorl_agent servers in env.nemo_gym: {', '.join(sorted(agents)) or 'none'}",
            field="prorl.agent",
        )
    if not models:
        raise CallerError(
            "env.nemo_gym has no prorl_model, without which tokens are not what was sampled; add "
            "responses_api_models/prorl_model/configs/prorl_model.yaml",
            field="env.nemo_gym.config_paths",
        )
    return Servers(tuple(agents[name]), models, settings.key_env, node)


def already_running(settings: ProrlSettings) -> Servers:
    """Those that the configuration names. Each is asked, so that a wrong address is met before anything starts.

    Raises:
        CallerError: the key is not there, one refuses it, or is something else.
        InfrastructureError: one does not answer.
    """
    servers = Servers(settings.services, settings.models, settings.key_env)
    key = servers.key
    for url in servers.services:
        _call("GET", f"{url}/status", key)
    for url in servers.models:
        _call("GET", f"{url}/v1/backends", key)
    return servers


def with_engines(servers: Servers, engines: Sequence[str | None], run: str) -> Servers:
    """The same, to be told of the engines of a run.

    Raises:
        CallerError: there are no engines that could be called over HTTP.
    """
    urls = tuple(checked_url(url) for url in engines if url)
    if not urls:
        raise CallerError(
            "the generation workers have no HTTP server; set async_engine and expose_http_server",
            field="policy.generation.vllm_cfg",
        )
    return replace(servers, engines=urls, run=run)


def _call(method: str, url: str, key: str | None = None, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **authorization(key)}
    try:
        with urlopen(Request(url, data, headers, method=method), timeout=CALL_S) as response:
            return json.load(response)
    except HTTPError as error:
        detail = f"{method} {url} was answered with {error.code}: {error.read(2000).decode(errors='replace')}"
        if error.code < 500:
            raise CallerError(detail) from error
        raise InfrastructureError(detail, kind=FailureKind.TRANSPORT_UNREACHABLE) from error
    except (URLError, TimeoutError, ConnectionError, HTTPException, ValueError) as error:
        # The last two: half of an answer, or one of something else that listens there.
        raise InfrastructureError(
            f"{method} {url} is not answered: {error}", kind=FailureKind.TRANSPORT_UNREACHABLE
        ) from error
