# SPDX-License-Identifier: Apache-2.0
"""From a candidate's source to a verdict, in sandboxes that its author never touched.

A verdict is a statement about the candidate: a slow, crashing or unparsable solution has one, with reward 0. What is
no statement about the candidate is an :class:`InfrastructureError` and never a reward. The line between them matters
when a grading run ends without a word, because a candidate can kill the process that tests it:

- What ends before the candidate's source is run is not its doing; the tester says when that begins.
- What a sandbox that :class:`.KnowsWhoseDoing` says to be the machine's is that: it was killed from outside, its owner
  is gone, or the machine ran out of memory. None of it can be had from inside.
- Anything else the candidate may have done. It is graded once more, and if that ends the same way, the problem's own
  reference is graded: if the reference passes, machines are fine and the candidate is to blame.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import shlex
import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from pathlib import Path

from nemo_gym_prorl.failures import AgentError, FailureKind, InfrastructureError
from nemo_gym_prorl.tasks.humaneval.problems import Problem
from nemo_gym_prorl.tasks.sandbox import KnowsWhoseDoing, Sandbox
from nemo_gym_prorl.tasks.task import EXHAUSTED, Grade


class Reason(StrEnum):
    """Why a candidate passed or did not."""

    PASSED = "passed"
    FAILED = "failed"
    """A test failed, or the function raised."""
    TIMED_OUT = "timed_out"
    SYNTAX_ERROR = "syntax_error"
    NO_SOLUTION = "no_solution"
    """There is no solution.py that can be read, or it defines no such function."""
    CRASHED = "crashed"
    """Importing it failed, its process ended, or it took the tester down with it."""
    EXHAUSTED = EXHAUSTED
    """The agent, or its solution when it was tested, used up its sandbox's disk, memory or processes."""


def judged(reason: Reason, detail: str = "") -> Grade:
    """A grade: all tests or nothing."""
    return Grade(1.0 if reason is Reason.PASSED else 0.0, reason.value, detail)


@dataclass(frozen=True, slots=True)
class GradingLimits:
    """Bounds of one candidate.

    Attributes:
        timeout_s: seconds for all tests of the problem, start of both processes included.
        memory_mib: address space of a process of the candidate, in MiB.
        processes: how many processes and threads the candidate may have.
        file_mib: largest file that it may write, in MiB.
    """

    timeout_s: float = 20.0
    memory_mib: int = 1024
    processes: int = 64
    file_mib: int = 64


@dataclass(frozen=True, slots=True)
class Lost:
    """A grading run that ended without a verdict.

    Attributes:
        why: what is known of it.
        by_machine: the candidate can't have done it.
    """

    why: str
    by_machine: bool


TRIES = 2
"""So often a candidate may take the tester down, and so often the machine may."""

ANSWER_MARGIN_S = 20.0
"""How much longer than its own time limit a run may take to answer, in seconds."""

LONGEST_COMMAND = 100_000
"""A longer job is uploaded: the kernel takes no argument beyond 128 KiB."""

END_OF_JOB = "END-OF-JOB"

OpenSandbox = Callable[[], AbstractAsyncContextManager[Sandbox]]
"""Starts a fresh sandbox and stops it in the end."""


async def grade(open_sandbox: OpenSandbox, problem: Problem, source: str, limits: GradingLimits, root: str) -> Grade:
    """Grade a candidate, each try in a fresh sandbox.

    Args:
        open_sandbox: starts a fresh sandbox with ``sh`` and ``python3`` (3.8 or later).
        problem: what to test against.
        source: the submitted file.
        limits: bounds of the candidate.
        root: a folder of the sandbox that uploads reach.

    Raises:
        InfrastructureError: no sandbox could be had (as ``open_sandbox`` says), or none gave a verdict
            (``verifier_error``).
    """

    async def graded(source: str) -> Grade | Lost:
        async with open_sandbox() as sandbox:
            return await grade_in(sandbox, problem, source, limits, root)

    losses = {True: 0, False: 0}
    while True:
        outcome = await graded(source)
        if isinstance(outcome, Grade):
            return outcome
        losses[outcome.by_machine] += 1
        if losses[outcome.by_machine] == TRIES:
            break
    if not outcome.by_machine:
        control = await graded(problem.reference_source)
        if isinstance(control, Grade) and control.passed:
            return judged(Reason.CRASHED, f"the tester was taken down, twice: {outcome.why}")
    raise InfrastructureError(f"grading gave no verdict: {outcome.why}", kind=FailureKind.VERIFIER_ERROR)


async def grade_in(sandbox: Sandbox, problem: Problem, source: str, limits: GradingLimits, root: str) -> Grade | Lost:
    """Grade a candidate once in the given sandbox."""
    nonce = secrets.token_hex(16)
    job = {
        "nonce": nonce,
        "reference": problem.reference_source,
        "test": problem.test,
        "entry_point": problem.entry_point,
        "source": source,
        "timeout_s": limits.timeout_s,
        "limits": asdict(limits) | {"cpu_s": math.ceil(limits.timeout_s) + 1},
    }
    try:
        command = await _command(sandbox, json.dumps(job), root)
    except AgentError as error:
        return judged(Reason.EXHAUSTED, error.reason)
    except (RuntimeError, OSError, InfrastructureError) as error:
        return Lost(f"{type(error).__name__}: {error}", by_machine=True)
    try:
        result = await sandbox.exec(command, cwd="/", timeout_s=limits.timeout_s + ANSWER_MARGIN_S)
        told = [json.loads(line.removeprefix(nonce)) for line in _lines(result.stdout) if line.startswith(nonce)]
        verdict = judged(Reason(told[1]["reason"]), told[1]["detail"]) if len(told) > 1 else None
        if verdict is not None and verdict.verdict != Reason.CRASHED:
            return verdict
        knows = isinstance(sandbox, KnowsWhoseDoing)
        if isinstance(sandbox, KnowsWhoseDoing):
            await sandbox.check()
    except AgentError as error:
        return judged(Reason.EXHAUSTED, error.reason)
    except InfrastructureError as error:
        return Lost(error.reason, by_machine=True)
    except (RuntimeError, OSError) as error:
        return Lost(f"{type(error).__name__}: {error}", by_machine=False)
    if verdict is not None:
        return verdict
    why = f"exit code {result.return_code}: {(result.stderr or '').strip()[-500:]}"
    # All that a program said is there if it ended by itself; and one that could not run in a sandbox that lives said
    # nothing.
    complete = result.error_type is None or (knows and result.error_type == "sandbox")
    return Lost(why, by_machine=complete and not told)


def _lines(text: str | None) -> list[str]:
    return (text or "").splitlines()


async def _command(sandbox: Sandbox, job: str, root: str) -> str:
    """Runs the grader with the job as its input, which no command line shows and nothing can read a second time."""
    program = f"python3 -I -c {shlex.quote(_grader_source())}"
    if len(program) + len(job) < LONGEST_COMMAND:
        # JSON has neither a line end nor, escaped, anything but ASCII.
        return f"exec {program} <<'{END_OF_JOB}'\n{job}\n{END_OF_JOB}\n"
    path = f"{root.rstrip('/')}/grade-{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory(prefix="prorl-grade-") as folder:
        local = Path(folder, "upload")
        await asyncio.to_thread(local.write_text, job, encoding="utf-8")
        await sandbox.upload(local, path)
    return f"exec < {path} && rm {path} && exec {program}"


@cache
def _grader_source() -> str:
    return files("nemo_gym_prorl.tasks.humaneval").joinpath("inside/grader.py").read_text(encoding="utf-8")
