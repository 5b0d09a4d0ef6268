# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What of ``prorl serve``'s overrides is known to be wrong before any server starts."""

import pytest

from nemo_gym_prorl.commands.overrides import check_overrides
from nemo_gym_prorl.failures import CallerError


AGENT = "prorl_code_agent.responses_api_agents.prorl_agent"


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("++prorl_code_agnt.responses_api_agents.prorl_agent.stages.run=4", "prorl_code_agent"),
        ("++prorl_code_agent.responses_api_agent.prorl_agent.stages.run=4", "prorl_code_agent.responses_api_agents"),
        ("++prorl_code_agent.responses_api_agents.prorl_agnt.stages.run=4", AGENT),
        (f"++{AGENT}.stages.rn=4", f"{AGENT}.stages.run"),
        ("sandbox.singularity.memory_mb=4", "sandbox.singularity.memory_mib"),
        ("++policy_model.responses_api_models.prorl_modle.x=4", "policy_model.responses_api_models.prorl_model"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(override: str, nearest: str) -> None:
    with pytest.raises(CallerError, match=f"there is no .*the nearest that there is: {nearest}$") as caught:
        check_overrides([override], ["prorl_code"], "prorl_model")
    assert caught.value.field == override.lstrip("+").partition("=")[0]


def test_the_head_servers_port_is_an_option() -> None:
    with pytest.raises(CallerError, match="--head-port"):
        check_overrides(["++head_server.port=11001"], ["prorl_code"], "prorl_model")


@pytest.mark.parametrize(
    "override",
    [
        f"++{AGENT}.stages.run=4",
        f"++{AGENT}.max_steps=4",
        "++sandbox.singularity.memory_mib=100",
        "++sandbox={apptainer: {}}",
        "++uvicorn_logging_show_200_ok=true",
        "++head_server.host=127.0.0.1",
        "++my_own.resources_servers.mine.entrypoint=app.py",
        "~sandbox.singularity.disk_mib=1",
        "hydra/job_logging=none",
    ],
)
def test_what_may_be_right_is_left_to_gym(override: str) -> None:
    check_overrides([override], ["prorl_code"], "prorl_model")
    check_overrides(["++prorl_code_agnt.x=1"], ["no_such_environment"], "prorl_model")
