# SPDX-License-Identifier: Apache-2.0
"""What a forked child of the supervisor does inside a container: start a process, connect, set things up.

Joining the namespaces of a running container takes well under a millisecond, where a second ``apptainer exec`` takes
fifty. Every function here runs in a child that was forked for it and ends with it.

What is started most, in sandboxes that are made from a mould, a script of system calls starts without any Python
(:mod:`.spawn_script`); the invariants are the same.

Invariants, against a container whose every process is hostile:

- The child makes itself undumpable *before* it joins, so nothing inside can trace it, read its memory or open its
  files. ``exec`` lifts that again, when only the container's own program is left.
- A program that has itself executed as ``/proc/self/exe`` gets the executable of this child in its hands. That is a
  sealed copy of Python (:mod:`.sealed_interpreter`), which nobody can write to.
- Names are looked up by the kernel inside the container's root: no link, ``..`` or mount leads out of it.
- Files are copied by a process that is outside of the container's PID namespace, so ``/proc/self`` leads nowhere.
- What is executed has the container's user ids, a bounded set of capabilities, the sandbox's limits, no file but those
  meant for it, and no variable but those given.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import stat
import struct
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from nemo_gym_prorl.sandbox.isolation import accounts, seccomp, syscalls
from nemo_gym_prorl.sandbox.isolation.mould.root_fs import KERNELS, SMALL_TMPFS
from nemo_gym_prorl.sandbox.limits import descriptors, kernel_shares
from nemo_gym_prorl.sandbox.limits.report import COUNTED_PER_NAMESPACE, Facts
from nemo_gym_prorl.sandbox.supervisor.processes.children import KILLED, Exhausted, Unreachable, failure, tell


NAMESPACES = {
    "user": os.CLONE_NEWUSER,
    "mnt": os.CLONE_NEWNS,
    "pid": os.CLONE_NEWPID,
    "ipc": os.CLONE_NEWIPC,
    "net": os.CLONE_NEWNET,
    "uts": os.CLONE_NEWUTS,
    "cgroup": os.CLONE_NEWCGROUP,
}
"""The user namespace comes first: it gives the right to join the others."""

TIOCGPTPEER = 0x5441
TIOCSPTLCK = 0x40045431

STARTS = 10
START_PAUSE_S = 0.005
"""Between two attempts to start a process where there is no room for one."""

CONNECT_TIMEOUT_S = 5.0
MOUNTS_FIELD_TARGET = 1
MOUNTS_FIELD_KIND = 2


@dataclass(frozen=True, slots=True)
class Place:
    """A running container, as far as a child must know it.

    Attributes:
        pid: the container's PID 1, as the host numbers it.
        uid: the only user id that exists inside; 0 for one that has root.
        limits: ``resource.RLIMIT_*`` to hard limit, for whatever is executed.
        spaces: ``CLONE_NEW*`` flags of the namespaces that are not ours, too; see :func:`spaces_of`.
        rooted: whether the root of its mount namespace is its own root.
        capabilities: that its root has beyond the usual, by number.
    """

    pid: int
    uid: int
    limits: dict[int, int]
    spaces: int
    rooted: bool = False
    capabilities: frozenset[int] = frozenset()


def spaces_of(pid: int) -> int:
    """``CLONE_NEW*`` flags of the namespaces of a process that this one does not share: a shared one can't be joined
    by everybody, and needs no joining."""
    differing = (
        flag
        for name, flag in NAMESPACES.items()
        if os.stat(f"/proc/{pid}/ns/{name}").st_ino != os.stat(f"/proc/self/ns/{name}").st_ino
    )
    return sum(differing)


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
    parent = os.getppid()
    base = None if place.rooted else os.open(f"/proc/{place.pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    _enter_all(place)
    with contextlib.suppress(PermissionError):
        # Refused in namespaces of ordinary users, whose groups mean nothing inside.
        os.setgroups([])
    # Where there are several users this may be a change from root to another, which has a program to start first.
    syscalls.prctl(syscalls.PR_SET_SECUREBITS, syscalls.NO_SETUID_FIXUP)
    os.setresgid(place.uid, place.uid, place.uid)
    os.setresuid(place.uid, place.uid, place.uid)
    # Changed ids made the kernel forget it.
    syscalls.end_with(parent)
    # Changed ids make a process dumpable or not by a system setting; ours is not up to it.
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    if base is not None:
        # Only now: a root that the runtime mounted with FUSE is open to nobody but the container's user.
        root = os.open("root", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=base)
        os.fchdir(root)
        os.chroot(".")


@contextlib.contextmanager
def by_names_inside() -> Iterator[None]:
    """What goes wrong in the block is by names and files of those inside, whatever they made of them: none of it is a
    failure of ours, which would be tried again. What the machine is short of says so by its number."""
    try:
        yield
    except MemoryError as error:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error
    except (OSError, Unreachable, Exhausted):
        raise
    except Exception as error:
        raise OSError(errno.EINVAL, f"{type(error).__name__}: {error}") from error


@reaching()
def join_users(place: Place) -> None:
    """Become one of the container's users, with every right over what is theirs, but join nothing else of it."""
    parent = os.getppid()
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    _enter_all(replace(place, spaces=os.CLONE_NEWUSER))
    # New rights made the kernel forget it.
    syscalls.end_with(parent)


def _enter_all(place: Place) -> None:
    """Join all namespaces of a process at once, or one after the other before Linux 5.8."""
    try:
        process = os.pidfd_open(place.pid)
        os.setns(process, place.spaces)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EINVAL):
            raise
        doors = [
            os.open(f"/proc/{place.pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
            for name, flag in NAMESPACES.items()
            if flag & place.spaces
        ]
        for door in doors:
            os.setns(door)


def prepare(place: Place, shared_memory_mib: int, host_network: bool, image: str) -> None:
    """Close what the runtime leaves open: unbounded memory file systems, and further user namespaces.

    Take away what it shows of the host: accounts, hosts, nameservers where the network is not the host's, time zone.
    """
    resolver = accounts.resolver(host_network)
    copied = [path for path in accounts.COPIED_BY_THE_RUNTIME if not os.path.lexists(image + path)]
    join(place)
    for path in KERNELS:
        # What the runtime mounted by way of a link may hide the settings below, or be nothing of the kernel's.
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "the image has no folder of its own there", path)
    # Not /proc/self: this process is in the mount namespace, but not in the PID namespace that /proc shows.
    with open("/proc/1/mounts") as table:
        mounts = [line.split() for line in table]
    for fields in mounts:
        target, kind = fields[MOUNTS_FIELD_TARGET], fields[MOUNTS_FIELD_KIND]
        if kind == "tmpfs" and not target.startswith("/sys"):
            size = kernel_shares.shared_memory_options(shared_memory_mib) if target == "/dev/shm" else SMALL_TMPFS
            # One of the host that is bound in, as is ours where the sandboxes' folder is on one, has its own bound.
            with contextlib.suppress(PermissionError):
                syscalls.mount("tmpfs", target, "tmpfs", syscalls.MS_REMOUNT, size)
        if kind == "devpts":
            flags = syscalls.MS_REMOUNT | syscalls.MS_NOSUID | syscalls.MS_NOEXEC
            options = f"mode=620,ptmxmode=666,max={kernel_shares.TERMINALS}"
            with contextlib.suppress(PermissionError):
                syscalls.mount("devpts", target, "devpts", flags, options)
    # The runtime's shows the network devices and control groups of the host. Some machines let nobody mount another.
    with contextlib.suppress(PermissionError):
        syscalls.mount("sysfs", "/sys", "sysfs", syscalls.MS_RDONLY)
    for path in accounts.OF_THE_RUNTIME:
        # Nothing is mounted there if the runtime was set up not to.
        with contextlib.suppress(OSError):
            syscalls.unmount(path)
    for path in copied:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    accounts.write(place.uid, place.uid, resolver)
    # In a user namespace of its own a process would have every capability again.
    with open("/proc/sys/user/max_user_namespaces", "w") as setting:
        setting.write("0")
    kernel_shares.settle(shared_memory_mib)


def spawn(place: Place, order: dict[str, Any], files: Sequence[int], channel: socket.socket) -> NoReturn:
    """Start ``order["argv"]`` in a session of its own, as a child of our parent, and end.

    With ``order["tty"]`` (rows and columns) its first three files are a terminal of the container, and ``files``
    follow as 3, 4, ...; without, ``files`` are its files from 0 on.

    ``channel`` tells our parent the new process's number (``pid``) with the controlling end of its terminal; then why
    it could not execute its program, or nothing but its end. The new process waits for our word, which it gets once it
    is known: if we are killed first, it says so, ends, and has executed nothing. We never wait for it, as those inside
    can stop it.
    """
    try:
        # What is stopped in there for ever must not keep what is the supervisor's: its sockets, its lock.
        descriptors.close_all_but([0, 1, 2, *files, channel.fileno()])
        join(place)
        controlling = None
        sources = list(files)
        with reaching():
            if order["tty"]:
                controlling, terminal = _open_terminal(*order["tty"], echo=order["echo"])
                sources[:0] = [terminal] * 3
            waiting, word = os.pipe()
        try:
            pid = _start_within(place.limits)
        except BlockingIOError:
            raise
        except OSError as error:
            # A PID namespace whose first process has ended takes no more.
            raise Unreachable(f"the sandbox can't be joined: {error}") from error
        if pid == 0:
            os.close(word)
            if os.read(waiting, 1):
                _execute(place, order, sources, channel.fileno())
            # Unsaid, this end would be taken for that of the program.
            tell(channel, KILLED, [])
            os._exit(127)
        tell(channel, {"pid": pid}, [] if controlling is None else [controlling])
        os.write(word, b"\n")
    except Exception as error:
        tell(channel, failure(error), [])
    finally:
        os._exit(0)


def _start_within(limits: dict[int, int]) -> int:
    """Fork a process beside, if the sandbox has room for it and for one more: nearly every program starts another.

    Raises:
        Exhausted: it has not.
        BlockingIOError: the machine, or the group, has none for anybody.
    """
    if Facts.here(frozenset()).kernel < COUNTED_PER_NAMESPACE:
        # The limit is none of the sandbox's own.
        return syscalls.fork_beside()
    before = resource.getrlimit(resource.RLIMIT_NPROC)
    hard = before[1]
    most = limits[resource.RLIMIT_NPROC]
    # We are counted as long as we are here.
    resource.setrlimit(resource.RLIMIT_NPROC, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    for _ in range(STARTS):
        try:
            pid = syscalls.fork_beside()
        except BlockingIOError:
            # Others like us, or what has just ended, may be about to go.
            time.sleep(START_PAUSE_S)
        else:
            if pid == 0:
                resource.setrlimit(resource.RLIMIT_NPROC, before)
            return pid
    resource.setrlimit(resource.RLIMIT_NPROC, before)
    if syscalls.fork_beside() == 0:
        os._exit(0)
    raise Exhausted("processes")


def _open_terminal(rows: int, columns: int, *, echo: bool) -> tuple[int, int]:
    """A new terminal of the container's own: both ends. Without ``echo`` line ends, too, are as they are written."""
    try:
        controlling = os.open("/dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise Exhausted("terminals") from error
        raise
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
    """The last step, in the container's PID namespace: never returns, tells on ``report`` why if it fails."""
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
        descriptors.usual_limit()
        syscalls.drop_capabilities(place.capabilities)
        for limit, value in place.limits.items():
            resource.setrlimit(limit, (value, value))
        told = {} if order["user"] is None else accounts.become(order["user"], place.uid)
        syscalls.prctl(syscalls.PR_SET_SECUREBITS, 0)
        seccomp.install()
        step = order["argv"][0]
        os.execvpe(order["argv"][0], order["argv"], {**order["env"], **told})
    except accounts.NoUser as error:
        os.write(report, json.dumps({"error": error.strerror, "errno": error.errno}).encode())
    except OSError as error:
        said = {"error": f"{step}: {os.strerror(error.errno or 0)}", "errno": error.errno}
        os.write(report, json.dumps(said).encode())
    except Exception as error:
        # What is read here is the sandbox's, and so is what is wrong with it.
        said = {"error": f"{step}: {type(error).__name__}: {error}", "errno": errno.EINVAL}
        os.write(report, json.dumps(said).encode())
    finally:
        os._exit(127)


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
