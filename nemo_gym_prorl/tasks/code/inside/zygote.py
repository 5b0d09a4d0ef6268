# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Zygote: a warm interpreter that forks one child per test.

The *zygote* is forked from the grader before the grader reads its job. The zygote receives the source and the limits.
Inputs arrive as descriptors, which the zygote passes to its child unread. The zygote never runs candidate code: the
zygote imports the modules of :data:`WARM` that the source imports, compiles the source and waits.

Each *child* runs the source from its first line under :mod:`.process_hardening`, with its own input and output as its
only open files. A child cannot fork, so the test ends with the child.

A child's report on descriptor 3 is untrusted: an answer to compare, or the reason of a failure.
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


MESSAGE_BYTES = 1 << 16  # of one message, which only carries exit statuses, names and short errors
STACK_BYTES = 256 << 20  # of a child's main thread, enough for RECURSION_LIMIT
THREAD_STACK_BYTES = 8 << 20  # Linux' usual default; larger stacks would exhaust the address space
RECURSION_LIMIT = 50_000
"""Recursion limit of Gym's grader: its data sets rely on this value."""

MAX_INT_DIGITS = 1 << 20
"""Maximum digits of integers that a program may print or read, as in Gym's grader."""

FILE_BYTES = 64 << 20  # largest file that a test may write
THREADS = 64  # approximate, since RLIMIT_NPROC counts all processes of the user

MAX_OPEN_FILES = 256
"""Limit on a child's open files; all inherited descriptors are lower."""

REPORT = 3
"""Descriptor of a child's report."""

WHY_CHARS = 300  # characters of the reason of a failure, so that a message stays below MESSAGE_BYTES

APPLIED: dict[str, Any] = {"len": len, "list": list, "set": lambda value: sorted(set(value)), "sorted": sorted}
"""Builtins that a checker may apply to a function's result; JSON has no sets."""

ADD_SEALS = 1033
"""``F_ADD_SEALS``, missing in Python 3.8. All four seals make a file immutable."""

WARM = {
    "abc", "array", "ast", "bisect", "calendar", "cmath", "collections", "contextlib", "copy", "dataclasses",
    "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json",
    "math", "numbers", "numpy", "operator", "os", "pprint", "queue", "random", "re", "statistics", "string",
    "struct", "sys", "textwrap", "threading", "time", "timeit", "traceback", "types", "typing", "unicodedata",
    "zlib",
}  # fmt: skip
"""Modules that the zygote imports once for all tests, if the source imports them."""

PRELUDE_MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
"""Modules available to a source without an import, with all their names, as on the sites of the data sets. Later
modules override names of earlier ones.
"""


class ChannelClosed(Exception):
    """The peer of a channel has closed it."""


def send(channel: socket.socket, message: Any, descriptors: tuple[int, ...] = ()) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    channel.sendmsg([json.dumps(message).encode()], rights)


def receive(channel: socket.socket) -> tuple[Any, list[int]]:
    """Receive the next message and its file descriptors.

    Raises:
        ChannelClosed: the peer has closed the channel.
    """
    try:
        data, rights, _, _ = channel.recvmsg(MESSAGE_BYTES, 1024)
    except ConnectionError as error:
        raise ChannelClosed(str(error)) from None
    if not data:
        raise ChannelClosed("the peer has closed the channel")
    descriptors = array.array("i")
    for _, _, received in rights:
        descriptors.frombytes(received)
    return json.loads(data), list(descriptors)


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def file_of(data: bytes) -> int:
    """Return a read-only descriptor of a sealed in-memory file that contains ``data``."""
    writable = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    write_all(writable, data)
    fcntl.fcntl(writable, ADD_SEALS, 0b1111)
    readable = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    os.close(writable)
    return readable


def warm_imports(tree: ast.AST) -> list[str]:
    """Return the modules of :data:`WARM` that a source imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return sorted(names & WARM)


def uses_unknown_names(tree: ast.AST) -> bool:
    """Return whether a source uses a name that it never binds and that is no builtin."""
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
    """Return values of the names that a source may use without an import; see :data:`PRELUDE_MODULES`."""
    prelude_names: dict[str, Any] = {}
    for name in PRELUDE_MODULES:
        exec(f"from {name} import *", prelude_names)
    for name in PRELUDE_MODULES:
        prelude_names[name] = __import__(name)
    return prelude_names


def compile_source(job: dict[str, Any]) -> tuple[types.CodeType, dict[str, Any]]:
    """Compile the source and import its modules. Return the code, and the prelude if the source uses unknown names.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: the source is not valid Python.
    """
    tree = ast.parse(job["source"], job["name"])
    prelude_names = prelude() if uses_unknown_names(tree) else {}
    for name in warm_imports(tree):
        try:
            __import__(name)
        except ImportError:
            continue  # the source's import statement raises the error in the child
    code = compile(tree, job["name"], "exec", dont_inherit=True)
    return code, prelude_names


def zygote_main(channel: socket.socket) -> None:
    """Compile a source, then fork a child for each message until the grader ends."""
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
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # one thread per processor would exhaust the address space
    for what, value in (
        (resource.RLIMIT_AS, job["memory_mib"] << 20),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NPROC, THREADS),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        process_hardening.limit(what, value)
    # Only the soft limit is set, since many programs raise their stack limit; memory is limited separately.
    process_hardening.limit(resource.RLIMIT_STACK, STACK_BYTES, for_good=False)
    process_hardening.limit_thread_stacks(THREAD_STACK_BYTES)
    send(channel, {"limited": True})  # an earlier end of the zygote is the machine's failure, a later one the source's
    try:
        code, prelude_names = compile_source(job)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        send(channel, {"refused": f"{type(error).__name__}: {error}"[:WHY_CHARS]})
        return
    open_standard_files()
    if prelude_names:
        prelude_names.update(stdin=sys.stdin, stdout=sys.stdout, stderr=sys.stderr)
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
            run_child(channel, job, code, prelude_names, alone, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        send(channel, pid)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        waited_s = waiting_s(pid)
        _, status, usage = os.wait4(pid, 0)
        send(channel, [status, usage.ru_utime + usage.ru_stime, waited_s, usage.ru_maxrss // 1024])


def waiting_s(pid: int) -> float:
    """Return the seconds that a process waited for a processor; 0 if the kernel does not count them."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


class Zygote:
    """Handle of a zygote in the grader; the constructor forks the zygote."""

    def __init__(self) -> None:
        self.channel, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            try:
                os.setsid()
                # The channel gets a high number, since the zygote replaces or closes all lower descriptors.
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


def run_child(
    channel: socket.socket,
    job: dict[str, Any],
    code: types.CodeType,
    prelude_names: dict[str, Any],
    alone: bytes,
    descriptors: list[int],
) -> NoReturn:
    """Run one test in a child and exit; never returns into the zygote's code."""
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
        status = (call_function if job["function"] else run_program)(job, code, prelude_names)
    finally:
        os._exit(status)


def report(kind: str, value: Any) -> None:
    write_all(REPORT, json.dumps([kind, value], default=of_numpy).encode())


def of_numpy(value: Any) -> Any:
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def report_error(error: BaseException) -> None:
    kind = "memory" if isinstance(error, MemoryError) else "crashed"
    report(kind, f"{type(error).__name__}: {str(error)[:WHY_CHARS]}")


def main_module(name: str, file: str, prelude_names: dict[str, Any]) -> types.ModuleType:
    """Create the module in which the source runs. Prelude names are provided like builtins, so the module's own names
    stay separate.
    """
    module = types.ModuleType(name)
    behind = {**vars(builtins), **prelude_names} if prelude_names else builtins
    module.__dict__.update(__name__=name, __file__=file, __builtins__=behind)
    sys.modules[name] = module
    sys.argv = [file]
    sys.setrecursionlimit(RECURSION_LIMIT)
    allow_long_integers(MAX_INT_DIGITS)
    return module


def allow_long_integers(digits: int) -> None:
    """Raise this process' limit on the digits of integers; no-op in Python versions without a limit."""
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(digits)


def open_standard_files() -> None:
    """Reopen the standard streams on a file (input) and a pipe (output), which children replace by their own."""
    descriptors = (file_of(b""), os.pipe()[1])
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        file = open(descriptor, mode, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)


def run_program(job: dict[str, Any], code: types.CodeType, prelude_names: dict[str, Any]) -> int:
    main_module("__main__", job["name"], prelude_names)
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
    """Run the parts of interpreter shutdown that affect output.

    Objects of the program's module are destroyed with the module, so that a ``__del__`` can use the module's names.
    """
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stdout = sys.__stdout__
    sys.modules.pop("__main__", None)
    gc.collect()  # flushes files that were not closed
    if sys.__stdout__ is not None:
        sys.__stdout__.flush()


def call_function(job: dict[str, Any], code: types.CodeType, prelude_names: dict[str, Any]) -> int:
    """Call the function under test with the JSON list on standard input, and return the exit status.

    A JSON text instead of a list has a Python literal in each line.
    """
    module = main_module("solution", job["name"], prelude_names)
    with open(0, encoding="utf-8", closefd=False) as file:
        arguments = json.loads(file.read())
    if isinstance(arguments, str):
        arguments = [*map(ast.literal_eval, filter(None, arguments.split("\n")))]
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    try:
        exec(code, module.__dict__)
        function = find_function(module, job["function"])
        if function is None:
            report("no_solution", f"{job['name']} defines no function {job['function']}")
            return 1
        answer = function(*arguments)
        if job["applied"]:
            answer = APPLIED[job["applied"]](answer)
    except BaseException as error:
        report_error(error)
        return 1
    try:
        report("returned", answer)
    except (TypeError, ValueError, RecursionError) as error:
        report("no_data", f"{type(error).__name__}: {error}"[:WHY_CHARS])
    return 0


def find_function(module: types.ModuleType, name: str) -> Any:
    """Return the module's function, or the method of an instance of its class ``Solution``; ``None`` without one."""
    found = module.__dict__.get(name)
    if found is None and isinstance(solution := module.__dict__.get("Solution"), type):
        found = getattr(solution(), name, None)
    return found if callable(found) else None
