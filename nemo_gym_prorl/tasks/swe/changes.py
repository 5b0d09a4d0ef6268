# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""File changes that a policy made to a repository: comparison, filtering and the reported patch. Pure.

A change is a whole file, not a text patch. Listings have the format of ``git ls-files --stage``. Listings and contents
come from the policy's sandbox and are untrusted: a forged listing only describes another solution. Contents are
verified against their hashes. Paths keep git's quoting; :func:`unquote` decodes them for rules and messages.

Changed tests, test runner configuration and modules that would shadow the runner's are part of the reported patch, but
are not applied for grading. The rules use file names, like the datasets' own split into ``patch`` and ``test_patch``.
Files that the reference fix changes are applied unless they are tests or hidden.

``git apply`` reproduces the bytes of a reported patch. Rows are JSON, so files that are not UTF-8 are written as git's
binary patches.
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
"""Patterns of untracked files that are not part of a solution, in the syntax of ``.gitignore``."""

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
"""Modules that some version of pytest imports, including optional imports."""

_METADATA = (".egg-info", ".dist-info", ".pth")
_HELPERS = re.compile(
    r"test|_?testing(\.py)?|runtests\.py|_?test(s|ing)?_?(utils?|helpers?|lib|support|tools?|common|cases?)(\.py)?"
)
"""Names of test helper folders and files, without ``test.py``, which may be a command of the project."""

_ODD_LINES = re.compile(r"\r(?!\n)|[\v\f\x1c-\x1e\x85\u2028\u2029\ufeff]")
_MODULE_FILES = (".py", ".so")

SETTINGS_FILES = frozenset({"setup.cfg", "pyproject.toml"})
"""Files that may contain pytest settings; a change is ignored if it modifies these settings."""


def files_of_patch(patch: str) -> frozenset[str]:
    found = re.findall(r"^(?:---|\+\+\+) (?:\"?)[ab]/(.+?)\"?\s*$", patch, re.MULTILINE)
    found += [path for pair in re.findall(r"^diff --git a/(.+) b/(.+)$", patch, re.MULTILINE) for path in pair]
    return frozenset(found)


def files_of_tests(names: Iterable[str]) -> frozenset[str]:
    """Return the paths in pytest node ids (``PATH::NAME``); other names are skipped."""
    return frozenset(name.partition("::")[0] for name in names if "::" in name)


@dataclass(frozen=True, slots=True)
class ImportableModules:
    """Modules that the image's Python can import: the ``sys.path`` entries within the repository, the base commit's
    top-level modules in these folders, and the top-level modules in the other entries."""

    folders: frozenset[str] = frozenset({"", "src"})
    own: frozenset[str] = frozenset()
    installed: frozenset[str] = frozenset()

    def shadowed_by(self, path: str) -> bool:
        """Return whether a new file would shadow an installed, standard library or pytest module (:data:`RUNNERS`)."""
        names = {_module(path, folder) for folder in self.folders} - {None, *self.own}
        return bool(names & (self.installed | RUNNERS | sys.stdlib_module_names))


def importable_modules(paths: Iterable[str], report: str) -> ImportableModules:
    """Return the importable modules for the base commit's paths and the lines ``folder PATH`` and ``module NAME`` of
    :data:`.patch_scripts.READ_ENVIRONMENT`."""
    said = [line.split(" ", 1) for line in report.splitlines() if " " in line]
    folders = frozenset({"", "src"} | {name for kind, name in said if kind == "folder"})
    modules = [path for path in paths if path.endswith(_MODULE_FILES)]
    own = frozenset(name for path in modules for folder in folders if (name := _module(path, folder)))
    return ImportableModules(folders, own, frozenset(name for kind, name in said if kind == "module"))


class ProtectedFiles:
    """Rules that decide which of the policy's changes are ignored in grading.

    Attributes:
        fix: files that the reference fix changes, without those that the test patch changes; exempt from most rules.
        tests: files with the row's tests, and files that the row's test patch changes; always ignored.
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

    def ignore_reason(self, path: str, base: ImportableModules | None = None) -> str | None:
        """Return why a change of a path is ignored; ``None`` if no rule on paths applies. ``base`` is set for a new
        path only."""
        if path in self.tests:
            return "a test"
        if any(name.startswith(path + "/") for name in self.tests):
            return "replaces a folder with tests"
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
            return "a test helper"
        if pure.name in RUNNER_FILES:
            return "configures a test runner"
        if path in self._commanded:
            return "named by the test command"
        if pure.name.partition(".")[0] in _STARTUP:
            return "executed when Python starts"
        if any(part.endswith(_METADATA) for part in pure.parts):
            return "metadata of an installed package"
        if base is not None and base.shadowed_by(path):
            return "shadows an installed module"
        return None

    def depends_on_settings(self, path: str) -> bool:
        """Return whether a change is ignored only if it modifies pytest settings, which pytest reads in any folder."""
        return PurePosixPath(path).name in SETTINGS_FILES and path not in self.fix


def same_settings(path: str, before: bytes | None, after: bytes | None) -> bool:
    """Return whether two versions of a file have the same pytest settings; ``False`` if one cannot be parsed."""
    try:
        return bool(pytest_settings(path, before) == pytest_settings(path, after))
    except (ValueError, AttributeError, RecursionError):
        return False


def pytest_settings(path: str, content: bytes | None) -> Any:
    """Return the pytest settings in a file: the table ``tool.pytest``, or the sections of an INI file."""
    text = (content or b"").decode()
    if path.endswith(".toml"):
        return tomllib.loads(text).get("tool", {}).get("pytest")
    # iniconfig 1 splits lines like a text file, iniconfig 2 with str.splitlines: refuse ambiguous line ends.
    if _ODD_LINES.search(text):
        raise ValueError("ambiguous line ends")
    sections = re.split(r"^(?=\[)", text, flags=re.MULTILINE)
    return [section.rstrip() for section in sections if "pytest" in section.partition("\n")[0].lower()]


def _helpers(path: PurePosixPath) -> str | None:
    """Return a path's prefix up to the first test helper folder or file; ``None`` without a helper."""
    for number, part in enumerate(path.parts, start=1):
        if _HELPERS.fullmatch(part):
            return "/".join(path.parts[:number])
    return None


def _module(path: str, folder: str) -> str | None:
    """Return the top-level module that ``path`` provides to imports from ``folder``; ``None`` if it provides none."""
    if folder and not path.startswith(folder + "/"):
        return None
    name, slash, rest = path[len(folder) + 1 if folder else 0 :].partition("/")
    if not slash:
        # A name without a suffix may be a link to a package.
        return name.partition(".")[0] if "." not in name or name.endswith((".py", ".pyc", ".so")) else None
    return name if rest.partition(".")[0] == "__init__" else None


LINK, SUBMODULE = "120000", "160000"
MODES = frozenset({"100644", "100755", LINK})

_ENTRY = re.compile(r"([0-7]{6}) ([0-9a-f]{40}) 0\t(.+)")
_OUTSIDE = frozenset({"", ".", "..", ".git"})
_QUOTED = re.compile(rb'\\([0-7]{3}|[abtnvfr"\\])')
_ESCAPES = {b"a": b"\a", b"b": b"\b", b"t": b"\t", b"n": b"\n", b"v": b"\v", b"f": b"\f", b"r": b"\r"}


class BadListing(Exception):
    """Malformed output of ``git ls-files --stage``."""


@dataclass(frozen=True, slots=True)
class Entry:
    """File in a listing: git's octal mode, and the blob id (SHA-1) of the content."""

    mode: str
    blob: str


@dataclass(frozen=True, slots=True)
class Change:
    """A changed file; ``entry`` is ``None`` if the file was deleted, and ``new`` if the base lacks the path."""

    path: str
    entry: Entry | None
    new: bool


@dataclass(frozen=True, slots=True)
class Solution:
    """File changes that the policy made to the repository."""

    changes: tuple[Change, ...] = ()  # in the reported patch
    contents: Mapping[str, bytes] = field(default_factory=dict)  # by blob id, with the base's pytest settings files
    left_out: Mapping[str, str] = field(default_factory=dict)  # reason by path of files that the patch lacks
    ignored: Mapping[str, str] = field(default_factory=dict)  # reason by path of changes that are not applied


def read_listing(text: str) -> dict[str, Entry]:
    """Parse the output of ``git ls-files --stage`` into entries by quoted path.

    Raises:
        BadListing: a line is malformed, a path has a component such as ``..`` or ``.git``, or lies inside a file.
    """
    entries: dict[str, Entry] = {}
    for line in text.splitlines():
        match = _ENTRY.fullmatch(line)
        if match is None:
            raise BadListing(f"malformed entry {line!r:.200}")
        mode, blob, path = match.groups()
        if _OUTSIDE & {part.lower() for part in unquote(path).split("/")}:
            raise BadListing(f"forbidden path {path!r:.200}")
        entries[path] = Entry(mode, blob)
    folders: set[str] = set()
    for path in map(unquote, entries):
        while (path := path.rpartition("/")[0]) and path not in folders:
            folders.add(path)
    if clash := folders & {unquote(path) for path in entries}:
        raise BadListing(f"{min(clash)!r:.200} is both a file and a folder")
    return entries


def compare_listings(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> list[Change]:
    """Return the added, modified and deleted files, sorted by path; submodules in ``after`` are skipped."""
    gone = [Change(path, None, False) for path in before if path not in after]
    there = [
        Change(path, entry, path not in before)
        for path, entry in after.items()
        if entry.mode in MODES and before.get(path) != entry
    ]
    return sorted(gone + there, key=lambda change: change.path)


def unquote(path: str) -> str:
    """Decode git's quoting of a path; bytes that are not UTF-8 become ``\\xNN``."""
    if not path.startswith('"'):
        return path
    raw = _QUOTED.sub(lambda found: _unescaped(found[1]), path[1:-1].encode())
    return raw.decode("utf-8", "backslashreplace")


def read_contents(stream: bytes) -> dict[str, bytes]:
    """Parse the output of ``git cat-file --batch`` into contents by blob id; contents with another id are skipped."""
    contents: dict[str, bytes] = {}
    at = 0
    while (end := stream.find(b"\n", at)) != -1:
        words = stream[at:end].split()
        at = end + 1
        if len(words) != 3 or not words[2].isdigit():
            continue  # git's reply "<hash> missing"
        size = int(words[2])
        content, at = stream[at : at + size], at + size + 1
        if len(content) == size and hash_of(content) == words[0].decode("latin-1"):
            contents[hash_of(content)] = content
    return contents


def hash_of(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def ignore_reasons(
    changes: Iterable[Change],
    before: Mapping[str, Entry],
    contents: Mapping[str, bytes],
    rules: ProtectedFiles,
    base: ImportableModules,
) -> dict[str, str]:
    """Return the reason by path for changes that are not applied; ``before`` is the base commit's listing."""
    found = {}
    for change in changes:
        path = unquote(change.path)
        why = rules.ignore_reason(path, base if change.new else None)
        if why is None and rules.depends_on_settings(path):
            old, new = before.get(change.path), change.entry
            link = new is not None and new.mode == LINK
            was, now = (contents.get(entry.blob) if entry else b"" for entry in (old, new))
            if link or not same_settings(path, was, now):
                why = "configures a test runner"
        if why is not None:
            found[change.path] = why
    return found


def import_stream(solution: Solution, base: str) -> bytes:
    """Return a stream for ``git fast-import`` with two commits on ``base``: ``refs/prorl/solution`` with all changes,
    ``refs/prorl/applied`` without ignored ones.
    """
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
    # fast-import executes commands in order: a file can replace a folder only after the folder's files are deleted.
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
"""Maximum compressed bytes per line of git's binary patch format."""

_LENGTHS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Patch:
    """Text of a patch by changed file; paths keep git's quoting."""

    parts: Mapping[str, str]

    def within(self, limit: int) -> tuple[str, list[str]]:
        """Return the patch without files that do not fit into ``limit`` characters, and the paths of those files."""
        text, left_out = "", []
        for path, part in self.parts.items():
            if len(text) + len(part) <= limit:
                text += part
            else:
                left_out.append(path)
        return text, left_out


def read_patch(patch: bytes, solution: Solution, base: Mapping[str, Entry]) -> Patch:
    """Parse a solution's ``git diff --binary --no-renames``; files that are not UTF-8 become binary patches."""
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
