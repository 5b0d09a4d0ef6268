# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Verdicts as the datasets' own harnesses give them, and where ours are stricter."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym_prorl.tasks.swe.grading import Verdict, judged
from nemo_gym_prorl.tasks.swe.instance import SweInstance
from nemo_gym_prorl.tasks.swe.log_parsing import Parsed, answer, job_of
from nemo_gym_prorl.tasks.swe.report import compare
from nemo_gym_prorl.tasks.swe.testing import Run
from tests.tasks.swe.runner_logs import KINDS, draw_run


SCRIPT = Path(__file__).parents[3] / "scripts/compare_swebench.py"


def test_each_difference_from_swebench_has_a_reason() -> None:
    """The table of docs/swe.md, of fewer logs."""
    done = subprocess.run([sys.executable, SCRIPT, "--logs", "400", "--seed", "7"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nobody knows why" not in done.stdout


def verdicts(instance: SweInstance, log: str, exit_code: int) -> tuple[Verdict, bool]:
    """Of a run without a witness: ours, and the dataset's own."""
    run = Run(exit_code=exit_code, log=log)
    parsed = Parsed(**(answer(job_of(instance, run.logs, exit_code, "a__b-1")) or {}))
    report = compare(instance, parsed.maps)
    verdict, _ = judged(run, report, parsed.resolved)
    return verdict, parsed.resolved


def instance_of(kind: str) -> SweInstance:
    _, instance, _ = draw_run(KINDS[kind], random.Random(0))
    first, second = map(KINDS[kind].listed, ("test_1", "test_2"))
    return instance.model_copy(update={"FAIL_TO_PASS": (first,), "PASS_TO_PASS": (second,)})


def test_a_failure_outside_of_the_lists_is_no_crash() -> None:
    instance, good = instance_of("sympy"), "test_1 ok\ntest_2 ok\n"
    one, other = (verdicts(instance, f"{good}test_3 F\n", 1), verdicts(instance, good, 1))
    assert one == (Verdict.RESOLVED, True)
    assert other == (Verdict.CRASHED, False)


def test_where_only_failures_are_printed_the_others_have_passed() -> None:
    instance = instance_of("eslint")
    assert (instance.eval_type, instance.kind_of_runner) == ("fail_only", "log")
    passed, failed, never_ran = (
        verdicts(instance, "  5 passing (1s)\n", 0),
        verdicts(instance, "  4 passing (1s)\n  1) test_1:\n     AssertionError: 1\n", 1),
        verdicts(instance, "npm: command not found\n", 127),
    )
    assert passed == (Verdict.RESOLVED, True)
    assert failed == (Verdict.FAILED, False)
    assert never_ran[0] is Verdict.CRASHED


SUMMARY = "=== short test summary info ===\n"


@pytest.mark.parametrize(
    ("expected", "lines"),
    [
        # Of names that are one without what follows a dash, the last in the order of names counts.
        ({"test_a[1": "PASSED"}, "PASSED t.py::test_a[1 - 2]\nFAILED t.py::test_a[1 - 1] - no\n"),
        ({"test_a": "PASSED", "": "ERROR"}, "SKIPPED [1] t.py:3: on ERROR only\nPASSED t.py::test_a\n"),
        ({"test_a": "PASSED"}, "\x1b[32mPASSED\x1b[0m t.py::\x1b[1mtest_a\x1b[0m\r\n"),
        ({"test_a": "PASSED"}, f"PASSED t.py::test_a\n{SUMMARY}FAILED t.py::test_b\n"),
    ],
    ids=["order of names", "a status in what a skipped test says", "colours", "one summary"],
)
def test_results_are_compared_as_r2e_gym_does(expected: dict[str, str], lines: str) -> None:
    instance = SweInstance(
        dataset="r2e-gym",
        repo="a",
        problem_statement="x",
        test_command="bash run_tests.sh",
        log_parser="r2e_gym",
        expected_output=expected,
    )
    parsed = Parsed(**(answer(job_of(instance, [SUMMARY + lines], 0, "a__b-1")) or {}))
    assert parsed.resolved
    assert compare(instance, parsed.maps).resolved
