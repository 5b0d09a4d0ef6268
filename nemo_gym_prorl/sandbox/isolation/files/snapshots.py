# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a sandbox has written, as one file, and back into another sandbox of the same image.

The file is a tar archive of the sandbox's own layer, with the ids that files have inside: so it does not matter under
which ids a sandbox runs on the host, or how its layers are mounted, and nothing executable lies open on the host. What
was deleted of the image is a character device 0:0, as in the layer itself, and a folder that hides the image's has the
kernel's mark for it. Attributes are written as libarchive does, which carries any bytes, and files with holes as GNU
tar does; other tools read both. The last entry is the layer's own folder: without it the file was cut off.

Both directions run in a child that was forked for it, which the sandbox's files must not reach: it looks names up
inside of them only, and has forgotten how to import anything from there. An archive that somebody else made can do no
more than a program in the sandbox could: it is unpacked there, by the sandbox's own user, within bounds of memory, of
entries and of what the sandbox may write; what we would not have written is refused.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import os
import resource
import shutil
import stat
import sys
import tarfile
from typing import IO, Any
from urllib.parse import quote_from_bytes, unquote_to_bytes

from nemo_gym_prorl.sandbox.isolation import joining, syscalls
from nemo_gym_prorl.sandbox.isolation.files import sparse


OPAQUE = "user.overlay.opaque"
_OVERLAY = "user.overlay."
_ATTRIBUTE = "LIBARCHIVE.xattr."
HEADER = "PRORL.snapshot"
"""Of the archive: what its maker has to say about it."""

END = "PRORL.entries"
"""Of the last entry: how many there were before."""

MOST_ENTRIES = 1 << 20

MEMORY = 2 << 30
"""Bytes of address space for who reads an archive, whose headers may be as large as they like."""

_AT_ONCE = 1 << 20
"""Bytes that are read and written at once."""

BLOCK = 4096
"""Bytes in which file systems count, each file for itself."""

_KINDS = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
}


@joining.by_names_inside()
def pack(place: joining.Place, upper: str, header: str, limit: int, target: int) -> tuple[dict[str, Any], list[int]]:
    """Write all of the folder ``upper``, the layer of the sandbox at ``place``, into ``target``.

    Raises:
        OSError: ``EFBIG``: it would be larger than ``limit``, the sandbox's own (0 for none), or have too many files;
            ``ENAMETOOLONG``: a path is longer than the kernel takes.
    """
    if not place.rooted and _kind_of_root(place.process.number).startswith("fuse"):
        raise OSError(
            errno.EOPNOTSUPP, "the runtime's own file system holds its layer; a snapshot needs start: direct"
        )
    layer = os.open(upper, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _import_no_more()
    joining.join_users(place)
    os.fchdir(layer)
    os.chroot(".")
    links: dict[int, str] = {}
    count = 0
    with (
        os.fdopen(os.dup(target), "wb", 1 << 16) as file,
        tarfile.open(
            fileobj=file,  # type: ignore[call-overload]  # it does not know copybufsize
            mode="w",
            format=tarfile.PAX_FORMAT,
            encoding="utf-8",
            errors="surrogateescape",
            pax_headers={HEADER: header},
            copybufsize=_AT_ONCE,
        ) as archive,
    ):
        for folder, folders, files in os.walk(".", onerror=_fail):
            for name in (*folders, *files):
                count += _add(archive, os.path.normpath(os.path.join(folder, name)), links, limit)
                if count > MOST_ENTRIES:
                    raise OSError(errno.EFBIG, f"it has more than {MOST_ENTRIES} files")
                _forget(archive)
        last = _entry(".", os.lstat("."))
        last.pax_headers = {END: str(count)}
        archive.addfile(last)
    return {"bytes": os.fstat(target).st_size}, []


def _forget(archive: tarfile.TarFile) -> None:
    """Have the archive keep nothing of the entries so far: there may be a million."""
    archive.members.clear()  # type: ignore[attr-defined]


def _fail(error: OSError) -> None:
    raise error


def _kind_of_root(process: int) -> str:
    """What kind of file system a process has its root on, by its folder in ``/proc``."""
    with open(os.open("mounts", os.O_RDONLY | os.O_CLOEXEC, dir_fd=process)) as table:
        # What was mounted last is on top.
        return [fields[2] for line in table if (fields := line.split())[1] == "/"][-1]


def _entry(path: str, found: os.stat_result) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path)
    entry.mode, entry.uid, entry.gid = stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid
    entry.mtime = found.st_mtime_ns // 10**9
    entry.type = _KINDS[stat.S_IFMT(found.st_mode)]
    return entry


def _add(archive: tarfile.TarFile, path: str, links: dict[int, str], limit: int) -> bool:
    """Put one file into the archive, if it can be in one."""
    found = os.lstat(path)
    if stat.S_IFMT(found.st_mode) not in _KINDS:
        # A socket means nothing without its process.
        return False
    entry = _entry(path, found)
    if entry.issym():
        entry.linkname = os.readlink(path)
    elif entry.isreg() or entry.isdir():
        entry.pax_headers = _attributes(path)
    content: IO[bytes] | None = None
    if entry.isreg() and found.st_nlink > 1 and found.st_ino in links:
        entry.type, entry.linkname = tarfile.LNKTYPE, links[found.st_ino]
    elif entry.isreg():
        links[found.st_ino] = path
        content = sparse.reader(path, entry, found)
    if limit and archive.offset + entry.size > limit:
        raise OSError(errno.EFBIG, f"its files have more than the {limit >> 20} MiB that it may write")
    with content or contextlib.nullcontext():
        archive.addfile(entry, content)
    return True


def _attributes(path: str) -> dict[str, str]:
    found = {}
    for name in os.listxattr(path, follow_symlinks=False):
        if name == OPAQUE or (name.startswith("user.") and not name.startswith(_OVERLAY)):
            value = os.getxattr(path, name, follow_symlinks=False)
            # Names may be any bytes, too.
            found[_ATTRIBUTE + quote_from_bytes(os.fsencode(name))] = base64.b64encode(value).decode()
    return found


@joining.by_names_inside()
def unpack(place: joining.Place, limit: int, source: int) -> tuple[dict[str, Any], list[int]]:
    """Do to the sandbox at ``place`` what was done to the one that ``source`` was made of.

    Raises:
        OSError: ``EBADMSG``: that is no snapshot, or none of ours; ``EFBIG``: it has more than ``limit`` (0 for none),
            all that the sandbox may write.
    """
    if limit and os.fstat(source).st_size > limit:
        raise _too_large(limit)
    _import_no_more()
    joining.join(place)
    os.umask(0)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        with (
            os.fdopen(os.dup(source), "rb") as file,
            tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape") as archive,
        ):
            _unpack_all(archive, limit)
    except (tarfile.TarError, EOFError, ValueError, OverflowError, MemoryError, RecursionError) as error:
        raise OSError(errno.EBADMSG, f"it is damaged or no snapshot: {str(error) or type(error).__name__}") from error
    return {}, []


def _unpack_all(archive: tarfile.TarFile, limit: int) -> None:
    folders: list[tuple[str, tarfile.TarInfo]] = []
    made, covered = {""}, set[str]()
    size = 0
    for count, entry in enumerate(archive):
        _forget(archive)
        if END in entry.pax_headers:
            if entry.pax_headers[END] != str(count):
                raise ValueError(f"{count} of {entry.pax_headers[END]} entries are there")
            break
        size += -(-sparse.size_on_disk(entry) // BLOCK) * BLOCK
        _check(entry)
        if limit and size > limit:
            raise _too_large(limit)
        if count >= MOST_ENTRIES:
            raise ValueError(f"more than {MOST_ENTRIES} entries")
        path, parent = f"/{entry.name}", os.path.dirname(entry.name)
        if parent in covered:
            # Below what the sandbox has been given by mounting it there, which is not ours to change.
            covered.add(entry.name)
        elif parent not in made or (entry.name in made and not entry.isdir()):
            # A layer has each name once, and each folder before what is in it: so no link is ever followed.
            raise ValueError(f"{entry.name!r} is not where a layer has it")
        elif entry.isdir():
            if _make_folder(path, entry):
                folders.append((path, entry))
                made.add(entry.name)
            else:
                covered.add(entry.name)
        else:
            with _unless_mounted():
                _make_room(path)
                _make(archive, path, entry)
    else:
        raise ValueError("it was cut off")
    # Last, since a folder may be one that nothing can be put into.
    for path, entry in reversed(folders):
        _dress(path, entry)


def _too_large(limit: int) -> OSError:
    return OSError(errno.EFBIG, f"it has more than the {limit >> 20} MiB that the sandbox may write; raise disk_mib")


def _check(entry: tarfile.TarInfo) -> None:
    """Refuse what we have not written. It could do no harm, but who knows what it was meant to do."""
    if entry.type not in (*_KINDS.values(), tarfile.LNKTYPE) or (entry.ischr() and (entry.devmajor or entry.devminor)):
        raise ValueError(f"{entry.name!r} is no file, folder or link")
    if entry.size < 0:
        raise ValueError(f"{entry.name!r} has a wrong size")
    for name in (entry.name, *((entry.linkname,) if entry.islnk() else ())):
        if name.startswith("/") or {"..", ".", ""} & set(name.split("/")):
            raise ValueError(f"{name!r} is no name in a layer")


@contextlib.contextmanager
def _unless_mounted() -> Any:
    """What the sandbox has been given by mounting it there is its own, and stays."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.EROFS):
            raise


def _make_folder(path: str, entry: tarfile.TarInfo) -> bool:
    """Have a folder there; returns whether it is of the layer, and not where something is mounted."""
    if os.path.ismount(path):
        return False
    if os.path.isdir(path) and not os.path.islink(path):
        if _ATTRIBUTE + OPAQUE in entry.pax_headers:
            for name in os.listdir(path):
                with _unless_mounted():
                    _make_room(os.path.join(path, name))
        return True
    _make_room(path)
    os.mkdir(path, 0o700)
    return True


def _make_room(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _make(archive: tarfile.TarFile, path: str, entry: tarfile.TarInfo) -> None:
    if entry.ischr():
        # Whatever it hid is away.
        return
    if entry.islnk():
        os.link(f"/{entry.linkname}", path, follow_symlinks=False)
        return
    if entry.issym():
        os.symlink(entry.linkname, path)
        os.chown(path, entry.uid, entry.gid, follow_symlinks=False)
        return
    if entry.isfifo():
        os.mkfifo(path, 0o600)
    else:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            sparse.write(archive, entry, file)
    _dress(path, entry)


def _dress(path: str, entry: tarfile.TarInfo) -> None:
    """Owner, attributes, mode and time; in this order, since a change of owner takes away parts of the mode."""
    os.chown(path, entry.uid, entry.gid)
    for name, value in entry.pax_headers.items():
        attribute = unquote_to_bytes(name.removeprefix(_ATTRIBUTE))
        if name.startswith(_ATTRIBUTE) and attribute.startswith(b"user.") and attribute != OPAQUE.encode():
            try:
                os.setxattr(path, attribute, base64.b64decode(value, validate=True))
            except binascii.Error as error:
                raise ValueError(f"attribute {name}: {error}") from error
    os.chmod(path, stat.S_IMODE(entry.mode))
    os.utime(path, (entry.mtime, entry.mtime))


def _import_no_more() -> None:
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    sys.meta_path.clear()
