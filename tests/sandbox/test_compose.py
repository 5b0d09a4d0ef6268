# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym's own ``AsyncSandboxCompose`` over our provider, where the installed Gym has it (0.7)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from nemo_gym.sandbox.providers import base

from nemo_gym_prorl.sandbox.compose.provider import container_of
from nemo_gym_prorl.sandbox.provider import SingularityProvider


docker_compose = pytest.importorskip("nemo_gym.sandbox.adapters.docker_compose", reason="Gym 0.7 has it")

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(180)]

FETCH = "import sys, urllib.request as u; sys.stdout.write(u.urlopen(sys.argv[1], timeout=5).read().decode())"
PROBE = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5)"


def services(image: Path) -> dict[str, Any]:
    """A server with its data on a volume, a client that waits for it, and one that has the server's ports."""
    serve = "mkdir -p /data && echo from the volume > /data/index.html && cd /data && exec python3 -m http.server 8000"
    return {
        "services": {
            "web": {
                "image": str(image),
                "entrypoint": ["sh", "-c", serve],
                "expose": ["8000"],
                "ports": [{"target": 8000}],
                "volumes": [{"type": "volume", "source": "data", "target": "/data"}],
                "networks": {"default": {"aliases": ["web.example"]}},
                "healthcheck": {"test": ["CMD", "python3", "-c", PROBE, "8000"], "interval": "100ms", "retries": 100},
            },
            "client": {
                "image": str(image),
                "entrypoint": ["sleep", "1000"],
                "environment": {"WEB": "http://web:8000/"},
                "depends_on": {"web": {"condition": "service_healthy"}},
                "volumes": [{"type": "volume", "source": "data", "target": "/seen", "read_only": True}],
                "cap_add": ["SYS_PTRACE", "NET_ADMIN"],
                "shm_size": 128 << 20,
                "x-sandbox": {"resolve_environment": ["WEB"]},
            },
            "sidecar": {
                "image": str(image),
                "entrypoint": ["sleep", "1000"],
                "network_mode": "service:web",
                "depends_on": {"web": {"condition": "service_healthy"}},
            },
        },
        "volumes": {"data": {}},
    }


async def test_services_of_a_compose_file_work_together(image: Path, tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    # YAML is more than JSON.
    file.write_text(json.dumps(services(image)))
    provider = SingularityProvider()
    compose = docker_compose.AsyncSandboxCompose(
        provider, file, timeout_s=90, poll_interval_s=0.05, volume_init_image=str(image)
    )
    async with compose:
        client, sidecar, web = (compose.services[name] for name in ("client", "sidecar", "web"))

        async def fetched(sandbox: Any, url: str) -> str:
            done = await sandbox.exec(f"python3 -c '{FETCH}' {url}")
            return str(done.stdout or done.stderr)

        for url in ("http://web:8000/", "http://web.example:8000/"):
            assert await fetched(client, url) == "from the volume\n"
        assert await fetched(sidecar, "http://localhost:8000/") == "from the volume\n"
        assert (await client.exec("cat /seen/index.html")).stdout == "from the volume\n"
        assert (await client.exec("touch /seen/more")).return_code != 0
        assert container_of(client._require_handle()).spec.shared_memory_mib == 128
        endpoint = (await web.endpoint(8000)).endpoint
        reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.rpartition(":")[2]))
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        assert b"from the volume" in await reader.read()
        writer.close()
        members = [container_of(sandbox._require_handle()) for sandbox in compose.services.values()]
    assert not any(member.alive for member in members)


async def test_what_can_not_be_had_is_refused_before_anything_starts(image: Path, tmp_path: Path) -> None:
    document = services(image)
    document["services"]["client"]["cap_add"] = ["SYS_ADMIN"]
    file = tmp_path / "compose.yaml"
    file.write_text(json.dumps(document))
    compose = docker_compose.AsyncSandboxCompose(SingularityProvider(), file, volume_init_image=str(image))
    with pytest.raises(NotImplementedError, match="SYS_ADMIN is not given to sandboxes"):
        await compose.start()


def test_gym_finds_its_capabilities() -> None:
    provider = SingularityProvider()
    for name in ("Network", "PortForwarding", "SharedStorage", "RuntimeRequirements", "Endpoint", "PauseResume"):
        assert isinstance(provider, getattr(base, f"SupportsSandbox{name}")), name
