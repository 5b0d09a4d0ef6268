# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Convert records of published programming data sets to rows. Pure, except for tests written to files.

The fields of a record identify its data set; :data:`_KINDS` lists them. Rows of NeMo Gym's ``code_gen`` are validated
and kept unchanged.

Published tests are untrusted: conversion never executes or unpickles tests. LiveCodeBench packs private tests as
base64 of zlib of a pickle of JSON text. The pickle is read opcode by opcode; only opcodes of one text are accepted.

Time limits of CodeContests and Codeforces are meant for compiled programs, so rows multiply them by
:data:`TIME_FACTOR`. The server's own limit still applies.
"""

from __future__ import annotations

import hashlib
import json
import pickletools
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.code.asserts import of_asserts
from nemo_gym_prorl.tasks.code.code_rows import (
    MAX_TEST_BYTES,
    METADATA,
    humaneval_row,
    inflated,
    problems,
    read_metadata,
    read_problem,
    row_for,
)
from nemo_gym_prorl.tasks.dataset_records import UnsupportedSet, UnusableRecord, parsed, question_of


_TEXT_OPCODES = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"})
_IDLE_OPCODES = frozenset({"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"})
_INPUTS = ("input", "stdin")
_OUTPUTS = ("output", "expected_output", "stdout")
_CASES = 'must be a list of objects such as {"input": "1 2\\n", "output": "3\\n"}'


def unpacked(text: str, field: str) -> Any:
    """Return tests from JSON text or from LiveCodeBench's packed format.

    Raises:
        CallerError: the text has neither format or exceeds the size limit; names the field.
    """
    if text.lstrip()[:1] in ("[", "{"):
        return _json(text, field)
    try:
        texts = list[str]()
        for opcode, argument, _ in pickletools.genops(inflated(text, 2 * MAX_TEST_BYTES)):
            if opcode.name in _TEXT_OPCODES:
                texts.append(str(argument))
            elif opcode.name not in _IDLE_OPCODES:
                raise CallerError(f"must be a pickle of one text, but has the opcode {opcode.name}", field=field)
    except (zlib.error, ValueError) as error:
        raise CallerError(f"must be JSON or packed tests: {error}", field=field) from error
    if len(texts) != 1:
        raise CallerError(f"must be a pickle of one text, but has {len(texts)}", field=field)
    return _json(texts[0], field)


def of_cases(cases: Any, field: str, function: str | None = None) -> dict[str, Any]:
    """Convert a list of objects with ``input`` and ``output`` (LiveCodeBench, DeepCoder, PrimeIntellect, open-r1).

    ``stdin`` is accepted for ``input``, and ``stdout`` or ``expected_output`` for ``output``.

    Args:
        cases: the list. ``fn_name``, or ``func_name`` in ``metadata``, names the function under test.
        field: name of the field, for errors.
        function: function under test if the cases do not name one.

    Raises:
        CallerError: the list is malformed, or its cases name several functions or lack a name; names the field.
    """
    if not isinstance(cases, list) or not all(
        isinstance(case, Mapping) and case.keys() & {*_INPUTS} and case.keys() & {*_OUTPUTS} for case in cases
    ):
        raise CallerError(_CASES, field=field)
    names = {_function_of(case) or function for case in cases}
    if len(names) > 1:
        raise CallerError("calls more than one function", field=field)
    called = next(iter(names), None)
    if called is None and any(
        case.get("type", case.get("testtype")) in ("function_call", "functional") for case in cases
    ):
        raise CallerError("names no function to call", field=field)
    inputs = [next(case[name] for name in _INPUTS if name in case) for case in cases]
    outputs = [next(case[name] for name in _OUTPUTS if name in case) for case in cases]
    return {"inputs": inputs, "outputs": outputs} | ({"fn_name": called} if called else {})


def as_json_text(tests: Mapping[str, Any]) -> dict[str, Any]:
    """Return tests of a function with arguments and results as JSON text, which keeps integers of any size exact."""
    inputs = ["\n".join(map(json.dumps, given)) if isinstance(given, list) else given for given in tests["inputs"]]
    kept = {name: tests[name] for name in ("fn_name", "arguments") if name in tests}
    return {"inputs": inputs, "outputs": [_result(value) for value in tests["outputs"]], **kept}


def _result(value: Any) -> str:
    """Return a result as JSON text. Data sets store JSON text or values; text that is not JSON is a string value."""
    if isinstance(value, str):
        try:
            json.loads(value)
        except (ValueError, RecursionError):
            return json.dumps(value)
        return value
    return json.dumps(value)


def _json(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CallerError(f"is not JSON: {error}", field=field) from error


def _function_of(case: Mapping[str, Any]) -> str | None:
    metadata = parsed(case.get("metadata"))
    name = case.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None)
    return str(name) if name else None


Record = Mapping[str, Any]

TIME_FACTOR = 5.0
"""Multiplier of time limits that were set for compiled programs, to leave room for an interpreter."""

TOKEN_SETS = frozenset({"codecontests", "codeforces"})
"""Data sets whose own checkers ignore line breaks; checkers of other data sets compare lines."""

DATA_SOURCE = "code"
"""``data_source`` of rows whose data set is unknown."""

SETS = frozenset({"apps", "taco", "codecontests", "codeforces"})
"""Data sets that Eurus-2-RL-Data names in ``data_source``."""

_ASKS_FOR_BLOCK = re.compile(
    r"\s*Write Python code to solve the problem\..*\Z"
    r"|\ASolve the following coding problem using the programming language python:\s*"
    r"|\s*The input will be (?:given via )?stdin and you should print your solution to stdout.*\Z",
    re.DOTALL,
)
"""Output instructions of Eurus-2 and PrimeIntellect, which the system prompt replaces."""


def row_of(record: Record, tests_folder: Path | None = None) -> dict[str, Any]:
    """Convert a record to a row.

    Args:
        record: a record of a supported data set.
        tests_folder: folder for files of tests, named by SHA-256; ``None`` keeps the tests in the row.

    Raises:
        CallerError: the record is malformed or unsupported; names the field.
    """
    for field, convert in _KINDS.items():
        if field in record:
            row = convert(record)
            read_problem(read_metadata(row), None)
            return row if tests_folder is None else _with_file(row, tests_folder)
    known = ", ".join(_KINDS)
    raise CallerError(f"unknown data set: expected one of the fields {known}, found {', '.join(list(record)[:20])}")


def _eurus(record: Record) -> dict[str, Any]:
    """Convert records in verl's format: Eurus-2, Skywork-OR1, Code-R1."""
    ability = record.get("ability")
    if not isinstance(ability, str) or not ability.casefold().startswith("cod"):
        raise UnusableRecord(f"{ability!r} is not 'code'", field="ability")
    _, statement = question_of({"prompt": record.get("prompt")}, record)
    truth = record["reward_model"]
    field = "reward_model.ground_truth"
    tests = _tests(truth.get("ground_truth") if isinstance(truth, Mapping) else None, field)
    return _row(
        _ASKS_FOR_BLOCK.sub("", statement), tests, _set(record), dataset=str(record.get("data_source", "eurus"))
    )


def _prime(record: Record) -> dict[str, Any]:
    """Convert records in PrimeIntellect's format: SYNTHETIC-1 and -2, INTELLECT-2, verifiable-coding-problems."""
    info = parsed(record["verification_info"])
    if not isinstance(info, Mapping) or "test_cases" not in info:
        raise UnusableRecord("has no test_cases: not a programming problem", field="verification_info")
    if info.get("language", "python") != "python":
        raise UnusableRecord(f"the program must be written in {info['language']}", field="verification_info.language")
    tests = of_cases(parsed(info["test_cases"]), "verification_info.test_cases")
    statement = _ASKS_FOR_BLOCK.sub("", question_of(record, record)[1])
    return _row(statement, tests, DATA_SOURCE, dataset=str(record.get("source", "primeintellect")))


def _live_code_bench(record: Record) -> dict[str, Any]:
    cases = [
        case for field in ("public_test_cases", "private_test_cases") for case in unpacked(_text(record, field), field)
    ]
    tests = of_cases(cases, "private_test_cases", _function_of(record))
    statement = _with_starter(_text(record, "question_content"), record)
    difficulty = record.get("difficulty")
    return _row(statement, tests, DATA_SOURCE, wrapped=False, dataset="livecodebench", difficulty=difficulty)


def _deep_coder(record: Record) -> dict[str, Any]:
    tests = parsed(record["tests"])
    if isinstance(tests, list) and tests and all(isinstance(line, str) for line in tests):
        return _listed_asserts(record)
    statement = _with_starter(question_of(record, record)[1], record)
    return _row(statement, _tests(record["tests"], "tests", _function_of(record)), DATA_SOURCE, dataset="deepcoder")


def _codeforces(record: Record) -> dict[str, Any]:
    if record.get("interaction_format"):
        raise UnusableRecord("the problem is interactive", field="interaction_format")
    if record.get("input_mode", "stdio") != "stdio":
        raise UnusableRecord("the program must read and write files", field="input_mode")
    if record.get("generated_checker"):
        raise UnusableRecord(
            "the set's own checker program is required, since several outputs are correct", field="generated_checker"
        )
    if not record.get("official_tests") or not record.get("official_tests_complete", True):
        raise UnusableRecord("the record does not contain all tests", field="official_tests")
    parts = [_text(record, "description")]
    for title, field in (("Input", "input_format"), ("Output", "output_format"), ("Note", "note")):
        if record.get(field):
            parts.append(f"{title}\n{record[field]}")
    for example in record.get("examples") or []:
        parts.append(f"Example input\n{example['input']}\nExample output\n{example['output']}")
    limits: dict[str, Any] = {}
    if record.get("time_limit") is not None:
        limits["time_limit_s"] = TIME_FACTOR * _seconds(record["time_limit"])
    tests = of_cases(record["official_tests"], "official_tests")
    return _row("\n\n".join(parts), tests, "codeforces", dataset="codeforces", **limits)


def _asserted(record: Record) -> dict[str, Any]:
    """Convert records whose tests are one Python source: HumanEval, LeetCodeDataset, KodCode. Refuse HumanEval+."""
    problem = problems().get(str(record.get("task_id")))
    if problem is not None:
        if "assertion(" in _text(record, "test"):
            raise UnsupportedSet("HumanEval+ cannot be used: its tests are loops, not asserts; use HumanEval")
        if _text(record, "prompt").strip() == problem.prompt.strip():
            return {**humaneval_row(problem), "data_source": "humaneval"}
    candidates = ("candidate", str(record.get("entry_point", "candidate")).rpartition(".")[2])
    tests = of_asserts(_text(record, "test"), "test", candidates, record)
    asked = next((name for name in ("problem_description", "question") if record.get(name)), "prompt")
    return _row(
        _with_starter(_text(record, asked), record), tests, DATA_SOURCE, wrapped=False, dataset=record.get("subset")
    )


def _listed_asserts(record: Record) -> dict[str, Any]:
    """Convert records with a list of asserts (MBPP, sanitized MBPP, AceCode), or of inputs and outputs."""
    field = next(name for name in ("tests", "test_list", "test_cases") if name in record)
    asserts = parsed(record[field])
    asked = next((name for name in ("text", "question", "problem") if record.get(name)), "prompt")
    if isinstance(asserts, list) and any(isinstance(case, Mapping) for case in asserts):
        tests = of_cases(asserts, field, _function_of(record))
    elif isinstance(asserts, list) and all(isinstance(line, str) for line in asserts):
        tests = of_asserts("\n".join(asserts), field, (), record)
    else:
        raise CallerError('must be a list of asserts such as "assert f(1) == 2"', field=field)
    return _row(_text(record, asked), tests, DATA_SOURCE, wrapped=False, dataset=record.get("source"))


def _apps(record: Record) -> dict[str, Any]:
    if not record["input_output"]:
        raise UnusableRecord("the set has no tests for this problem", field="input_output")
    tests = _tests(record["input_output"], "input_output", _function_of(record))
    statement = _with_starter(_text(record, "question"), record)
    source = "taco" if record.get("source") else "apps"
    return _row(
        statement, tests, source, dataset=str(record.get("source") or "apps"), difficulty=record.get("difficulty")
    )


def _code_contests(record: Record) -> dict[str, Any]:
    for field in ("input_file", "output_file"):
        if record.get(field):
            raise UnusableRecord("the program must read and write files", field=field)
    tests: dict[str, Any] = {"inputs": [], "outputs": []}
    for field in ("public_tests", "private_tests", "generated_tests"):
        part = record.get(field) or {}
        if not isinstance(part, Mapping):
            raise CallerError("must be an object with input and output", field=field)
        tests["inputs"] += list(part.get("input") or [])
        tests["outputs"] += list(part.get("output") or [])
    limits: dict[str, Any] = {}
    if limit := record.get("time_limit"):
        limits["time_limit_s"] = TIME_FACTOR * _seconds(limit)
    if memory := record.get("memory_limit_bytes"):
        limits["memory_limit_mib"] = max(256, memory >> 20)
    return _row(_text(record, "description"), tests, "codecontests", dataset="code_contests", **limits)


def _seconds(limit: Any) -> float:
    """Return seconds from a number, or from the ``seconds`` and ``nanos`` of a protocol buffer's duration."""
    parts = (limit.get("seconds") or 0, limit.get("nanos") or 0) if isinstance(limit, Mapping) else (limit, 0)
    if not all(isinstance(part, int | float) and not isinstance(part, bool) for part in parts):
        raise CallerError("must be a number of seconds, or an object with seconds and nanos", field="time_limit")
    return float(parts[0] + parts[1] / 1e9)


def _code_gen(record: Record) -> dict[str, Any]:
    if not isinstance(record.get("responses_create_params"), Mapping):
        raise CallerError("missing; a row of NeMo Gym has it", field="responses_create_params")
    return {"data_source": DATA_SOURCE, **record}


_KINDS: Mapping[str, Callable[[Record], dict[str, Any]]] = {
    METADATA: _code_gen,
    "reward_model": _eurus,
    "verification_info": _prime,
    "official_tests": _codeforces,
    "private_test_cases": _live_code_bench,
    "tests": _deep_coder,
    "test_list": _listed_asserts,
    "test_cases": _listed_asserts,
    "test": _asserted,
    "input_output": _apps,
    "public_tests": _code_contests,
}
"""Converters by a field that identifies the data set; the first match counts."""


def _set(record: Record) -> str:
    source = record.get("data_source")
    return source if source in SETS else DATA_SOURCE


def _row(
    statement: str, tests: Mapping[str, Any], data_source: str, *, wrapped: bool = True, **more: Any
) -> dict[str, Any]:
    function = tests.get("fn_name")
    checker: dict[str, Any] = {"kind": "float" if function is not None or data_source in TOKEN_SETS else "lines"}
    if function is not None and wrapped:  # APPS, TACO and derived sets wrap some results in a list, without a marker
        checker["wrapped"] = True
    checker = tests.get("checker", checker)
    unit_tests = dict(tests) if function is None else as_json_text(tests)
    metadata = {"unit_tests": unit_tests, "checker": checker} | {k: v for k, v in more.items() if v is not None}
    return row_for(statement, metadata, function=function, data_source=data_source)


def _tests(text: Any, field: str, function: str | None = None) -> dict[str, Any]:
    """Return tests in the format of :class:`.code_rows.UnitTests`, from a data set's format or its JSON text.

    ``function`` is the function under test if the tests name none.
    """
    tests = _json(text, field) if isinstance(text, str) else text
    if isinstance(tests, list):
        return of_cases(tests, field, function)
    if isinstance(tests, Mapping) and "inputs" not in tests and {"functional", "test_code"} & tests.keys():
        raise UnusableRecord("its tests are a program, and prorl_code compares results", field=field)
    if not isinstance(tests, Mapping) or not isinstance(tests.get("inputs"), list):
        raise CallerError("has no list of inputs", field=field)
    if not isinstance(tests.get("outputs"), list):
        raise CallerError("has no list of outputs", field=field)
    if called := tests.get("fn_name") or function:
        return {"inputs": tests["inputs"], "outputs": tests["outputs"], "fn_name": called}
    return {name: [_joined(value) for value in tests[name]] for name in ("inputs", "outputs")}


def _with_starter(statement: str, record: Record) -> str:
    starter = record.get("starter_code")
    return f"{statement}\n\nStart from:\n```python\n{starter}\n```" if starter else statement


def _joined(value: Any) -> Any:
    return "\n".join(map(str, value)) if isinstance(value, list) else value


def _text(record: Record, field: str) -> str:
    text = record.get(field)
    if not isinstance(text, str) or not text.strip():
        raise CallerError("missing; expected the problem's text", field=field)
    return text


def _with_file(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    metadata = dict(row[METADATA])
    data = json.dumps(metadata.pop("unit_tests"), separators=(",", ":"), sort_keys=True).encode()
    name = hashlib.sha256(data).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    if not file.exists():
        with NamedTemporaryFile(dir=folder, prefix=f".{name}.", delete=False) as part:
            part.write(data)
        Path(part.name).chmod(0o644)
        Path(part.name).rename(file)
    return row | {METADATA: metadata | {"tests_file": f"{name}.json", "tests_sha256": name}}
