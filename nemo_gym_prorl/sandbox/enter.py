# SPDX-License-Identifier: Apache-2.0
"""What a forked child of the supervisor does inside a container: start a process, copy a file, set things up.

Joining the namespaces of a running container takes well under a millisecond, where a second ``apptainer exec`` takes
fifty. Every function here runs in a child that was forked for it and ends with it.

Invariants, against a container whose every process is hostile:

- The child makes itself undumpable *before* it joins, so nothing inside can trace it, read its memory or open its
  files, the host's Python among them. ``exec`` lifts that again, when only the container's own program is left.
- Names are looked up by the kernel inside the container's root: no link, ``..`` or mount leads out of it.
- Files are copied by a process that is outside of the container's PID namespace, so ``/proc/self`` leads nowhere.
- What is executed has the container's user ids, a bounded set of capabilities, the sandbox's limits, no file but those
  meant for it, and no variable but those given.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import signal
import socket
import stat
import struct
import termios
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from nemo_gym_prorl.sandbox import linux
from nemo_gym_prorl.sandbox.children import Unreachable


NAMESPACES = ("user", "mnt", "pid", "ipc", "net", "uts")
"""The user namespace comes first: it gives the right to join the others."""

TIOCGPTPEER = 0x5441
TIOCSPTLCK = 0x40045431

CONNECT_TIMEOUT_S = 5.0
COPY_CHUNK = 1 << 20
SMALL_TMPFS = "size=16m,nr_inodes=16k"
"""Bound of each memory file system that the runtime mounts, which would otherwise hold half the machine's memory."""

MOUNTS_FIELD_TARGET = 1
MOUNTS_FIELD_KIND = 2


@dataclass(frozen=True, slots=True)
class Place:
    """A running container, as far as a child must know it.

    Attributes:
        pid: the container's PID 1, as the host numbers it.
        uid: the only user id that exists inside; 0 for one that has root.
        limits: ``resource.RLIMIT_*`` to hard limit, for whatever is executed.
    """

    pid: int
    uid: int
    limits: dict[int, int]


@contextlib.contextmanager
def reaching() -> Iterator[None]:
    """Errors in the block are the container's, which may have ended meanwhile: nothing in it depends on a request."""
    try:
        yield
    except OSError as error:
        raise Unreachable(f"the sandbox can't be joined: {error}") from error


@reaching()
def join(place: Place) -> None:
    """Become a process in the container's namespaces; children forked later are in its PID namespace too.

    Raises:
        Unreachable: it has ended.
    """
    base = os.open(f"/proc/{place.pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    spaces = []
    for name in NAMESPACES:
        descriptor = os.open(f"ns/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=base)
        # One that we share with the container already can't be joined, and needs no joining.
        if os.fstat(descriptor).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino:
            spaces.append(descriptor)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    for descriptor in spaces:
        os.setns(descriptor)
        os.close(descriptor)
    with contextlib.suppress(PermissionError):
        # Refused in namespaces of ordinary users, whose groups mean nothing inside.
        os.setgroups([])
    os.setresgid(place.uid, place.uid, place.uid)
    os.setresuid(place.uid, place.uid, place.uid)
    # Changed ids make a process dumpable or not by a system setting; ours is not up to it.
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    # Only now: a root that the runtime mounted with FUSE is open to nobody but the container's user.
    root = os.open("root", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=base)
    os.fchdir(root)
    os.chroot(".")
    os.close(root)
    os.close(base)


def prepare(place: Place, shared_memory_mib: int) -> tuple[dict[str, Any], list[int]]:
    """Close what the runtime leaves open: unbounded memory file systems, and further user namespaces."""
    join(place)
    # Not /proc/self: this process is in the mount namespace, but not in the PID namespace that /proc shows.
    with open("/proc/1/mounts") as table:
        mounts = [line.split() for line in table]
    for fields in mounts:
        target, kind = fields[MOUNTS_FIELD_TARGET], fields[MOUNTS_FIELD_KIND]
        if kind == "tmpfs" and not target.startswith("/sys"):
            size = f"size={shared_memory_mib}m" if target == "/dev/shm" else SMALL_TMPFS
            # One of the host that is bound in, as is ours where the sandboxes' folder is on one, has its own bound.
            with contextlib.suppress(PermissionError):
                linux.mount("tmpfs", target, "tmpfs", linux.MS_REMOUNT, size)
    # The runtime's shows the network devices and control groups of the host. Some machines let nobody mount another.
    with contextlib.suppress(PermissionError):
        linux.mount("sysfs", "/sys", "sysfs", linux.MS_RDONLY)
    # In a user namespace of its own a process would have every capability again.
    with open("/proc/sys/user/max_user_namespaces", "w") as setting:
        setting.write("0")
    return {}, []


def spawn(place: Place, order: dict[str, Any], files: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
    """Start ``order["argv"]`` in a session of its own.

    With ``order["tty"]`` (rows and columns) its first three files are a terminal of the container, whose controlling
    end is returned, and ``files`` follow as 3, 4, ...; without, ``files`` are its files from 0 on.
    """
    join(place)
    controlling = None
    sources = list(files)
    with reaching():
        if order["tty"]:
            controlling, terminal = _open_terminal(*order["tty"], echo=order["echo"])
            sources[:0] = [terminal] * 3
        reader, writer = os.pipe()
    try:
        pid = os.fork()
    except BlockingIOError as error:
        raise BlockingIOError(error.errno, "the sandbox has as many processes as it may have") from error
    except OSError as error:
        # A PID namespace whose first process has ended takes no more.
        raise Unreachable(f"the sandbox can't be joined: {error}") from error
    if pid == 0:
        _execute(place, order, sources, writer)
    os.close(writer)
    trouble = os.read(reader, 4096)
    if trouble:
        os.waitpid(pid, 0)
        number, _, step = trouble.decode().partition(" ")
        raise OSError(int(number), f"{step}: {os.strerror(int(number))}")
    return {"pid": pid}, [] if controlling is None else [controlling]


def _open_terminal(rows: int, columns: int, *, echo: bool) -> tuple[int, int]:
    """A new terminal of the container's own: both ends. Without ``echo`` line ends, too, are as they are written."""
    controlling = os.open("/dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    fcntl.ioctl(controlling, TIOCSPTLCK, struct.pack("i", 0))
    terminal = fcntl.ioctl(controlling, TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    if not echo:
        mode = termios.tcgetattr(terminal)
        mode[1] &= ~termios.ONLCR
        mode[3] &= ~(termios.ECHO | termios.ECHOE | termios.ECHOK | termios.ECHOCTL | termios.ECHOKE)
        termios.tcsetattr(terminal, termios.TCSANOW, mode)
    termios.tcsetwinsize(terminal, (rows, columns))
    return controlling, terminal


def _execute(place: Place, order: dict[str, Any], sources: Sequence[int], report: int) -> NoReturn:
    """The last step, in the container's PID namespace: never returns, says on ``report`` why if it fails."""
    step = "start"
    try:
        os.setsid()
        if order["tty"]:
            fcntl.ioctl(sources[0], termios.TIOCSCTTY, 0)
        # Out of the way first, since a source may have the number that another is to get.
        high = max(len(sources), 64)
        report = fcntl.fcntl(report, fcntl.F_DUPFD_CLOEXEC, high)
        kept = [fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, high) for source in sources]
        for number, descriptor in enumerate(kept):
            os.dup2(descriptor, number)
        os.closerange(len(kept), high)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.umask(0o022)
        step = f"working folder {order['cwd']}"
        os.chdir(order["cwd"])
        step = "limits"
        linux.drop_capabilities()
        for limit, value in place.limits.items():
            resource.setrlimit(limit, (value, value))
        step = order["argv"][0]
        os.execvpe(order["argv"][0], order["argv"], order["env"])
    except OSError as error:
        os.write(report, f"{error.errno} {step}".encode())
    finally:
        os._exit(127)


def put(place: Place, path: str, mode: int, source: int) -> tuple[dict[str, Any], list[int]]:
    """Make ``path`` a file with the contents of ``source``; missing folders are made. Never half a file."""
    join(place)
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, f"{path} is a folder; name the file")
    if os.path.islink(path):
        path = os.path.realpath(path)
        folder = os.path.dirname(path)
    fresh = os.path.join(folder, f".{uuid.uuid4().hex}")
    target = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        copied = _copy(source, target, None)
        os.fchmod(target, mode)
        os.rename(fresh, path)
    except OSError:
        os.unlink(fresh)
        raise
    return {"bytes": copied, "name": name}, []


def get(place: Place, path: str, limit: int, target: int) -> tuple[dict[str, Any], list[int]]:
    """Copy the ordinary file ``path`` into ``target``; at most ``limit`` bytes, however it grows meanwhile."""
    join(place)
    # Without O_NONBLOCK a named pipe would hold us for ever.
    source = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    found = os.fstat(source)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, f"{path} is a folder; name a file")
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"{path} is not an ordinary file")
    return {"bytes": _copy(source, target, limit), "mode": stat.S_IMODE(found.st_mode)}, []


def connect(place: Place, port: int) -> tuple[dict[str, Any], list[int]]:
    """Connect to what listens on the container's loopback device; the connection stays there, whoever holds it."""
    join(place)
    trouble: OSError | None = None
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        connection = socket.socket(family, socket.SOCK_STREAM)
        # One that does not accept must not hold us for ever.
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            connection.connect((address, port))
        except OSError as error:
            trouble = trouble or error
            connection.close()
        else:
            return {}, [connection.detach()]
    assert trouble
    raise trouble


def _copy(source: int, target: int, limit: int | None) -> int:
    copied = 0
    while chunk := os.read(source, COPY_CHUNK):
        copied += len(chunk)
        if limit is not None and copied > limit:
            raise OSError(errno.EFBIG, f"larger than the limit of {limit} bytes")
        view = memoryview(chunk)
        while view:
            view = view[os.write(target, view) :]
    return copied
