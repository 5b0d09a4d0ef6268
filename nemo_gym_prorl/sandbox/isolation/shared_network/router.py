# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A network of sandboxes: a network namespace of its own in which nothing runs, and a cable from it to each member.

The namespace routes between the cables, by address, and takes from each nothing but what bears its member's address:
so members can neither pass for each other nor listen to what others say. It has no other device and no way out.

It is nobody's process: it exists as long as the supervisor holds the socket that was opened in it, and a cable as
long as both its namespaces do. So it goes with the supervisor, and a member's cable with the member, by themselves.

An ordinary user may do all this because the user namespaces that own these network namespaces are his.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from nemo_gym_prorl.sandbox.isolation.shared_network import netlink


NETWORK = IPv4Network("10.99.0.0/16")
"""Where members have their addresses: any private range does, since a sandbox has no other network."""

DEVICE = "eth0"
"""A member's end of its cable."""

HOSTS = "/etc/hosts"
MARK = "# sandbox network"
"""Ends the lines of :data:`HOSTS` that are ours to change."""

LARGEST_HOSTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Member:
    """A sandbox that is to be in a network: a socket of its own network namespace, and its address."""

    namespace: int
    address: IPv4Address

    @property
    def hardware(self) -> bytes:
        """Of both ends of its cable: of the locally administered kind."""
        return b"\x02\0" + self.address.packed

    @property
    def port(self) -> str:
        """The network's end of its cable."""
        return f"m{int(self.address) - int(NETWORK.network_address)}"


def connect(network: int, members: Sequence[Member]) -> tuple[dict[str, Any], list[int]]:
    """Put sandboxes into a network, out of the one where they were. Blocks, as the kernel answers."""
    with socket.socket(fileno=os.dup(network)) as namespace:
        for member in members:
            with socket.socket(fileno=os.dup(member.namespace)) as own:
                _plug(namespace, own, member)
    return {}, []


def _plug(network: socket.socket, own: socket.socket, member: Member) -> None:
    port, device = netlink.End(network, member.port), netlink.End(own, DEVICE)
    with contextlib.suppress(OSError):
        # The cable to the network where it was, or one that was left half made.
        netlink.remove(device)
    try:
        netlink.make_pair(port, device, member.hardware)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            raise OSError(error.errno, "the kernel has no veth devices; as root: modprobe veth") from error
        raise
    number = netlink.take_up(port, forwards=True)
    netlink.route(network, number, IPv4Network(member.address))
    number = netlink.take_up(device, forwards=False)
    netlink.give_address(own, number, member.address)
    netlink.route(own, number, NETWORK, member.address)


def with_names(hosts: bytes, names: Mapping[str, str]) -> bytes:
    """A text of ``/etc/hosts`` in which ``names``, with their addresses, are all that ours of its lines say."""
    lines = [line for line in hosts.splitlines() if not line.endswith(MARK.encode())]
    lines += [f"{address}\t{name}\t{MARK}".encode() for name, address in names.items()]
    return b"\n".join([*lines, b""])
