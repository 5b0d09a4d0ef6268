# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels that are forked from a process which has imported what they need: the *zygote* of a prepared image.

Importing takes ten times longer than all the rest of a kernel's start. A zygote runs the image's own Python in the
image's own files, read-only and without network. It is the image's code, which agents can't change, and it has walls:

- on the host it is a user id that nobody has, another one for each, so that it can signal no process but its own;
- of all capabilities it has one, in the image's parent namespace: so it may enter the sandboxes that descend from it,
  and nothing else;
- it is under the filter of sandboxes, but for the call by which it enters them;
- it is in a control group of its own, with all that it forks and that does not become a kernel. With that, and so with
  the supervisor, it ends. Where there are no groups, there are no zygotes.

It has no process numbers of its own: the kernel lets nobody enter a sandbox's who is not in those above them. So there
is one only where the server is root: an ordinary user's would have the right to signal his other processes.

Nothing that it says is believed: the process that enters a sandbox, and the one that it starts there, are those that
the kernel names as the speakers. The latter is taken for a kernel only if it is in the sandbox and a child of the
supervisor's, whose number is nobody else's until that has reaped it. Where it does not work, the kernel is started as
any program. What an agent changes in libraries that a kernel imports at its start is not seen by kernels that are
forked: they have the image's.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
import signal
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from nemo_gym_prorl.sandbox.isolation import seccomp, syscalls, user_ids
from nemo_gym_prorl.sandbox.isolation.capabilities import KEPT
from nemo_gym_prorl.sandbox.isolation.joining import Place, doors
from nemo_gym_prorl.sandbox.isolation.prepared_image import PreparedImage
from nemo_gym_prorl.sandbox.launcher.requests import Answer, Said
from nemo_gym_prorl.sandbox.limits import descriptors, threads
from nemo_gym_prorl.sandbox.limits.cgroups import Group


ANSWER_S = 5.0
"""How long a zygote may take to fork a process that enters a sandbox."""

_LOOK_S = 0.0005
"""Between two looks at whose child a kernel is."""

ENTERING = 21
"""``SYS_ADMIN``: who has it in a user namespace may enter those below it."""

MEMORY_MIB, PROCESSES = 1024, 32
"""What a zygote may use, with those that it has forked and that are not in a sandbox's group yet."""

_FOLDER = Path(__file__).parent
_KERNEL_PROGRAM = (_FOLDER / "kernel_program.py").read_text()
_PROGRAM = _KERNEL_PROGRAM + (_FOLDER / "zygote_program.py").read_text()

KERNEL = ("python3", "-c", _KERNEL_PROGRAM + "launch(sys.argv[1])")
"""The command that starts a kernel, but for the path of its connection file. A zygote can stand in for it."""

_CREDENTIALS = struct.Struct("3i")
_READ_OF_PROC = ("stat", "meminfo", "cpuinfo")
"""What libraries look up when they are imported; its own ``/proc`` it may not have."""


class _NoZygote(Exception):
    """It did not do it, and has started nothing."""


def stands_for(argv: Sequence[str]) -> bool:
    """Whether a zygote can become that program."""
    return tuple(argv[:-1]) == KERNEL


def become(prepared: PreparedImage, channel: socket.socket) -> NoReturn:
    """In a child forked for it: become the zygote of a prepared image, which takes requests from ``channel``."""
    uid, last = user_ids.draw(several=False) - user_ids.FIRST_ID, syscalls.last_capability()
    parent = os.getppid()
    tree = syscalls.detached(prepared.image)
    syscalls.restrict(tree, syscalls.ATTRIBUTE_RDONLY | syscalls.ATTRIBUTE_NOSUID | syscalls.ATTRIBUTE_NODEV)
    shown = {name: syscalls.detached(f"/proc/{name}") for name in _READ_OF_PROC}
    program = os.memfd_create("zygote", os.MFD_CLOEXEC)
    os.write(program, _PROGRAM.encode())
    os.lseek(program, 0, os.SEEK_SET)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.setsid()
    user_ids.join(prepared.parent_namespace)
    os.setgroups([])
    os.unshare(os.CLONE_NEWNS | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS)
    syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    root = os.dup(tree)
    syscalls.attach(tree, "/proc")
    os.fchdir(root)
    syscalls.pivot_root()
    syscalls.unmount(".")
    os.chdir("/")
    syscalls.mount("tmpfs", "/proc", "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=64k,mode=755")
    for name, file in shown.items():
        os.close(os.open(f"/proc/{name}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o444))
        syscalls.attach(file, f"/proc/{name}")
    for handled in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(handled, signal.SIG_DFL)
    os.umask(0o022)
    sources = [os.dup(number) for number in (null, null, null, channel.fileno(), program)]
    for number, source in enumerate(sources):
        os.dup2(source, number)
    os.closerange(len(sources), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    descriptors.usual_limit()
    syscalls.become_with(uid, ENTERING, last)
    # Changed ids made the kernel forget it.
    syscalls.end_with(parent)
    seccomp.install(seccomp.filter_allowing("setns"))
    os.execvpe("python3", ["python3", "-c", "exec(open(4).read())"], prepared.environment)


def spawn(
    zygote: int,
    group: Group | None,
    place: Place,
    order: dict[str, Any],
    files: Sequence[int],
    channel: socket.socket,
) -> NoReturn:
    """As :func:`.requests.spawn`, by way of the zygote that takes requests at ``zygote``; answers with nothing done if
    that can't."""
    try:
        pid, waits = _ask(socket.socket(fileno=zygote), place, order, files)
    except (_NoZygote, OSError):
        channel.send(Answer(Said.DONE).packed())
        os._exit(0)
    channel.send(Answer(Said.STARTED, pid).packed())
    # Those inside may stop it now, or kill it, which its end tells.
    waits.settimeout(None)
    said = b""
    with contextlib.suppress(ConnectionError, ProcessLookupError):
        waits.send(b"go")
        if group:
            # Meanwhile, since it takes some 10 ms; nobody can speak to the kernel before we have ended.
            (group.path / "cgroup.procs").write_text(str(pid))
        said = waits.recv(4096)
    if said:
        trouble = json.loads(said)
        channel.send(Answer(Said.FAILED, int(trouble["errno"]), str(trouble["step"])).packed())
    os._exit(0)


def _ask(
    zygote: socket.socket, place: Place, order: dict[str, Any], files: Sequence[int]
) -> tuple[int, socket.socket]:
    """Have it done; the number of the process that is to be the kernel, and the socket on which it waits for a word.

    Raises:
        _NoZygote: nothing was started, or what was ends by itself.
    """
    spaces = doors(place, place.spaces)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ours.settimeout(ANSWER_S)
    request = json.dumps(_request(place, order, len(spaces))).encode()
    socket.send_fds(zygote, [request], [theirs.fileno(), *spaces, *files])
    theirs.close()
    _speaker(ours)
    ours.send(b"go")
    pid = _speaker(ours)
    _check_kernel(pid, place)
    return pid, ours


def _check_kernel(pid: int, place: Place) -> None:
    """Wait until it is a child of the supervisor's, as it is once who forked it has ended; see that it is in the
    sandbox.

    Raises:
        _NoZygote: it is not.
        OSError: it has ended.
    """
    deadline = time.monotonic() + ANSWER_S
    while int(threads.status(pid)[threads.PARENT]) != os.getppid():
        if time.monotonic() > deadline:
            raise _NoZygote
        time.sleep(_LOOK_S)
    if os.stat(f"/proc/{pid}/ns/pid").st_ino != place.process.namespace("pid"):
        raise _NoZygote


def _speaker(ours: socket.socket) -> int:
    """Who of the zygote's is there now, by the kernel's word."""
    data, ancillary, _flags, _address = ours.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
    if data != b"here" or not ancillary:
        raise _NoZygote
    return int(_CREDENTIALS.unpack(ancillary[0][2])[0])


def _request(place: Place, order: dict[str, Any], spaces: int) -> dict[str, Any]:
    descriptors.usual_limit()
    limits = [(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))]
    limits += [(name, (value, value)) for name, value in place.limits.items()]
    return {
        "spaces": spaces,
        "uid": place.uid,
        "cwd": order["cwd"],
        "env": order["env"],
        "connection_file": order["argv"][-1],
        "limits": limits,
        "capabilities": sorted(place.capabilities.union(KEPT.values())),
        "last_capability": syscalls.last_capability(),
        "filter": base64.b64encode(seccomp.FILTER).decode(),
        "seccomp": seccomp.NUMBER,
    }
