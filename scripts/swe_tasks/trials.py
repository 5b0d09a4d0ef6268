# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Try mutations: run the package's tests in a sandbox before and after.

The tests alone decide whether a bug becomes a task. Tests that do not always pass without the bug are ignored.
"""

from __future__ import annotations

import asyncio
import io
import shlex
import tarfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from nemo_gym.sandbox import SandboxSpec

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.factory import SandboxFactory
from nemo_gym_prorl.tasks.sandbox import HasFiles, Sandbox
from scripts.swe_tasks import hiding, outcomes
from scripts.swe_tasks.mutations import Mutation, apply, drawn
from scripts.swe_tasks.outcomes import Effect, Outcomes
from scripts.swe_tasks.packages import Package, sources


REPOSITORY = "/testbed"

SUITE_TIMEOUT_S = 300.0
"""Seconds for a test suite without a mistake on a loaded machine."""

SLOWER = 4.0
"""Time limit with a mistake, as a multiple of the time without, plus :data:`GRACE_S`; longer runs are endless loops.
"""

GRACE_S = 10.0

TRIED = 40
"""Maximum number of mistakes tried per package."""

_LOG = "/tmp/log"
_LOG_LIMIT = 64 << 20


@dataclass(frozen=True, slots=True)
class Bug:
    """One or more mutations with their effect.

    Attributes:
        edits: file to its mutations.
        effect: effect on the tests.
    """

    edits: Mapping[str, tuple[Mutation, ...]]
    effect: Effect

    @property
    def kinds(self) -> list[str]:
        """Kinds of the mutations."""
        return [one.kind for chosen in self.edits.values() for one in chosen]


def pytest_command(tests: str) -> str:
    """Return the test command, also used for grading."""
    return f"python3 -m pytest -rA --tb=short -p no:cacheprovider -o addopts= {tests}"


def mistaken(tree: Path, edits: Mapping[str, tuple[Mutation, ...]]) -> dict[str, str]:
    """Return the mutated files."""
    return {file: apply((tree / file).read_bytes().decode(), chosen) for file, chosen in edits.items()}


@asynccontextmanager
async def sandbox_with_package(package: Package, tree: Path, image: Path) -> AsyncIterator[PackageTester]:
    """Start a sandbox with a package."""
    starter = SandboxFactory({"singularity": {}})
    try:
        sandbox = await starter.start(SandboxSpec(image=str(image), workdir="/"))
        try:
            assert isinstance(sandbox, HasFiles)
            await sandbox.write_file("/tmp/tree.tar", await asyncio.to_thread(_packed, tree))
            done = await sandbox.exec(f"mkdir {REPOSITORY} && tar xf /tmp/tree.tar --no-same-owner -C {REPOSITORY}")
            if done.return_code:
                raise InfrastructureError(f"{package.name} can't be unpacked in a sandbox: {done.stderr}")
            yield PackageTester(package, tree, sandbox)
        finally:
            await sandbox.stop()
    finally:
        await starter.aclose()


class PackageTester:
    """Runs a package's tests with mutations in a sandbox."""

    def __init__(self, package: Package, tree: Path, sandbox: Sandbox) -> None:
        self._package = package
        self._tree = tree
        self._sandbox = sandbox
        self._timeout_s = SUITE_TIMEOUT_S
        self.tried = 0

    async def stable(self) -> frozenset[str]:
        """Return the tests that pass twice without a mutation.

        Raises:
            InfrastructureError: the test suite does not run.
        """
        passed = []
        took = 0.0
        for _ in range(2):
            started = time.monotonic()
            run = await self._run({})
            took = max(took, time.monotonic() - started)
            if not run.complete:
                raise InfrastructureError(f"the tests of {self._package.name} do not run in {REPOSITORY}")
            passed.append(run.having("PASSED"))
        self._timeout_s = SLOWER * took + GRACE_S
        return passed[0] & passed[1]

    async def bugs(self, stable: frozenset[str], count: int, seed: str) -> list[Bug]:
        """Return up to ``count`` bugs of one mutation each, in different functions; at most :data:`TRIED` mutations
        are tried.
        """
        found: list[Bug] = []
        places = set[tuple[str, str]]()
        for file, one in self._candidates(seed):
            if (file, one.function) in places:
                continue
            if len(found) == count or self.tried == TRIED:
                break
            bug = await self.bug({file: (one,)}, stable)
            if bug is not None:
                found.append(bug)
                places.add((file, one.function))
        return found

    async def double(self, stable: frozenset[str], singles: Sequence[Bug]) -> tuple[Bug, Bug, Bug] | None:
        """Return a bug of two mutations with its parts; each part breaks a test that the other does not."""
        for number, one in enumerate(singles):
            for other in singles[number + 1 :]:
                first, second = one.effect.broken, other.effect.broken
                if first <= second or second <= first:
                    continue
                edits = {
                    file: (*one.edits.get(file, ()), *other.edits.get(file, ()))
                    for file in {**one.edits, **other.edits}
                }
                both = await self.bug(edits, stable)
                if both is not None and first | second <= both.effect.broken:
                    return both, one, other
        return None

    async def bug(self, edits: Mapping[str, tuple[Mutation, ...]], stable: frozenset[str]) -> Bug | None:
        """Return the bug of mutations; ``None`` if it is not usable as a task."""
        self.tried += 1
        after = await self._run(
            {file: apply((self._tree / file).read_text(), chosen) for file, chosen in edits.items()}
        )
        done = outcomes.effect(stable, after)
        return Bug(edits, done) if done is not None and self._can_hide(done.broken) else None

    def _candidates(self, seed: str) -> Iterator[tuple[str, Mutation]]:
        """Yield mutations, alternating between files."""
        queues = []
        for path in sources(self._package, self._tree):
            file = str(path.relative_to(self._tree))
            queues.append([(file, one) for one in drawn(path.read_bytes().decode(), f"{seed} {file}")])
        while queues:
            yield from [queue.pop(0) for queue in queues if queue]
            queues = [queue for queue in queues if queue]

    def _can_hide(self, tests: frozenset[str]) -> bool:
        try:
            for file, functions in hiding.by_file(tests).items():
                hiding.without((self._tree / file).read_bytes().decode(), functions)
        except (KeyError, SyntaxError):
            return False
        return True

    async def _run(self, files: Mapping[str, str]) -> Outcomes:
        assert isinstance(self._sandbox, HasFiles)
        for file, text in files.items():
            await self._sandbox.write_file(f"{REPOSITORY}/{file}", text.encode())
        # PYTHONDONTWRITEBYTECODE: a stale .pyc matches a file of equal length that changes within a second.
        # CI: pytest does not truncate lines to the terminal's width.
        command = f"export PYTHONDONTWRITEBYTECODE=1 CI=1; {pytest_command(self._package.tests)} > {_LOG} 2>&1"
        done = await self._sandbox.exec(
            f"timeout -k 5 {self._timeout_s:g} bash -c {shlex.quote(command)}",
            cwd=REPOSITORY,
            timeout_s=self._timeout_s + 60,
        )
        log = (await self._sandbox.read_file(_LOG, limit=_LOG_LIMIT)).decode(errors="replace")
        for file in files:
            await self._sandbox.write_file(f"{REPOSITORY}/{file}", (self._tree / file).read_bytes())
        return outcomes.read(log, done.return_code)


def _packed(tree: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(tree, ".")
    return packed.getvalue()
