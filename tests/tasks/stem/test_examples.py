# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Example rows of the server; ``PRORL_WRITE_EXAMPLES=1`` rewrites them."""

import os
from pathlib import Path

import orjson
import pytest

from nemo_gym_prorl.tasks.stem.problems import AnswerKind, problem_of, row_for
from scripts.scripted_turns.stem import script_for
from tests.tasks.rows_file import write_rows


DATA = Path(__file__).parents[3] / "resources_servers/prorl_stem/data"
EXAMPLES = (
    ("What is the energy of a photon of wavelength 500 nm, in eV?", "2.48 eV", {}),
    (
        "Which of these elements is the most electronegative?",
        "C",
        {"A": "Oxygen", "B": "Caesium", "C": "Fluorine"},
    ),
    (
        "What is the moment of inertia of a solid sphere of mass M and radius R about its centre?",
        r"\frac{2}{5} M R^2",
        {},
    ),
    ("How many structural isomers does heptane have?", "9", {}),
    ("What is the greatest efficiency of a heat engine between 500 K and 300 K?", "0.40", {}),
)


def test_examples_are_as_they_would_be_made_today(tmp_path: Path) -> None:
    rows = [row_for(*example) for example in EXAMPLES]
    scripted = [
        row_for(*example, script_for(problem_of(row), "oracle")) for example, row in zip(EXAMPLES, rows, strict=True)
    ]
    assert {problem_of(row).kind for row in rows} == {AnswerKind.QUANTITY, AnswerKind.CHOICE, AnswerKind.FORMULA}
    if os.environ.get("PRORL_WRITE_EXAMPLES"):
        write_rows(DATA / "example.jsonl", scripted)
    assert write_rows(tmp_path / "example.jsonl", scripted) == 5
    assert (tmp_path / "example.jsonl").read_text() == (DATA / "example.jsonl").read_text()


@pytest.mark.parametrize("line", range(5))
def test_example_rollouts_are_of_these_rows(line: int) -> None:
    row = orjson.loads((DATA / "example.jsonl").read_bytes().splitlines()[line])
    rollouts = [orjson.loads(text) for text in (DATA / "example_rollouts.jsonl").read_bytes().splitlines()]
    [rollout] = [rollout for rollout in rollouts if rollout["question"] == row["question"]]
    assert (rollout["reward"], rollout["verdict"]) == (1.0, "right")
    assert rollout["extracted_answer"] == row["expected_answer"]
