# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A grader's program in fresh sandboxes, until one says what became of the candidate.

A verdict is a statement about the candidate. What is no statement about it is an :class:`InfrastructureError` and
never a reward. The line between them matters when a grading run ends without a word, because a candidate can end its
sandbox, if not the process that tests it:

- What ends before the candidate's source is run is not its doing; the grader says when that begins.
- What a sandbox that :class:`.HasHealthCheck` says to be the machine's is that: it was killed from outside, its owner
  is gone, or the machine ran out of memory. None of it can be had from inside.
- Anything else the candidate may have done. It is graded once more, and if that ends the same way, a control is
  graded: if that gets its verdict, machines are fine and the candidate is to blame.

The program reads its job, JSON with a ``nonce``, from standard input, and answers with lines that start with the
nonce: the first when the candidate's source is about to be run, the second with the verdict.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.tasks.sandbox import HasHealthCheck, Sandbox


BYTE_ORDER_MARK = "\ufeff"
"""Python skips it at a file's beginning, and takes none at that of a text."""

_LOADER = """\
import sys, types
def load(name, source):
    parent, _, child = name.rpartition(".")
    if parent and parent not in sys.modules:
        load(parent, "")
        sys.modules[parent].__path__ = []
    module = types.ModuleType(name)
    sys.modules[name] = module
    if parent:
        setattr(sys.modules[parent], child, module)
    exec(compile(source, name, "exec"), module.__dict__)
"""


@cache
def program(main: str, *modules: str) -> str:
    """The source.

    Args:
        main: full name of the module that is run.
        modules: full names of those of ours that it imports, each after what it imports itself.
    """
    loads = [f"load({name!r}, {_read(name)!r})\n" for name in modules]
    return "".join([_LOADER, *loads, f"exec(compile({_read(main)!r}, 'grader', 'exec'))\n"])


def _read(name: str) -> str:
    package, _, module = name.rpartition(".")
    return files(package).joinpath(f"{module}.py").read_text(encoding="utf-8")


TRIES = 2
"""So often a candidate may take the grader down, and so often the machine may."""

ANSWER_MARGIN_S = 20.0
"""How much longer than its own time limit a run may take to answer, in seconds."""

MAX_COMMAND_CHARS = 100_000
"""A longer job is uploaded: the kernel takes no argument beyond 128 KiB."""

END_OF_JOB = "END-OF-JOB"


@dataclass(frozen=True, slots=True)
class NoVerdict:
    """A grading run that ended without a verdict.

    Attributes:
        why: what is known of it.
        by_machine: the candidate can't have done it.
    """

    why: str
    by_machine: bool


@dataclass(frozen=True, slots=True)
class GraderKilled:
    """The candidate is to blame for there being no verdict.

    Attributes:
        why: what is known of it.
    """

    why: str


async def run_until_verdict[V](
    graded: Callable[[], Awaitable[V | NoVerdict]], control: Callable[[], Awaitable[bool]]
) -> V | GraderKilled:
    """Grade a candidate until there is a verdict, each try in a fresh sandbox.

    Args:
        graded: one try.
        control: grades what is known to get its verdict, and says whether it did.

    Raises:
        InfrastructureError: no try gave a verdict (``verifier_error``), or as the two say.
    """
    losses = {True: 0, False: 0}
    while True:
        outcome = await graded()
        if not isinstance(outcome, NoVerdict):
            return outcome
        losses[outcome.by_machine] += 1
        if losses[outcome.by_machine] == TRIES:
            break
    if not outcome.by_machine and await control():
        return GraderKilled(f"the tester was taken down, twice: {outcome.why}")
    raise InfrastructureError(f"grading gave no verdict: {outcome.why}", kind=FailureKind.VERIFIER_ERROR)


async def attempt(
    sandbox: Sandbox,
    program: str,
    job: Mapping[str, Any],
    *,
    timeout_s: float,
    root: str,
    doubtful: Callable[[Any], bool],
    before: str = "",
) -> Any | NoVerdict:
    """Run the program once in the given sandbox; returns its verdict.

    Args:
        sandbox: a fresh one with ``sh`` and ``python3``.
        program: source.
        job: what it is told, but for the nonce.
        timeout_s: how long it should take.
        root: a folder of the sandbox that uploads reach.
        doubtful: whether a verdict could be the machine's doing: then the sandbox is looked at before it counts.
        before: what the shell does first.

    Raises:
        AgentError: the candidate used up the sandbox.
    """
    nonce = secrets.token_hex(16)
    try:
        command = before + await _command(sandbox, program, json.dumps({"nonce": nonce, **job}), root)
    except (RuntimeError, OSError, InfrastructureError) as error:
        return NoVerdict(f"{type(error).__name__}: {error}", by_machine=True)
    try:
        result = await sandbox.exec(command, cwd="/", timeout_s=timeout_s + ANSWER_MARGIN_S)
        told = [json.loads(line.removeprefix(nonce)) for line in _lines(result.stdout) if line.startswith(nonce)]
        if len(told) > 1 and not doubtful(told[1]):
            return told[1]
        knows = isinstance(sandbox, HasHealthCheck)
        if isinstance(sandbox, HasHealthCheck):
            await sandbox.check()
    except InfrastructureError as error:
        return NoVerdict(error.reason, by_machine=True)
    except (RuntimeError, OSError) as error:
        return NoVerdict(f"{type(error).__name__}: {error}", by_machine=False)
    if len(told) > 1:
        return told[1]
    why = f"exit code {result.return_code}: {(result.stderr or '').strip()[-500:]}"
    # All that a program said is there if it ended by itself; and one that could not run in a sandbox that lives said
    # nothing.
    complete = result.error_type is None or (knows and result.error_type == "sandbox")
    return NoVerdict(why, by_machine=complete and not told)


def _lines(text: str | None) -> list[str]:
    return (text or "").splitlines()


async def _command(sandbox: Sandbox, program: str, job: str, root: str) -> str:
    """Runs the program with the job as its input, which no command line shows and nothing can read a second time."""
    run = f"python3 -I -c {shlex.quote(program)}"
    if len(run) + len(job) < MAX_COMMAND_CHARS:
        # JSON has neither a line end nor, escaped, anything but ASCII.
        return f"exec {run} <<'{END_OF_JOB}'\n{job}\n{END_OF_JOB}\n"
    path = f"{root.rstrip('/')}/grade-{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory(prefix="prorl-grade-") as folder:
        local = Path(folder, "upload")
        await asyncio.to_thread(local.write_text, job, encoding="utf-8")
        await sandbox.upload(local, path)
    return f"exec < {path} && rm {path} && exec {run}"
