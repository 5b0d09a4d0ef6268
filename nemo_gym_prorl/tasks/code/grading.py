# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""From a candidate's source to a grade: one fresh sandbox, in which a grader runs all tests; see :mod:`..trials`.

Where a candidate may have taken its grader down, a control tells whether machine and row are fine: of a program that
does nothing any verdict will do.

A candidate's process is under two filters of system calls, which :mod:`.inside.walls` installs: no new processes
(threads are fine), hence no fork bombs and nothing that outlives a test; no signals; no limits, priorities or tracing
of any process but its own; no IPC objects, which would outlive it, and no sockets but pairs; no changes to what files
*are* (mode, owner, times, attributes), which Landlock does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Literal

from nemo_gym_prorl.failures import AgentError, TaskError
from nemo_gym_prorl.syscall_filter import ALLOW, REFUSE, UNKNOWN, ArgumentRule
from nemo_gym_prorl.syscall_filter import FilterAction as CallVerdict
from nemo_gym_prorl.syscall_filter import compile_filter as filter_program
from nemo_gym_prorl.tasks.code.rows import Problem
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import EXHAUSTED, Grade
from nemo_gym_prorl.tasks.trials import BYTE_ORDER_MARK, Lost, TakenDown, attempt, program, settle


_INSIDE = "nemo_gym_prorl.tasks.code.inside"
_GRADER = (
    f"{_INSIDE}.grader",
    f"{_INSIDE}.walls",
    f"{_INSIDE}.zygote",
    f"{_INSIDE}.checkers",
)
"""What runs in the sandbox, as :func:`.compile_filter` takes it."""

CLOCK_FACTOR = 10
"""All tests may take so much longer by the clock: waiting for a processor is no fault of a candidate's."""

RewardRule = Literal["all", "fraction"]

CHECKER_LIMITS = {"time_s": 10.0, "memory_mib": 1024}
NOTHING = "pass\n"
STACK_KIB = 256 << 10
"""Of the first thread, before the interpreter starts: what deep recursion in C takes."""


class Verdict(StrEnum):
    """Why a candidate earned what it did."""

    PASSED = "passed"
    WRONG_ANSWER = "wrong_answer"
    TIMED_OUT = "timed_out"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    CRASHED = "crashed"
    """It raised, ended with an exit status other than 0, was ended by a signal, or took the grader down with it."""
    NO_SOLUTION = "no_solution"
    """There is no file that can be read, nothing is in it, or it defines no such function."""
    SYNTAX_ERROR = "syntax_error"
    EXHAUSTED = EXHAUSTED
    """The agent, or its solution when it was tested, used up its sandbox's disk, memory or processes."""


@dataclass(frozen=True, slots=True)
class CodeLimits:
    """Bounds of one candidate.

    Attributes:
        time_s: processor time of one test, where the row says nothing, and the most that it may say.
        memory_mib: address space of one test's process, the same.
        total_s: all tests together, without the time for which they waited for a processor.
        output_bytes: longest output of one test.
        file_mib: largest file that a test may write, in MiB.
        threads: how many threads it may have, about.
    """

    time_s: float = 10.0
    memory_mib: int = 1024
    total_s: float = 300.0
    output_bytes: int = 16 << 20
    file_mib: int = 64
    threads: int = 64


OpenSandbox = Callable[[], AbstractAsyncContextManager[Sandbox]]
"""Starts a fresh sandbox and stops it in the end."""


def failed(verdict: Verdict, detail: str = "") -> Grade:
    """A grade of nothing that ran."""
    return Grade(0.0, verdict.value, detail)


async def grade(
    open_sandbox: OpenSandbox, problem: Problem, source: str, limits: CodeLimits, root: str, rule: RewardRule = "all"
) -> Grade:
    """Grade a candidate, each try in a fresh sandbox.

    Args:
        open_sandbox: starts a fresh sandbox with ``sh`` and ``python3`` (3.8 or later).
        problem: what to test with.
        source: the submitted file.
        limits: bounds of the candidate.
        root: a folder of the sandbox that uploads reach.
        rule: ``all``: 1 if all tests pass, and the rest is not run once one fails; ``fraction``: the share that pass.

    Raises:
        TaskError: the row's checker judges nothing.
        InfrastructureError: no sandbox could be had (as ``open_sandbox`` says), or none gave a verdict
            (``verifier_error``).
    """

    async def graded(source: str) -> Grade | Lost:
        async with open_sandbox() as sandbox:
            return await grade_in(sandbox, problem, source, limits, root, rule)

    async def control() -> bool:
        return isinstance(await graded(NOTHING), Grade)

    outcome = await settle(lambda: graded(source), control)
    return failed(Verdict.CRASHED, outcome.why) if isinstance(outcome, TakenDown) else outcome


async def grade_in(
    sandbox: Sandbox, problem: Problem, source: str, limits: CodeLimits, root: str, rule: RewardRule = "all"
) -> Grade | Lost:
    """Grade a candidate once in the given sandbox.

    Raises:
        TaskError: the row's checker judges nothing.
    """
    job = {"source": source.removeprefix(BYTE_ORDER_MARK), "stop_at_failure": rule == "all"}
    job |= _tests(problem, limits)
    try:
        told = await attempt(
            sandbox,
            program(*_GRADER),
            job,
            timeout_s=CLOCK_FACTOR * limits.total_s,
            root=root,
            doubtful=lambda report: bool(report.get("killed")) or report.get("verdict") == Verdict.CRASHED,
            before=f"ulimit -S -s {STACK_KIB} 2>/dev/null; ",
        )
    except AgentError as error:
        return failed(Verdict.EXHAUSTED, error.reason)
    if isinstance(told, Lost):
        return told
    if "row" in told:
        raise TaskError(f"verifier_metadata.checker: {told['row']}")
    return _grade(told, rule)


def _tests(problem: Problem, limits: CodeLimits) -> dict[str, Any]:
    """What the grader is told of a problem."""
    bounds = {**asdict(limits), "filters": filters()}
    for name, own in (("time_s", problem.time_limit_s), ("memory_mib", problem.memory_limit_mib)):
        bounds[name] = min(bounds[name], own or bounds[name])
    return {
        "function": problem.function,
        "tests": [{"input": test.input, "expected": test.expected} for test in problem.tests],
        "checker": problem.checker,
        "checker_limits": CHECKER_LIMITS,
        "limits": bounds,
        "total_s": limits.total_s,
    }


def _grade(told: Mapping[str, Any], rule: RewardRule) -> Grade:
    verdict, tests = Verdict(told["verdict"]), told["tests"]
    reward = tests["passed"] / tests["total"] if rule == "fraction" else float(verdict is Verdict.PASSED)
    return Grade(reward, verdict.value, told["detail"], {"tests": tests})


CLONE_THREAD = 0x10000
AF_UNIX = 1
LAST = 466
"""``removexattrat``, of Linux 6.13; what came later has not been judged."""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""By ``os.uname().machine``, as the filter is told."""

COMMON = {
    "clone3": 435, "pidfd_open": 434, "pidfd_send_signal": 424, "pidfd_getfd": 438, "process_madvise": 440,
    "process_mrelease": 448, "io_uring_setup": 425, "fchmodat2": 452, "setxattrat": 463, "removexattrat": 466,
}  # fmt: skip

CALLS = {
    "x86_64": {
        "fork": 57, "vfork": 58, "clone": 56, "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129,
        "rt_tgsigqueueinfo": 297, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
        "prlimit64": 302, "setpriority": 141, "ioprio_set": 251, "sched_setaffinity": 203, "sched_setscheduler": 144,
        "sched_setparam": 142, "sched_setattr": 314, "fcntl": 72, "ioctl": 16, "shmget": 29, "semget": 64,
        "msgget": 68, "mq_open": 240, "chmod": 90, "fchmod": 91, "fchmodat": 268, "chown": 92, "fchown": 93,
        "lchown": 94, "fchownat": 260, "utime": 132, "utimes": 235, "utimensat": 280, "futimesat": 261,
        "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198,
        "fremovexattr": 199, "add_key": 248, "request_key": 249, "keyctl": 250, "userfaultfd": 323, "bpf": 321,
        "perf_event_open": 298, "unshare": 272, "setns": 308, "truncate": 76, "migrate_pages": 256, "move_pages": 279,
        "socket": 41, "socketpair": 53,
    },
    "aarch64": {
        "clone": 220, "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240,
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "prlimit64": 261,
        "setpriority": 140, "ioprio_set": 30, "sched_setaffinity": 122, "sched_setscheduler": 119,
        "sched_setparam": 118, "sched_setattr": 274, "fcntl": 25, "ioctl": 29, "shmget": 194, "semget": 190,
        "msgget": 186, "mq_open": 180, "fchmod": 52, "fchmodat": 53, "fchown": 55, "fchownat": 54, "utimensat": 88,
        "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16,
        "add_key": 217, "request_key": 218, "keyctl": 219, "userfaultfd": 282, "bpf": 280, "perf_event_open": 241,
        "unshare": 97, "setns": 268, "truncate": 45, "migrate_pages": 238, "move_pages": 239,
        "socket": 198, "socketpair": 199,
    },
}  # fmt: skip
"""Numbers of the system calls that the filters have something to say about."""

_ONESELF = ArgumentRule(0, frozenset({0}), ALLOW, REFUSE)
"""For calls whose first argument is a process."""

_VERDICTS: dict[str, CallVerdict] = {
    **dict.fromkeys(
        ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"), _ONESELF
    ),
    # Of a user or a group it would be the grader's, too.
    "setpriority": ArgumentRule(0, frozenset({0}), ArgumentRule(1, frozenset({0}), ALLOW, REFUSE), REFUSE),
    # F_SETOWN, F_SETSIG, F_SETOWN_EX: have the kernel send a signal to somebody.
    "fcntl": ArgumentRule(1, frozenset({8, 10, 15}), REFUSE, ALLOW),
    # FIOSETOWN, SIOCSPGRP, TIOCSTI.
    "ioctl": ArgumentRule(1, frozenset({0x8901, 0x8902, 0x5412}), REFUSE, ALLOW),
    "socketpair": ArgumentRule(0, frozenset({AF_UNIX}), ALLOW, REFUSE),
    "clone3": UNKNOWN,  # then the C library uses clone
    "clone": ALLOW,  # the zygote's forks
}
"""Of calls that are not simply refused."""


@cache
def filters() -> dict[str, list[str]]:
    """By machine two filters in hexadecimal: a zygote's, and one more for a child, in which only threads are begun."""
    found = {}
    for machine, architecture in ARCHITECTURES.items():
        calls = COMMON | CALLS[machine]
        strict = {number: _VERDICTS.get(name, REFUSE) for name, number in calls.items()}
        lone = {calls["clone"]: ArgumentRule(0, frozenset({CLONE_THREAD}), ALLOW, REFUSE, mask=CLONE_THREAD)}
        found[machine] = [filter_program(architecture, verdicts, LAST).hex() for verdicts in (strict, lone)]
    return found
