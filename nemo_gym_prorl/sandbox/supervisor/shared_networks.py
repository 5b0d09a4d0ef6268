# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which sandboxes see each other, under which addresses and names.

A sandbox gets an address when somebody asks for it, and a network when it is introduced to others: all that are
introduced to each other, directly or not, are in one network. Nobody else is: one that was never introduced is alone.
Each is told names of its own choosing; a name goes from everybody's list when the sandbox behind it has ended.

One change at a time, of networks and of what a sandbox is told: each is made from what is known when its turn comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Address, ip_address
from itertools import count

from nemo_gym_prorl.background import spawn_task
from nemo_gym_prorl.sandbox.isolation.joining import Place
from nemo_gym_prorl.sandbox.isolation.shared_network import router as networks
from nemo_gym_prorl.sandbox.launcher import requests
from nemo_gym_prorl.sandbox.supervisor.lifecycle import Sandboxes
from nemo_gym_prorl.sandbox.supervisor.processes.children import Answer, Children
from nemo_gym_prorl.sandbox.supervisor.processes.launcher import Launcher
from nemo_gym_prorl.sandbox.supervisor.rpc.answers import Refused, of_those_inside
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message, close_all


@dataclass(slots=True, eq=False)
class Network:
    """One network: the socket that holds it, and the names of the sandboxes in it."""

    namespace: int
    members: set[str] = field(default_factory=set)


class Networks:
    """All networks of one supervisor."""

    def __init__(self, children: Children, launcher: Launcher, sandboxes: Sandboxes) -> None:
        self._children = children
        self._launcher = launcher
        self._sandboxes = sandboxes
        self._numbers = count(1)
        self._addresses: dict[str, IPv4Address] = {}
        self._names: dict[str, dict[str, str]] = {}
        """Of each sandbox that was told any: the names it knows, and their addresses."""
        self._telling: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._networks: dict[str, Network] = {}
        self._change = asyncio.Lock()
        self._changing: Network | None = None
        """What some are being brought into, which stays though all that are in it end meanwhile."""
        sandboxes.on_gone.append(self._gone)

    def address(self, name: str) -> Answer:
        """The address that a sandbox has in whatever network it comes into."""
        return {"address": str(self._address_of(name))}, []

    async def introduce(self, order: Message) -> Answer:
        """Let a sandbox see those behind the addresses of ``order["hosts"]`` under these names, and them see it."""
        self._sandboxes.up(order["sandbox"])
        async with self._change:
            await self._bring_together(order)
        return await self._tell(order["sandbox"], order["hosts"])

    async def reach(self, order: Message) -> Answer:
        """As :func:`.requests.connect`, to a port of the sandbox behind an address in the same network."""
        place = self._sandboxes.up(self._fellow(order)).place_to_join()
        return await self._launcher.run(requests.connect(place, order["port"]))

    async def listen(self, order: Message) -> Answer:
        """What listens on a port of the sandbox's loopback device, for one behind an address in the same network."""
        self._fellow(order)
        place = self._sandboxes.up(order["sandbox"]).place_to_join()
        _answer, files = await self._launcher.run(requests.open_socket(place, socket.AF_INET, order["port"]))
        try:
            with contextlib.suppress(Refused):
                # It may have one kind of address only.
                files += (await self._launcher.run(requests.open_socket(place, socket.AF_INET6, order["port"])))[1]
        except BaseException:
            close_all(files)
            raise
        return {}, files

    def _fellow(self, order: Message) -> str:
        """Who is behind the address, in a network with the sandbox."""
        network = self._networks.get(order["sandbox"])
        behind = self._behind(order["address"])
        if network is None or behind is None or behind not in network.members:
            raise OSError(f"{order['address']} is nobody in the network of {order['sandbox']}")
        return behind

    def _address_of(self, name: str) -> IPv4Address:
        sandbox = self._sandboxes.up(name)
        if sandbox.order["network"]:
            raise OSError("it shares the host's network, and can be in no other")
        if name not in self._addresses:
            self._addresses[name] = self._free_address()
        return self._addresses[name]

    def _free_address(self) -> IPv4Address:
        used = set(self._addresses.values())
        room = networks.NETWORK.num_addresses - 2
        if len(used) == room:
            raise OSError("all addresses of the network are in use")
        while (address := networks.NETWORK.network_address + next(self._numbers) % room + 1) in used:
            pass
        return address

    def _behind(self, address: str) -> str | None:
        return next((name for name, own in self._addresses.items() if str(own) == address), None)

    async def _bring_together(self, order: Message) -> None:
        """Have one network of all that are to be introduced, directly or not."""
        together = {order["sandbox"]}
        for name, address in order["hosts"].items():
            behind = self._behind(address)
            if behind:
                together.add(behind)
            elif not ip_address(address).is_loopback:
                raise OSError(f"{address}, for {name}, is the address of no sandbox here")
        known = {id(found): found for name in together if (found := self._networks.get(name))}
        into = max(known.values(), key=lambda network: len(network.members), default=None)
        for network in known.values():
            together |= network.members
        coming = sorted(together - into.members if into else together)
        if not coming:
            return
        network = self._changing = into or Network((await self._launcher.run(requests.make_network()))[1][0])
        try:
            await self._plug(network, coming)
        except BaseException:
            self._changing = None
            self._close_if_empty(network)
            raise
        self._changing = None
        for name in coming:
            self._leave(name)
            network.members.add(name)
            self._networks[name] = network
        # Those that ended meanwhile.
        for name in [name for name in network.members if name not in self._addresses]:
            self._leave(name)

    async def _plug(self, network: Network, coming: list[str]) -> None:
        members: list[networks.Member] = []
        try:
            for name in coming:
                request = requests.open_socket(self._sandboxes.up(name).place_to_join(), socket.AF_NETLINK)
                _answer, files = await self._launcher.run(request)
                members.append(networks.Member(files[0], self._address_of(name)))
            given = [network.namespace, *(member.namespace for member in members)]
            await self._children.run(partial(networks.connect, network.namespace, members), given)
        finally:
            close_all([member.namespace for member in members])

    async def _tell(self, sandbox: str, names: dict[str, str]) -> Answer:
        """Have a sandbox know these names and no others."""
        self._sandboxes.up(sandbox)
        self._names[sandbox] = names
        async with self._telling[sandbox]:
            # What it is to know by now, so that whoever writes last writes the last.
            with of_those_inside():
                return await self._write(self._sandboxes.up(sandbox).place_to_join(), self._names[sandbox])

    async def _write(self, place: Place, names: dict[str, str]) -> Answer:
        hosts = os.memfd_create("hosts", os.MFD_CLOEXEC)
        try:
            try:
                await self._launcher.run(requests.get(place, networks.HOSTS, networks.LARGEST_HOSTS), [hosts])
            except Refused as error:
                if error.answer.get("errno") != errno.ENOENT:
                    raise
            text = networks.with_names(os.pread(hosts, networks.LARGEST_HOSTS, 0), names)
            os.truncate(hosts, 0)
            os.pwrite(hosts, text, 0)
            os.lseek(hosts, 0, os.SEEK_SET)
            return await self._launcher.run(requests.put(place, networks.HOSTS, None), [hosts])
        finally:
            os.close(hosts)

    def _leave(self, name: str) -> None:
        network = self._networks.pop(name, None)
        if network:
            network.members.discard(name)
            self._close_if_empty(network)

    def _close_if_empty(self, network: Network) -> None:
        if not network.members and network is not self._changing:
            os.close(network.namespace)

    def _gone(self, name: str) -> None:
        """A sandbox has ended: its cable went with it, and its names go now."""
        address = str(self._addresses.pop(name, ""))
        self._names.pop(name, None)
        self._telling.pop(name, None)
        network = self._networks.get(name)
        others = network.members - {name} if network else set()
        self._leave(name)
        for other in others:
            names = self._names.get(other, {})
            if address in names.values():
                left = {known: place for known, place in names.items() if place != address}
                spawn_task(self._tell(other, left), expected=Refused)
