# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Archives of a sandbox's writable overlay layer, written and read by GNU tar.

An archive contains the layer's files with the user ids that the files have in the sandbox, so a restored sandbox may
have other ids on the host. Deletions (character device 0:0) and opaque folders (an extended attribute) are stored as
in the layer. The archive is unpacked into the layer of a new sandbox before the overlay is mounted.

Archives are untrusted. tar runs as root of a user namespace with the sandbox's ids and without capabilities on the
host, so an archive can do no more than a program in the sandbox. tar follows no symlink of the archive, and writes to
no path outside of the layer. rlimits bound tar's memory and the size of each file; the disk limit bounds all files.

After the restore, everything at the path of a bind, and a file or symlink above that path, is deleted; folders above
are made traversable. So an archive can neither redirect a bind nor prevent its mount.
"""

from __future__ import annotations

import base64
import errno
import os
import resource
import signal
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym_prorl.failures import MACHINE_ERRNOS
from nemo_gym_prorl.sandbox.isolation import syscalls, user_ids
from nemo_gym_prorl.sandbox.isolation.mounts import Bind
from nemo_gym_prorl.sandbox.launcher.requests import SandboxNamespaces
from nemo_gym_prorl.sandbox.limits.usage import scan


if TYPE_CHECKING:
    from nemo_gym_prorl.sandbox.supervisor.protocol import CreateRequest


HEADER = "PRORL.snapshot"
"""Key in the archive's global pax header; the value is the caller's header text in base 64."""

_MAX_TAR_MEMORY_BYTES = 2 << 30
"""Limit of tar's address space in bytes, since tar would read untrusted headers of any size into memory."""

_RECORD_BYTES = 10_240
"""tar pads archives to a multiple of this size; the last 1,024 bytes are zero."""

_NAMES = ("--numeric-owner", "--xattrs", "--xattrs-include=user.*")
_CREATE = (
    *("--create", "--file=-", "--format=posix", "--sparse", *_NAMES),
    # Among the overlay's extended attributes, only "opaque" stays valid over another mount of the image. The patterns
    # match all other names: those that do not begin with "o", and "origin".
    *("--xattrs-exclude=user.overlay.[!o]*", "--xattrs-exclude=user.overlay.or*"),
)
_EXTRACT = ("--extract", "--file=-", "--same-owner", "--same-permissions", *_NAMES)


def pack(
    namespaces: SandboxNamespaces, layer: Path, order: CreateRequest, header: str, target: int
) -> tuple[dict[str, Any], list[int]]:
    """Archive a sandbox's layer in the file with the descriptor ``target``; return the archive's size. Runs in a
    forked child. ``header`` is stored under :data:`HEADER`. Programs in the sandbox must not change files meanwhile.

    Raises:
        OSError: ``EFBIG``: the archive would exceed the sandbox's disk limit. ``EBUSY``: a file changed meanwhile.
            ``EOPNOTSUPP``: the runtime uses FUSE for the overlay. Otherwise an error of the disk.
    """
    if not namespaces.is_pivoted and _root_filesystem(namespaces.process.fd).startswith("fuse"):
        raise OSError(
            errno.EOPNOTSUPP,
            "the container runtime mounted this sandbox's layer with FUSE: set start: direct to take snapshots",
        )
    os.chdir(layer)
    user_ids.become_root_of_sandbox(order.host_uid, order.host_gid, several=order.users)
    encoded = base64.b64encode(header.encode()).decode()
    # Without fractions of seconds and access times, tar needs no extended header per file.
    _tar([*_CREATE, f"--pax-option={HEADER}={encoded},delete=[acm]time", "."], order.disk_mib << 20, stdout=target)
    return {"bytes": os.fstat(target).st_size}, []


def unpack(source: str, layer: Path, order: CreateRequest) -> tuple[dict[str, Any], list[int]]:
    """Unpack an archive into the empty layer of a sandbox whose overlay is not mounted yet; runs in a forked child.

    Raises:
        OSError: ``EBADMSG``: the archive is damaged or no snapshot. ``EFBIG``: its contents exceed the sandbox's disk
            limit. Otherwise an error of the disk.
    """
    limit = order.disk_mib << 20
    with open(source, "rb") as file:
        os.chdir(layer)
        size = os.fstat(file.fileno()).st_size
        if limit and size > limit:
            raise _too_large(limit)
        if size < _RECORD_BYTES or size % _RECORD_BYTES or any(os.pread(file.fileno(), 1024, size - 1024)):
            raise OSError(errno.EBADMSG, "it was cut off")
        user_ids.become_root_of_sandbox(order.host_uid, order.host_gid, several=order.users)
        _tar(list(_EXTRACT), limit, stdin=file.fileno())
    if order.snapshot_paths:
        _keep_only([_parts(path) for path in order.snapshot_paths])
    for bind in order.binds:
        _clear_bind_path(_parts(Bind.parse(bind).target))
    if limit and scan(".", limit).disk > limit:
        raise _too_large(limit)
    return {}, []


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in os.path.normpath(path).split("/") if part)


def _keep_only(paths: Sequence[tuple[str, ...]], folder: str = ".") -> None:
    """Delete everything below a folder except ``paths``, given as components; symlinks in a path are not followed."""
    if () in paths:
        return
    for entry in list(os.scandir(folder)):
        below = [path[1:] for path in paths if path[0] == entry.name]
        if () in below:
            continue
        if below and entry.is_dir(follow_symlinks=False):
            _keep_only(below, entry.path)
        else:
            _delete(entry.path)


def _clear_bind_path(path: tuple[str, ...]) -> None:
    """Delete a path, given as components; make the folders above traversable, or delete a file or symlink above."""
    current = "."
    for name in path:
        os.chmod(current, stat.S_IMODE(os.stat(current).st_mode) | 0o755)
        current = f"{current}/{name}"
        if not os.path.isdir(current) or os.path.islink(current):
            break
    if os.path.lexists(current):
        _delete(current)


def _delete(path: str) -> None:
    # shutil.rmtree recurses and would fail: an archive may contain folders of any depth.
    done = subprocess.run(["rm", "-rf", "--", path], stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if done.returncode:
        raise OSError(errno.EBADMSG, done.stderr.strip()[:500])


def _tar(
    arguments: list[str], limit: int, *, stdin: int = subprocess.DEVNULL, stdout: int = subprocess.DEVNULL
) -> None:
    """Run tar in the working directory, with at most ``limit`` bytes per written file (0 for no limit)."""
    parent = os.getpid()

    def bound() -> None:
        syscalls.die_with_parent(parent)
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_TAR_MEMORY_BYTES, _MAX_TAR_MEMORY_BYTES))
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    environ = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    done = subprocess.run(
        ["tar", *arguments],
        env=environ,
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=bound,
        check=False,
    )
    if not done.returncode:
        return
    message = next(iter(done.stderr.splitlines()), "").removeprefix("tar: ")
    for number in MACHINE_ERRNOS:
        if os.strerror(number) in done.stderr:
            raise OSError(number, message)
    if done.returncode == -signal.SIGKILL:
        raise OSError(errno.ENOMEM, "tar was killed")
    if done.returncode == -signal.SIGXFSZ:
        raise OSError(errno.EFBIG, f"its files have more than the {limit >> 20} MiB that it may write")
    if "--create" in arguments:
        raise OSError(errno.EBUSY, message)
    raise OSError(errno.EBADMSG, f"it is damaged or no snapshot: {message}")


def _too_large(limit: int) -> OSError:
    return OSError(errno.EFBIG, f"it has more than the {limit >> 20} MiB that the sandbox may write; raise disk_mib")


def _root_filesystem(process: int) -> str:
    """Return the file system type of a process's root folder, given a descriptor of ``/proc/PID``."""
    with open(os.open("mounts", os.O_RDONLY | os.O_CLOEXEC, dir_fd=process)) as table:
        # If several mounts have the same mount point, the last one is visible.
        return [fields[2] for line in table if (fields := line.split())[1] == "/"][-1]
