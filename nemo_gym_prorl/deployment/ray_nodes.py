# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Nodes of a Ray cluster, each with its own Gym deployment.

A node of the fleet is a Ray node with the resource ``prorl_node`` (``ray start --resources='{"prorl_node": 1}'``). On
each node, an actor owns a supervised deployment. Ray detects dead nodes and restarts actors: a pending call of the
actor fails when the actor or its node dies.

The processes of a deployment end with their actor (:mod:`nemo_gym_prorl.processes`), and Ray ends the actors with the
gateway process that created them. An actor uses little memory, so Ray's memory monitor kills other processes first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import aiohttp
import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_gym_prorl.async_tasks import PROCESS_LOOPS, BackgroundLoops
from nemo_gym_prorl.deployment.deployment import GymDeployment, NodeDeployment
from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.fleet.placement import NodeJoined, NodeLeft
from nemo_gym_prorl.http.key_guard import is_loopback
from nemo_gym_prorl.rollout.api.client import RolloutClient


RESOURCE = "prorl_node"
"""Ray resource of nodes that run sandboxes."""

POLL_S = 2.0  # seconds between two listings of Ray's nodes: short compared with the start of a deployment
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Bounds, in seconds, of the doubling backoff before a deployment is restarted, so that failures cause little load."""
LATE_S = 60.0  # seconds; an actor that starts later is reported, since Ray may have no free node for it
_END_S = 30.0  # seconds for ending all deployments on shutdown; Ray then kills the actors

_SHARE_S = 5.0
"""Seconds between two requests that tell a node's model servers how many nodes share their engines: a restarted model
server has lost the number."""

_MODEL = "responses_api_models/prorl_model"
_AGENT = "responses_api_agents/prorl_agent"


class NodeActor:
    """Ray actor that owns one node's deployment."""

    def __init__(self) -> None:
        self._deployment: GymDeployment | None = None
        self._parts = 1

    async def up(self, spec: NodeDeployment) -> str:
        """Start the deployment, and return the URL of its agent.

        Raises:
            DeploymentError: a server does not come up.
            CallerError: the agent would listen beyond loopback without a key.
        """
        await self.end()
        host = ray.util.get_node_ip_address()
        if spec.token is None and not is_loopback(host):
            raise CallerError(
                f"the node's agent would listen on {host} without a key: set PRORL_TOKEN", field="--token"
            )
        agent = {} if spec.token is None else {"control_token": spec.token}
        # An override, because the environment's configuration files are read after the private file and set loopback.
        host_override = f"++{spec.agent}.responses_api_agents.prorl_agent.host={host}"
        context = ray.get_runtime_context()
        node = context.get_node_id()[:12]
        work_dir = spec.log_dir / f"node-{node}" if spec.log_dir else None
        arguments = dict(spec.deployment)
        overrides = [*arguments.pop("overrides", ()), host_override, f"++ray_head_node_address={context.gcs_address}"]
        deployment = GymDeployment(
            **arguments,
            overrides=overrides,
            private={spec.agent: {"responses_api_agents": {"prorl_agent": agent}}},
            supervised=True,
            work_dir=work_dir,
        )
        await deployment.__aenter__()
        self._deployment = deployment
        (instance,) = [instance for instance in deployment.instances.values() if instance.server == _AGENT]
        return instance.url

    async def watch(self) -> NoReturn:
        """Watch the deployment, and tell its model servers how many nodes share the engines. Never returns.

        Raises:
            DeploymentError: Gym itself has ended.
        """
        assert self._deployment is not None, "the deployment is not up"
        sharing = PROCESS_LOOPS.start("share-engines", partial(self._share, self._deployment))
        try:
            await self._deployment.watch()
        finally:
            sharing.cancel()

    async def share(self, parts: int) -> None:
        """Set the number of nodes that share the engines; the model servers receive it within :data:`_SHARE_S`."""
        self._parts = parts

    async def _share(self, deployment: GymDeployment) -> float:
        models = [instance.url for instance in deployment.instances.values() if instance.server == _MODEL]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SHARE_S)) as http:
            for url in models:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with http.post(f"{url}/v1/backends/share", json={"parts": self._parts}):
                        pass
        return _SHARE_S

    async def end(self) -> None:
        if self._deployment is not None:
            deployment, self._deployment = self._deployment, None
            await deployment.__aexit__(None, None, None)


class RayNodes:
    """Node source (:class:`~nemo_gym_prorl.fleet.placement.NodeSource`): the nodes of the Ray cluster of this process.

    Args:
        spec: the deployment of each node.
        say: called with a line when a node does not start.
        loops: background loops for polling Ray and for supervising each node.
    """

    def __init__(self, spec: NodeDeployment, say: Callable[[str], None], loops: BackgroundLoops) -> None:
        self._spec, self._say, self._loops = spec, say, loops
        self._shared = 0
        self._awaited: dict[str, str] = {}  # by node name, the part of the node that has not started
        self._changes: asyncio.Queue[NodeJoined | NodeLeft] = asyncio.Queue()
        self._supervised: dict[str, asyncio.Task[None]] = {}
        self._actors: dict[str, Any] = {}
        self._actor = ray.remote(NodeActor)

    @property
    def present(self) -> Sequence[NodeJoined]:
        """No nodes: each node joins later, once its deployment is up."""
        return ()

    @property
    def awaited(self) -> str:
        """Parts of nodes that have not started yet, in words; empty if every node has joined."""
        if not self._supervised:
            return f"a node with the resource {RESOURCE}"
        return ", ".join(f"{what} of node {name}" for name, what in self._awaited.items())

    async def changes(self) -> AsyncIterator[NodeJoined | NodeLeft]:
        """Yield an event for each node that joins or leaves."""
        polling = self._loops.start("ray-nodes", self._poll)
        try:
            while True:
                yield await self._changes.get()
        finally:
            polling.cancel()

    async def close(self) -> None:
        for task in self._supervised.values():
            task.cancel()
        await asyncio.gather(*self._supervised.values(), return_exceptions=True)
        ends = [_ignore_ray_errors(actor.end.remote()) for actor in self._actors.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await asyncio.gather(*ends)
        for actor in self._actors.values():
            ray.kill(actor)

    async def _poll(self) -> float:
        alive = await asyncio.to_thread(_alive)
        for node in alive:
            if node not in self._supervised:
                self._supervised[node] = self._loops.start("ray-node", partial(self._supervise, node))
        if len(alive) != self._shared:
            self._shared = len(alive)
            for actor in self._actors.values():
                actor.share.remote(self._shared)
        return POLL_S

    async def _supervise(self, node: str) -> None:
        """Run a deployment on a node until the node dies. A node that returns has a new id."""
        name, pause = node[:12], FIRST_PAUSE_S
        if node not in self._actors:  # after a restart of this loop, the old actor still owns the node's resource
            self._actors[node] = self._actor.options(
                num_cpus=0,
                resources={RESOURCE: 1},
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                max_restarts=-1,
            ).remote()
        actor = self._actors[node]
        self._awaited[name] = "the actor"
        started = asyncio.ensure_future(_ignore_ray_errors(actor.share.remote(len(self._actors))))
        if not (await asyncio.wait({started}, timeout=LATE_S))[0]:
            self._say(f"node {name}: its actor has not started in {LATE_S:.0f} s; another fleet may use the node")
        while True:
            joined = False
            self._awaited[name] = "the servers"
            try:
                url = await actor.up.remote(self._spec)
                self._changes.put_nowait(NodeJoined(name, RolloutClient(url, self._spec.token)))
                joined, pause = True, FIRST_PAUSE_S
                del self._awaited[name]
                await actor.watch.remote()
            except RayActorError as error:
                why = f"its actor ended: {_first_line(error)}"
            except (RayError, InfrastructureError, CallerError) as error:
                why = f"its servers are not up: {_first_line(error)}"
            except Exception as error:
                if joined:
                    self._changes.put_nowait(NodeLeft(name, repr(error)))
                raise
            lives = node in await asyncio.to_thread(_alive)
            if joined:
                self._changes.put_nowait(NodeLeft(name, why if lives else "Ray reports the node as dead"))
            elif lives:
                self._say(f"node {name}: {why}")
            if not lives:
                ray.kill(actor)
                del self._actors[node]
                self._awaited.pop(name, None)
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)


def exposed_host() -> str | None:
    """Return a node's address that is not loopback, where an agent without a key would be exposed; else ``None``."""
    return next((host for node in _nodes() if not is_loopback(host := node["NodeManagerAddress"])), None)


def _alive() -> list[str]:
    return [node["NodeID"] for node in _nodes()]


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(RESOURCE, 0) >= 1]


async def _ignore_ray_errors(call: Any) -> None:
    with contextlib.suppress(RayError):
        await call


def _first_line(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    return next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
