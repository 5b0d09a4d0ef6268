# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Grading of Harbor tasks by the server of an ordinary user."""

from pathlib import Path

import pytest

from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from tests.sandbox.as_user import run_tests


OTHERS = pytest.mark.long("root plays them in the first tier; steps are graded as this user, too")


@pytest.mark.sandbox
@pytest.mark.timeout(900)
@pytest.mark.skipif(not is_machine_root(), reason="this is an ordinary user already")
@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("test_steps", "both or links or strict or instruction"),
        pytest.param("test_artifacts", "files_and or links or each_step", marks=OTHERS),
        pytest.param("test_cheats", "no_cheat", marks=OTHERS),
        pytest.param(
            "test_harbor_server",
            "tests_decide or users or limited or (never_a_reward and True and (reward or logs))",
            marks=OTHERS,
        ),
    ],
)
def test_grading_for_an_ordinary_user(image: Path, runtime: Runtime, file: str, chosen: str) -> None:
    run_tests(runtime, "-k", chosen, str(Path(__file__).with_name(f"{file}.py")))
