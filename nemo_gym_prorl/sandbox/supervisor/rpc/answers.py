# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a question is answered with when it can't be done, whoever found that out: the launcher, a forked child, us."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator

from nemo_gym_prorl.failures import OF_THE_MACHINE
from nemo_gym_prorl.sandbox.limits.cgroups import Group
from nemo_gym_prorl.sandbox.supervisor.errors import SHORTAGES
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message


KILLED: Message = {"error": "the supervisor's helper was killed", "killed": True}


class Unreachable(Exception):
    """What an action was to act on has ended, or is about to; nobody's request was wrong."""


class Refused(Exception):
    """A question has this for an answer: ``error``, and what else :mod:`.client` tells errors apart by."""

    def __init__(self, answer: Message) -> None:
        super().__init__(answer["error"])
        self.answer = answer


def exhausted(what: str) -> Message:
    """The answer to a request for one more of what a sandbox has all of."""
    return {"error": f"the sandbox has as many {what} as it may have", "exhausted": what}


EXHAUSTED = exhausted("processes")


def no_process(error: OSError, group: Group | None) -> Refused:
    """That none can be started, by whose doing it is."""
    if isinstance(error, BlockingIOError) and group and group.full():
        return Refused(EXHAUSTED)
    return Refused({"error": f"no process can be started: {in_words(error)}", "errno": error.errno})


@contextlib.contextmanager
def of_those_inside() -> Iterator[None]:
    """What can't be done in the block to a file of a sandbox, which nobody named but us, is the machine's want by its
    number, or else the doing of those inside."""
    try:
        yield
    except Refused as error:
        number = error.answer.get("errno") or 0
        if not number or number in OF_THE_MACHINE or number in SHORTAGES:
            raise
        raise Refused({"error": error.answer["error"], "broken": True}) from error


def in_words(error: OSError) -> str:
    """What an error says, and of which file."""
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


def failure(error: BaseException) -> Message:
    """The answer to a request that led to an exception, whatever it is."""
    if isinstance(error, Refused):
        return error.answer
    if isinstance(error, Unreachable):
        return {"error": str(error), "lost": True}
    if isinstance(error, OSError):
        return {"error": in_words(error), "errno": error.errno}
    print_without_source(error)
    return {"error": f"the supervisor failed: {type(error).__name__}: {error}"}


def print_without_source(error: BaseException) -> None:
    """As a traceback, but no file is read: in a child that has joined a sandbox it would be one of the sandbox's."""
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    print(*places, f"{type(error).__name__}: {error}", sep="\n", file=sys.stderr)
