# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl serve`` and ``prorl fleet``: environments as a service until Ctrl-C, on one machine or on many nodes.

``prorl serve`` runs a supervised deployment, which restarts dead servers at their address. ``prorl serve --ray`` runs
one deployment per node of a Ray cluster and a gateway. ``prorl fleet`` runs a gateway to services that exist already.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from hydra.core.override_parser.types import Quote, QuotedString
from rich.console import Console
from rich.table import Table

from nemo_gym_prorl.async_tasks import BackgroundLoops
from nemo_gym_prorl.cli.environments import check_overrides, server_blocks
from nemo_gym_prorl.cli.service import DEFAULT_HEAD
from nemo_gym_prorl.deployment import deployment, gym_cli
from nemo_gym_prorl.deployment.deployment import GymDeployment, Instance, NodeDeployment, ServerDeath
from nemo_gym_prorl.deployment.gym_cli import machine_load, ray_auth_mode
from nemo_gym_prorl.failures import CallerError, InfrastructureError, suggest
from nemo_gym_prorl.fleet.gateway import FleetGateway, gateway_app
from nemo_gym_prorl.fleet.placement import NodeList, NodeSource
from nemo_gym_prorl.http.applications import served
from nemo_gym_prorl.http.key_guard import check_exposure
from nemo_gym_prorl.http.keys import authorization
from nemo_gym_prorl.policy.engines.engine import checked_url
from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.rollout.storage.journal import Journal
from nemo_gym_prorl.servers.task_sandboxes import PROGRESS


_POLICY_TIMEOUT_S = 5.0  # only for a warning, so short


async def serve(
    words: Sequence[str],
    *,
    policy_url: str | None,
    policy_model: str,
    policy_key: str,
    tokenizer: str | None,
    model_type: str,
    head_port: int,
    log_dir: Path | None,
    ray: str | None,
    gateway: GatewayOptions,
    console: Console,
) -> None:
    """Serve environments until cancelled; leave no process behind.

    Args:
        words: names of environments, and Hydra overrides (words with ``=``).
        policy_url: URL of the inference endpoint, ending in ``/v1``; ``None`` if runs add their engines later.
        tokenizer: absolute folder or Hugging Face name of the tokenizer.
        log_dir: folder for the log. Default: a temporary folder, removed unless there was an error.
        ray: address of a Ray cluster whose nodes serve; ``None`` for this machine alone.
        gateway: options of the gateway to those nodes.

    Raises:
        CallerError: no environment or an unknown one, an invalid override, a port in use, or a missing or invalid
            endpoint.
        DeploymentError: the servers do not start, or Gym itself dies.
    """
    environments = [word for word in words if "=" not in word]
    if not environments:
        raise CallerError("give at least one environment; `gym list environments` lists them", field="environment")
    known = await asyncio.to_thread(gym_cli.environment_names)
    if unknown := [name for name in environments if name not in known]:
        raise CallerError(f"no environment {unknown[0]!r}{suggest(unknown[0], known)}", field="environment")
    if policy_url is None and model_type != "prorl_model":
        raise CallerError(f"is required: {model_type} cannot add engines later", field="--policy-url")
    for option, given in (("keys_file", gateway.keys_file), ("journal", gateway.journal)):
        if given is not None and ray is None:
            setting = f"++AGENT.responses_api_agents.prorl_agent.{option}"
            complaint = f"is an option of the gateway and requires --ray; without --ray set {setting}"
            raise CallerError(complaint, field=f"--{option.replace('_', '-')}")
    overrides = [word for word in words if "=" in word]
    if tokenizer is not None:
        if model_type != "prorl_model":
            raise CallerError(f"is a setting of prorl_model; {model_type} has none", field="--tokenizer")
        quoted = QuotedString(tokenizer, Quote.single).with_quotes()
        overrides.insert(0, f"++policy_model.responses_api_models.prorl_model.policy.tokenizer={quoted}")
    if ray is not None:
        os.environ["RAY_AUTH_MODE"] = ray_auth_mode()  # Ray reads the variable on import, also by server modules
    await asyncio.to_thread(check_overrides, environments, model_type, overrides)
    if policy_url is not None:
        checked_url(policy_url, "--policy-url")
    try:
        socket.create_server(("127.0.0.1", head_port)).close()
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        why = "is in use, perhaps by another deployment" if in_use else f"is not available ({error.strerror})"
        raise CallerError(f"port {head_port} {why}; choose another", field="--head-port") from error
    if policy_url is not None and (warning := await policy_warning(policy_url, policy_model, policy_key)):
        # A warning only, because engines may start later than the service.
        console.print(f"Warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    settings: dict[str, Any] = {
        "config_paths": [f"environments/{name}/config.yaml" for name in environments],
        "model_type": model_type,
        "policy_base_url": [] if policy_url is None else policy_url,
        "policy_model_name": policy_model,
        "policy_api_key": policy_key,
        "overrides": overrides,
    }
    if ray is not None:
        node = NodeDeployment(settings | {"folder": Path.cwd()}, _agent_of(environments), gateway.token, log_dir)
        await serve_ray(ray, node, gateway, console)
        return
    agents = [] if gateway.token is None else agents_of(environments)
    if gateway.token is not None and not agents:
        raise CallerError(
            f"{', '.join(environments)} has no prorl_agent, which alone takes a key; unset PRORL_TOKEN",
            field="--token",
        )
    key = {"responses_api_agents": {"prorl_agent": {"control_token": gateway.token}}}
    private = dict.fromkeys(agents, key)
    deployment = GymDeployment(**settings, private=private, work_dir=log_dir, head_port=head_port, supervised=True)
    await _run_deployment(deployment, console)


async def policy_warning(url: str, model: str, key: str) -> str | None:
    """Return a problem of a policy's endpoint: unreachable, wrong key or wrong model; ``None`` if none is found."""
    models = f"{url.rstrip('/')}/models"
    timeout = aiohttp.ClientTimeout(total=_POLICY_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=authorization(key)) as http,
            http.get(models) as answer,
        ):
            listing = await answer.json(content_type=None) if answer.status == 200 else {}
        if answer.status in (401, 403):
            return f"{models} refuses the key (HTTP {answer.status})"
        served = [str(card["id"]) for card in listing.get("data", [])]
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"{models} does not answer: {str(error) or 'timeout'}"
    except (ValueError, AttributeError, KeyError, TypeError):
        return None  # some endpoints do not list their models
    return f"{url} serves {', '.join(served)}, not {model}" if served and model not in served else None


async def _run_deployment(deployment: GymDeployment, console: Console) -> None:
    console.print(f"Starting Gym servers (log: {deployment.log.path})", markup=False, soft_wrap=True)

    def report_death(death: ServerDeath) -> None:
        progress(restart_report(death, deployment.instances.values()))

    def progress(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    reporting = asyncio.create_task(deployment.report_start(progress, PROGRESS))
    async with deployment:
        reporting.cancel()
        table = Table("Server", "", "URL", box=None, pad_edge=False)
        for instance in deployment.instances.values():
            table.add_row(instance.name, instance.server, instance.url)
        table.add_row("head server", "", deployment.cli.head_url)
        console.print(table)
        console.print(f"Ready after {deployment.start_s:.0f} s; press Ctrl-C to stop.")
        if deployment.cli.head_url != DEFAULT_HEAD:
            console.print(f"In other terminals first: export PRORL_HEAD={deployment.cli.head_url}", soft_wrap=True)
        try:
            await deployment.watch(report_death)
        finally:
            console.print("Stopping Gym servers")


def restart_report(death: ServerDeath, instances: Iterable[Instance]) -> str:
    """Return a line about the end of one of a deployment's servers; for a ``prorl_model``, with what it has lost."""
    line = f"{death.name} ended ({death.how}) after {death.lived_s:.0f} s; restarting in {death.pause_s:g} s"
    if not any(one.name == death.name and one.server.endswith("/prorl_model") for one in instances):
        return line
    lost = "pauses, weight labels and engines that were added are lost"
    return f"{line}. Warning: {lost}; the trainer must add and pause its engines and announce the weights again"


_RAY_CONNECT_TIMEOUT_S = 10.0  # for a TCP connection to Ray's head, also on a busy network


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Address, keys and journal of a gateway to several services."""

    host: str
    port: int
    token: str | None
    keys_file: Path | None = None
    journal: str | None = None


async def serve_gateway(urls: Sequence[str], options: GatewayOptions, console: Console) -> None:
    """Run a gateway to services that exist already, until cancelled.

    Raises:
        CallerError: a URL is invalid or occurs twice, the gateway would listen beyond loopback without a key, or the
            journal cannot be opened.
        InfrastructureError: the port is in use.
    """
    nodes = NodeList([RolloutClient(url, options.token) for url in urls], field="URL")
    async with _gateway(nodes, options, console) as front:
        await _report_nodes(front, console)


async def serve_ray(address: str, node: NodeDeployment, options: GatewayOptions, console: Console) -> None:
    """Run a deployment on each node of a Ray cluster and a gateway to all of them, until cancelled.

    Args:
        address: address of Ray's head, or ``auto``.
        node: deployment of each node. Each node has its own model server; all use the same engines.
        options: options of the gateway.

    Raises:
        CallerError: a key is missing, or the journal cannot be opened.
        InfrastructureError: the Ray cluster cannot be joined, or the port is in use.
    """
    import ray
    from ray.exceptions import AuthenticationError

    from nemo_gym_prorl.deployment.ray_nodes import RayNodes, exposed_host

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    await _check_ray_listens(address)
    try:
        async with report_waiting(lambda: f"Ray at {address}", say):
            await asyncio.to_thread(ray.init, address=address, log_to_driver=False, namespace="prorl")
    except (AuthenticationError, ConnectionError, RuntimeError, ValueError) as error:
        token = "a cluster with a token needs the same token here (RAY_AUTH_TOKEN, or the file ~/.ray/auth_token)"
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise InfrastructureError(f"cannot join a Ray cluster at {address}: {why}; {token}") from error
    # Ray's own handler aborts this process three seconds after SIGTERM, before the nodes are stopped; replace it.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    try:
        if options.token is None and (host := exposed_host()):
            raise CallerError(
                f"the nodes' agents would listen on {host} without a key: set PRORL_TOKEN", field="--token"
            )
        loops = BackgroundLoops()
        nodes = RayNodes(node, say, loops)
        try:
            async with (
                _gateway(nodes, options, console, loops) as front,
                report_waiting(lambda: nodes.awaited, say),
            ):
                await _report_nodes(front, console)
        finally:
            console.print("Stopping the nodes' servers")
            await nodes.close()
    finally:
        ray.shutdown()


@contextlib.asynccontextmanager
async def report_waiting(awaited: Callable[[], str], say: Callable[[str], None]) -> AsyncIterator[None]:
    """Report the unfinished parts of a start every 15 s, with the load of the machine.

    Args:
        awaited: returns the unfinished parts of the start, in words; empty if there are none.
        say: called with each line.
    """

    async def report() -> None:
        start = time.monotonic()
        while True:
            await asyncio.sleep(deployment.WAITING_S)
            if what := awaited():
                say(f"{time.monotonic() - start:.0f} s, waiting for {what}; {machine_load()}")

    reporting = asyncio.create_task(report())
    try:
        yield
    finally:
        reporting.cancel()


async def _check_ray_listens(address: str) -> None:
    """Check for a listener first: ``ray.init`` tries an unreachable address for minutes and cannot be interrupted."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return  # an address such as "auto"
    try:
        async with asyncio.timeout(_RAY_CONNECT_TIMEOUT_S):
            _reader, writer = await asyncio.open_connection(host, int(port))
    except (OSError, TimeoutError) as error:
        why = str(error) or f"no answer in {_RAY_CONNECT_TIMEOUT_S:g} s"
        raise InfrastructureError(f"cannot join a Ray cluster at {address}: {why}") from error
    writer.close()


def agents_of(environments: Sequence[str]) -> list[str]:
    """Return the instance names of the environments' ``prorl_agent`` servers."""
    blocks = server_blocks(environments)
    return [name for name, block in blocks.items() if "prorl_agent" in (block.get("responses_api_agents") or {})]


def _agent_of(environments: Sequence[str]) -> str:
    agents = agents_of(environments)
    if len(agents) != 1:
        found = ", ".join(agents) or "none"
        raise CallerError(
            f"--ray needs exactly one prorl_agent, found {found}; to serve several environments, use a mixture",
            field="environment",
        )
    return agents[0]


@contextlib.asynccontextmanager
async def _gateway(
    nodes: NodeSource, options: GatewayOptions, console: Console, loops: BackgroundLoops | None = None
) -> AsyncIterator[FleetGateway]:
    host, port = options.host, options.port
    check_exposure(host, options.token, field="--token", others=options.keys_file is not None)
    journal = None if options.journal is None else await asyncio.to_thread(Journal, options.journal)
    front = FleetGateway(
        nodes, report=lambda what: console.print(what, markup=False, soft_wrap=True), journal=journal, loops=loops
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(front.close)
        app = gateway_app(front, key=options.token, clients=options.keys_file)
        await front.start()
        try:
            url = await stack.enter_async_context(served(app, host, port))
        except OSError as error:
            raise InfrastructureError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another port"
            ) from error
        console.print(f"Gateway at {url}; press Ctrl-C to stop.", soft_wrap=True)
        yield front


async def _report_nodes(front: FleetGateway, console: Console) -> None:
    """Print the nodes whenever they change, until cancelled."""
    printed: list[str] = []
    while True:
        views = front.dispatcher.views()
        lines = [f"{view.node} {'up' if view.usable else 'away'} at {view.url}" for view in views]
        if lines != printed:
            slots = sum(view.run_slots or 0 for view in views if view.usable)
            console.print(f"{len(lines)} nodes, {slots} RUN slots", *lines, sep="\n  ", markup=False, soft_wrap=True)
            printed = lines
        await asyncio.sleep(1)
