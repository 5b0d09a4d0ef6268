# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Network access of a sandbox: values of a ``network`` field, and the connections that each value allows. Pure.

- ``none``: the sandbox's own loopback device only.
- A list of hosts: names, ``*.name`` for all subdomains of a name, IP addresses and CIDR ranges; at any port.
- ``package-mirrors``: :data:`PACKAGE_MIRRORS`, and the mirrors that the provider's configuration adds.
- ``public``: every host with a public address, at ports 80 and 443.
- ``host``: the host's own network, without a filter.

Names are matched before they are resolved, so a refused name is never looked up. Then the resolved address is checked,
since a name may resolve to any address. An address in the list is allowed. Other addresses must be public, and not
this machine's. A name that is listed without ``*.`` may also resolve to a private address, such as a cluster's mirror.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Annotated, Any, Self


Address = IPv4Address | IPv6Address

NONE, PUBLIC, MIRRORS, HOST = "none", "public", "package-mirrors", "host"
MODES = (NONE, MIRRORS, PUBLIC, HOST)

HOST_NAME = "sandbox"
"""Host name of every sandbox, seen from inside the sandbox."""

PROXY_PORT = 61080
"""TCP port of the egress proxy on a sandbox's loopback device, above Linux's default range of ephemeral ports."""

POLICY_PORT = 61081
"""TCP port on a sandbox's loopback device where an agent in the sandbox reaches the rollout's policy."""

PUBLIC_PORTS = (80, 443)
"""Ports that ``public`` allows: HTTP and HTTPS, but not mail or SSH servers of third parties."""

PACKAGE_MIRRORS = (
    *("pypi.org", "files.pythonhosted.org", "conda.anaconda.org", "repo.anaconda.com"),
    *("deb.debian.org", "security.debian.org", "snapshot.debian.org"),
    *("archive.ubuntu.com", "*.archive.ubuntu.com", "security.ubuntu.com", "ports.ubuntu.com"),
    *("dl-cdn.alpinelinux.org", "dl.fedoraproject.org", "dl.rockylinux.org", "repo.almalinux.org"),
    *("registry.npmjs.org", "registry.yarnpkg.com", "rubygems.org", "index.rubygems.org"),
    *("crates.io", "index.crates.io", "static.crates.io", "static.rust-lang.org"),
    *("proxy.golang.org", "sum.golang.org", "repo1.maven.org", "repo.maven.apache.org"),
    *("cran.r-project.org", "cloud.r-project.org"),
)
"""Public package registries that serve downloads only under these names."""

MAX_HOSTS = 1000  # a longer list is probably a mistake, and would be sent with each sandbox's request

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*")
_NUMERIC = re.compile(r"(?:0[xX])?[0-9a-fA-F]+(?:\.(?:0[xX])?[0-9a-fA-F]+){0,3}")

_INTRANET = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")

_METADATA = ("168.63.129.16", "100.100.100.200", "fd00:ec2::254", "fd20:ce::254", "192.0.0.0/24")
"""Addresses of clouds' metadata services outside of the link-local range, which is never public."""

_LOCAL_NAMES = (".localhost", ".local", ".internal", ".home.arpa")
"""Suffixes of names without a public address; an upstream proxy would resolve such a name in its own network."""

_NAT64 = IPv6Network("64:ff9b::/96")


def parse_network(value: object) -> str | tuple[str, ...]:
    """Parse a ``network`` field into one of :data:`MODES` or hosts. ``true``: ``host``; ``false``, ``[]``: ``none``.

    Raises:
        ValueError: the value is invalid; the message names the valid values.
    """
    if isinstance(value, bool):
        return HOST if value else NONE
    if isinstance(value, str) and value in MODES:
        return value
    # OmegaConf's ListConfig is not a list.
    is_list = isinstance(value, list | tuple) or type(value).__module__.startswith("omegaconf.list")
    if not is_list or len(hosts := list(value)) > MAX_HOSTS:  # type: ignore[call-overload]
        raise ValueError(f"must be {', '.join(MODES)} or a list of at most {MAX_HOSTS} hosts")
    return tuple(map(parse_host, hosts)) or NONE


def parse_host(value: object) -> str:
    """Return an entry of a list of hosts in lower case, without a trailing dot.

    Raises:
        ValueError: the entry is not a name, ``*.name``, IP address or CIDR range, or is one of :data:`MODES`.
    """
    text = value.lower().rstrip(".") if isinstance(value, str) else ""
    if text in MODES:
        raise ValueError(f"{text!r} is a value of its own; write it without a list")
    if literal_address(text) or _network(text) or _NAME.fullmatch(text.removeprefix("*.")):
        return text
    raise ValueError(f"{value!r:.100} is not a host name, *.name, IP address or CIDR range, without scheme or port")


@dataclass(frozen=True)
class _ParsedBy:
    """Annotation: Pydantic parses the field by ``parse``. Pydantic is imported on use, since the supervisor's process
    has no third-party packages."""

    parse: Callable[[object], object]

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(self.parse)


def _parse_hosts(value: object) -> tuple[str, ...]:
    found = () if isinstance(value, list | tuple) and not value else parse_network(value)
    if isinstance(found, str):
        raise ValueError("must be a list of hosts")
    return found


Network = Annotated[str | tuple[str, ...], _ParsedBy(parse_network)]
"""Type of a ``network`` field in Pydantic models, parsed by :func:`parse_network`."""

Hosts = Annotated[tuple[str, ...], _ParsedBy(_parse_hosts)]
"""Type of a list of hosts in Pydantic models; the list may be empty."""


def egress_hosts(network: str | Sequence[str], mirrors: Sequence[str]) -> str | list[str]:
    """Return a ``network`` field, with ``package-mirrors`` replaced by :data:`PACKAGE_MIRRORS` and ``mirrors``."""
    if network == MIRRORS:
        return [*PACKAGE_MIRRORS, *mirrors]
    return network if isinstance(network, str) else list(network)


def has_proxy(network: str | Sequence[str]) -> bool:
    """Return whether a sandbox with this ``network`` field reaches other hosts through the egress proxy."""
    return network not in (NONE, HOST)


def proxy_variables(network: str | Sequence[str]) -> dict[str, str]:
    """Return the environment variables by which programs in a sandbox find the egress proxy; empty without a proxy."""
    if not has_proxy(network):
        return {}
    proxy, local = f"http://127.0.0.1:{PROXY_PORT}", f"localhost,127.0.0.1,0.0.0.0,::1,{HOST_NAME}"
    lower = {"http_proxy": proxy, "https_proxy": proxy, "no_proxy": local}
    return {**lower, **{name.upper(): value for name, value in lower.items()}}


def literal_address(host: str) -> Address | None:
    """Parse a host as an IPv6 address or as IPv4 in any notation of ``inet_aton``; return ``None`` for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    if _NUMERIC.fullmatch(host):
        try:
            return IPv4Address(socket.inet_aton(host))  # such as 0x7f.1
        except OSError:
            pass
    return None


def _network(text: str) -> IPv4Network | IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def reached_address(address: Address) -> Address:
    """Return the IPv4 address that a translator or tunnel connects to for an IPv6 address (IPv4-mapped, 6to4, NAT64);
    any other address unchanged."""
    if isinstance(address, IPv6Address):
        if embedded := address.ipv4_mapped or address.sixtofour:
            return embedded
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _is_in(address: Address, ranges: Sequence[str]) -> bool:
    return any(address in ipaddress.ip_network(each) for each in ranges)


def is_public(address: Address) -> bool:
    """Return whether an address is on the public internet: not private, local, multicast, reserved or of a metadata
    service."""
    unusual = address.is_multicast or address.is_reserved or getattr(address, "is_site_local", False)
    return address.is_global and not unusual and not _is_in(address, _METADATA)


@dataclass(frozen=True, slots=True)
class EgressRules:
    """Hosts that the egress proxy may connect to for one sandbox.

    Attributes:
        public: whether every public host is allowed, at :data:`PUBLIC_PORTS`.
        names: allowed host names.
        suffixes: allowed suffixes of host names, each with its leading dot.
        networks: allowed ranges of addresses; a single address is a range of one.
    """

    public: bool
    names: frozenset[str]
    suffixes: tuple[str, ...]
    networks: tuple[IPv4Network | IPv6Network, ...]

    @classmethod
    def of(cls, network: str | Sequence[str]) -> Self:
        """Return the rules of ``public`` or of a list of hosts; any other mode allows no host."""
        hosts = [] if isinstance(network, str) else network
        ranges = {host: found for host in hosts if (found := _network(str(literal_address(host) or host)))}
        names = [host for host in hosts if host not in ranges]
        return cls(
            network == PUBLIC,
            frozenset(name for name in names if not name.startswith("*.")),
            tuple(name[1:] for name in names if name.startswith("*.")),
            tuple(ranges.values()),
        )

    def refusal(self, host: str, port: int) -> str:
        """Return why a host, in lower case, is refused before its name is resolved; empty if :meth:`allow_address`
        decides."""
        address = literal_address(host)
        if address is None and not _NAME.fullmatch(host):
            return f"{host!r:.100} is no host"
        if self.public and port not in PUBLIC_PORTS:
            return f"port {port} of {host} is closed; network: public has 80 and 443"
        if self.public and (address is not None or ("." in host and not host.endswith(_LOCAL_NAMES))):
            return ""
        listed = host in self.names or host.endswith(self.suffixes) if address is None else self._contain(address)
        return "" if listed else f"{host} is not allowed by this sandbox's network"

    def allow_address(self, host: str, address: Address, *, own: bool) -> bool:
        """Return whether the proxy may connect to an address of a host that :meth:`refusal` did not refuse; ``own``:
        whether the address is one of this machine's."""
        if self._contain(address):
            return True
        reached = reached_address(address)
        if own or _is_in(reached, _METADATA):
            return False
        return is_public(reached) or (host in self.names and _is_in(reached, _INTRANET))

    def _contain(self, address: Address) -> bool:
        return any(reached_address(address) in network or address in network for network in self.networks)
