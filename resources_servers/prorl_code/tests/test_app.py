# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What can be said of the server without a sandbox, and Gym's check of its verifier; the rest is in
the repository's ``tests/prorl_code``."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf
from starlette.testclient import TestClient

from nemo_gym_prorl.failures import CallerError
from resources_servers.prorl_code.app import VERIFIER_FIXTURE, ProRLCodeConfig, ProRLCodeServer


CONFIG = OmegaConf.load(Path(__file__).parents[1] / "configs/prorl_code.yaml")


def make_client(**settings: Any) -> TestClient:
    shipped = CONFIG.prorl_code.resources_servers.prorl_code
    config = ProRLCodeConfig(**{"host": "127.0.0.1", "port": 1, "name": "prorl_code", **shipped, **settings})
    head = BaseServerConfig(host="127.0.0.1", port=1)
    server = ProRLCodeServer(
        config=config, server_client=ServerClient(head_server_config=head, global_config_dict=CONFIG)
    )
    # Not as a context manager: that would run the lifespan, which builds the sandbox image.
    return TestClient(server.setup_webserver())


def test_routes() -> None:
    paths = set(make_client().get("/openapi.json").json()["paths"])
    assert {"/seed_session", "/verify", "/aggregate_metrics", "/release_session", "/close_session"} <= paths
    assert {"/bash", "/python", "/str_replace_editor", "/submit"} <= paths


@pytest.mark.parametrize("row", [{}, {"task_id": "HumanEval/2"}])
def test_a_bad_row_is_refused_and_the_field_named(row: dict[str, str]) -> None:
    answer = make_client().post("/seed_session", json=row)
    assert answer.status_code == 422
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.json()["errors"][0]["field"] == "verifier_metadata"


def test_a_tool_without_a_session_is_a_lost_session() -> None:
    answer = make_client().post("/bash", json={"command": "ls"})
    assert answer.status_code == 500
    assert answer.headers["X-ProRL-Failure-Kind"] == "session_lost"


def test_release_and_close_of_an_unknown_session_are_no_errors() -> None:
    client = make_client()
    assert client.post("/release_session").json() == {"released": True}
    assert client.post("/close_session").json() == {}


@pytest.mark.parametrize("path", ["/seed_session", "/bash", "/release_session", "/verify", "/close_session", "/docs"])
def test_with_a_key_every_route_needs_it(path: str) -> None:
    client = make_client(control_token="open-sesame")
    assert client.post(path, json={}).status_code == 401
    assert client.post(path, json={}, headers={"Authorization": "Bearer open-sesame"}).status_code != 401


def test_it_does_not_listen_beyond_loopback_without_a_key() -> None:
    with pytest.raises(CallerError, match="control_token"):
        make_client(host="0.0.0.0")
    make_client(host="0.0.0.0", control_token="open-sesame")


def test_an_option_that_no_sandbox_could_have_is_refused_before_any_rollout() -> None:
    with pytest.raises(CallerError, match="memory_mib"):
        make_client(sandbox_provider={"singularity": {"memory": 3}})


@pytest.mark.parametrize("body", [b"", b"\xff", b"[" * 5000, b'{"task_id": ' + b"[" * 5000, b"7"])
@pytest.mark.parametrize("path", ["/seed_session", "/verify", "/bash"])
def test_a_body_that_is_no_json_is_nobodys_trouble_but_the_senders(path: str, body: bytes) -> None:
    answer = make_client().post(path, content=body, headers={"Content-Type": "application/json"})
    if path == "/bash":  # what a tool is asked is an observation, and there is no session to make it in
        assert answer.headers["X-ProRL-Failure-Kind"] == "session_lost"
    else:
        assert answer.status_code == 422
        assert answer.headers["Content-Type"] == "application/problem+json"


@pytest.mark.sandbox
def test_verifier_fixture() -> None:
    """Sandboxes are real; ``seeded`` has it compare two rewards, too."""
    gym = pytest.importorskip("nemo_gym.verifier_fixture", reason="Gym has it since 0.7")
    asyncio.run(gym.exercise_verifier_fixture(VERIFIER_FIXTURE, reward_range=(0.0, 1.0), determinism="seeded"))
