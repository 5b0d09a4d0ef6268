# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Shipped example rows and their rollouts; ``PRORL_WRITE_EXAMPLES=1`` rewrites the science rows."""

import os
from pathlib import Path
from typing import Any

import orjson
import pytest

from nemo_gym_prorl.tasks.stem.problems import AnswerKind, problem_of, row_for
from nemo_gym_prorl.tasks.swe.instance import SweRow
from scripts.scripted_turns import harbor, math, stem, swe
from scripts.swe_examples import SHA256
from tests.tasks.rows_file import write_rows


SERVERS = Path(__file__).parents[2] / "resources_servers"
SCIENCE = (
    ("What is the energy of a photon of wavelength 500 nm, in eV?", "2.48 eV"),
    ("Which of these elements is the most electronegative?", "C", {"A": "Oxygen", "B": "Caesium", "C": "Fluorine"}),
    ("What is the moment of inertia of a solid sphere of mass M and radius R about its centre?", r"\frac{2}{5} M R^2"),
    ("How many structural isomers does heptane have?", "9"),
    ("What is the greatest efficiency of a heat engine between 500 K and 300 K?", "0.40"),
)


def shipped(server: str, name: str = "example") -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (SERVERS / server / f"data/{name}.jsonl").read_bytes().splitlines()]


@pytest.mark.parametrize(
    ("server", "key", "verdict"),
    [
        ("prorl_harbor", "instance_id", "passed"),
        ("prorl_stem", "question", "right"),
        ("prorl_swe", "instance_id", "resolved"),
    ],
)
def test_example_rollouts_are_of_the_example_rows_and_earned_all(server: str, key: str, verdict: str) -> None:
    rows, rollouts = shipped(server), {rollout[key]: rollout for rollout in shipped(server, "example_rollouts")}
    assert rollouts.keys() == {row[key] for row in rows}
    for row in rows:
        rollout = rollouts[row[key]]
        assert (rollout["reward"], rollout["verdict"]) == (1.0, verdict)
        if server == "prorl_harbor":
            separate = row["instance_id"] == "prorl/disk-report"
            assert rollout["harbor"] == row["harbor"]
            assert rollout["grading_mode"] == ("separate" if separate else "strict")
        elif server == "prorl_stem":
            assert rollout["extracted_answer"] == row["expected_answer"]
        else:
            told = [line for line in row["swe"]["patch"].splitlines() if line.startswith(("+", "-"))]
            assert [line for line in rollout["patch"].splitlines() if line.startswith(("+", "-"))] == told
            assert rollout["test_report"]["FAIL_TO_PASS"]["passed"] == len(row["swe"]["FAIL_TO_PASS"])


def test_example_rows_are_as_they_would_be_made_today(tmp_path: Path) -> None:
    assert [harbor.example_row(name) for name in harbor.TASKS] == shipped("prorl_harbor")
    assert math.example_rows() == shipped("prorl_math")
    rows = [row_for(*example) for example in SCIENCE]
    assert {problem_of(row).kind for row in rows} == {AnswerKind.QUANTITY, AnswerKind.CHOICE, AnswerKind.FORMULA}
    scripts = [stem.script_for(problem_of(row), "oracle") for row in rows]
    scripted = [row_for(*example, script=script) for example, script in zip(SCIENCE, scripts, strict=True)]
    file = SERVERS / "prorl_stem/data/example.jsonl"
    if os.environ.get("PRORL_WRITE_EXAMPLES"):
        write_rows(file, scripted)
    write_rows(tmp_path / "example.jsonl", scripted)
    assert (tmp_path / "example.jsonl").read_text() == file.read_text()
    for row in shipped("prorl_swe"):
        asked = SweRow.parse(row)
        assert asked.image == asked.instance_id
        assert asked.instance_id.removeprefix("made__").rpartition("-")[0] in SHA256
        assert swe.scripted_row(row, "oracle") == row
