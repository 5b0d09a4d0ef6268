# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What pytest's report (``-rA``) says of each test, and what a bug is worth by that. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


MAX_BROKEN_SHARE = 0.3
"""A bug that breaks more of the tests than this part of them is one that nobody would look for."""

_LINE = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) (\S+::\S+)(?: - (.*))?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """A run of a test suite.

    Attributes:
        status: test to ``PASSED``, ``FAILED`` and so on; only tests whose names all parsers of logs read in full.
        messages: what the failed ones said, in a line.
        complete: the suite has run to its end.
    """

    status: Mapping[str, str]
    messages: Mapping[str, str]
    complete: bool

    def having(self, *statuses: str) -> frozenset[str]:
        """The tests of these statuses."""
        return frozenset(test for test, status in self.status.items() if status in statuses)


def read(log: str, exit_code: int) -> Outcomes:
    """Read a log. Exit codes above 1 are no run: files that can't be loaded, time-outs."""
    found = _LINE.findall(log)
    return Outcomes(
        {test: status for status, test, _message in found},
        {test: message for _status, test, message in found if message},
        exit_code in (0, 1) and "short test summary info" in log,
    )


@dataclass(frozen=True, slots=True)
class Effect:
    """What a bug does: the tests that it breaks, what these say, and those of the same files that it leaves alone."""

    broken: frozenset[str]
    messages: Mapping[str, str]
    kept: frozenset[str]


def effect(stable: frozenset[str], after: Outcomes) -> Effect | None:
    """What a bug does; ``None`` if that makes no task: it breaks nothing, too much, or files can't be loaded.

    Args:
        stable: tests that pass without it, each time.
        after: with it.
    """
    broken = stable & after.having("FAILED")
    if not after.complete or after.having("ERROR") or not broken:
        return None
    files = {test.partition("::")[0] for test in broken}
    near = {test for test in stable if test.partition("::")[0] in files}
    kept = near & after.having("PASSED")
    # A test that is not there any more, or passes one time in two, is neither.
    if len(broken) > MAX_BROKEN_SHARE * len(near) or near - broken - kept or not kept:
        return None
    return Effect(broken, {test: after.messages.get(test, "") for test in broken}, frozenset(kept))
