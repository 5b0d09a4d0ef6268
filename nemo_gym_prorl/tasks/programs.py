# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Run an agent program in a session's sandbox, in place of the policy's tool calls.

The program runs as the policy's commands do: same user, folder and variables. It reaches only its rollout's policy.
Its process group ends with the call: at the program's end, at the time limit, or if the call is cancelled. Processes
that left the group end with the sandbox.
"""

from __future__ import annotations

import posixpath
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, cast

from nemo_gym_prorl.failures import FailureKind, InfrastructureError, RolloutError
from nemo_gym_prorl.tasks.sandbox import HasPolicyAccess
from nemo_gym_prorl.tasks.task import RunsScripts


OUTPUT_TAIL_CHARS = 4_000
"""Characters of a program's output that are kept, from its end: enough for an error with its traceback."""

_PROBE_TIMEOUT_S = 30.0  # a shell's start on a loaded machine

_PROBE = """\
home=$HOME
[ -d "$home" ] && [ -w "$home" ] || home=$(mktemp -d) || exit 1
for loader in /lib64/ld-linux-* /lib/ld-linux-*; do [ -e "$loader" ] && echo glibc && break; done || echo musl
printf %s "$home\""""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a program finds in its sandbox.

    Attributes:
        origin: base URL of the policy.
        home: writable HOME folder.
        libc: C library of the image.
    """

    origin: str
    home: str
    libc: Literal["glibc", "musl"]


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run.

    Attributes:
        command: program and arguments.
        env: variables besides those of the policy's commands.
        files: texts by absolute path, written before the start.
    """

    command: Sequence[str]
    env: Mapping[str, str]
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """End of a program.

    Attributes:
        exit_code: exit code as a shell reports it; ``None`` if the time limit or a limit of the sandbox ended it.
        seconds: duration.
        output: end of standard output and error together.
    """

    exit_code: int | None
    seconds: float
    output: str


async def run_program(
    tools: RunsScripts,
    sandbox: HasPolicyAccess,
    policy: tuple[str, str],
    make: Callable[[Surroundings], Program],
    timeout_s: float,
) -> ProgramEnd:
    """Run a program until it ends.

    Args:
        tools: the session's tools.
        sandbox: the session's sandbox.
        policy: URL and key of the rollout's policy. The key stays outside of the sandbox.
        make: creates the program.
        timeout_s: time limit.

    Raises:
        CallerError: the program cannot be made from the row.
        AgentError: the program exceeded a limit of its sandbox.
        InfrastructureError: the sandbox failed.
    """
    probed = await tools.run_script(_PROBE, timeout_s=_PROBE_TIMEOUT_S)
    libc, _, home = (probed.stdout or "").partition("\n")
    if probed.return_code or libc not in ("glibc", "musl"):
        raise InfrastructureError(f"the sandbox runs no shell: {(probed.stderr or '')[-500:]}")
    origin = await sandbox.open_policy(*policy)
    try:
        program = make(Surroundings(origin, home, cast(Literal["glibc", "musl"], libc)))
        start = time.monotonic()
        done = await tools.run_script(script_of(program), timeout_s=timeout_s)
        seconds = round(time.monotonic() - start, 3)
    finally:
        with suppress(RolloutError):  # the end of the sandbox ends the way out, too
            await sandbox.close_policy()
    output = (done.stdout or "")[-OUTPUT_TAIL_CHARS:]
    if done.error_type == "sandbox":
        raise InfrastructureError(f"the program did not run: {done.stderr}", kind=FailureKind.SESSION_LOST)
    return ProgramEnd(None if done.error_type else done.return_code, seconds, output)


def script_of(program: Program) -> str:
    """Return the shell script that writes a program's files and becomes the program."""
    lines = [f"export {name}={shlex.quote(text)}" for name, text in program.env.items()]
    for path, text in program.files.items():
        folder = shlex.quote(posixpath.dirname(path))
        lines.append(f"mkdir -p -- {folder} && printf %s {shlex.quote(text)} > {shlex.quote(path)} || exit 126")
    return "\n".join(["exec 2>&1", *lines, f"exec {shlex.join(program.command)}"])
