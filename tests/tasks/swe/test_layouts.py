# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Converted rows of published datasets in images with the datasets' layouts."""

import json
from typing import Any

import pytest

from nemo_gym_prorl.tasks.swe.datasets import CONVERTERS
from tests.tasks.swe import records, tally


pytestmark = pytest.mark.sandbox

CONDA, VENV = "/opt/miniconda3/envs/testbed", "/testbed/.venv"
HIDDEN_TESTS = """\
from tally import parse, total

def test_plain():
    assert parse("12.34") == 1234

def test_negative():
    assert parse("-1.50") == -150

class TestTotal:
    def test_it(self):
        assert total(["1,000.5", "2"]) == 100250

def test_never():
    assert parse("1") == 2
"""
EXPECTED = {"test_plain": "PASSED", "test_negative": "PASSED", "TestTotal.test_it": "PASSED", "test_never": "FAILED"}


def image(layout: str, environment: str) -> str:
    words = (("LAYOUT", layout), ("ENVIRONMENT", environment), ("TESTS", HIDDEN_TESTS))
    return tally.build_image("layouts", tally.image(), layout, words)


def swe_bench() -> dict[str, Any]:
    record = records.swe_bench(
        repo="pallets/flask",
        instance_id="pallets__flask-1",
        base_commit=tally.base_commit(),
        patch=tally.FIX,
        test_patch=tally.TEST_PATCH,
        FAIL_TO_PASS=json.dumps(tally.FAIL_TO_PASS),
        PASS_TO_PASS=json.dumps(tally.PASS_TO_PASS),
        eval_script=records.eval_script(f"pytest -rA {tally.TESTS}"),
        log_parser="parse_log_pytest",
    )
    return CONVERTERS["swe-bench"](record, None) | {"image": image("conda", CONDA)}


def r2e_gym() -> dict[str, Any]:
    record = records.r2e_gym(repo_name="tally", expected_output_json=json.dumps(EXPECTED))
    return CONVERTERS["r2e-gym"](record, None) | {"image": image("r2e", VENV)}


FIXED = (tally.APPLY_FIX, "resolved")


@pytest.mark.parametrize(
    ("make_row", "environment", "tried"),
    [
        (swe_bench, CONDA, [FIXED]),
        (r2e_gym, VENV, [FIXED, ("echo '# nothing' >> tally/money.py", "failed")]),
    ],
)
async def test_image_environment_is_active_for_policy_and_tests(
    make_row: Any, environment: str, tried: list[tuple[str, str]]
) -> None:
    row, task = make_row(), tally.shared_task()
    for fix, verdict in tried:
        async with tally.open_sandbox(image_path=row["image"]) as sandbox:
            tools = await task.tools.open(sandbox, task.needs(row))
            await task.prepare(row, tools)
            looked = await tools.call("bash", {"command": "which python pytest; ls -d *r2e* run_tests.sh /r2e_tests"})
            assert looked.splitlines()[:2] == [f"{environment}/bin/{name}" for name in ("python", "pytest")]
            assert looked.count("No such file") == 3, "hidden tests are visible"
            await tools.close()
        grade, _ = await tally.play_row(row, fix)
        assert (grade.verdict, grade.fields["patch_files"]) == (verdict, ["tally/money.py"]), grade
        # All three deciding tests fail when changed.
        assert grade.fields["canaries_failed"] == (3 if verdict == "resolved" else 0)
