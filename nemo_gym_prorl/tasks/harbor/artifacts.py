# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Artifacts of the agent's sandbox for a separate verifier: one archive, which keeps only what the task declares.

The agent controls the archive, so it is untrusted. :func:`sanitize` keeps files, folders and links that are at or
below a declared path, and nothing that is below a link.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import shlex
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.harbor.task_config import Artifact
from nemo_gym_prorl.tasks.sandbox import HasContainer


ARCHIVE = "artifacts.tar"
"""Name of the archive in its folder."""

COLLECT_TIMEOUT_S = 600.0  # for all artifacts: reading gigabytes from a loaded disk

MAX_BYTES = 4 << 30
"""Bytes of all artifacts together; members after the limit are left out."""

_UNSANITIZED = "/tmp/.prorl-artifact.tar"  # inside


async def collect(
    sandbox: HasContainer, artifacts: Sequence[Artifact], folder: str
) -> tempfile.TemporaryDirectory[str]:
    """Return a folder of the host with the archive of the artifacts. Missing artifacts are left out.

    Args:
        sandbox: the agent's sandbox.
        artifacts: the declared artifacts.
        folder: working folder, which relative artifacts start from.

    Raises:
        AgentError: the agent has ended its sandbox.
        InfrastructureError: the sandbox has ended.
    """
    sources = [posixpath.normpath(posixpath.join(folder, artifact.source)) for artifact in artifacts]
    kept = tempfile.TemporaryDirectory(prefix="prorl-harbor-")
    os.chmod(kept.name, 0o755)  # noqa: PTH101  # takes no time
    raw: dict[str, Path] = {}
    deadline = time.monotonic() + COLLECT_TIMEOUT_S
    for number, (source, artifact) in enumerate(zip(sources, artifacts, strict=True)):
        excluded = " ".join(f"--exclude={shlex.quote(pattern)}" for pattern in artifact.exclude)
        member = shlex.quote(source.lstrip("/") or ".")
        command = f"rm -rf {_UNSANITIZED}; tar -cf {_UNSANITIZED} -C / {excluded} -- {member}"
        await sandbox.exec(command, cwd="/", timeout_s=max(1.0, deadline - time.monotonic()))
        # Without an archive the verifier decides on nothing.
        with contextlib.suppress(CallerError):
            await sandbox.download(_UNSANITIZED, Path(kept.name, f"raw-{number}"))
            raw[source] = Path(kept.name, f"raw-{number}")
    await asyncio.to_thread(sanitize, raw, Path(kept.name, ARCHIVE))
    for path in raw.values():
        path.unlink()
    return kept


def sanitize(sources: Mapping[str, Path], target: Path) -> None:
    """Merge untrusted archives, each limited to files, folders and links at or below a path. Damage ends a copy.

    Links that lead out of all these paths are left out, and so is what is below a link.

    Args:
        sources: absolute path inside to its archive.
        target: the new archive.
    """
    merged = _Merged([path.strip("/") for path in sources])
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as out:
        for path, source in sources.items():
            damage = contextlib.suppress(tarfile.TarError, EOFError, OSError, ValueError)
            with damage, tarfile.open(source, "r:") as archive:
                for member in archive:
                    if clean := merged.admit(member, path.strip("/")):
                        out.addfile(clean, archive.extractfile(member) if clean.isreg() else None)


class _Merged:
    """Decides about members, given those before."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._kept: set[str] = set()
        self._links: set[str] = set()
        self._size = 0

    def admit(self, member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        """Return the member to write; ``None`` if it is left out."""
        name = posixpath.normpath(f"/{member.name}").lstrip("/")
        self._size += member.size
        if not _is_at_or_below(name, path) or self._links & {name, *_parents(name)} or self._size > MAX_BYTES:
            return None
        clean = tarfile.TarInfo(name)
        clean.mode, clean.mtime = member.mode & 0o777, int(member.mtime)
        if member.isreg():
            clean.size = member.size
        elif member.isdir():
            clean.type = tarfile.DIRTYPE
        elif member.islnk():
            clean.type, clean.linkname = tarfile.LNKTYPE, posixpath.normpath(f"/{member.linkname}").lstrip("/")
            if clean.linkname not in self._kept:
                return None
        elif member.issym() and name not in self._kept:
            clean.type, clean.linkname = tarfile.SYMTYPE, member.linkname
            leads_to = posixpath.normpath(posixpath.join("/", posixpath.dirname(name), member.linkname)).lstrip("/")
            if not any(_is_at_or_below(leads_to, one) for one in self._paths):
                return None
            self._links.add(name)
        else:
            return None
        self._kept.add(name)
        return clean


def _parents(name: str) -> set[str]:
    parts = name.split("/")
    return {"/".join(parts[:count]) for count in range(1, len(parts))}


def _is_at_or_below(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(f"{path}/")
