# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Scripts for HumanEval problems (:mod:`nemo_gym_prorl.cli.scripted.turns`), used by the demo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nemo_gym_prorl.cli.scripted.turns import Script, Turn, call, script_of, turn
from nemo_gym_prorl.tasks.code.code_rows import SOLUTION_FILE, HumanEvalProblem


def script_for(problem: HumanEvalProblem, variant: str) -> Script:
    """Return a script of one of :data:`VARIANTS`.

    Raises:
        CallerError: unknown variant.
    """
    return script_of(VARIANTS, problem, variant)


def seeded_mistake(problem: HumanEvalProblem) -> tuple[str, str, str]:
    """Return a solution with a syntax error: the source, the wrong line and the corrected line."""
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
    """Repair a syntax error, using a shell function and a Python variable that persist over turns."""
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
    """Keep the stub, and forge passing tests, a verdict file and the standard library."""
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
"""Turns by name of the variant: ``reference`` and ``repair`` solve the problem, the others must not be rewarded."""


def create(source: str) -> dict[str, Any]:
    """Return the tool call that writes a solution."""
    return call("str_replace_editor", command="create", path=SOLUTION_FILE, file_text=source)
