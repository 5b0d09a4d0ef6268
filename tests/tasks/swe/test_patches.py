# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A solution as text of a row makes the same files, whatever their encoding, by git's own program."""

import subprocess
from pathlib import Path

import orjson

from nemo_gym_prorl.tasks.swe import changes
from nemo_gym_prorl.tasks.swe.changes import Solution, changed, read_contents, read_listing


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


def test_a_patch_in_a_row_makes_the_same_files(tmp_path: Path) -> None:
    def git(*words: str, given: bytes = b"") -> bytes:
        options = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.quotePath=true"]
        return subprocess.run(
            ["git", *options, *words], cwd=tmp_path, input=given, check=True, capture_output=True
        ).stdout

    def commit(files: dict[str, bytes]) -> str:
        for path in tmp_path.glob("[!.]*"):
            path.unlink()
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        git("add", "-A")
        git("commit", "-qm", "x")
        return git("ls-files", "-s").decode()

    git("init", "-q", "--template=")
    base, now = read_listing(commit(BEFORE)), read_listing(commit(AFTER))
    contents = read_contents(
        git("cat-file", "--batch", given="".join(f"{entry.blob}\n" for entry in now.values()).encode())
    )
    solution = Solution(tuple(changed(base, now)), contents)
    patch = changes.read_patch(git("diff", "--binary", "--no-renames", "HEAD~1", "HEAD"), solution, base)
    text, left_out = patch.within(1 << 20)
    assert (left_out, patch.parts.keys()) == ([], {change.path for change in solution.changes})
    text = orjson.loads(orjson.dumps(text))
    assert "+one = 1  # Grüße\n" in text
    git("read-tree", "HEAD~1")
    git("apply", "--cached", "--whitespace=nowarn", given=text.encode())
    assert git("write-tree") == git("rev-parse", "HEAD^{tree}")


def test_a_patch_that_is_too_long_has_whole_files_only() -> None:
    patch = changes.Patch({"a": "a" * 60, "b": "b" * 60, "c": "c" * 30})
    assert patch.within(100) == ("a" * 60 + "c" * 30, ["b"])
    assert patch.within(150) == ("a" * 60 + "b" * 60 + "c" * 30, [])
