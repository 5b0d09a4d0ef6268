# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A submitted function that tests call, from a process that never sees its objects: HumanEval's form of a test.

The tests run in the grader, which executes only what the data set brings. Each call of the function goes to a child of
a :mod:`.zygote` and back, over two pipes and as plain data: the candidate's objects, with whatever ``__eq__`` they
define, never reach the grader, which rebuilds built-in values from lines of JSON. Nothing is pickled or marshalled.
The candidate gets copies of the arguments, so it cannot change what the tests hold.
"""

from __future__ import annotations

import ast
import json
import os
import signal
from typing import Any


MAX_LINE_BYTES = 16 << 20
MAX_INT_DIGITS = 1 << 16
"""Longest integer that the grader reads from a candidate, in 25 ms."""

DETAIL_CHARS = 500


class TimeUp(BaseException):
    """The budget is used up; a BaseException, so that no test swallows it."""


class CandidateGone(BaseException):
    """The candidate's process ended or broke the protocol; a BaseException for the same reason."""


class CandidateRaised(Exception):
    """The candidate's function raised."""


# --- plain data over a pipe ---


def encode(value: Any) -> Any:
    """Built-in values as JSON that tells lists from tuples and sets; other iterables become one-shot iterators."""
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        number = int(value)
        return number if abs(number) < 1 << 62 else ["int", hex(number)]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, range):
        return ["range", value.start, value.stop, value.step]
    for name, kinds in (("list", list), ("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, kinds):
            return [name, [encode(item) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(item)] for key, item in value.items()]]
    if hasattr(value, "__iter__"):
        return ["iterator", [encode(item) for item in value]]
    raise TypeError(f"a value of type {type(value).__name__} cannot leave the candidate's process")


def decode(value: Any) -> Any:
    """The inverse of :func:`encode`: always built-in values.

    Raises:
        CandidateGone: the value is not one that :func:`encode` makes.
    """
    if not isinstance(value, list):
        return value
    try:
        name, payload = value[0], value[1]
        if name == "dict":
            return {decode(key): decode(item) for key, item in payload}
        if name == "int":
            return int(payload, 16)
        if name == "bytes":
            return bytes.fromhex(payload)
        if name == "complex":
            return complex(payload, value[2])
        if name == "range":
            return range(payload, value[2], value[3])
        maker: Any = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter}[name]
        return maker([decode(item) for item in payload])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CandidateGone(f"the candidate broke the protocol: {error!r}") from None


def line_of(message: Any) -> bytes:
    """A message as it goes over a pipe, a line of JSON.

    Raises:
        ValueError: it is too large.
    """
    data = json.dumps(message).encode() + b"\n"
    if len(data) > MAX_LINE_BYTES:
        raise ValueError(f"a value of {len(data)} bytes is too large")
    return data


def receive(stream: Any) -> Any:
    """The next message.

    Raises:
        CandidateGone: the other side closed the pipe or sent something else.
    """
    data = stream.readline(MAX_LINE_BYTES)
    if not data.endswith(b"\n"):
        broken = len(data) == MAX_LINE_BYTES
        raise CandidateGone("the candidate broke the protocol" if broken else "the candidate's process ended")
    try:
        return json.loads(data.decode("ascii"), parse_int=bounded_int)
    except (ValueError, RecursionError):
        raise CandidateGone("the candidate broke the protocol") from None


def bounded_int(digits: str) -> int:
    """Read an integer, but not one whose reading alone would take the grader's time."""
    if len(digits) > MAX_INT_DIGITS:
        raise ValueError("too many digits")
    return int(digits)


# --- in the candidate's process ---


def serve(requests: Any, answer: Any, namespace: dict[str, Any], code: Any, name: str) -> None:
    """Run the source, then answer calls until the grader closes the pipe.

    Args:
        requests: the pipe on which calls come.
        answer: sends a message.
        namespace: where the source runs.
        code: the source, compiled.
        name: the function's.
    """
    try:
        exec(code, namespace)
    except BaseException as error:  # SystemExit too
        answer(line_of(["refused", "crashed", f"on import: {type(error).__name__}: {error}"]))
        return
    function = namespace.get(name)
    if not callable(function):
        answer(line_of(["refused", "no_solution", f"solution.py defines no function {name}"]))
        return
    answer(line_of(["ready"]))
    while True:
        try:
            arguments, keywords = decode(receive(requests))
        except CandidateGone:
            return
        try:
            said = line_of(["returned", encode(function(*arguments, **keywords))])
        except BaseException as error:
            said = line_of(["raised", f"{type(error).__name__}: {str(error)[:DETAIL_CHARS]}"])
        answer(said)


# --- in the grader ---


class Candidate:
    """The submitted function, as the tests see it: a call goes to the other process and back."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests = os.fdopen(requests, "wb")
        self._answers = os.fdopen(answers, "rb")

    def answer(self) -> Any:
        """The next message."""
        return receive(self._answers)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            self._requests.write(line_of(encode((arguments, keywords))))
            self._requests.flush()
        except BrokenPipeError:
            raise CandidateGone("the candidate's process ended") from None
        answer = self.answer()
        if not isinstance(answer, list) or len(answer) != 2 or answer[0] not in ("returned", "raised"):
            raise CandidateGone("the candidate broke the protocol")
        if answer[0] == "raised":
            raise CandidateRaised(str(answer[1]))
        return decode(answer[1])


def import_ahead(*sources: str) -> None:
    """Import every module that the sources mention, however deep."""
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                __import__(name)


def where(error: BaseException, test: str) -> str:
    """The line of the tests at which it went wrong."""
    number, at = 0, error.__traceback__
    while at is not None:
        if at.tb_frame.f_code.co_filename == "<tests>":
            number = at.tb_lineno
        at = at.tb_next
    lines = test.splitlines()
    if not 0 < number <= len(lines):
        return ""
    return f" at line {number} of the tests: {lines[number - 1].strip()[:200]}"


def examine(job: dict[str, Any], runner: Any) -> tuple[str, str]:
    """Run the tests against what a :class:`~.grader.Runner` has; returns verdict and detail."""
    signal.signal(signal.SIGALRM, _time_up)
    signal.setitimer(signal.ITIMER_REAL, job["total_s"])
    try:
        namespace: dict[str, Any] = {"__name__": "tests"}
        exec(compile(job["reference"], "<reference>", "exec"), namespace)
        # A test that calls the function by its name gets the reference; only the argument of check() is the candidate.
        exec(compile(job["check"], "<tests>", "exec"), namespace)
        answer = runner.ready(job["total_s"])
        if "refused" in answer:
            return ("crashed" if answer.get("killed") else "syntax_error"), answer["refused"]
        candidate = Candidate(*runner.serve())
        first = candidate.answer()
        if first != ["ready"]:
            known = isinstance(first, list) and len(first) == 3 and first[0] == "refused"
            if known and first[1] in ("crashed", "no_solution"):
                return str(first[1]), str(first[2])[:DETAIL_CHARS]
            raise CandidateGone("the candidate broke the protocol")
        namespace["check"](candidate)
    except CandidateGone as error:
        return "crashed", str(error) + where(error, job["check"])
    except TimeUp as error:
        return "timed_out", f"after {job['total_s']:g} s{where(error, job['check'])}"
    except Exception as error:
        return "failed", f"{type(error).__name__}: {str(error)[:200]}{where(error, job['check'])}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "passed", ""


def _time_up(signum: int, frame: Any) -> None:
    raise TimeUp
