# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A running service from the command line: which one it is, and ``prorl cancel``.

The service is found by ``--url``, else ``PRORL_URL``, else by asking Gym's head server which of its servers is a
``prorl_agent``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rich.console import Console

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError, RolloutError
from nemo_gym_prorl.rollout.client import ApiError, RolloutClient


DEFAULT_HEAD = "http://127.0.0.1:11000"
"""Where Gym's head server listens unless told otherwise."""

_HEAD_S = 30.0
_LOOK_S = 5.0
"""So often it is looked where the service is."""


@asynccontextmanager
async def connect(url: str | None, token: str | None) -> AsyncIterator[RolloutClient]:
    """A client of the one service that :func:`services` finds.

    Raises:
        InfrastructureError, CallerError: see :func:`find_service`; several are named.
    """
    async with services(url, token) as clients:
        if len(clients) > 1:
            raise CallerError("names several services, which only prorl submit takes; give one", field="--url")
        async with clients[0] as client:
            yield client


@asynccontextmanager
async def services(url: str | None, token: str | None) -> AsyncIterator[list[RolloutClient]]:
    """Clients, not open yet, of the services at ``url``, with commas between, or of the one that Gym's head server
    knows, wherever that is by then: a deployment that is started anew has its servers at other ports.

    Raises:
        InfrastructureError, CallerError: see :func:`find_service`.
    """
    if url is not None and (urls := [one for one in map(str.strip, url.split(",")) if one]):
        yield [RolloutClient(one, token) for one in urls]
        return
    head = os.environ.get("PRORL_HEAD", DEFAULT_HEAD)
    client = RolloutClient(await find_service(head, token), token)
    following = asyncio.create_task(_follow(client, head, token))
    try:
        yield [client]
    finally:
        following.cancel()


async def _follow(client: RolloutClient, head: str, token: str | None) -> None:
    while True:
        await asyncio.sleep(_LOOK_S)
        with suppress(RolloutError, ApiError):
            client.url = await find_service(head, token)


async def find_service(head: str, token: str | None = None) -> str:
    """URL of the one ``prorl_agent`` that a head server of Gym, or a front, tells; see :func:`find_servers`.

    Raises:
        CallerError: the deployment has none, or several.
    """
    agents = await find_servers(head, token, "prorl_agent")
    if len(agents) != 1:
        names = ", ".join(f"{name} ({url})" for name, url in agents.items()) or "none"
        raise CallerError(f"the deployment at {head} must have one prorl_agent, has {names}", field="--url")
    return next(iter(agents.values()))


async def find_servers(head: str, token: str | None, implementation: str) -> dict[str, str]:
    """URLs of a deployment's servers of one implementation, by instance name.

    Args:
        head: URL of Gym's head server, or of a front.
        token: the service's key. A front wants it for each answer; Gym's head server does not look at it.
        implementation: ``prorl_agent``, say.

    Raises:
        InfrastructureError: no head server answers.
        ApiError: the key is missing or wrong.
    """
    try:
        async with asyncio.timeout(_HEAD_S), RolloutClient(head, token, patience_s=0.0) as client:
            return {one.process_name: one.url for one in await client.servers() if one.name == implementation}
    except (InfrastructureError, ApiError, TimeoutError) as error:
        if isinstance(error, ApiError) and error.problem.status in (401, 403):
            raise
        why = str(error) or f"no answer in {_HEAD_S:g} s"
        raise InfrastructureError(
            f"no NeMo Gym deployment answers at {head}: {why}; start one, or give --url or PRORL_URL",
            kind=FailureKind.TRANSPORT_UNREACHABLE,
        ) from error


async def cancel(url: str | None, token: str | None, ids: list[str], group: str | None) -> int:
    """Cancel rollouts; returns how many ids, or whether the group, the service does not know.

    Raises:
        CallerError: neither ids nor a group are given, or both.
    """
    if bool(ids) == (group is not None):
        raise CallerError("give either rollout ids or --group", field="IDS")
    console = Console(highlight=False, soft_wrap=True)
    async with connect(url, token) as client:
        answer = await client.cancel(ids or None, group=group)
    for job in answer.rollouts:
        console.print(f"{job.id} {job.state}", markup=False)
    for unknown in answer.unknown:
        console.print(f"{unknown} unknown", style="red", markup=False)
    if group is not None and not answer.rollouts:
        console.print(f"{group} unknown: no rollouts of this group", style="red", markup=False)
        return 1
    return len(answer.unknown)
