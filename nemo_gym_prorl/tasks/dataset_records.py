# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Parsing of fields shared by published data sets, and detection of unsupported data sets. Pure.

A record can fail in three ways:

- :class:`CallerError`: the record is malformed. Conversion reports the record's line, continues, and fails at the end.
- :class:`UnusableRecord`: the record is well-formed, but the target environment cannot grade it. Conversion leaves
  out and counts such records.
- :class:`UnsupportedSet`: no record of the data set can be graded. Conversion stops.
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
"""Placeholders for a missing answer, lower-case, without spaces and delimiters."""

_QUESTION = ("problem", "question", "problem_text", "question_stem", "query")
_ANSWER = ("expected_answer", "answer", "final_answer", "ground_truth", "gt_answer", "reference_answer")
_CONTEXT = ("body", "context", "passage", "article", "hint")
"""Fields with a text that precedes the question (SVAMP, OlympiadBench, DROP, RACE, ScienceQA)."""

_OPTION_FIELDS = ("op", "", "option_", "option", "choice_")
"""Names, without the letter at the end, of fields that hold one option each (MedMCQA, MMMLU, Global-MMLU)."""

_PICTURE = ("image", "images", "image_1", "picture", "decoded_image")
_DELIMITERS = re.compile(r"\\(?:boxed|text|mathrm)\b|[{}$\s]|\.$")
_AFTER_HASHES = re.compile(r"^\s*####[ \t]*(.+?)\s*$", re.MULTILINE)


class UnusableRecord(CallerError):
    """A well-formed record that the target environment cannot grade; conversion leaves the record out.

    Args:
        example: the faulty excerpt of the record. Not part of ``reason``, because conversion counts records by reason.
    """

    def __init__(self, reason: str, *, field: str | None = None, example: str = "") -> None:
        super().__init__(reason, field=field)
        self.example = example


class UnsupportedSet(CallerError):
    """A published data set of which no record can be graded."""


class _Unsupported(NamedTuple):
    """Signature of an unsupported data set: names, separated by spaces, of fields that all records have or lack."""

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
    """Raise if a record belongs to an unsupported data set.

    Raises:
        UnsupportedSet: the record matches a signature; the message names the data set and the reason.
    """
    for known in _UNSUPPORTED:
        if record.keys() >= {*known.has.split()} and record.keys().isdisjoint(known.lacks.split()):
            raise UnsupportedSet(f"{known.name} cannot be used: {known.why}")


def lowered(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with lower-case field names. ORZ's chat (``0``, ``1``) becomes ``problem`` and ``answer``."""
    plain = {str(name).lower(): value for name, value in record.items()}
    asked, said = plain.get("0"), plain.get("1")
    if isinstance(asked, Mapping) and isinstance(said, Mapping):
        truth = said.get("ground_truth")
        return {"problem": asked.get("value"), "answer": truth.get("value") if isinstance(truth, Mapping) else truth}
    return plain


def require_answerable(record: Mapping[str, Any]) -> None:
    """Raise if the problem is a programming task or needs a picture.

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
    """Return the name of the question's field, and the question after its context.

    The question is a text field, or the last user message in ``prompt``. ``record`` has lower-case names; the error
    for a missing question lists the fields of the original record ``given``.

    Raises:
        CallerError: the question is missing or no text; names the field.
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
    """Return the options of a record with one field per option, from A to J; empty with fewer than two."""
    for before in _OPTION_FIELDS:
        fields = (record.get(f"{before}{letter}") for letter in "abcdefghij")
        if len(options := [*takewhile(lambda option: option not in (None, ""), fields)]) > 1:
            return options
    return []


def text_of(value: Any, field: str, limit: int | None = None, *, number: bool = False) -> str:
    """Return a value as stripped text.

    Args:
        field: name of the field, for errors.
        limit: maximum characters; ``None`` for no limit.
        number: whether numbers are accepted and converted.

    Raises:
        CallerError: the value has another type, is empty or too long; names the field.
    """
    if number and isinstance(value, int | float) and not isinstance(value, bool):
        value = repr(value)
    if not isinstance(value, str) or not value.strip():
        raise CallerError("must be non-empty text", field=field)
    if not is_text(value):
        raise CallerError("contains an unpaired surrogate, which is not valid Unicode", field=field)
    if limit is not None and len(value) > limit:
        raise CallerError(f"is longer than {limit} characters", field=field)
    return value.strip()


def answer_of(record: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the field's name and the value of a record's answer, also in verl's and PrimeIntellect's formats;
    ``None`` without an answer.
    """
    for name in _ANSWER:
        if record.get(name) is not None:
            return name, record[name]
    for name in ("reward_model", "verification_info"):
        inner = parsed(record.get(name))
        if isinstance(inner, Mapping) and inner.get("ground_truth") is not None:
            return f"{name}.ground_truth", inner["ground_truth"]
    return None


def no_answer(record: Mapping[str, Any], given: Mapping[str, Any]) -> CallerError:
    """Return the error for an empty (:class:`UnusableRecord`) or missing (:class:`CallerError`) answer."""
    if empty := next((name for name in _ANSWER if name in record), None):
        return UnusableRecord("is empty: the set knows no final answer", field=empty)
    return missing(given, "answer")


def gold(value: Any, field: str) -> str:
    """Return a reference answer as text: list items joined by commas, or the ``####`` line of a GSM8K solution.

    Raises:
        CallerError: the value is neither text nor a number; names the field.
        UnusableRecord: the value is a placeholder for a missing answer.
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
    """Decode text that is JSON or a Python literal; return any other value unchanged."""
    if isinstance(value, str):
        for read in (json.loads, ast.literal_eval):
            try:
                return read(value)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
    return value


def missing(record: Mapping[str, Any], name: str) -> CallerError:
    return CallerError(f"missing; there are {', '.join(map(str, record)) or 'no fields'}", field=name)


def create_params(
    system: str,
    question: str,
    tools: Sequence[Mapping[str, Any]],
    *,
    parallel: bool = True,
    script: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a row's ``responses_create_params``.

    Args:
        tools: function schemas of the Responses API.
        parallel: whether the policy may call several tools in one turn.
        script: turns for the scripted model server (``cli/scripted/text.py``); ``None`` for a real model.
    """
    params: dict[str, Any] = {
        "input": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "tools": list(tools),
        "parallel_tool_calls": parallel,
    }
    # Gym's metadata maps strings to strings, so the script travels as JSON text.
    return params | ({"metadata": {"script": json.dumps(script, sort_keys=True)}} if script is not None else {})
