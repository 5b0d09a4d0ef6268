# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Start of a sandbox by the container runtime: its command line, its variables, its log, its first process.

The supervisor makes command lines and variables itself from an order's plain values, so no order can have anything
else executed. The log is a memory file of fixed size: the image's own ``sh`` writes to it, too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import resource
import signal
import socket
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nemo_gym_prorl.sandbox.isolation import mounts, seccomp, syscalls
from nemo_gym_prorl.sandbox.isolation.prepared_image import clone_binds
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root, is_machine_root_in_namespace
from nemo_gym_prorl.sandbox.isolation.user_ids import create_single_user_namespace
from nemo_gym_prorl.sandbox.launcher.requests import MAX_ENVIRONMENT_BYTES
from nemo_gym_prorl.sandbox.limits import rlimits
from nemo_gym_prorl.sandbox.supervisor.state_dir import OWNER_VARIABLE


if TYPE_CHECKING:
    from nemo_gym_prorl.sandbox.supervisor.messages import CreateRequest


IDLE_SCRIPT = "exec 3<&0 2>/dev/null; echo; while :; do (read -r _) <&3 & wait $!; case $? in 1) exit;; esac; done"
"""The container's PID 1, in plain ``sh``: reaps whatever loses its parent, and exits when its input ends. A child does
the reading because ``wait`` reaps and ``read`` does not; that child may be killed from inside, and is replaced. What
it has open of the host's are sockets, which can't be opened again by a name in ``/proc`` as a file of it could be."""


DROPPED_CAPABILITIES = ("CAP_NET_ADMIN", "CAP_SYS_PTRACE", "CAP_SYS_RESOURCE", "CAP_DAC_READ_SEARCH", "CAP_SYS_CHROOT")
"""Capabilities that the container's PID 1 loses; the runtime knows them by name however old it is. It needs SYS_ADMIN
itself, to begin the filter with."""

FUSE_DEVICE = os.makedev(10, 229)
"""By the kernel's list of devices."""


def become_runtime(
    order: CreateRequest,
    command: Sequence[str],
    folder: Path,
    channel: socket.socket,
    log: int,
    uncovered: Sequence[int],
) -> NoReturn:
    """Execute the runtime, as the only user of a new user namespace. What goes wrong is written to ``log``.

    Args:
        order: what it is to be.
        command: of :func:`runtime_command`.
        folder: the sandbox's, for what has to be shown elsewhere.
        channel: input and output of the container's first process.
        log: where the runtime's complaints go.
        uncovered: of :func:`.mounts.uncovered`.
    """
    try:
        parent = os.getppid()
        syscalls.die_with_parent(parent)
        os.setsid()
        image, inside, binds = order.image, order.uid, list[str]()
        host = order.host_uid, order.host_gid
        owner = create_single_user_namespace(inside, *host)
        if is_machine_root():
            image = _show_image(image, folder, *host)
            binds = _show_mounts(order, folder)
        bounds = _bounds(folder, root=inside == 0)
        for descriptor in uncovered:
            os.setns(descriptor, os.CLONE_NEWNS)
        os.setns(owner)
        with contextlib.suppress(PermissionError):
            os.setgroups([])
        os.setresgid(inside, inside, inside)
        os.setresuid(inside, inside, inside)
        # Changed ids made the kernel forget it.
        syscalls.die_with_parent(parent)
        for number, descriptor in enumerate((channel.fileno(), channel.fileno(), log)):
            os.dup2(descriptor, number)
        # The runtime hands on what it has: with a folder of the host's that is open, the image could leave its root.
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        log = 2
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        rlimits.restore_open_files_limit()
        words = [*command, *(f"--bind={bind}" for bind in binds), *bounds, image, "/bin/sh", "-c", IDLE_SCRIPT]
        os.execve(command[0], words, runtime_environment(folder.parent))
    except OSError as error:
        os.write(log, str(error).encode())
    finally:
        os._exit(127)


def _bounds(folder: Path, *, root: bool) -> list[str]:
    """The runtime's options that bound the first process, the image's own ``sh``: it may be anything by its maker.

    It gets a filter of system calls, which takes most of what its capabilities give, and as root loses others. Having
    more than commands have it can't be taken over by them. Where commands are not root it has no more than they, and
    they can; then it is the filter that counts.
    """
    path = folder / "calls.json"
    path.write_text(seccomp.oci_profile())
    path.chmod(0o644)
    return ["--security", f"seccomp:{path}", *(("--drop-caps", ",".join(DROPPED_CAPABILITIES)) if root else ())]


def _show_image(image: str, folder: Path, uid: int, gid: int) -> str:
    """As root: show the image where the sandbox's user can get to it, and what its owner owns as that user's.

    Neither are root's folders open to that user, nor could it change in its overlay what is somebody else's.
    """
    found = os.stat(image)
    shown = folder / "image"
    syscalls.unshare_mounts()
    if stat.S_ISDIR(found.st_mode):
        shown.mkdir()
        owner = create_single_user_namespace(found.st_uid, uid, gid, group=found.st_gid)
        syscalls.mount_as_owner(image, str(shown), owner)
    else:
        shown.touch()
        syscalls.mount_as_owner(image, str(shown), None)
        provide_fuse_device(folder / "fuse", uid, gid)
    return str(shown)


def _show_mounts(order: CreateRequest, folder: Path) -> list[str]:
    """As root: the same for binds; returns where they are then."""
    shown = []
    for number, (bind, tree) in enumerate(zip(order.binds, clone_binds(order), strict=True)):
        host, _, rest = bind.partition(":")
        place = folder / f"mount-{number}"
        if Path(host).is_dir():
            place.mkdir()
        else:
            place.touch()
        syscalls.move_mount(tree, str(place))
        shown.append(f"{place}:{rest}")
    return shown


def provide_fuse_device(place: Path, uid: int, gid: int) -> None:
    """As root, in mounts of one's own: make ``/dev/fuse`` a user's, for the runtime to mount an image file with.

    Only the runtime sees it: a sandbox has a ``/dev`` of its own. ``place`` is where the device is made.
    """
    place.mkdir()
    syscalls.mount("tmpfs", str(place), "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, "size=64k,mode=755")
    device = place / "fuse"
    try:
        os.mknod(device, stat.S_IFCHR | 0o600, FUSE_DEVICE)
    except PermissionError:
        # Root without the right to make devices: the machine's own may do.
        return
    os.chown(device, uid, gid)
    syscalls.bind(str(device), "/dev/fuse")


_OF_THE_RUNTIME = re.compile(r"(APPTAINER|SINGULARITY)_.*|PS1|PROMPT_COMMAND|PWD|OLDPWD|SHLVL|HOME|_", re.DOTALL)
"""Names of variables that say something of the runtime, or of the host, and are not the image's."""

READ_ONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger", "/sys")
"""What the machine's root, whom the kernel sees in root of a user namespace that he has made himself, could change
there: until the sandbox has its own, and an image's first process is its maker's."""

_EXEC = ("exec", "--userns", "--containall", "--cleanenv", "--no-init", "--no-mount", "home,tmp,bind-paths")


def runtime_command(order: CreateRequest, folder: Path) -> list[str]:
    """What starts a sandbox, less the image and the program in it.

    Args:
        order: what it is to be, its binds checked.
        folder: the sandbox's own.
    """
    command = [order.runtime, *_EXEC, "--hostname", "sandbox", "--overlay", str(folder / "overlay")]
    if not order.network:
        command += mounts.RUNTIME_NO_NETWORK_OPTIONS
    locked = (
        [f"{path}:{path}:ro" for path in READ_ONLY_PATHS if Path(path).exists()]
        if is_machine_root_in_namespace()
        else []
    )
    # Root shows them itself, with other owners.
    for bind in (*([] if is_machine_root() else order.binds), *locked):
        command += ["--bind", bind]
    return command


def runtime_environment(folder: Path) -> dict[str, str]:
    """The runtime's own variables; ``folder`` is the owner's, by which its helpers are known."""
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/", OWNER_VARIABLE: str(folder)}


def image_variables(reported: Mapping[str, str]) -> dict[str, str]:
    """The variables of a waiting shell that are the image's; ``LANG`` is ``C`` where the image sets none."""
    found = {name: value for name, value in reported.items() if not _OF_THE_RUNTIME.fullmatch(name)}
    return {name: value for name, value in found.items() if (name, value) != ("LANG", "C")}


def read_environment(path: str) -> dict[str, str]:
    """The variables in a file, as the kernel has a process's.

    Raises:
        OSError: they are more than :data:`MOST_VARIABLES`.
    """
    with Path(path).open("rb") as file:
        variables = file.read(MAX_ENVIRONMENT_BYTES + 1)
    if len(variables) > MAX_ENVIRONMENT_BYTES:
        raise OSError(errno.E2BIG, f"the image sets more than {MAX_ENVIRONMENT_BYTES >> 20} MiB of variables")
    pairs = variables.decode("utf-8", "surrogateescape").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


LOG_BYTES = 64 << 10
"""Bytes that are kept of it."""

EXCERPT_CHARS = 4000
"""Bytes of its end that are shown."""


def create_log() -> int:
    """Return a new log of fixed size, to be written to as a file."""
    log = os.memfd_create("log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(log, 0o600)
    os.ftruncate(log, LOG_BYTES)
    fcntl.fcntl(log, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return log


def read_log(log: int) -> str:
    """Return the end of what was written to a log."""
    return os.pread(log, LOG_BYTES, 0).rstrip(b"\0")[-EXCERPT_CHARS:].decode("utf-8", "replace").strip()
