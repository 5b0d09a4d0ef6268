# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Data set conversion of all families: records become rows, or are refused by field; and the command ``prorl data``.

``tests/published`` has a file per published set; here are the details of rows, and what is wrong with single records.
"""

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from typer.testing import CliRunner

from nemo_gym_prorl.cli import app
from nemo_gym_prorl.commands.images import wanted_images
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.code import convert
from nemo_gym_prorl.tasks.code.rows import read_metadata, read_problem
from nemo_gym_prorl.tasks.math import task as math
from nemo_gym_prorl.tasks.stem import problems as stem
from nemo_gym_prorl.tasks.stem.search_engines import Index
from nemo_gym_prorl.tasks.swe import instance
from nemo_gym_prorl.tasks.swe.datasets import CONVERTERS
from tests.tasks.swe import records


STDIO = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
CALLS = {"inputs": [[[1], 2]], "outputs": [[[1, 2]]], "fn_name": "push"}
ASKS = "\n\nWrite Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."

EURUS = {
    "data_source": "codecontests",
    "prompt": [{"content": "Think.", "role": "system"}, {"content": f"Add two numbers.{ASKS}", "role": "user"}],
    "ability": "code",
    "reward_model": {"ground_truth": json.dumps(STDIO), "style": "rule"},
    "extra_info": {"index": 0, "split": "train"},
}
APPS = {
    "problem_id": 7, "question": "Push.", "solutions": "[]", "input_output": json.dumps(CALLS),
    "difficulty": "introductory", "url": "", "starter_code": "def push(items, item):",
}  # fmt: skip
TACO = {"question": "Add.", "input_output": json.dumps({"inputs": [["1", "2"]], "outputs": [["3"]]}), "source": "x"}
CONTESTS = {
    "name": "a", "description": "Add.", "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
    "private_tests": {"input": ["3 4\n"], "output": ["7\n"]}, "generated_tests": {"input": [], "output": []},
    "time_limit": {"seconds": 1, "nanos": 500_000_000}, "memory_limit_bytes": 512 << 20,
}  # fmt: skip
GYM = {
    "responses_create_params": {"input": [{"role": "user", "content": "Add."}]},
    "verifier_metadata": {"unit_tests": STDIO | {"fn_name": None}},
    "hash_id": "x",
}


MIXTURE = yaml.safe_load(Path("environments/prorl_mixture/config.yaml").read_text())["prorl_mixture"][
    "responses_api_agents"
]["prorl_agent"]["environments"]
ROUTED = {name: {name, *environment["data_sources"]} for name, environment in MIXTURE.items()}
"""What rows of each of the mixture's environments have in ``data_source``."""
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is $5 + 6$?\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
SCP = {
    "domain": "Physics",
    "problem": "A stone falls 20 m. How fast is it then, in m/s?",
    "matched_solution": "By energy, $v = \\sqrt{2 g h}$.\n\nSo the speed is $v = \\sqrt{2 g h} = 19.8$.",
    "o1_solution": "...",
    "is_o1_solution_same_with_matched_solution": True,
    "qwq_solution": "...",
    "is_qwq_solution_same_with_matched_solution": True,
}
"""A record with SCP-116K's fields."""

CONVERT: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "code": convert.row_of,
    "math": math.row_of,
    "stem": stem.row_of,
    **{name: partial(converter, prefix=None) for name, converter in CONVERTERS.items()},
}
SWE = {"swe-bench": records.swe_bench, "swe-gym": records.swe_gym, "r2e-gym": records.r2e_gym}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def facts(family: str, row: dict[str, Any]) -> dict[str, Any]:
    """What the table says of rows."""
    params = row["responses_create_params"]
    found = {
        "asked": params["input"][-1]["content"],
        "tools": {tool["name"] for tool in params.get("tools", [])},
        "source": row["data_source"],
    }
    if family == "code":
        problem = read_problem(read_metadata(row), None)
        return found | {
            "tests": [(test.input, test.expected) for test in problem.tests],
            "function": problem.function,
            "wrapped": problem.checker.get("wrapped"),
            "limits": (problem.time_limit_s, problem.memory_limit_mib),
            "about": {name: row["verifier_metadata"].get(name) for name in ("dataset", "difficulty")},
        }
    if family in ("math", "stem"):
        return found | {name: row.get(name) for name in ("question", "expected_answer", "options")}
    read = instance.row_of(row)
    return found | {
        "instance": read.instance_id,
        "image": read.image,
        "command": read.swe.test_command,
        "parser": read.swe.log_parser,
        "network": (read.swe.tests_network, read.network),
        "expected": read.swe.expected_output,
        "fixes": "return a + b" in read.swe.patch,
    }


def scp(solution: Any, expected: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    made = {"expected_answer": expected, "question": SCP["problem"], "tools": {"python", "search"}}
    return "stem", SCP | {"matched_solution": solution}, made


NOBLE = "Which is noble?\n(A) oxygen\n(B) iron\n(C) neon"
CHAT = [{"role": "system", "content": "Think."}, {"role": "user", "content": "Which metal is liquid?"}]
IMAGES = {
    "swe-bench": "sweb.eval.x86_64.sympy_1776_sympy-1:latest",
    "swe-gym": "sweb.eval.x86_64.project-monai_s_monai-1:latest",
    "r2e-gym": f"aiohttp_final:{COMMIT}",
}

ROWS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "code",
        EURUS,
        {
            "asked": "Add two numbers.",
            "tools": {"bash", "python", "str_replace_editor", "submit"},
            "tests": [("1 2\n", "3\n")],
            "about": {"dataset": "codecontests", "difficulty": None},
            "source": "codecontests",
        },
    ),
    ("code", EURUS | {"data_source": "taco"}, {"source": "taco"}),
    ("code", EURUS | {"data_source": "numina_olympiads"}, {"source": "code"}),
    (
        "code",
        APPS,
        {
            "function": "push",
            "wrapped": True,
            "tests": [([[1], 2], [[1, 2]])],
            "about": {"dataset": "apps", "difficulty": "introductory"},
            "source": "apps",
        },
    ),
    ("code", APPS | {"source": "codechef"}, {"source": "taco"}),
    ("code", TACO, {"tests": [("1\n2", "3")]}),
    (
        "code",
        CONTESTS,
        {"tests": [("1 2\n", "3\n"), ("3 4\n", "7\n")], "limits": (7.5, 512), "source": "codecontests"},
    ),
    ("code", CONTESTS | {"time_limit": {"seconds": 2, "nanos": 0}}, {"limits": (10.0, 512)}),
    ("code", CONTESTS | {"time_limit": 3}, {"limits": (15.0, 512)}),
    ("code", GYM, {"asked": "Add.", "source": "code"}),
    ("code", GYM | {"data_source": "mine"}, {"source": "mine"}),
    (
        "math",
        {"ID": "2024-I-1", "Problem": "What is $2 + 2$?", "Solution": "Four.", "Answer": 4},
        {"asked": "What is $2 + 2$?", "question": "What is $2 + 2$?", "expected_answer": "4", "tools": {"python"}},
    ),
    (
        "math",
        {"prompt": [{"role": "user", "content": DAPO}], "ability": "MATH", "reward_model": {"ground_truth": "11"}},
        {"asked": "What is $5 + 6$?", "question": "What is $5 + 6$?", "expected_answer": "11"},
    ),
    scp(SCP["matched_solution"], "19.8"),
    scp("Long working.\nTherefore \\boxed{4.2 \\text{ J}}", "4.2 \\text{ J}"),
    scp("Working.\nThe answer is 42.", "42"),
    scp("Working.\n**Answer:** the mitochondrion", "the mitochondrion"),
    scp("Oxygen", "Oxygen"),
    scp("Working.\nThe correct option is (C).", "(C)"),
    (
        "stem",
        {"prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "\\boxed{mercury}"}},
        {"asked": "Which metal is liquid?", "question": "Which metal is liquid?", "expected_answer": "mercury"},
    ),
    *(
        (
            "stem",
            {"problem": NOBLE, "answer": given},
            {
                "expected_answer": "C",
                "options": [{"A": "oxygen"}, {"B": "iron"}, {"C": "neon"}],
                "asked": "Which is noble?\nA: oxygen\nB: iron\nC: neon",
            },
        )
        for given in ("C", "(C)", "neon", "(C) neon")
    ),
    (
        "swe-bench",
        records.swe_bench(),
        {
            "instance": "sympy__sympy-1",
            "image": f"docker://docker.io/swebench/{IMAGES['swe-bench']}",
            "command": records.SYMPY,
            "parser": "parse_log_sympy",
            "network": (True, None),
        },
    ),
    (
        "swe-gym",
        records.swe_gym(),
        {
            "instance": "Project-MONAI__MONAI-1",
            "image": f"docker://docker.io/xingyaoww/{IMAGES['swe-gym']}",
            "command": "pytest -rA lib/tests/test_sums.py",
            "parser": "parse_log_pytest",
            "network": (False, None),
        },
    ),
    (
        "r2e-gym",
        records.r2e_gym(),
        {
            "instance": f"aiohttp__{COMMIT}",
            "image": f"docker://docker.io/namanjain12/{IMAGES['r2e-gym']}",
            "command": "bash run_tests.sh",
            "parser": "r2e_gym",
            "expected": {"": "PASSED", "test_add": "PASSED", "TestAll.test_zero": "FAILED"},
        },
    ),
]


@pytest.mark.parametrize(
    ("family", "record", "wanted"), ROWS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_record_becomes_a_row(family: str, record: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = facts(family, CONVERT[family](record))
    assert {name: found[name] for name in wanted} == wanted
    if family in SWE:
        assert (found["asked"], found["source"], found["fixes"]) == ("Sums are differences.", family, True)
    if family == "code" and record is not GYM:
        assert found["source"] in {"mine", *ROUTED["code"]}


@pytest.mark.parametrize("dataset", IMAGES)
def test_images_may_lie_elsewhere(dataset: str) -> None:
    row = CONVERTERS[dataset](SWE[dataset](), "registry.example/us")
    assert row["image"] == f"docker://registry.example/us/{IMAGES[dataset]}"


GONE = object()
"""In place of a value: the field is not there."""

REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str | None]] = [
    ("code", {"question": "?"}, {}, None),
    ("code", {}, {}, None),
    ("code", EURUS, {"ability": "math"}, "ability"),
    ("code", EURUS, {"prompt": []}, "prompt"),
    ("code", EURUS, {"reward_model": {"ground_truth": "["}}, "reward_model.ground_truth"),
    ("code", EURUS, {"reward_model": None}, "reward_model.ground_truth"),
    ("code", APPS, {"question": " "}, "question"),
    ("code", APPS, {"input_output": ""}, "input_output"),
    ("code", APPS, {"input_output": '{"inputs": []}'}, "input_output"),
    ("code", APPS, {"input_output": '{"inputs": [], "outputs": []}'}, "verifier_metadata.unit_tests.inputs"),
    ("code", CONTESTS, {"input_file": "input.txt"}, "input_file"),
    ("code", CONTESTS, {"output_file": "output.txt"}, "output_file"),
    ("code", CONTESTS, {"private_tests": [1]}, "private_tests"),
    (
        "code",
        CONTESTS,
        {"public_tests": [], "private_tests": None, "generated_tests": None},
        "verifier_metadata.unit_tests.inputs",
    ),
    ("code", CONTESTS, {"time_limit": "2 s"}, "time_limit"),
    ("code", GYM, {"responses_create_params": None}, "responses_create_params"),
    ("code", GYM, {"verifier_metadata": {}}, "verifier_metadata.unit_tests"),
    ("math", {"problem": "?", "answer": True}, {}, "answer"),
    ("math", {"problem": 7, "answer": "7"}, {}, "problem"),
    ("math", {"problem": "?", "answer": "1" * 2001}, {}, "answer"),
    ("math", {"problem": "?", "answer": r"\boxed{}"}, {}, "answer"),
    ("math", {"problem": "?", "answer": "$$"}, {}, "answer"),
    ("math", {"problem": "\ud800", "answer": "1"}, {}, "problem"),
    ("stem", SCP, {"matched_solution": "First this.\nThen that, as can be shown with ease."}, "matched_solution"),
    ("stem", SCP, {"matched_solution": None}, "answer"),
    ("stem", SCP, {"problem": None}, "problem"),
    ("stem", SCP, {"problem": 7}, "problem"),
    ("stem", SCP, {"answer": ""}, "expected_answer"),
    ("stem", SCP, {"answer": "\\boxed{}"}, "expected_answer"),
    ("stem", SCP, {"answer": "$\\boxed{ }$"}, "expected_answer"),
    ("stem", SCP, {"problem": None, "prompt": [{"role": "system", "content": "x"}]}, "prompt"),
    ("stem", SCP, {"problem": None, "prompt": [{"role": "user", "content": None}]}, "prompt"),
    ("stem", SCP, {"options": ["x", "y"]}, "options"),
    *(
        (family, SWE[family](), {name: GONE}, name)
        for family, names in {
            "swe-bench": "instance_id repo version base_commit problem_statement eval_script",
            "swe-gym": "patch test_patch FAIL_TO_PASS PASS_TO_PASS",
            "r2e-gym": "repo_name docker_image commit_hash problem_statement",
        }.items()
        for name in names.split()
    ),
    ("swe-bench", records.swe_bench(), {"eval_script": "pytest"}, "eval_script"),
    ("swe-bench", records.swe_bench(), {"repo": 7}, "repo"),
    ("swe-bench", records.swe_bench(), {"base_commit": "master"}, "base_commit"),
    ("swe-bench", records.swe_bench(), {"instance_id": "../../etc/passwd"}, "instance_id"),
    ("swe-bench", records.swe_bench(), {"FAIL_TO_PASS": "test_add"}, "FAIL_TO_PASS"),
    ("swe-bench", records.swe_bench(), {"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS"),
    ("swe-bench", records.swe_bench(), {"PASS_TO_PASS": '["test_add"]'}, "PASS_TO_PASS"),
    ("swe-gym", records.swe_gym(), {"test_patch": records.PATCH.replace("sums.py", "sums.txt")}, "test_patch"),
    ("swe-gym", records.swe_gym(), {"FAIL_TO_PASS": [7]}, "FAIL_TO_PASS.0"),
    ("swe-gym", records.swe_gym(), {"repo": "nobody/nothing"}, "repo"),
    ("r2e-gym", records.r2e_gym(), {"docker_image": "an image; rm -rf /"}, "docker_image"),
    ("r2e-gym", records.r2e_gym(), {"parsed_commit_content": "{"}, "parsed_commit_content"),
    ("r2e-gym", records.r2e_gym(), {"parsed_commit_content": "{}"}, "parsed_commit_content"),
    ("r2e-gym", records.r2e_gym(), {"expected_output_json": "{}"}, "expected_output_json"),
    ("r2e-gym", records.r2e_gym(), {"expected_output_json": '{"test_add": "MAYBE"}'}, "expected_output_json.test_add"),
]


@pytest.mark.parametrize(
    ("family", "record", "change", "field"),
    REFUSED,
    ids=[f"{number}-{family}-{field}" for number, (family, _, _, field) in enumerate(REFUSED)],
)
def test_a_record_that_makes_no_row_is_refused_by_field(
    family: str, record: dict[str, Any], change: dict[str, Any], field: str | None
) -> None:
    given = {name: value for name, value in (record | change).items() if value is not GONE}
    with pytest.raises(CallerError) as caught:
        CONVERT[family](given)
    assert caught.value.field == field


def test_tests_in_files(tmp_path: Path) -> None:
    row = convert.row_of(EURUS, tmp_path)
    metadata = row["verifier_metadata"]
    assert "unit_tests" not in metadata
    assert [file.name for file in tmp_path.iterdir()] == [metadata["tests_file"]]
    assert len(read_problem(read_metadata(row), tmp_path).tests) == 1


# The command. What it does of files is the same for all families.
RECORDS: list[dict[str, Any]] = [
    {"problem": "What is $1 + 1$?", "answer": "2", "solution": "Two."},
    {"id": 60, "problem": "What is $2 + 2$?", "solution": "Four.", "answer": "004", "url": "none", "year": "2024"},
    {"id": 0, "problem": "What is $20 + 7$?", "answer": 27.0, "url": "none"},
]


def written(file: Path, records: list[Any]) -> Path:
    match file.suffix:
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
        case ".json":
            file.write_bytes(orjson.dumps(records))
        case _:
            file.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return file


def prorl_data(*words: object) -> Any:
    return CliRunner().invoke(app, ["data", *map(str, words)])


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_every_record_makes_a_row(tmp_path: Path, suffix: str) -> None:
    records = RECORDS
    if suffix == ".parquet":  # a column has one type
        records = [record | {"answer": str(record["answer"]), "id": 1} for record in RECORDS]
    output = tmp_path / "made" / "rows.jsonl"
    done = prorl_data("math", written(tmp_path / f"data{suffix}", records), "-o", output)
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["expected_answer"] for row in rows] == ["2", "004", "27.0"]
    assert [row["question"] for row in rows] == [record["problem"] for record in RECORDS]
    first = rows[0]["responses_create_params"]
    assert first["input"] == [
        {"role": "system", "content": math.SYSTEM_PROMPT},
        {"role": "user", "content": "What is $1 + 1$?"},
    ]
    assert [tool["name"] for tool in first["tools"]] == ["python"]
    assert [file.name for file in output.parent.iterdir()] == ["rows.jsonl"]


def test_what_is_no_file_is_written_into_and_stays(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link.jsonl"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "behind.jsonl")
    source = written(tmp_path / "records.jsonl", RECORDS)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for output in (pipe, link):
        assert prorl_data("math", source, "-o", output).exit_code == 0
    assert pipe.is_fifo()
    assert os.read(reader, 1 << 16) == link.read_bytes() != b""
    assert link.is_symlink()
    os.close(reader)


def test_records_that_make_no_row_are_named_and_the_others_written(tmp_path: Path) -> None:
    bad = [{"problem": "?"}, {"answer": "2"}, {"problem": " ", "answer": "2"}, {"problem": "?", "answer": ""}, 7]
    bad.append({"Frage": "?", "Antwort": "2"})
    file = written(tmp_path / "data.jsonl", [*bad, RECORDS[0]])
    output = tmp_path / "rows.jsonl"
    done = prorl_data("math", file, "-o", output)
    assert done.exit_code == 1
    assert len(output.read_text().splitlines()) == 1
    for said in (
        "line 1: answer: missing; there are problem",
        "line 2: problem: missing; there are answer",
        "line 3: problem: must be",
        "line 5: is",
        "line 6: problem: missing; there are Frage, Antwort",
    ):
        assert said in done.output
    assert "7 lines: 1 kept, 0 dropped, 6 refused" in done.output


def test_an_expected_answer_that_cannot_be_read_is_refused_by_line(tmp_path: Path) -> None:
    answers = [r"\frac\pi2", r"\frac{1}{", "Friday", r"2^{3^{", "7"]
    file = written(tmp_path / "a.jsonl", [{"problem": "?", "answer": answer} for answer in answers])
    output = tmp_path / "rows.jsonl"
    done = prorl_data("math", file, "-o", output)
    assert done.exit_code == 1
    assert [json.loads(line)["expected_answer"] for line in output.read_text().splitlines()] == answers[::2]
    for line in (2, 4):
        assert f"line {line}: expected_answer: " in done.output
    assert done.output.count("can't read") == 2


def test_a_line_that_is_no_json_is_named_and_costs_the_others_nothing(tmp_path: Path) -> None:
    file, output = written(tmp_path / "data.jsonl", [RECORDS[0]]), tmp_path / "rows.jsonl"
    file.write_bytes(file.read_bytes() + b'{"problem": "?", "ans\n' + orjson.dumps(RECORDS[1]))
    done = prorl_data("math", file, "-o", output)
    assert (done.exit_code, len(output.read_text().splitlines())) == (1, 2)
    assert "line 2: is not JSON" in done.output


@pytest.mark.parametrize("way", ["itself", "through a folder that is not there", "symlink", "hard link"])
def test_a_dataset_is_not_replaced_by_its_rows(tmp_path: Path, way: str) -> None:
    file, output = written(tmp_path / "data.jsonl", RECORDS), tmp_path / "other.jsonl"
    match way:
        case "itself":
            output = tmp_path / "." / "data.jsonl"
        case "through a folder that is not there":
            output = tmp_path / "nowhere" / ".." / "data.jsonl"
        case "symlink":
            output.symlink_to(file)
        case _:
            output.hardlink_to(file)
    before = file.read_bytes()
    done = prorl_data("math", file, "-o", output)
    assert isinstance(done.exception, CallerError)
    assert "is the dataset itself" in done.exception.reason
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "x"),
        ("a.jsonl", "{"),
        ("empty.jsonl", ""),
        ("blank.jsonl", "\n\n"),
        ("a.json", "{}"),
        ("empty.json", "[]"),
        ("a.parquet", "x"),
    ],
)
def test_what_is_no_dataset_is_refused_and_writes_nothing(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    output = tmp_path / "rows.jsonl"
    done = prorl_data("math", tmp_path / name, "-o", output)
    assert isinstance(done.exception, CallerError)
    assert not output.exists()


def test_tests_of_code_go_into_a_folder(tmp_path: Path) -> None:
    source = written(tmp_path / "set.jsonl", [EURUS, APPS | {"question": ""}, CONTESTS])
    done = prorl_data("code", source, "--output", tmp_path / "rows.jsonl", "--tests-folder", tmp_path / "tests")
    assert done.exit_code == 1
    assert "line 2: question: " in done.stderr
    made = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [len(read_problem(read_metadata(row), tmp_path / "tests").tests) for row in made] == [1, 2]


def test_rows_of_the_other_families_go_where_the_mixture_has_them(tmp_path: Path) -> None:
    source, rows = written(tmp_path / "records.jsonl", RECORDS[:1]), tmp_path / "rows.jsonl"
    for family in ("math", "stem"):
        assert prorl_data(family, source, "-o", rows).exit_code == 0
        assert json.loads(rows.read_text())["data_source"] in ROUTED[family]
        assert prorl_data(family, source, "-o", rows, "--data-source", "mine").exit_code == 0
        assert json.loads(rows.read_text())["data_source"] == "mine"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("dataset", SWE)
def test_rows_of_repositories_list_their_images(dataset: str, suffix: str, tmp_path: Path) -> None:
    record, rows = SWE[dataset](), tmp_path / "rows.jsonl"
    done = prorl_data("swe", written(tmp_path / f"set{suffix}", [record]), "--dataset", dataset, "-o", rows)
    assert done.exit_code == 0, done.output
    [row] = map(json.loads, rows.read_text().splitlines())
    assert row == CONVERT[dataset](record)
    [image] = wanted_images([], rows, "image")
    assert image.uri == row["image"]


def test_an_unknown_dataset_is_refused(tmp_path: Path) -> None:
    done = prorl_data("swe", written(tmp_path / "dataset.jsonl", [{}]), "--dataset", "swe-lean")
    assert isinstance(done.exception, CallerError)
    assert done.exception.field == "--dataset"


def test_a_corpus_becomes_an_index(tmp_path: Path) -> None:
    corpus, text = tmp_path / "corpus.jsonl", tmp_path / "notes.txt"
    written(corpus, [{"text": "Neon is noble.", "title": "Neon", "url": "u"}])
    text.write_text("Iron rusts.\n\nGold does not.")
    done = prorl_data("index", corpus, text, "-o", tmp_path / "index")
    assert (done.exit_code, "3 passages" in done.stderr) == (0, True)
    index = Index(tmp_path / "index")
    assert [(found.title, found.source) for found in index.search("noble neon", 1)] == [("Neon", "u")]
    assert [found.source for found in index.search("gold", 1)] == ["notes.txt"]
    index.close()


@pytest.mark.parametrize("record", [{"title": "x"}, {"text": 7}, []], ids=str)
def test_a_passage_without_text_is_named(record: object, tmp_path: Path) -> None:
    corpus = written(tmp_path / "corpus.jsonl", [{"text": "x"}, record])
    done = prorl_data("index", corpus, "-o", tmp_path / "index")
    assert isinstance(done.exception, CallerError)
    assert f"{corpus}:2" in done.exception.reason
    assert [entry.name for entry in tmp_path.iterdir()] == ["corpus.jsonl"]
