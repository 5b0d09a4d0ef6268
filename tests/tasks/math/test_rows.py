# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Published datasets into rows, by the command."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from nemo_gym_prorl.cli import app
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.final_answer import final_answer
from nemo_gym_prorl.tasks.math.task import SYSTEM_PROMPT, expected_answer, row_of
from nemo_gym_prorl.tasks.stem.problems import problem_of


# Records as the datasets have them: DeepScaleR, AIME 2024, AMC 2023.
RECORDS: list[dict[str, Any]] = [
    {"problem": "What is $1 + 1$?", "answer": "2", "solution": "Two."},
    {"id": 60, "problem": "What is $2 + 2$?", "solution": "Four.", "answer": "004", "url": "none", "year": "2024"},
    {"id": 0, "problem": "What is $20 + 7$?", "answer": 27.0, "url": "none"},
]
ANSWERS = ["2", "004", "27.0"]


def written(file: Path, records: list[Any]) -> Path:
    match file.suffix:
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
        case ".json":
            file.write_bytes(orjson.dumps(records))
        case _:
            file.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return file


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_every_record_makes_a_row(tmp_path: Path, suffix: str) -> None:
    answers = ANSWERS
    records = RECORDS
    if suffix == ".parquet":  # a column has one type
        records = [record | {"answer": str(record["answer"]), "id": 1} for record in RECORDS]
    output = tmp_path / "made" / "rows.jsonl"
    done = CliRunner().invoke(
        app, ["data", "math", str(written(tmp_path / f"data{suffix}", records)), "-o", str(output)]
    )
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["expected_answer"] for row in rows] == answers
    assert [row["question"] for row in rows] == [record["problem"] for record in RECORDS]
    first = rows[0]["responses_create_params"]
    assert first["input"] == [
        {"role": "system", "content": SYSTEM_PROMPT},
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
        assert CliRunner().invoke(app, ["data", "math", str(source), "-o", str(output)]).exit_code == 0
    assert pipe.is_fifo()
    assert os.read(reader, 1 << 16) == link.read_bytes() != b""
    assert link.is_symlink()
    os.close(reader)


def test_records_that_make_no_row_are_named_and_the_others_written(tmp_path: Path) -> None:
    bad = [{"problem": "?"}, {"answer": "2"}, {"problem": " ", "answer": "2"}, {"problem": "?", "answer": ""}, 7]
    bad.append({"Frage": "?", "Antwort": "2"})
    file = written(tmp_path / "data.jsonl", [*bad, RECORDS[0]])
    output = tmp_path / "rows.jsonl"
    done = CliRunner().invoke(app, ["data", "math", str(file), "-o", str(output)])
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
    done = CliRunner().invoke(app, ["data", "math", str(file), "-o", str(output)])
    assert done.exit_code == 1
    assert [json.loads(line)["expected_answer"] for line in output.read_text().splitlines()] == answers[::2]
    for line in (2, 4):
        assert f"line {line}: expected_answer: " in done.output
    assert done.output.count("can't read") == 2


def test_a_line_that_is_no_json_is_named_and_costs_the_others_nothing(tmp_path: Path) -> None:
    file, output = written(tmp_path / "data.jsonl", [RECORDS[0]]), tmp_path / "rows.jsonl"
    file.write_bytes(file.read_bytes() + b'{"problem": "?", "ans\n' + orjson.dumps(RECORDS[1]))
    done = CliRunner().invoke(app, ["data", "math", str(file), "-o", str(output)])
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
    done = CliRunner().invoke(app, ["data", "math", str(file), "-o", str(output)])
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
    done = CliRunner().invoke(app, ["data", "math", str(tmp_path / name), "-o", str(output)])
    assert isinstance(done.exception, CallerError)
    assert not output.exists()


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"problem": "?", "answer": True}, "answer"),
        ({"problem": 7, "answer": "7"}, "problem"),
        ({"problem": "?", "answer": "1" * 2001}, "answer"),
        ({"problem": "?", "answer": r"\boxed{}"}, "answer"),
        ({"problem": "?", "answer": "$$"}, "answer"),
        ({"problem": "\ud800", "answer": "1"}, "problem"),
    ],
    ids=["bool", "number", "long", "empty box", "empty formula", "surrogate"],
)
def test_the_field_that_is_wrong_is_named(record: dict[str, Any], field: str) -> None:
    with pytest.raises(CallerError) as refusal:
        row_of(record)
    assert refusal.value.field == field


DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is $5 + 6$?\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


@pytest.mark.parametrize(
    ("record", "question", "answer"),
    [
        ({"ID": "2024-I-1", "Problem": "What is $2 + 2$?", "Solution": "Four.", "Answer": 4}, "What is $2 + 2$?", "4"),
        (
            {
                "data_source": "math_dapo",
                "prompt": [{"role": "user", "content": DAPO}],
                "ability": "MATH",
                "reward_model": {"ground_truth": "11", "style": "rule-lighteval/MATH_v2"},
                "extra_info": {"index": "1"},
            },
            "What is $5 + 6$?",
            "11",
        ),
    ],
    ids=["AIME with capitals", "DAPO-Math-17k"],
)
def test_records_in_another_shape(record: dict[str, Any], question: str, answer: str) -> None:
    row = row_of(record)
    assert (row["question"], row["expected_answer"]) == (question, answer)
    assert row["responses_create_params"]["input"][-1]["content"] == question


@pytest.mark.parametrize("needed", [expected_answer, problem_of], ids=["math", "stem"])
@pytest.mark.parametrize("long", [r"\boxed{" + "{" * 10**6, r"\boxed{" + "{}" * 500_000], ids=["open", "pairs"])
def test_a_flood_of_braces_costs_no_time(needed: Callable[[dict[str, Any]], Any], long: str) -> None:
    """Answers and expected ones are looked through on the event loop."""
    begin = time.process_time()
    with pytest.raises(CallerError, match="longer than"):
        needed({"question": "What?", "expected_answer": long})
    assert not final_answer(long)
    assert time.process_time() - begin < 0.5
