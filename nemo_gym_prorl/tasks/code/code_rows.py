# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of programming problems: validation, prompts, and the HumanEval data set.

The format is that of NeMo Gym's ``code_gen``: ``verifier_metadata.unit_tests`` holds ``inputs`` and ``outputs``, and
``fn_name`` for functions. A row may also name a checker and limits. Large tests can be stored outside of the row:
``tests_file`` names a file on the server, and ``tests_sha256`` its hash.

HumanEval (MIT licence, https://github.com/openai/human-eval) ships as ``humaneval.jsonl``: prompt and reference
solution of each problem, and its published tests as inputs and outputs. Rows are deterministic, so data set files are
reproducible.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.code.inside.checkers import LONG_INTEGER
from nemo_gym_prorl.tasks.dataset_records import create_params
from nemo_gym_prorl.tasks.workbench import workbench_schemas


MAX_TESTS = 100_000  # per problem, to bound memory and grading time
MAX_TEST_BYTES = 64 << 20
"""Maximum characters of all inputs and outputs of a problem, to bound memory."""
MAX_PYTHON_CHARS = 1 << 16
"""Maximum length of a call's arguments as Python, whose evaluation takes 30 times the memory of JSON."""

CALL_TOLERANCE = 1e-5
"""Relative tolerance for numbers returned by functions of rows without a checker; the value of Gym's grader."""

MAX_PACKED_BYTES = 4 * MAX_TEST_BYTES
"""Maximum bytes of unpacked tests: JSON may take four bytes per character."""

MAX_INT_DIGITS = 4000
"""Longer integers stay text until the grader: Python parses at most 4300 digits, a limit of the whole process."""

METADATA = "verifier_metadata"


def inflated(text: str, limit: int) -> bytes:
    """Decompress base64 of zlib data.

    Raises:
        ValueError, zlib.error: the text is invalid or cut off, or unpacks to more than ``limit`` bytes.
    """
    stream = zlib.decompressobj()
    data = stream.decompress(base64.b64decode(text, validate=True), limit)
    if stream.unconsumed_tail or not stream.eof:
        raise ValueError(f"unpacks to more than {limit} bytes, or is cut off")
    return data


def _integer(digits: str) -> Any:
    return int(digits) if len(digits) <= MAX_INT_DIGITS else {LONG_INTEGER: digits}


class UnitTests(BaseModel):
    """Tests of a problem: inputs and expected outputs, or ``packed``, which is base64 of zlib of their JSON.

    ``fn_name`` is the function under test; ``None`` for a program. Gym's LiveCodeBench rows are packed. With
    ``arguments: python`` each line of an input is a Python literal, such as a tuple, and not JSON.
    """

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _unpacked(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or not isinstance(packed := given.get("packed"), str):
            return given
        try:
            tests = json.loads(inflated(packed, MAX_PACKED_BYTES), parse_int=_integer)
        except (ValueError, zlib.error, RecursionError) as error:
            raise ValueError(f"packed: must be base64 of zlib of JSON ({error})") from error
        if not isinstance(tests, Mapping):
            raise ValueError("packed: must hold an object with inputs and outputs")
        return {**tests, **{name: given[name] for name in ("fn_name", "arguments") if given.get(name)}}

    inputs: list[Any] = Field(min_length=1, max_length=MAX_TESTS)
    outputs: list[Any] = Field(min_length=1, max_length=MAX_TESTS)
    fn_name: Annotated[str, StringConstraints(pattern=r"^[^\W\d]\w*$")] | None = None
    arguments: Literal["json", "python"] = "json"


class NamedChecker(BaseModel):
    """Built-in comparison. Tolerances apply to ``float`` and to results of functions.

    With ``wrapped``, an expected result that is a list of one element also matches the element.
    ``applied`` is a builtin that is called with a function's result before the comparison; a set is sorted first.
    """

    model_config = ConfigDict(extra="forbid")

    kind: Literal["lines", "tokens", "exact", "float"] = "lines"
    absolute: float = Field(default=1e-6, ge=0, allow_inf_nan=False)
    relative: float = Field(default=1e-6, ge=0, allow_inf_nan=False)
    wrapped: bool = False
    applied: Literal["len", "list", "set", "sorted"] | None = None


class ProgramChecker(BaseModel):
    """Checker program: Python with ``check(input, output, expected)`` that returns a boolean or (boolean, reason)."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["program"]
    source: str = Field(min_length=1, max_length=256 * 1024)


class Metadata(BaseModel):
    """Fields of a row's ``verifier_metadata`` that the environment reads."""

    model_config = ConfigDict(extra="ignore")

    unit_tests: UnitTests | None = None
    tests_file: Annotated[str, StringConstraints(pattern=r"^[\w][\w./-]*$")] | None = None
    tests_sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None
    checker: Annotated[NamedChecker | ProgramChecker, Field(discriminator="kind")] | None = None
    time_limit_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    memory_limit_mib: int | None = Field(default=None, ge=32)


@dataclass(frozen=True, slots=True)
class CodeTestCase:
    """A test: standard input of a program and its expected output, or arguments of a function and its result."""

    input: Any
    expected: Any


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """A programming problem with its tests.

    Attributes:
        tests: tests in their order of execution.
        function: name of the function under test; ``None`` for a program.
        checker: settings for :mod:`.inside.checkers` and :mod:`.inside.grader`.
        time_limit_s: CPU seconds of one test; ``None`` for the configured limit.
        memory_limit_mib: address space in MiB; ``None`` for the configured limit.
    """

    tests: Sequence[CodeTestCase]
    function: str | None
    checker: Mapping[str, Any]
    time_limit_s: float | None = None
    memory_limit_mib: int | None = None


def read_metadata(row: Mapping[str, Any]) -> Metadata:
    """Parse a row's ``verifier_metadata`` without validating individual tests.

    Raises:
        CallerError: the metadata is invalid; names the field.
    """
    metadata = row.get(METADATA)
    if metadata is None:
        raise CallerError("missing", field=METADATA)
    if isinstance(metadata, Mapping) and isinstance(metadata.get("checker"), str):
        metadata = {**metadata, "checker": {"kind": metadata["checker"]}}
    parsed = _validated(Metadata, metadata, METADATA)
    if parsed.unit_tests is None and parsed.tests_file is None:
        raise CallerError("missing; a row needs unit_tests or a tests_file", field=f"{METADATA}.unit_tests")
    if parsed.tests_file is not None:
        if parsed.unit_tests is not None:
            raise CallerError("a row cannot have both unit_tests and a tests_file", field=f"{METADATA}.tests_file")
        if parsed.tests_sha256 is None:
            raise CallerError("missing; a tests_file needs its hash", field=f"{METADATA}.tests_sha256")
        if ".." in Path(parsed.tests_file).parts:
            raise CallerError("must be inside the server's tests_folder", field=f"{METADATA}.tests_file")
    return parsed


def read_problem(metadata: Metadata, tests_folder: Path | None) -> CodeProblem:
    """Validate the tests and return the problem. Reads the ``tests_file`` if the row names one.

    Raises:
        CallerError: the tests are invalid; names the field.
    """
    if metadata.tests_file is None:
        assert metadata.unit_tests is not None
        field, tests = f"{METADATA}.unit_tests", metadata.unit_tests
    else:
        field, tests = f"{METADATA}.tests_file", _read_file(metadata, tests_folder)
    if len(tests.inputs) != len(tests.outputs):
        raise CallerError(f"has {len(tests.outputs)} outputs for {len(tests.inputs)} inputs", field=f"{field}.outputs")
    one = (_call if tests.arguments == "json" else _python_call) if tests.fn_name else _run
    cases = [one(*pair, field, index) for index, pair in enumerate(zip(tests.inputs, tests.outputs, strict=True))]
    size = sum(_size(value) for pair in zip(tests.inputs, tests.outputs, strict=True) for value in pair)
    if size > MAX_TEST_BYTES:
        raise CallerError(f"has {size} characters of tests, the limit is {MAX_TEST_BYTES}", field=field)
    checker = metadata.checker or NamedChecker(relative=CALL_TOLERANCE if tests.fn_name else 1e-6)
    if isinstance(checker, NamedChecker) and all(isinstance(out, str) and not out.strip() for out in tests.outputs):
        raise CallerError("all are blank, so a program without output would pass", field=f"{field}.outputs")
    return CodeProblem(cases, tests.fn_name, checker.model_dump(), metadata.time_limit_s, metadata.memory_limit_mib)


def find_tests_file(metadata: Metadata, tests_folder: Path | None) -> Path | None:
    """Return the path of a row's tests file; ``None`` if the row names none.

    Raises:
        CallerError: the server has no tests folder, or the folder has no such file; names the field.
    """
    if metadata.tests_file is None:
        return None
    field = f"{METADATA}.tests_file"
    if tests_folder is None:
        raise CallerError("this server has no tests_folder", field=field)
    path = tests_folder / metadata.tests_file
    if not path.is_file() or not path.resolve().is_relative_to(tests_folder.resolve()):
        raise CallerError(f"no file {metadata.tests_file!r} in the server's tests_folder", field=field)
    return path


def _read_file(metadata: Metadata, tests_folder: Path | None) -> UnitTests:
    field = f"{METADATA}.tests_file"
    path = find_tests_file(metadata, tests_folder)
    assert path is not None
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != metadata.tests_sha256:
        raise CallerError(f"does not match the SHA-256 of {metadata.tests_file!r}", field=f"{METADATA}.tests_sha256")
    try:
        parsed = json.loads(data, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise CallerError(f"{metadata.tests_file!r} is not JSON: {error}", field=field) from error
    return _validated(UnitTests, parsed, field)


def _run(given: Any, expected: Any, field: str, index: int) -> CodeTestCase:
    for name, value in (("inputs", given), ("outputs", expected)):
        if not isinstance(value, str):
            raise CallerError(
                'must be text such as "1 2\\n"; for a function, add fn_name', field=f"{field}.{name}.{index}"
            )
    return CodeTestCase(given, expected)


def _call(given: Any, expected: Any, field: str, index: int) -> CodeTestCase:
    """Parse a test of a function.

    Arguments are a list, or text with the JSON of one argument per line. If the arguments are text, the result is JSON
    text too. If the arguments are a list, a text result is a value, unless the text is the JSON of a list or object.
    """
    name = "inputs"
    try:
        if as_text := isinstance(given, str):
            given = [json.loads(line, parse_int=_integer) for line in given.split("\n") if line.strip()]
        name = "outputs"
        if isinstance(expected, str) and as_text:
            expected = json.loads(expected, parse_int=_integer)
        elif isinstance(expected, str) and expected.lstrip()[:1] in ("[", "{"):
            with suppress(ValueError, RecursionError):
                expected = json.loads(expected, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise CallerError(f"is not JSON: {error}", field=f"{field}.{name}.{index}") from error
    if not isinstance(given, list):
        raise CallerError("must be a list of arguments", field=f"{field}.inputs.{index}")
    return CodeTestCase(given, expected)


def _python_call(given: Any, expected: Any, field: str, index: int) -> CodeTestCase:
    """Parse a test of a function whose arguments are Python literals, one per line; the sandbox evaluates them."""
    field_of_input = f"{field}.inputs.{index}"
    if not isinstance(given, str) or len(given) > MAX_PYTHON_CHARS:
        raise CallerError(f"must be text of at most {MAX_PYTHON_CHARS} characters", field=field_of_input)
    try:
        for line in filter(None, given.split("\n")):
            ast.literal_eval(line)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise CallerError(f"must have a Python literal in each line: {error}", field=field_of_input) from error
    return CodeTestCase(given, _call("", expected, field, index).expected)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str) else len(json.dumps(value))


def _validated[M: BaseModel](model: type[M], value: Any, field: str) -> M:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join([field, *(str(part) for part in fault["loc"] if part not in ("program", "lines"))])
        raise CallerError(fault["msg"], field=where) from error


SOLUTION_FILE = "solution.py"

TOOLS = ("bash", "python", "str_replace_editor", "submit")

SUBMIT_DESCRIPTION = f"Hand in {SOLUTION_FILE} and end the task."

_SYSTEM = """\
You are a careful Python programmer. You work in a sandbox through tools; there is no network. Write {what} in \
`{file}` in your working folder. Try it out with the tools before you trust it. When it is done, call `submit`: \
`{file}` is then tested elsewhere, with tests that you do not see. Only that file counts."""

PROGRAM = _SYSTEM.format(file=SOLUTION_FILE, what="a Python program that reads standard input and prints its answer")
FUNCTION = _SYSTEM.format(file=SOLUTION_FILE, what="the Python function that the problem asks for")


@dataclass(frozen=True, slots=True)
class HumanEvalProblem:
    """A problem of HumanEval.

    Attributes:
        entry_point: name of the function to implement.
        prompt: imports, helpers, signature and docstring, without the body.
        reference: correct body, to append to ``prompt``.
    """

    task_id: str
    entry_point: str
    prompt: str
    reference: str
    metadata: Mapping[str, Any]

    @property
    def stub(self) -> str:
        """Source of the function without an implementation."""
        return f"{self.prompt.rstrip()}\n    raise NotImplementedError\n"

    @property
    def reference_source(self) -> str:
        """Source of a correct solution file."""
        return self.prompt + self.reference


@cache
def problems() -> Mapping[str, HumanEvalProblem]:
    """Return HumanEval's problems by task id, in the order of the data set."""
    found = {}
    for line in files(__package__).joinpath("humaneval.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        tests = {"fn_name": record["entry_point"], "inputs": record.pop("inputs"), "outputs": record.pop("outputs")}
        checker = {"checker": record.pop("checker")} if "checker" in record else {}
        metadata = {"dataset": "HumanEval", "unit_tests": tests, **checker}
        found[record["task_id"]] = HumanEvalProblem(**record, metadata=metadata)
    return found


def humaneval_row(problem: HumanEvalProblem, script: Mapping[str, Any] | None = None) -> dict[str, Any]:
    statement = f"Complete this function:\n\n```python\n{problem.stub}```"
    return row_for(statement, problem.metadata, function=problem.entry_point, script=script, task_id=problem.task_id)


def row_for(
    statement: str,
    metadata: Mapping[str, Any],
    *,
    function: str | None,
    script: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return a dataset row with ``more`` fields.

    ``metadata`` is as in :class:`Metadata`; ``function`` is ``None`` for a program; see :func:`.create_params` for
    ``script``.
    """
    asked = statement.strip()
    if function is not None:
        asked += f"\n\nImplement the function `{function}` (or a class `Solution` with it) in `{SOLUTION_FILE}`."
    system = FUNCTION if function is not None else PROGRAM
    params = create_params(system, asked, workbench_schemas(TOOLS, SUBMIT_DESCRIPTION), script=script)
    return {"responses_create_params": params, METADATA: dict(metadata), **more}
