# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of rollouts: the state after a turn from which another attempt, or a fork, can resume.

The handler defines the content of a checkpoint; this module defines its lifetime:

- A job without an outcome always keeps its latest checkpoint. All other checkpoints are erased some time after their
  job ended, or above a limit of bytes, those of the earliest ended jobs first.
- The service renews the checkpoints of the rollouts that it remembers. A resources server erases checkpoints by age if
  no service renews them.
- Forks share the checkpoint where they started; the checkpoint is erased once no job holds it.

:class:`SharedCheckpoints` is a folder that all services of a fleet share, so that a service can resume the rollouts of
a lost service. Each rollout has a subfolder, named after its id at its service, with one file per turn. A file has
the whole checkpoint except the sandbox's files, which the resources server keeps. Files appear atomically. Only the
service that runs a rollout writes under its id, and the next try has another id. So a service that was cut off cannot
overwrite files of the next try. The file ``after`` names the turn of another rollout from which a rollout resumed.
Files are JSON and belong to the services' user, so only that user can make a service resume from them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import orjson
import zstandard

from nemo_gym_prorl.failures import CallerError, Failure, FailureKind, Origin, Stage
from nemo_gym_prorl.rollout.gym_rows import row_digest
from nemo_gym_prorl.rollout.job import Checkpoint, Job, ResumePoint


RENEW_S = 900.0
"""Seconds between two renewals of the checkpoints of remembered rollouts."""
ORPHAN_S = 24 * 3600.0
"""Seconds without renewal after which a checkpoint is an orphan: a service with a journal may be down for a night."""


@runtime_checkable
class SerializableState(Protocol):
    """Checkpoint state that other services can read."""

    def pack(self) -> bytes:
        """Serialize the whole state, for the handler's ``unpack``."""
        ...


class CheckpointStore:
    """Checkpoints of the jobs of one pipeline.

    Args:
        max_bytes: limit for all checkpoints; the latest checkpoints of live jobs may exceed the limit.
        keep_s: seconds for which the checkpoints of an ended job are kept.
        erase: called with an environment and those of its checkpoints that no job holds now.
        clock: returns monotonic seconds.
        shared: folder where other services find the checkpoints; ``None`` without one.
    """

    def __init__(
        self,
        max_bytes: int,
        keep_s: float,
        erase: Callable[[str, list[Checkpoint]], None],
        clock: Callable[[], float],
        shared: SharedCheckpoints | None = None,
    ) -> None:
        self._most_bytes = max_bytes
        self._keep_s = keep_s
        self._erase = erase
        self._clock = clock
        self._shared = shared
        self._holders: Counter[Checkpoint] = Counter()
        self._live: OrderedDict[Job, None] = OrderedDict()
        self._ended: OrderedDict[Job, float] = OrderedDict()
        self.bytes = 0
        """Bytes of all checkpoints."""

    async def keep(self, job: Job, checkpoint: Checkpoint) -> None:
        """Add a new checkpoint to a job; write it to the shared folder, if any. A failed write is only logged."""
        try:
            if self._shared is not None:
                await self._shared.write(job, checkpoint)
        finally:
            self.add(job, checkpoint)

    def add(self, job: Job, checkpoint: Checkpoint) -> None:
        """Add a checkpoint that is stored already to a job."""
        job.checkpoints[checkpoint.turn] = checkpoint
        self._live[job] = None
        self.bytes += checkpoint.size if not self._holders[checkpoint] else 0
        self._holders[checkpoint] += 1
        self.tidy()

    def has(self, checkpoint: Checkpoint) -> bool:
        """Return whether any job holds the checkpoint."""
        return checkpoint in self._holders

    def held(self) -> dict[str, list[Checkpoint]]:
        """Return all checkpoints that jobs hold, by environment."""
        found: dict[str, dict[Checkpoint, None]] = {}
        for job in (*self._live, *self._ended):
            found.setdefault(job.environment, {}).update(dict.fromkeys(job.checkpoints.values()))
        return {environment: [*checkpoints] for environment, checkpoints in found.items()}

    def drop(self, job: Job, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint from a job, and erase the checkpoint once no job holds it."""
        job.checkpoints.pop(checkpoint.turn, None)
        self._holders[checkpoint] -= 1
        if not self._holders[checkpoint]:
            del self._holders[checkpoint]
            self.bytes -= checkpoint.size
            self._erase(job.environment, [checkpoint])

    def ended(self, job: Job, *, keep: bool) -> None:
        """Record that a job has its outcome; erase its checkpoints unless ``keep``."""
        if job in self._live:
            del self._live[job]
            self._ended[job] = self._clock()
            if not keep:
                self._drop_all(job)
            self.tidy()

    def tidy(self) -> None:
        """Erase checkpoints beyond the limits of age and bytes."""
        while self._ended:
            job, at = next(iter(self._ended.items()))
            if self.bytes <= self._most_bytes and self._clock() - at < self._keep_s:
                break
            self._drop_all(job)
        for job in self._live if self.bytes > self._most_bytes else ():
            for turn in sorted(job.checkpoints)[:-1]:
                self.drop(job, job.checkpoints[turn])
            if self.bytes <= self._most_bytes:
                break

    def _drop_all(self, job: Job) -> None:
        del self._ended[job]
        for checkpoint in [*job.checkpoints.values()]:
            self.drop(job, checkpoint)


CHECKPOINT_FOLDER = "checkpoint_folder"
"""Top-level key of Gym's configuration, read by agents and resources servers: a folder that all nodes of a fleet
share."""
LOGGER = logging.getLogger(__name__)

_ROLLOUTS, _NAME, _AFTER = "rollouts", "folder-id", "after"
_MAX_RESTORED = 2
"""The latest checkpoint and the one before, because a power failure may damage the last file that a machine wrote."""
_MAX_LINKS = 100
"""Resumptions that are followed back from a rollout; bounds a cycle in damaged files."""

_StoredTurn = tuple[str, Path]
"""Id of the rollout that wrote a turn, and the turn's file."""


class SharedCheckpoints:
    """Checkpoint folder that the services of a fleet share, as used by one of them.

    Args:
        path: absolute path of the folder.

    Raises:
        CallerError: the path is relative, or the folder does not exist, is not writable or is damaged.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_absolute():
            raise CallerError(f"{path} must be absolute: servers run in several folders", field=CHECKPOINT_FOLDER)
        self._rollouts = path / _ROLLOUTS
        self._swept = 0.0
        self._written: dict[Checkpoint, Path] = {}
        try:
            self.identity = self._identify(path)
        except OSError as error:
            reason = f"{path} cannot be used: {error.strerror}; create a folder there that is writable on every node"
            raise CallerError(reason, field=CHECKPOINT_FOLDER) from error

    def _identify(self, path: Path) -> str:
        """Return the folder's id, which is the same on every node, regardless of mount points. The first node writes
        the id."""
        self._rollouts.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._rollouts):
            pass
        with suppress(FileExistsError), (path / _NAME).open("x") as file:
            file.write(uuid.uuid4().hex)
        for _ in range(50):
            if len(found := (path / _NAME).read_text()) == 32:
                return found
            time.sleep(0.1)  # another node has created the file and not yet written the id
        raise CallerError(f"{path / _NAME} is damaged; stop all nodes and remove it", field=CHECKPOINT_FOLDER)

    async def write(self, job: Job, checkpoint: Checkpoint) -> None:
        """Write a checkpoint to the folder, best-effort: after a failure, or if the state cannot be serialised, only
        this service can resume from the checkpoint."""
        if not isinstance(checkpoint.state, SerializableState):
            return
        folder = self._folder(job.id)
        own = any(self._written.get(one, Path()).parent == folder for one in job.checkpoints.values())
        after = max(((one.turn, one.borrowed) for one in job.checkpoints.values() if one.borrowed), default=None)
        try:
            path = await asyncio.to_thread(self._write, folder, job, checkpoint, after, begin=not own)
        except OSError as error:
            LOGGER.warning("job %s: cannot write turn %d to %s: %s", job.id, checkpoint.turn, CHECKPOINT_FOLDER, error)
            return
        self._written[checkpoint] = path

    async def erase(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Erase the files that this service wrote for the checkpoints."""
        paths = [path for one in checkpoints if (path := self._written.pop(one, None)) is not None]
        await asyncio.to_thread(_erase, paths)

    async def renew(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Reset the age of the checkpoints' folders, including those of other services."""
        folders = {self._folder(one.borrowed) for one in checkpoints if one.borrowed}
        folders |= {self._written[one].parent for one in checkpoints if one in self._written}
        await asyncio.to_thread(_renew, folders)

    async def turns(self, rollout: str) -> list[int]:
        """Return the turns from which a rollout can resume, ascending."""
        return sorted(await asyncio.to_thread(self._lineage, rollout))

    async def restore(self, job: Job, read: Callable[[bytes], Any]) -> None:
        """Attach the checkpoints of a job's resume point to the job, and clear the resume point. If there are none,
        record that the job restarts from its row.

        Args:
            job: the job; no-op without a ``resume_point``.
            read: inverse of a state's ``pack``.

        Raises:
            CallerError: the job is a fork, and its checkpoint is missing or damaged.
        """
        resume_point, job.resume_point = job.resume_point, None
        if resume_point is None:
            return
        try:
            found = await asyncio.to_thread(self._find, job, resume_point, read)
        except BaseException:
            job.resume_point = resume_point
            raise
        for checkpoint, (rollout, path) in found:
            own = rollout == job.id
            one = checkpoint if own else replace(checkpoint, borrowed=rollout, size=0)
            if own:
                self._written[one] = path
            if job.forked_from is not None and checkpoint.turn == job.forked_from["turn"]:
                job.forked_from["lost"] = [*checkpoint.lost]
            assert job.checkpoint_store is not None, "the pipeline sets the store"
            job.checkpoint_store.add(job, one)
        if not found:
            restart_without_checkpoint(job, f"{CHECKPOINT_FOLDER} has no readable checkpoint")

    def _folder(self, rollout: str) -> Path:
        return self._rollouts / hashlib.sha256(rollout.encode(errors="replace")).hexdigest()[:40]

    def _lineage(self, rollout: str) -> dict[int, _StoredTurn]:
        """Return stored turns by number: a rollout's own, and up to each fork those of the rollouts resumed from."""
        found: dict[int, _StoredTurn] = {}
        last: int | None = None
        for _ in range(_MAX_LINKS):
            folder = self._folder(rollout)
            for turn in _turns(folder):
                if last is None or turn <= last:
                    found.setdefault(turn, (rollout, folder / str(turn)))
            after = _after(folder / _AFTER)
            if after is None:
                break
            last, rollout = after
        return found

    def _find(
        self, job: Job, resume_point: ResumePoint, read: Callable[[bytes], Any]
    ) -> list[tuple[Checkpoint, _StoredTurn]]:
        owner = _expected_owner(resume_point.client, row_digest(job.row))
        found: list[tuple[Checkpoint, _StoredTurn]] = []
        for rollout in resume_point.tries:
            for _turn, stored in sorted(self._lineage(rollout).items(), reverse=True):
                # A service with another journal may have used the same id for another job.
                own = {"accepted": job.submitted_at, "client": job.client} if stored[0] == job.id else {}
                if len(found) < _MAX_RESTORED and (checkpoint := _read(stored[1], owner | own, read)) is not None:
                    found.append((checkpoint, stored))
            if found:
                return found
        for rollout in resume_point.parents:
            parent = self._lineage(rollout).get(resume_point.turn or 0)
            if parent is not None and (checkpoint := _read(parent[1], owner, read)) is not None:
                return [(checkpoint, parent)]
        return []

    def _write(
        self,
        folder: Path,
        job: Job,
        checkpoint: Checkpoint,
        after: tuple[int, str] | None,
        *,
        begin: bool,
    ) -> Path:
        if begin:  # the folder may have files of an earlier rollout with the same id
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if begin and after is not None:
            _write_file(folder / _AFTER, orjson.dumps(after))
        about = {name: getattr(checkpoint, name) for name in ("turn", "size", "spent_s", "lost")}
        about |= _expected_owner(job.client, row_digest(job.row)) | {"accepted": job.submitted_at}
        content = orjson.dumps(about) + b"\n" + checkpoint.state.pack()
        path = folder / str(checkpoint.turn)
        _write_file(path, zstandard.ZstdCompressor(level=1, write_checksum=True).compress(content))
        self._sweep()
        return path

    def _sweep(self) -> None:
        now = time.time()
        if now - self._swept < ORPHAN_S / 24:
            return
        self._swept = now
        for folder in self._rollouts.iterdir():
            with suppress(OSError):
                if folder.stat().st_mtime < now - ORPHAN_S:
                    shutil.rmtree(folder)


def restart_without_checkpoint(job: Job, why: str) -> None:
    """Record as a failed attempt that a job cannot resume and restarts from its row; raise a ``CallerError`` for a
    fork, which cannot start without its checkpoint."""
    if job.forked_from is not None:
        raise CallerError(f"the checkpoint of the fork is lost: {why}; fork another turn", field="turn")
    reason = f"cannot resume, so the rollout restarts from its row: {why}"
    job.failures.append(Failure(FailureKind.SESSION_LOST, Origin.INFRASTRUCTURE, Stage.INIT, reason))


def _write_file(path: Path, content: bytes) -> None:
    fresh = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(content)
    fresh.rename(path)


def _expected_owner(client: str | None, digest: bytes) -> dict[str, Any]:
    return {"row": digest.hex(), "client": client}


def _read(path: Path, owner: Mapping[str, Any], read: Callable[[bytes], Any]) -> Checkpoint | None:
    """Return a stored checkpoint; ``None`` if it is missing, damaged, or of another row or client."""
    try:
        about, packed = zstandard.decompress(path.read_bytes()).split(b"\n", 1)
        fields = orjson.loads(about)
        if any(fields[name] != wanted for name, wanted in owner.items() if wanted is not None):
            raise ValueError("it belongs to another rollout")
        state = read(packed)
        return Checkpoint(fields["turn"], state, fields["size"], fields["spent_s"], tuple(fields["lost"]))
    except (OSError, zstandard.ZstdError, ValueError, KeyError, TypeError) as error:
        LOGGER.warning("checkpoint %s is skipped: %s", path, error)
        return None


def _after(path: Path) -> tuple[int, str] | None:
    """Return the turn and the id of the rollout from which a rollout resumed; ``None`` if it did not resume."""
    with suppress(OSError, ValueError, TypeError):
        match orjson.loads(path.read_bytes()):
            case [int(turn), str(rollout)]:
                return turn, rollout
    return None


def _turns(folder: Path) -> list[int]:
    with suppress(OSError):
        return [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
    return []


def _renew(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            os.utime(path)


def _erase(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)
            if not _turns(path.parent):
                shutil.rmtree(path.parent)
