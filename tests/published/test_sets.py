# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl data`` on one file per published set, with the field names of its card: kept, dropped, refused, message."""

from __future__ import annotations

import base64
import csv
import gzip
import json
import pickle
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow.parquet import write_table
from typer.testing import CliRunner, Result

from nemo_gym_prorl.cli.app import app
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.code.asserts import of_asserts
from nemo_gym_prorl.tasks.code.code_rows import MAX_TEST_BYTES, problems, read_metadata, read_problem
from nemo_gym_prorl.tasks.code.convert import row_of as code_row
from nemo_gym_prorl.tasks.code.convert import unpacked
from nemo_gym_prorl.tasks.code.inside.checkers import values_match
from nemo_gym_prorl.tasks.dataset_records import UnusableRecord
from nemo_gym_prorl.tasks.math.checker import MathChecker
from nemo_gym_prorl.tasks.math.task import row_of as math_row
from tests.tasks.rows_file import table


Q = "What is $2 + 3$?"
STDIN = {"input": "2 3\n", "output": "5\n"}


@dataclass(frozen=True)
class Published:
    """A set, some of its records, and what is to become of them: a row of ``sets.jsonl``.

    Records have the field names of the set's card and invented contents.

    Attributes:
        name: of the set.
        family: the command.
        records: in the order of the file.
        kept: expected answers, letters, numbers of tests or instances of the rows.
        dropped: how many records the set publishes that cannot be graded.
        says: what is printed.
        suffix: of the file.
        refused: how many records are malformed.
    """

    name: str
    family: str
    records: list[Any]
    kept: list[Any]
    dropped: int = 0
    says: str = ""
    suffix: str = ".jsonl"
    refused: int = 0


SETS = [Published(**row) for row in table(__file__, "sets.jsonl")]
MATH = [one for one in SETS if one.family == "math"]


def written(folder: Path, one: Published) -> Path:
    file = folder / f"set{one.suffix}"
    lines = "".join(json.dumps(record) + "\n" for record in one.records)
    match one.suffix:
        case ".parquet":
            write_table(pyarrow.Table.from_pylist(one.records), file)
        case ".json":
            file.write_text(json.dumps(one.records))
        case ".csv":
            with file.open("w", newline="", encoding="utf-8-sig") as out:
                table = csv.DictWriter(out, one.records[0])
                table.writeheader()
                table.writerows(one.records)
        case ".jsonl.gz":
            file.write_bytes(gzip.compress(lines.encode()))
        case _:
            file.write_text(lines)
    return file


def run(family: str, file: Path, *more: str) -> Result:
    which = [family] if family in ("math", "stem", "code") else ["swe", "--dataset", family]
    return CliRunner().invoke(app, ["data", *which, str(file), *more])


def told(row: dict[str, Any], wanted: Any) -> Any:
    """Of a row what a set's ``kept`` says of it."""
    if "instance_id" in row:
        return row["instance_id"]
    if "expected_answer" not in row:
        return len(read_problem(read_metadata(row), None).tests)
    if "options" in row and len(wanted) > 1:
        [text] = [option[row["expected_answer"]] for option in row["options"] if row["expected_answer"] in option]
        return text
    return row["expected_answer"]


@pytest.mark.parametrize("one", SETS, ids=lambda one: one.name)
def test_a_published_set(one: Published, tmp_path: Path) -> None:
    file, output = written(tmp_path, one), tmp_path / "rows.jsonl"
    done = run(one.family, file, "-o", str(output))
    if not one.kept:
        assert isinstance(done.exception, CallerError)
        assert one.says in done.exception.reason
        assert [entry.name for entry in tmp_path.iterdir()] == [file.name]
        return
    assert done.exit_code == (1 if one.refused else 0), done.output
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [told(row, wanted) for row, wanted in zip(rows, one.kept, strict=True)] == one.kept
    assert f": {len(one.kept)} kept, {one.dropped} dropped, {one.refused} refused" in done.stderr
    assert one.says in done.stderr
    assert ("row 1: " in done.stderr, "row 2: " in done.stderr) == (True, len(rows) > 1)


async def test_the_gold_of_each_row_of_mathematics_is_right() -> None:
    """A gold that is not even met by itself makes a row on which all rollouts earn 0."""
    checker = MathChecker()
    try:
        for gold in {str(gold) for one in MATH for gold in one.kept}:
            assert (await checker.check(gold, f"\\boxed{{{gold}}}")).right, gold
    finally:
        await checker.aclose()


@pytest.mark.parametrize(
    "answer",
    [
        *("\\text{proof}", "$\\text{not found}$", "\\boxed{proof}", "nan", float("nan"), "None", "N/A", "<NA>", "?"),
        *("No answer", "We add.\nIt is 5.", ["proof"], '["nan"]'),
    ],
    ids=repr,
)
def test_what_is_no_final_answer_is_no_gold(answer: Any) -> None:
    asked = {"problem": Q, "solution": "As \\boxed{7} is not the answer."}
    truth = {"ground_truth": answer}
    for given in (
        *({name: answer} for name in ("answer", "expected_answer", "Answer")),
        *({name: truth} for name in ("reward_model", "verification_info")),
    ):
        with pytest.raises(UnusableRecord):
            math_row(asked | given)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        *((same, same) for same in ("5", "no solution", "\\emptyset", "\\text{None of these}", "Na", "undefined")),
        *((same, same) for same in ("[1, 2]", "St. Louis", "\\boxed{5}", "\\boxed{5}\\text{ cm}", "x = 5.", "1,2")),
        ("\\begin{pmatrix}\n1\\\\\n2\n\\end{pmatrix}",) * 2,
        (5, "5"),
        (0.5, "0.5"),
        (["5"], "5"),
        ([1, 2], "1, 2"),
        ('["5"]', "5"),
        ("Two and three.\n#### -1,005", "-1005"),
        ("#### 0.5", "0.5"),
        ("Adding gives \\boxed{5}", "5"),
        ("First \\boxed{4}.\nNo, \\boxed{5}.", "5"),
    ],
    ids=repr,
)
def test_a_final_answer_stays_one(answer: Any, gold: str) -> None:
    assert math_row({"problem": Q, "answer": answer})["expected_answer"] == gold


def bomb() -> str:
    return base64.b64encode(zlib.compress(pickle.dumps("[" + " " * (2 * MAX_TEST_BYTES) + "]"))).decode()


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not base64!", "must be JSON or packed"),
        (base64.b64encode(zlib.compress(b"not a pickle")).decode(), "private_test_cases: "),
        (base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode(), "a pickle of one text"),
        (base64.b64encode(zlib.compress(pickle.dumps(["[]", "[]"]))).decode(), "a pickle of one text"),
        (base64.b64encode(zlib.compress(pickle.dumps("[")[:-1] + b"r\xff\xff\xff\x7f.")).decode(), "not JSON"),
        ("[1", "not JSON"),
    ],
)
def test_packed_tests_are_read_and_never_run(text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CallerError, match=says):
        unpacked(text, "private_test_cases")
    assert capsys.readouterr().out == ""


def test_packed_tests_of_any_protocol_and_no_size() -> None:
    for protocol in range(1, pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(json.dumps([STDIN]), protocol=protocol)
        assert unpacked(base64.b64encode(zlib.compress(data)).decode(), "x") == [STDIN]
    with pytest.raises(CallerError, match="unpacks to more than"):
        unpacked(bomb(), "x")


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        ("assert f(1, 'a') == [2]", [[[1, "a"], [2]]]),
        ("assert [2] == f(1)", [[[1], [2]]]),
        ("assert f(1, -2) is None", [[[1, -2], None]]),
        ("def check(candidate):\n    assert candidate({'a': 1}) == (1, 2), 'no'", [[[{"a": 1}], [1, 2]]]),
        ("assert f() == '21'", [[[], "21"]]),
        ("assert Solution().f(1) == 2\nassert solution.f(0) == 1", [[[1], 2], [[0], 1]]),
        ("assert f(1) == 2\nassert g(1) == 2", None),
        ("assert f(1)", None),
        ("assert f(1)\nassert f(2) == False", [[[1], True], [[2], False]]),
        ("assert f(2) == 5\nassert f(1)", None),
        ("assert isinstance(f(1), int)", None),
        ("assert f(list(range(1, 4))) == 'ab' * 2", [[[[1, 2, 3]], "abab"]]),
        ("assert f(-2**3, [10**9 + 7], {'a': 3 - 1}) == (1 / 2, -1)", [[[-8, [10**9 + 7], {"a": 2}], [0.5, -1]]]),
        ("assert f(100000**2) == float('inf')", [[[10**10], float("inf")]]),
        ("assert f(2**99999) == 1", None),
        ("assert f('a' * 10**9) == 1", None),
        ("assert f(list(range(10**9))) == 1", None),
        ("assert f(1 / 0) == 1", None),
        ("assert f('%999999999d' % 1) == 1", None),
        ("assert f(1e999 - 1e999) == 1", None),
        ("assert abs(f(1) - 1) < 10**400", None),
        ("assert abs(f(1) - 1) < -1", None),
        ("assert math.isclose(f(1), 2.0, abs_tol=-1)", None),
        ("assert f(g(1)) == 2", None),
        ("assert f((1, 2), 'a\\nb') == 2", [["(1, 2)\n'a\\nb'", 2]]),
        ("assert f({1}, set()) == 2", [["{1}\nset()", 2]]),
        ("assert f({(0, 1): 'a'}) == 2\nassert f(1) == 2", [["{(0, 1): 'a'}", 2], ["1", 2]]),
        ("assert f((float('inf'), 1)) == 2", None),
        ("assert f() == 2\nassert f((1,)) == 2", [["", 2], ["(1,)", 2]]),
        ("assert f({'b', 'a', 'c'}) == 2", [["{'a', 'b', 'c'}", 2]]),
        ("x = [1] * 2\nassert f(x) == 3\nassert f(x) == 4", None),
        ("x = '" + "a" * 200 + "'\nassert f(x) == 2\nassert f(x) == 2", None),
        ("assert f(1) == {1, 2}", None),
        ("assert f('a').lower() == 'a'", None),
        ("assert f(*[1]) == 2", None),
        ("for x in [1]:\n    assert f(x) == 2", None),
        ("import os\nos.remove('x')\nassert f(1) == 2", None),
        ("", None),
        ("assert sorted(f(1)) == [1, 2]", [[[1], [1, 2]]]),
        ("assert sorted([2, 1]) == sorted(f(1))", [[[1], [1, 2]]]),
        ("assert set(f(1)) == {2, 1}", [[[1], [1, 2]]]),
        ("assert list(f(2)) == list(range(2))", [[[2], [0, 1]]]),
        ("assert len(f(1)) == 2", [[[1], 2]]),
        ("assert sorted(f(1)) == [1]\nassert f(2) == [2]", None),
        ("assert sorted(f(1), reverse=True) == [1]", None),
        ("assert sorted(f(1)) == sorted(g(2))", None),
        ("assert set(f(1)) == {1, 'a'}", None),
        ("x = [1, 2]\nassert f(x) == 3", [[[[1, 2]], 3]]),
        ("def test():\n    x = 2\n    y = -1\n    got = f(x)\n    assert got == y", [[[2], -1]]),
        ("s = Solution()\nassert s.f(1) == 2\nassert s.f(0) == 1", [[[1], 2], [[0], 1]]),
        ("def check(g):\n    assert f(1) == 2\n\ncheck(f)", [[[1], 2]]),
        ("x = [1]\nassert f(x) == x", None),
        ("x = 1\nx += 1\nassert f(x) == 2", None),
        ("x = 1\ndef test(x):\n    assert f(x) == 2", None),
        ("x = 1\nif x:\n    x = 2\nassert f(x) == 2", None),
        ("x = g(1)\nassert f(x) == 2", None),
        ("x = 1\n" + "x = (x, x)\n" * 30 + "assert f(x) == 1", None),
    ],
)
def test_asserts(source: str, kept: list[Any] | None) -> None:
    if kept is None:
        with pytest.raises(UnusableRecord, match="its tests"):
            of_asserts(source, "test")
        return
    row = {"verifier_metadata": {"unit_tests": of_asserts(source, "test", ("candidate", "f"))}}
    problem = read_problem(read_metadata(row), None)
    assert problem.function == "f"
    # Beside a list of arguments, a result that is no list is JSON, so that a text stays a text.
    values = [json.loads(test.expected) if isinstance(test.expected, str) else test.expected for test in problem.tests]
    assert [[test.input, value] for test, value in zip(problem.tests, values, strict=True)] == kept


HEAD = "def f(x, step: int = 1, scale=-1, *, key=0) -> dict[str, int]:"
SIGNED: list[dict[str, Any]] = [
    {"text": Q, "code": f"{HEAD}\n    return x\n", "test_list": ["assert CALL == 2"]},
    {"question": f"Write `f`:\n```python\n{HEAD}\n```\nNote: be quick.", "test_cases": ["assert CALL == 2"]},
    {"question": Q, "solution": f"{HEAD}\n  return x", "test": "import f\ndef test():\n  assert CALL == 2"},
    {"task_id": "mine/0", "prompt": f"{HEAD}\n    'Doc.'\n", "entry_point": "f", "test": "assert CALL == 2"},
    {"question": Q, "starter_code": f"class S:\n    {HEAD.replace('(x', '(self, x')}\n", "test": "assert CALL == 2"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def f(b, a):\n    return a\n\ndef f(a, b):\n    return a", "assert f(a=1, b=2) == 1"),
        ("class A:\n    def f(self):\n        return True\n\ndef f(x):\n    return [1]", "assert f(1)"),
        ("def f(x):\n    yield x\n    return True", "assert f(1)"),
    ],
)
def test_definitions_that_do_not_decide_are_no_signature(code: str, test: str) -> None:
    with pytest.raises(UnusableRecord, match="its tests"):
        of_asserts(test, "test", record={"code": code})


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("f(1)", [1]),
        ("f(x=1)", [1]),
        ("f(step=2, x=1)", [1, 2]),
        ("f(1, scale=2)", [1, 1, 2]),
        ("f(scale=3, step=2, x=1)", [1, 2, 3]),
        ("f(step=2)", None),
        ("f(1, x=2)", None),
        ("f(1, key=2)", None),
        ("f(1, other=2)", None),
    ],
)
def test_arguments_by_name_follow_the_signature(call: str, arguments: list[Any] | None) -> None:
    for record in SIGNED:
        record = json.loads(json.dumps(record).replace("CALL", call))
        if arguments is None:
            with pytest.raises(UnusableRecord, match="do not fit"):
                code_row(record)
        else:
            [test] = read_problem(read_metadata(code_row(record)), None).tests
            assert test.input == arguments


@pytest.mark.parametrize(
    ("source", "right", "wrong"),
    [
        ("assert abs(f(3) - 1.5) < 1e-6", 1.5000009, 1.5000011),
        ("assert abs(1.5 - f(3)) <= 0.1", 1.59, 1.61),
        ("assert math.isclose(f(3), 2.0)", 2.000000001, 2.00000001),
        ("import math\nassert math.isclose(2, f(3), rel_tol=0.0, abs_tol=0.5)", 2.5, 2.6),
        ("assert abs(f(3) - 1.5) < 1e-6\nassert f(1) == 2", 1.5000009, 1.5000011),
        ("assert f(3) == pytest.approx(1.5)", 1.5000014, 1.5000016),
        ("assert f(3) == approx(1.5, abs=0.1)\nassert f(1) == approx(0, abs=0.1)", 1.59, 1.61),
        ("assert f(3) == pytest.approx([1.5, 2], rel=0.1)", [1.6, 2.1], [1.6, 2.3]),
        ("assert f(3) == pytest.approx(1.5, nan_ok=True)", None, None),
        ("assert f(3) == pytest.approx('a')", None, None),
        ("assert abs(f(3) - 1.5) < 0.1\nassert f(1) == 2", None, None),
        ("assert abs(f(3) - 1.5) < 0.1\nassert abs(f(1) - 1.5) < 0.2", None, None),
        ("assert abs(f(3) - 'a') < 1", None, None),
        ("assert abs(f(3)) < 1", None, None),
        ("assert abs(f(3) - 1.5) > 0.1", None, None),
    ],
)
def test_asserted_tolerance(source: str, right: Any, wrong: Any) -> None:
    record = {"question": Q, "test": source}
    if right is None:
        with pytest.raises(UnusableRecord, match="its tests"):
            code_row(record)
        return
    problem = read_problem(read_metadata(code_row(record)), None)
    matched = [values_match(value, problem.tests[0].expected, dict(problem.checker)) for value in (right, wrong)]
    assert matched == [True, False]


@pytest.mark.parametrize(
    ("solution", "boolean"),
    [
        ("def f(x) -> bool:\n    return g(x)", True),
        ("def f(x):\n    if not x:\n        return False\n    return x > 1 and not x == 2", True),
        ("def f(x):\n    return any(x)", True),
        ("def f(x) -> int:\n    return x > 1", False),
        ("def f(x):\n    return x and x > 1", False),
        ("def f(x):\n    if x:\n        return True", False),
    ],
)
def test_bare_assert_needs_a_boolean(solution: str, boolean: bool) -> None:
    record = {"question": Q, "solution": solution, "test": "assert f(2)\nassert not f(0)"}
    if boolean:
        assert [test.expected for test in read_problem(read_metadata(code_row(record)), None).tests] == [True, False]
    else:
        with pytest.raises(UnusableRecord, match="may be no boolean"):
            code_row(record)


@pytest.mark.parametrize("task", ["HumanEval/9", "mine/9"])
@pytest.mark.parametrize("shipped", [True, False])
def test_shipped_problem_replaces_only_itself(task: str, shipped: bool) -> None:
    shipped_prompt = problems()["HumanEval/9"].prompt
    own = {"task_id": task, "entry_point": "f", "test": "def check(candidate):\n    assert candidate([1]) == 1"}
    row = code_row(own | {"prompt": shipped_prompt.strip() if shipped else "def f(xs):\n    'First.'\n"})
    replaced = shipped and task == "HumanEval/9"
    assert read_problem(read_metadata(row), None).function == ("rolling_max" if replaced else "f")
