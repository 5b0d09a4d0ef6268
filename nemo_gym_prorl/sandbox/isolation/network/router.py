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
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from nemo_gym_prorl.sandbox.isolation import joining
from nemo_gym_prorl.sandbox.isolation.network import netlink
from nemo_gym_prorl.sandbox.supervisor.rpc.answers import Unreachable


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
    """A sandbox that is to be in a network: where to join it, and its address."""

    place: joining.Place
    address: IPv4Address

    @property
    def hardware(self) -> bytes:
        """Of both ends of its cable: of the locally administered kind."""
        return b"\x02\0" + self.address.packed

    @property
    def port(self) -> str:
        """The network's end of its cable."""
        return f"m{int(self.address) - int(NETWORK.network_address)}"


def connect(network: int | None, members: Sequence[Member]) -> tuple[dict[str, Any], list[int]]:
    """Put sandboxes into a network, or into a new one, which is returned; out of the one where they were."""
    made = None
    if network is None:
        made = _opened(_enter_new)
        network = os.dup(made.fileno())
    with socket.socket(fileno=network) as namespace:
        for member in members:
            with _opened(joining.join, member.place) as own:
                _plug(namespace, own, member)
    return {}, [made.detach()] if made else []


def _enter_new() -> None:
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)


def _opened(enter: Any, *details: Any) -> socket.socket:
    """A netlink socket of the network namespace that ``enter`` leads to, from a child: there would be no way back."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                enter(*details)
                with netlink.open_here() as opened:
                    socket.send_fds(theirs, [b"."], [opened.fileno()])
                status = 0
            except OSError as error:
                theirs.send(f"{error.errno or errno.EIO} {error.strerror}".encode())
            except Unreachable as error:
                theirs.send(f"0 {error}".encode())
            finally:
                os._exit(status)
        os.waitpid(pid, 0)
        theirs.close()
        said, files, _flags, _address = socket.recv_fds(ours, 4096, 1)
    if files:
        # As it came, every program that is executed would inherit it.
        os.set_inheritable(files[0], False)
        return socket.socket(fileno=files[0])
    number, _, reason = said.decode().partition(" ")
    if number == "0":
        raise Unreachable(reason)
    raise OSError(int(number or errno.EIO), f"a network namespace: {reason}")


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


@joining.by_names_inside()
def write_hosts(place: joining.Place, names: Mapping[str, str]) -> tuple[dict[str, Any], list[int]]:
    """Make ``names``, with their addresses, all that ours of the lines of ``/etc/hosts`` say; the others stay."""
    joining.join(place)
    file = os.open(HOSTS, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise OSError(errno.EINVAL, f"{HOSTS} is not an ordinary file")
    with os.fdopen(file, "r+b") as hosts:
        found = hosts.read(LARGEST_HOSTS).splitlines()
        lines = [line for line in found if not line.endswith(MARK.encode())]
        lines += [f"{address}\t{name}\t{MARK}".encode() for name, address in names.items()]
        hosts.seek(0)
        hosts.truncate()
        hosts.write(b"\n".join([*lines, b""]))
    return {}, []


def listen(place: joining.Place, port: int) -> tuple[dict[str, Any], list[int]]:
    """Listen on a port of the sandbox's own loopback device, as one of its programs would; on both kinds if it can."""
    joining.join(place)
    return {}, [listener.detach() for listener in _listeners(port)]


def _listeners(port: int) -> Iterator[socket.socket]:
    yield socket.create_server(("127.0.0.1", port))
    if socket.has_ipv6:
        with contextlib.suppress(OSError):
            yield socket.create_server(("::1", port), family=socket.AF_INET6)
