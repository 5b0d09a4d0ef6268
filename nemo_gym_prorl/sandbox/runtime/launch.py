# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Start a sandbox through the container runtime: command line, environment, log, first process.

The supervisor builds the command line and the environment from the values of a :class:`.CreateRequest`, so no request
can execute another program. The log is a memory file of fixed size, because the image's untrusted ``sh`` can write to
the log.
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
from nemo_gym_prorl.sandbox.isolation import seccomp, syscalls
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

A child reads the input because ``wait`` reaps orphans and ``read`` does not. Sandboxed processes may kill the child;
the loop starts another. PID 1 has only sockets of the host open, which sandboxed processes can't reopen through
``/proc``, unlike files.
"""

DROPPED_CAPABILITIES = ("CAP_NET_ADMIN", "CAP_SYS_PTRACE", "CAP_SYS_RESOURCE", "CAP_DAC_READ_SEARCH", "CAP_SYS_CHROOT")
"""Capabilities that the container's PID 1 drops; all versions of Apptainer know their names. PID 1 keeps SYS_ADMIN,
which is needed to install the seccomp filter."""


def become_runtime(
    request: CreateRequest,
    command: Sequence[str],
    folder: Path,
    channel: socket.socket,
    log: int,
    mount_namespace: Sequence[int],
) -> NoReturn:
    """Replace this process by the runtime, in a new user namespace with one user; never returns.

    Args:
        command: command line of :func:`runtime_command`.
        channel: standard input and output of the container's first process.
        log: descriptor for the errors of this function and of the runtime.
        mount_namespace: descriptors of :func:`.mounts.namespace_without_overmounts`.
    """
    try:
        parent = os.getppid()
        syscalls.die_with_parent(parent)
        os.setsid()
        image, sandbox_uid, binds = request.image, request.uid, list[str]()
        host = request.host_uid, request.host_gid
        owner = create_single_user_namespace(sandbox_uid, *host)
        if is_machine_root():
            image = _mount_image(image, folder, *host)
            binds = _mount_binds(request, folder)
        options = _first_process_options(folder, root=sandbox_uid == 0)
        for descriptor in mount_namespace:
            os.setns(descriptor, os.CLONE_NEWNS)
        os.setns(owner)
        with contextlib.suppress(PermissionError):
            os.setgroups([])
        os.setresgid(sandbox_uid, sandbox_uid, sandbox_uid)
        os.setresuid(sandbox_uid, sandbox_uid, sandbox_uid)
        # Changing user ids clears PDEATHSIG; set it again.
        syscalls.die_with_parent(parent)
        for number, descriptor in enumerate((channel.fileno(), channel.fileno(), log)):
            os.dup2(descriptor, number)
        # The image's programs would inherit open descriptors, and could leave their root by a folder of the host.
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        log = 2
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if limits := rlimits.program_file_limits():
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        words = [*command, *(f"--bind={bind}" for bind in binds), *options, image, "/bin/sh", "-c", IDLE_SCRIPT]
        os.execve(command[0], words, runtime_environment(folder.parent))
    except OSError as error:
        os.write(log, str(error).encode())
    finally:
        os._exit(127)


def _first_process_options(folder: Path, *, root: bool) -> list[str]:
    """Return the runtime's options that confine the container's first process, the image's untrusted ``sh``. The first
    process gets the seccomp filter, and as root drops the capabilities that the filter does not restrict. As root the
    first process has more capabilities than commands, so commands can't trace it. If commands are not root, they have
    the same rights and can trace the first process; then only the filter protects."""
    path = folder / "calls.json"
    path.write_text(seccomp.oci_profile())
    path.chmod(0o644)
    return ["--security", f"seccomp:{path}", *(("--drop-caps", ",".join(DROPPED_CAPABILITIES)) if root else ())]


def _mount_image(image: str, folder: Path, uid: int, gid: int) -> str:
    """Mount the image in the sandbox's folder, with the image owner's files shown as the sandbox user's. For
    machine root only: its sandboxes' user can't enter root's folders or change other users' files in the overlay."""
    found = os.stat(image)
    shown = folder / "image"
    syscalls.unshare_mounts()
    shown.mkdir()
    owner = create_single_user_namespace(found.st_uid, uid, gid, group=found.st_gid)
    syscalls.mount_as_owner(image, str(shown), owner)
    return str(shown)


def _mount_binds(request: CreateRequest, folder: Path) -> list[str]:
    """Mount the binds in the sandbox's folder; return them as values of the runtime's option ``--bind``."""
    shown = []
    for number, (bind, tree) in enumerate(zip(request.binds, clone_binds(request), strict=True)):
        host, _, rest = bind.partition(":")
        target = folder / f"mount-{number}"
        if Path(host).is_dir():
            target.mkdir()
        else:
            target.touch()
        syscalls.move_mount(tree, str(target))
        shown.append(f"{target}:{rest}")
    return shown


_RUNTIME_VARIABLES = re.compile(r"(APPTAINER|SINGULARITY)_.*|PS1|PROMPT_COMMAND|PWD|OLDPWD|SHLVL|HOME|_", re.DOTALL)
"""Environment variables of the container's first process that do not come from the image."""

READ_ONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger", "/sys")
"""Paths through which machine root could change the kernel. They are mounted read-only, since the container's first
process is the image's untrusted ``sh``, and runs before the sandbox has its seccomp filter."""

_EXEC = ("exec", "--userns", "--containall", "--cleanenv", "--no-init", "--no-mount", "home,tmp,bind-paths")


def runtime_command(request: CreateRequest, folder: Path) -> list[str]:
    """Return the runtime's command line for a sandbox, without the image and the program in the image."""
    command = [request.runtime, *_EXEC, "--hostname", "sandbox", "--overlay", str(folder / "overlay")]
    if request.network != HOST:
        command += ["--net", "--network", "none"]
    locked = (
        [f"{path}:{path}:ro" for path in READ_ONLY_PATHS if Path(path).exists()]
        if is_machine_root_in_namespace()
        else []
    )
    # Machine root mounts the binds itself, with mapped owners.
    for bind in (*([] if is_machine_root() else request.binds), *locked):
        command += ["--bind", bind]
    return command


def runtime_environment(folder: Path) -> dict[str, str]:
    """Return the runtime's environment variables; one names ``folder``, so that a sweep can find orphaned helpers."""
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/", OWNER_VARIABLE: str(folder)}


def image_variables(reported: Mapping[str, str]) -> dict[str, str]:
    """Return the image's own variables among the ``reported`` ones of the container's first process, without
    ``LANG=C``, which the runtime sets if the image has no ``LANG``."""
    found = {name: value for name, value in reported.items() if not _RUNTIME_VARIABLES.fullmatch(name)}
    return {name: value for name, value in found.items() if (name, value) != ("LANG", "C")}


def read_environment(path: str) -> dict[str, str]:
    """Return the environment variables in a file with the format of ``/proc/PID/environ``.

    Raises:
        OSError: the variables have more than :data:`MAX_ENVIRONMENT_BYTES`.
    """
    with Path(path).open("rb") as file:
        variables = file.read(MAX_ENVIRONMENT_BYTES + 1)
    if len(variables) > MAX_ENVIRONMENT_BYTES:
        raise OSError(errno.E2BIG, f"the image sets more than {MAX_ENVIRONMENT_BYTES >> 20} MiB of variables")
    pairs = variables.decode("utf-8", "surrogateescape").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


LOG_BYTES = 64 << 10  # fixed size of a log; later output is lost

EXCERPT_CHARS = 4000
"""Number of characters at the end of a log that errors quote: enough for the cause."""


def create_log() -> int:
    log = os.memfd_create("log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(log, 0o600)
    os.ftruncate(log, LOG_BYTES)
    fcntl.fcntl(log, syscalls.F_ADD_SEALS, syscalls.SEAL_SIZE)
    return log


def read_log(log: int) -> str:
    return os.pread(log, LOG_BYTES, 0).rstrip(b"\0")[-EXCERPT_CHARS:].decode("utf-8", "replace").strip()
