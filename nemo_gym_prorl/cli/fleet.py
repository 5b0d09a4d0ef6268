# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl serve --ray`` and ``prorl fleet``: many nodes as one service, until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from nemo_gym_prorl.background import BackgroundLoops
from nemo_gym_prorl.cli.environments import blocks_of
from nemo_gym_prorl.deployment.gym_cli import ray_auth_mode
from nemo_gym_prorl.deployment.gym_log import machine_load
from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.fleet.front import Front, front_app
from nemo_gym_prorl.fleet.nodes import NodeList, Nodes
from nemo_gym_prorl.http.access import check_exposure
from nemo_gym_prorl.http.applications import served
from nemo_gym_prorl.rollout.client import RolloutClient
from nemo_gym_prorl.rollout.journal import Journal


_LISTENS_S = 10.0
"""How long Ray's head may take to answer at all."""


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """How a front is to be had.

    Attributes:
        host, port: where it listens.
        token: its key, and the nodes'.
        keys_file: of clients with keys of their own, besides.
        journal: a folder in which its rollouts outlive it.
    """

    host: str
    port: int
    token: str | None
    keys_file: Path | None = None
    journal: str | None = None


async def over_list(urls: Sequence[str], options: FrontOptions, console: Console) -> None:
    """A front over services that run already.

    Raises:
        CallerError: an address is there twice, others could call the front and it has no key, or its journal cannot
            be opened.
        InfrastructureError: the port is taken.
    """
    nodes = NodeList([RolloutClient(url, options.token) for url in urls], field="URL")
    async with _front(nodes, options, console) as front:
        await _tell_nodes(front, console)


async def over_ray(
    address: str,
    environments: Sequence[str],
    overrides: Sequence[str],
    *,
    policy_url: str | None,
    policy_model: str,
    policy_key: str,
    model_type: str,
    options: FrontOptions,
    log_dir: Path | None,
    console: Console,
) -> None:
    """A deployment on each node of a Ray cluster, and a front before them.

    Args:
        address: of Ray's head, or ``auto``.
        environments, overrides, policy_url, policy_model, policy_key, model_type: as for one deployment; each node has
            its own model server, all with the same engines.
        options: of the front.
        log_dir: folder for a folder with each node's log.
        console: where to print.

    Raises:
        CallerError: the environments have no agent of ours, or several, something has no key that needs one, or the
            journal cannot be opened.
        InfrastructureError: no Ray cluster can be joined there, or the port is taken.
    """
    os.environ["RAY_AUTH_MODE"] = ray_auth_mode()  # read when Ray is imported
    import ray
    from ray.exceptions import AuthenticationError

    from nemo_gym_prorl.deployment.ray_nodes import NodeDeployment, RayNodes, exposed_host

    node = {
        "config_paths": [f"environments/{name}/config.yaml" for name in environments],
        "model_type": model_type,
        "policy_base_url": [] if policy_url is None else policy_url,
        "policy_model_name": policy_model,
        "policy_api_key": policy_key,
        "overrides": [*overrides],
        "folder": Path.cwd(),
    }
    order = NodeDeployment(node, _agent_of(environments), options.token, log_dir=log_dir)

    def say(what: str) -> None:
        console.print(what, markup=False, soft_wrap=True)

    await _require_listener(address)
    try:
        async with saying_what_is_awaited(lambda: f"Ray at {address}", say):
            await asyncio.to_thread(ray.init, address=address, log_to_driver=False, namespace="prorl")
    except (AuthenticationError, ConnectionError, RuntimeError, ValueError) as error:
        token = "if that Ray asks for a token, the same must be here: RAY_AUTH_TOKEN, or the file ~/.ray/auth_token"
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise InfrastructureError(f"cannot join a Ray cluster at {address}: {why}; {token}") from error
    # Ray takes SIGTERM for a crash: it passes it on, and aborts this process three seconds later, whatever that does.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    try:
        if options.token is None and (host := exposed_host()):
            raise CallerError(f"the nodes' agents listen on {host} for everybody: set PRORL_TOKEN", field="--token")
        loops = BackgroundLoops()
        nodes = RayNodes(order, say, loops)
        try:
            async with (
                _front(nodes, options, console, loops) as front,
                saying_what_is_awaited(lambda: nodes.awaited, say),
            ):
                await _tell_nodes(front, console)
        finally:
            console.print("Stopping the nodes' servers")
            await nodes.close()
    finally:
        ray.shutdown()


@contextlib.asynccontextmanager
async def saying_what_is_awaited(awaited: Callable[[], str], say: Callable[[str], None]) -> AsyncIterator[None]:
    """Say every 15 s what is waited for, and how busy the machine is, as long as something is.

    Args:
        awaited: returns what is waited for now, in words; empty for nothing.
        say: is told each line.
    """

    async def tell() -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(deployment.WAITING_S)
            if what := awaited():
                say(f"{time.monotonic() - began:.0f} s, waiting for {what}; {machine_load()}")

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()


async def _require_listener(address: str) -> None:
    """Ray asks for minutes what nobody answers, and nothing interrupts it.

    Raises:
        InfrastructureError: nobody listens there.
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return  # "auto", say
    try:
        async with asyncio.timeout(_LISTENS_S):
            _reader, writer = await asyncio.open_connection(host, int(port))
    except (OSError, TimeoutError) as error:
        why = str(error) or f"no answer in {_LISTENS_S:g} s"
        raise InfrastructureError(f"cannot join a Ray cluster at {address}: {why}") from error
    writer.close()


def agents_of(environments: Sequence[str]) -> list[str]:
    """The names of their agents that are ours."""
    blocks = blocks_of(environments)
    return [name for name, block in blocks.items() if "prorl_agent" in (block.get("responses_api_agents") or {})]


def _agent_of(environments: Sequence[str]) -> str:
    agents = agents_of(environments)
    if len(agents) != 1:
        found = ", ".join(agents) or "none"
        raise CallerError(
            f"a node has one prorl_agent, and these have {found}; to serve several, name one that mixes them",
            field="environment",
        )
    return agents[0]


@contextlib.asynccontextmanager
async def _front(
    nodes: Nodes, options: FrontOptions, console: Console, loops: BackgroundLoops | None = None
) -> AsyncIterator[Front]:
    host, port = options.host, options.port
    check_exposure(host, options.token, field="--token", others=options.keys_file is not None)
    journal = None if options.journal is None else await asyncio.to_thread(Journal, options.journal)
    front = Front(
        nodes, say=lambda what: console.print(what, markup=False, soft_wrap=True), journal=journal, loops=loops
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(front.close)
        app = front_app(front, key=options.token, clients=options.keys_file)
        await front.start()
        try:
            url = await stack.enter_async_context(served(app, host, port))
        except OSError as error:
            raise InfrastructureError(f"can't listen on {host}:{port}: {error.strerror}; choose another") from error
        console.print(f"Front at {url}; Ctrl-C ends it.", soft_wrap=True)
        yield front


async def _tell_nodes(front: Front, console: Console) -> None:
    """Until it is cancelled: which nodes there are, whenever that changes."""
    told: list[str] = []
    while True:
        now = [f"{view.node} {'up' if view.usable else 'away'} at {view.url}" for view in front.dispatcher.views()]
        if now != told:
            slots = sum(view.run_slots or 0 for view in front.dispatcher.views() if view.usable)
            console.print(f"{len(now)} nodes, {slots} slots of RUN", *now, sep="\n  ", markup=False, soft_wrap=True)
            told = now
        await asyncio.sleep(1)
