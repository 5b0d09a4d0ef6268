# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Records of the published sets of programming contests, made into rows. Pure, but for tests that are to be files.

Which set a record is of is told by its fields:

- **Eurus-2-RL-Data**: ``prompt``, ``reward_model.ground_truth`` (JSON of the tests), ``ability: code``.
- **APPS and TACO**: ``question``, ``input_output`` (JSON of the tests).
- **CodeContests**: ``description``, ``public_tests``, ``private_tests``, ``generated_tests``, limits.
- **NeMo Gym's code_gen**: rows already; they are looked through and kept as they are, and answered in text.

CodeContests has limits of time, which were set for compiled programs: a row has :data:`TIME_FACTOR` times as much, or
as often as is asked for. A server's own limit is never exceeded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.code.prompts import row_for
from nemo_gym_prorl.tasks.code.rows import METADATA, read_metadata, read_problem


Record = Mapping[str, Any]

TIME_FACTOR = 5.0
CHECKER = {"kind": "float"}
"""Word by word; numbers with a fraction within 1e-6, as nearly all such problems ask."""

CALL_CHECKER = {"kind": "float", "wrapped": True}
"""These sets have some results in a list of their own and some not, and no way to tell."""

DATA_SOURCE = "code"
"""Of rows whose set is not known by name."""

SETS = frozenset({"apps", "taco", "codecontests", "codeforces"})
"""Those that Eurus-2-RL-Data names in its ``data_source``."""

_ASKS_FOR_BLOCK = re.compile(r"\s*Write Python code to solve the problem\..*\Z", re.DOTALL)


def row_of(record: Record, tests_folder: Path | None = None, time_factor: float = TIME_FACTOR) -> dict[str, Any]:
    """A row of a record.

    Args:
        record: of one of the sets above.
        tests_folder: write the tests there, by the name of their SHA-256, and have the row name them.
        time_factor: what CodeContests' limits of time are multiplied by.

    Raises:
        CallerError: it makes no row; names the field.
    """
    for field, convert in _KINDS.items():
        if field in record:
            row = convert(record, time_factor)
            read_problem(read_metadata(row), None)
            return row if tests_folder is None else _with_file(row, tests_folder)
    known = ", ".join(_KINDS)
    raise CallerError(f"a record of no known set: it has none of {known}, but {', '.join(list(record)[:20])}")


def _eurus(record: Record, _time_factor: float) -> dict[str, Any]:
    if record.get("ability") != "code":
        raise CallerError(f"{record.get('ability')!r} is not 'code'", field="ability")
    prompt = record.get("prompt")
    said = [turn.get("content") for turn in prompt if turn.get("role") == "user"] if isinstance(prompt, list) else []
    if not said or not isinstance(said[-1], str):
        raise CallerError("it has no message of a user", field="prompt")
    truth = record["reward_model"]
    tests = _tests(truth.get("ground_truth") if isinstance(truth, Mapping) else None, "reward_model.ground_truth")
    return _row(
        _ASKS_FOR_BLOCK.sub("", said[-1]), tests, _set(record), dataset=str(record.get("data_source", "eurus"))
    )


def _apps(record: Record, _time_factor: float) -> dict[str, Any]:
    tests = _tests(record["input_output"], "input_output")
    statement = _text(record, "question")
    if record.get("starter_code"):
        statement += f"\n\nStart from:\n```python\n{record['starter_code']}\n```"
    source = "taco" if record.get("source") else "apps"
    return _row(
        statement, tests, source, dataset=str(record.get("source") or "apps"), difficulty=record.get("difficulty")
    )


def _code_contests(record: Record, time_factor: float) -> dict[str, Any]:
    for field in ("input_file", "output_file"):
        if record.get(field):
            raise CallerError(
                f"{record[field]!r} is read or written instead of standard input and output", field=field
            )
    tests: dict[str, Any] = {"inputs": [], "outputs": []}
    for field in ("public_tests", "private_tests", "generated_tests"):
        part = record.get(field) or {}
        if not isinstance(part, Mapping):
            raise CallerError("it must be an object with input and output", field=field)
        tests["inputs"] += list(part.get("input") or [])
        tests["outputs"] += list(part.get("output") or [])
    limits: dict[str, Any] = {}
    if limit := record.get("time_limit"):
        limits["time_limit_s"] = time_factor * _seconds(limit)
    if memory := record.get("memory_limit_bytes"):
        limits["memory_limit_mib"] = max(256, memory >> 20)
    return _row(_text(record, "description"), tests, "codecontests", dataset="code_contests", **limits)


def _seconds(limit: Any) -> float:
    """Of a number, or of the seconds and nanoseconds of a protocol buffer."""
    parts = (limit.get("seconds") or 0, limit.get("nanos") or 0) if isinstance(limit, Mapping) else (limit, 0)
    if not all(isinstance(part, int | float) and not isinstance(part, bool) for part in parts):
        raise CallerError("it must be a number of seconds, or an object with seconds and nanos", field="time_limit")
    return float(parts[0] + parts[1] / 1e9)


def _code_gen(record: Record, _time_factor: float) -> dict[str, Any]:
    if not isinstance(record.get("responses_create_params"), Mapping):
        raise CallerError("missing; a row of NeMo Gym has it", field="responses_create_params")
    return {"data_source": DATA_SOURCE, **record}


_KINDS: Mapping[str, Callable[[Record, float], dict[str, Any]]] = {
    METADATA: _code_gen,
    "reward_model": _eurus,
    "input_output": _apps,
    "public_tests": _code_contests,
}
"""By a field that only records of that set have. The number multiplies limits of time, where a set has some."""


def _set(record: Record) -> str:
    source = record.get("data_source")
    return source if source in SETS else DATA_SOURCE


def _row(statement: str, tests: Mapping[str, Any], data_source: str, **more: Any) -> dict[str, Any]:
    function = tests.get("fn_name")
    checker = CHECKER if function is None else CALL_CHECKER
    metadata = {"unit_tests": dict(tests), "checker": checker} | {k: v for k, v in more.items() if v is not None}
    return row_for(statement, metadata, function=function, data_source=data_source)


def _tests(text: Any, field: str) -> dict[str, Any]:
    """Tests as :class:`.rows.UnitTests` has them, from the JSON that several sets keep them in."""
    try:
        tests = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise CallerError(f"it is no JSON: {error}", field=field) from error
    if not isinstance(tests, Mapping) or not isinstance(tests.get("inputs"), list):
        raise CallerError("it has no list of inputs", field=field)
    if not isinstance(tests.get("outputs"), list):
        raise CallerError("it has no list of outputs", field=field)
    if tests.get("fn_name"):
        return {name: tests[name] for name in ("inputs", "outputs", "fn_name")}
    return {name: [_joined(value) for value in tests[name]] for name in ("inputs", "outputs")}


def _joined(value: Any) -> Any:
    """Text of lines that a set keeps one by one."""
    return "\n".join(map(str, value)) if isinstance(value, list) else value


def _text(record: Record, field: str) -> str:
    text = record.get(field)
    if not isinstance(text, str) or not text.strip():
        raise CallerError("missing; it is the problem's text", field=field)
    return text


def _with_file(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    metadata = dict(row[METADATA])
    data = json.dumps(metadata.pop("unit_tests"), separators=(",", ":"), sort_keys=True).encode()
    name = hashlib.sha256(data).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_bytes(data)
    return row | {METADATA: metadata | {"tests_file": f"{name}.json", "tests_sha256": name}}
