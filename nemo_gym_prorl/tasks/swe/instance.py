# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of ``prorl_swe``: one schema for all datasets. Pure.

A row::

    {"responses_create_params": {"input": [...], "tools": [...]},   # prompt, written by the converter
     "data_source": "swe-bench",                                    # dataset, for routing and metrics
     "instance_id": "django__django-11099",
     "image": "/images/....sif",                                    # in the sandbox provider's format
     "network": "none", "cpu": 2, "memory_mib": 8192, ...            # optional: see SweRow
     "swe": {...}}                                                  # see SweInstance

``swe`` contains data that the policy never sees: hidden tests and the reference fix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from nemo_gym_prorl.tasks.task import ImageRow


Dataset = Literal["swe-bench", "swe-gym", "swe-rebench", "r2e-gym", "made"]
Folder = Annotated[str, StringConstraints(pattern=r"^/[\w./+-]+$", max_length=500)]
TestId = Annotated[str, StringConstraints(min_length=1, max_length=10_000)]

R2E_HIDDEN = ("/r2e_tests", "/testbed/r2e_tests", "/root/r2e_tests", "/testbed/run_tests.sh", "/root/run_tests.sh")
"""Paths of hidden tests in R2E-Gym's images."""

MAX_TEXT = 20_000_000
"""Maximum characters of a patch in a row; bounds memory."""


class Runner(StrEnum):
    """Test runner; selects the plugin that records outcomes besides the log."""

    PYTEST = "pytest"
    UNITTEST = "unittest"
    LOG = "log"
    """A runner without a plugin: outcomes come from the log alone, which code of the policy can forge."""


class TestStatus(StrEnum):
    """Outcome of a test, in SWE-bench's terms."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"
    ERROR = "ERROR"
    XFAIL = "XFAIL"


class SweInstance(BaseModel):
    """A software engineering task.

    Attributes:
        dataset: dataset whose rules apply to images and grading.
        repo: for example ``"django/django"``; log parsers depend on it.
        version: version of the repository, for messages.
        base_commit: commit that must be an ancestor of, or equal to, ``HEAD`` of the image's repository; empty
            disables the check (R2E-Gym names the fix). The policy starts from the image's working tree.
        problem_statement: the issue, also contained in ``responses_create_params``.
        patch: reference fix. Grading uses the paths of its files, and the fix itself for control runs.
        test_patch: patch that adds the hidden tests to the base; empty if the image contains them.
        FAIL_TO_PASS: tests that must pass after the fix, named as by the log parser.
        PASS_TO_PASS: tests that must still pass.
        repo_folder: path of the repository in the image.
        test_command: complete bash command, run in ``repo_folder``.
        before_tests: shell lines to run once before the tests, such as ``pip install -e .``. The lines run the
            policy's code. Exports, functions, options and the folder carry over to the test command.
        log_parser: name in swebench's registry, for example ``"parse_log_pytest"``, or ``"r2e_gym"``.
        eval_type: as in SWE-bench: ``"fail_only"`` if the runner prints failures only, so that unnamed tests have
            passed.
        tests_network: whether tests and ``before_tests`` have the host's network. The policy's network depends on
            ``network`` of the row.
        test_timeout_s: seconds for the tests, if lower than the server's limit.
        runner: test runner; ``None``: inferred from ``test_command``.
        expected_output: expected status by test, for R2E-Gym; replaces the two lists of tests.
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
                raise ValueError("expected_output: missing; an r2e-gym row needs the expected status of each test")
        elif not self.FAIL_TO_PASS:
            raise ValueError("FAIL_TO_PASS: must name at least one test")
        elif clash := set(self.FAIL_TO_PASS) & set(self.PASS_TO_PASS):
            raise ValueError(f"PASS_TO_PASS: {min(clash)!r:.200} is in FAIL_TO_PASS too")
        return self

    @property
    def hidden(self) -> tuple[str, ...]:
        """Absolute paths of the image's tests, which are removed from the policy's sandbox."""
        return R2E_HIDDEN if self.dataset == "r2e-gym" else ()

    @property
    def deciding(self) -> tuple[str, ...]:
        """Tests that only a fix passes (``FAIL_TO_PASS``); for R2E-Gym, all tests expected to pass."""
        expected = self.expected_output or {}
        return self.FAIL_TO_PASS or tuple(test for test, was in expected.items() if was == TestStatus.PASSED)

    @property
    def kind_of_runner(self) -> Runner:
        """Test runner named by the row, else inferred from the test command."""
        if self.runner is not None:
            return self.runner
        if re.search(r"\btox\b", self.test_command):
            return Runner.LOG  # tox isolates its environments, so they do not find the plugin
        if self.dataset == "r2e-gym" or re.search(r"\b(pytest|py\.test)\b", self.test_command):
            return Runner.PYTEST
        return Runner.UNITTEST if re.search(r"\bruntests\.py\b|-m unittest\b", self.test_command) else Runner.LOG


class SweLimits(BaseModel):
    """Limits of extraction and grading; a mixin for the server's configuration.

    Attributes:
        repository_timeout_s: seconds for each script of preparation, extraction and application.
        patch_file_kib: maximum size of a new file; larger files are left out of the solution.
        patch_total_kib: maximum size of all changed files together; a larger solution cannot be extracted.
        patch_files: maximum number of changed files; a larger solution cannot be extracted.
        test_timeout_s: seconds for the test command.
        before_tests_timeout_s: seconds for ``before_tests``.
        log_kib: maximum log size. Of a longer pytest log only the end is read; other longer logs are unreadable.
        parse_timeout_s: CPU seconds for the log parser.
        patch_field_kib: maximum size of the patch in the rollout's row; files that do not fit are omitted.
        log_field_kib: size of the log's end in the rollout's row.
    """

    repository_timeout_s: float = Field(default=180.0, gt=0)
    patch_file_kib: int = Field(default=4096, ge=1)
    patch_total_kib: int = Field(default=32_768, ge=1)
    patch_files: int = Field(default=5000, ge=1)
    test_timeout_s: float = Field(default=1800.0, gt=0)
    before_tests_timeout_s: float = Field(default=900.0, gt=0)
    log_kib: int = Field(default=32_768, ge=16)
    parse_timeout_s: float = Field(default=60.0, gt=0)
    patch_field_kib: int = Field(default=4096, ge=1)
    log_field_kib: int = Field(default=8, ge=0)


class SweRow(ImageRow):
    """Row of ``prorl_swe``."""

    swe: SweInstance
