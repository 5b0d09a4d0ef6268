# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""CheckpointStore of rollouts: after a turn, all that another attempt, or another rollout, needs to go on from there.

The handler decides what a checkpoint holds; this module decides how long it is kept.

- A job without its outcome always keeps its latest checkpoint. All others are erased over a bound of bytes, those of
  jobs that ended longest ago first, or when their job has ended for so long.
- The rollout owns its checkpoints. Its service renews them while it remembers the rollout; a server that keeps them
  erases by age only what no service renews.
- Forks share the checkpoint where they began; it is erased with its last holder.

In a folder that all services of a fleet see (:class:`SharedCheckpoints`), another service goes on with the rollouts
of one that is lost. Each rollout has a folder there, named after its id at its service, with a file for each turn: all
of the checkpoint but the sandbox's files, which the environment's server keeps beside these. Files are complete or
absent. Only the service that runs a rollout writes under its id, and the next try has another id, so a service that
was cut off and goes on disturbs no other. ``after`` names the turn of another rollout from which one went on. Files
are JSON and belong to the services' user: who cannot write in the folder cannot make a service go on anywhere.
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
"""Seconds between two renewals of what jobs have."""
ORPHAN_S = 24 * 3600.0  # a service with a journal may be down for a night
"""Seconds after its last renewal after which a checkpoint belongs to no rollout any more."""


@runtime_checkable
class SerializableState(Protocol):
    """The state of a checkpoint that others than its service can go on from."""

    def pack(self) -> bytes:
        """All of it; its handler's ``unpack`` makes the state of that."""
        ...


class CheckpointStore:
    """Those of one pipeline.

    Args:
        max_bytes: what all together may take, but for the latest of live jobs.
        keep_s: how long those of a job are kept that has ended.
        erase: erases some that no job has any more; told of which environment they are.
        clock: monotonic seconds.
        shared: where other services find them, too.
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
        """What all take."""

    async def keep(self, job: Job, checkpoint: Checkpoint) -> None:
        """A job has taken one, and goes on when it is where others find it."""
        try:
            if self._shared is not None:
                await self._shared.write(job, checkpoint)
        finally:
            self.add(job, checkpoint)

    def add(self, job: Job, checkpoint: Checkpoint) -> None:
        """A job has one more."""
        job.checkpoints[checkpoint.turn] = checkpoint
        self._live[job] = None
        self.bytes += checkpoint.size if not self._holders[checkpoint] else 0
        self._holders[checkpoint] += 1
        self.tidy()

    def has(self, checkpoint: Checkpoint) -> bool:
        """Whether any job has it still."""
        return checkpoint in self._holders

    def held(self) -> dict[str, list[Checkpoint]]:
        """All that any job has, by environment."""
        found: dict[str, dict[Checkpoint, None]] = {}
        for job in (*self._live, *self._ended):
            found.setdefault(job.environment, {}).update(dict.fromkeys(job.checkpoints.values()))
        return {environment: [*checkpoints] for environment, checkpoints in found.items()}

    def drop(self, job: Job, checkpoint: Checkpoint) -> None:
        """A job has no use for one of its own any more."""
        job.checkpoints.pop(checkpoint.turn, None)
        self._holders[checkpoint] -= 1
        if not self._holders[checkpoint]:
            del self._holders[checkpoint]
            self.bytes -= checkpoint.size
            self._erase(job.environment, [checkpoint])

    def ended(self, job: Job, *, keep: bool) -> None:
        """A job has its outcome; nobody will ask for its checkpoints unless they are to be kept."""
        if job in self._live:
            del self._live[job]
            self._ended[job] = self._clock()
            if not keep:
                self._drop_all(job)
            self.tidy()

    def tidy(self) -> None:
        """Erase what is too old or too much."""
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
"""A key at the top of Gym's whole configuration, since agents and environments' servers read it: a folder that all
nodes of a fleet see, in which rollouts are kept for each other."""
LOGGER = logging.getLogger(__name__)

_ROLLOUTS, _NAME, _AFTER = "rollouts", "folder-id", "after"
_TAKEN = 2
"""The latest, and one to fall back on: what a machine wrote last may be damaged when it loses its power."""
_MOST_LINKS = 100

_Place = tuple[str, Path]
"""The id under which a turn was written, and its file."""


class SharedCheckpoints:
    """The folder, as one service uses it.

    Args:
        path: of the folder, absolute.

    Raises:
        CallerError: there is none, or nothing can be written there.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_absolute():
            raise CallerError(f"{path} must begin with /: servers run in several folders", field=CHECKPOINT_FOLDER)
        self._rollouts = path / _ROLLOUTS
        self._swept = 0.0
        self._written: dict[Checkpoint, Path] = {}
        try:
            self.identity = self._identify(path)
        except OSError as error:
            reason = f"{path} can't be used: {error.strerror}; all nodes need a folder there that their user can write"
            raise CallerError(reason, field=CHECKPOINT_FOLDER) from error

    def _identify(self, path: Path) -> str:
        """What tells the folder from any other, whatever nodes call it: whoever comes first gives it a name."""
        self._rollouts.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._rollouts):
            pass
        with suppress(FileExistsError), (path / _NAME).open("x") as file:
            file.write(uuid.uuid4().hex)
        for _ in range(50):
            if len(found := (path / _NAME).read_text()) == 32:
                return found
            time.sleep(0.1)  # the first one is about to write it
        raise CallerError(f"{path / _NAME} is damaged; remove it while no node runs", field=CHECKPOINT_FOLDER)

    async def write(self, job: Job, checkpoint: Checkpoint) -> None:
        """Put a checkpoint there; where that can't be, its service alone can go on from it."""
        if not isinstance(checkpoint.state, SerializableState):
            return
        folder = self._folder(job.id)
        own = any(self._written.get(one, Path()).parent == folder for one in job.checkpoints.values())
        after = max(((one.turn, one.borrowed) for one in job.checkpoints.values() if one.borrowed), default=None)
        try:
            path = await asyncio.to_thread(self._write, folder, job, checkpoint, after, begin=not own)
        except OSError as error:
            LOGGER.warning("job %s: turn %d is not in %s: %s", job.id, checkpoint.turn, CHECKPOINT_FOLDER, error)
            return
        self._written[checkpoint] = path

    async def erase(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Erase what this service has put there for them."""
        paths = [path for one in checkpoints if (path := self._written.pop(one, None)) is not None]
        await asyncio.to_thread(_erase, paths)

    async def renew(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Keep them from going by age, those that a job has borrowed, too."""
        folders = {self._folder(one.borrowed) for one in checkpoints if one.borrowed}
        folders |= {self._written[one].parent for one in checkpoints if one in self._written}
        await asyncio.to_thread(_renew, folders)

    async def turns(self, rollout: str) -> list[int]:
        """The turns after which it could go on."""
        return sorted(await asyncio.to_thread(self._line, rollout))

    async def give(self, job: Job, read: Callable[[bytes], Any]) -> None:
        """Have a job go on from where it is to begin, if anything is there; else it says that it begins anew.

        Args:
            job: which says where.
            read: gives what ``pack`` of a checkpoint's state was made of.

        Raises:
            CallerError: it is a fork, which can't begin anew.
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
            assert job.checkpoint_store is not None, "the pipeline keeps them"
            job.checkpoint_store.add(job, one)
        if not found:
            restart_without_checkpoint(job, f"nothing is kept in {CHECKPOINT_FOLDER}, or it is damaged")

    def _folder(self, rollout: str) -> Path:
        return self._rollouts / hashlib.sha256(rollout.encode(errors="replace")).hexdigest()[:40]

    def _line(self, rollout: str) -> dict[int, _Place]:
        """The turns that led to where a rollout is, of those that are there."""
        found: dict[int, _Place] = {}
        last: int | None = None
        for _ in range(_MOST_LINKS):
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
    ) -> list[tuple[Checkpoint, _Place]]:
        whose = _whose(resume_point.client, row_digest(job.row))
        found: list[tuple[Checkpoint, _Place]] = []
        for rollout in resume_point.tries:
            for _turn, place in sorted(self._line(rollout).items(), reverse=True):
                # Under its own id another one may have been, of a service with another journal.
                own = {"accepted": job.submitted_at, "client": job.client} if place[0] == job.id else {}
                if len(found) < _TAKEN and (checkpoint := _read(place[1], whose | own, read)) is not None:
                    found.append((checkpoint, place))
            if found:
                return found
        for rollout in resume_point.parents:
            there = self._line(rollout).get(resume_point.turn or 0)
            if there is not None and (checkpoint := _read(there[1], whose, read)) is not None:
                return [(checkpoint, there)]
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
        if begin:  # what another rollout has left under this id is no part of this one
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if begin and after is not None:
            _put(folder / _AFTER, orjson.dumps(after))
        about = {name: getattr(checkpoint, name) for name in ("turn", "size", "spent_s", "lost")}
        about |= _whose(job.client, row_digest(job.row)) | {"accepted": job.submitted_at}
        content = orjson.dumps(about) + b"\n" + checkpoint.state.pack()
        path = folder / str(checkpoint.turn)
        _put(path, zstandard.ZstdCompressor(level=1, write_checksum=True).compress(content))
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
    """A job can't go on from where it was to begin.

    Raises:
        CallerError: it is a fork.
    """
    if job.forked_from is not None:
        raise CallerError(f"what it was to begin from is gone: {why}", field="turn")
    reason = f"it begins anew: {why}"
    job.failures.append(Failure(FailureKind.SESSION_LOST, Origin.INFRASTRUCTURE, Stage.INIT, reason))


def _put(path: Path, content: bytes) -> None:
    fresh = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(content)
    fresh.rename(path)


def _whose(client: str | None, digest: bytes) -> dict[str, Any]:
    return {"row": digest.hex(), "client": client}


def _read(path: Path, whose: Mapping[str, Any], read: Callable[[bytes], Any]) -> Checkpoint | None:
    """``None`` for one that is gone, damaged, or of another row or client."""
    try:
        if not path.is_file():
            raise ValueError("it is no file")
        about, packed = zstandard.decompress(path.read_bytes()).split(b"\n", 1)
        told = orjson.loads(about)
        if any(told[name] != wanted for name, wanted in whose.items() if wanted is not None):
            raise ValueError("it is another rollout's")
        state = read(packed)
        return Checkpoint(told["turn"], state, told["size"], told["spent_s"], tuple(told["lost"]))
    except (OSError, zstandard.ZstdError, ValueError, KeyError, TypeError) as error:
        LOGGER.warning("%s is passed over: %s", path, error)
        return None


def _after(path: Path) -> tuple[int, str] | None:
    """From which turn of which rollout one went on, if it did."""
    with suppress(OSError, ValueError, TypeError):
        match orjson.loads(path.read_bytes()) if path.is_file() else None:
            case [int(turn), str(rollout)]:
                return turn, rollout
    return None


def _turns(folder: Path) -> list[int]:
    with suppress(OSError):
        return [int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.is_file()]
    return []


def _renew(paths: Iterable[Path]) -> None:
    """Have files or folders, as far as they are there, count as new."""
    for path in paths:
        with suppress(OSError):
            os.utime(path)


def _erase(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)
            if not _turns(path.parent):
                shutil.rmtree(path.parent)
