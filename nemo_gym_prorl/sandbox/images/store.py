# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The image store: a user's images, and the root folders from which sandboxes on this machine start.

The store has two folders of entries (:mod:`.entries`): *images*, in the cache folder, which machines may share, and
*copies*, unpacked images on this machine's own disk. Sandboxes start from root folders, but many small files overload
a shared file system. So in a shared cache an image is stored as one file (SIF), and is unpacked once per machine.

An entry is a folder with the image (``root`` or ``image.sif``) and its description (``image.json``).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Container, Iterable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.filesystems import is_shared
from nemo_gym_prorl.sandbox.images import build_tools, rootfs
from nemo_gym_prorl.sandbox.images.entries import (
    Entries,
    Entry,
    Format,
    Lock,
    Progress,
    cache_dir,
    flush,
    free_bytes,
    ignore_progress,
    machine,
)
from nemo_gym_prorl.sandbox.images.oci_config import OciConfig
from nemo_gym_prorl.sandbox.images.reference import LocalImage, NamedImage, Reference, RegistryImage, parse
from nemo_gym_prorl.sandbox.images.rootfs import check_usable
from nemo_gym_prorl.sandbox.isolation.privilege import outer_uid
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime


INFO_FILE = "image.json"
ROOT = "root"
SIF = "image.sif"


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """Description of an image, stored beside the image.

    Attributes:
        kind: ``image`` (built), ``pulled`` or ``copy`` (unpacked).
        source: origin of the image, for display.
        format: format of the image.
        bytes: size on disk.
        made: creation time; seconds since 1970.
        config: registry configuration; ``None`` if the image does not come from a registry.
    """

    kind: str
    source: str
    format: Format
    bytes: int
    made: float
    config: OciConfig | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """One image in the store; ``unpacked``: whether it is a root folder or has an unpacked copy on this machine."""

    entry: Entry
    info: ImageInfo
    names: tuple[str, ...] = ()
    unpacked: bool = False


def write_info(folder: Path, info: ImageInfo) -> None:
    config = info.config.to_json() if info.config else None
    (folder / INFO_FILE).write_text(json.dumps({**asdict(info), "config": config}))


def read_info(folder: Path) -> ImageInfo | None:
    """Return the description in an entry's folder; ``None`` if it is missing, invalid or lacks a required field.
    Unknown fields, which a later version of this package may have written, are ignored."""
    try:
        noted = json.loads((folder / INFO_FILE).read_text())
    except (FileNotFoundError, ValueError):
        return None
    if any(field.name not in noted for field in fields(ImageInfo) if field.default is MISSING):
        return None
    known = {field.name: noted[field.name] for field in fields(ImageInfo) if field.name in noted}
    config = known.get("config")
    return ImageInfo(**{**known, "config": OciConfig.parse(config) if config else None})


def config_of(image: Path) -> OciConfig | None:
    """Return the registry configuration stored beside a root folder or SIF; ``None`` if there is none."""
    info = read_info(image.parent) if image.name in (ROOT, SIF) else None
    return info.config if info else None


UNPACKED_SIZE_FACTOR = 4
"""Disk space reserved for an unpacked copy, as a multiple of the SIF's size; the usual ratio is three."""

UNPACK_TIMEOUT_S = 1800.0  # an image may have tens of gigabytes

_NAMES = ".names"  # folder with one file per short name, which contains the name of the entry


@dataclass(frozen=True, slots=True)
class OpenImage:
    """Root folder from which a sandbox starts: an image or an unpacked copy.

    Attributes:
        path: the root folder.
        lock: lock that prevents the folder's removal; ``None`` for a root folder outside of the store.
    """

    path: Path
    lock: Lock | None

    def release(self) -> None:
        """Release the lock, if any; a copy of the lock's descriptor in another process keeps the folder."""
        if self.lock:
            self.lock.release()


class ImageStore:
    """Images and their unpacked copies. All methods block; threads and processes may use a store concurrently.

    Args:
        images: folder of the images; ``None`` for ``images`` in the cache folder.
        copies: folder of the unpacked copies; ``None`` for :func:`unpacked_dir`.
        room: maximum bytes of all copies; ``None`` for half of the sum of free bytes and bytes of copies.
    """

    def __init__(self, images: Path | None = None, copies: Path | None = None, room: int | None = None) -> None:
        self.images = Entries(images or cache_dir() / "images")
        self._copies_folder = copies
        self._room = room

    @property
    def copies(self) -> Entries:
        """The unpacked copies. Raises :class:`.InfrastructureError` if their folder belongs to another user."""
        return Entries(self._copies_folder or unpacked_dir())

    def default_format(self) -> Format:
        """Return the default format of images: a SIF if machines may share the file system, else a root folder."""
        return "sif" if is_shared(self.images.folder) else "folder"

    def locate(self, reference: Reference) -> Path | None:
        """Return the path of an image; ``None`` for a registry's image that is not pulled.

        Raises:
            CallerError: the path does not exist or is not accessible, or no image has that name.
        """
        match reference:
            case RegistryImage():
                return self.payload(reference.entry(machine()))
            case LocalImage(path):
                try:
                    there = path.exists()
                except PermissionError as error:
                    raise CallerError(
                        f"{path} is not accessible: run 'chmod a+rX' on the folders above as their owner",
                        field="image",
                    ) from error
                if not there:
                    raise CallerError(f"{path} does not exist", field="image")
                return path
            case NamedImage(name):
                entry = self._names().get(name)
                found = self.payload(entry) if entry else None
                if found is None:
                    known = sorted(self._names()) or ["none"]
                    raise CallerError(
                        f"no image is named {name!r}; names are: {', '.join(known)}; make one with 'prorl image "
                        "build' or 'prorl image pull', or give a path with a '/'",
                        field="image",
                    )
                return found

    def find(self, text: str) -> Path | None:
        """Return the path of an image, given a textual reference; otherwise as :meth:`locate`."""
        return self.locate(parse(text))

    def payload(self, entry: str) -> Path | None:
        """Return the root folder or SIF of an entry; ``None`` if the entry does not exist."""
        folder = self.images.path(entry)
        if not (folder / INFO_FILE).is_file():
            return None
        return folder / ROOT if (folder / ROOT).is_dir() else folder / SIF

    def open(self, image: Path, runtime: Runtime, *, progress: Progress = ignore_progress) -> OpenImage:
        """Lock and return the root folder for sandboxes of ``image``: the image itself, or the unpacked copy of a SIF,
        which is created if missing.

        Raises:
            CallerError: :func:`.check_usable` refuses the image.
            InfrastructureError: another process is removing the image, or a SIF can't be unpacked here.
        """
        check_usable(image)
        if image.is_dir():
            return OpenImage(image, self._lock(image))
        entry = unpacked_entry(image)
        return self._copy(entry) or self._unpack(image, entry, runtime, progress)

    def identity(self, image: Path) -> str:
        """Return a text that identifies the image at a path, without reading the image: the name of its entry. Outside
        of the store, the text has path, size and modification time."""
        if image.is_relative_to(self.images.folder):
            return f"entry:{image.relative_to(self.images.folder).parts[0]}"
        found = image.stat()
        return f"path:{image.resolve()} {found.st_size} {found.st_mtime_ns}"

    def is_ready(self, image: Path) -> bool:
        """Return whether :meth:`open` would return without unpacking."""
        return not image.is_file() or self.copies.path(unpacked_entry(image)).is_dir()

    def publish(self, work: Path, made: Path, entry: str, info: ImageInfo, base: Path | None = None) -> Path:
        """Sanitize an image and make it visible as an entry; return the image's new path.

        Args:
            work: staging folder, of :meth:`.Entries.making`.
            made: root folder or SIF, on the file system of ``work``.
            info: description of the image, whose ``bytes`` are set here.
            base: root folder in this store on which the image is built; equal files become hard links to its files.
        """
        folder = work / "entry"
        folder.mkdir()
        target = folder / (ROOT if info.format == "folder" else SIF)
        made.rename(target)
        size = rootfs.sanitize(target) if info.format == "folder" else target.stat().st_size
        if base is not None and info.format == "folder" and base.is_relative_to(self.images.folder):
            size -= rootfs.link_unchanged(target, base)
        write_info(folder, replace(info, bytes=size))
        # Without this, files of a visible entry could be empty after a power failure.
        flush(folder)
        return self.images.publish(folder, entry) / target.name

    def name(self, name: str, entry: str) -> None:
        """Make the short name ``name`` denote an entry, atomically, in place of an earlier entry."""
        folder = self.images.folder / _NAMES
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".", delete=False) as fresh:
            fresh.write(entry)
        Path(fresh.name).chmod(0o644)
        Path(fresh.name).replace(folder / name)

    def entry_named(self, name: str) -> str | None:
        return self._names().get(name)

    def all(self) -> list[Image]:
        names: dict[str, list[str]] = {}
        for name, named in self._names().items():
            names.setdefault(named, []).append(name)
        found = []
        for entry in self.images.all():
            info = read_info(entry.path)
            if info is None:
                continue
            path = self.payload(entry.name)
            unpacked = info.format == "folder" or (path is not None and self.is_ready(path))
            found.append(Image(entry, info, tuple(sorted(names.get(entry.name, ()))), unpacked))
        return found

    def all_copies(self) -> list[Image]:
        infos = ((entry, read_info(entry.path)) for entry in self.copies.all())
        return [Image(entry, info, unpacked=True) for entry, info in infos if info]

    def collect(
        self,
        protected: Iterable[str] = (),
        *,
        max_bytes: int | None = None,
        older_than_s: float | None = None,
        dry_run: bool = False,
    ) -> tuple[list[Image], list[Path]]:
        """Evict images and copies that are not in use, in LRU order, and remove staging folders of killed processes.

        Args:
            protected: names of entries to keep in any case.
            max_bytes: maximum bytes of all images, and again of all copies; ``None`` for no limit.
            older_than_s: also remove entries that were not used for this number of seconds; ``None`` for no limit.
            dry_run: only return the entries to remove.

        Returns:
            Removed entries, and other removed folders, including entries without a valid description.
        """
        protected, before = set(protected), None if older_than_s is None else time.time() - older_than_s
        removed = []
        for entries, images in ((self.images, self.all()), (self.copies, self.all_copies())):
            for image in eviction_candidates(images, protected, max_bytes=max_bytes, before=before):
                if dry_run or entries.remove(image.entry.name):
                    removed.append(image)
        swept = self.images.sweep(dry_run=dry_run) + self.copies.sweep(dry_run=dry_run)
        for entry in self.images.all():
            unknown = not entry.used and read_info(entry.path) is None
            if unknown and (dry_run or self.images.remove(entry.name)):
                swept.append(entry.path)
        if not dry_run:
            for name, named in self._names().items():
                if self.payload(named) is None:
                    (self.images.folder / _NAMES / name).unlink(missing_ok=True)
        return removed, swept

    def _lock(self, image: Path) -> Lock | None:
        if not image.is_relative_to(self.images.folder):
            return None
        hold = self.images.use(image.relative_to(self.images.folder).parts[0])
        if hold is None:
            raise InfrastructureError(f"{image} is being removed by another process: pull or build it again")
        return hold

    def _copy(self, entry: str) -> OpenImage | None:
        hold = self.copies.use(entry)
        return OpenImage(self.copies.path(entry) / ROOT, hold) if hold else None

    def _unpack(self, image: Path, entry: str, runtime: Runtime, progress: Progress) -> OpenImage:
        wanted = UNPACKED_SIZE_FACTOR * image.stat().st_size
        with self.copies.making(entry, progress) as work:
            if work is not None:
                if not self._make_room(wanted):
                    raise InfrastructureError(
                        f"{self.copies.folder} has no room for {wanted >> 20} MiB to unpack {image}: run 'prorl image "
                        "gc', or set PRORL_UNPACKED to a folder on another local disk"
                    )
                progress(f"unpacking {image.name}")
                started = time.time()
                root = work / "entry" / ROOT
                root.parent.mkdir()
                build_tools.build(runtime, work, str(image), timeout_s=UNPACK_TIMEOUT_S, unpacked=True).rename(root)
                info = ImageInfo("copy", str(image), "folder", rootfs.sanitize(root), started, config=config_of(image))
                if info.config:
                    info.config.rewrite_script(root)
                check_usable(root)
                write_info(root.parent, info)
                self.copies.publish(root.parent, entry)
        start = self._copy(entry)
        if start is None:
            raise InfrastructureError(f"the unpacked copy of {image} was removed right after it was made: try again")
        return start

    def _make_room(self, wanted: int) -> bool:
        """Evict copies that are not in use until ``wanted`` more bytes fit; return whether they fit."""
        copies = self.all_copies()
        taken = sum(image.info.bytes for image in copies)
        free = free_bytes(self.copies.folder)
        room = self._room if self._room is not None else (free + taken) // 2
        limit = min(room, free + taken) - wanted
        if limit < 0:
            return False
        for image in eviction_candidates(copies, max_bytes=limit):
            self.copies.remove(image.entry.name)
        return sum(image.info.bytes for image in self.all_copies()) <= limit

    def _names(self) -> dict[str, str]:
        folder = self.images.folder / _NAMES
        if not folder.is_dir():
            return {}
        return {file.name: file.read_text() for file in folder.iterdir() if not file.name.startswith(".")}


def unpacked_dir() -> Path:
    """Return the folder of unpacked copies, which should be on a large local disk: ``$PRORL_UNPACKED``, else a folder
    in the cache folder unless that is shared, else a folder in ``$TMPDIR``.

    Raises:
        InfrastructureError: the folder belongs to another user.
    """
    if own := os.environ.get("PRORL_UNPACKED"):
        return Path(own).expanduser().absolute()
    if not is_shared(cache_dir()):
        return cache_dir() / "unpacked"
    folder = Path(tempfile.gettempdir()).absolute() / f"prorl-{outer_uid()}-unpacked"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.geteuid() or folder.is_symlink():
        raise InfrastructureError(f"{folder} belongs to another user: set PRORL_UNPACKED to a folder of your own")
    return folder


def unpacked_entry(image: Path) -> str:
    """Return the name of the entry with a SIF's unpacked copy. The name changes with the file's size and modification
    time, and with each boot: a copy that was written just before a power failure may be incomplete."""
    found = image.stat()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    what = f"{image.resolve()} {found.st_size} {found.st_mtime_ns} {boot}"
    stem = image.parent.name if image.name == SIF else image.stem
    return f"{stem[:60].lstrip('.')}-{hashlib.sha256(what.encode()).hexdigest()[:12]}"


def eviction_candidates(
    images: Iterable[Image],
    protected: Container[str] = (),
    *,
    max_bytes: int | None = None,
    before: float | None = None,
) -> list[Image]:
    """Return the entries to evict, in LRU order. These are all entries that were last used before the time ``before``,
    and further entries until the remaining ones have at most ``max_bytes``. Entries that are in use, or whose names
    are ``protected``, stay and count towards the bytes."""
    everything = sorted(images, key=lambda image: (image.entry.last_use, image.entry.name))
    total = sum(image.info.bytes for image in everything)
    doomed = []
    for image in everything:
        old = before is not None and image.entry.last_use < before
        kept = image.entry.used or image.entry.name in protected
        if kept or not (old or (max_bytes is not None and total > max_bytes)):
            continue
        doomed.append(image)
        total -= image.info.bytes
    return doomed
