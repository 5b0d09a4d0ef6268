# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Records of published datasets as rows, and the two commands."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from nemo_gym_prorl.cli import app
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.stem.problems import Kind, problem_of, row_of
from nemo_gym_prorl.tasks.stem.search_engines import Index


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


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        (SCP["matched_solution"], "19.8"),
        ("Long working.\nTherefore \\boxed{4.2 \\text{ J}}", "4.2 \\text{ J}"),
        ("Working.\nThe answer is 42.", "42"),
        ("Working.\n**Answer:** the mitochondrion", "the mitochondrion"),
        ("Oxygen", "Oxygen"),
        ("Working.\nThe correct option is (C).", "(C)"),
    ],
)
def test_the_answer_of_a_solution(solution: str, expected: str) -> None:
    row = row_of(SCP | {"matched_solution": solution})
    assert (row["expected_answer"], row["question"]) == (expected, SCP["problem"])
    assert row["verifier_metadata"] == {"domain": "Physics"}
    assert {tool["name"] for tool in row["responses_create_params"]["tools"]} == {"python", "search"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"matched_solution": "First this.\nThen that, as can be shown with ease."}, "matched_solution"),
        ({"matched_solution": None}, "answer"),
        ({"problem": None}, "problem"),
        ({"problem": 7}, "problem"),
        ({"answer": ""}, "expected_answer"),
        ({"answer": "\\boxed{}"}, "expected_answer"),
        ({"answer": "$\\boxed{ }$"}, "expected_answer"),
        ({"problem": None, "prompt": [{"role": "system", "content": "x"}]}, "prompt"),
        ({"problem": None, "prompt": [{"role": "user", "content": None}]}, "prompt"),
        ({"options": ["x", "y"]}, "options"),
    ],
    ids=str,
)
def test_a_record_that_makes_no_row_is_refused_by_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(CallerError) as error:
        row_of(SCP | change)
    assert error.value.field == field


def test_records_of_verl() -> None:
    chat = [{"role": "system", "content": "Think."}, {"role": "user", "content": "Which metal is liquid?"}]
    row = row_of({"prompt": chat, "reward_model": {"style": "rule", "ground_truth": "\\boxed{mercury}"}})
    assert (row["question"], row["expected_answer"]) == ("Which metal is liquid?", "mercury")
    assert row["responses_create_params"]["input"][1]["content"] == "Which metal is liquid?"


def test_options_that_stand_in_the_question() -> None:
    question = "Which is noble?\n(A) oxygen\n(B) iron\n(C) neon"
    for given in ("C", "(C)", "neon", "(C) neon"):
        row = row_of({"problem": question, "answer": given})
        problem = problem_of(row)
        assert (problem.kind, problem.expected, problem.question) == (Kind.CHOICE, "C", "Which is noble?")
        assert row["options"] == [{"A": "oxygen"}, {"B": "iron"}, {"C": "neon"}]
        assert row["responses_create_params"]["input"][1]["content"] == "Which is noble?\nA: oxygen\nB: iron\nC: neon"


def test_rows_of_gyms_own_servers_are_taken_as_they_are() -> None:
    mcqa = {"options": [{"A": "Karyotyping"}, {"B": "PCR"}], "expected_answer": "B", "uuid": "1"}
    assert problem_of(mcqa).kind is Kind.CHOICE
    assert problem_of({"question": "?", "expected_answer": "\\(\\sqrt{2}\\)"}).kind is Kind.FORMULA
    assert problem_of({"question": "?", "expected_answer": 32}).kind is Kind.QUANTITY


def test_commands(tmp_path: Path) -> None:
    source, output = tmp_path / "scp.jsonl", tmp_path / "rows.jsonl"
    source.write_bytes(orjson.dumps(SCP) + b"\n" + orjson.dumps({"problem": "?"}) + b"\n")
    result = CliRunner().invoke(app, ["data", "stem", str(source), "-o", str(output)])
    assert result.exit_code == 1
    assert "line 2: answer: missing; there are problem" in result.stderr
    assert [orjson.loads(line)["expected_answer"] for line in output.read_bytes().splitlines()] == ["19.8"]

    corpus, text = tmp_path / "corpus.jsonl", tmp_path / "notes.txt"
    corpus.write_bytes(orjson.dumps({"text": "Neon is noble.", "title": "Neon", "url": "u"}))
    text.write_text("Iron rusts.\n\nGold does not.")
    result = CliRunner().invoke(app, ["data", "index", str(corpus), str(text), "-o", str(tmp_path / "index")])
    assert (result.exit_code, "3 passages" in result.stderr) == (0, True)
    index = Index(tmp_path / "index")
    assert [(found.title, found.source) for found in index.search("noble neon", 1)] == [("Neon", "u")]
    assert [found.source for found in index.search("gold", 1)] == ["notes.txt"]
    index.close()


@pytest.mark.parametrize("record", [{"title": "x"}, {"text": 7}, []], ids=str)
def test_a_record_without_text_is_named(record: object, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b'{"text": "x"}\n' + orjson.dumps(record))
    result = CliRunner().invoke(app, ["data", "index", str(corpus), "-o", str(tmp_path / "index")])
    assert isinstance(result.exception, CallerError)
    assert f"{corpus}:2" in result.exception.reason
    assert [entry.name for entry in tmp_path.iterdir()] == ["corpus.jsonl"]
