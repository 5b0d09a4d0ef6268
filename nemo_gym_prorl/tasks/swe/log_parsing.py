# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Statuses of tests out of logs, by the parsers of the ``swebench`` package, and the verdict of the dataset's harness.

Logs are what a policy's code printed, and parsers search them with regular expressions that a hostile log can make
run for ever; so they run in a worker (:mod:`nemo_gym_prorl.tasks.workers`). SWE-bench's grading is not rebuilt here:
swebench's own is called. R2E-Gym's rule is here.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.tasks.swe.instance import SweInstance
from nemo_gym_prorl.tasks.workers import JobLost, WorkerPool


R2E_PARSER = "r2e_gym"
"""The log parser of R2E-Gym's rows, which is none of SWE-bench's."""

_MEMORY_MIB, _LOG_FILE_MIB = 4096, 256

_ROW_FIELDS = ("repo", "version", "FAIL_TO_PASS", "PASS_TO_PASS", "log_parser", "eval_type")


class ParserTimeout(Exception):
    """The log is such that its parser does not come to an end."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What logs say.

    Attributes:
        maps: test to status, of each.
        resolved: the dataset's own harness would say of the first that all is as it should be.
    """

    maps: Sequence[Mapping[str, str]]
    resolved: bool


class LogParser:
    """Reads logs in a worker, which has swebench imported."""

    def __init__(self) -> None:
        self._workers = WorkerPool(__name__)

    async def parse(
        self,
        instance: SweInstance,
        logs: Sequence[str],
        timeout_s: float,
        *,
        exit_code: int = 0,
        instance_id: str = "a__b-1",
    ) -> Parsed:
        """Read what runners printed.

        Args:
            instance: the task.
            logs: of one run: what it printed, and what else tells of it, in the same words.
            timeout_s: CPU seconds for all of them.
            exit_code: of the test command.
            instance_id: the task's name, by which some parsers go.

        Raises:
            ParserTimeout: they took longer.
            CallerError: there is no such parser; names the row's field.
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
        """End the worker."""
        await self._workers.aclose()


def job_of(instance: SweInstance, logs: Sequence[str], exit_code: int, instance_id: str) -> dict[str, Any]:
    """What the worker is asked."""
    fields = {*_ROW_FIELDS, "expected_output"}
    task = {"instance_id": instance_id} | instance.model_dump(mode="json", include=fields)
    return {"task": task, "exit_code": exit_code, "logs": list(logs)}


def warm_up() -> None:
    """Import swebench's grading, and Docker and data sets with it."""
    import swebench.harness.grading  # noqa: F401


def answer(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """In the worker: a map from test to status for each log, and what the dataset's own harness says of the first.
    ``None`` if there is no such parser."""
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
    logs = [log.replace("\r\n", "\n").replace("\r", "\n") for log in logs]  # as swebench reads a file
    resolved = _resolved_by_swebench(spec, job["exit_code"], logs[0])
    return {"maps": [dict(parser(log, spec)) for log in logs], "resolved": resolved}


def _resolved_by_swebench(spec: Any, exit_code: int, log: str) -> bool:
    """What swebench reports of a log, as its own scripts write one."""
    from swebench.harness import constants, grading

    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        # It takes the first exit code that it finds; so ours comes before whatever the tests print.
        file.write(f"{constants.TEST_EXIT_CODE}: {exit_code}\n{constants.START_TEST_OUTPUT}\n{log}\n")
        file.write(f"{constants.END_TEST_OUTPUT}\n")
        file.flush()
        prediction = {"instance_id": spec.instance_id, "model_patch": "some"}
        report = grading.get_eval_report(spec, prediction, file.name, include_tests_status=False)
    return bool(report[spec.instance_id]["resolved"])


def parse_r2e(log: str) -> dict[str, str]:
    """R2E-Gym's rule: each line of pytest's summary that has a status anywhere in it, be it that of a skipped test; a
    test is its name without the file, its parts joined by dots, and empty where the line names none."""
    parts = re.sub(r"\x1b\[[0-9;]*m|\r", "", log).split("short test summary info")
    statuses: dict[str, str] = {}
    for line in parts[1].strip().split("\n") if len(parts) > 1 else ():
        status = next((word for word in ("PASSED", "FAILED", "ERROR") if word in line), None)
        if status is not None:
            name = ".".join(line.split("::")[1:])
            statuses[name if status == "PASSED" else name.split(" - ")[0]] = status
    return statuses


def r2e_names(statuses: Mapping[str, str]) -> dict[str, str]:
    """Names as R2E-Gym compares them: without colours, and what follows a dash; the last in order of names counts."""
    plain = {re.sub(r"\x1b\[\d+m", "", name): status for name, status in statuses.items()}
    return {name.split(" - ")[0]: plain[name] for name in sorted(plain)}
