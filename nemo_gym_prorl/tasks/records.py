# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Fields of published data sets that several families read, and the sets that no environment here can use. Pure.

Three things can be wrong with a record, and conversion treats each in its own way:

- :class:`CallerError`: the record is malformed. Conversion names its line, goes on, and fails at the end.
- :class:`UnusableRecord`: the set publishes records like this one, and none can be graded. Conversion counts it.
- :class:`UnsupportedSet`: no record of the set can be graded. Conversion ends at once.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from nemo_gym_prorl.failures import CallerError, is_text


NO_ANSWER = frozenset(
    "proof notfound nan none null n/a #n/a <na> noanswer notprovided notavailable ? -".split()  # noqa: SIM905
)
"""What sets write in place of an answer, without case, spaces and delimiters."""

_QUESTION = ("problem", "question", "problem_text", "question_stem", "query")
_ANSWER = ("expected_answer", "answer", "final_answer", "ground_truth", "gt_answer", "reference_answer")
_CONTEXT = ("body", "context", "passage", "article", "hint")
"""Text that a question refers to (SVAMP, OlympiadBench, DROP, RACE, ScienceQA)."""

_OPTION_FIELDS = ("op", "", "option_", "option", "choice_")
"""What stands before the letter in the names of fields with an option each (MedMCQA, MMMLU, Global-MMLU)."""

_PICTURE = ("image", "images", "image_1", "picture", "decoded_image")
_DELIMITERS = re.compile(r"\\(?:boxed|text|mathrm)\b|[{}$\s]|\.$")
_AFTER_HASHES = re.compile(r"^\s*####[ \t]*(.+?)\s*$", re.MULTILINE)


class UnusableRecord(CallerError):
    """A record that its set publishes and no environment can grade."""


class UnsupportedSet(CallerError):
    """A published set of which no record can be graded."""


class _Unsupported(NamedTuple):
    """A published set, known by the fields that its records have and lack."""

    name: str
    has: str
    why: str
    lacks: str = ""


_ELSEWHERE = "its tests are in languages whose commands are not in its records"
_PROGRAMS = "its tests are programs, and prorl_code compares results of calls"
_CHATS = "a set of chats (OpenThoughts, Nemotron post-training)"
_ANSWERED = "problem question prompt answer expected_answer verifier_metadata"

_UNSUPPORTED = (
    _Unsupported("SWE-smith", "image_name FAIL_TO_PASS", "it has no hidden tests and no test command", "test_patch"),
    _Unsupported("SWE-rebench-V2", "image_name install_config", f"{_ELSEWHERE}; use SWE-rebench", "docker_image"),
    _Unsupported(
        "SWE-bench-extra", "install_config FAIL_TO_PASS", "it has no images; use SWE-rebench", "docker_image"
    ),
    _Unsupported("SWE-bench Pro", "dockerhub_tag", "the scripts that run its tests are not in its records"),
    _Unsupported("SWE-bench-Live", "test_cmds", "it runs whole suites, and swebench does not have its log parsers"),
    _Unsupported("SWE-bench Multimodal", "image_assets", "its tests need browsers, and its issues are pictures"),
    _Unsupported("Multi-SWE-bench", "fix_patch test_patch", _ELSEWHERE),
    _Unsupported("BigCodeBench", "instruct_prompt libs", _PROGRAMS),
    _Unsupported("DS-1000", "code_context reference_code", _PROGRAMS),
    _Unsupported("MultiPL-E", "doctests stop_tokens", "it is HumanEval and MBPP in languages other than Python"),
    _Unsupported("OpenCodeReasoning", "input output solution license", "it has solutions to imitate and no tests"),
    _Unsupported(
        "a set of formal theorems (miniF2F, ProofNet, NuminaMath-LEAN)",
        "formal_statement",
        "a proof assistant has to check them, and there is none here",
    ),
    _Unsupported("PRM800K", "label is_quality_control_question", "it rates steps, not answers"),
    _Unsupported("a set of preferences (UltraFeedback, HH-RLHF)", "chosen rejected", "it has no right answers"),
    _Unsupported("IFEval", "instruction_id_list kwargs", "no environment here checks instructions about form"),
    _Unsupported(_CHATS, "conversations", "it has answers to imitate, and none to compare with", _ANSWERED),
    _Unsupported(_CHATS, "messages", "it has answers to imitate, and none to compare with", _ANSWERED),
)


def refuse_unsupported(record: Mapping[str, Any]) -> None:
    """Refuse a set by its name, if no record of it can be graded.

    Raises:
        UnsupportedSet: the record has the fields of such a set.
    """
    for known in _UNSUPPORTED:
        if record.keys() >= {*known.has.split()} and record.keys().isdisjoint(known.lacks.split()):
            raise UnsupportedSet(f"{known.name} cannot be used: {known.why}")


def lowered(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the names of its fields in lower case, and a pair of messages (ORZ) as a problem and an answer."""
    plain = {str(name).lower(): value for name, value in record.items()}
    asked, said = plain.get("0"), plain.get("1")
    if isinstance(asked, Mapping) and isinstance(said, Mapping):
        truth = said.get("ground_truth")
        return {"problem": asked.get("value"), "answer": truth.get("value") if isinstance(truth, Mapping) else truth}
    return plain


def require_answerable(record: Mapping[str, Any]) -> None:
    """Refuse a record whose problem is a program to write, or cannot be understood without a picture.

    Raises:
        UnusableRecord: names the field.
    """
    for name in ("ability", "task_type"):
        kind = record.get(name)
        if isinstance(kind, str) and re.search(r"\bcod(?:e|ing)\b", kind.replace("_", " "), re.IGNORECASE):
            raise UnusableRecord(f"{kind!r} is a task for `prorl data code`", field=name)
    for name in _PICTURE:
        if record.get(name):
            raise UnusableRecord("the problem needs a picture", field=name)


def question_of(record: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[str, str]:
    """The field and the text of a record's question, with the text that it refers to.

    The question is a field, or the last message of a user in a chat.

    Args:
        record: with names in lower case.
        given: as the set has it, for what an error lists.

    Raises:
        CallerError: there is none; names the field.
    """
    name = next((name for name in (*_QUESTION, "prompt") if record.get(name) is not None), None)
    if name is None:
        raise missing(given, _QUESTION[0])
    question = record[name]
    if name == "prompt" and isinstance(question, list):
        said = [turn.get("content") for turn in question if isinstance(turn, Mapping) and turn.get("role") == "user"]
        if not said:
            raise CallerError("has no message of a user", field=name)
        question = said[-1]
    question = text_of(question, name)
    context = [text for field in _CONTEXT if isinstance(text := record.get(field), str) and text.strip()]
    return name, "\n\n".join([*map(str.strip, context), question])


def options_by_field(record: Mapping[str, Any]) -> list[Any]:
    """The options of a record that has a field for each, from A on; empty if it has none.

    Args:
        record: with names in lower case.
    """
    for before in _OPTION_FIELDS:
        fields = (record.get(f"{before}{letter}") for letter in "abcdefghij")
        if len(options := [*takewhile(lambda option: option not in (None, ""), fields)]) > 1:
            return options
    return []


def text_of(value: Any, field: str, limit: int | None = None, *, number: bool = False) -> str:
    """A value as text without blanks around it.

    Args:
        value: text, or a number if ``number``.
        field: its name.
        limit: longest text, in characters.
        number: whether a number will do.

    Raises:
        CallerError: it is no such value, or empty, or too long; names the field.
    """
    if number and isinstance(value, int | float) and not isinstance(value, bool):
        value = repr(value)
    if not isinstance(value, str) or not value.strip():
        raise CallerError("must be text that is not empty", field=field)
    if not is_text(value):
        raise CallerError("holds half a surrogate pair, which is no character", field=field)
    if limit is not None and len(value) > limit:
        raise CallerError(f"is longer than {limit} characters", field=field)
    return value.strip()


def answer_of(record: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The field and the value of a record's answer, verl's and PrimeIntellect's included; ``None`` if it has none."""
    for name in _ANSWER:
        if record.get(name) is not None:
            return name, record[name]
    for name in ("reward_model", "verification_info"):
        inner = parsed(record.get(name))
        if isinstance(inner, Mapping) and inner.get("ground_truth") is not None:
            return f"{name}.ground_truth", inner["ground_truth"]
    return None


def no_answer(record: Mapping[str, Any], given: Mapping[str, Any]) -> CallerError:
    """The error for a record without an answer: unusable where the set leaves the field empty."""
    if empty := next((name for name in _ANSWER if name in record), None):
        return UnusableRecord("is empty: the set knows no final answer", field=empty)
    return missing(given, "answer")


def gold(value: Any, field: str) -> str:
    """A final answer as text: numbers as written, lists joined, the end of a GSM8K solution.

    Raises:
        CallerError: the value is neither text nor number; names the field.
        UnusableRecord: the value says that there is no answer.
    """
    if isinstance(value, str) and value.lstrip().startswith('["') and isinstance(inner := parsed(value), list):
        value = inner
    if isinstance(value, list) and value and not any(isinstance(part, list) for part in value):
        return ", ".join(gold(part, field) for part in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = repr(value)
    if not isinstance(value, str):
        raise CallerError("must be text or a number", field=field)
    text: str = value
    if hashed := _AFTER_HASHES.findall(text):
        text = re.sub(r"(?<=\d),(?=\d{3})", "", hashed[-1])
    text = text.strip()
    if len(text) < 100 and _DELIMITERS.sub("", text).casefold() in NO_ANSWER:
        raise UnusableRecord(f"{text!r} stands for no answer", field=field)
    return text


def parsed(value: Any) -> Any:
    """A value that a set may keep as JSON or as Python's ``repr``; text that is neither stays as it is."""
    if isinstance(value, str):
        for read in (json.loads, ast.literal_eval):
            try:
                return read(value)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
    return value


def missing(record: Mapping[str, Any], name: str) -> CallerError:
    """The error for a record without a required field."""
    return CallerError(f"missing; there are {', '.join(map(str, record)) or 'no fields'}", field=name)


def create_params(
    system: str,
    question: str,
    tools: Sequence[Mapping[str, Any]],
    *,
    parallel: bool = True,
    script: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The ``responses_create_params`` of a row.

    Args:
        system: what the policy is told before the question.
        question: what it is asked.
        tools: schemas of what it may call.
        parallel: whether it may call several tools in one turn.
        script: turns for a model server that plays back scripts (``scripted/turns.py``); ``None`` for a real model.
    """
    params: dict[str, Any] = {
        "input": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "tools": list(tools),
        "parallel_tool_calls": parallel,
    }
    # Gym's metadata maps strings to strings, so the script travels as JSON text.
    return params | ({"metadata": {"script": json.dumps(script, sort_keys=True)}} if script is not None else {})
