# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The program of :mod:`.log_parsing`. Run by its path, so that it imports nothing of ours and starts at once.

It reads ``{"task": fields of the row, "exit_code": number, "logs": [text, ...]}`` and prints ``{"maps": [...],
"resolved": ...}``: a map from test to status for each log, and what the dataset's own harness says of the first. That
is not rebuilt here for SWE-bench's rows: swebench's own grading is called.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


UNKNOWN_PARSER = 44
"""Exit code."""

R2E_PARSER = "r2e_gym"
"""The log parser of R2E-Gym's rows, which is none of SWE-bench's."""

Parser = Callable[[str, Any], dict[str, str]]


def parse_r2e(log: str, _: object = None) -> dict[str, str]:
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


def resolved_by_swebench(spec: Any, exit_code: int, log: str) -> bool:
    """What swebench reports of a log, as its own scripts write one."""
    constants = importlib.import_module("swebench.harness.constants")
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        # It takes the first exit code that it finds; so ours comes before whatever the tests print.
        file.write(f"{constants.TEST_EXIT_CODE}: {exit_code}\n{constants.START_TEST_OUTPUT}\n{log}\n")
        file.write(f"{constants.END_TEST_OUTPUT}\n")
        file.flush()
        report = importlib.import_module("swebench.harness.grading").get_eval_report(
            spec, {"instance_id": spec.instance_id, "model_patch": "some"}, file.name, include_tests_status=False
        )
    return bool(report[spec.instance_id]["resolved"])


def find_parser(name: str) -> Parser | None:
    """By its name."""
    return parse_r2e if name == R2E_PARSER else _registry().get(name)


@cache
def _registry() -> Mapping[str, Parser]:
    """swebench's. The packages around its parsers become stand-ins: they import Docker and data sets."""
    root = importlib.util.find_spec("swebench")
    assert root is not None
    places = [Path(path) for path in root.submodule_search_locations or ()]
    for package in ("swebench", "swebench.harness"):
        stand_in = ModuleType(package)
        stand_in.__path__ = [str(place.joinpath(*package.split(".")[1:])) for place in places]
        sys.modules[package] = stand_in
    registry: Mapping[str, Parser] = importlib.import_module("swebench.harness.log_parsers").PARSER_REGISTRY
    return registry


def answer(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is printed; ``None`` if there is no such parser."""
    task, logs = job["task"], job["logs"]
    parser = find_parser(task["log_parser"])
    if parser is None:
        return None
    if task["log_parser"] == R2E_PARSER:
        maps = [parser(log, None) for log in logs]
        return {"maps": maps, "resolved": r2e_names(maps[0]) == r2e_names(task["expected_output"])}
    known = ("instance_id", "repo", "version", "FAIL_TO_PASS", "PASS_TO_PASS", "log_parser", "eval_type")
    make_spec = importlib.import_module("swebench.types").TestSpec
    spec = make_spec(image="", eval_script_list=[], **{name: task[name] for name in known})
    logs = [log.replace("\r\n", "\n").replace("\r", "\n") for log in logs]  # as it reads a file
    return {
        "maps": [dict(parser(log, spec)) for log in logs],
        "resolved": resolved_by_swebench(spec, job["exit_code"], logs[0]),
    }


def main() -> int:
    """See the module."""
    said = answer(json.loads(sys.stdin.buffer.read()))
    if said is None:
        return UNKNOWN_PARSER
    sys.stdout.buffer.write(json.dumps(said).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
