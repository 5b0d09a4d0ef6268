# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The few things that a network of sandboxes needs of the kernel's rtnetlink: device pairs, addresses, routes.

pyroute2 does all of that and far more, but its import costs more time and memory than a sandbox, and the supervisor
would have to pay it in every helper it forks; these are five messages.

A socket belongs for ever to the network namespace it was opened in, and may be used from outside of it: what counts is
what the *sender* may do there, since each message names its destination (the kernel then does not ask who opened it).
So nobody who uses these has to join a namespace of a sandbox.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network


KERNEL = (0, 0)
"""The destination of every message."""

_NEW_LINK, _SET_LINK, _NEW_ADDRESS, _NEW_ROUTE, _GET_LINK, _DELETE_LINK = 16, 19, 20, 24, 18, 17
_REQUEST, _ACKNOWLEDGE, _MUST_BE_NEW = 1, 4, 0x200 | 0x400
_ERROR = 2

_UP, _NO_ARP = 0x1, 0x80
_ROUTE_TABLE_MAIN, _ROUTE_BY_ADMINISTRATOR, _SCOPE_LINK, _UNICAST = 254, 4, 253, 1

# Attributes of links, addresses and routes.
_HARDWARE, _NAME, _KIND_INFO, _AF_SPEC, _NAMESPACE = 1, 3, 18, 26, 28
_KIND, _KIND_DATA, _VETH_PEER = 1, 2, 1
_INET_CONF, _FORWARDING, _RP_FILTER = 1, 1, 8
_LOCAL_ADDRESS = 2
_DESTINATION, _DEVICE, _SOURCE = 1, 4, 7

_SIOCGSKNS = 0x894C
_NESTED = 0x8000


@dataclass(frozen=True, slots=True)
class End:
    """One end of a pair of connected devices: in which namespace, and its name there."""

    namespace: socket.socket
    name: str


def make_pair(one: End, other: End, hardware: bytes) -> None:
    """Connect two namespaces: what is sent into either device comes out of the other.

    Both get the same hardware address, so what one sends to itself is the other's, and neither ever has to ask for
    an address: there is nothing that a third could answer in its place.
    """
    namespace = fcntl.ioctl(other.namespace, _SIOCGSKNS)
    try:
        peer = _link() + _text(_NAME, other.name) + _attribute(_HARDWARE, hardware)
        peer += _attribute(_NAMESPACE, struct.pack("=I", namespace))
        info = _text(_KIND, "veth") + _attribute(_KIND_DATA, _attribute(_VETH_PEER, peer))
        own = _link() + _text(_NAME, one.name) + _attribute(_HARDWARE, hardware) + _attribute(_KIND_INFO, info)
        _ask(one.namespace, _NEW_LINK, own, _MUST_BE_NEW)
    finally:
        os.close(namespace)


def take_up(end: End, *, forwards: bool) -> int:
    """Start a device and return its number. One that ``forwards`` takes nothing but what comes from where it would
    itself send an answer."""
    index = _index(end)
    if forwards:
        settings = _attribute(_FORWARDING, struct.pack("=I", 1)) + _attribute(_RP_FILTER, struct.pack("=I", 1))
        inet = _attribute(socket.AF_INET | _NESTED, _attribute(_INET_CONF | _NESTED, settings))
        _ask(end.namespace, _SET_LINK, _link(index) + _attribute(_AF_SPEC | _NESTED, inet))
    _ask(end.namespace, _SET_LINK, _link(index, flags=_UP | _NO_ARP))
    return index


def give_address(namespace: socket.socket, index: int, address: IPv4Address) -> None:
    """Make an address a device's own."""
    head = struct.pack("=BBBBI", socket.AF_INET, 32, 0, 0, index)
    _ask(namespace, _NEW_ADDRESS, head + _attribute(_LOCAL_ADDRESS, address.packed), _MUST_BE_NEW)


def route(namespace: socket.socket, index: int, to: IPv4Network, source: IPv4Address | None = None) -> None:
    """Send what is for ``to`` into a device, as ``source`` where that is open."""
    head = struct.pack(
        *("=BBBBBBBBI", socket.AF_INET, to.prefixlen, 0, 0),
        *(_ROUTE_TABLE_MAIN, _ROUTE_BY_ADMINISTRATOR, _SCOPE_LINK, _UNICAST, 0),
    )
    details = _attribute(_DESTINATION, to.network_address.packed) + _attribute(_DEVICE, struct.pack("=I", index))
    if source:
        details += _attribute(_SOURCE, source.packed)
    _ask(namespace, _NEW_ROUTE, head + details, _MUST_BE_NEW)


def remove(end: End) -> None:
    """Take a device away, and the one that it is connected with.

    Raises:
        OSError: ENODEV: there is none of that name.
    """
    _ask(end.namespace, _DELETE_LINK, _link() + _text(_NAME, end.name))


def _index(end: End) -> int:
    return int(struct.unpack_from("=i", _ask(end.namespace, _GET_LINK, _link() + _text(_NAME, end.name)), 4)[0])


def _link(index: int = 0, flags: int = 0) -> bytes:
    return struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, flags, flags)


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode() + b"\0")


def _ask(namespace: socket.socket, kind: int, body: bytes, flags: int = 0) -> bytes:
    """Send a message, and return the first answer's body, which is empty where it only says that it was done."""
    if kind != _GET_LINK:
        flags |= _ACKNOWLEDGE
    head = struct.pack("=IHHII", 16 + len(body), kind, _REQUEST | flags, 0, 0)
    namespace.sendto(head + body, KERNEL)
    answer = namespace.recv(1 << 16)
    if struct.unpack_from("=H", answer, 4)[0] != _ERROR:
        return answer[16:]
    number = -struct.unpack_from("=i", answer, 16)[0]
    if number:
        raise OSError(number, os.strerror(number))
    return b""
