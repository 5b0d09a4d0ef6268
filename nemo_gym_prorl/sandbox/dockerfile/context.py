# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Pack files that ``COPY`` and ``ADD`` copy from a build context or from another image into tar archives.

Contexts are untrusted: symlinks cannot lead out of the context or image, and only files, folders and symlinks are
packed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import lzma
import os
import re
import stat
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.filesystems import read_text
from nemo_gym_prorl.sandbox.dockerfile.build_steps import CopyStep
from nemo_gym_prorl.sandbox.dockerfile.instructions import MAX_BYTES
from nemo_gym_prorl.sandbox.images import rootfs


@dataclass(frozen=True, slots=True)
class IgnoreRules:
    """Rules of a ``.dockerignore``: regular expression for a path relative to the context, and whether a match is
    excluded. The last rule that matches a path decides."""

    rules: tuple[tuple[re.Pattern[str], bool], ...] = ()

    @classmethod
    def parse(cls, text: str) -> IgnoreRules:
        rules = []
        for line in text.removeprefix("\ufeff").splitlines():
            pattern = "" if line.startswith("#") else line.strip()
            excludes = not pattern.startswith("!")
            pattern = pattern.removeprefix("!").strip().strip("/")
            if pattern not in ("", "."):
                rules.append((_compiled(os.path.normpath(pattern), deep=True), excludes))
        return cls(tuple(rules))

    def excludes(self, path: str) -> bool:
        """Return whether a path relative to the context is ignored, by its own or a parent folder's path."""
        parts = path.split("/")
        out = False
        for pattern, excludes in self.rules:
            if any(pattern.fullmatch("/".join(parts[: count + 1])) for count in range(len(parts))):
                out = excludes
        return out


@dataclass(frozen=True, slots=True)
class CopySource:
    """Origin of a step's files: a build context with its ignore rules, or the root folder of another image."""

    root: Path
    ignore: IgnoreRules = IgnoreRules()


@dataclass(frozen=True, slots=True)
class CopyEntry:
    """One file, folder or symlink that a step copies.

    Attributes:
        path: path on the host; ``None`` for a here-document.
        name: path relative to the step's target.
        text: contents of a here-document.
    """

    path: Path | None
    name: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Files that a step copies.

    Attributes:
        entries: entries in order; a folder precedes its contents.
        archives: local tar archives that are unpacked into the target.
        single: name of the source if the step copies exactly one file, which then gets the target's name unless the
            target is a folder; otherwise empty.
    """

    entries: tuple[CopyEntry, ...]
    archives: tuple[Path, ...]
    single: str

    def digest(self) -> str:
        """Return a hash of the names, permissions and contents of all files."""
        summary = hashlib.sha256()
        for entry in self.entries:
            summary.update(os.fsencode(f"{entry.name}\0{self.single}\0"))
            if entry.path is None:
                summary.update(entry.text.encode())
            else:
                _add_to_digest(summary, entry.path)
        for archive in self.archives:
            _add_to_digest(summary, archive)
        return summary.hexdigest()


def plan_copy(step: CopyStep, source: CopySource) -> CopyPlan:
    """Find the entries that a step copies.

    Raises:
        CallerError: a source matches nothing, or is a socket, a pipe or a device; names the line.
    """
    entries: list[CopyEntry] = []
    archives: list[Path] = []
    folders = 0
    for pattern in step.sources:
        matches = _matches(source, pattern)
        if not matches and not _WILDCARD.search(pattern):  # as in Docker, wildcards may match no file
            raise _error(step, f"{pattern}: no such file in {'the context' if step.origin is None else step.origin}")
        for name, path in matches:
            if path.is_dir():
                folders += 1
                # Ignore rules apply to resolved paths, not to paths of symlinks.
                entries += _tree(path, _relative(path, source.root), source.ignore)
            elif step.unpack and path.is_file() and _is_archive(step, path):
                archives.append(path)
            else:
                entries.append(CopyEntry(path, Path(name).name))
    entries += [CopyEntry(None, name, text) for name, text in step.texts.items()]
    for entry in entries:
        if entry.path is not None and stat.S_IFMT(entry.path.lstat().st_mode) not in _PACKED:
            raise _error(step, f"{entry.name}: is no file, folder or link")
    single = entries[0].name if len(entries) == 1 and not folders and not archives else ""
    return CopyPlan(tuple(entries), tuple(archives), single)


_WILDCARD = re.compile(r"[*?\[\\]")
_PACKED = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)


def write_archive(plan: CopyPlan, step: CopyStep, target: Path) -> None:
    """Write the entries that a step copies as an uncompressed tar archive, with the step's owner and permissions."""
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        for entry in plan.entries:
            if entry.path is None:
                body = entry.text.encode()
                info = tarfile.TarInfo(entry.name)
                info.size, info.mode = len(body), 0o644
                archive.addfile(_owned(info, step), io.BytesIO(body))
                continue
            info = archive.gettarinfo(entry.path, entry.name)
            if info.islnk():  # a second hard link to a packed file: store the contents again
                info.type, info.linkname, info.size = tarfile.REGTYPE, "", entry.path.stat().st_size
            if info.isreg():
                with entry.path.open("rb") as file:
                    archive.addfile(_owned(info, step), file)
            else:
                archive.addfile(_owned(info, step))
        for packed in plan.archives:
            try:
                _repack(packed, archive)
            except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, OSError, ValueError) as error:
                raise _error(step, f"{packed.name}: the archive can't be read: {error}") from error


def _is_archive(step: CopyStep, path: Path) -> bool:
    with path.open("rb") as file:
        if file.read(4) == b"\x28\xb5\x2f\xfd":
            raise _error(step, f"{path.name}: zstd has no support here; pack it with gzip or xz, or COPY it")
    return tarfile.is_tarfile(path)


def _repack(packed: Path, archive: tarfile.TarFile) -> None:
    """Add the members of another archive; owners are stored as numeric ids only, as in Docker."""
    with tarfile.open(packed) as inner:
        for member in inner:
            member.uname = member.gname = ""
            contents = inner.extractfile(member) if member.isreg() else None
            if contents is not None:
                member.type, member.pax_headers = tarfile.REGTYPE, {}  # stores a sparse file in full
            archive.addfile(member, contents)


def _owned(info: tarfile.TarInfo, step: CopyStep) -> tarfile.TarInfo:
    """Set the step's owner and mode in a tar member; tar looks up user names in the image, or else uses the ids."""
    user, _, group = step.owner.partition(":")
    group = group or user
    info.uid, info.uname = (int(user), "") if user.isdecimal() else (0, user or "root")
    info.gid, info.gname = (int(group), "") if group.isdecimal() else (0, group or "root")
    if step.mode is not None and not info.issym():
        info.mode = step.mode
    return info


def _matches(source: CopySource, pattern: str) -> list[tuple[str, Path]]:
    """Return path relative to the root and resolved host path of each match of a pattern that is not ignored."""
    pattern = os.path.normpath(f"/{pattern.lstrip('/')}").lstrip("/")
    if not pattern:
        return [("", source.root)]
    found = [("", source.root)]
    for part in pattern.split("/"):
        plain = not _WILDCARD.search(part)
        step: list[tuple[str, Path]] = []
        for name, folder in found:
            if plain:
                names = [part] if os.path.lexists(folder / part) else []
            elif folder.is_dir():
                matching = _compiled(part)
                names = sorted(one.name for one in folder.iterdir() if matching.fullmatch(one.name))
            else:
                names = []
            for one in names:
                path = f"{name}/{one}" if name else one
                with contextlib.suppress(OSError):  # a symlink loop
                    step.append((path, rootfs.resolve_inside(source.root, path)))
        found = step
    return [
        (name, path)
        for name, path in found
        if (os.path.lexists(path) and not source.ignore.excludes(_relative(path, source.root)))
        or (path.is_dir() and any(_tree(path, _relative(path, source.root), source.ignore)))
    ]


def _relative(path: Path, root: Path) -> str:
    name = path.relative_to(root).as_posix()
    return "" if name == "." else name


def _tree(folder: Path, name: str, ignore: IgnoreRules) -> Iterator[CopyEntry]:
    """Yield all entries below a folder that are not ignored; ``name`` is the folder's path relative to the context."""
    for path in sorted(folder.iterdir()):
        inner = f"{name}/{path.name}" if name else path.name
        if path.is_dir() and not path.is_symlink():
            below = [CopyEntry(one.path, f"{path.name}/{one.name}") for one in _tree(path, inner, ignore)]
            if below or not ignore.excludes(inner):
                yield CopyEntry(path, path.name)
            yield from below
        elif not ignore.excludes(inner):
            yield CopyEntry(path, path.name)


_TOKEN = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])+\]|\*\*/?|.", re.DOTALL)


@cache
def _compiled(pattern: str, *, deep: bool = False) -> re.Pattern[str]:
    """Convert a pattern of Go's ``filepath.Match`` to a regular expression; ``deep``: ``**`` matches any depth."""
    result, tokens = "", _TOKEN.findall(pattern)
    for token in tokens:
        if deep and token.startswith("**"):
            result += "(?:.*/)?"
        elif token.startswith("*"):
            result += "[^/]*"
        elif token == "?":
            result += "[^/]"
        elif len(token) > 1:
            result += re.escape(token[1]) if token[0] == "\\" else "[" + token[1:].replace("[", r"\[")
        else:
            result += re.escape(token)
    if deep and tokens[-1] == "**":
        result += ".*"
    try:
        return re.compile(result, re.DOTALL)
    except re.error as error:
        raise CallerError(f"{pattern}: is no pattern: {error}", field="Dockerfile") from error


def _add_to_digest(summary: hashlib._Hash, path: Path) -> None:
    found = path.lstat()
    summary.update(f"{stat.S_IFMT(found.st_mode)}\0{stat.S_IMODE(found.st_mode)}\0".encode())
    if stat.S_ISLNK(found.st_mode):
        summary.update(os.fsencode(path.readlink()))
    elif stat.S_ISREG(found.st_mode):
        with path.open("rb") as file:
            summary.update(hashlib.file_digest(file, "sha256").digest())


def _error(step: CopyStep, reason: str) -> CallerError:
    return CallerError(f"line {step.line}: {reason}", field="Dockerfile")


def read_ignore_rules(context: Path, dockerfile: Path) -> IgnoreRules:
    """Return the rules in ``DOCKERFILE.dockerignore``, or else in the context's ``.dockerignore``, if any."""
    for path in (dockerfile.with_name(f"{dockerfile.name}.dockerignore"), context / ".dockerignore"):
        if path.is_file():
            return IgnoreRules.parse(text_of(path, "surrogateescape"))
    return IgnoreRules()


def text_of(path: Path, errors: str = "strict") -> str:
    """Return the text of a Dockerfile or ``.dockerignore``; raise :class:`.CallerError` if the file cannot be read."""
    try:
        return read_text(path, MAX_BYTES, errors)
    except (OSError, ValueError) as error:
        raise CallerError(f"{path}: {error}", field="Dockerfile") from error
