# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a policy changed in a repository, which changes count, and the patch of a rollout's row. Pure.

Changes are files, not a text that something has to apply. Listings are those of ``git ls-files --stage``. They and the
contents come out of the policy's own sandbox, so they are untrusted: what they can say is at most another change.
Contents are checked against their names all the same, and all of it is bounded. A path is kept as git writes it, in
quotes if it holds anything odd, and is read by :func:`shown` for rules and people only.

Tests, what configures their runner, and what would stand in the way of the runner's own modules are the dataset's to
say: a policy's changes there are shown in its patch and never applied. The rule goes by names, as the datasets' own
split of a fix into ``patch`` and ``test_patch`` does; a file that the real fix changes is never kept from anybody.

A patch is text of which ``git apply`` makes the same bytes. git writes lines of a text file as they are, in whatever
encoding. A row is JSON, which has no such bytes; so the parts of files that are no UTF-8 become what git writes of
binary ones.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import tomllib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from nemo_gym_prorl.tasks.swe.instance import SweInstance


JUNK = (
    "__pycache__/",
    "*.py[cod]",
    ".pytest_cache/",
    ".mypy_cache/",
    ".ruff_cache/",
    ".hypothesis/",
    ".ipynb_checkpoints/",
    ".coverage",
    ".coverage.*",
    "*.egg-info/",
    ".eggs/",
    ".tox/",
    ".nox/",
    ".venv/",
    "node_modules/",
    "*.orig",
    "*.rej",
    "*.swp",
    "*~",
    "nohup.out",
    ".DS_Store",
)
"""Patterns, as in ``.gitignore``, of new files that are nobody's work."""

_TEST_FOLDERS = frozenset({"tests", "r2e_tests"})
_TEST_ROOTS = frozenset({"test", "testing", "e2e"})
_TEST_FILE = re.compile(r"(test_.*|.*_tests?|tests)\.py|conftest\.py")
RUNNER_FILES = frozenset({"pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "noxfile.py"})
_STARTUP = frozenset({"sitecustomize", "usercustomize"})
RUNNERS = frozenset(
    {
        "pytest",
        "_pytest",
        "pluggy",
        "iniconfig",
        "packaging",
        "py",
        "attr",
        "attrs",
        "tomli",
        "toml",
        "exceptiongroup",
        "pygments",
        "argcomplete",
        "pexpect",
        "colorama",
        "importlib_metadata",
        "zipp",
        "more_itertools",
        "atomicwrites",
        "wcwidth",
        "six",
        "mock",
        "numpy",
        "zope",
        "twisted",
        "nose",
        "setuptools",
        "pkg_resources",
    }
)
"""What pytest's versions import, some of it only if it is there."""

_METADATA = (".egg-info", ".dist-info", ".pth")
_HELPERS = re.compile(
    r"test|_?testing(\.py)?|runtests\.py|_?test(s|ing)?_?(utils?|helpers?|lib|support|tools?|common|cases?)(\.py)?"
)
"""Folders and files; ``test.py`` may be a command."""

_ODD_LINES = re.compile(r"\r(?!\n)|[\v\f\x1c-\x1e\x85\u2028\u2029\ufeff]")
_MODULE_FILES = (".py", ".so")

SETTINGS_FILES = frozenset({"setup.cfg", "pyproject.toml"})
"""Files that configure a test runner among other things: only a change of that part does not count."""


def files_of_patch(patch: str) -> frozenset[str]:
    """Paths that a patch in git's format touches, before and after."""
    found = re.findall(r"^(?:---|\+\+\+) (?:\"?)[ab]/(.+?)\"?\s*$", patch, re.MULTILINE)
    found += [path for pair in re.findall(r"^diff --git a/(.+) b/(.+)$", patch, re.MULTILINE) for path in pair]
    return frozenset(found)


def files_of_tests(names: Iterable[str]) -> frozenset[str]:
    """Files in which tests lie that have pytest's names."""
    return frozenset(name.partition("::")[0] for name in names if "::" in name)


@dataclass(frozen=True, slots=True)
class ImportableModules:
    """What the image's Python can import.

    Attributes:
        folders: of the repository, in which modules are found.
        own: modules that the base has there.
        installed: modules outside of the repository.
    """

    folders: frozenset[str] = frozenset({"", "src"})
    own: frozenset[str] = frozenset()
    installed: frozenset[str] = frozenset()

    def shadowed_by(self, path: str) -> bool:
        """A new file would be imported instead of a module that was there before it, outside of the repository."""
        names = {_module(path, folder) for folder in self.folders} - {None, *self.own}
        return bool(names & (self.installed | RUNNERS | sys.stdlib_module_names))


def importable_modules(paths: Iterable[str], told: str) -> ImportableModules:
    """Of a base.

    Args:
        paths: its files.
        told: what the image's Python said: ``folder NAME`` of the repository, ``module NAME`` outside of it, in lines.
    """
    said = [line.split(" ", 1) for line in told.splitlines() if " " in line]
    folders = frozenset({"", "src"} | {name for kind, name in said if kind == "folder"})
    modules = [path for path in paths if path.endswith(_MODULE_FILES)]
    own = frozenset(name for path in modules for folder in folders if (name := _module(path, folder)))
    return ImportableModules(folders, own, frozenset(name for kind, name in said if kind == "module"))


class Protection:
    """Whose changes count.

    Args:
        instance: the task.

    Attributes:
        fix: files that the real fix changes.
        tests: files that hold the row's tests, or that its patch of tests changes.
    """

    def __init__(self, instance: SweInstance) -> None:
        hidden = files_of_patch(instance.test_patch)
        self.fix = files_of_patch(instance.patch) - hidden
        self.tests = files_of_tests((*instance.FAIL_TO_PASS, *instance.PASS_TO_PASS)) | hidden
        inside = [
            path.removeprefix(instance.repo_folder + "/")
            for path in instance.hidden
            if path.startswith(instance.repo_folder + "/")
        ]
        self._folders = tuple(inside)
        self._commanded = {word.removeprefix("./") for word in re.findall(r"[\w./+-]+", instance.test_command)}

    def why(self, path: str, base: ImportableModules | None = None) -> str | None:
        """Why a change of this path does not count; ``None`` if it does, or if only the content can tell.

        Args:
            path: in the repository.
            base: if the path is new, what can be imported without it.
        """
        if path in self.tests:
            return "a test"
        if any(name.startswith(path + "/") for name in self.tests):
            return "in the place of a folder with tests"
        if any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in self._folders):
            return "protected by the task"
        if path in self.fix:
            return None
        pure = PurePosixPath(path)
        if _TEST_FOLDERS & set(pure.parts) or (len(pure.parts) > 1 and pure.parts[0] in _TEST_ROOTS):
            return "in a folder of tests"
        if _TEST_FILE.fullmatch(pure.name):
            return "a test"
        if (helps := _helpers(pure)) and not any(f"{name}/".startswith(f"{helps}/") for name in self.fix):
            return "helps tests"
        if pure.name in RUNNER_FILES:
            return "configures a test runner"
        if path in self._commanded:
            return "named by the test command"
        if pure.name.partition(".")[0] in _STARTUP:
            return "read when Python starts"
        if any(part.endswith(_METADATA) for part in pure.parts):
            return "what was installed, to Python"
        if base is not None and base.shadowed_by(path):
            return "in the place of an installed module"
        return None

    def by_content(self, path: str) -> bool:
        """Whether its content decides: see :func:`same_settings`. pytest looks for settings in any folder."""
        return PurePosixPath(path).name in SETTINGS_FILES and path not in self.fix


def same_settings(path: str, before: bytes | None, after: bytes | None) -> bool:
    """Whether two versions of such a file tell pytest the same; what can't be read differs."""
    try:
        return bool(pytest_settings(path, before) == pytest_settings(path, after))
    except (ValueError, RecursionError):
        return False


def pytest_settings(path: str, content: bytes | None) -> Any:
    """What such a file tells pytest.

    Raises:
        ValueError, RecursionError: it can't be read.
    """
    text = (content or b"").decode()
    if path.endswith(".toml"):
        return tomllib.loads(text).get("tool", {}).get("pytest")
    # Parsers differ, of pytest's versions and Python's; none finds a section but in such lines.
    if _ODD_LINES.search(text):
        raise ValueError("lines end in ways on which parsers differ")
    sections = re.split(r"^(?=\[)", text, flags=re.MULTILINE)
    return [section.rstrip() for section in sections if "pytest" in section.partition("\n")[0].lower()]


def _helpers(path: PurePosixPath) -> str | None:
    """The folder of helpers that it lies in, or itself if it is a file of such; a fix of one may be in any of them."""
    for number, part in enumerate(path.parts, start=1):
        if _HELPERS.fullmatch(part):
            return "/".join(path.parts[:number])
    return None


def _module(path: str, folder: str) -> str | None:
    """The module that a file makes, alone or as a link, if one looks in that folder."""
    if folder and not path.startswith(folder + "/"):
        return None
    name, slash, rest = path[len(folder) + 1 if folder else 0 :].partition("/")
    if not slash:
        return name.partition(".")[0]
    return name if rest.partition(".")[0] == "__init__" else None


LINK, SUBMODULE = "120000", "160000"
MODES = frozenset({"100644", "100755", LINK})

_ENTRY = re.compile(r"([0-7]{6}) ([0-9a-f]{40}) 0\t(.+)")
_OUTSIDE = frozenset({"", ".", "..", ".git"})
_QUOTED = re.compile(rb'\\([0-7]{3}|[abtnvfr"\\])')
_ESCAPES = {b"a": b"\a", b"b": b"\b", b"t": b"\t", b"n": b"\n", b"v": b"\v", b"f": b"\f", b"r": b"\r"}


class BadListing(Exception):
    """It is no listing; says why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a listing: git's mode and its content's hash."""

    mode: str
    blob: str


@dataclass(frozen=True, slots=True)
class Change:
    """One file after the policy; ``entry`` is ``None`` if it is gone."""

    path: str
    entry: Entry | None
    new: bool


@dataclass(frozen=True, slots=True)
class Solution:
    """All that a policy changed.

    Attributes:
        changes: file by file.
        contents: by hash, of every file that is there after it, and of some before.
        left_out: path to why: what is in no patch.
        ignored: path to why: what is in the patch and does not count.
    """

    changes: tuple[Change, ...] = ()
    contents: Mapping[str, bytes] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)


def read_listing(text: str) -> dict[str, Entry]:
    """Path to entry.

    Raises:
        BadListing: a line is none of git's, a path leads out of the tree, or it lies in a file.
    """
    entries: dict[str, Entry] = {}
    for line in text.splitlines():
        match = _ENTRY.fullmatch(line)
        if match is None:
            raise BadListing(f"{line!r:.200} is no file of a repository")
        mode, blob, path = match.groups()
        if _OUTSIDE & {part.lower() for part in shown(path).split("/")}:
            raise BadListing(f"{path!r:.200} is no path in a repository")
        entries[path] = Entry(mode, blob)
    folders: set[str] = set()
    for path in map(shown, entries):
        while (path := path.rpartition("/")[0]) and path not in folders:
            folders.add(path)
    if clash := folders & {shown(path) for path in entries}:
        raise BadListing(f"{min(clash)!r:.200} is a file and a folder")
    return entries


def changed(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> list[Change]:
    """What differs, in the order of paths. A repository in the repository is no change."""
    gone = [Change(path, None, False) for path in before if path not in after]
    there = [
        Change(path, entry, path not in before)
        for path, entry in after.items()
        if entry.mode in MODES and before.get(path) != entry
    ]
    return sorted(gone + there, key=lambda change: change.path)


def shown(path: str) -> str:
    """A path of a listing as people write it."""
    if not path.startswith('"'):
        return path
    raw = _QUOTED.sub(lambda found: _unescaped(found[1]), path[1:-1].encode())
    return raw.decode("utf-8", "backslashreplace")


def read_contents(stream: bytes) -> dict[str, bytes]:
    """Hash to content, of what ``git cat-file --batch`` printed, as far as it is complete and true."""
    contents: dict[str, bytes] = {}
    at = 0
    while (end := stream.find(b"\n", at)) != -1:
        words = stream[at:end].split()
        at = end + 1
        if len(words) != 3 or not words[2].isdigit():
            continue  # "<hash> missing"
        size = int(words[2])
        content, at = stream[at : at + size], at + size + 1
        if len(content) == size and hash_of(content) == words[0].decode("latin-1"):
            contents[hash_of(content)] = content
    return contents


def hash_of(content: bytes) -> str:
    """git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def ignored(
    changes: Iterable[Change],
    before: Mapping[str, Entry],
    contents: Mapping[str, bytes],
    protection: Protection,
    base: ImportableModules,
) -> dict[str, str]:
    """Path to why, of changes that do not count."""
    found = {}
    for change in changes:
        path = shown(change.path)
        why = protection.why(path, base if change.new else None)
        if why is None and protection.by_content(path):
            old, new = before.get(change.path), change.entry
            link = new is not None and new.mode == LINK
            was, now = (contents.get(entry.blob) if entry else b"" for entry in (old, new))
            if link or not same_settings(path, was, now):
                why = "configures a test runner"
        if why is not None:
            found[change.path] = why
    return found


def import_stream(solution: Solution, base: str) -> bytes:
    """For ``git fast-import``: ``refs/prorl/solution`` has all changes, ``refs/prorl/applied`` those that count."""
    counting = [change for change in solution.changes if change.path not in solution.ignored]
    return b"".join(
        [
            *_commit(b"refs/prorl/solution", base, solution.changes, solution.contents),
            *_commit(b"refs/prorl/applied", base, counting, solution.contents),
        ]
    )


def _commit(ref: bytes, base: str, changes: Iterable[Change], contents: Mapping[str, bytes]) -> Iterable[bytes]:
    yield b"commit %s\ncommitter prorl <prorl@localhost> 0 +0000\ndata 0\nfrom %s\n" % (ref, base.encode())
    changes = list(changes)
    # A file may have taken a folder's place: what goes, goes first.
    for change in changes:
        if change.entry is None:
            yield b"D %s\n" % change.path.encode()
    for change in changes:
        if change.entry is not None:
            content = contents[change.entry.blob]
            head = b"M %s inline %s\ndata %d\n" % (change.entry.mode.encode(), change.path.encode(), len(content))
            yield head + content + b"\n"
    yield b"\n"


def _unescaped(code: bytes) -> bytes:
    return bytes([int(code, 8) & 0xFF]) if len(code) == 3 else _ESCAPES.get(code, code)


_NO_FILE = "0" * 40
_LINE = 52
"""Bytes in a line of a binary patch; its first letter says how many."""

_LENGTHS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch: what each file's part is, by git's path."""

    parts: Mapping[str, str]

    def within(self, limit: int) -> tuple[str, list[str]]:
        """As much of it as whole files make that are no longer than ``limit`` characters together, and which are not
        in it."""
        text, left_out = "", []
        for path, part in self.parts.items():
            if len(text) + len(part) <= limit:
                text += part
            else:
                left_out.append(path)
        return text, left_out


def read_patch(patch: bytes, solution: Solution, base: Mapping[str, Entry]) -> Patch:
    """Of what ``git diff --binary --no-renames`` printed of a solution."""
    paths = {_head(change.path): change for change in solution.changes}
    parts: dict[str, str] = {}
    for raw in re.split(rb"^(?=diff --git )", patch, flags=re.MULTILINE):
        change = paths.get(raw.partition(b"\n")[0])
        if change is None:
            continue
        try:
            parts[change.path] = raw.decode()
        except UnicodeDecodeError:
            after = solution.contents[change.entry.blob] if change.entry else b""
            blobs = [entry.blob if entry else _NO_FILE for entry in (base.get(change.path), change.entry)]
            lines = raw[: raw.index(b"\n--- ")].decode().split("\n")
            head = [line for line in lines if not line.startswith("index ")]
            index = next(line for line in lines if line.startswith("index ")).split(" ")
            parts[change.path] = "\n".join(
                [*head, " ".join(["index", "..".join(blobs), *index[2:]]), *_literal(after), "", ""]
            )
    return Patch(parts)


def _head(path: str) -> bytes:
    both = (f'"a/{path[1:-1]}"', f'"b/{path[1:-1]}"') if path.startswith('"') else (f"a/{path}", f"b/{path}")
    return f"diff --git {both[0]} {both[1]}".encode()


def _literal(content: bytes) -> Iterator[str]:
    packed = zlib.compress(content)
    yield "GIT binary patch"
    yield f"literal {len(content)}"
    for at in range(0, len(packed), _LINE):
        part = packed[at : at + _LINE]
        yield _LENGTHS[len(part) - 1] + base64.b85encode(part, pad=True).decode()
