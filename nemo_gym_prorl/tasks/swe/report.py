# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What became of a task's tests, and whether it can be believed. Pure.

Two witnesses: the log, which the code under test may write as it likes, and the records of a plugin in the runner's
process (``inside/``). A test counts as passed if both say so. The records also tell that the runner itself was
tampered with, and that it came to its end.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_gym_prorl.tasks.swe.instance import Runner, SweInstance, TestStatus
from nemo_gym_prorl.tasks.swe.log_parsing import r2e_names


PASSING = frozenset({TestStatus.PASSED, TestStatus.XFAIL})

SUMMARY = "short test summary info"
"""Above the lines of pytest's summary."""

_UNITTEST: Mapping[str, str] = {
    TestStatus.PASSED: "ok",
    TestStatus.FAILED: "FAIL",
    TestStatus.ERROR: "ERROR",
    TestStatus.SKIPPED: "skipped",
}
_XPASS = "XPASS"
_SUMMED_UP = (
    TestStatus.PASSED, TestStatus.SKIPPED, TestStatus.XFAIL, _XPASS, TestStatus.ERROR, TestStatus.FAILED
)  # fmt: skip
"""The order of ``pytest -rA``."""
_SHOWN = 50
_LONGEST_NAME = 300


@dataclass(frozen=True, slots=True)
class Told:
    """What the plugin told.

    Attributes:
        statuses: by test, as the runner names it.
        begun: tests were collected.
        ended: the runner came to its end.
        forged: why the records can't be the plugin's, or ``None``.
        tampering: what of the runner was changed.
    """

    statuses: Mapping[str, str] = field(default_factory=dict)
    begun: bool = False
    ended: bool = False
    forged: str | None = None
    tampering: tuple[str, ...] = ()

    def as_log(self) -> str:
        """The statuses as pytest and unittest print them, for the same parser as the log, and in the order of pytest's
        summary: where a parser knows tests by less than their name, the last of several counts."""
        said = [f"{name} ... {_UNITTEST[status]}" for name, status in self.statuses.items() if status in _UNITTEST]
        summed_up = sorted(self.statuses.items(), key=lambda one: _SUMMED_UP.index(one[1]))
        lines = [f"{status} {name}" for name, status in summed_up]
        return "\n".join([*said, f"=== {SUMMARY} ===", *lines, ""])


def read_records(raw: bytes, secret: str) -> Told:
    """Read what came through the channel."""
    phases: dict[str, dict[str, str]] = {}
    tampering: list[str] = []
    begun = ended = False
    for number, line in enumerate(raw.splitlines(), start=1):
        code, _, body = line.partition(b" ")
        if not hmac.compare_digest(hmac.new(secret.encode(), body, hashlib.sha256).hexdigest().encode(), code):
            return Told(forged="something else wrote to the channel of the test runner")
        count, kind, *values = json.loads(body)
        if count != number:
            return Told(forged="records of the test runner are missing")
        if ended:
            return Told(forged="the test runner went on after its end")
        match kind, values:
            case "begin", _:
                begun = True
            case "end", _:
                ended = True
            case "report", [name, "setup", outcome]:
                phases[name] = {"setup": outcome}  # of a new try, where a test is tried again
            case "report", [name, when, outcome]:
                said = phases.setdefault(name, {})
                said[when] = "failed" if "failed" in (said.get(when), outcome) else outcome
            case "changed", [name]:
                tampering.append(f"{name} was replaced")
    statuses = {name: _status(by_phase) for name, by_phase in phases.items()}
    return Told(statuses, begun, ended, None, tuple(tampering))


def _status(phases: Mapping[str, str]) -> str:
    if "failed" in (phases.get("setup"), phases.get("teardown")):
        return TestStatus.ERROR
    outcome = phases.get("call") or phases.get("setup", "")
    if outcome == "passed" and "call" not in phases:
        return TestStatus.ERROR  # it was set up, and then the runner ended
    known = {
        "passed": TestStatus.PASSED,
        "skipped": TestStatus.SKIPPED,
        "xfailed": TestStatus.XFAIL,
        "xpassed": _XPASS,
    }
    return known.get(outcome, TestStatus.FAILED)


@dataclass(frozen=True, slots=True)
class Report:
    """How the tests compare with what they should be.

    Attributes:
        wrong: test to what it was, of those that are not as they should be; by list of the row.
        right: how many are, by list.
        seen: how many of the row's tests have a status at all.
    """

    wrong: Mapping[str, Mapping[str, str]]
    right: Mapping[str, int]
    seen: int

    @property
    def resolved(self) -> bool:
        """All is as it should be."""
        return not any(self.wrong.values())

    def as_fields(self) -> dict[str, Any]:
        """For the rollout's row; bounded."""
        return {
            name: {
                "passed": self.right[name],
                "failed": len(wrong),
                "failures": {test[:_LONGEST_NAME]: was for test, was in list(wrong.items())[:_SHOWN]},
            }
            for name, wrong in self.wrong.items()
        }


def compare(instance: SweInstance, witnesses: Iterable[Mapping[str, str]]) -> Report:
    """Compare; a test is as it should be if each witness says so.

    Args:
        instance: the task.
        witnesses: maps of test to status, by the task's log parser.
    """
    maps = list(witnesses)
    if instance.expected_output is not None:
        return _compare_maps(instance.expected_output, maps)
    lists = {
        "FAIL_TO_PASS": (instance.FAIL_TO_PASS, PASSING),
        # A test that is skipped now is no regression, as in SWE-bench's own grading.
        "PASS_TO_PASS": (instance.PASS_TO_PASS, PASSING | {TestStatus.SKIPPED}),
    }
    by_failures = instance.eval_type == "fail_only"
    wrong: dict[str, dict[str, str]] = {}
    right: dict[str, int] = {}
    seen = 0
    for name, (tests, good) in lists.items():
        wrong[name] = {}
        for test in tests:
            said = [status_of(test, statuses) for statuses in maps[: None if _is_a_test(test, instance) else 1]]
            bad = [was for was in said if (was == TestStatus.FAILED if by_failures else was not in good)]
            if bad:
                wrong[name][test] = bad[0] or "missing"
            seen += any(said)
        right[name] = len(tests) - len(wrong[name])
    return Report(wrong, right, seen)


def _is_a_test(name: str, instance: SweInstance) -> bool:
    """Lists of SWE-bench have names that its parsers found in a log of pytest's and that no test has, as ``[100%]``:
    only a log can have them."""
    return instance.kind_of_runner is not Runner.PYTEST or "::" in name


def status_of(test: str, statuses: Mapping[str, str]) -> str | None:
    """The status of a test. Some names in SWE-bench data end within their parameters: those go by their beginning, if
    all that begin so passed, or none did."""
    if test in statuses or test.count("[") <= test.count("]"):
        return statuses.get(test)
    found = [status for name, status in statuses.items() if name.startswith(test)]
    return found[0] if found and len({status in PASSING for status in found}) == 1 else None


def _compare_maps(expected: Mapping[str, TestStatus], maps: list[Mapping[str, str]]) -> Report:
    """R2E-Gym's rule: the same tests with the same statuses. What else is in its log, only the log has to have."""
    wanted = r2e_names(expected)
    wrong: dict[str, str] = {}
    for number, statuses in enumerate(map(r2e_names, maps)):
        for test in {name for name in wanted if name} if number else wanted.keys() | statuses.keys():
            if wanted.get(test) != statuses.get(test):
                wrong[test] = f"{statuses.get(test, 'missing')}, not {wanted.get(test, 'missing')}"
    seen = sum(any(test in statuses for statuses in maps) for test in wanted)
    return Report({"expected_output": wrong}, {"expected_output": len(wanted.keys() - wrong.keys())}, seen)
