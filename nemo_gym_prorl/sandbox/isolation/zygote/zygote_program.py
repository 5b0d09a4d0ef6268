# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a zygote executes, as text, after that of :mod:`.kernel_program`; nothing of this package is in the image.

It imports what a kernel needs and then waits. For each request it forks a *joiner*, which enters the namespaces that
it is given and forks the kernel's process there; both say so on the request's own socket, where Linux tells who
speaks, and each goes on when it is told to. All that an ``exec`` would have done for the process is done here by hand.
"""

import array
import base64
import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import site
import socket
import struct
import sys
import time
import traceback
from typing import Any


CHANNEL = 3
"""The open socket on which requests come."""

LATER = (
    *("ipykernel.ipkernel", "ipykernel.zmqshell", "ipykernel.debugger", "ipykernel.displayhook", "ipykernel.comm"),
    *("IPython.core.completerlib", "IPython.core.oinspect", "IPython.core.logger", "IPython.extensions.storemagic"),
    *(
        "IPython.core.history",
        "IPython.core.debugger",
        "pdb",
        "matplotlib_inline.backend_inline",
        "matplotlib_inline.config",
    ),
    *("tornado.platform.asyncio", "tornado.queues", "faulthandler", "email.parser", "psutil", "pydoc", "profile"),
    *("encodings.idna", "encodings.ascii", "encodings.latin_1", "unicodedata"),
)
"""What a kernel imports as it goes on, in one version or another."""

LARGEST_REQUEST = 1 << 18
MOST_FILES = 32

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
SECCOMP_SET_MODE_FILTER, SECCOMP_SPEC_ALLOW = 1, 4
CAPABILITY_VERSION = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


class Program(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def prctl(option: int, value: int) -> None:
    check(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """One request and its open files; ``None`` when there will be no more."""
    data, ancillary, _flags, _address = channel.recvmsg(LARGEST_REQUEST, socket.CMSG_SPACE(4 * MOST_FILES))
    files: array.array[int] = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(payload[: len(payload) - len(payload) % files.itemsize])
    return (json.loads(data), list(files)) if data else None


def serve() -> str:
    """Wait for requests; returns in each process that is to become a kernel, with its connection file."""
    channel = socket.socket(fileno=CHANNEL)
    channel.setblocking(True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    channel.send(b"ready")
    while True:
        request = receive(channel)
        if request is None:
            os._exit(0)
        order, files = request
        if os.fork() == 0:
            channel.close()
            answer = socket.socket(fileno=files[0])
            try:
                join(order, files[1 : 1 + order["spaces"]])
                begin(answer)
                if os.fork():
                    os._exit(0)
                begin(answer)
                become(order, files[1 + order["spaces"] :], answer)
            except OSError as error:
                answer.send(json.dumps({"step": error.filename or "start", "errno": error.errno}).encode())
                os._exit(127)
            except Exception:
                traceback.print_exc()
                os._exit(127)
            return str(order["connection_file"])
        for number in files:
            os.close(number)


def begin(answer: socket.socket) -> None:
    """Say that this process is there, and go on when told to."""
    try:
        answer.send(b"here")
        told = answer.recv(16)
    except ConnectionError:
        told = b""
    if not told:
        # Who was to say so was killed. An end by itself would be the agent's doing.
        os.kill(os.getpid(), signal.SIGKILL)


def join(order: dict[str, Any], spaces: list[int]) -> None:
    """Enter namespaces, the first of which is the user's, as one of its users; children are in all of them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    prctl(PR_SET_DUMPABLE, 0)
    for space in spaces:
        check(libc.setns(space, 0))
        os.close(space)
    uid = order["uid"]
    with contextlib.suppress(PermissionError):
        os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    prctl(PR_SET_DUMPABLE, 0)


def become(order: dict[str, Any], files: list[int], answer: socket.socket) -> None:
    """Everything that an executed program would find done."""
    os.setsid()
    high = max(len(files), 64)
    answer_copy = os.dup2(answer.fileno(), high + len(files), inheritable=False)
    kept = [os.dup2(number, high + index, inheritable=False) for index, number in enumerate(files)]
    answer.detach()
    for number, source in enumerate(kept):
        os.dup2(source, number)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.closerange(len(files), answer_copy)
    os.closerange(answer_copy + 1, limit)
    answer = socket.socket(fileno=answer_copy)
    for handled in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(handled, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(0o022)
    try:
        os.chdir(order["cwd"])
    except OSError as error:
        error.filename = "working folder {}".format(order["cwd"])
        raise
    for number in range(order["last_capability"] + 1):
        if number not in order["capabilities"]:
            prctl(PR_CAPBSET_DROP, number)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    for name, value in order["limits"]:
        resource.setrlimit(name, tuple(value))
    kept_set = sum(1 << number for number in order["capabilities"]) if order["uid"] == 0 else 0
    low, high_half = kept_set & 0xFFFFFFFF, kept_set >> 32
    check(
        libc.capset(struct.pack("Ii", CAPABILITY_VERSION, 0), struct.pack("6I", low, low, 0, high_half, high_half, 0))
    )
    rules = base64.b64decode(order["filter"])
    given = Program(len(rules) // 8, rules)
    check(libc.syscall(order["seccomp"], SECCOMP_SET_MODE_FILTER, SECCOMP_SPEC_ALLOW, ctypes.byref(given)))
    prctl(PR_SET_DUMPABLE, 1)
    os.environ.clear()
    os.environ.update(order["env"])
    time.tzset()
    if site.ENABLE_USER_SITE:
        site.USER_BASE = site.USER_SITE = None
        site.addusersitepackages(set(sys.path))
    draw_anew()
    answer.close()


def draw_anew() -> None:
    """Have drawn again what modules drew when they were imported. ``random`` does so by itself after a fork.

    What Python draws before all else stays the same in all kernels of a zygote: the seed of ``hash`` of texts, and
    where things lie in memory.
    """
    modules = sys.modules
    if "numpy.random" in modules:
        modules["numpy.random"].seed()
    if "multiprocessing.process" in modules:
        modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "uuid" in modules:
        modules["uuid"]._node = None  # type: ignore[attr-defined]
    if "tempfile" in modules:
        modules["tempfile"].tempdir = None  # type: ignore[attr-defined]
        modules["tempfile"]._name_sequence = None  # type: ignore[attr-defined]


def main() -> None:
    for module in LATER:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    launch(serve())  # type: ignore[name-defined]  # noqa: F821


main()
