# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The image store: a user's images, and the root folders that sandboxes on this machine start from.

The store has two folders of entries (:mod:`.entries`): *images*, in the cache folder, which machines may share, and
*copies*, unpacked images on this machine's own disk. Sandboxes start from root folders, but many small files strain a
shared file system. So on a shared cache an image is stored as one file (SIF), and is unpacked once per machine.

An entry is a folder with the image (``root`` or ``image.sif``) and ``image.json``, which describes it.
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
    """Description of an image, written when it is made.

    Attributes:
        kind: ``image`` (built), ``pulled`` or ``copy`` (unpacked).
        source: origin of the image, for display.
        format: format of the image.
        bytes: size on disk.
        made: creation time; seconds since 1970.
        config: configuration of the registry's image that it comes from, if any.
    """

    kind: str
    source: str
    format: Format
    bytes: int
    made: float
    config: OciConfig | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """One image in the store.

    Attributes:
        unpacked: whether the image is a folder or has an unpacked copy on this machine.
    """

    entry: Entry
    info: ImageInfo
    names: tuple[str, ...] = ()
    unpacked: bool = False


def write_info(folder: Path, info: ImageInfo) -> None:
    config = info.config.to_json() if info.config else None
    (folder / INFO_FILE).write_text(json.dumps({**asdict(info), "config": config}))


def read_info(folder: Path) -> ImageInfo | None:
    """Return the description of an entry; ``None`` if it has none, or one without the required fields.

    Unknown fields, which a later version of this package may write, are ignored.
    """
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
    """Return the configuration stored beside a root folder or SIF; ``None`` outside of a store."""
    info = read_info(image.parent) if image.name in (ROOT, SIF) else None
    return info.config if info else None


UNPACKED_SIZE_FACTOR = 4
"""Room reserved for an unpacked copy, in sizes of the SIF; the usual factor is three."""

UNPACK_TIMEOUT_S = 1800.0

_NAMES = ".names"


@dataclass(frozen=True, slots=True)
class OpenImage:
    """The image or unpacked copy that a sandbox starts from. The lock, if any, keeps it from being removed."""

    path: Path
    lock: Lock | None

    def release(self) -> None:
        """Release the lock; a copy of the lock in another process keeps it."""
        if self.lock:
            self.lock.release()


class ImageStore:
    """Images and their unpacked copies. All methods block; locks make them safe for concurrent threads and processes.

    Args:
        images: folder of the images; in the cache folder if not given.
        copies: folder of the unpacked copies; :func:`unpacked_dir` if not given.
        room: bytes that the copies may take; half of the space available for them if not given.
    """

    def __init__(self, images: Path | None = None, copies: Path | None = None, room: int | None = None) -> None:
        self.images = Entries(images or cache_dir() / "images")
        self._copies_folder = copies
        self._room = room

    @property
    def copies(self) -> Entries:
        """The unpacked copies.

        Raises:
            InfrastructureError: the folder belongs to another user.
        """
        return Entries(self._copies_folder or unpacked_dir())

    def default_format(self) -> Format:
        """Return the default format of images: one file on a disk that machines may share, else a folder."""
        return "sif" if is_shared(self.images.folder) else "folder"

    def locate(self, reference: Reference) -> Path | None:
        """Return the path of an image; ``None`` for an image of a registry that is not pulled.

        Raises:
            CallerError: the path does not exist, or no image has that name.
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
        """Return :meth:`locate` of a reference in a user's notation."""
        return self.locate(parse(text))

    def payload(self, entry: str) -> Path | None:
        """Return the root folder or SIF of an entry; ``None`` if the entry does not exist."""
        folder = self.images.path(entry)
        if not (folder / INFO_FILE).is_file():
            return None
        return folder / ROOT if (folder / ROOT).is_dir() else folder / SIF

    def open(self, image: Path, runtime: Runtime, *, progress: Progress = ignore_progress) -> OpenImage:
        """Return the folder that a sandbox of ``image`` starts from on this machine: a root folder, or the unpacked
        copy of a SIF, made if missing.

        Raises:
            CallerError: the image is no image, another user's, or for another processor.
            InfrastructureError: a SIF can't be unpacked here; names the reason.
        """
        check_usable(image)
        if image.is_dir():
            return OpenImage(image, self._lock(image))
        entry = unpacked_entry(image)
        return self._copy(entry) or self._unpack(image, entry, runtime, progress)

    def identity(self, image: Path) -> str:
        """Return a text that identifies the image at a path, as exactly as is known without reading all of it.

        The text is the image's entry, or the path, size and modification time.
        """
        if image.is_relative_to(self.images.folder):
            return f"entry:{image.relative_to(self.images.folder).parts[0]}"
        found = image.stat()
        return f"path:{image.resolve()} {found.st_size} {found.st_mtime_ns}"

    def is_ready(self, image: Path) -> bool:
        """Return whether :meth:`open` would unpack nothing."""
        return not image.is_file() or self.copies.path(unpacked_entry(image)).is_dir()

    def publish(self, work: Path, made: Path, entry: str, info: ImageInfo, base: Path | None = None) -> Path:
        """Sanitize the image made in ``work`` and publish it; return its path.

        A root folder shares the files that it has in common with ``base``, a root folder of this store.
        """
        folder = work / "entry"
        folder.mkdir()
        target = folder / (ROOT if info.format == "folder" else SIF)
        made.rename(target)
        size = rootfs.sanitize(target) if info.format == "folder" else target.stat().st_size
        if base is not None and info.format == "folder" and base.is_relative_to(self.images.folder):
            size -= rootfs.link_unchanged(target, base)
        write_info(folder, replace(info, bytes=size))
        # After a power cut unwritten files would be empty in an entry that counts as complete.
        flush(folder)
        place = self.images.publish(folder, entry)
        return place / target.name

    def name(self, name: str, entry: str) -> None:
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
        """Remove unused images and copies, the least recently used first, and remains of killed makers.

        Args:
            protected: entries to keep in any case.
            max_bytes: limit for images, and for copies; each may be on a disk of its own.
            older_than_s: also remove entries that were not used for so long.
            dry_run: only report the entries to remove.

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
            self._forget_names()
        return removed, swept

    def _lock(self, image: Path) -> Lock | None:
        """Keep an image of this store from removal; others are not locked."""
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
        """Remove unused copies until ``wanted`` bytes fit; return whether they do."""
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

    def _forget_names(self) -> None:
        for name, entry in self._names().items():
            if self.payload(entry) is None:
                (self.images.folder / _NAMES / name).unlink(missing_ok=True)


def unpacked_dir() -> Path:
    """Return the folder of unpacked copies, which must be on a large local disk.

    That is ``$PRORL_UNPACKED``, else a folder in the cache if it is not shared, else one in ``$TMPDIR``.

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
    """Return the entry name of a SIF's unpacked copy.

    The name changes with the file's size and time, and with each boot: a copy written just before a power cut may be
    incomplete.
    """
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
    """Return the entries to remove, the least recently used first.

    Victims are all entries that were last used before ``before``, and more until the others fit into ``max_bytes``.
    Entries that are used or ``protected`` (by name) stay, and count.
    """
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
