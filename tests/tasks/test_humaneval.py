# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rows, scripts and tools of coding tasks: everything that needs no sandbox."""

import ast
import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming

from nemo_gym_prorl.cli.scripted.humaneval import seeded_mistake
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.arguments import MAX_ARGUMENT_BYTES, BadArguments, parse_arguments
from nemo_gym_prorl.tasks.code.grading import CodeLimits
from nemo_gym_prorl.tasks.code.rows import humaneval_row, problems, read_metadata, read_problem
from nemo_gym_prorl.tasks.code.task import ProgrammingProblems
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import Grade, SandboxNeeds
from nemo_gym_prorl.tasks.workbench.tools import (
    MAX_INPUT,
    TOOLS,
    BashArguments,
    EditorArguments,
    PythonArguments,
)
from nemo_gym_prorl.tasks.workbench.workbench import workbench_schemas
from nemo_gym_prorl.tasks.workbench.workspace import Taken, ToolLimits
from scripts.scripted_turns.humaneval import VARIANTS, script_for
from tests.tasks.rows_file import write_rows


def test_all_problems_are_there_and_well_formed() -> None:
    assert len(problems()) == 164
    for problem in problems().values():
        ast.parse(problem.stub)
        ast.parse(problem.reference_source)
        functions = {node.name for node in ast.parse(problem.stub).body if isinstance(node, ast.FunctionDef)}
        assert problem.entry_point in functions


def test_rows_are_what_gym_accepts_and_tell_the_policy_no_reference() -> None:
    for problem in problems().values():
        row = humaneval_row(problem)
        NeMoGymResponseCreateParamsNonStreaming.model_validate(row["responses_create_params"])
        assert problem.reference.strip() not in row["responses_create_params"]["input"][1]["content"]
        assert read_problem(read_metadata(row), None).function == problem.entry_point


def test_rows_of_scripts_are_what_gym_accepts() -> None:
    problem = problems()["HumanEval/0"]
    for variant in VARIANTS:
        params = humaneval_row(problem, script_for(problem, variant))["responses_create_params"]
        NeMoGymResponseCreateParamsNonStreaming.model_validate(params)
        turns = json.loads(params["metadata"]["script"])["turns"]
        assert turns[-1]["tool_calls"] == []
        for call in (call for turn in turns for call in turn["tool_calls"]):
            parse_arguments(call["name"], TOOLS[call["name"]], call["arguments"])


def test_shipped_data_is_what_the_code_writes(tmp_path: Path) -> None:
    data = Path("resources_servers/prorl_code/data")
    chosen = list(problems().values())
    variants = ["reference", "repair", "reference", "repair", "reference"]
    scripts = [script_for(problem, variant) for problem, variant in zip(chosen, variants, strict=False)]
    assert write_rows(tmp_path / "train.jsonl", map(humaneval_row, chosen)) == 164
    assert write_rows(tmp_path / "example.jsonl", map(humaneval_row, chosen[:5], scripts)) == 5
    for name in ("train.jsonl", "example.jsonl"):
        assert (data / name).read_bytes() == (tmp_path / name).read_bytes()


def test_unknown_script_is_named() -> None:
    with pytest.raises(CallerError, match="variant: no script 'magic'"):
        script_for(problems()["HumanEval/0"], "magic")


def test_seeded_mistakes_break_every_problem_and_are_mended() -> None:
    for problem in problems().values():
        source, wrong, right = seeded_mistake(problem)
        with pytest.raises(SyntaxError):
            ast.parse(source)
        assert source.count(f"{wrong}\n") == 1
        assert source.replace(f"{wrong}\n", f"{right}\n") == problem.reference_source


def test_tool_schemas_match_the_argument_models() -> None:
    for schema in workbench_schemas(list(TOOLS)):
        model = TOOLS[schema["name"]]
        assert set(schema["parameters"]["properties"]) == set(model.model_fields)
        assert set(schema["parameters"]["required"]) == {
            name for name, field in model.model_fields.items() if field.is_required()
        }
        assert schema["description"]


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("bash", None, "the arguments of bash must be a JSON object"),
        ("bash", [], "must be a JSON object"),
        (
            "bash",
            {},
            "bash needs one of command, input, restart. "
            "bash takes: command (string), input (string), restart (boolean), timeout_s (number).",
        ),
        ("bash", {"command": "ls", "input": "y"}, "bash needs one of command, input, restart."),
        ("bash", {"restart": False}, "bash needs one of command, input, restart."),
        ("bash", {"input": "x" * (MAX_INPUT + 1)}, "input: String should have at most 1000 characters"),
        ("python", {}, "python needs one of code, restart. python takes: code (string), restart (boolean)"),
        ("bash", {"command": "ls", "timeout_s": -1}, "timeout_s: Input should be greater than 0"),
        ("bash", {"command": "ls", "cwd": "/"}, "cwd: Extra inputs are not permitted"),
        ("python", {"code": "x" * MAX_ARGUMENT_BYTES}, "the limit is 64000"),
        ("str_replace_editor", {"command": "undo", "path": "a"}, "command: Input should be 'view', 'create'"),
        ("str_replace_editor", {"command": "create", "path": "a"}, "create needs file_text"),
        ("str_replace_editor", {"command": "insert", "path": "a"}, "insert needs insert_line and new_str"),
        ("submit", {"answer": 42}, "submit takes no arguments."),
    ],
)
def test_bad_arguments_tell_the_model_what_to_do(tool: str, arguments: object, said: str) -> None:
    with pytest.raises(BadArguments) as caught:
        parse_arguments(tool, TOOLS[tool], arguments)
    assert said in str(caught.value)


def test_good_arguments_are_taken() -> None:
    assert parse_arguments("bash", BashArguments, {"command": "ls", "timeout_s": 3}) == BashArguments(
        command="ls", timeout_s=3.0
    )
    assert parse_arguments("bash", BashArguments, {"input": ""}) == BashArguments(input="")
    assert parse_arguments("python", PythonArguments, {"restart": True}) == PythonArguments(restart=True)
    view = {"command": "view", "path": "a", "view_range": [1, -1]}
    assert parse_arguments("str_replace_editor", EditorArguments, view) == EditorArguments(
        command="view", path="a", view_range=(1, -1)
    )


@pytest.mark.parametrize(
    ("taken", "detail"),
    [
        (Taken(b"\xff"), "solution.py is not UTF-8 text"),
        (Taken(None, "solution.py is not there"), "solution.py is not there"),
    ],
)
async def test_a_file_that_is_no_solution_is_judged_without_a_sandbox(taken: Taken, detail: str) -> None:
    def no_sandbox(needs: SandboxNeeds | None = None) -> AbstractAsyncContextManager[Sandbox]:
        raise AssertionError("nobody needs one")

    task = ProgrammingProblems("/sandbox", ToolLimits(), CodeLimits())
    grade = await task.grade(humaneval_row(problems()["HumanEval/0"]), taken, {}, no_sandbox)
    assert grade == Grade(0.0, "no_solution", detail)
