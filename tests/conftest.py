# SPDX-License-Identifier: Apache-2.0
"""What every part of the suite shares."""

import pytest

from nemo_gym_prorl.policy.scripted import ScriptedConfig, serve


@pytest.fixture
async def scripted_policy():
    """Base URL of a scripted policy that lives as long as the test."""
    async with serve(ScriptedConfig()) as base_url:
        yield base_url
