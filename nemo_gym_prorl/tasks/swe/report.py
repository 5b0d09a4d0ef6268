# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Outcomes of a task's tests from two sources, and their comparison with the expected outcomes.

The sources are the log, which the code under test can forge, and records of a plugin in the runner's process
(``inside/``). A test counts as passed if both sources agree. The records also report a modified runner and whether the
runner completed.

The ``swebench`` package parses and grades logs. A hostile log can cause exponential time in swebench's regular
expressions, so parsers run in a worker (:mod:`nemo_gym_prorl.tasks.forked_workers`). R2E-Gym's rule is implemented
here. All but :class:`LogParser` is pure.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.tasks.forked_workers import JobLost, WorkerPool
from nemo_gym_prorl.tasks.swe.instance import Runner, SweInstance, TestStatus


R2E_PARSER = "r2e_gym"
"""Log parser of R2E-Gym's rows, implemented here."""

_MEMORY_MIB, _LOG_FILE_MIB = 4096, 256

_ROW_FIELDS = ("repo", "version", "FAIL_TO_PASS", "PASS_TO_PASS", "log_parser", "eval_type")


class ParserTimeout(Exception):
    """The log parser did not finish in time."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """Status by test, one map per log of a run, and whether the dataset's own harness accepts the first log."""

    maps: Sequence[Mapping[str, str]]
    resolved: bool


class LogParser:
    """Parser of test logs: runs swebench in a worker process."""

    def __init__(self) -> None:
        self._workers = WorkerPool(__name__)

    async def parse(
        self,
        instance: SweInstance,
        logs: Sequence[str],
        timeout_s: float,
        exit_code: int,
        instance_id: str,
    ) -> Parsed:
        """Parse the logs of one run in ``timeout_s`` CPU seconds: the output of the test command, then the plugin's
        records in the same format, if any. Some of swebench's parsers depend on ``instance_id``.

        Raises:
            ParserTimeout: parsing exceeded its CPU time.
            CallerError: the parser is unknown; names the row's field.
            InfrastructureError: the worker failed.
        """
        bounds = {"cpu_s": max(1, round(timeout_s)), "memory_mib": _MEMORY_MIB, "file_mib": _LOG_FILE_MIB}
        try:
            reply = await self._workers.ask(job_of(instance, logs, exit_code, instance_id), **bounds)
        except JobLost as loss:
            if loss.timed_out and not loss.by_machine:
                raise ParserTimeout(f"{instance.log_parser} did not read the log within {timeout_s:g} s") from loss
            reason = f"the log parser {instance.log_parser} failed: {loss}"
            raise InfrastructureError(reason, kind=FailureKind.VERIFIER_ERROR) from loss
        if reply is None:
            raise CallerError(f"swebench has no parser {instance.log_parser!r:.100}", field="swe.log_parser")
        return Parsed(**reply)

    async def aclose(self) -> None:
        await self._workers.aclose()


def job_of(instance: SweInstance, logs: Sequence[str], exit_code: int, instance_id: str) -> dict[str, Any]:
    fields = {*_ROW_FIELDS, "expected_output"}
    task = {"instance_id": instance_id} | instance.model_dump(mode="json", include=fields)
    return {"task": task, "exit_code": exit_code, "logs": list(logs)}


def warm_up() -> None:
    """Import swebench before children are forked."""
    import swebench.harness.grading  # noqa: F401


def answer(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields of :class:`Parsed` for a job; ``None`` if the parser is unknown. Runs in the worker."""
    task, logs = job["task"], job["logs"]
    if task["log_parser"] == R2E_PARSER:
        maps = [parse_r2e(log) for log in logs]
        return {"maps": maps, "resolved": r2e_names(maps[0]) == r2e_names(task["expected_output"])}
    from swebench.harness.log_parsers import PARSER_REGISTRY
    from swebench.types import TestSpec

    parser = PARSER_REGISTRY.get(task["log_parser"])
    if parser is None:
        return None
    fields = {name: task[name] for name in ("instance_id", *_ROW_FIELDS)}
    spec = TestSpec(image="", eval_script_list=[], **fields)
    logs = [log.replace("\r\n", "\n").replace("\r", "\n") for log in logs]  # swebench reads logs in text mode
    resolved = _resolved_by_swebench(spec, job["exit_code"], logs[0])
    return {"maps": [dict(parser(log, spec)) for log in logs], "resolved": resolved}


def _resolved_by_swebench(spec: Any, exit_code: int, log: str) -> bool:
    from swebench.harness import constants, grading

    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        # swebench uses the first exit code in the file: written first, it cannot be forged by the tests' output.
        file.write(f"{constants.TEST_EXIT_CODE}: {exit_code}\n{constants.START_TEST_OUTPUT}\n{log}\n")
        file.write(f"{constants.END_TEST_OUTPUT}\n")
        file.flush()
        prediction = {"instance_id": spec.instance_id, "model_patch": "some"}
        report = grading.get_eval_report(spec, prediction, file.name, include_tests_status=False)
    return bool(report[spec.instance_id]["resolved"])


def parse_r2e(log: str) -> dict[str, str]:
    """Parse a log by R2E-Gym's rule into statuses by test.

    Each line of pytest's summary with a status word counts, even the line of a skipped test. A test's name is the node
    id without the file, joined by dots, and may be empty.
    """
    parts = re.sub(r"\x1b\[[0-9;]*m|\r", "", log).split("short test summary info")
    statuses: dict[str, str] = {}
    for line in parts[1].strip().split("\n") if len(parts) > 1 else ():
        status = next((word for word in ("PASSED", "FAILED", "ERROR") if word in line), None)
        if status is not None:
            name = ".".join(line.split("::")[1:])
            statuses[name if status == "PASSED" else name.split(" - ")[0]] = status
    return statuses


def r2e_names(statuses: Mapping[str, str]) -> dict[str, str]:
    """Normalize test names like R2E-Gym: without colours and the text after a dash. The last of equal names counts."""
    plain = {re.sub(r"\x1b\[\d+m", "", name): status for name, status in statuses.items()}
    return {name.split(" - ")[0]: plain[name] for name in sorted(plain)}


PASSING = frozenset({TestStatus.PASSED, TestStatus.XFAIL})

SUMMARY = "short test summary info"
"""Heading of pytest's summary."""

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
"""Order of statuses in the output of ``pytest -rA``."""
_MAX_FAILURES = 50  # per list of tests, to bound the rollout's row
_MAX_NAME_CHARS = 300


@dataclass(frozen=True, slots=True)
class RunnerRecords:
    """Test outcomes that the plugin in the runner's process recorded."""

    statuses: Mapping[str, str] = field(default_factory=dict)
    begun: bool = False  # tests were collected
    ended: bool = False  # the runner completed
    forged: str | None = None  # why the records are not authentic
    tampering: tuple[str, ...] = ()  # functions of the runner that were replaced

    def as_log(self) -> str:
        """Format the statuses like pytest's and unittest's output, for the parser of the log.

        The order is that of pytest's summary: parsers that shorten names use the last of equal names.
        """
        said = [f"{name} ... {_UNITTEST[status]}" for name, status in self.statuses.items() if status in _UNITTEST]
        summed_up = sorted(self.statuses.items(), key=lambda one: _SUMMED_UP.index(one[1]))
        lines = [f"{status} {name}" for name, status in summed_up]
        return "\n".join([*said, f"=== {SUMMARY} ===", *lines, ""])


def read_records(raw: bytes, secret: str) -> RunnerRecords:
    phases: dict[str, dict[str, str]] = {}
    tampering: list[str] = []
    begun = ended = False
    for number, line in enumerate(raw.splitlines(), start=1):
        code, _, body = line.partition(b" ")
        if not hmac.compare_digest(hmac.new(secret.encode(), body, hashlib.sha256).hexdigest().encode(), code):
            return RunnerRecords(forged="another process wrote to the test runner's channel")
        count, kind, *values = json.loads(body)
        if count != number:
            return RunnerRecords(forged="records of the test runner are missing")
        if ended:
            return RunnerRecords(forged="records follow the end of the test runner")
        match kind, values:
            case "begin", _:
                begun = True
            case "end", _:
                ended = True
            case "report", [name, "setup", outcome]:
                phases[name] = {"setup": outcome}  # a second setup is a plugin's rerun: only the last run counts
            case "report", [name, when, outcome]:
                said = phases.setdefault(name, {})
                said[when] = "failed" if "failed" in (said.get(when), outcome) else outcome
            case "changed", [name]:
                tampering.append(f"{name} was replaced")
    statuses = {name: _status(by_phase) for name, by_phase in phases.items()}
    return RunnerRecords(statuses, begun, ended, None, tuple(tampering))


def _status(phases: Mapping[str, str]) -> str:
    if "failed" in (phases.get("setup"), phases.get("teardown")):
        return TestStatus.ERROR
    outcome = phases.get("call") or phases.get("setup", "")
    if outcome == "passed" and "call" not in phases:
        return TestStatus.ERROR  # the test was set up but never called
    known = {
        "passed": TestStatus.PASSED,
        "skipped": TestStatus.SKIPPED,
        "xfailed": TestStatus.XFAIL,
        "xpassed": _XPASS,
    }
    return known.get(outcome, TestStatus.FAILED)


@dataclass(frozen=True, slots=True)
class Report:
    """Comparison of outcomes with the row's lists of tests, such as ``FAIL_TO_PASS``."""

    wrong: Mapping[str, Mapping[str, str]]  # for each list, the unexpected outcomes by test
    right: Mapping[str, int]  # for each list, the number of tests with the expected outcome
    seen: int  # number of the row's tests with an outcome

    @property
    def resolved(self) -> bool:
        return not any(self.wrong.values())

    def as_fields(self) -> dict[str, Any]:
        """Return counts per list and at most 50 failures, as fields of the rollout's row."""
        return {
            name: {
                "passed": self.right[name],
                "failed": len(wrong),
                "failures": {test[:_MAX_NAME_CHARS]: was for test, was in list(wrong.items())[:_MAX_FAILURES]},
            }
            for name, wrong in self.wrong.items()
        }


def compare(instance: SweInstance, sources: Iterable[Mapping[str, str]]) -> Report:
    """Compare outcomes with the row. The expected outcome must be in all sources, of which the log is the first."""
    maps = list(sources)
    if instance.expected_output is not None:
        return _compare_maps(instance.expected_output, maps)
    lists = {
        "FAIL_TO_PASS": (instance.FAIL_TO_PASS, PASSING),
        # SWE-bench does not count a skipped test as a regression.
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
    """Return whether a listed name is a test, not an artefact of SWE-bench's log parsers such as ``[100%]``."""
    return instance.kind_of_runner is not Runner.PYTEST or "::" in name


def status_of(test: str, statuses: Mapping[str, str]) -> str | None:
    """Return the status of a test; ``None`` without an outcome.

    Some names in SWE-bench are truncated within the test's parameters (an unclosed ``[``). Such a name matches by
    prefix, provided that all matching tests passed or none did.
    """
    if test in statuses or test.count("[") <= test.count("]"):
        return statuses.get(test)
    found = [status for name, status in statuses.items() if name.startswith(test)]
    return found[0] if found and len({status in PASSING for status in found}) == 1 else None


def _compare_maps(expected: Mapping[str, TestStatus], maps: list[Mapping[str, str]]) -> Report:
    """Compare by R2E-Gym's rule: the same tests with the same statuses. Unexpected tests count in the log only."""
    wanted = r2e_names(expected)
    wrong: dict[str, str] = {}
    for number, statuses in enumerate(map(r2e_names, maps)):
        for test in {name for name in wanted if name} if number else wanted.keys() | statuses.keys():
            if wanted.get(test) != statuses.get(test):
                wrong[test] = f"{statuses.get(test, 'missing')}, not {wanted.get(test, 'missing')}"
    seen = sum(any(test in statuses for statuses in maps) for test in wanted)
    return Report({"expected_output": wrong}, {"expected_output": len(wanted.keys() - wrong.keys())}, seen)
