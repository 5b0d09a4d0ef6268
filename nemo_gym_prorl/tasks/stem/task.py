# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Task family ``stem``: science questions with search and Python tools.

The answer is in the policy's last message, so grading needs neither files nor a sandbox. Rules decide first, because
no answer can persuade rules. The judge only decides answers that the rules leave undecided. A different choice,
quantity, or formula with the same variables is wrong without a judge.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gym_prorl.failures import CallerError, TaskError
from nemo_gym_prorl.tasks.final_answer import MAX_ANSWER_CHARS, extract_final_answer, last_message_text
from nemo_gym_prorl.tasks.math.checker import ANOTHER_VALUE, MathChecker, MathVerdict
from nemo_gym_prorl.tasks.math.spelling import canonical, normalized
from nemo_gym_prorl.tasks.stem import quantities
from nemo_gym_prorl.tasks.stem.judge import Judge, JudgeVerdict
from nemo_gym_prorl.tasks.stem.problems import (
    WORKBENCH_TOOLS,
    AnswerKind,
    StemProblem,
    chosen_option,
    letter_of,
    problem_of,
)
from nemo_gym_prorl.tasks.stem.quantities import Comparison, Quantity, plain, spaceless, words
from nemo_gym_prorl.tasks.stem.search import SearchTool
from nemo_gym_prorl.tasks.task import AsyncCloseable, Grade, OpenSandbox, SandboxNeeds
from nemo_gym_prorl.tasks.workbench import Workbench
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits, Workspace


QUESTION_FILE = "question.txt"

_ASKED_IN = re.compile(r"\b(?:in|how many)\s+|[(\[]\s*", re.IGNORECASE)
MAX_UNIT_WORDS = 5
"""Maximum words of a unit in a question, as in meters per second per second."""

_PERCENT = re.compile(r"%|\bpercent", re.IGNORECASE)


class Stem:
    """Task of science questions.

    Args:
        root: folder in each sandbox; the policy's Python works in ``<root>/workspace``.
        judge: judge of undecided answers. ``None``: undecided answers are wrong, and rows with free text are refused.
        resources: engine, checker and judge, which the task closes at the end.
    """

    resumes = True

    def __init__(
        self,
        root: str,
        tools: ToolLimits,
        search: SearchTool,
        rules: Rules,
        judge: Judge | None = None,
        resources: Sequence[AsyncCloseable] = (),
    ) -> None:
        self.tools = Workbench(WORKBENCH_TOOLS, f"{root.rstrip('/')}/workspace", tools, further=[search])
        self._rules = rules
        self._judge = judge
        self._resources = resources

    async def aclose(self) -> None:
        for resource in self._resources:
            await resource.aclose()

    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds:
        """Return default sandbox requirements. Rows that expect free text are refused if the server has no judge."""
        if problem_of(row).kind is AnswerKind.TEXT and self._judge is None:
            raise CallerError(
                "is free text and needs a judge; set judge_model_server",
                field="expected_answer",
            )
        return SandboxNeeds()

    async def prepare(self, row: Mapping[str, Any], tools: Workspace) -> None:
        """Examine the judge unless the judge has passed already, and write the question into the working folder.

        Raises:
            CallerError: the expected formula cannot be parsed, and there is no judge to compare answers.
            InfrastructureError: the judge cannot be used (names ``judge_model_server``), or the sandbox failed.
        """
        problem = problem_of(row)
        if self._judge is not None:
            await self._judge.require_strict()
        if problem.kind is AnswerKind.FORMULA and self._judge is None:
            try:
                await self._rules.formulas.require_gradeable(problem.expected)
            except TaskError as error:
                raise CallerError(error.reason, field="expected_answer") from error
        await tools.write({QUESTION_FILE: problem.question})

    async def artefacts(self, row: Mapping[str, Any], tools: Workspace) -> None:
        """Return nothing, because only the last message is graded."""

    async def grade(
        self, row: Mapping[str, Any], artefacts: None, response: Mapping[str, Any], open_sandbox: OpenSandbox
    ) -> Grade:
        problem = problem_of(row)
        answer = extract_final_answer(last_message_text(response), problem.letters) or None
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
            return Grade(float(judged.verdict is JudgeVerdict.SAME), verdict, detail, told)
        return Grade(float(bool(right)), "right" if right else "wrong", why, told)


_JUDGED = {
    JudgeVerdict.SAME: ("right", "the judge says that it is the same"),
    JudgeVerdict.DIFFERENT: ("wrong", "the judge says that it is another answer"),
    JudgeVerdict.STEERED: ("steered", "the answer addresses the judge"),
}


Ruling = tuple[bool | None, str]
"""Whether an answer is right (``None`` if the rules leave this undecided), and a human-readable reason."""

_WRONG = frozenset({MathVerdict.UNFINISHED, MathVerdict.CONTRADICTORY, MathVerdict.TIMED_OUT})
"""Verdicts on formulas that are final, because a judge might overlook their reason."""

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
    """Rules for choices, quantities, formulas and words.

    Args:
        formulas: comparison of formulas.
        tolerance: maximum deviation of a measured value, relative to the expected value.
    """

    def __init__(self, formulas: MathChecker, tolerance: float = quantities.RELATIVE_TOLERANCE) -> None:
        self.formulas = formulas
        self._tolerance = tolerance

    async def check(self, problem: StemProblem, answer: str) -> Ruling:
        """Decide by rules whether a final answer is right.

        Raises:
            TaskError: the expected answer cannot be compared with itself.
            InfrastructureError: ``verifier_error``: the comparisons were lost by the machine.
        """
        if problem.kind is AnswerKind.CHOICE:
            return self._choice(problem, answer)
        # Spaces matter in a unit: m s is not ms.
        same = plain if problem.kind is AnswerKind.QUANTITY else spaceless
        if same(answer) == same(problem.expected):
            return True, "the expected text"
        match problem.kind:
            case AnswerKind.QUANTITY:
                return await self._quantity(problem, answer)
            case AnswerKind.FORMULA:
                return await self._formula(problem, answer)
            case _:
                if words(answer) == words(problem.expected) and _marks(answer) == _marks(problem.expected):
                    return True, "the expected words"
                return None, "other words than expected"

    def _choice(self, problem: StemProblem, answer: str) -> Ruling:
        letter = chosen_option(problem.options, answer, self._same) if problem.options else letter_of(answer)
        if letter is None:
            return False, "it does not choose exactly one option"
        return letter == letter_of(problem.expected), f"it chooses {letter}"

    async def _quantity(self, problem: StemProblem, answer: str) -> Ruling:
        expected, said = quantities.read(problem.expected), quantities.read(answer)
        assert expected is not None
        if names_differ(problem.expected, answer):
            return None, "it has another name than the expected quantity"
        if said is None:
            # The comparison of formulas ignores units.
            if expected.unit:
                return None, "it is no plain quantity"
            return await self._formula(problem, answer)
        match quantities.compare(expected, said, self._tolerance):
            case Comparison.SAME:
                return True, "the expected quantity"
            case Comparison.DIFFERENT:
                return False, "another quantity"
            case Comparison.UNIT_MISSING:
                quantity = expected if expected.unit else said
                if (expected.unit or quantity.unit != "percent") and _names_unit(problem.question, quantity):
                    return True, f"the expected number, and the question names its unit, {quantity.written}"
                return None, "the expected number; only one of the two has a unit"

    async def _formula(self, problem: StemProblem, answer: str) -> Ruling:
        if _is_chemical(bare := _bare(problem.expected)) and bare == _bare(answer):
            return True, "the expected formula of chemistry"
        checked = await self.formulas.check(problem.expected, f"\\boxed{{{answer}}}", problem.question)
        if checked.right and _apart(problem.expected, answer):
            return None, "formulae of chemistry, or of operators, that differ in their order"
        if checked.right:
            # The comparison may have read a letter at the end as a unit and ignored it.
            if _letters(answer) == _letters(problem.expected):
                return True, "an equal formula"
            return None, "an equal formula but for some letters"
        why = f"{checked.verdict}: {checked.detail}"
        wrong = checked.verdict in _WRONG or (checked.detail == ANOTHER_VALUE and _same_terms(problem, answer))
        return (False, why) if wrong else (None, why)

    def _same(self, option: str, said: str) -> bool:
        if canonical(normalized(option)) == canonical(normalized(said)):
            return True
        one, other = quantities.read(option), quantities.read(said)
        if one is None or other is None:
            return False
        return quantities.compare(one, other, self._tolerance) is Comparison.SAME


def names_differ(expected: str, answer: str) -> bool:
    """Return whether both texts name their quantity, as in ``v = 3``, and the names differ."""
    names = [spaceless(text).partition("=")[0] if "=" in text else "" for text in (expected, answer)]
    return all(names) and names[0] != names[1]


def _marks(text: str) -> list[str]:
    return re.findall(r"'|\\prime(?![a-z])", text)


def _apart(expected: str, answer: str) -> bool:
    """Return whether a chemical formula or operators, whose parts do not commute, differ between the texts."""
    texts = [_bare(text) for text in (expected, answer)]
    operators = [_OPERATORS.findall(text) for text in texts]
    return (any(map(_is_chemical, texts)) and texts[0] != texts[1]) or operators[0] != operators[1]


def _bare(formula: str) -> str:
    return re.sub(r"[\s{}_]", "", plain(formula).rpartition("=")[2])


def _is_chemical(bare: str) -> bool:
    return _CHEMICAL.fullmatch(bare) is not None and re.search(r"[2-9]", bare) is not None


def _letters(formula: str) -> set[str]:
    """Return the letters of variables right of the last equals sign."""
    right = plain(normalized(formula)).rpartition("=")[2]
    letters = set(re.findall(r"[^\W\d_]", _COMMAND.sub(" ", right))) - {"e"}  # e is also the base of exp
    return letters | (set(_COMMAND.findall(right)) & _GREEK)


def _same_terms(problem: StemProblem, answer: str) -> bool:
    """Return whether an answer with another value than expected is certainly wrong.

    The answer must use no names that the expected answer lacks, except for their case, because other names may be
    another notation. The expected answer must not be a measured value, because measured values are rounded.
    """
    if problem.kind is AnswerKind.QUANTITY:
        expected = quantities.read(problem.expected)
        return expected is not None and expected.digits is None and not _names_in(answer)
    if any(_is_chemical(_bare(text)) for text in (problem.expected, answer)):
        return False
    names, said = _names_in(problem.expected), _names_in(answer)
    return said <= names or {name.casefold() for name in said} == {name.casefold() for name in names}


def _names_in(formula: str) -> set[str]:
    """Return the names (with index) of variables and logarithms right of the last equals sign."""
    found = _NAME.finditer(plain(formula).rpartition("=")[2])
    kept = _GREEK | {r"\ln", r"\log", r"\lg"}
    return {re.sub(r"[{}]", "", name[0]) for name in found if name[1] in kept or name[1][0] != "\\"}


def _names_unit(question: str, quantity: Quantity) -> bool:
    """Return whether a question asks for the quantity in the quantity's unit.

    The unit's name or symbol follows "in", "how many" or an opening bracket. A symbol of three or more characters may
    be anywhere, and so may the word percent.
    """
    if quantity.unit == "percent" and _PERCENT.search(question):
        return True
    symbol = spaceless(quantity.written)
    if len(symbol) > 2 and symbol in spaceless(question):
        return True
    question = plain(question.replace("$", ""))
    for asked in _ASKED_IN.finditer(question):
        following = question[asked.end() :].split()[:MAX_UNIT_WORDS]
        texts = (" ".join(following[:count]).rstrip(".,;:?!)]") for count in range(1, len(following) + 1))
        if any(text and quantity.unit in quantities.read_units(text) for text in texts):
            return True
    return False
