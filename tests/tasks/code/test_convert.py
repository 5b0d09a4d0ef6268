# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Records of the published sets, in their own shapes, as rows."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from nemo_gym_prorl.cli import app
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.code.convert import row_of
from nemo_gym_prorl.tasks.code.rows import Case, read_metadata, read_problem


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


def problem_of(row: dict[str, Any]) -> Any:
    return read_problem(read_metadata(row), None)


def test_eurus() -> None:
    row = row_of(EURUS)
    system, user = row["responses_create_params"]["input"]
    assert user["content"] == "Add two numbers."
    assert "standard input" in system["content"]
    assert [tool["name"] for tool in row["responses_create_params"]["tools"]] == [
        "bash", "python", "str_replace_editor", "submit"
    ]  # fmt: skip
    assert problem_of(row).tests == [Case("1 2\n", "3\n")]
    assert row["verifier_metadata"]["dataset"] == "codecontests"


def test_apps() -> None:
    row = row_of(APPS)
    assert "def push" in row["responses_create_params"]["input"][1]["content"]
    problem = problem_of(row)
    assert (problem.function, problem.checker["wrapped"]) == ("push", True)
    assert problem.tests == [Case([[1], 2], [[1, 2]])]
    assert row["verifier_metadata"]["difficulty"] == "introductory"


def test_taco_with_lines_one_by_one() -> None:
    assert problem_of(row_of(TACO)).tests == [Case("1\n2", "3")]


def test_code_contests() -> None:
    problem = problem_of(row_of(CONTESTS))
    assert [test.expected for test in problem.tests] == ["3\n", "7\n"]
    assert (problem.time_limit_s, problem.memory_limit_mib) == (7.5, 512)


def test_a_row_of_gym_stays_as_it_is_but_says_where_it_goes() -> None:
    assert row_of(GYM) == GYM | {"data_source": "code"}
    assert row_of(GYM | {"data_source": "mine"}) == GYM | {"data_source": "mine"}


@pytest.mark.parametrize(
    ("record", "source"),
    [
        (EURUS | {"data_source": "taco"}, "taco"),
        (EURUS | {"data_source": "numina_olympiads"}, "code"),
        (APPS, "apps"),
        (APPS | {"source": "codechef"}, "taco"),
        (CONTESTS, "codecontests"),
    ],
)
def test_a_row_says_which_set_it_is_of_where_the_mixture_knows_it(record: dict[str, Any], source: str) -> None:
    assert row_of(record)["data_source"] == source
    assert source in ROUTED["code"]


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"question": "?"}, None),
        ({}, None),
        (EURUS | {"ability": "math"}, "ability"),
        (EURUS | {"prompt": []}, "prompt"),
        (EURUS | {"reward_model": {"ground_truth": "["}}, "reward_model.ground_truth"),
        (EURUS | {"reward_model": None}, "reward_model.ground_truth"),
        (APPS | {"question": " "}, "question"),
        (APPS | {"input_output": ""}, "input_output"),
        (APPS | {"input_output": '{"inputs": []}'}, "input_output"),
        (APPS | {"input_output": '{"inputs": [], "outputs": []}'}, "verifier_metadata.unit_tests.inputs"),
        (CONTESTS | {"input_file": "input.txt"}, "input_file"),
        (CONTESTS | {"output_file": "output.txt"}, "output_file"),
        (CONTESTS | {"public_tests": []}, "verifier_metadata.unit_tests"),
        (CONTESTS | {"private_tests": [1]}, "private_tests"),
        (GYM | {"responses_create_params": None}, "responses_create_params"),
        (GYM | {"verifier_metadata": {}}, "verifier_metadata.unit_tests"),
    ],
)
def test_records_that_make_no_row(record: dict[str, Any], field: str | None) -> None:
    if record.get("public_tests") == []:
        record = record | {"private_tests": None, "generated_tests": None}
        field = "verifier_metadata.unit_tests.inputs"
    with pytest.raises(CallerError) as caught:
        row_of(record)
    assert caught.value.field == field


def test_tests_in_files(tmp_path: Path) -> None:
    row = row_of(EURUS, tmp_path)
    metadata = row["verifier_metadata"]
    assert "unit_tests" not in metadata
    assert [file.name for file in tmp_path.iterdir()] == [metadata["tests_file"]]
    assert read_problem(read_metadata(row), tmp_path).tests == [Case("1 2\n", "3\n")]


@pytest.mark.parametrize(
    ("limit", "seconds"), [({"seconds": 2, "nanos": 0}, 2.0), ({"seconds": 1, "nanos": None}, 1.0), (3, 3.0)]
)
def test_a_limit_of_time_is_multiplied_as_asked(limit: Any, seconds: float) -> None:
    record = CONTESTS | {"time_limit": limit}
    for factor in (1.0, 2.5):
        assert read_problem(read_metadata(row_of(record, time_factor=factor)), None).time_limit_s == factor * seconds
    with pytest.raises(CallerError, match="time_limit"):
        row_of(CONTESTS | {"time_limit": "2 s"})


def test_the_command(tmp_path: Path) -> None:
    """What can be made is made, the rest is named by line and field, and the exit code tells of it."""
    source, rows, folder = tmp_path / "set.jsonl", tmp_path / "rows.jsonl", tmp_path / "tests"
    source.write_text("".join(json.dumps(record) + "\n" for record in (EURUS, APPS | {"question": ""}, CONTESTS)))
    result = CliRunner().invoke(
        app, ["data", "code", str(source), "--output", str(rows), "--tests-folder", str(folder)]
    )
    assert result.exit_code == 1
    assert "line 2: question: " in result.stderr
    assert "3 lines: 2 kept, 0 dropped, 1 refused" in result.stderr
    made = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [len(read_problem(read_metadata(row), folder).tests) for row in made] == [1, 2]


def test_rows_of_the_other_families_go_where_the_mixture_has_them(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    records.write_text(json.dumps({"problem": "What is 2 + 3?", "answer": "5"}) + "\n")
    for family in ("math", "stem"):
        rows = tmp_path / f"{family}.jsonl"
        assert CliRunner().invoke(app, ["data", family, str(records), "-o", str(rows)]).exit_code == 0
        assert json.loads(rows.read_text())["data_source"] in ROUTED[family]
        told = ["data", family, str(records), "-o", str(rows), "--data-source", "mine"]
        assert CliRunner().invoke(app, told).exit_code == 0
        assert json.loads(rows.read_text())["data_source"] == "mine"
