# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Questions of science as a :class:`~nemo_gym_prorl.tasks.task.Task`: search and Python, and an answer in words.

The answer stands in the policy's last message, so nothing is taken out of the sandbox, and grading takes none. Rules
come first: they are quick, say why, and no answer can talk them round. They may leave an answer undecided, which is
then for a judge. A choice, a quantity or a formula of the same letters that is plainly another one is wrong, and no
judge is asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gym_prorl.failures import CallerError, TaskError
from nemo_gym_prorl.tasks.final_answer import MAX_ANSWER_CHARS, final_answer, final_message
from nemo_gym_prorl.tasks.math.checker import ANOTHER_VALUE, MathChecker
from nemo_gym_prorl.tasks.math.checker import Verdict as MathVerdict
from nemo_gym_prorl.tasks.math.spelling import canonical, tidy
from nemo_gym_prorl.tasks.stem import quantities
from nemo_gym_prorl.tasks.stem.judge import Judge, Verdict
from nemo_gym_prorl.tasks.stem.problems import WORKBENCH_TOOLS, Kind, Problem, chosen, letter_of, problem_of
from nemo_gym_prorl.tasks.stem.quantities import Comparison, plain, words
from nemo_gym_prorl.tasks.stem.search import OpenSearch, SearchTool
from nemo_gym_prorl.tasks.task import AsyncCloseable, CombinedTools, CombinedToolSet, Grade, OpenSandbox, SandboxNeeds
from nemo_gym_prorl.tasks.workbench.workbench import Workbench
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits, Workspace


QUESTION_FILE = "question.txt"

Tools = CombinedTools[Workspace, OpenSearch]


class Stem:
    """The task.

    Args:
        root: a folder of each sandbox; the policy's Python works in ``<root>/workspace``.
        tools: bounds of one call of Python.
        search: the other tool.
        rules: the check that comes first.
        judge: for what rules leave undecided; ``None`` if there is none, and then rows that can't do without one are
            refused.
        holds: what is to be let go of at the end.
    """

    resumes = True

    def __init__(
        self,
        root: str,
        tools: ToolLimits,
        search: SearchTool,
        rules: Rules,
        judge: Judge | None = None,
        holds: Sequence[AsyncCloseable] = (),
    ) -> None:
        workbench = Workbench(WORKBENCH_TOOLS, f"{root.rstrip('/')}/workspace", tools)
        self.tools = CombinedToolSet(workbench, search)
        self._rules = rules
        self._judge = judge
        self._holds = holds

    async def aclose(self) -> None:
        """Let go of engine, checker and judge."""
        for held in self._holds:
            await held.aclose()

    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds:
        """One like any other.

        Raises:
            CallerError: the row is none of this family's, or takes a judge where there is none.
        """
        if problem_of(row).kind is Kind.TEXT and self._judge is None:
            raise CallerError(
                "is free text, which takes a judge, and this server has none (judge_model_server)",
                field="expected_answer",
            )
        return SandboxNeeds()

    async def prepare(self, row: Mapping[str, Any], tools: Tools) -> None:
        """Put the question into the working folder, which there is only then. The first examines the judge.

        Raises:
            CallerError: the expected formula can't be read, and there is no judge to compare it.
            InfrastructureError: the judge can't be used; names ``judge_model_server``.
        """
        problem = problem_of(row)
        if self._judge is not None:
            await self._judge.require_strict()
        if problem.kind is Kind.FORMULA and self._judge is None:
            try:
                await self._rules.require_readable(problem.expected)
            except TaskError as error:
                raise CallerError(error.reason, field="expected_answer") from error
        await tools.first.write({QUESTION_FILE: problem.question})

    async def artefacts(self, row: Mapping[str, Any], tools: Tools) -> None:
        """Nothing leaves the sandbox."""

    async def grade(
        self, row: Mapping[str, Any], artefacts: None, response: Mapping[str, Any], open_sandbox: OpenSandbox
    ) -> Grade:
        """By rules, and what they leave undecided by the judge.

        Raises:
            InfrastructureError: the checker of formulas or the judge failed.
        """
        problem = problem_of(row)
        answer = final_answer(final_message(response), problem.letters) or None
        if answer is None:
            return Grade(0.0, "no_answer", "the last message has no \\boxed{}, and does not say what the answer is")
        told: dict[str, Any] = {"extracted_answer": answer[:MAX_ANSWER_CHARS], "checked_by": problem.kind.value}
        if len(answer) > MAX_ANSWER_CHARS:
            return Grade(0.0, "too_long", f"the answer is longer than {MAX_ANSWER_CHARS} characters", told)
        right, why = await self._rules.check(problem, answer)
        if right is None and self._judge is not None:
            judged = await self._judge.judge(problem, answer)
            told |= {"checked_by": "judge", "judge_reply": judged.reply}
            verdict, detail = _JUDGED[judged.verdict]
            return Grade(float(judged.verdict is Verdict.SAME), verdict, detail, told)
        return Grade(float(bool(right)), "right" if right else "wrong", why, told)


_JUDGED = {
    Verdict.SAME: ("right", "the judge says that it is the same"),
    Verdict.DIFFERENT: ("wrong", "the judge says that it is another answer"),
    Verdict.STEERED: ("steered", "the answer talks to the judge"),
}


Ruling = tuple[bool | None, str]
"""Whether an answer is right, ``None`` where rules leave that to a judge; and why, for a person."""

_WRONG = frozenset({MathVerdict.UNFINISHED, MathVerdict.CONTRADICTORY, MathVerdict.TIMED_OUT})
"""What is wrong with these answers no judge should overlook."""


_COMMAND = re.compile(r"\\[A-Za-z]+")
_NAMES = """
alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi varphi chi psi omega
Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega hbar
"""
_GREEK = frozenset(f"\\{name}" for name in _NAMES.split())


_CHEMICAL = re.compile(r"(?:(?:[A-Z][a-z]?|[)\]])[0-9]*|[(\[=-]|\\equiv){2,}(?:\^[0-9]?[+-])?")
_NAME = re.compile(r"(\\[A-Za-z]+|[^\W\d_])(?:_(?:\{[^{}]*\}|\w))?")
_OPERATORS = re.compile(r"\\nabla(?:\\(?:cdot|times)|\^2)?")


class Rules:
    """The check.

    Args:
        formulas: compares what is no plain quantity.
        tolerance: how far a measured value may be off, of the expected one.
    """

    def __init__(self, formulas: MathChecker, tolerance: float = quantities.RELATIVE_TOLERANCE) -> None:
        self._formulas = formulas
        self._tolerance = tolerance

    async def require_readable(self, expected: str) -> None:
        """See that an expected formula can be compared with something else than the same text.

        Raises:
            TaskError: it can't be read.
            InfrastructureError: ``verifier_error``, formulas can't be compared.
        """
        await self._formulas.require_gradeable(expected)

    async def check(self, problem: Problem, answer: str) -> Ruling:
        """Judge a final answer.

        Raises:
            TaskError: nobody could be graded, since the expected answer breaks what compares formulas.
            InfrastructureError: ``verifier_error``, formulas can't be compared.
        """
        if problem.kind is Kind.CHOICE:
            return self._choice(problem, answer)
        # Spaces are part of a unit: m s is not ms.
        same = plain if problem.kind is Kind.QUANTITY else _spaceless
        if same(answer) == same(problem.expected):
            return True, "the expected text"
        match problem.kind:
            case Kind.QUANTITY:
                return await self._quantity(problem, answer)
            case Kind.FORMULA:
                return await self._formula(problem, answer)
            case _:
                if words(answer) == words(problem.expected) and _marks(answer) == _marks(problem.expected):
                    return True, "the expected words"
                return None, "other words than expected"

    def _choice(self, problem: Problem, answer: str) -> Ruling:
        letter = chosen(problem.options, answer, self._same) if problem.options else letter_of(answer)
        if letter is None:
            return False, "it does not choose exactly one option"
        return letter == letter_of(problem.expected), f"it chooses {letter}"

    async def _quantity(self, problem: Problem, answer: str) -> Ruling:
        expected, said = quantities.read(problem.expected), quantities.read(answer)
        assert expected is not None
        if another_name(problem.expected, answer):
            return None, "it has another name than the expected quantity"
        if said is None:
            # What compares formulas does not look at units.
            if expected.unit or _is_long(answer):
                return None, "it is no plain quantity"
            return await self._formula(problem, answer)
        match quantities.compare(expected, said, self._tolerance):
            case Comparison.SAME:
                return True, "the expected quantity"
            case Comparison.DIFFERENT:
                return False, "another quantity"
            case Comparison.UNIT_MISSING:
                unit = expected.written or said.written
                if _names(problem.question, unit):
                    return True, f"the expected number, and the question names its unit, {unit}"
                return None, "the expected number; only one of the two has a unit"

    async def _formula(self, problem: Problem, answer: str) -> Ruling:
        if _is_chemical(bare := _bare(problem.expected)) and bare == _bare(answer):
            return True, "the expected formula of chemistry"
        checked = await self._formulas.check(problem.expected, f"\\boxed{{{answer}}}", problem.question)
        if checked.right and _apart(problem.expected, answer):
            return None, "formulae of chemistry, or of operators, that differ in their order"
        if checked.right:
            # A letter at the end may have been taken for a unit, and left out of the comparison.
            if _letters(answer) == _letters(problem.expected):
                return True, "an equal formula"
            return None, "an equal formula but for some letters"
        why = f"{checked.verdict}: {checked.detail}"
        wrong = checked.verdict in _WRONG or (checked.detail == ANOTHER_VALUE and _same_terms(problem, answer))
        return (False, why) if wrong else (None, why)

    def _same(self, option: str, said: str) -> bool:
        if canonical(tidy(option)) == canonical(tidy(said)):
            return True
        one, other = quantities.read(option), quantities.read(said)
        return one is not None and other is not None and self._compare(one, other) is Comparison.SAME

    def _compare(self, one: quantities.Quantity, other: quantities.Quantity) -> Comparison:
        return quantities.compare(one, other, self._tolerance)


def _spaceless(text: str) -> str:
    return "".join(plain(text).split())


def another_name(expected: str, answer: str) -> bool:
    """Whether both name a quantity, and not the same; of a longer formula on the left nothing is known."""
    names = [_spaceless(text).partition("=")[0] if "=" in text else "" for text in (expected, answer)]
    return all(names) and names[0] != names[1]


def _marks(text: str) -> list[str]:
    return re.findall(r"'|\\prime(?![a-z])", text)


def _apart(expected: str, answer: str) -> bool:
    """Whether one is a formula whose parts do not commute, and the other is not the same text."""
    texts = [_bare(text) for text in (expected, answer)]
    operators = [_OPERATORS.findall(text) for text in texts]
    return (any(map(_is_chemical, texts)) and texts[0] != texts[1]) or operators[0] != operators[1]


def _bare(formula: str) -> str:
    return re.sub(r"[\s{}_]", "", plain(formula).rpartition("=")[2])


def _is_chemical(bare: str) -> bool:
    return _CHEMICAL.fullmatch(bare) is not None and re.search(r"[2-9]", bare) is not None


def _letters(formula: str) -> set[str]:
    """Names of variables on the right side."""
    right = plain(tidy(formula)).rpartition("=")[2]
    letters = set(re.findall(r"[^\W\d_]", _COMMAND.sub(" ", right))) - {"e"}  # which stands for exp as well
    return letters | (set(_COMMAND.findall(right)) & _GREEK)


def _same_terms(problem: Problem, answer: str) -> bool:
    """Whether nothing but mathematics is between an answer and the expected one: it uses no other names (but for
    their case), so it is no other way to call something, and no measured value is expected, which may be rounded."""
    if problem.kind is Kind.QUANTITY:
        expected = quantities.read(problem.expected)
        return expected is not None and expected.digits is None and not _names_in(answer)
    if any(_is_chemical(_bare(text)) for text in (problem.expected, answer)):
        return False
    names, said = _names_in(problem.expected), _names_in(answer)
    return said <= names or {name.casefold() for name in said} == {name.casefold() for name in names}


def _names_in(formula: str) -> set[str]:
    """Names of variables on the right side, with their indices, and of logarithms, whose base not everybody says."""
    found = _NAME.finditer(plain(formula).rpartition("=")[2])
    kept = _GREEK | {r"\ln", r"\log", r"\lg"}
    return {re.sub(r"[{}]", "", name[0]) for name in found if name[1] in kept or name[1][0] != "\\"}


def _is_long(answer: str) -> bool:
    """Prose rather than a formula."""
    return len(re.findall(r"[A-Za-z]{4,}", re.sub(r"\\[A-Za-z]+", " ", answer))) > 2


def _names(question: str, unit: str) -> bool:
    """The question asks for the number in this unit."""
    spaceless, asked = _spaceless(unit), _spaceless(question)
    if len(spaceless) > 2:
        return spaceless in asked
    return bool(spaceless) and re.search(rf"(?:in|\(|\[){re.escape(spaceless)}(?![A-Za-z])", asked) is not None
