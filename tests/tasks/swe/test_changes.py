# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Extraction, filtering and application of changes, checked with git itself."""

import subprocess
import tempfile
from pathlib import Path

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_gym_prorl.tasks.swe.changes import (
    LINK,
    BadListing,
    Change,
    Entry,
    Patch,
    ProtectedFiles,
    Solution,
    compare_listings,
    hash_of,
    ignore_reasons,
    import_stream,
    importable_modules,
    read_contents,
    read_listing,
    read_patch,
    same_settings,
    unquote,
)
from nemo_gym_prorl.tasks.swe.instance import SweInstance
from tests.tasks.swe import records


NAMES = st.sampled_from(["a", "b", "c.py", "tab\there", "ä", 'quo"te', "back\\slash", "two words", "\x01", "end "])
MODES = st.sampled_from(["100644", "100755", LINK])
CONTENTS = st.binary(max_size=30) | st.sampled_from([b"\n", b"data 3\nabc\n", b"\0\xff", b"../../etc/passwd"])


@st.composite
def trees(draw: st.DrawFn) -> dict[str, tuple[str, bytes]]:
    files: dict[str, tuple[str, bytes]] = {}
    for parts in draw(st.lists(st.lists(NAMES, min_size=1, max_size=3), max_size=6)):
        path = "/".join(parts)
        if not any(path.startswith(other + "/") or other.startswith(path + "/") for other in files):
            mode, content = draw(MODES), draw(CONTENTS)
            files[path] = (mode, (content.replace(b"\0", b"0") or b"x") if mode == LINK else content)
    return files


def git(folder: str, *words: str, given: bytes = b"") -> bytes:
    return subprocess.run(
        ["git", "-C", folder, "-c", "core.quotePath=true", *words], input=given, capture_output=True, check=True
    ).stdout


def write(folder: str, tree: dict[str, tuple[str, bytes]]) -> str:
    """Write a tree to the index and return git's listing."""
    git(folder, "read-tree", "--empty")
    lines = b""
    for path, (mode, content) in tree.items():
        blob = git(folder, "hash-object", "-w", "--stdin", given=content).strip()
        lines += mode.encode() + b" " + blob + b"\t" + path.encode() + b"\0"
    git(folder, "update-index", "-z", "--index-info", given=lines)
    return git(folder, "ls-files", "-s").decode()


def contents_of(folder: str, listing: dict[str, Entry]) -> dict[str, bytes]:
    wanted = "".join(f"{entry.blob}\n" for entry in listing.values()).encode()
    return read_contents(git(folder, "cat-file", "--batch", given=wanted))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees(), trees())
def test_extracted_and_applied_changes_are_identical(
    before: dict[str, tuple[str, bytes]], after: dict[str, tuple[str, bytes]]
) -> None:
    """Covers binary contents, modes, links, and files that replace folders and vice versa."""
    with tempfile.TemporaryDirectory() as folder:
        git(folder, "init", "-q", "--template=")
        base = read_listing(write(folder, before))
        tree = git(folder, "write-tree").decode().strip()
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        commit = git(folder, *author, "commit-tree", tree, "-m", "base").decode().strip()
        listing = write(folder, after)
        after_listing = read_listing(listing)
        solution = Solution(tuple(compare_listings(base, after_listing)), contents_of(folder, after_listing))
        git(folder, "fast-import", "--quiet", given=import_stream(solution, commit))
        for ref in ("solution", "applied"):
            git(folder, "read-tree", f"refs/prorl/{ref}")
            assert git(folder, "ls-files", "-s").decode() == listing
        assert {unquote(path) for path in after_listing} == after.keys()


@pytest.mark.parametrize(
    "path",
    ["../out", "/etc/passwd", "a//b", ".git/hooks/x", "a/.GIT/x", "a/b/c|a/b", r'"\056\056/out"'],
)
def test_path_out_of_the_tree_or_in_a_file_is_refused(path: str) -> None:
    with pytest.raises(BadListing):
        read_listing("".join(f"100644 {hash_of(b'')} 0\t{name}\n" for name in path.split("|")))


@given(st.dictionaries(st.binary(max_size=20), st.booleans(), max_size=5), st.integers(0, 300))
def test_contents_are_verified_and_complete(contents: dict[bytes, bool], cut: int) -> None:
    """Contents with a wrong hash and truncated contents are dropped."""
    stream = b""
    for content, true in contents.items():
        name = hash_of(content) if true else hash_of(content + b"!")
        stream += f"{name} blob {len(content)}\n".encode() + content + b"\n"
    whole = {hash_of(content): content for content, true in contents.items() if true}
    assert read_contents(stream) == whole
    assert read_contents(stream[:cut]).items() <= whole.items()


INSTANCE = SweInstance(
    dataset="made",
    repo="a/b",
    problem_statement="x",
    patch=records.PATCH,
    test_patch=records.TEST_PATCH,
    FAIL_TO_PASS=("lib/tests/test_sums.py::test_add", "checks/sums.py::test_all"),
    test_command="bin/check lib/tests/test_sums.py",
)
BASE = importable_modules(
    ["lib/sums.py", "json/data.txt", "packaging/build.sh", "attr/__init__.py", "setup.cfg", "src/own/__init__.py"],
    "folder lib\nmodule execnet\nmodule own\nno words\n",
)
FOLDERS = st.lists(st.sampled_from(["a", "lib", "src", "deep", "x y"]), max_size=4).map(lambda parts: "/".join(parts))
PROTECTED = ["conftest.py", "test_a.py", "a_test.py", "pytest.ini", ".pytest.toml", "tox.ini", "sitecustomize.py",
             "x.pth", "x.dist-info/entry_points.txt", "tests/any.txt", "testing/helper.py", "tests"]  # fmt: skip


@given(FOLDERS, st.sampled_from(PROTECTED))
def test_test_and_runner_files_are_protected_in_any_folder(folder: str, name: str) -> None:
    assert ProtectedFiles(INSTANCE).ignore_reason(f"{folder}/{name}" if folder else name, BASE) is not None


@given(FOLDERS, st.sampled_from(["setup.cfg", "pyproject.toml"]))
def test_runner_settings_are_protected_in_any_folder(folder: str, name: str) -> None:
    path = f"{folder}/{name}" if folder else name
    assert ProtectedFiles(INSTANCE).depends_on_settings(path)
    content = b"[tool:pytest]\naddopts = -p a\n" if name == "setup.cfg" else b"[tool.pytest.ini_options]\na = 1\n"
    for mode, text in (("100644", content), (LINK, b"plain.cfg")):
        change = Change(path, Entry(mode, hash_of(text)), True)
        assert path in ignore_reasons([change], {}, {hash_of(text): text}, ProtectedFiles(INSTANCE), BASE)
    harmless = Change(path, Entry("100644", hash_of(b"[metadata]\nname = 1\n")), True)
    contents = {hash_of(b"[metadata]\nname = 1\n"): b"[metadata]\nname = 1\n"}
    assert path not in ignore_reasons([harmless], {}, contents, ProtectedFiles(INSTANCE), BASE)


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("pygments.py", False),
        ("json/__init__.py", False),
        ("json", False),
        ("json.txt", True),
        ("own.py", True),
        ("bin/check", False),
        ("checks/sums.py", False),
        ("lib/test/checks.py", False),
        ("lib/testing_utils.py", False),
        ("lib/commands/test.py", True),
    ],
)
def test_shadowing_modules_are_ignored(path: str, counts: bool) -> None:
    assert (ProtectedFiles(INSTANCE).ignore_reason(path, BASE) is None) is counts


def test_helpers_are_allowed_if_the_fix_changes_one() -> None:
    for path in ("lib/test/client.py", "lib/testutils/deep/base.py"):
        row = INSTANCE.model_copy(update={"patch": records.PATCH.replace("lib/sums.py", path)})
        folder = "/".join(path.split("/")[:2])
        assert ProtectedFiles(row).ignore_reason(path, BASE) is None
        assert ProtectedFiles(row).ignore_reason(f"{folder}/other.py", BASE) is None
        assert ProtectedFiles(row).ignore_reason(f"{folder}/pytest.ini", BASE) is not None
        assert ProtectedFiles(row).ignore_reason("deep/test/other.py", BASE) is not None


SETTINGS = b"[metadata]\nname = a\n\n[tool:pytest]\naddopts = -q\n"


@pytest.mark.parametrize(
    ("after", "same"),
    [
        (SETTINGS.replace(b"name = a", b"name = b\nversion = 2"), True),
        (SETTINGS.replace(b"-q", b"-q -p a\nAddopts = -q"), False),
        (SETTINGS.replace(b"[tool:pytest]", b"[tool:pytest] # ]"), False),
        (SETTINGS.replace(b"-q\n", b"-q\n[x]\n[pytest] ; a\n"), False),
        (SETTINGS.replace(b"-q", b"-q\x0c[x]\n -p a"), False),
        (SETTINGS.replace(b"-q\n", b"-q\n\r -p a\n"), False),
        (SETTINGS + b"\xff", False),
    ],
)
def test_settings_with_ambiguous_syntax_differ(after: bytes, same: bool) -> None:
    assert same_settings("setup.cfg", SETTINGS, after) is same
    assert not any(same_settings("pyproject.toml", b"", bad) for bad in (b"tool = 1", b"[[tool]]", b"tool = ["))


BEFORE = {
    "latin.py": b"# Betr\xe4ge\none = 1\n",
    "gone.py": b"# Gel\xf6scht\n",
    "recoded.py": b"# Betr\xe4ge\n",
    "plain.py": b"one = 1\n",
    "logo.bin": b"\0\xff" * 40,
    "kept.py": b"# Gr\xfc\xdfe\n",
}
AFTER = {
    "latin.py": b"# Betr\xe4ge\none = 2\n",
    "recoded.py": "# Beträge\n".encode(),
    "plain.py": "one = 1  # Grüße\n".encode(),
    "logo.bin": b"\0\xfe" * 40,
    "kept.py": b"# Gr\xfc\xdfe\n",
    "new ä.py": b"# Neu f\xfcr alle\n" * 4000,
    "empty.py": b"",
}


def test_reported_patch_reproduces_the_files(tmp_path: Path) -> None:
    folder, listings, trees = str(tmp_path), [], []
    git(folder, "init", "-q", "--template=")
    for files in (BEFORE, AFTER):
        listings.append(read_listing(write(folder, {name: ("100644", content) for name, content in files.items()})))
        trees.append(git(folder, "write-tree").decode().strip())
    solution = Solution(tuple(compare_listings(*listings)), contents_of(folder, listings[1]))
    patch = read_patch(git(folder, "diff", "--binary", "--no-renames", *trees), solution, listings[0])
    text, left_out = patch.within(1 << 20)
    assert (left_out, patch.parts.keys()) == ([], {change.path for change in solution.changes})
    text = orjson.loads(orjson.dumps(text))
    assert "+one = 1  # Grüße\n" in text
    git(folder, "read-tree", trees[0])
    git(folder, "apply", "--cached", "--whitespace=nowarn", given=text.encode())
    assert git(folder, "write-tree").decode().strip() == trees[1]


def test_truncated_patch_has_whole_files_only() -> None:
    patch = Patch({"a": "a" * 60, "b": "b" * 60, "c": "c" * 30})
    assert patch.within(100) == ("a" * 60 + "c" * 30, ["b"])
    assert patch.within(150) == ("a" * 60 + "b" * 60 + "c" * 30, [])
