# SPDX-License-Identifier: Apache-2.0
"""What sessions keep in mind when no sandbox comes up: nothing."""

import asyncio

import pytest

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.tasks.humaneval.grading import GradingLimits
from nemo_gym_prorl.tasks.humaneval.problems import problems, row_for
from nemo_gym_prorl.tasks.humaneval.task import HumanEval
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.sessions import SessionLimits, Sessions
from nemo_gym_prorl.tasks.task import SandboxNeeds
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits


ROW = row_for(problems()["HumanEval/0"])
TASK = HumanEval("/sandbox", ToolLimits(), GradingLimits())


class Starts:
    """Starts of sandboxes that take a moment and fail."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0

    async def __call__(self, needs: SandboxNeeds) -> Sandbox:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0.02)
        finally:
            self.now -= 1
        raise OSError("no sandbox today")


async def test_keys_whose_seeding_failed_are_forgotten() -> None:
    sessions = Sessions(TASK, Starts(), SessionLimits())
    for number in range(20):
        with pytest.raises(InfrastructureError):
            await sessions.seed(f"key{number}", ROW)
    assert not sessions._seeding


async def test_keys_whose_seeding_was_given_up_are_forgotten() -> None:
    sessions = Sessions(TASK, Starts(), SessionLimits())
    for number in range(5):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sessions.seed(f"key{number}", ROW), 0.001)
    await sessions.aclose()
    assert not sessions._seeding


async def test_one_key_is_seeded_by_one_at_a_time_however_it_ends() -> None:
    starts = Starts()
    sessions = Sessions(TASK, starts, SessionLimits(max_sandbox_starts=8))

    async def seed(after: float) -> None:
        await asyncio.sleep(after)
        with pytest.raises(InfrastructureError):
            await sessions.seed("key", ROW)

    await asyncio.gather(*(seed(0.01 * number) for number in range(8)))
    assert starts.most == 1
    assert not sessions._seeding
