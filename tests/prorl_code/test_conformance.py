# SPDX-License-Identifier: Apache-2.0
"""Gym's own conformance check of a resources server's sessions, on the Gym versions that have one (0.7)."""

import pytest

from tests.prorl_code.conftest import build, row
from tests.tasks import containers


conformance = pytest.importorskip("nemo_gym.testing.session_conformance")


@pytest.mark.sandbox
def test_sessions_keep_gyms_contract() -> None:
    from nemo_gym.base_resources_server import ResourcesSeedSessionRequest

    seed = ResourcesSeedSessionRequest(
        resources_session_id="conformance",
        episode_id={"rollout_id": "conformance"},
        task_id={"taskset": "humaneval", "task_id": "HumanEval/2"},
        task_data=row("HumanEval/2"),
    )
    conformance.check_resources_session_contract(build().setup_webserver(), seed, keeps_state=True)
    assert containers.instances() == set()
