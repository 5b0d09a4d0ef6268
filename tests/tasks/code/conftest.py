# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Fixture: grading in a real sandbox."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest_asyncio

from nemo_gym_prorl.tasks.code.code_rows import CodeProblem
from nemo_gym_prorl.tasks.code.grading import CodeLimits, grade_in
from nemo_gym_prorl.tasks.task import Grade
from tests.tasks import containers


Judge = Callable[..., Awaitable[Grade]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judge() -> AsyncIterator[Judge]:
    """Grade sources in one shared sandbox; tests of a module share its event loop."""
    async with containers.running() as sandbox:

        async def graded(problem: CodeProblem, source: str, **limits: Any) -> Grade:
            outcome = await grade_in(sandbox, problem, source, CodeLimits(**limits), containers.ROOT)
            assert isinstance(outcome, Grade), outcome
            return outcome

        yield graded
