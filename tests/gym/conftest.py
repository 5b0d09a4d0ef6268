# SPDX-License-Identifier: Apache-2.0
"""What the tests with a real Gym share."""

from pathlib import Path

import pytest

from nemo_gym_prorl.gym.command_line import GymCli


@pytest.fixture
def cli(tmp_path: Path) -> GymCli:
    """Gym's command line on the running interpreter."""
    return GymCli(tmp_path)
