# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Parse pytest's report (``-rA``) and judge a bug by it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


MAX_BROKEN_SHARE = 0.3
"""Largest share of broken tests; bugs that break more are too obvious."""

_LINE = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) (\S+::\S+)(?: - (.*))?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Outcomes of a test suite.

    Attributes:
        status: test to ``PASSED``, ``FAILED`` and so on; only names that all log parsers read completely.
        messages: one-line messages of failed tests.
        complete: whether the suite ran to its end.
    """

    status: Mapping[str, str]
    messages: Mapping[str, str]
    complete: bool

    def having(self, *statuses: str) -> frozenset[str]:
        """Return the tests with one of the statuses."""
        return frozenset(test for test, status in self.status.items() if status in statuses)


def read(log: str, exit_code: int) -> Outcomes:
    """Parse a log. Exit codes above 1 (import errors, timeouts) are incomplete runs."""
    found = _LINE.findall(log)
    return Outcomes(
        {test: status for status, test, _message in found},
        {test: message for _status, test, message in found if message},
        exit_code in (0, 1) and "short test summary info" in log,
    )


@dataclass(frozen=True, slots=True)
class Effect:
    """Effect of a bug: broken tests, their messages, and unaffected tests of the same files."""

    broken: frozenset[str]
    messages: Mapping[str, str]
    kept: frozenset[str]


def effect(stable: frozenset[str], after: Outcomes) -> Effect | None:
    """Return a bug's effect; ``None`` if the bug is unusable: no or too many broken tests, or import errors.

    Args:
        stable: tests that always pass without the bug.
        after: outcomes with the bug.
    """
    broken = stable & after.having("FAILED")
    if not after.complete or after.having("ERROR") or not broken:
        return None
    files = {test.partition("::")[0] for test in broken}
    near = {test for test in stable if test.partition("::")[0] in files}
    kept = near & after.having("PASSED")
    # Missing and flaky tests are neither broken nor kept.
    if len(broken) > MAX_BROKEN_SHARE * len(near) or near - broken - kept or not kept:
        return None
    return Effect(broken, {test: after.messages.get(test, "") for test in broken}, frozenset(kept))
