# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Servers behind a training run: addresses, registered engines, and announced weight versions.

With ``rollouts: gym`` NeMo RL's actor has started the servers with the trainer's engines, and its head server lists
the addresses. With ``rollouts: service`` the servers run already and may serve several trainers. The trainer registers
its engines at the model servers as backends of its own training run, and removes these when the run ends.

Calls are small and rare, so they block; callers with an event loop run them in a thread.
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
from nemo_gym_prorl.nemo_rl.configuration import ProrlSettings
from nemo_gym_prorl.policy.engines.engine import checked_url
from nemo_gym_prorl.rollout.api.client import ApiError, RolloutClient


LOG = logging.getLogger(__name__)

CALL_S = 30.0  # limit for the response of a server; a loaded server may pause for many seconds
ANNOUNCEMENT_TRIES = 3  # few, because the next weights wait meanwhile; see Servers.announce for the last failure
_MAX_CONCURRENT_CALLS = 64  # threads, each of which may wait for CALL_S
PAUSE_S = 1.0  # between two tries of an announcement, for a server that restarts


@dataclass(frozen=True, slots=True)
class Servers:
    """Addresses of the rollout services and of the model servers behind them.

    Attributes:
        services: URLs of ``prorl_agent`` servers.
        models: URLs of ``prorl_model`` servers.
        key_env: name of the environment variable with the servers' key; the key itself is not part of the object.
        node: Ray node id of the only node that can reach the servers; ``None``: every node can.
        engines: URLs of the trainer's engines to register at the model servers; empty if the servers have engines.
        run: run name of the engines. Each start of a trainer needs its own name, since equal version numbers of two
            starts mean different weights.
    """

    services: tuple[str, ...]
    models: tuple[str, ...]
    key_env: str | None = None
    node: str | None = None
    engines: tuple[str, ...] = ()
    run: str | None = None

    @property
    def key(self) -> str | None:
        """Control token of the servers.

        Raises:
            CallerError: the environment variable is not set.
        """
        if self.key_env is None:
            return None
        key = os.environ.get(self.key_env)
        if not key:
            raise CallerError(
                f"the environment variable {self.key_env} is not set; export the control token of the servers",
                field="prorl.key_env",
            )
        return key

    def announce(self, version: int, *, needed: bool = False) -> None:
        """Announce the engines' weight version to the model servers, without draining turns in flight.

        The engines are registered again at a model server that was restarted. A failed announcement is repeated unless
        the server refused it, and then given up: labels inform readers of rows, and training uses its own versions.

        Args:
            version: weight version of the engines.
            needed: whether a failure is an error, because no engine is registered yet.

        Raises:
            CallerError: with ``needed``, a server refuses the announcement, or the key is not set.
            InfrastructureError: with ``needed``, a server does not answer.
        """

        def announce(url: str) -> None:
            try:
                self._announce_at(url, str(version))
            except RolloutError as error:
                if needed:
                    raise
                LOG.warning("could not announce weights %d, labels of rows may be old: %s", version, error)

        self._call_all_models(announce)

    def cancel_all(self, client: str) -> None:
        """Cancel a client's rollouts and wait until their sandboxes are gone, at most ``CLOSE_S``; log failures."""

        async def cancel() -> None:
            await asyncio.gather(*(self._cancel_at(url, client) for url in self.services))

        asyncio.run(cancel())

    async def _cancel_at(self, url: str, client: str) -> None:
        try:
            async with asyncio.timeout(CLOSE_S), RolloutClient(url, self.key) as service:
                running = [job.id async for job in service.every() if job.client == client and not job.state.terminal]
                for first in range(0, len(running), 1000):
                    await service.cancel(running[first : first + 1000])
        except (ApiError, RolloutError, aiohttp.ClientError, OSError, ValueError) as error:
            LOG.warning("rollouts of client %s at %s may go on: %s", client, url, error or type(error).__name__)

    def withdraw(self) -> None:
        """Remove the engines that :meth:`announce` registered from the model servers; log failures."""

        def withdraw(url: str) -> None:
            try:
                _call("DELETE", self._backends(url), self.key)
            except RolloutError as error:
                LOG.warning("engines of this trainer remain registered at %s: %s", url, error)

        if self.engines:
            self._call_all_models(withdraw)

    def _call_all_models(self, call: Callable[[str], None]) -> None:
        """Call all model servers concurrently, so that a server that hangs does not delay the others."""
        with ThreadPoolExecutor(min(len(self.models), _MAX_CONCURRENT_CALLS) or 1) as threads:
            for _ in threads.map(call, self.models):
                pass

    def _announce_at(self, url: str, version: str) -> None:
        for _ in range(ANNOUNCEMENT_TRIES - 1):
            try:
                self._label(url, version)
            except InfrastructureError as error:
                LOG.warning("announcing weights %s again: %s", version, error)
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
        return f"{url}/v1/backends?run={quote(self.run or '', safe='')}"


def gym_servers(gym: Any, settings: ProrlSettings) -> Servers:
    """Return the servers that NeMo RL's Gym actor has started, or in newer versions several actors (shards).

    Args:
        gym: handle of the actor, or NeMo RL's object with the handles of the shards.
        settings: the block ``prorl:``, which names the agent if there are several.

    Raises:
        CallerError: the agent or a model server is missing, or the servers of several nodes listen on loopback.
    """
    import ray

    def address(actor: Any) -> tuple[str, int, str]:
        # Ray pickles a local function by value, so the actor's interpreter need not have this package.
        import ray

        return actor.node_ip, actor.head_server_port, ray.get_runtime_context().get_node_id()

    actors = getattr(gym, "all_handles", None) or [gym]
    # Shards may share a head server, which would list its servers once per shard.
    heads = dict.fromkeys(ray.get([actor.__ray_call__.remote(address) for actor in actors]))
    instances = [one for host, port, _ in heads for one in _call("GET", f"http://{host}:{port}/server_instances")]
    first, *others = {node for *_, node in heads}
    servers = select_servers(instances, settings, first)
    if others and any(is_loopback(urlsplit(url).hostname) for url in servers.services + servers.models):
        raise CallerError(
            f"the shards are on {1 + len(others)} nodes, and their servers listen on loopback; give each server a "
            "host and a control_token, or use rollouts: service",
            field="env.nemo_gym.shards",
        )
    return replace(servers, node=None) if others else servers


def select_servers(instances: Sequence[Mapping[str, Any]], settings: ProrlSettings, node: str | None) -> Servers:
    """Return the agents and model servers among the servers of a Gym deployment.

    Args:
        instances: servers as Gym's head server lists them.
        settings: the block ``prorl:``, which names the agent if there are several.
        node: Ray node id of the only node that can reach the servers.

    Raises:
        CallerError: the agent or a model server is missing.
    """
    agents: dict[str, list[str]] = {}
    for one in instances:
        if one["name"] == "prorl_agent":
            agents.setdefault(one["process_name"], []).append(one["url"])
    models = tuple(i["url"] for i in instances if i["name"] == "prorl_model")
    if settings.agent is None and len(agents) != 1:
        found = ", ".join(sorted(agents)) or "none"
        raise CallerError(f"must name one of the prorl_agent servers in env.nemo_gym: {found}", field="prorl.agent")
    name = settings.agent or next(iter(agents))
    if name not in agents:
        raise CallerError(
            f"{name!r} is no prorl_agent server in env.nemo_gym; name one of: {', '.join(sorted(agents)) or 'none'}",
            field="prorl.agent",
        )
    if not models:
        raise CallerError(
            "env.nemo_gym has no prorl_model, which keeps the sampled tokens; add "
            "responses_api_models/prorl_model/configs/prorl_model.yaml",
            field="env.nemo_gym.config_paths",
        )
    return Servers(tuple(agents[name]), models, settings.key_env, node)


def configured_servers(settings: ProrlSettings) -> Servers:
    """Return the servers that the configuration names, after one request to each that verifies address and key.

    Raises:
        CallerError: the key is not set, or a server refuses the request.
        InfrastructureError: a server does not answer.
    """
    servers = Servers(settings.services, settings.models, settings.key_env)
    key = servers.key
    for url in servers.services:
        _call("GET", f"{url}/status", key)
    for url in servers.models:
        _call("GET", f"{url}/v1/backends", key)
    return servers


def with_engines(servers: Servers, engines: Sequence[str | None], run: str) -> Servers:
    """Return the servers with the engines that :meth:`Servers.announce` registers.

    Args:
        servers: servers without engines.
        engines: base URLs of the generation workers; ``None`` for a worker without an HTTP server.
        run: run name of the engines.

    Raises:
        CallerError: no engine has an HTTP server.
    """
    urls = tuple(checked_url(url) for url in engines if url)
    if not urls:
        raise CallerError(
            "the generation workers have no HTTP server; set async_engine and expose_http_server to true",
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
        detail = f"{method} {url} failed with status {error.code}: {error.read(2000).decode(errors='replace')}"
        if error.code < 500:
            raise CallerError(detail) from error
        raise InfrastructureError(detail, kind=FailureKind.TRANSPORT_UNREACHABLE) from error
    except (URLError, TimeoutError, ConnectionError, HTTPException, ValueError) as error:
        # HTTPException and ValueError: a truncated response, or a response that is not HTTP or not JSON.
        raise InfrastructureError(
            f"{method} {url} failed without a response: {error}", kind=FailureKind.TRANSPORT_UNREACHABLE
        ) from error
