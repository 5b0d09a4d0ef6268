# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Prepare a repository in a sandbox, extract the policy's changes, and apply them in the sandbox of grading.

- **Prepare**, in the same way for policy and grading: the image's working tree becomes the only commit of a new
  repository. So the image's history (commits, tags, reflogs, unreachable objects) cannot reveal the fix, and both
  sandboxes start from identical files.
- **Extract**: a separate repository, with its own configuration, index, hooks and attributes, lists the current files,
  and the service compares them with the base commit. Commits, ``assume-unchanged``, filters or a deleted ``.git`` have
  no influence. A policy that replaces git can only produce another solution, since grading starts from an untouched
  base.

All steps are shell scripts (:mod:`.patch_scripts`) with files in a :class:`WorkFolder`.
"""

from __future__ import annotations

import asyncio
import base64
import re
import secrets
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.tasks.sandbox import ExecResult, Sandbox
from nemo_gym_prorl.tasks.swe import changes
from nemo_gym_prorl.tasks.swe.changes import (
    JUNK,
    Entry,
    ImportableModules,
    Patch,
    ProtectedFiles,
    Solution,
    importable_modules,
)
from nemo_gym_prorl.tasks.swe.instance import SweInstance, SweLimits
from nemo_gym_prorl.tasks.swe.patch_scripts import (
    ACTIVATE_ENVIRONMENT,
    APPLY_SOLUTION,
    APPLY_TESTS,
    LIST_FILES,
    PREPARE,
    RAW_ATTRIBUTES,
    READ_CONTENTS,
    READ_ENVIRONMENT,
)
from nemo_gym_prorl.tasks.task import ExtractedFile
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits, Workspace


MAX_LISTING_BYTES = 64 << 20
"""Maximum bytes of a repository's listing: some 500,000 files."""

BASH = "bash --noprofile --norc"


class PatchExtractionError(Exception):
    """The policy's changes cannot be extracted, or its code prevents the tests; the policy is charged."""


class WorkFolder:
    """Folder for the files of scripts in a sandbox: ``/tmp/prorl-`` and a random suffix."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.path = f"/tmp/prorl-{secrets.token_hex(8)}"
        self._files = Workspace(sandbox, self.path, ToolLimits())
        self.write = self._files.write

    async def read(self, name: str, *, limit: int) -> ExtractedFile:
        """Read a file, named relative to the folder or by absolute path, of at most ``limit`` bytes."""
        return await self._files.extract_file(name, limit=limit)

    async def text(self, name: str) -> str:
        """Read a text file of the folder; raises PatchExtractionError if that is not possible."""
        taken = await self.read(name, limit=MAX_LISTING_BYTES)
        if taken.content is None:
            raise PatchExtractionError(taken.problem or name)
        return taken.content.decode("utf-8", "backslashreplace")

    async def run(self, script: str, *arguments: str, timeout_s: float, shell: str = "sh") -> ExecResult:
        """Run a shell script with the folder's path and ``arguments`` as positional parameters."""
        words = " ".join(map(shlex.quote, (script, "_", self.path, *arguments)))
        return await self.sandbox.exec(f"exec {shell} -c {words}", cwd="/", timeout_s=timeout_s)

    async def step(self, script: str, *arguments: str, timeout_s: float) -> None:
        """Run a script after the policy's code has run.

        Raises:
            PatchExtractionError: the script failed although the sandbox lives, so the policy is charged.
            AgentError: the policy exceeded a limit of its sandbox.
            InfrastructureError: the sandbox has ended.
        """
        done = await self.run(script, *arguments, timeout_s=timeout_s)
        if done.return_code == 0 and done.error_type is None:
            return
        await self.sandbox.check()
        raise PatchExtractionError(f"the repository cannot be read: {error_tail(done)}")


def error_tail(done: ExecResult) -> str:
    """Return the last 500 characters of a failed script's stderr, or ``exit code N`` if stderr is empty."""
    return (done.stderr or "").strip()[-500:] or f"exit code {done.return_code}"


_ROW_FIELDS = {41: "image", 42: "swe.base_commit", 43: "swe.test_patch"}
"""Row field at fault, by exit code of :data:`.PREPARE`."""

_KEPT_VARIABLES = frozenset({"PWD", "OLDPWD", "SHLVL", "_", "HOME", "TERM"})
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Listing(dict[str, Entry]):
    """Files of a base commit by path, shared by sessions of an image (``dict`` cannot be weakly referenced)."""


@dataclass(frozen=True, slots=True)
class Base:
    """Repository and environment from which a policy starts: the new repository's only commit with its files, the
    variables that activation of the image's environment sets, and the modules that the image's Python can import."""

    commit: str
    listing: Listing
    variables: Mapping[str, str]
    modules: ImportableModules


@dataclass(frozen=True, slots=True)
class AppliedSolution:
    """A solution applied in a sandbox, with the hidden tests."""

    work: WorkFolder
    patch: Patch  # all changes, including ignored ones
    files: Mapping[str, str]  # blob id by path, of every file after application
    tests: frozenset[str]
    kept: str = ""  # base64 archive of tests and hidden files that are not in the sandbox yet


class Repositories:
    """Preparation of repositories, extraction and application of solutions; see the module."""

    def __init__(self, limits: SweLimits) -> None:
        self._limits = limits
        self._listings: WeakValueDictionary[str, Listing] = WeakValueDictionary()

    async def prepare(self, sandbox: Sandbox, instance: SweInstance, *, hide: bool) -> tuple[Base, WorkFolder]:
        """Prepare the repository (see the module), and read the image's environment.

        Args:
            hide: ``True`` (policy) deletes the hidden files and the work folder; ``False`` (grading) moves the hidden
                files into the work folder, for :meth:`apply`.

        Raises:
            CallerError: the image lacks the repository or the commit, or the test patch does not apply; names the
                row's field.
            InfrastructureError: the sandbox failed.
        """
        work, timeout_s = WorkFolder(sandbox), self._limits.repository_timeout_s
        await work.write(
            {
                "attributes": RAW_ATTRIBUTES,
                "junk": "\n".join(JUNK) + "\n",
                "test.patch": instance.test_patch,
                "setup": ACTIVATE_ENVIRONMENT,
            }
        )
        arguments = (instance.repo_folder, instance.base_commit, *instance.hidden)
        done = await work.run(PREPARE, *arguments, timeout_s=timeout_s)
        said = (done.stdout or "").strip()[-500:]
        if field := _ROW_FIELDS.get(done.return_code):
            raise CallerError(said, field=field)
        match = re.fullmatch(r"commit ([0-9a-f]{40})", said.rpartition("\n")[2])
        if done.return_code or match is None:
            raise InfrastructureError(f"the repository could not be prepared: {said} {error_tail(done)}")
        listing = await self._listing(work, match[1])
        await work.run(READ_ENVIRONMENT, instance.repo_folder, timeout_s=timeout_s, shell=BASH)
        modules = await work.read("modules", limit=1 << 20)
        text = (modules.content or b"").decode("utf-8", "replace")
        base = Base(match[1], listing, await _variables(work), importable_modules(map(changes.unquote, listing), text))
        if hide:
            await work.run('rm -rf "$1"', timeout_s=timeout_s)
        return base, work

    async def extract(self, sandbox: Sandbox, instance: SweInstance, base: Base, rules: ProtectedFiles) -> Solution:
        """Extract the policy's changes.

        Raises:
            PatchExtractionError: a limit is exceeded, or as :meth:`.WorkFolder.step`.
            AgentError, InfrastructureError: as :meth:`.WorkFolder.step`.
        """
        work, limits = WorkFolder(sandbox), self._limits
        listing = "".join(f"{entry.mode} {entry.blob} 0\t{path}\n" for path, entry in base.listing.items())
        await work.write({"attributes": RAW_ATTRIBUTES, "junk": "\n".join(JUNK) + "\n", "listing": listing})
        await work.step(
            LIST_FILES, instance.repo_folder, str(limits.patch_file_kib), timeout_s=limits.repository_timeout_s
        )
        left_out = dict.fromkeys(
            (line.removeprefix("./") for line in (await work.text("large")).splitlines()),
            f"larger than {limits.patch_file_kib} KiB",
        )
        try:
            after = await asyncio.to_thread(changes.read_listing, await work.text("after"))
        except changes.BadListing as error:
            raise PatchExtractionError(str(error)) from error
        found = changes.compare_listings(base.listing, after)
        if len(found) > limits.patch_files:
            raise PatchExtractionError(f"{len(found)} files were changed, the limit is {limits.patch_files}")
        wanted = {change.entry.blob for change in found if change.entry is not None}
        settings = [change.path for change in found if rules.depends_on_settings(changes.unquote(change.path))]
        wanted |= {base.listing[path].blob for path in settings if path in base.listing}
        contents = await self._contents(work, instance, wanted) if wanted else {}
        left_out |= {change.path: "its content is missing" for change in found if _is_missing(change, contents)}
        kept = tuple(change for change in found if change.path not in left_out)
        return Solution(
            kept, contents, left_out, changes.ignore_reasons(kept, base.listing, contents, rules, base.modules)
        )

    async def apply(self, work: WorkFolder, instance: SweInstance, base: Base, solution: Solution) -> AppliedSolution:
        """Apply a solution without ignored changes, and the hidden tests, to a prepared repository.

        If the row has ``before_tests``, :meth:`apply_tests` applies the tests after ``before_tests``.

        Raises:
            InfrastructureError: the sandbox failed.
        """
        kept, tests = "kept" if instance.before_tests else "", ProtectedFiles(instance).tests
        stream = changes.import_stream(solution, base.commit)
        await work.write({"stream": base64.b64encode(stream).decode(), "tests": _names(tests)})
        arguments = (instance.repo_folder, base.commit, kept, *instance.hidden)
        done = await work.run(APPLY_SOLUTION, *arguments, timeout_s=self._limits.repository_timeout_s)
        if done.return_code:
            raise InfrastructureError(f"the solution could not be applied to the base: {error_tail(done)}")
        patch = await work.read("patch", limit=4 * self._limits.patch_total_kib << 10)
        listing = changes.read_listing(await work.text("applied"))
        hidden = await work.text("kept.tar") if kept else ""
        if kept:
            await work.run('rm "$1/kept.tar"', timeout_s=self._limits.repository_timeout_s)
        files = {path: entry.blob for path, entry in listing.items()}
        return AppliedSolution(
            work, changes.read_patch(patch.content or b"", solution, base.listing), files, tests, hidden
        )

    async def apply_tests(self, applied: AppliedSolution, instance: SweInstance) -> None:
        """Apply the hidden tests and restore the activation script, after ``before_tests`` has run the policy's code;
        errors as of :meth:`.WorkFolder.step`."""
        await applied.work.write(
            {"kept.tar": applied.kept, "tests": _names(applied.tests), "setup": ACTIVATE_ENVIRONMENT}
        )
        arguments = (instance.repo_folder, *instance.hidden)
        await applied.work.step(APPLY_TESTS, *arguments, timeout_s=self._limits.repository_timeout_s)

    async def _listing(self, work: WorkFolder, commit: str) -> Listing:
        known = self._listings.get(commit)
        if known is None:
            entries = await asyncio.to_thread(changes.read_listing, await work.text("listing"))
            known = self._listings.setdefault(commit, Listing(entries))
        return known

    async def _contents(self, work: WorkFolder, instance: SweInstance, wanted: set[str]) -> dict[str, bytes]:
        await work.write({"wanted": "".join(f"{blob}\n" for blob in sorted(wanted))})
        limit = self._limits.patch_total_kib << 10
        timeout_s = self._limits.repository_timeout_s
        await work.step(READ_CONTENTS, instance.repo_folder, str(limit + 1), timeout_s=timeout_s)
        taken = await work.read("contents", limit=limit)
        if taken.content is None:
            raise PatchExtractionError(f"the changed files exceed {self._limits.patch_total_kib} KiB: {taken.problem}")
        return await asyncio.to_thread(changes.read_contents, taken.content)


async def _variables(work: WorkFolder) -> Mapping[str, str]:
    """Return the variables that activation sets, even if activation fails, and git's ``safe.directory``."""
    before, after = [await _environment(work, name) for name in ("before", "setup-done")]
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    # git refuses repositories of other users, and the image's repository may have another owner.
    trust = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    return trust | changed


async def _environment(work: WorkFolder, name: str) -> dict[str, str]:
    taken = await work.read(name, limit=1 << 20)
    lines = (taken.content or b"").decode("utf-8", "replace").splitlines()
    pairs = (line.partition("=") for line in lines)
    return {key: value for key, _, value in pairs if _VARIABLE.fullmatch(key) and key not in _KEPT_VARIABLES}


def _names(paths: Iterable[str]) -> str:
    return "".join(f"./{path}\0" for path in sorted(paths))


def _is_missing(change: changes.Change, contents: Mapping[str, bytes]) -> bool:
    return change.entry is not None and change.entry.blob not in contents
