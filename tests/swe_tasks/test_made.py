# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Generated tasks, graded by the real server."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.images.entries import ignore_progress
from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime
from nemo_gym_prorl.servers.task_server import TaskVerifyRequest
from nemo_gym_prorl.servers.verifier_fixture import as_shipped, play
from nemo_gym_prorl.tasks.swe.instance import parse_row
from resources_servers.prorl_swe.app import ProRLSweServer
from scripts.scripted_turns.swe import patching
from scripts.swe_tasks import packages, repositories
from scripts.swe_tasks.making import MAKING, PARTIAL, ROWS, make
from scripts.swe_tasks.mutations import Mutation
from scripts.swe_tasks.outcomes import Effect
from scripts.swe_tasks.packages import Package
from scripts.swe_tasks.trials import Bug, sandbox_with_package
from tests.prorl_code.conftest import RESPONSE


SERVER = Path(__file__).parents[2] / "resources_servers/prorl_swe"
CODE = """\
def smaller(a, b):
    if a < b:
        return a
    return b


def total(numbers):
    result = 0
    for number in numbers:
        result += number
    return result
"""

TESTS = """\
import pytest
from sums import smaller, total


@pytest.mark.parametrize("one", range(8))
def test_nothing(one):
    assert smaller(one, one) == one


def test_smaller():
    assert smaller(1, 2) == 1


def test_smaller_of_large_ones():
    assert smaller(2**70, 2**80) == 2**70


def test_total():
    assert total([1, 2]) == 3
"""


def distribution(folder: Path) -> Package:
    """Create a source distribution and return its package."""
    folder.mkdir(parents=True)
    archive = folder / "sums-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        for name, text in (("sums.py", CODE), ("test_sums.py", TESTS), ("PKG-INFO", "Name: sums\n")):
            member = tarfile.TarInfo(f"sums-1.0/{name}")
            member.size = len(text)
            file.addfile(member, io.BytesIO(text.encode()))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    return Package("sums", "1.0", digest, "nobody/sums", ("sums.py",), "test_sums.py")


async def grade(row: dict[str, Any], patch: str) -> dict[str, Any]:
    """Return the shipped server's verdict on a patch; an empty patch makes no calls."""
    calls = [call for turn in patching(patch) for call in turn["tool_calls"]] if patch else []
    output = [
        {"type": "function_call", "call_id": f"c{n}", "name": call["name"], "arguments": json.dumps(call["arguments"])}
        for n, call in enumerate(calls)
    ]
    asked = TaskVerifyRequest.model_validate(row | {"response": RESPONSE | {"output": output}})
    return await play(as_shipped(SERVER, ProRLSweServer), asked, SERVER / "none")


@pytest.mark.long("a package's tests run once for each of many mistakes")
@pytest.mark.sandbox
async def test_generated_tasks_are_graded_correctly(tmp_path: Path) -> None:
    package = distribution(tmp_path / "sources")
    left = tmp_path / MAKING / ".sums-killed"
    left.mkdir(parents=True)
    [made] = await make([package], 2, tmp_path, require_runtime(), ignore_progress)
    assert not left.exists(), "what a killed run left"
    names = [row["instance_id"] for row in made.rows]
    assert names == ["made__sums-1", "made__sums-2", "made__sums-3"]
    assert list(made.partial) == ["made__sums-3"]
    assert len((tmp_path / PARTIAL).read_text().splitlines()) == 2
    rows = [json.loads(line) for line in (tmp_path / ROWS).read_text().splitlines()]
    for row in rows:
        swe = parse_row(row).swe
        told = json.dumps(row["responses_create_params"])
        assert all(test.split("::")[1] in told for test in swe.FAIL_TO_PASS)
        assert "sums.py" not in told.replace("test_sums.py", "")
        assert not any("test_nothing" in test for test in swe.FAIL_TO_PASS)
    halves = [json.loads(line) for line in (tmp_path / PARTIAL).read_text().splitlines()]
    assert [half["instance_id"] for half in halves] == ["made__sums-3"] * 2
    tried = [(rows[2], half["patch"], 0.0) for half in halves]
    tried += [(row, patch, reward) for row in rows for patch, reward in ((row["swe"]["patch"], 1.0), ("", 0.0))]
    graded = await asyncio.gather(*(grade(row, patch) for row, patch, _ in tried))
    assert [(answer["reward"], answer.get("mask_sample", False)) for answer in graded] == [
        (reward, False) for _, _, reward in tried
    ], graded
    # A second run reuses the finished tasks.
    assert await make([package], 2, tmp_path, require_runtime(), ignore_progress) == [made]


@pytest.mark.sandbox
async def test_files_of_another_owner_are_unpacked(tmp_path: Path, image: Path) -> None:
    package = distribution(tmp_path / "sources")
    tree = packages.unpack(package, tmp_path / "sources", tmp_path / "tree")
    for path in (tree, *tree.iterdir()):
        os.chown(path, *((1001, 1001) if os.geteuid() == 0 else (-1, -1)))
    async with sandbox_with_package(package, tree, image):
        pass


def test_repository_has_the_bug_without_its_tests(tmp_path: Path) -> None:
    tree = packages.unpack(distribution(tmp_path / "sources"), tmp_path / "sources", tmp_path / "tree")
    assert sorted(file.name for file in tree.iterdir()) == ["sums.py", "test_sums.py"]
    place = CODE.index("a < b")
    mistake = Mutation(place, place + 5, "a > b", "comparison", "smaller")
    effect = Effect(frozenset({"test_sums.py::test_smaller"}), {}, frozenset())
    made = repositories.make(tree, Bug({"sums.py": (mistake,)}, effect), (), tmp_path / "testbed")

    def git(*arguments: str, text: str | None = None) -> str:
        command = ["git", *arguments]
        return subprocess.run(
            command, cwd=tmp_path / "testbed", input=text, capture_output=True, text=True, check=True
        ).stdout

    assert git("rev-list", "--all").split() == [made.base_commit]
    assert git("status", "--porcelain") == ""
    assert (tmp_path / "testbed/sums.py").read_text() == CODE.replace("a < b", "a > b")
    assert "def test_smaller()" not in (tmp_path / "testbed/test_sums.py").read_text()
    git("apply", "-", text=made.patch + made.test_patch)
    assert (tmp_path / "testbed/sums.py").read_text() == CODE
    assert (tmp_path / "testbed/test_sums.py").read_text() == TESTS
    again = repositories.make(tree, Bug({"sums.py": (mistake,)}, effect), (), tmp_path / "again")
    assert again == made  # the same commit, whenever it is made


def test_source_distribution_with_another_hash_is_refused(tmp_path: Path) -> None:
    package = distribution(tmp_path / "sources")
    (tmp_path / "sources/sums-1.0.tar.gz").write_bytes(b"something else")
    with pytest.raises(InfrastructureError, match="was not downloaded"):
        packages.unpack(package, tmp_path / "sources", tmp_path / "tree")
