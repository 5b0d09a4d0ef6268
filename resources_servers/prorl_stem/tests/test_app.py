# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What can be said of the server without a sandbox, and Gym's check of its verifier; the rest is in
the repository's ``tests/prorl_stem``."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf
from starlette.testclient import TestClient

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.tasks.stem.problems import row_for
from resources_servers.prorl_stem.app import VERIFIER_FIXTURE, ProRLStemConfig, ProRLStemServer


CONFIG = OmegaConf.load(Path(__file__).parents[1] / "configs/prorl_stem.yaml")
ROW = row_for("How fast is light in vacuum?", "3.00e8 m/s")


def make_client(**settings: Any) -> TestClient:
    shipped = CONFIG.prorl_stem.resources_servers.prorl_stem
    config = ProRLStemConfig(**{"port": 1, "name": "prorl_stem", **shipped, **settings})
    head = BaseServerConfig(host="127.0.0.1", port=1)
    server = ProRLStemServer(
        config=config, server_client=ServerClient(head_server_config=head, global_config_dict=CONFIG)
    )
    # Not as a context manager: that would run the lifespan, which builds the sandbox image.
    return TestClient(server.setup_webserver())


def test_routes() -> None:
    paths = set(make_client().get("/openapi.json").json()["paths"])
    assert {"/seed_session", "/verify", "/aggregate_metrics", "/release_session", "/close_session"} <= paths
    assert {"/search", "/python"} <= paths


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"question": None}, "question"),
        ({"question": 7}, "question"),
        ({"expected_answer": None}, "expected_answer"),
        ({"expected_answer": " "}, "expected_answer"),
        ({"expected_answer": "x" * 3000}, "expected_answer"),
        ({"expected_answer": "mitochondria"}, "expected_answer"),
        ({"options": "A"}, "options"),
        ({"options": [{"A": "x"}]}, "options"),
        ({"options": [{"A": "x"}, {"AB": "y"}]}, "options"),
        ({"options": [{"A": "x"}, {"A": "y"}]}, "options"),
        ({"options": [{"A": "x"}, {"B": 7}]}, "options"),
        ({"options": [{"A": "x"}, {"B": "y"}]}, "expected_answer"),
    ],
    ids=str,
)
def test_a_bad_row_is_refused_and_the_field_named(change: dict[str, object], field: str) -> None:
    answer = make_client().post("/seed_session", json=ROW | change)
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == [field]


def test_a_judge_that_is_nowhere_is_told_before_any_rollout() -> None:
    with pytest.raises(InfrastructureError, match="no server 'gone'"):
        make_client(judge_model_server={"type": "responses_api_models", "name": "gone"})


def test_a_hosted_engine_takes_a_key() -> None:
    with pytest.raises(ValueError, match=r"search.api_key"):
        make_client(search={"engine": "tavily"})


@pytest.mark.sandbox
def test_verifier_fixture() -> None:
    """Sandboxes are real; ``seeded`` has it compare two rewards, too."""
    gym = pytest.importorskip("nemo_gym.verifier_fixture", reason="Gym has it since 0.7")
    asyncio.run(gym.exercise_verifier_fixture(VERIFIER_FIXTURE, reward_range=(0.0, 1.0), determinism="seeded"))
