# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Values of a ``network`` field, and the connections that they allow."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError

from nemo_gym_prorl.network_access import (
    PACKAGE_MIRRORS,
    EgressRules,
    Hosts,
    Network,
    egress_hosts,
    parse_network,
    proxy_variables,
)


NETWORK, HOSTS = TypeAdapter(Network), TypeAdapter(Hosts)


@pytest.mark.parametrize(
    ("given", "network"),
    [
        (True, "host"),
        (False, "none"),
        *((mode, mode) for mode in ("none", "package-mirrors", "public", "host")),
        ([], "none"),
        (
            ["Example.COM.", "*.Example.com", "10.0.0.1", "10.0.0.0/8", "::1", "2001:db8::/32", "0x7f.1", "a"],
            None,
        ),
        (("a.b",), ("a.b",)),
        (OmegaConf.create(["a.b"]), ("a.b",)),
    ],
    ids=str,
)
def test_values_of_a_network_field(given: Any, network: Any) -> None:
    named = ("example.com", "*.example.com", "10.0.0.1", "10.0.0.0/8", "::1", "2001:db8::/32", "0x7f.1", "a")
    assert NETWORK.validate_python(given) == parse_network(given) == (network or named)


@pytest.mark.parametrize(
    "given",
    [
        *("true", "yes", "", "Public", "allow", "allowlist", 1, 0, None, 1.5, {}, {"a.b"}, b"none"),
        *(["https://a.b"], ["a.b:80"], ["a.b/c"], ["*"], ["*."], ["a.*.b"], [""], [5], [None], ["a b"], ["a\0b"]),
        *(["10.0.0.0/33"], ["-a.b"], ["a..b"], ["a@b"], ["x" * 64], [".".join(["abc"] * 64)], ["a.b"] * 1001, [["a"]]),
        *(["public"], ["a.b", "package-mirrors"], ["ä.de"], ["[::1]"], ["none\n"], ["%2e"]),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_other_values_are_refused(given: Any) -> None:
    with pytest.raises(ValidationError):
        NETWORK.validate_python(given)


def test_mirrors_of_a_configuration_are_a_list() -> None:
    assert HOSTS.validate_python([]) == ()
    assert HOSTS.validate_python(["a.b"]) == ("a.b",)
    for wrong in ("none", "public", True, None, [5]):
        with pytest.raises(ValidationError):
            HOSTS.validate_python(wrong)
    assert parse_network(list(PACKAGE_MIRRORS)) == PACKAGE_MIRRORS
    assert egress_hosts("package-mirrors", ["a.b"]) == [*PACKAGE_MIRRORS, "a.b"]
    assert [egress_hosts(network, ["a.b"]) for network in ("public", ("c.d",))] == ["public", ["c.d"]]
    assert [bool(proxy_variables(network)) for network in ("none", "host", "public", ("c.d",))] == [0, 0, 1, 1]


LIST = ("example.com", "*.wild.com", "10.1.0.0/16", "127.0.0.2", "fd12::/16")


@pytest.mark.parametrize(
    ("network", "host", "port", "allowed"),
    [
        *(("public", host, 443, True) for host in ("example.com", "93.184.215.14", "127.0.0.1", "::1", "2130706433")),
        *(("public", "example.com", port, port == 80) for port in (80, 22, 25, 8080)),
        *(("public", host, 80, False) for host in ("localhost", "a.localhost", "printer", "metadata.google.internal")),
        *(("public", host, 80, False) for host in ("", "a b", "a\0.b", "*.b.c", "a/b", "a@b.c", "x" * 300)),
        *((LIST, host, 8081, True) for host in ("example.com", "a.wild.com", "a.b.wild.com")),
        *((LIST, host, 80, False) for host in ("wild.com", "evilwild.com", "a.example.com", "example.com.evil.com")),
        *((LIST, host, 22, True) for host in ("10.1.2.3", "127.0.0.2", "127.2", "0x7f000002", "fd12:1::1")),
        *((LIST, host, 80, True) for host in ("::ffff:10.1.0.1", "::ffff:127.0.0.2")),
        *((LIST, host, 80, False) for host in ("10.2.0.1", "127.0.0.1", "127.1", "2130706433", "::1", "8.8.8.8")),
        *((network, "example.com", 80, False) for network in ("none", "host")),
    ],
    ids=str,
)
def test_requests_are_matched_by_name_and_port(network: Any, host: str, port: int, allowed: bool) -> None:
    refusal = EgressRules.of(network).refusal(host, port)
    assert (refusal == "") is allowed, refusal
    assert "\n" not in refusal


NOT_PUBLIC = (
    *("127.0.0.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "169.254.169.254", "224.0.0.1"),
    *("255.255.255.255", "240.0.0.1", "198.18.0.1", "192.0.0.192", "168.63.129.16", "100.100.100.200"),
    *("::", "::1", "::7f00:1", "fe80::1", "fc00::1", "fec0::1", "ff02::1", "fd00:ec2::254", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::"),
)


@pytest.mark.parametrize(
    ("network", "host", "addresses", "own", "allowed"),
    [
        ("public", "example.com", NOT_PUBLIC, False, False),
        ("public", "example.com", ("8.8.8.8", "2606:4700::1", "64:ff9b::808:808", "2002:808:808::"), False, True),
        (("example.com",), "example.com", ("8.8.8.8", "10.0.0.1", "100.64.0.1", "fd12::1"), False, True),
        (("*.example.com",), "a.example.com", ("10.0.0.1", "fd12::1"), False, False),
        (("*.example.com",), "a.example.com", ("8.8.8.8",), False, True),
        (("example.com",), "example.com", ("127.0.0.1", "169.254.169.254", "fe80::1", "fd00:ec2::254"), False, False),
        (("example.com",), "example.com", ("100.100.100.200", "::ffff:127.0.0.1", "0.0.0.0"), False, False),
        (("example.com", "127.0.0.0/8"), "example.com", ("127.0.0.1", "::ffff:127.0.0.1"), False, True),
        (("127.0.0.1", "169.254.169.254"), "127.0.0.1", ("127.0.0.1", "169.254.169.254"), True, True),
        *((network, "example.com", ("8.8.8.8", "10.0.0.1"), True, False) for network in ("public", ("example.com",))),
    ],
    ids=str,
)
def test_addresses_decide_after_the_name(
    network: Any, host: str, addresses: tuple[str, ...], own: bool, allowed: bool
) -> None:
    rules = EgressRules.of(network)
    wrong = [
        each for each in addresses if rules.allow_address(host, ipaddress.ip_address(each), own=own) is not allowed
    ]
    assert wrong == []
