# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl serve``: environments as a service, until it is told to end.

The deployment of the demonstration, kept alive: a server that dies is started again at its address, and what is lost
with it is the business of the rollouts that used it.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.table import Table

from nemo_gym_prorl.cli import fleet
from nemo_gym_prorl.cli.environments import check_overrides
from nemo_gym_prorl.deployment import config_files
from nemo_gym_prorl.deployment.deployment import GymDeployment, ServerDeath
from nemo_gym_prorl.failures import CallerError, suggest
from nemo_gym_prorl.http.keys import authorization
from nemo_gym_prorl.policy.engines.engine import checked_url
from nemo_gym_prorl.servers.task_sandboxes import PROGRESS


_POLICY_S = 5.0


async def serve(
    words: Sequence[str],
    *,
    policy_url: str | None,
    policy_model: str,
    policy_key: str,
    model_type: str,
    head_port: int,
    log_dir: Path | None,
    ray: str | None,
    front: fleet.FrontOptions,
    console: Console,
) -> None:
    """Start environments and look after them until it is cancelled; no process is left then.

    Args:
        words: names of environments, and Hydra overrides (what has an ``=``).
        policy_url: the inference endpoint, ending in ``/v1``; ``None`` if engines come with the runs that use them.
        policy_model: the model's name there.
        policy_key: its key.
        model_type: Gym's model server, as ``--model-type`` takes it.
        head_port: where Gym's head server listens.
        log_dir: folder for the log. Default: a temporary one, removed at a clean end.
        ray: address of a Ray cluster, on whose nodes they are to be started; ``None`` for this machine alone.
        front: of the front before those nodes.
        console: where to print.

    Raises:
        CallerError: no environment was named, an override can't be one, the head server's port is taken, or the model
            server needs an endpoint, or has one that is no URL.
        DeploymentError: the servers do not come up, or Gym itself dies.
    """
    environments = [word for word in words if "=" not in word]
    if not environments:
        raise CallerError("name at least one; `gym list environments` shows them", field="environment")
    known = await asyncio.to_thread(config_files.environment_names)
    if unknown := [name for name in environments if name not in known]:
        raise CallerError(f"there is no {unknown[0]}{suggest(unknown[0], known)}", field="environment")
    if policy_url is None and model_type != "prorl_model":
        raise CallerError(f"{model_type} cannot be given engines later: name its endpoint", field="--policy-url")
    for option, given in (("keys_file", front.keys_file), ("journal", front.journal)):
        if given is not None and ray is None:
            setting = f"++AGENT.responses_api_agents.prorl_agent.{option}"
            complaint = f"is a front's, so it needs --ray; one service has it as {setting}"
            raise CallerError(complaint, field=f"--{option.replace('_', '-')}")
    overrides = [word for word in words if "=" in word]
    await asyncio.to_thread(check_overrides, environments, model_type, overrides)
    if policy_url is not None:
        checked_url(policy_url, "--policy-url")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", head_port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "is taken, by another deployment" if taken else f"can't be listened on ({error.strerror})"
            raise CallerError(f"port {head_port} {why}; choose another", field="--head-port") from error
    if policy_url is not None and (trouble := await policy_trouble(policy_url, policy_model, policy_key)):
        # No error: engines may come later than who uses them.
        console.print(f"The policy: {trouble}", style="yellow", markup=False, soft_wrap=True)
    if ray is not None:
        await fleet.over_ray(
            ray,
            environments,
            overrides,
            policy_url=policy_url,
            policy_model=policy_model,
            policy_key=policy_key,
            model_type=model_type,
            options=front,
            log_dir=log_dir,
            console=console,
        )
        return
    agents = [] if front.token is None else fleet.agents_of(environments)
    if front.token is not None and not agents:
        raise CallerError(
            f"no agent of {', '.join(environments)} asks for one; leave out that and PRORL_TOKEN", field="--token"
        )
    key = {"responses_api_agents": {"prorl_agent": {"control_token": front.token}}}
    deployment = GymDeployment(
        private=dict.fromkeys(agents, key),
        config_paths=[f"environments/{name}/config.yaml" for name in environments],
        model_type=model_type,
        policy_base_url=[] if policy_url is None else policy_url,
        policy_model_name=policy_model,
        policy_api_key=policy_key,
        overrides=overrides,
        work_dir=log_dir,
        head_port=head_port,
        supervised=True,
    )
    await _look_after(deployment, console)


async def policy_trouble(url: str, model: str, key: str) -> str | None:
    """What is wrong with a policy's endpoint now; ``None`` if nothing that can be told."""
    models = f"{url.rstrip('/')}/models"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_POLICY_S), headers=authorization(key)) as http,
            http.get(models) as answer,
        ):
            told = await answer.json(content_type=None) if answer.status == 200 else {}
        if answer.status in (401, 403):
            return f"{models} refuses the key (HTTP {answer.status})"
        served = [str(one["id"]) for one in told.get("data", [])]
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"nothing answers at {models}: {str(error) or 'no answer in time'}"
    except (ValueError, AttributeError, KeyError, TypeError):
        return None  # not each endpoint lists its models
    return f"{url} serves {', '.join(served)}, not {model}" if served and model not in served else None


async def _look_after(deployment: GymDeployment, console: Console) -> None:
    console.print(f"Starting Gym servers (log: {deployment.log.path})", markup=False, soft_wrap=True)

    def say(death: ServerDeath) -> None:
        console.print(
            f"{death.name} ended ({death.how}) after {death.lived_s:.0f} s; started again in {death.pause_s:g} s",
            markup=False,
            soft_wrap=True,
        )

    def progress(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    telling = asyncio.create_task(deployment.report_start(progress, PROGRESS))
    async with deployment:
        telling.cancel()
        table = Table("Server", "", "URL", box=None, pad_edge=False)
        for instance in deployment.instances.values():
            table.add_row(instance.name, instance.server, instance.url)
        table.add_row("head server", "", deployment.cli.head_url)
        console.print(table)
        console.print(f"Up after {deployment.start_s:.0f} s; Ctrl-C ends it.")
        try:
            await deployment.watch(say)
        finally:
            console.print("Stopping Gym servers")
