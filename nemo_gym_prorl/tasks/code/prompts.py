# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of programming problems: what a policy is told, what it may call, and HumanEval's 164 problems.

HumanEval (MIT licence, https://github.com/openai/human-eval) ships with this package as ``humaneval.jsonl``: each
problem's prompt and reference, and its published tests as inputs and outputs of the function, so that problems are
rows like any other. Rows are deterministic, which keeps a data set file reproducible down to the byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from nemo_gym_prorl.tasks.code.rows import METADATA
from nemo_gym_prorl.tasks.workbench.workbench import workbench_schemas


SOLUTION_FILE = "solution.py"
"""The artefact: the one file that leaves the sandbox."""

TOOLS = ("bash", "python", "str_replace_editor", "submit")
"""What the policy may call."""

HANDING_IN = f"Hand in {SOLUTION_FILE} and end the task."
"""What it is told of ``submit``."""

_SYSTEM = """\
You are a careful Python programmer. You work in a sandbox through tools; there is no network. Write {what} in \
`{file}` in your working folder. Try it out with the tools before you trust it. When it is done, call `submit`: \
`{file}` is then tested elsewhere, with tests that you do not see. Only that file counts."""

PROGRAM = _SYSTEM.format(file=SOLUTION_FILE, what="a Python program that reads standard input and prints its answer")
FUNCTION = _SYSTEM.format(file=SOLUTION_FILE, what="the Python function that the problem asks for")


@dataclass(frozen=True, slots=True)
class HumanEvalProblem:
    """One of HumanEval's problems.

    Attributes:
        task_id: e.g. ``"HumanEval/0"``.
        entry_point: name of the function to implement.
        prompt: imports, helpers, signature and docstring; the body is missing.
        reference: a correct body, to be appended to ``prompt``.
        metadata: ``verifier_metadata`` of its row.
    """

    task_id: str
    entry_point: str
    prompt: str
    reference: str
    metadata: Mapping[str, Any]

    @property
    def stub(self) -> str:
        """The function, which does nothing yet."""
        return f"{self.prompt.rstrip()}\n    raise NotImplementedError\n"

    @property
    def reference_source(self) -> str:
        """The file that a perfect agent would submit."""
        return self.prompt + self.reference


@cache
def problems() -> Mapping[str, HumanEvalProblem]:
    """HumanEval's problems by task id, in the order of the data set."""
    found = {}
    for line in files(__package__).joinpath("humaneval.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        tests = {"fn_name": record["entry_point"], "inputs": record.pop("inputs"), "outputs": record.pop("outputs")}
        checker = {"checker": record.pop("checker")} if "checker" in record else {}
        metadata = {"dataset": "HumanEval", "unit_tests": tests, **checker}
        found[record["task_id"]] = HumanEvalProblem(**record, metadata=metadata)
    return found


def humaneval_row(problem: HumanEvalProblem, script: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The row of one of HumanEval's problems.

    Args:
        problem: the problem.
        script: see :func:`row_for`.
    """
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
    """A dataset row.

    Args:
        statement: the problem's text.
        metadata: ``verifier_metadata``, see :mod:`.rows`.
        function: the function that is called; ``None`` for a program.
        script: turns for a model server that plays back scripts (``scripted/turns.py``); ``None`` for a real model.
        more: further fields of the row.
    """
    asked = statement.strip()
    if function is not None:
        asked += f"\n\nImplement the function `{function}` (or a class `Solution` with it) in `{SOLUTION_FILE}`."
    params: dict[str, Any] = {
        "input": [
            {"role": "system", "content": FUNCTION if function is not None else PROGRAM},
            {"role": "user", "content": asked},
        ],
        "tools": workbench_schemas(TOOLS, HANDING_IN),
        "parallel_tool_calls": True,
    }
    if script is not None:
        # Gym's metadata maps strings to strings, so the script travels as JSON text.
        params["metadata"] = {"script": json.dumps(script, sort_keys=True)}
    return {"responses_create_params": params, METADATA: dict(metadata), **more}
