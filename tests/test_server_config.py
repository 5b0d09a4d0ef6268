# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A key that no server reads is refused by its name, and Gym's own are not, whatever the file is taken from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from nemo_gym_prorl.agent.gym_environments import ServiceConfig
from nemo_gym_prorl.policy.runtime import PolicyConfig
from nemo_gym_prorl.rollout.api.schemas import SubmitRequest
from nemo_gym_prorl.servers.agent_server import ProRLAgentConfig
from nemo_gym_prorl.servers.model_server import ProrlModelConfig
from nemo_gym_prorl.servers.server_base import ServerConfig
from resources_servers.prorl_code.app import ProRLCodeConfig


ROOT = Path(__file__).parents[1]
GIVEN: dict[type[BaseModel], dict[str, Any]] = {
    ProRLAgentConfig: {
        "resources_server": {"type": "resources_servers", "name": "environment"},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
    },
    ProRLCodeConfig: {"domain": "coding"},
    ProrlModelConfig: {"base_url": "http://127.0.0.1:1/v1", "model": "m"},
    PolicyConfig: {"base_url": ["http://127.0.0.1:1/v1"], "model": "m"},
}
ROW = {"row": {"responses_create_params": {"input": "hi"}}}
ADDRESS = {"name": "server", "entrypoint": "app.py", "host": "127.0.0.1", "port": 1}
GYMS = {"datasets": [], "description": "d", "value": "v", "verified": False, "num_workers": None}


@pytest.mark.parametrize(
    ("config", "given", "field"),
    [
        (ProRLAgentConfig, {"max_turns": 3}, "max_turns"),
        (ProRLAgentConfig, {"data_sources": ["x"]}, "data_sources"),
        (ProRLAgentConfig, {"environments": {"swe": {"max_attempts": 3}}}, "environments.swe.max_attempts"),
        (ProRLAgentConfig, {"environments": {"swe": {"budgets": {"rum": 3}}}}, "environments.swe.budgets.rum"),
        (ProRLAgentConfig, {"stages": {"runs": 3}}, "stages.runs"),
        (ProRLCodeConfig, {"tool_timeout": 3}, "tool_timeout"),
        (ProrlModelConfig, {"chat_template_kwarg": 3}, "chat_template_kwarg"),
        (PolicyConfig, {"tool_format": "hermes"}, "tool_format"),
        (SubmitRequest, {"handler": "mine"}, "handler"),
    ],
)
def test_an_unknown_key_is_refused_by_its_name(config: type[BaseModel], given: dict[str, Any], field: str) -> None:
    needed = (ADDRESS | GYMS if issubclass(config, ServerConfig) else {}) | GIVEN.get(config, ROW)
    config.model_validate(needed)
    with pytest.raises(ValidationError, match=rf"{field}\n  Extra inputs are not permitted"):
        config.model_validate({**needed, **given})


def test_what_an_environment_leaves_out_is_the_services() -> None:
    service = ServiceConfig.model_validate(
        {
            "max_steps": 5,
            "max_total_sequence_length": 9,
            "handler": "mine",
            "handler_config": {"tries": 3},
            "budgets": {"run": 7},
            "environments": {
                "same": {},
                "other": {"max_steps": None, "handler": "gym_environment", "budgets": {"eval": 1}},
            },
        }
    )
    same, other = service.of_environment("same"), service.of_environment("other")
    assert (same.max_steps, same.handler, same.handler_config) == (5, "mine", {"tries": 3})
    assert (other.max_steps, other.handler, other.handler_config) == (None, "gym_environment", {})
    assert other.max_total_sequence_length == 9
    assert (service.budgets_of("other").run, service.budgets_of("other").eval) == (7, 1)


@pytest.mark.parametrize("file", sorted(ROOT.glob("re*/prorl_*/configs/*.yaml")), ids=lambda file: file.name)
def test_what_our_own_files_say_is_known(file: Path) -> None:
    configs = {"prorl_agent": ProRLAgentConfig, "prorl_code": ProRLCodeConfig, "prorl_model": ProrlModelConfig}
    for servers in yaml.safe_load(file.read_text()).values():
        for kind in servers.values() if isinstance(servers, dict) else ():
            for name, said in kind.items() if isinstance(kind, dict) else ():
                if config := configs.get(name):
                    wrong = _errors(config, {**ADDRESS, **GIVEN[config], **said})
                    assert "Extra inputs" not in wrong


def _errors(config: type[BaseModel], given: dict[str, Any]) -> str:
    try:
        config.model_validate(given)
    except ValidationError as error:
        return str(error)
    return ""
