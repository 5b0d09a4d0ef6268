# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sources of Harbor tasks: folders, registry files, git repositories and packed tasks.

Repositories and packed tasks are unpacked below a cache folder. Each version gets a folder of its own that never
changes, since rows name paths in this folder. Repositories and packed tasks are untrusted: no file of them is
executed, and no file is written outside of the version's folder.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import re
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.tasks.harbor.task_folder import CONFIG_FILE, MAX_DEPTH, MAX_FILES, refusing_anything
from nemo_gym_prorl.tasks.task import validation_refusal


GIT_TIMEOUT_S = 1800.0  # large repositories over slow connections

MAX_TASK_BYTES = 2 << 30
"""Maximum bytes of an unpacked archive; protects the disk from decompression bombs."""

_GIT_URL = re.compile(
    r"(?P<url>(?:(?:https?|ssh|git|file)://[^/#\s]*/|[\w.-]+@[\w.-]+:)[^#\s]+?)"
    r"(?:@(?P<ref>\w[\w./+-]*))?(?:#(?P<path>[^#]+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")

_GZIP = b"\x1f\x8b"

Progress = Callable[[str], None]


class RegistryTask(BaseModel):
    """Task of a registry: a folder of a git repository, or, without ``git_url``, a folder on this machine."""

    name: str
    path: str
    git_url: str | None = None
    git_commit_id: str | None = None


class RegistryDataset(BaseModel):
    name: str
    version: str = ""
    tasks: list[RegistryTask] = Field(default_factory=list)


def task_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders with a ``task.toml``, sorted: ``folder`` itself, or its subfolders at any depth.

    Symlinks to folders are not followed, and hidden folders are left out.

    Raises:
        CallerError: the folder does not exist or contains no task.
    """
    if not folder.is_dir():
        raise CallerError("is no folder", field=str(folder))
    found = False
    for name, folders, files in os.walk(folder):
        folders[:] = sorted(one for one in folders if not one.startswith("."))
        if CONFIG_FILE in files:
            folders.clear()
            found = True
            yield Path(name)
    if not found:
        raise CallerError(f"has no folder with a {CONFIG_FILE}", field=str(folder))


def is_git_url(source: str) -> bool:
    return _GIT_URL.fullmatch(source) is not None and not Path(source).exists()


def tasks_of_url(source: str, cache: Path, progress: Progress) -> Iterator[Path]:
    """Yield the task folders of the git repository ``URL@REF`` or of its subfolder ``URL@REF#FOLDER``.

    Raises:
        CallerError: ``@REF`` is missing, or the folder contains no task.
        InfrastructureError: git failed.
    """
    parts = _GIT_URL.fullmatch(source)
    assert parts is not None
    if parts["ref"] is None:
        raise CallerError("must end with @REF, a commit, tag or branch", field=source)
    checkout = checked_out(parts["url"], parts["ref"], cache, progress)
    yield from task_folders(inside(checkout, parts["path"] or "."))


def tasks_of_registry(file: Path, wanted: str | None, cache: Path, progress: Progress) -> Iterator[tuple[str, Any]]:
    """Yield (name, folder) of each task of a dataset, or (name, :class:`CallerError`) if the task is unavailable.

    Args:
        file: registry: a JSON list of datasets.
        wanted: ``NAME`` or ``NAME@VERSION`` of the dataset; ``None`` if the registry has only one.

    Raises:
        CallerError: the file is no registry, or ``wanted`` does not match exactly one dataset.
    """
    try:
        datasets = TypeAdapter(list[RegistryDataset]).validate_json(file.read_bytes())
    except OSError as error:
        raise CallerError(f"cannot be read: {error.strerror}", field=str(file)) from error
    except ValidationError as error:
        raise CallerError(f"is no registry: {validation_refusal(error).reason}", field=str(file)) from error
    meant = [one for one in datasets if wanted in (None, one.name, f"{one.name}@{one.version}")]
    if len(meant) != 1:
        names = ", ".join(f"{one.name}@{one.version}" for one in datasets) or "none"
        raise CallerError(f"must name one data set; there are: {names}", field="--name")
    failed: dict[tuple[str, str], CallerError] = {}
    for task in meant[0].tasks:
        repository = (task.git_url or "", task.git_commit_id or "HEAD")
        try:
            if repository in failed:
                raise failed[repository]
            with refusing_anything():
                if task.git_url is None:
                    found = file.parent / Path(task.path).expanduser()
                else:
                    found = inside(checked_out(*repository, cache, progress), task.path)
            yield task.name, found
        except InfrastructureError as error:
            failed[repository] = CallerError(error.reason, field="git_url")
            yield task.name, failed[repository]
        except CallerError as error:
            yield task.name, error


def checked_out(url: str, ref: str, cache: Path, progress: Progress) -> Path:
    """Return the folder with a repository's files at a commit, tag or branch. A commit is fetched only once. Raises
    InfrastructureError with git's message if git fails."""
    name = re.sub(r"[^\w.]+", "-", url.rstrip("/").removesuffix(".git"))[-50:].strip("-.")
    key = f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
    if _COMMIT.fullmatch(ref) and (cache / f"{key}-{ref}").is_dir():
        return cache / f"{key}-{ref}"
    if url.startswith("-") or ref.startswith("-"):
        raise CallerError(f"{url}@{ref} is no address of a repository", field="git_url")
    progress(f"fetching {url} at {ref}")
    with _staging(cache) as work:
        _git(work, "init", "--quiet")
        _git(work, "fetch", "--quiet", "--depth=1", "--no-tags", "--no-recurse-submodules", "--", url, ref)
        commit = _git(work, "rev-parse", "FETCH_HEAD").strip()
        _git(work, "checkout", "--quiet", "--detach", commit)
        return _publish(work, cache / f"{key}-{commit}")


def _git(folder: Path, *words: str) -> str:
    # Programs that the user has configured for trusted repositories must not run in this untrusted one.
    options = ["-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"]
    environ = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "https:http:ssh:git:file"}
    command = ["git", *options, *words]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, errors="replace", timeout=GIT_TIMEOUT_S
        )
    except FileNotFoundError as error:
        raise InfrastructureError("git is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(f"git {words[0]} did not finish within {GIT_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise InfrastructureError(f"git {words[0]} failed: {' / '.join(done.stderr.split('\n'))[-500:].strip(' /')}")
    return done.stdout


def inside(folder: Path, path: str) -> Path:
    """Return a path below a folder, with symlinks resolved; raises CallerError if the path leads out of the folder."""
    found = (folder / path).resolve()
    if not found.is_relative_to(folder.resolve()):
        raise CallerError(f"{path!r} leaves the repository", field="path")
    return found


def unpacked(record: Mapping[str, Any], cache: Path) -> Path:
    """Unpack the ``task_binary`` of a record (a tar archive, perhaps compressed with gzip) and return the folder.

    Raises:
        CallerError: ``task_binary`` is missing, or the archive is broken, too large, contains other entries than files
            and folders, or a path that leads out of the archive.
    """
    packed = record.get("task_binary")
    if not isinstance(packed, bytes):
        raise CallerError("must be the bytes of a tar archive", field="task_binary")
    name = Path(str(record.get("path"))).name.lstrip(".") or "task"
    target = cache / f"packed-{hashlib.sha256(name.encode() + b'/' + packed).hexdigest()[:16]}"
    if not target.is_dir():
        with _staging(cache) as work:
            try:
                _extract(packed, work / name)
            except (tarfile.TarError, EOFError, OSError, RecursionError, ValueError, zlib.error) as error:
                raise CallerError(f"cannot be unpacked: {error}", field="task_binary") from error
            _publish(work, target)
    return next(task_folders(target))


def _extract(packed: bytes, target: Path) -> None:
    """Write the files and folders of an archive; raises an error if the archive is unsafe or broken."""
    source = io.BytesIO(packed)
    stream = gzip.GzipFile(fileobj=source) if packed.startswith(_GZIP) else source
    with tempfile.TemporaryFile(dir=target.parent) as plain:
        while block := stream.read(1 << 20):
            plain.write(block)
            if plain.tell() > MAX_TASK_BYTES:
                raise ValueError(f"it has more than {MAX_TASK_BYTES >> 30} GiB")
        plain.seek(0)
        with tarfile.open(fileobj=plain, mode="r:") as archive:
            for number, member in enumerate(archive):
                parts = member.name.split("/")
                if member.name.startswith("/") or ".." in parts or len(parts) > MAX_DEPTH:
                    raise ValueError(f"{member.name!r:.100} leads out of it, or is too deep")
                if not (member.isreg() or member.isdir()) or member.issparse():
                    raise ValueError(f"{member.name!r:.100} is not a regular file or folder; pack the file itself")
                if number >= MAX_FILES:
                    raise ValueError(f"it has more than {MAX_FILES} files")
                member.mode |= 0o644  # also an agent's user reads a task's files
                archive.extract(member, target, filter="data")
            plain.seek(archive.offset)
            if any(plain.read(tarfile.BLOCKSIZE) or b"x"):  # tarfile takes a broken header for the end
                raise ValueError("its end is missing")


@contextmanager
def _staging(cache: Path) -> Iterator[Path]:
    """Yield an empty folder in the cache, and remove the folder at the end unless :func:`_publish` has renamed it."""
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".making-", dir=cache))
    try:
        yield work
    finally:
        rmtree(work, ignore_errors=True)


def _publish(work: Path, target: Path) -> Path:
    """Rename a complete folder to ``target``, unless another process has published ``target`` meanwhile."""
    if not target.is_dir():
        try:
            work.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    return target
