# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""HumanEval's rows and data, and tool arguments, without a sandbox."""

import ast
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming

from nemo_gym_prorl.cli.scripted.demo import seeded_mistake
from nemo_gym_prorl.tasks.code.code_rows import humaneval_row, problems, read_metadata, read_problem
from nemo_gym_prorl.tasks.code.grading import CodeLimits
from nemo_gym_prorl.tasks.code.task import ProgrammingProblems
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import ExtractedFile, Grade, SandboxNeeds
from nemo_gym_prorl.tasks.workbench.observations import (
    MAX_ARGUMENT_BYTES,
    MAX_INPUT,
    TOOLS,
    BadArguments,
    parse_arguments,
)
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits
from scripts.scripted_turns.humaneval import script_for
from tests.tasks.rows_file import write_rows


def test_rows_are_valid_and_hide_the_reference() -> None:
    for problem in problems().values():
        row = humaneval_row(problem)
        NeMoGymResponseCreateParamsNonStreaming.model_validate(row["responses_create_params"])
        assert problem.reference.strip() not in row["responses_create_params"]["input"][1]["content"]
        assert read_problem(read_metadata(row), None).function == problem.entry_point


def test_shipped_data_is_reproducible(tmp_path: Path) -> None:
    data = Path("resources_servers/prorl_code/data")
    chosen = list(problems().values())
    variants = ["reference", "repair", "reference", "repair", "reference"]
    scripts = [script_for(problem, variant) for problem, variant in zip(chosen, variants, strict=False)]
    assert write_rows(tmp_path / "train.jsonl", map(humaneval_row, chosen)) == 164
    assert write_rows(tmp_path / "example.jsonl", map(humaneval_row, chosen[:5], scripts)) == 5
    for name in ("train.jsonl", "example.jsonl"):
        assert (data / name).read_bytes() == (tmp_path / name).read_bytes()


def test_seeded_mistakes_break_and_repair_every_problem() -> None:
    for problem in problems().values():
        source, wrong, right = seeded_mistake(problem)
        with pytest.raises(SyntaxError):
            ast.parse(source)
        assert source.count(f"{wrong}\n") == 1
        assert source.replace(f"{wrong}\n", f"{right}\n") == problem.reference_source


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("bash", None, "the arguments of bash must be a JSON object"),
        (
            "bash",
            {},
            "bash needs one of command, input, restart. "
            "bash takes: command (string), input (string), restart (boolean), timeout_s (number).",
        ),
        ("bash", {"input": "x" * (MAX_INPUT + 1)}, "input: String should have at most 1000 characters"),
        ("python", {"code": "x" * MAX_ARGUMENT_BYTES}, "the limit is 64000"),
        ("str_replace_editor", {"command": "create", "path": "a"}, "create needs file_text"),
        ("submit", {"answer": 42}, "submit takes no arguments."),
    ],
)
def test_invalid_arguments_are_explained(tool: str, arguments: object, said: str) -> None:
    with pytest.raises(BadArguments) as caught:
        parse_arguments(tool, TOOLS[tool], arguments)
    assert said in str(caught.value)


async def test_unreadable_solution_needs_no_sandbox() -> None:
    def no_sandbox(needs: SandboxNeeds | None = None) -> AbstractAsyncContextManager[Sandbox]:
        raise AssertionError("nobody needs one")

    task = ProgrammingProblems("/sandbox", ToolLimits(), CodeLimits())
    grade = await task.grade(humaneval_row(problems()["HumanEval/0"]), ExtractedFile(b"\xff"), {}, no_sandbox)
    assert grade == Grade(0.0, "no_solution", "solution.py is not UTF-8 text")
