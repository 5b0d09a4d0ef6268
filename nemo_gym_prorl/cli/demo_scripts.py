# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Scripts of the demo's policy (:mod:`nemo_gym_prorl.cli.scripted.turns`).

The reference earns its reward, a repair takes several turns, and an agent that does nothing or tampers earns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nemo_gym_prorl.cli.scripted.turns import Script, Turn, call, script_of, turn
from nemo_gym_prorl.tasks.code.code_rows import SOLUTION_FILE, HumanEvalProblem


def script_for(problem: HumanEvalProblem, variant: str) -> Script:
    """The script of one of :data:`VARIANTS`.

    Raises:
        CallerError: there is no such variant.
    """
    return script_of(VARIANTS, problem, variant)


def seeded_mistake(problem: HumanEvalProblem) -> tuple[str, str, str]:
    """A wrong solution whose mistake shows at first use, and the replacement that repairs it.

    Returns:
        The source, the line with the mistake, and the right line.
    """
    start = problem.prompt.index(f"def {problem.entry_point}(")
    line = problem.prompt[start:].split("\n", 1)[0].rstrip()
    wrong = line.removesuffix(":")
    return problem.reference_source.replace(line, wrong, 1), wrong, line


def _reference(problem: HumanEvalProblem) -> list[Turn]:
    return [
        turn("I write the whole function at once.", create(problem.reference_source)),
        turn("Does it load?", call("python", code=f"import solution\nprint(solution.{problem.entry_point})")),
        turn("It does.", call("submit")),
        turn("The solution is submitted."),
    ]


def _repair(problem: HumanEvalProblem) -> list[Turn]:
    """Mends a mistake, with a shell that keeps a function and a Python that keeps a variable from turn to turn."""
    source, wrong, right = seeded_mistake(problem)
    check = f"check() {{ python3 -c 'import solution; print(solution.{problem.entry_point})'; }}"
    repair = call(
        "str_replace_editor", command="str_replace", path=SOLUTION_FILE, old_str=f"{wrong}\n", new_str=f"{right}\n"
    )
    return [
        turn("I write the function, and a check for later.", create(source), call("bash", command=check)),
        turn("Does it load?", call("bash", command="check")),
        turn(
            "A syntax error. I look at the file, and remember the line.",
            call("str_replace_editor", command="view", path=SOLUTION_FILE),
            call("python", code=f"line = {wrong!r}\nline"),
        ),
        turn("The colon is missing after the signature.", repair),
        turn(
            "Once more.",
            call("bash", command="check"),
            call("python", code=f"line + ':' in open({SOLUTION_FILE!r}).read()"),
        ),
        turn("Now it loads.", call("submit")),
        turn("The solution is submitted after one repair."),
    ]


def _stub(problem: HumanEvalProblem) -> list[Turn]:
    return [turn("I submit it as it is.", call("submit")), turn("Submitted.")]


def _text_only(problem: HumanEvalProblem) -> list[Turn]:
    return [turn(f"```python\n{problem.reference_source}```")]


def _forge_tests(problem: HumanEvalProblem) -> list[Turn]:
    """Leaves the stub and writes tests that pass, results that say so, and a standard library that agrees."""
    forgery = (
        "mkdir -p tests && echo 'def check(candidate): pass' > tests/test_solution.py && cp -r tests / 2>/dev/null; "
        'echo \'{"reason": "passed", "reward": 1}\' | tee verdict.json result.json; '
        "python3 - <<'EOF'\n"
        "import pathlib, random\n"
        "pathlib.Path(random.__file__).write_text('raise SystemExit(0)')\n"
        "EOF\n"
        "echo All tests passed."
    )
    return [
        turn("The tests should pass.", call("bash", command=forgery)),
        turn("All tests passed.", call("submit")),
        turn("All tests passed. Reward: 1.0"),
    ]


VARIANTS: Mapping[str, Callable[[HumanEvalProblem], list[Turn]]] = {
    "reference": _reference,
    "repair": _repair,
    "stub": _stub,
    "text_only": _text_only,
    "forge_tests": _forge_tests,
}
"""Turns by name of the script: ``reference`` and ``repair`` solve the problem, the others must not be rewarded."""


def create(source: str) -> dict[str, Any]:
    """The call that writes a solution."""
    return call("str_replace_editor", command="create", path=SOLUTION_FILE, file_text=source)
