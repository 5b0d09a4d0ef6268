# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Archives of a sandbox's own layer, written and read by GNU tar.

An archive holds the files of the layer, with the ids that they have inside: so it does not matter under which ids a
sandbox runs on the host, and no executable file lies open on the host. Deletions (a character device 0:0) and folders
that hide the image's (an attribute) are in it as in the layer. It is unpacked into the layer of a new sandbox before
that is mounted, and what is mounted over a folder later hides it.

tar runs as root of a user namespace that has the sandbox's ids and no others, and none of the host's rights. So an
archive that another program made can do no more than a program in the sandbox could; tar follows no link that the
archive makes, and leaves no folder. Time, memory and bytes are bounded by the sandbox's limits.
"""

from __future__ import annotations

import base64
import errno
import os
import resource
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym_prorl.failures import OF_THE_MACHINE
from nemo_gym_prorl.sandbox.isolation import syscalls, user_ids
from nemo_gym_prorl.sandbox.isolation.namespaces import SandboxNamespaces
from nemo_gym_prorl.sandbox.limits.usage import DiskUsage, scan


if TYPE_CHECKING:
    from nemo_gym_prorl.sandbox.supervisor.messages import CreateRequest


HEADER = "PRORL.snapshot"
"""Name of the archive's global header; its value is of the archive's maker, in base 64."""

_MEMORY_BYTES = 2 << 30
"""Address space of tar, which reads headers of any size."""

_RECORD_BYTES = 10_240
"""tar pads archives to a multiple of these bytes, the last 1,024 of which are zero."""

_NAMES = ("--numeric-owner", "--xattrs", "--xattrs-include=user.*")
_CREATE = (
    *("--create", "--file=-", "--format=posix", "--sparse", *_NAMES),
    # Of the overlay's own attributes only "opaque" means the same over another mount of the image.
    *("--xattrs-exclude=user.overlay.[!o]*", "--xattrs-exclude=user.overlay.or*"),
)
_EXTRACT = ("--extract", "--file=-", "--same-owner", "--same-permissions", *_NAMES)


def pack(
    place: SandboxNamespaces, layer: Path, order: CreateRequest, header: str, target: int
) -> tuple[dict[str, Any], list[int]]:
    """Write the layer of the sandbox at ``place`` into ``target``, in a child forked for it.

    Raises:
        OSError: ``EFBIG``: the archive would be larger than the sandbox's own limit; ``EBUSY``: a file was changed
            meanwhile; ``EOPNOTSUPP``: the runtime's own file system holds the layer; an error of the disk.
    """
    if not place.is_pivoted and _kind_of_root(place.process.fd).startswith("fuse"):
        raise OSError(
            errno.EOPNOTSUPP, "the runtime's own file system holds its layer; a snapshot needs start: direct"
        )
    os.chdir(layer)
    user_ids.become_root_of_sandbox(order.host_uid, order.host_gid, several=order.users)
    said = base64.b64encode(header.encode()).decode()
    # Times in whole seconds need no extended header.
    _tar([*_CREATE, f"--pax-option={HEADER}={said},delete=[acm]time", "."], order.disk_mib << 20, stdout=target)
    return {"bytes": os.fstat(target).st_size}, []


def unpack(source: str, layer: Path, order: CreateRequest) -> tuple[dict[str, Any], list[int]]:
    """Fill the layer of a sandbox that is not mounted yet from an archive, in a child forked for it.

    Raises:
        OSError: ``EBADMSG``: it is damaged or no archive of a layer; ``EFBIG``: it holds more than the sandbox may
            write; an error of the disk.
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
    found = DiskUsage()
    for _ in scan(["."], [], found):
        if limit and found.disk > limit:
            raise _too_large(limit)
    return {}, []


def _tar(
    arguments: list[str], limit: int, *, stdin: int = subprocess.DEVNULL, stdout: int = subprocess.DEVNULL
) -> None:
    """Run tar in the working folder; no file that it writes may exceed ``limit`` bytes (0 for none)."""
    us = os.getpid()

    def bound() -> None:
        syscalls.die_with_parent(us)
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
    said = next(iter(done.stderr.splitlines()), "").removeprefix("tar: ")
    for number in OF_THE_MACHINE:
        if os.strerror(number) in done.stderr:
            raise OSError(number, said)
    if done.returncode == -signal.SIGKILL:
        raise OSError(errno.ENOMEM, "tar was killed")
    if done.returncode == -signal.SIGXFSZ:
        raise OSError(errno.EFBIG, f"its files have more than the {limit >> 20} MiB that it may write")
    if "--create" in arguments:
        raise OSError(errno.EBUSY, said)
    raise OSError(errno.EBADMSG, f"it is damaged or no snapshot: {said}")


def _too_large(limit: int) -> OSError:
    return OSError(errno.EFBIG, f"it has more than the {limit >> 20} MiB that the sandbox may write; raise disk_mib")


def _kind_of_root(process: int) -> str:
    """Return the kind of file system on which a process has its root, by its open folder in ``/proc``."""
    with open(os.open("mounts", os.O_RDONLY | os.O_CLOEXEC, dir_fd=process)) as table:
        # The last mount is on top.
        return [fields[2] for line in table if (fields := line.split())[1] == "/"][-1]
