# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a dataset row says of a software-engineering task. Pure; one shape for all datasets.

A row of ``prorl_swe``::

    {"responses_create_params": {"input": [...], "tools": [...]},   # what the policy is asked, made by whoever writes
     "data_source": "swe-bench",                                    # the dataset's name, for routing and metrics
     "instance_id": "django__django-11099",
     "image": "/images/....sif",                                    # whatever the sandbox provider takes for one
     "network": false, "cpu": 2, "memory_mib": 8192, ...            # optional: see SweRow
     "swe": {...}}                                                  # see SweInstance

``swe`` holds what the environment needs and the policy never sees: hidden tests and, for oracles, the real fix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from nemo_gym_prorl.failures import CallerError


Dataset = Literal["swe-bench", "swe-gym", "swe-rebench", "r2e-gym", "made"]
Folder = Annotated[str, StringConstraints(pattern=r"^/[\w./+-]+$", max_length=500)]
TestId = Annotated[str, StringConstraints(min_length=1, max_length=10_000)]

R2E_HIDDEN = ("/r2e_tests", "/testbed/r2e_tests", "/root/r2e_tests", "/testbed/run_tests.sh", "/root/run_tests.sh")
"""Where R2E-Gym's images keep what the policy must not see."""

MAX_TEXT = 20_000_000
"""Longest patch of a row, in characters."""


class Runner(StrEnum):
    """What runs the tests, and so how their outcomes are had besides the log."""

    PYTEST = "pytest"
    UNITTEST = "unittest"
    LOG = "log"
    """Only what it prints is known: a policy's code that prints the same is believed."""


class TestStatus(StrEnum):
    """What became of a test; SWE-bench's words."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"
    ERROR = "ERROR"
    XFAIL = "XFAIL"


class SweInstance(BaseModel):
    """One task.

    Attributes:
        dataset: whose rules its images and its grading follow.
        repo: e.g. ``"django/django"``; log parsers and messages go by it.
        version: the repository's, for people.
        base_commit: must be in the image's repository, at or before its ``HEAD``; empty: not looked at (R2E-Gym, whose
            rows name the fix). What the policy starts from is the working tree that the image has.
        problem_statement: the issue; whoever writes the row has put it into ``responses_create_params``.
        patch: the real fix; for oracle policies only, grading never reads what it does, only which files it touches.
        test_patch: makes the hidden tests of the base. May be empty where the image has them.
        FAIL_TO_PASS: tests that must pass after the fix, as the log parser names them.
        PASS_TO_PASS: tests that must still pass.
        repo_folder: where the image has the repository.
        test_command: run by bash in ``repo_folder``; whole, files to test included.
        before_tests: shell lines run once before the tests, such as ``pip install -e .``; they run the policy's code.
            What they export, their folder, functions and options of the shell are the test command's, too.
        log_parser: a name in ``swebench``'s registry, e.g. ``"parse_log_pytest"``, or ``"r2e_gym"``,
            which is R2E-Gym's and none of SWE-bench's.
        eval_type: as in SWE-bench's rows: ``"fail_only"`` where the runner prints only what fails, so that a test that
            it does not name has passed.
        tests_network: the tests, and what comes before them, reach the network. The policy does only if ``network`` of
            the row says so.
        test_timeout_s: seconds for the tests, if the dataset has less than the server.
        runner: what runs the tests. ``None``: read from ``test_command``.
        expected_output: R2E-Gym's map of test to status, in place of the two lists.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    dataset: Dataset
    repo: str = Field(min_length=1)
    version: str = ""
    base_commit: str = Field(default="", pattern=r"^([0-9a-f]{7,64})?$")
    problem_statement: str = Field(min_length=1)
    patch: str = Field(default="", max_length=MAX_TEXT)
    test_patch: str = Field(default="", max_length=MAX_TEXT)
    FAIL_TO_PASS: tuple[TestId, ...] = ()
    PASS_TO_PASS: tuple[TestId, ...] = ()
    repo_folder: Folder = "/testbed"
    test_command: str = Field(min_length=1)
    before_tests: str = ""
    log_parser: str = Field(default="parse_log_pytest", min_length=1)
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail"
    tests_network: bool = False
    test_timeout_s: float | None = Field(default=None, gt=0)
    runner: Runner | None = None
    expected_output: Mapping[str, TestStatus] | None = None

    @model_validator(mode="after")
    def _has_a_measure(self) -> Self:
        if self.dataset == "r2e-gym":
            if not self.expected_output:
                raise ValueError("expected_output: an r2e-gym row needs the statuses that its tests should have")
        elif not self.FAIL_TO_PASS:
            raise ValueError("FAIL_TO_PASS: names no test, so nothing could tell a fix from none")
        elif clash := set(self.FAIL_TO_PASS) & set(self.PASS_TO_PASS):
            raise ValueError(f"PASS_TO_PASS: {min(clash)!r:.200} is in FAIL_TO_PASS too")
        return self

    @property
    def hidden(self) -> tuple[str, ...]:
        """What the policy must not see."""
        return R2E_HIDDEN if self.dataset == "r2e-gym" else ()

    @property
    def deciding(self) -> tuple[str, ...]:
        """The tests that tell a fix from none; of a map of statuses all that should pass."""
        expected = self.expected_output or {}
        return self.FAIL_TO_PASS or tuple(test for test, was in expected.items() if was == TestStatus.PASSED)

    @property
    def kind_of_runner(self) -> Runner:
        """What runs the tests: as the row says, else as its command looks."""
        if self.runner is not None:
            return self.runner
        if re.search(r"\btox\b", self.test_command):
            return Runner.LOG  # it gives its programs an environment of their own
        if self.dataset == "r2e-gym" or re.search(r"\b(pytest|py\.test)\b", self.test_command):
            return Runner.PYTEST
        return Runner.UNITTEST if re.search(r"\bruntests\.py\b|-m unittest\b", self.test_command) else Runner.LOG


class SweRow(BaseModel):
    """The fields of a row that the environment reads; all others are the caller's own.

    Attributes:
        instance_id: the task's name.
        image: the task's image, as the sandbox provider names images.
        swe: the task.
        network: its sandboxes reach the network; ``None``, as with the limits that follow: as the server has it.
        cpu: cores.
        memory_mib: memory, in MiB.
        disk_gib: what a sandbox may write, in GiB.
        processes: how many processes and threads it may have.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    instance_id: str = Field(min_length=1)
    image: str = Field(min_length=1)
    swe: SweInstance
    network: bool | None = None
    cpu: float | None = Field(default=None, gt=0)
    memory_mib: int | None = Field(default=None, gt=0)
    disk_gib: int | None = Field(default=None, gt=0)
    processes: int | None = Field(default=None, gt=0)


def parse_row(row: Mapping[str, Any]) -> SweRow:
    """Read a row.

    Raises:
        CallerError: it is wrong; names the field, e.g. ``swe.FAIL_TO_PASS``.
    """
    try:
        return SweRow.model_validate(row)
    except ValidationError as error:
        raise refusal(error) from error


def refusal(error: ValidationError) -> CallerError:
    """The first thing that is wrong with a row or a record, by its field, be that one that a validator names."""
    fault = error.errors(include_url=False, include_context=False)[0]
    path, message = [str(part) for part in fault["loc"]], fault["msg"]
    if named := re.fullmatch(r"Value error, (\w+): (.*)", message, re.DOTALL):
        path.append(named[1])
        message = named[2]
    given = "" if fault["type"] in ("missing", "value_error") else f" (given: {fault['input']!r:.100})"
    return CallerError(f"{message}{given}", field=".".join(path) or None)
