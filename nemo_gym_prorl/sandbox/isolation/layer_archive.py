# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Archives of a sandbox's own overlay layer, written and read by GNU tar.

An archive holds the files of the layer with the user ids that they have inside. So the host ids of the sandbox do not
matter, and no executable file is readable on the host. Deletions (a character device 0:0) and opaque folders (an
extended attribute) are stored as in the layer. The archive is unpacked into the layer of a new sandbox before the
layer is mounted.

Archives are untrusted. tar runs as root of a user namespace with the sandbox's ids and without rights on the host, so
an archive can do no more than a program in the sandbox. tar follows no link that the archive makes, and writes to no
folder above. The sandbox's limits bound time, memory and bytes.

A restored layer has nothing at the paths of the sandbox's binds, and no link, file or closed folder on the way there.
So an archive can neither redirect a bind nor prevent the mount.
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
from nemo_gym_prorl.sandbox.limits.usage import DiskUsage, scan


if TYPE_CHECKING:
    from nemo_gym_prorl.sandbox.supervisor.protocol import CreateRequest


HEADER = "PRORL.snapshot"
"""Name of the archive's global pax header, whose value is the caller's header text in base 64."""

_MEMORY_BYTES = 2 << 30
"""Limit of tar's address space, since tar reads headers of any size."""

_RECORD_BYTES = 10_240
"""tar pads archives to a multiple of these bytes; the last 1,024 bytes are zero."""

_NAMES = ("--numeric-owner", "--xattrs", "--xattrs-include=user.*")
_CREATE = (
    *("--create", "--file=-", "--format=posix", "--sparse", *_NAMES),
    # Of the overlay's attributes only "opaque" keeps its meaning over another mount of the image.
    *("--xattrs-exclude=user.overlay.[!o]*", "--xattrs-exclude=user.overlay.or*"),
)
_EXTRACT = ("--extract", "--file=-", "--same-owner", "--same-permissions", *_NAMES)


def pack(
    namespaces: SandboxNamespaces, layer: Path, order: CreateRequest, header: str, target: int
) -> tuple[dict[str, Any], list[int]]:
    """Write the layer of a running sandbox into the file ``target``; runs in a forked child.

    Raises:
        OSError: ``EFBIG``: the archive would exceed the sandbox's disk limit. ``EBUSY``: a file changed meanwhile.
            ``EOPNOTSUPP``: the runtime's FUSE overlay holds the layer. Otherwise an error of the disk.
    """
    if not namespaces.is_pivoted and _kind_of_root(namespaces.process.fd).startswith("fuse"):
        raise OSError(
            errno.EOPNOTSUPP,
            "the container runtime mounted this sandbox's layer with FUSE: set start: direct to take snapshots",
        )
    os.chdir(layer)
    user_ids.become_root_of_sandbox(order.host_uid, order.host_gid, several=order.users)
    encoded = base64.b64encode(header.encode()).decode()
    # Whole seconds need no extended header.
    _tar([*_CREATE, f"--pax-option={HEADER}={encoded},delete=[acm]time", "."], order.disk_mib << 20, stdout=target)
    return {"bytes": os.fstat(target).st_size}, []


def unpack(source: str, layer: Path, order: CreateRequest) -> tuple[dict[str, Any], list[int]]:
    """Fill the layer of a sandbox that is not mounted yet from an archive; runs in a forked child.

    Raises:
        OSError: ``EBADMSG``: the archive is damaged or holds no layer. ``EFBIG``: its contents exceed the sandbox's
            disk limit. Otherwise an error of the disk.
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
        _clear(_parts(Bind.parse(bind).target))
    found = DiskUsage()
    for _ in scan(["."], [], found):
        if limit and found.disk > limit:
            raise _too_large(limit)
    return {}, []


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in os.path.normpath(path).split("/") if part)


def _keep_only(paths: Sequence[tuple[str, ...]], folder: str = ".") -> None:
    """Delete all but the given paths below a folder; a link on the way to a path is deleted, not followed."""
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


def _clear(path: tuple[str, ...]) -> None:
    """Delete a path, and open the folders above to all users; files and links above are deleted."""
    place = "."
    for name in path:
        os.chmod(place, stat.S_IMODE(os.stat(place).st_mode) | 0o755)
        place = f"{place}/{name}"
        if not os.path.isdir(place) or os.path.islink(place):
            break
    if os.path.lexists(place):
        _delete(place)


def _delete(path: str) -> None:
    # Not shutil.rmtree, which recurses: an archive may hold folders of any depth.
    done = subprocess.run(["rm", "-rf", "--", path], stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if done.returncode:
        raise OSError(errno.EBADMSG, done.stderr.strip()[:500])


def _tar(
    arguments: list[str], limit: int, *, stdin: int = subprocess.DEVNULL, stdout: int = subprocess.DEVNULL
) -> None:
    """Run tar in the working folder; files that it writes have at most ``limit`` bytes (0 for no limit)."""
    parent = os.getpid()

    def bound() -> None:
        syscalls.die_with_parent(parent)
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
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


def _kind_of_root(process: int) -> str:
    """Return the type of the file system that a process has as its root, given its open ``/proc`` directory."""
    with open(os.open("mounts", os.O_RDONLY | os.O_CLOEXEC, dir_fd=process)) as table:
        # Of several mounts on one folder the last one is visible.
        return [fields[2] for line in table if (fields := line.split())[1] == "/"][-1]
