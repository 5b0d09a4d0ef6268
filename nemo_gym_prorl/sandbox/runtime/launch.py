# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Start a sandbox through the container runtime: command line, environment, log, first process.

The supervisor builds command line and environment from the plain values of a request, so no request can execute
another program. The log is a memory file of fixed size, because the image's own ``sh`` writes to it as well.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nemo_gym_prorl.network_access import HOST
from nemo_gym_prorl.sandbox.isolation import mounts, seccomp, syscalls
from nemo_gym_prorl.sandbox.isolation.prepared_image import clone_binds
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root, is_machine_root_in_namespace
from nemo_gym_prorl.sandbox.isolation.user_ids import create_single_user_namespace
from nemo_gym_prorl.sandbox.launcher.requests import MAX_ENVIRONMENT_BYTES
from nemo_gym_prorl.sandbox.limits import rlimits
from nemo_gym_prorl.sandbox.supervisor.state_dir import OWNER_VARIABLE


if TYPE_CHECKING:
    from nemo_gym_prorl.sandbox.supervisor.protocol import CreateRequest


IDLE_SCRIPT = "exec 3<&0 2>/dev/null; echo; while :; do (read -r _) <&3 & wait $!; case $? in 1) exit;; esac; done"
"""The container's PID 1, in POSIX ``sh``: reaps orphans, and exits when its input ends.

A child does the reading because ``wait`` reaps and ``read`` does not. Sandboxed processes may kill that child; the
loop replaces it. The process's open descriptors from the host are sockets, which can't be reopened through ``/proc``
as files could.
"""


DROPPED_CAPABILITIES = ("CAP_NET_ADMIN", "CAP_SYS_PTRACE", "CAP_SYS_RESOURCE", "CAP_DAC_READ_SEARCH", "CAP_SYS_CHROOT")
"""Capabilities that the container's PID 1 loses; all versions of the runtime know their names. PID 1 keeps SYS_ADMIN,
which it needs to install the filter."""


def become_runtime(
    order: CreateRequest,
    command: Sequence[str],
    folder: Path,
    channel: socket.socket,
    log: int,
    mount_namespace: Sequence[int],
) -> NoReturn:
    """Execute the runtime as the only user of a new user namespace; errors are written to ``log``.

    Args:
        order: settings of the sandbox.
        command: command line of :func:`runtime_command`.
        folder: the sandbox's folder on the host.
        channel: input and output of the container's first process.
        log: receives the runtime's errors.
        mount_namespace: descriptors of :func:`.mounts.namespace_without_overmounts`.
    """
    try:
        parent = os.getppid()
        syscalls.die_with_parent(parent)
        os.setsid()
        image, inside, binds = order.image, order.uid, list[str]()
        host = order.host_uid, order.host_gid
        owner = create_single_user_namespace(inside, *host)
        if is_machine_root():
            image = _mount_image(image, folder, *host)
            binds = _mount_binds(order, folder)
        options = _first_process_options(folder, root=inside == 0)
        for descriptor in mount_namespace:
            os.setns(descriptor, os.CLONE_NEWNS)
        os.setns(owner)
        with contextlib.suppress(PermissionError):
            os.setgroups([])
        os.setresgid(inside, inside, inside)
        os.setresuid(inside, inside, inside)
        # Changing user ids clears PDEATHSIG; set it again.
        syscalls.die_with_parent(parent)
        for number, descriptor in enumerate((channel.fileno(), channel.fileno(), log)):
            os.dup2(descriptor, number)
        # The runtime inherits open descriptors. With an open folder of the host the image could leave its root.
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        log = 2
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        rlimits.set_program_file_limits()
        words = [*command, *(f"--bind={bind}" for bind in binds), *options, image, "/bin/sh", "-c", IDLE_SCRIPT]
        os.execve(command[0], words, runtime_environment(folder.parent))
    except OSError as error:
        os.write(log, str(error).encode())
    finally:
        os._exit(127)


def _first_process_options(folder: Path, *, root: bool) -> list[str]:
    """Return the runtime's options that confine the first process, the image's untrusted ``sh``.

    That process gets the system call filter, and as root loses capabilities that the filter does not neutralise. As
    root the first process has more rights than commands, so they can't trace it. Where commands are not root they have
    the same rights and can trace it; then only the filter protects.
    """
    path = folder / "calls.json"
    path.write_text(seccomp.oci_profile())
    path.chmod(0o644)
    return ["--security", f"seccomp:{path}", *(("--drop-caps", ",".join(DROPPED_CAPABILITIES)) if root else ())]


def _mount_image(image: str, folder: Path, uid: int, gid: int) -> str:
    """As machine root, mount the image below the sandbox's folder, with its owner's files shown as the sandbox user's.

    That user can't enter root's folders, and could not change other users' files in the overlay.
    """
    found = os.stat(image)
    shown = folder / "image"
    syscalls.unshare_mounts()
    shown.mkdir()
    owner = create_single_user_namespace(found.st_uid, uid, gid, group=found.st_gid)
    syscalls.mount_as_owner(image, str(shown), owner)
    return str(shown)


def _mount_binds(order: CreateRequest, folder: Path) -> list[str]:
    """Mount the binds below the sandbox's folder, as machine root; return the runtime's bind options."""
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


_RUNTIME_VARIABLES = re.compile(r"(APPTAINER|SINGULARITY)_.*|PS1|PROMPT_COMMAND|PWD|OLDPWD|SHLVL|HOME|_", re.DOTALL)
"""Variables that describe the runtime or the host, and do not come from the image."""

READ_ONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger", "/sys")
"""Paths through which the machine's root user could change the kernel. The paths are read-only until the sandbox has
its own filter, since the image's first process is untrusted.
"""

_EXEC = ("exec", "--userns", "--containall", "--cleanenv", "--no-init", "--no-mount", "home,tmp,bind-paths")


def runtime_command(order: CreateRequest, folder: Path) -> list[str]:
    """Return the command that starts a sandbox, without the image and its program.

    Args:
        order: settings of the sandbox, with validated binds.
        folder: the sandbox's folder on the host.
    """
    command = [order.runtime, *_EXEC, "--hostname", "sandbox", "--overlay", str(folder / "overlay")]
    if order.network != HOST:
        command += mounts.RUNTIME_NO_NETWORK_OPTIONS
    locked = (
        [f"{path}:{path}:ro" for path in READ_ONLY_PATHS if Path(path).exists()]
        if is_machine_root_in_namespace()
        else []
    )
    # Machine root mounts the binds itself, with mapped owners.
    for bind in (*([] if is_machine_root() else order.binds), *locked):
        command += ["--bind", bind]
    return command


def runtime_environment(folder: Path) -> dict[str, str]:
    """Return the runtime's environment; ``folder`` identifies the owner of its helper processes."""
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/", OWNER_VARIABLE: str(folder)}


def image_variables(reported: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a waiting shell that come from the image; the runtime sets ``LANG=C`` where the image
    does not."""
    found = {name: value for name, value in reported.items() if not _RUNTIME_VARIABLES.fullmatch(name)}
    return {name: value for name, value in found.items() if (name, value) != ("LANG", "C")}


def read_environment(path: str) -> dict[str, str]:
    """Return the variables in a file with the format of ``/proc/PID/environ``.

    Raises:
        OSError: the variables have more than :data:`MAX_ENVIRONMENT_BYTES`.
    """
    with Path(path).open("rb") as file:
        variables = file.read(MAX_ENVIRONMENT_BYTES + 1)
    if len(variables) > MAX_ENVIRONMENT_BYTES:
        raise OSError(errno.E2BIG, f"the image sets more than {MAX_ENVIRONMENT_BYTES >> 20} MiB of variables")
    pairs = variables.decode("utf-8", "surrogateescape").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


LOG_BYTES = 64 << 10

EXCERPT_CHARS = 4000
"""Characters of a log's end that errors quote: enough for the cause."""


def create_log() -> int:
    log = os.memfd_create("log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(log, 0o600)
    os.ftruncate(log, LOG_BYTES)
    fcntl.fcntl(log, syscalls.F_ADD_SEALS, syscalls.SEAL_SIZE)
    return log


def read_log(log: int) -> str:
    return os.pread(log, LOG_BYTES, 0).rstrip(b"\0")[-EXCERPT_CHARS:].decode("utf-8", "replace").strip()
