# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The toy environment over HTTP with real sandboxes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_gym_prorl.sandbox.images import build_tools
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.servers.task_server import TaskServerConfig
from tests.prorl_code.conftest import RESPONSE, Client, task_server
from tests.rollout.serving import serve
from tests.sandbox.egress import ALLOWED, origin
from tests.sandbox.tiny import make_tiny_root
from tests.tasks import containers
from tests.toy_family.app import COUNT, ToyServer


pytestmark = pytest.mark.sandbox

CONFIG = OmegaConf.load(Path(__file__).parent / "toy_family.yaml")
IMAGES = ("default", "kernel")


def row(image: object) -> dict[str, Any]:
    return {"responses_create_params": {"input": [{"role": "user", "content": "Count."}]}, "image": image}


@pytest.fixture
async def base_url() -> AsyncIterator[str]:
    containers.image()
    before = containers.instances()
    config = TaskServerConfig(port=1, name="toy_family", **CONFIG.toy_family.resources_servers.prorl_code)
    server = task_server(ToyServer, config, containers.shipped_config())
    async with serve(server.setup_webserver()) as url:
        yield url
    assert containers.instances() <= before


async def play(base_url: str, row: dict[str, Any], command: str | None) -> dict[str, Any]:
    """Play a rollout and return the verified row."""
    async with Client(base_url) as client:
        assert (await client.post("/seed_session", row))[0] == 200
        if command:
            assert (await client.tool("bash", command=command)).endswith("[exit code: 0]")
        assert (await client.tool("submit")).startswith("Submitted.")
        assert await client.post("/release_session") == (200, {"released": True}, None)
        status, verdict, _ = await client.post("/verify", row | {"response": RESPONSE})
        assert status == 200, verdict
        assert (await client.post("/close_session"))[0] == 200
    return verdict


async def test_oracle_and_null_in_the_rows_images(base_url: str) -> None:
    oracle = await asyncio.gather(*(play(base_url, row(image), f"{COUNT} > count") for image in IMAGES))
    null = await asyncio.gather(*(play(base_url, row(image), None) for image in IMAGES))
    assert [verdict["reward"] for verdict in oracle] == [1.0, 1.0]
    assert [verdict["reward"] for verdict in null] == [0.0, 0.0]
    plain, kernel = (verdict["packages"] for verdict in oracle)
    assert plain < kernel, "both were in one image"
    for verdict, count in zip([*oracle, *null], (plain, kernel) * 2, strict=True):
        told = {key: verdict[key] for key in ("verdict", "passed", "verdict_detail", "packages")}
        right = verdict["reward"] == 1.0
        assert told == {
            "verdict": "right" if right else "wrong",
            "passed": right,
            "verdict_detail": f"the image has {count}",
            "packages": count,
        }


async def test_a_row_tells_which_hosts_its_agent_asked_for(base_url: str) -> None:
    fetch = "python3 -c 'import urllib.request as u; print(u.urlopen(\"{}\").read())' || true"
    async with origin() as server:
        allowed = f"http://{ALLOWED}:{server.port}"
        asked = row("default") | {"network": [ALLOWED]}
        commands = [fetch.format(allowed), fetch.format(allowed), fetch.format("http://elsewhere.example/")]
        verdict = await play(base_url, asked, " && ".join(commands))
    told = [(use["host"], use["port"], use["allowed"], use["connections"]) for use in verdict["egress"]]
    assert told == [(ALLOWED, server.port, True, 2), ("elsewhere.example", 80, False, 1)]
    assert "egress" not in await play(base_url, row("default"), None)


@pytest.fixture
def without_bash(image: Path, runtime: Runtime, tmp_path: Path) -> Path:
    """Build an image with little more than a shell."""
    make_tiny_root(image, tmp_path / "tiny")
    work = tmp_path / "work"
    work.mkdir()
    return build_tools.build(runtime, work, str(tmp_path / "tiny"), timeout_s=60, unpacked=True)


async def test_unusable_image_is_the_rows_fault(base_url: str, without_bash: Path) -> None:
    for image, complaint in {
        7: "must name the row's image",
        "no-such-image": "no image is named",
        "docker://Not An Image": "is not the address of an image",
        "/nowhere/no.sif": "/nowhere/no.sif",
        str(without_bash): "lacks bash",
    }.items():
        async with Client(base_url) as client:
            status, problem, kind = await client.post("/seed_session", row(image))
            assert (status, kind) == (422, None), problem
            [wrong] = problem["errors"]
            assert wrong["field"] == "image"
            assert complaint in wrong["message"]
