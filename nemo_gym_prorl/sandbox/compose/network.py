# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sandboxes that see each other by name, and nothing else.

Each has a loopback device of its own in any case. Those that are introduced to each other get one more, and names for
the others in ``/etc/hosts``; see :mod:`.isolation.shared_network.router` for what holds them together and apart.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Mapping

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.container import Container


_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_LONGEST_NAME = 253


async def address(container: Container) -> str:
    """Where a sandbox is to be found by those it is in a network with. It stays the same for the sandbox's life.

    Raises:
        CallerError: the sandbox has the host's network.
    """
    if container.spec.network:
        raise CallerError("a sandbox with the host's network can be in no other: make it without", field="network")
    answer, _files = await container.ask("address")
    return str(answer["address"])


async def set_hosts(container: Container, hosts: Mapping[str, str]) -> None:
    """Put a sandbox into one network with those behind the addresses, which it knows by these names from now on.

    Names that it was given before are forgotten.

    Raises:
        CallerError: what can't be a name or an address.
        SandboxBroken: what runs in it has made something else of the list of names.
        SandboxRefused: an address is no sandbox's of the same server, or this machine makes no networks.
    """
    for name, where in hosts.items():
        labels = name.split(".") if isinstance(name, str) and len(name) <= _LONGEST_NAME else [""]
        if not all(_LABEL.fullmatch(label) for label in labels):
            raise CallerError(f"{name!r} can't be the name of a host", field="hosts")
        check_address(where, "hosts")
    await container.ask("introduce", hosts=dict(hosts))


def check_address(text: str, field: str) -> None:
    """Refuse what is no address of a sandbox; ``field`` is the caller's name for it."""
    try:
        if not isinstance(text, str):
            raise ValueError(f"{text!r} is no address; network_address gives a sandbox's")
        ipaddress.ip_address(text)
    except ValueError as error:
        raise CallerError(str(error), field=field) from error


async def connect(sandboxes: Mapping[str, Container]) -> dict[str, str]:
    """Put sandboxes into one network, each under a name that all of them know; returns their addresses."""
    found = dict(zip(sandboxes, await asyncio.gather(*map(address, sandboxes.values())), strict=True))
    await asyncio.gather(*(set_hosts(container, found) for container in sandboxes.values()))
    return found
