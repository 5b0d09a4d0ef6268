# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A warm interpreter that forks a process for each test, in which the submitted source runs; and that process.

The *zygote* is forked from the grader before the grader has read its job. It is told the source and its limits, and
never an input: these come as open files, which it hands to its child unread. It runs nothing of the candidate's; it
imports what the source mentions of the standard library, compiles the source and waits. Each *child* runs the source
from its first line, behind :mod:`.walls`, with its own input and output as the only files open, and its end is the
test's: it can't have children of its own.

What a child says of itself, on descriptor 3, is the candidate's word: an answer to be compared, or why it failed.
"""

from __future__ import annotations

import array
import ast
import atexit
import builtins
import fcntl
import gc
import json
import os
import resource
import socket
import sys
import types
from typing import Any, NoReturn

from nemo_gym_prorl.tasks.code.inside import process_hardening


MESSAGE_BYTES = 1 << 16
STACK_BYTES = 256 << 20
THREAD_STACK_BYTES = 8 << 20
RECURSION_LIMIT = 50_000
"""Gym's grader has the same, so data made with it needs no ``setrecursionlimit``."""

MAX_INT_DIGITS = 1 << 20
"""Longest integer that a program may print or read; the same."""

MAX_OPEN_FILES = 256
"""Of a child; nothing that it inherits has a higher number."""

REPORT = 3
"""Descriptor on which a child reports."""

WHY_CHARS = 300

ADD_SEALS = 1033
"""Python 3.8 has no name for it. All four: no seal, no shrinking, no growing, no writing any more."""

WARM = {
    "abc", "array", "ast", "bisect", "calendar", "cmath", "collections", "contextlib", "copy", "dataclasses",
    "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json",
    "math", "numbers", "numpy", "operator", "os", "pprint", "queue", "random", "re", "statistics", "string",
    "struct", "sys", "textwrap", "threading", "time", "timeit", "traceback", "types", "typing", "unicodedata",
    "zlib",
}  # fmt: skip
"""Modules that are imported once for all tests, if the source mentions them."""

PRELUDE_MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
"""Modules whose names, and which themselves, a source may use without an import, as on the sites that the data sets
come from; of one name the last module's counts."""


class ChannelClosed(Exception):
    """The other side of a channel has gone."""


def send(channel: socket.socket, message: Any, descriptors: tuple[int, ...] = ()) -> None:
    """One message, with open files."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    channel.sendmsg([json.dumps(message).encode()], rights)


def receive(channel: socket.socket) -> tuple[Any, list[int]]:
    """The next message and its open files.

    Raises:
        ChannelClosed: there is none.
    """
    try:
        data, rights, _, _ = channel.recvmsg(MESSAGE_BYTES, 1024)
    except ConnectionError as error:
        raise ChannelClosed(str(error)) from None
    if not data:
        raise ChannelClosed("the other side has gone")
    descriptors = array.array("i")
    for _, _, received in rights:
        descriptors.frombytes(received)
    return json.loads(data), list(descriptors)


def write_all(descriptor: int, data: bytes) -> None:
    """All of it, however much at once is taken."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def file_of(data: bytes) -> int:
    """A file in memory that only says what it holds, whoever has it."""
    writable = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    write_all(writable, data)
    fcntl.fcntl(writable, ADD_SEALS, 0b1111)
    readable = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    os.close(writable)
    return readable


# --- the zygote ---


def mentioned(tree: ast.AST) -> list[str]:
    """The modules that a source imports, as far as they are safe to import ahead."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return sorted(names & WARM)


def uses_unknown_names(tree: ast.AST) -> bool:
    """Whether a source reads a name that it binds nowhere and that is no builtin."""
    known = set(dir(builtins)) | {"__file__"}
    read: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else known).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            known.add(node.name)
        elif isinstance(node, ast.arg):
            known.add(node.arg)
        elif isinstance(node, ast.alias):
            known.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            known.add(node.name)
    return not read <= known


def prelude() -> dict[str, Any]:
    """The names that a source may take for granted."""
    granted: dict[str, Any] = {}
    for name in PRELUDE_MODULES:
        exec(f"from {name} import *", granted)
    for name in PRELUDE_MODULES:
        granted[name] = __import__(name)
    return granted


def get_ready(job: dict[str, Any]) -> tuple[types.CodeType, dict[str, Any]]:
    """Compile the source; returns it with the names that it may take for granted.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it is no Python.
    """
    tree = ast.parse(job["source"], job["name"])
    granted = prelude() if uses_unknown_names(tree) else {}
    for name in mentioned(tree):
        try:
            __import__(name)
        except ImportError:
            continue  # the source will say so itself
    code = compile(tree, job["name"], "exec", dont_inherit=True)
    return code, granted


def zygote_main(channel: socket.socket) -> None:
    """Be told a source, then fork a child for each message until the grader has gone."""
    _, [given] = receive(channel)
    with os.fdopen(given, "rb") as file:
        job = json.loads(file.read())
    strict, alone = map(bytes.fromhex, job["filters"][os.uname().machine])
    process_hardening.drop_privileges()
    process_hardening.end_with_parent()
    landlock = process_hardening.landlock_version()
    if landlock:
        process_hardening.write_only_in(job["folder"], landlock)
    process_hardening.filter_calls(strict)
    os.chdir(job["folder"])
    os.environ["TMPDIR"] = job["folder"]
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's: one for each processor takes all the address space there is
    for what, value in (
        (resource.RLIMIT_AS, job["memory_mib"] << 20),
        (resource.RLIMIT_FSIZE, job["file_mib"] << 20),
        (resource.RLIMIT_NPROC, job["threads"]),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        process_hardening.limit(what, value)
    # Many a program begins by raising this one; its memory is bounded as it is.
    process_hardening.limit(resource.RLIMIT_STACK, STACK_BYTES, for_good=False)
    process_hardening.limit_thread_stacks(THREAD_STACK_BYTES)
    try:
        code, granted = get_ready(job)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        send(channel, {"refused": f"{type(error).__name__}: {error}"[:WHY_CHARS]})
        return
    open_standard_files()
    if granted:
        granted.update(stdin=sys.stdin, stdout=sys.stdout, stderr=sys.stderr)
    gc.collect()
    gc.freeze()
    send(channel, {"ready": landlock})
    while True:
        try:
            _, descriptors = receive(channel)
        except ChannelClosed:
            return
        pid = os.fork()
        if pid == 0:
            be_a_child(channel, job, code, granted, alone, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        send(channel, pid)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        waited_s = waiting_s(pid)
        _, status, usage = os.wait4(pid, 0)
        send(channel, [status, usage.ru_utime + usage.ru_stime, waited_s, usage.ru_maxrss // 1024])


def waiting_s(pid: int) -> float:
    """How long a process was ready to run but had no processor, in seconds; 0 where the kernel does not count it."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


class Zygote:
    """The grader's end of one."""

    def __init__(self) -> None:
        self.channel, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            try:
                os.setsid()
                # Above what children have of their own.
                channel = socket.socket(fileno=os.dup2(channel.detach(), MAX_OPEN_FILES - 1))
                null = os.open(os.devnull, os.O_RDWR)
                for standard in range(3):
                    os.dup2(null, standard)
                os.closerange(3, channel.fileno())
                os.closerange(channel.fileno() + 1, process_hardening.MAX_FILES)
                zygote_main(channel)
            finally:
                os._exit(0)
        channel.close()


# --- a child ---


def be_a_child(
    channel: socket.socket,
    job: dict[str, Any],
    code: types.CodeType,
    granted: dict[str, Any],
    alone: bytes,
    descriptors: list[int],
) -> NoReturn:
    """Run one test; there is no way back into the zygote's program."""
    status = 1
    try:
        os.setsid()
        process_hardening.end_with_parent()
        channel.close()
        for standard, descriptor in zip((0, 1, REPORT), descriptors):  # noqa: B905 - Python 3.8
            os.dup2(descriptor, standard)
        os.closerange(REPORT + 1, MAX_OPEN_FILES)
        process_hardening.limit(resource.RLIMIT_CPU, job["cpu_s"])
        process_hardening.filter_calls(alone)
        status = (call_function if job["function"] else run_program)(job, code, granted)
    finally:
        os._exit(status)


def report(kind: str, value: Any) -> None:
    """Say what became of it."""
    write_all(REPORT, json.dumps([kind, value], default=of_numpy).encode())


def of_numpy(value: Any) -> Any:
    """A number of numpy's, which is equal to Python's but none of JSON's."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def report_error(error: BaseException) -> None:
    """Say which exception ended it."""
    kind = "memory" if isinstance(error, MemoryError) else "crashed"
    report(kind, f"{type(error).__name__}: {str(error)[:WHY_CHARS]}")


def main_module(name: str, file: str, granted: dict[str, Any]) -> types.ModuleType:
    """The module in which the source runs. What it may take for granted stands behind it, as builtins do: in the
    module is only what the source put there."""
    module = types.ModuleType(name)
    behind = {**vars(builtins), **granted} if granted else builtins
    module.__dict__.update(__name__=name, __file__=file, __builtins__=behind)
    sys.modules[name] = module
    sys.argv = [file]
    sys.setrecursionlimit(RECURSION_LIMIT)
    allow_long_integers(MAX_INT_DIGITS)
    return module


def allow_long_integers(digits: int) -> None:
    """Lift Python's bound on the digits of an integer that is read or printed, where it has one (3.11, and later
    releases of versions before)."""
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(digits)


def open_standard_files() -> None:
    """As a fresh interpreter has them, over files of the kinds that tests will put there."""
    descriptors = (file_of(b""), os.pipe()[1])
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        file = open(descriptor, mode, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)


def run_program(job: dict[str, Any], code: types.CodeType, granted: dict[str, Any]) -> int:
    """Run the source as a program; returns its exit status."""
    main_module("__main__", job["name"], granted)
    status = 0
    try:
        exec(code, sys.modules["__main__"].__dict__)
    except SystemExit as error:
        status = 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1
        if status:
            report_error(error)
    except BaseException as error:
        status = 1
        report_error(error)
    try:
        finish()
    except BaseException as error:
        status = status or 1
        report_error(error)
    return status


def finish() -> None:
    """What an interpreter does at its end, as far as output depends on it. What only the program's module holds goes
    with it, so that a ``__del__`` still finds the names that it uses."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stdout = sys.__stdout__
    sys.modules.pop("__main__", None)
    gc.collect()  # files that nobody closed write what they hold
    if sys.__stdout__ is not None:
        sys.__stdout__.flush()


def call_function(job: dict[str, Any], code: types.CodeType, granted: dict[str, Any]) -> int:
    """Call the function with the input's values; returns the exit status."""
    module = main_module("solution", job["name"], granted)
    with open(0, encoding="utf-8", closefd=False) as file:
        arguments = json.loads(file.read())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    try:
        exec(code, module.__dict__)
        function = find_function(module, job["function"])
        if function is None:
            report("no_solution", f"{job['name']} defines no function {job['function']}")
            return 1
        answer = function(*arguments)
    except BaseException as error:
        report_error(error)
        return 1
    try:
        report("returned", answer)
    except (TypeError, ValueError, RecursionError) as error:
        report("no_data", f"{type(error).__name__}: {error}"[:WHY_CHARS])
    return 0


def find_function(module: types.ModuleType, name: str) -> Any:
    """The function of that name: of the module, or of an object of its class ``Solution``."""
    found = module.__dict__.get(name)
    if found is None and isinstance(solution := module.__dict__.get("Solution"), type):
        found = getattr(solution(), name, None)
    return found if callable(found) else None
