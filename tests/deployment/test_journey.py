# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The installed wheel under Gym's own command line, from another working directory."""

import pytest

from tests.deployment import journey


@pytest.mark.long(
    "setup/test_readme.py takes the wheel through Gym's command line too, and `make gym-matrix` all of this"
)
@pytest.mark.gym
@pytest.mark.sandbox
@pytest.mark.timeout(600)
async def test_the_wheel_does_everything_that_gyms_command_line_promises(wheel_python, tmp_path):
    await journey.take(wheel_python, tmp_path)
