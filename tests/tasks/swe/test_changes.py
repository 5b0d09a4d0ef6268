# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a policy changed, from listing to listing, through git's own programs."""

import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_gym_prorl.tasks.swe.changes import (
    LINK,
    BadListing,
    Solution,
    changed,
    hash_of,
    import_stream,
    read_contents,
    read_listing,
    shown,
)


NAMES = st.sampled_from(["a", "b", "c.py", "tab\there", "ä", 'quo"te', "back\\slash", "two words", "\x01", "end "])
MODES = st.sampled_from(["100644", "100755", LINK])
CONTENTS = st.binary(max_size=30) | st.sampled_from([b"\n", b"data 3\nabc\n", b"\0\xff", b"../../etc/passwd"])


@st.composite
def trees(draw: st.DrawFn) -> dict[str, tuple[str, bytes]]:
    """Path to mode and content; no path lies in a file."""
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
    """The files' index lines, as git lists them."""
    git(folder, "read-tree", "--empty")
    lines = b""
    for path, (mode, content) in tree.items():
        blob = git(folder, "hash-object", "-w", "--stdin", given=content).strip()
        lines += mode.encode() + b" " + blob + b"\t" + path.encode() + b"\0"
    git(folder, "update-index", "-z", "--index-info", given=lines)
    return git(folder, "ls-files", "-s").decode()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees(), trees())
def test_what_was_taken_out_and_laid_is_what_was_there(
    before: dict[str, tuple[str, bytes]], after: dict[str, tuple[str, bytes]]
) -> None:
    """Binary contents, modes, links, files in the place of folders and the other way round."""
    with tempfile.TemporaryDirectory() as folder:
        git(folder, "init", "-q", "--template=")
        base = read_listing(write(folder, before))
        tree = git(folder, "write-tree").decode().strip()
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        commit = git(folder, *author, "commit-tree", tree, "-m", "base").decode().strip()
        listing = write(folder, after)
        wanted = "".join(f"{entry.blob}\n" for entry in read_listing(listing).values()).encode()
        contents = read_contents(git(folder, "cat-file", "--batch", given=wanted))
        solution = Solution(tuple(changed(base, read_listing(listing))), contents)
        git(folder, "fast-import", "--quiet", given=import_stream(solution, commit))
        for ref in ("solution", "applied"):
            git(folder, "read-tree", f"refs/prorl/{ref}")
            assert git(folder, "ls-files", "-s").decode() == listing
        assert {shown(path) for path in read_listing(listing)} == after.keys()


@pytest.mark.parametrize(
    "path",
    ["../out", "/etc/passwd", "a/../../b", "a//b", "./a", ".git/hooks/x", "a/.GIT/x", r'"\056\056/out"', "a/.."],
)
def test_a_path_out_of_the_tree_is_refused(path: str) -> None:
    with pytest.raises(BadListing):
        read_listing(f"100644 {hash_of(b'')} 0\t{path}\n")


def test_a_path_in_a_file_is_refused() -> None:
    with pytest.raises(BadListing):
        read_listing("".join(f"100644 {hash_of(b'')} 0\t{path}\n" for path in ("a/b/c", "a/b")))


@given(st.text(max_size=200) | st.from_regex(r"[0-7]{6} [0-9a-f]{40} 0\t[./a\"\\]{1,9}\n", fullmatch=True))
def test_any_listing_is_read_or_refused(text: str) -> None:
    try:
        entries = read_listing(text)
    except BadListing:
        return
    for path in map(shown, entries):
        assert not Path(path).is_absolute()
        assert not {"..", ".git", "."} & set(path.split("/"))


@given(st.dictionaries(st.binary(max_size=20), st.booleans(), max_size=5), st.integers(0, 300))
def test_contents_are_true_and_whole(contents: dict[bytes, bool], cut: int) -> None:
    """What claims another's name, or was cut off, is no content."""
    stream = b""
    for content, true in contents.items():
        name = hash_of(content) if true else hash_of(content + b"!")
        stream += f"{name} blob {len(content)}\n".encode() + content + b"\n"
    whole = {hash_of(content): content for content, true in contents.items() if true}
    assert read_contents(stream) == whole
    assert read_contents(stream[:cut]).items() <= whole.items()
