# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Nodes of a Ray cluster, each with a Gym deployment of its own.

Who is there, who has died and what is started again are Ray's to say: a node is one that has the resource
``prorl_node`` (``ray start --resources='{"prorl_node": 1}'``), and on each an actor keeps a supervised deployment. A
call of that actor which never returns is the notice of its death, be it the actor's or the node's. What the actor has
started ends with it, however it ends (:mod:`nemo_gym_prorl.processes`); and Ray ends actors with the process whose
they are, the front.

The actor itself does next to nothing, so that Ray's memory monitor has no reason to choose it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_gym_prorl.background import PROCESS_LOOPS, BackgroundLoops
from nemo_gym_prorl.deployment.deployment import GymDeployment
from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.fleet.nodes import NodeJoined, NodeLeft
from nemo_gym_prorl.http.key_guard import is_loopback
from nemo_gym_prorl.rollout.api.client import RolloutClient


RESOURCE = "prorl_node"
"""What a node has that is to run sandboxes."""

LOOK_S = 2.0
"""So often Ray is asked which nodes there are."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Before a node on which the servers did not come up is tried again."""
LATE_S = 60.0
"""How long an actor may take to start in silence."""
_END_S = 30.0

_SHARE_S = 5.0
"""So often a node's model servers are told with how many others they share the engines."""

_MODEL = "responses_api_models/prorl_model"
_AGENT = "responses_api_agents/prorl_agent"


@dataclass(frozen=True, slots=True)
class Order:
    """What each node is to run.

    Attributes:
        deployment: arguments of :class:`~.deployment.GymDeployment`.
        agent: instance name of its ``prorl_agent``.
        token: the key of that agent, without which none of it is to be had beyond loopback.
        log_dir: folder for a folder with each node's log; ``None`` for temporary ones.
    """

    deployment: Mapping[str, Any]
    agent: str
    token: str | None
    log_dir: Path | None = None


class NodeActor:
    """Keeps one node's deployment; an actor of Ray."""

    def __init__(self) -> None:
        self._deployment: GymDeployment | None = None
        self._parts = 1

    async def up(self, order: Order) -> str:
        """Start it; gives the URL of its agent.

        Raises:
            DeploymentError: a server does not come up.
            CallerError: it would be open to everybody, see ``serving/access.py``.
        """
        await self.end()
        host = ray.util.get_node_ip_address()
        if order.token is None and not is_loopback(host):
            raise CallerError(
                f"the node's agent would listen on {host} for everybody: set PRORL_TOKEN", field="--token"
            )
        agent = {} if order.token is None else {"control_token": order.token}
        # Not in the private file: files that an environment's own names are read after that, and say "loopback".
        listens = f"++{order.agent}.responses_api_agents.prorl_agent.host={host}"
        context = ray.get_runtime_context()
        node = context.get_node_id()[:12]
        work_dir = order.log_dir / f"node-{node}" if order.log_dir else None
        arguments = dict(order.deployment)
        overrides = [*arguments.pop("overrides", ()), listens, f"++ray_head_node_address={context.gcs_address}"]
        deployment = GymDeployment(
            **arguments,
            overrides=overrides,
            private={order.agent: {"responses_api_agents": {"prorl_agent": agent}}},
            supervised=True,
            work_dir=work_dir,
        )
        await deployment.__aenter__()
        self._deployment = deployment
        (found,) = [one for one in deployment.instances.values() if one.server == _AGENT]
        return found.url

    async def watch(self) -> NoReturn:
        """Never returns.

        Raises:
            DeploymentError: Gym itself has ended.
        """
        assert self._deployment is not None, "it is up"
        sharing = PROCESS_LOOPS.start("share-engines", partial(self._share, self._deployment))
        try:
            await self._deployment.watch()
        finally:
            sharing.cancel()

    async def share(self, parts: int) -> None:
        """So many nodes sample from the same engines."""
        self._parts = parts

    async def _share(self, deployment: GymDeployment) -> float:
        """Tell the model servers, again and again: one that is started again has forgotten it."""
        models = [one.url for one in deployment.instances.values() if one.server == _MODEL]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SHARE_S)) as http:
            for url in models:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with http.post(f"{url}/v1/backends/share", json={"parts": self._parts}):
                        pass
        return _SHARE_S

    async def end(self) -> None:
        """End the deployment."""
        if self._deployment is not None:
            deployment, self._deployment = self._deployment, None
            await deployment.__aexit__(None, None, None)


class RayNodes:
    """A source of nodes (:class:`~nemo_gym_prorl.fleet.nodes.NodeSource`): those of the Ray that this process is
    connected to.

    Args:
        order: what each is to run.
        say: told what becomes of them.
        loops: supervises the look at Ray, and the keeping of each node.
    """

    def __init__(self, order: Order, say: Callable[[str], None], loops: BackgroundLoops) -> None:
        self._order, self._say, self._loops = order, say, loops
        self._shared = 0
        self._awaited: dict[str, str] = {}
        """Return what each node still waits for before it joins, by node name."""
        self._changes: asyncio.Queue[NodeJoined | NodeLeft] = asyncio.Queue()
        self._kept: dict[str, asyncio.Task[None]] = {}
        self._actors: dict[str, Any] = {}
        self._actor = ray.remote(NodeActor)

    @property
    def present(self) -> Sequence[NodeJoined]:
        """None: each takes its time to come up."""
        return ()

    @property
    def awaited(self) -> str:
        """Return what the start waits for, in words; empty if every node has joined."""
        if not self._kept:
            return f"a node with the resource {RESOURCE}"
        return ", ".join(f"{what} of node {name}" for name, what in self._awaited.items())

    async def changes(self) -> AsyncIterator[NodeJoined | NodeLeft]:
        """NodeSource come and go."""
        looking = self._loops.start("ray-nodes", self._look)
        try:
            while True:
                yield await self._changes.get()
        finally:
            looking.cancel()

    async def close(self) -> None:
        """End all deployments."""
        for task in self._kept.values():
            task.cancel()
        await asyncio.gather(*self._kept.values(), return_exceptions=True)
        ends = [_quietly(actor.end.remote()) for actor in self._actors.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await asyncio.gather(*ends)
        for actor in self._actors.values():
            ray.kill(actor)

    async def _look(self) -> float:
        alive = await asyncio.to_thread(_alive)
        for node in alive:
            if node not in self._kept:
                self._kept[node] = self._loops.start("ray-node", partial(self._keep, node))
        if len(alive) != self._shared:
            self._shared = len(alive)
            for actor in self._actors.values():
                actor.share.remote(self._shared)
        return LOOK_S

    async def _keep(self, node: str) -> None:
        """Have a deployment on a node as long as that lives. A node that has died comes back as another one."""
        name, pause = node[:12], FIRST_PAUSE_S
        if node not in self._actors:  # after a restart of this loop the actor holds the node's resource already
            self._actors[node] = self._actor.options(
                num_cpus=0,
                resources={RESOURCE: 1},
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                max_restarts=-1,
            ).remote()
        actor = self._actors[node]
        self._awaited[name] = "the actor"
        begun = asyncio.ensure_future(_quietly(actor.share.remote(len(self._actors))))
        if not (await asyncio.wait({begun}, timeout=LATE_S))[0]:
            self._say(f"node {name}: its actor does not start; has another fleet this node, or is it busy?")
        while True:
            joined = False
            self._awaited[name] = "the servers"
            try:
                url = await actor.up.remote(self._order)
                self._changes.put_nowait(NodeJoined(name, RolloutClient(url, self._order.token)))
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
                self._changes.put_nowait(NodeLeft(name, why if lives else "Ray says that it is dead"))
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
    """The address of a node at which an agent without a key would be open to others; ``None`` if all are loopback."""
    return next((host for node in _nodes() if not is_loopback(host := node["NodeManagerAddress"])), None)


def _alive() -> list[str]:
    return [node["NodeID"] for node in _nodes()]


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(RESOURCE, 0) >= 1]


async def _quietly(call: Any) -> None:
    with contextlib.suppress(RayError):
        await call


def _first_line(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    return next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
