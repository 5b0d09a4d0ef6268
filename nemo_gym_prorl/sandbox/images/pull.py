# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Images from registries: one, or all that a dataset names; and the store of images for an event loop.

Pulls are anonymous unless asked otherwise: no stored login is sent. An image that is there is not pulled again, so a
run that was interrupted goes on image by image. Trouble of networks and registries is retried after a growing pause;
what a registry denies is not.

:class:`AsyncImageStore` pulls and unpacks in threads, once for all who wait. A caller who goes away leaves the work
going for the next caller. It ends with the process, and leaves nothing under a name that means complete.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_gym_prorl.failures import CallerError, InfrastructureError, RolloutError
from nemo_gym_prorl.sandbox.images import programs
from nemo_gym_prorl.sandbox.images.entries import Progress, machine, silent
from nemo_gym_prorl.sandbox.images.oci_config import OciConfig, of_pull
from nemo_gym_prorl.sandbox.images.recipe import Format
from nemo_gym_prorl.sandbox.images.reference import Reference, Registry, registry
from nemo_gym_prorl.sandbox.images.rootfs import check_made
from nemo_gym_prorl.sandbox.images.store import ImageStore, Info, OpenImage
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime


PULL_TIMEOUT_S = 3600.0

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0

_DENIED = ("UNAUTHORIZED", "DENIED", "unauthorized", "denied: ")
_UNKNOWN = ("MANIFEST_UNKNOWN", "NAME_UNKNOWN", "manifest unknown", "no child with platform")


@dataclass(frozen=True, slots=True)
class Puller:
    """How images are pulled.

    Attributes:
        store: where to.
        runtime: what does it.
        format: what they become; what suits the cache's disk if not given.
        credentials: send what the user has stored for registries.
        tries: how often each is tried.
        pause_s: before the second try; doubled for each further one.
    """

    store: ImageStore
    runtime: Runtime
    format: Format | None = None
    credentials: bool = False
    tries: int = 4
    pause_s: float = FIRST_PAUSE_S

    def pull(self, wanted: Registry, progress: Progress = silent) -> Path:
        """Pull an image unless it is there; gives where it lies.

        Raises:
            CallerError: there is no such image, or it is none for this machine.
            InfrastructureError: it could not be had; with the words of the runtime.
        """
        entry = wanted.entry(machine())
        with self.store.images.making(entry, progress) as work:
            if work is not None:
                kind = self.format or self.store.default_format()
                made, config = self.fetch(wanted, work, kind, progress)
                info = Info("pulled", wanted.uri, kind, 0, time.time(), config=config)
                self.store.publish(work, made, entry, info)
        path = self.store.payload(entry)
        if path is None:
            raise InfrastructureError(f"{wanted.uri} was removed as soon as it was pulled")
        return path

    def fetch(self, wanted: Registry, work: Path, kind: Format, progress: Progress) -> tuple[Path, OciConfig]:
        """Pull an image into a folder of the caller's; returns it and its configuration.

        Raises:
            CallerError, InfrastructureError: as :meth:`pull`.
        """
        progress(f"pulling {wanted.uri}")
        for tried in range(self.tries):
            try:
                made = self._try(wanted, work, kind == "folder")
                break
            except InfrastructureError as error:
                if tried + 1 == self.tries or not _may_pass(error):
                    raise _explained(wanted, error, self.credentials) from error
                progress(f"pulling {wanted.uri} again, after {error}")
                time.sleep(min(self.pause_s * 2**tried, LONGEST_PAUSE_S) + random.uniform(0, self.pause_s))
        check_made(made)
        config = of_pull(work / programs.DOWNLOADS)
        if kind == "folder":
            config.rewrite_script(made)
        return made, config

    def _try(self, wanted: Registry, work: Path, unpacked: bool) -> Path:
        return programs.build(
            self.runtime,
            work,
            wanted.uri,
            timeout_s=PULL_TIMEOUT_S,
            unpacked=unpacked,
            credentials=self.credentials,
        )


@dataclass(frozen=True, slots=True)
class PullOutcome:
    """What became of one image of many: ``reason`` is empty if it is there now, ``new`` if it was not before."""

    uri: str
    reason: str = ""
    new: bool = False


def pull_all(puller: Puller, wanted: Iterable[Registry], jobs: int) -> Generator[PullOutcome]:
    """Pull many images, ``jobs`` at a time; one outcome for each, as they come. Ends them all when it is closed."""

    def one(reference: Registry) -> PullOutcome:
        if puller.store.locate(reference):
            return PullOutcome(reference.uri)
        try:
            puller.pull(reference)
        except RolloutError as error:
            return PullOutcome(reference.uri, error.reason)
        except OSError as error:
            return PullOutcome(reference.uri, str(error))
        return PullOutcome(reference.uri, new=True)

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(one, reference) for reference in dict.fromkeys(wanted)]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            programs.stop_all()
            raise


def images_of(rows: Path, field: str) -> list[Registry]:
    """The images that the rows of a dataset name, each once, in order.

    Args:
        rows: JSONL file.
        field: where a row names its image; dots lead into objects.

    Raises:
        CallerError: a row is no JSON object or names no image; says which line.
    """
    found: dict[Registry, None] = {}
    with rows.open() as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{rows.name} line {number}"
            try:
                value: Any = json.loads(line)
            except ValueError as error:
                raise CallerError(f"{where} is not JSON: {error}", field="from") from error
            for part in field.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if not isinstance(value, str):
                raise CallerError(f"{where} has no text in {field!r}; name the place with --field", field="from")
            found[registry(value, where)] = None
    return list(found)


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, InfrastructureError) and not _says(error, (*_DENIED, *_UNKNOWN))


def _says(error: InfrastructureError, words: tuple[str, ...]) -> bool:
    return any(word in error.reason for word in words)


def _explained(wanted: Registry, error: InfrastructureError, credentials: bool) -> RolloutError:
    if _says(error, _UNKNOWN):
        return CallerError(f"there is no {wanted.uri} for {machine()}: {error.reason}", field="image")
    if _says(error, _DENIED):
        hint = "your login is not enough" if credentials else "if it is private, log in and pull with --credentials"
        return CallerError(f"{wanted.uri} is denied: {hint}: {error.reason}", field="image")
    return InfrastructureError(f"{wanted.uri} could not be pulled: {error.reason}")


_running: dict[str, Future[None]] = {}
"""What is being pulled or unpacked, and who waits for it."""

_places = threading.Semaphore(4)
"""Images that are pulled or unpacked at a time: more only share the same line and disk."""


class AsyncImageStore:
    """See the module.

    Args:
        store: the images.
        pull: pull what is not there.
        unpack: start SIFs from an unpacked copy where there is room for one.
    """

    def __init__(self, store: ImageStore, *, pull: bool = True, unpack: bool = True) -> None:
        self._store = store
        self._pull = pull
        self._unpack = unpack
        self._default: Path | None = None

    async def locate(self, wanted: Reference | None, runtime: Runtime) -> Path:
        """Where an image lies, pulled if need be; the default image if none is named.

        Raises:
            CallerError: there is no such image.
            InfrastructureError: it could not be pulled.
        """
        if wanted is None:
            return await asyncio.to_thread(self._find_default)
        path = await asyncio.to_thread(self._store.locate, wanted)
        if path is not None:
            return path
        assert isinstance(wanted, Registry)
        if not self._pull:
            raise CallerError(f"{wanted.uri} is not there: prorl image pull {wanted.uri}", field="image")
        await _once(wanted.uri, lambda: Puller(self._store, runtime).pull(wanted))
        return await self.locate(wanted, runtime)

    async def fetch(self, wanted: Reference | None, runtime: Runtime) -> None:
        """Have an image here and unpacked, so that a start from it waits for neither.

        Raises:
            CallerError, InfrastructureError: as :meth:`locate` and :meth:`.store.ImageStore.open`.
        """
        await self._unpack_once(await self.locate(wanted, runtime), runtime)

    async def _unpack_once(self, image: Path, runtime: Runtime) -> None:
        if self._unpack and not await asyncio.to_thread(self._store.is_ready, image):
            await _once(str(image), lambda: self._store.open(image, runtime).release())

    def _find_default(self) -> Path:
        from nemo_gym_prorl.sandbox.images.builder import default_image_path  # which pulls its base by this module

        # Once, since working out its name takes milliseconds.
        if not self._default or not self._default.is_dir():
            self._default = default_image_path()
            if not self._default.is_dir():
                raise CallerError("the default image is not built: run 'prorl setup'", field="image")
        return self._default

    @asynccontextmanager
    async def start(self, image: Path, runtime: Runtime) -> AsyncIterator[OpenImage]:
        """What a sandbox of ``image`` starts from; kept there for the block, and by whoever got a copy of the lock.

        Raises:
            CallerError, InfrastructureError: as :meth:`.store.ImageStore.open`.
        """
        await self._unpack_once(image, runtime)
        opening = asyncio.ensure_future(asyncio.to_thread(self._store.open, image, runtime, unpack=self._unpack))
        try:
            start = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # Its lock would be nobody's.
            opening.add_done_callback(_drop)
            raise
        try:
            yield start
        finally:
            start.release()


async def _once(what: str, work: Callable[[], object]) -> None:
    """Do ``work`` in a thread, unless that is being done: then wait for its end. Either way with its outcome."""
    future = _running.get(what)
    if future is None:
        future = _running[what] = Future()
        # Who goes away cancels nothing.
        future.set_running_or_notify_cancel()
        # Not one of the loop's own threads: those are few, and waited for when the process ends.
        threading.Thread(target=_do, args=(what, work, future), name=f"image {what}", daemon=True).start()
    await asyncio.wrap_future(future)


def _do(what: str, work: Callable[[], object], future: Future[None]) -> None:
    error: Exception | None = None
    try:
        with _places:
            work()
    except Exception as caught:
        error = caught
    del _running[what]
    if error:
        future.set_exception(error)
    else:
        future.set_result(None)


def _drop(opening: asyncio.Future[OpenImage]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().release()
