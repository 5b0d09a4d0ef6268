# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tests of the agent server: routes, and refused configurations."""

from typing import Any

import pytest
from fastapi.testclient import TestClient
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf
from pydantic import ValidationError

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.servers.agent_server import ProRLAgent, ProRLAgentConfig


ADDRESS = {"entrypoint": "app.py", "host": "127.0.0.1", "port": 1}
DEPLOYMENT = {
    "environment": {"resources_servers": {"some_environment": ADDRESS}},
    "policy_model": {"responses_api_models": {"some_model": ADDRESS}},
}


def agent(deployment: dict[str, Any] = DEPLOYMENT, **settings: Any) -> ProRLAgent:
    config = ProRLAgentConfig(
        name="agent",
        resources_server={"type": "resources_servers", "name": "environment"},
        model_server={"type": "responses_api_models", "name": "policy_model"},
        **{**ADDRESS, **settings},
    )
    head = BaseServerConfig(host="127.0.0.1", port=1)
    client = ServerClient(head_server_config=head, global_config_dict=OmegaConf.create(deployment))
    return ProRLAgent(config=config, server_client=client)


def test_gyms_routes_and_the_job_api_stand_side_by_side() -> None:
    with TestClient(agent().setup_webserver()) as client:
        paths = client.get("/openapi.json").json()["paths"]
        assert {"/run", "/v1/responses", "/aggregate_metrics", "/v1/rollouts", "/v1/events", "/status"} <= set(paths)
        assert "/process" not in paths
        assert client.get("/status").json()["stages"]["run"]["slots"] == 32


def test_the_original_wire_format_is_optional() -> None:
    with TestClient(agent(prorl_wire=True).setup_webserver()) as client:
        paths = client.get("/openapi.json").json()["paths"]
        assert {"/process", "/cancel", "/start", "/stop", "/add_llm_server", "/clear_llm_server"} <= set(paths)
        assert client.get("/status").json()["active_run"] == 0


def test_a_rollout_whose_environment_is_down_is_a_masked_row() -> None:
    quick = {"max_attempts": 1, "unreachable_s": 0.5}
    with TestClient(agent(**quick).setup_webserver()) as client:
        row = {"responses_create_params": {"input": "hi"}, "_ng_task_index": 0, "_ng_rollout_index": 0}
        answer = client.post("/run", json=row)
        assert answer.status_code == 200
        assert answer.json()["mask_sample"] is True
        assert answer.json()["failure_kind"] == "transport_unreachable"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"stages": {"run": 0}}, "stages.run"),
        ({"stages": {"walk": 4}}, "stages.walk"),
        ({"budgets": {"eval": -1}}, "budgets.eval"),
        ({"max_steps": 0}, "max_steps"),
    ],
)
def test_impossible_settings_name_the_field(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        agent(**settings)
    assert ".".join(map(str, refused.value.errors()[0]["loc"])) == field


@pytest.mark.parametrize(
    ("settings", "deployment", "field"),
    [
        ({"num_workers": 2}, DEPLOYMENT, "num_workers"),
        ({"handler": "nope"}, DEPLOYMENT, "handler"),
        ({}, {"environment": DEPLOYMENT["environment"]}, "model_server"),
        ({"further_model_servers": ["nobody"]}, DEPLOYMENT, "further_model_servers.0"),
    ],
)
def test_a_deployment_that_cannot_work_is_refused_at_start(
    settings: dict[str, Any], deployment: dict[str, Any], field: str
) -> None:
    with pytest.raises(CallerError) as refused:
        agent(deployment, **settings).setup_webserver()
    assert refused.value.field == field


def test_it_does_not_listen_beyond_loopback_without_a_key() -> None:
    with pytest.raises(CallerError) as refused:
        agent(host="0.0.0.0").setup_webserver()
    assert refused.value.field == "control_token"
    agent(host="0.0.0.0", control_token="open-sesame").setup_webserver()
