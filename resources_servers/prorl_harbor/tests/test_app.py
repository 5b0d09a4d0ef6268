# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym's verifier check; further tests are in the repository's ``tests``."""

import asyncio

import pytest

from resources_servers.prorl_harbor.app import VERIFIER_FIXTURE


@pytest.mark.sandbox
def test_verifier_fixture() -> None:
    """Runs the cases in real sandboxes; ``seeded`` also compares two rewards of one case."""
    gym = pytest.importorskip("nemo_gym.verifier_fixture", reason="Gym has it since 0.7")
    asyncio.run(gym.exercise_verifier_fixture(VERIFIER_FIXTURE, reward_range=(0.0, 1.0), determinism="seeded"))
