# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Grade a candidate, the policy's source: a grader program runs all tests in a fresh sandbox.

A failure that is not the candidate's is an :class:`InfrastructureError` and never a reward. A candidate can end its
sandbox, so a run without a verdict is attributed as follows:

- A failure before the candidate's source runs is not the candidate's. The grader reports when the source starts.
- A failure that :meth:`.Sandbox.check` attributes to the machine is not the candidate's. Sandboxed code cannot cause
  such a report.
- Any other failure may be the candidate's. The candidate is graded again. After a second failure a no-op program is
  graded as control; if the control gets a verdict, the candidate is to blame.

:mod:`.inside.process_hardening` installs two seccomp filters in a candidate's process. The filters refuse:

- new processes (threads are allowed), so fork bombs and processes that outlive a test are impossible;
- signals, and limits, priorities or tracing of other processes;
- IPC objects, which would outlive the process, and sockets other than socket pairs;
- changes of file metadata (mode, owner, times, attributes), which Landlock does not control.
"""

from __future__ import annotations

import json
import secrets
import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from nemo_gym_prorl.failures import AgentError, FailureKind, InfrastructureError, TaskError
from nemo_gym_prorl.syscall_filter import ALLOW, REFUSE, UNKNOWN, ArgumentRule
from nemo_gym_prorl.syscall_filter import FilterAction as CallVerdict
from nemo_gym_prorl.syscall_filter import compile_filter as filter_program
from nemo_gym_prorl.tasks.code.code_rows import CodeProblem
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import EXHAUSTED, Grade


BYTE_ORDER_MARK = "\ufeff"
"""Python ignores the mark at the start of a file but rejects it at the start of a string."""

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
    """Return the source of a program that needs no other files, since sandboxes lack this package.

    Args:
        main: full name of the module to run.
        modules: full names of the modules that ``main`` imports, each after its own dependencies.
    """
    loads = [f"load({name!r}, {_read(name)!r})\n" for name in modules]
    return "".join([_LOADER, *loads, f"exec(compile({_read(main)!r}, 'grader', 'exec'))\n"])


def _read(name: str) -> str:
    package, _, module = name.rpartition(".")
    return files(package).joinpath(f"{module}.py").read_text(encoding="utf-8")


TRIES = 2
"""Maximum runs without a verdict, counted separately for the two possible causes (candidate and machine)."""

ANSWER_MARGIN_S = 20.0
"""Seconds that a run may take beyond its own time limit, for starting and reporting."""

MAX_COMMAND_CHARS = 100_000
"""Longer commands get the job from a file: the kernel limits an argument to 128 KiB."""

END_OF_JOB = "END-OF-JOB"


@dataclass(frozen=True, slots=True)
class NoVerdict:
    """A grading run without a verdict.

    Attributes:
        why: human-readable reason.
        by_machine: whether the candidate cannot have caused the failure.
    """

    why: str
    by_machine: bool


_INSIDE = "nemo_gym_prorl.tasks.code.inside"
_GRADER = (
    f"{_INSIDE}.grader",
    f"{_INSIDE}.process_hardening",
    f"{_INSIDE}.zygote",
    f"{_INSIDE}.checkers",
)
"""Modules of the grader, as arguments of :func:`.program`."""

CLOCK_FACTOR = 10
"""Wall-clock limit of all tests as a multiple of ``total_s``: waiting for a processor is not the candidate's fault."""

RewardRule = Literal["all", "fraction"]

CHECKER_LIMITS = {"time_s": 10.0, "memory_mib": 1024}
"""Limits of one call of a row's checker program: it only compares outputs."""

NO_OP_PROGRAM = "pass\n"
STACK_KIB = 256 << 10
"""Stack limit of the main thread, set before the interpreter starts, for deep recursion in C."""


class CodeVerdict(StrEnum):
    """Verdicts on programming problems."""

    PASSED = "passed"
    WRONG_ANSWER = "wrong_answer"
    TIMED_OUT = "timed_out"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    CRASHED = "crashed"
    """An exception, a non-zero exit status, a fatal signal, or termination of the grader."""
    NO_SOLUTION = "no_solution"
    """The solution is missing, unreadable or empty, or does not define the function."""
    SYNTAX_ERROR = "syntax_error"
    EXHAUSTED = EXHAUSTED
    """The agent, or its solution during tests, exceeded the sandbox's disk, memory or process limit."""


@dataclass(frozen=True, slots=True)
class CodeLimits:
    """Limits of one candidate.

    Attributes:
        time_s: CPU seconds of one test: the default and the maximum of a row's own limit.
        memory_mib: address space of one test's process in MiB: the default and the maximum of a row's own limit.
        total_s: seconds of all tests, without time waiting for a processor.
        output_bytes: maximum output of one test.
    """

    time_s: float = 10.0
    memory_mib: int = 1024
    total_s: float = 300.0
    output_bytes: int = 16 << 20


OpenSandbox = Callable[[], AbstractAsyncContextManager[Sandbox]]


def failed(verdict: CodeVerdict, detail: str = "") -> Grade:
    """Return a grade of 0 for a candidate whose tests did not run to a report."""
    return Grade(0.0, verdict.value, detail)


async def grade(
    open_sandbox: OpenSandbox,
    problem: CodeProblem,
    source: str,
    limits: CodeLimits,
    root: str,
    rule: RewardRule = "all",
) -> Grade:
    """Grade a candidate, in several fresh sandboxes if a run gives no verdict.

    Args:
        open_sandbox: starts a fresh sandbox with ``sh`` and ``python3`` (3.8 or later).
        limits: limits of the tests; the problem's own limits may only be lower.
        root: folder in the sandbox for uploads.
        rule: ``all`` gives 1 if all tests pass and stops at the first failure; ``fraction`` gives the share of passed
            tests.

    Raises:
        TaskError: the row's checker program does not work.
        InfrastructureError: ``verifier_error``: no run gave a verdict; or an error of ``open_sandbox``.
    """

    async def graded(source: str) -> Grade | NoVerdict:
        async with open_sandbox() as sandbox:
            return await grade_in(sandbox, problem, source, limits, root, rule)

    losses: Counter[bool] = Counter()
    while True:
        outcome = await graded(source)
        if isinstance(outcome, Grade):
            return outcome
        losses[outcome.by_machine] += 1
        if losses[outcome.by_machine] == TRIES:
            break
    if not outcome.by_machine and isinstance(await graded(NO_OP_PROGRAM), Grade):
        return failed(CodeVerdict.CRASHED, f"the solution terminated its grader {TRIES} times: {outcome.why}")
    reason = f"grading gave no verdict in {TRIES} runs: {outcome.why}"
    raise InfrastructureError(reason, kind=FailureKind.VERIFIER_ERROR)


async def grade_in(
    sandbox: Sandbox, problem: CodeProblem, source: str, limits: CodeLimits, root: str, rule: RewardRule = "all"
) -> Grade | NoVerdict:
    """Grade a candidate once in the given sandbox; arguments as of :func:`grade`.

    Raises:
        TaskError: the row's checker program does not work.
    """
    nonce = secrets.token_hex(16)
    job = {"nonce": nonce, "source": source.removeprefix(BYTE_ORDER_MARK), "stop_at_failure": rule == "all"}
    try:
        command = await _command(sandbox, json.dumps(job | _tests(problem, limits)), root)
    except (RuntimeError, OSError, InfrastructureError) as error:
        return NoVerdict(f"{type(error).__name__}: {error}", by_machine=True)
    except AgentError as error:
        return failed(CodeVerdict.EXHAUSTED, error.reason)
    try:
        result = await sandbox.exec(command, cwd="/", timeout_s=CLOCK_FACTOR * limits.total_s + ANSWER_MARGIN_S)
        output = (result.stdout or "").splitlines()
        messages = [json.loads(line.removeprefix(nonce)) for line in output if line.startswith(nonce)]
        report = messages[1] if len(messages) > 1 else None
        if report is None or report.get("killed") or report.get("verdict") == CodeVerdict.CRASHED:
            await sandbox.check()  # the machine may be the cause
    except AgentError as error:
        return failed(CodeVerdict.EXHAUSTED, error.reason)
    except InfrastructureError as error:
        return NoVerdict(error.reason, by_machine=True)
    except (RuntimeError, OSError) as error:
        return NoVerdict(f"{type(error).__name__}: {error}", by_machine=False)
    if report is None:
        why = f"exit code {result.return_code}: {(result.stderr or '').strip()[-500:]}"
        # If the output is complete and has no message, the candidate's source never ran.
        return NoVerdict(why, by_machine=result.error_type in (None, "sandbox") and not messages)
    if "row" in report:
        raise TaskError(f"verifier_metadata.checker: {report['row']}")
    return _grade(report, rule)


async def _command(sandbox: Sandbox, job: str, root: str) -> str:
    """Return a command that runs the grader with the job on standard input.

    The running grader's command line does not contain the job, and a candidate cannot read the input again.
    """
    stack, run = f"ulimit -S -s {STACK_KIB} 2>/dev/null; ", f"python3 -I -c {shlex.quote(program(*_GRADER))}"
    if len(run) + len(job) < MAX_COMMAND_CHARS:
        # The JSON is one line of ASCII, so the job cannot end the here-document.
        return f"{stack}exec {run} <<'{END_OF_JOB}'\n{job}\n{END_OF_JOB}\n"
    path = f"{root.rstrip('/')}/grade-{secrets.token_hex(8)}"
    await sandbox.write_file(path, job.encode())
    return f"{stack}exec < {path} && rm {path} && exec {run}"


def _tests(problem: CodeProblem, limits: CodeLimits) -> dict[str, Any]:
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


def _grade(reply: Mapping[str, Any], rule: RewardRule) -> Grade:
    verdict, tests = CodeVerdict(reply["verdict"]), reply["tests"]
    reward = tests["passed"] / tests["total"] if rule == "fraction" else float(verdict is CodeVerdict.PASSED)
    return Grade(reward, verdict.value, reply["detail"], {"tests": tests})


CLONE_THREAD = 0x10000
AF_UNIX = 1
LAST_SYSCALL = 466
"""Newest reviewed system call, ``removexattrat`` of Linux 6.13. Newer system calls fail with ``ENOSYS``."""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Audit architecture by ``os.uname().machine``."""

COMMON_SYSCALLS = {
    "clone3": 435, "pidfd_open": 434, "pidfd_send_signal": 424, "pidfd_getfd": 438, "process_madvise": 440,
    "process_mrelease": 448, "io_uring_setup": 425, "fchmodat2": 452, "setxattrat": 463, "removexattrat": 466,
}  # fmt: skip

SYSCALLS = {
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
"""Numbers of the system calls that the filters restrict."""

_OWN_PROCESS_ONLY = ArgumentRule(0, frozenset({0}), ALLOW, REFUSE)
"""Rule for system calls whose first argument is a process id: 0 is the caller."""

_SYSCALL_RULES: dict[str, CallVerdict] = {
    **dict.fromkeys(
        ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"), _OWN_PROCESS_ONLY
    ),
    # Only the caller's own priority may be set: that of a process group or user would include the grader's.
    "setpriority": ArgumentRule(0, frozenset({0}), ArgumentRule(1, frozenset({0}), ALLOW, REFUSE), REFUSE),
    # F_SETOWN, F_SETSIG, F_SETOWN_EX make the kernel send signals to another process.
    "fcntl": ArgumentRule(1, frozenset({8, 10, 15}), REFUSE, ALLOW),
    # FIOSETOWN and SIOCSPGRP direct signals to another process, and TIOCSTI injects terminal input.
    "ioctl": ArgumentRule(1, frozenset({0x8901, 0x8902, 0x5412}), REFUSE, ALLOW),
    "socketpair": ArgumentRule(0, frozenset({AF_UNIX}), ALLOW, REFUSE),
    "clone3": UNKNOWN,  # seccomp cannot read the flags in memory; ENOSYS makes the C library use clone
    "clone": ALLOW,  # the zygote forks; the children's own filter allows threads only
}
"""Rules of restricted system calls; others in :data:`SYSCALLS` and :data:`COMMON_SYSCALLS` are refused."""


@cache
def filters() -> dict[str, list[str]]:
    """Return two seccomp filters by machine architecture, as hexadecimal BPF.

    The first filter is the zygote's. Children add the second filter, which forbids new processes and allows threads.
    """
    found = {}
    for machine, architecture in ARCHITECTURES.items():
        calls = COMMON_SYSCALLS | SYSCALLS[machine]
        strict = {number: _SYSCALL_RULES.get(name, REFUSE) for name, number in calls.items()}
        lone = {calls["clone"]: ArgumentRule(0, frozenset({CLONE_THREAD}), ALLOW, REFUSE, mask=CLONE_THREAD)}
        found[machine] = [filter_program(architecture, verdicts, LAST_SYSCALL).hex() for verdicts in (strict, lone)]
    return found
