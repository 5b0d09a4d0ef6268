# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A repository in a sandbox: made ready, and what became of it taken out.

- **Made ready** the same way for the policy and for grading: the image's working tree becomes the one commit of a new
  repository. So there is nothing in it of the fix that the image's history may hold, in commits, tags, reflogs
  or unreachable objects, and both start from the same base to the byte.
- **Taken out** are contents, not a text: a repository of ours beside the policy's lists what is there now, with a
  configuration, index, hooks and attributes of its own, and the service compares. Commits, ``assume-unchanged``,
  filters and a removed ``.git`` make no difference. The policy may have replaced git itself; all that it could win by
  that is another solution of its own, since everything is laid over a base that it never touched.

All is done by scripts and files in a folder of ours beside the repository (:class:`WorkFolder`).
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
from nemo_gym_prorl.tasks.sandbox import ExecResult, KnowsWhoseDoing, Sandbox
from nemo_gym_prorl.tasks.swe import changes
from nemo_gym_prorl.tasks.swe import repository_scripts as scripts
from nemo_gym_prorl.tasks.swe.changes import Entry, Patch, Solution
from nemo_gym_prorl.tasks.swe.instance import SweInstance
from nemo_gym_prorl.tasks.swe.paths import JUNK, Places, Protection, places
from nemo_gym_prorl.tasks.workbench.workspace import Taken, ToolLimits, Workspace


LONGEST_LISTING = 64 << 20
"""Most bytes of a repository's listing: some 500,000 files."""

BASH = "bash --noprofile --norc"


class NotTaken(Exception):
    """What the policy left can't be taken out, by its own doing; says why."""


class WorkFolder:
    """The folder.

    Args:
        sandbox: where it is.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.path = f"/tmp/prorl-{secrets.token_hex(8)}"
        self._files = Workspace(sandbox, self.path, ToolLimits())
        self.write = self._files.write

    async def take(self, name: str, *, limit: int) -> Taken:
        """A file in it, or of any absolute path."""
        return await self._files.take(name, limit=limit)

    async def text(self, name: str) -> str:
        """A file in it that has to be there.

        Raises:
            NotTaken: it is not.
        """
        taken = await self.take(name, limit=LONGEST_LISTING)
        if taken.content is None:
            raise NotTaken(taken.problem or name)
        return taken.content.decode("utf-8", "backslashreplace")

    async def run(self, script: str, *arguments: str, timeout_s: float, shell: str = "sh") -> ExecResult:
        """A script, whose first argument is the folder."""
        words = " ".join(map(shlex.quote, (script, "_", self.path, *arguments)))
        return await self.sandbox.exec(f"exec {shell} -c {words}", cwd="/", timeout_s=timeout_s)

    async def step(self, script: str, *arguments: str, timeout_s: float) -> None:
        """A script where the policy has been: that it fails is the policy's doing if the sandbox lives.

        Raises:
            NotTaken: it failed.
            AgentError: the policy used up its sandbox.
            InfrastructureError: the sandbox is gone.
        """
        done = await self.run(script, *arguments, timeout_s=timeout_s)
        if done.return_code == 0 and done.error_type is None:
            return
        await self.require_sandbox()
        raise NotTaken(f"the repository can't be read: {end_of(done)}")

    async def require_sandbox(self) -> None:
        """See that the sandbox lives, if it can tell.

        Raises:
            AgentError: what ran in it has ended it.
            InfrastructureError: it ended otherwise.
        """
        if isinstance(self.sandbox, KnowsWhoseDoing):
            await self.sandbox.check()


def end_of(done: ExecResult) -> str:
    """What there is to say of a script that failed."""
    return (done.stderr or "").strip()[-500:] or f"exit code {done.return_code}"


_ROW_FIELDS = {41: "image", 42: "swe.base_commit", 43: "swe.test_patch"}
"""Exit codes by which a script blames the row."""

_SETUP = """\
prorl_setup() {
if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate && conda activate testbed
elif [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi
}
prorl_setup
unset -f prorl_setup
"""
"""Activates what the datasets' images have, and does nothing elsewhere; in a function, since conda's script passes on
the arguments of whoever reads it in."""

_KEPT_VARIABLES = frozenset({"PWD", "OLDPWD", "SHLVL", "_", "HOME", "TERM"})
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Listing(dict[str, Entry]):
    """A base's files; sessions of one image share it."""


@dataclass(frozen=True, slots=True)
class Base:
    """What a policy starts from.

    Attributes:
        commit: of the new repository.
        listing: its files.
        variables: that are set in an activated shell.
        places: what its Python can import.
    """

    commit: str
    listing: Listing
    variables: Mapping[str, str]
    places: Places


@dataclass(frozen=True, slots=True)
class Laid:
    """A solution in a sandbox, with the tests.

    Attributes:
        work: the folder beside it.
        patch: the whole solution.
        files: path to hash, every file as it should be.
        tests: files that hold the row's tests.
        kept: what is kept of hidden files outside of the sandbox, in base64.
    """

    work: WorkFolder
    patch: Patch
    files: Mapping[str, str]
    tests: frozenset[str]
    kept: str = ""


@dataclass(frozen=True, slots=True)
class PatchLimits:
    """Bounds of what is taken out.

    Attributes:
        timeout_s: seconds for each step of making a repository ready, and of taking out.
        file_kib: largest new file; a larger one is left out.
        total_kib: all contents together.
        files: how many files may differ.
    """

    timeout_s: float = 180.0
    file_kib: int = 4096
    total_kib: int = 32_768
    files: int = 5000


class Repositories:
    """See the module.

    Args:
        limits: bounds.
    """

    def __init__(self, limits: PatchLimits) -> None:
        self._limits = limits
        self._listings: WeakValueDictionary[str, Listing] = WeakValueDictionary()

    async def prepare(self, sandbox: Sandbox, instance: SweInstance, *, hide: bool) -> tuple[Base, WorkFolder]:
        """Make the repository ready.

        Args:
            sandbox: a fresh one of the task's image.
            instance: the task.
            hide: for the policy, so hidden files and all traces are removed; else they are kept for :meth:`lay`.

        Returns:
            The base, and the folder in the sandbox that has the rest.

        Raises:
            CallerError: the image lacks the repository or the commit, or the tests' patch does not apply to it; names
                the row's field.
            InfrastructureError: the sandbox did not do it.
        """
        work, timeout_s = WorkFolder(sandbox), self._limits.timeout_s
        await work.write(
            {
                "attributes": scripts.RAW,
                "junk": "\n".join(JUNK) + "\n",
                "test.patch": instance.test_patch,
                "setup": _SETUP,
            }
        )
        arguments = (instance.repo_folder, instance.base_commit, *instance.hidden)
        done = await work.run(scripts.PREPARE, *arguments, timeout_s=timeout_s)
        said = (done.stdout or "").strip()[-500:]
        if field := _ROW_FIELDS.get(done.return_code):
            raise CallerError(said, field=field)
        match = re.fullmatch(r"commit ([0-9a-f]{40})", said.rpartition("\n")[2])
        if done.return_code or match is None:
            raise InfrastructureError(f"the repository was not made ready: {said} {end_of(done)}")
        listing = await self._listing(work, match[1])
        await work.run(scripts.VARIABLES, instance.repo_folder, timeout_s=timeout_s, shell=BASH)
        modules = await work.take("modules", limit=1 << 20)
        told = (modules.content or b"").decode("utf-8", "replace")
        base = Base(match[1], listing, await _variables(work), places(map(changes.shown, listing), told))
        if hide:
            await work.run('rm -rf "$1"', timeout_s=timeout_s)
        return base, work

    async def take(self, sandbox: Sandbox, instance: SweInstance, base: Base, protection: Protection) -> Solution:
        """What the policy changed.

        Raises:
            NotTaken: it can't be had, by the policy's doing.
            AgentError: the policy used up its sandbox.
            InfrastructureError: the sandbox is gone.
        """
        work, limits = WorkFolder(sandbox), self._limits
        listing = "".join(f"{entry.mode} {entry.blob} 0\t{path}\n" for path, entry in base.listing.items())
        await work.write({"attributes": scripts.RAW, "junk": "\n".join(JUNK) + "\n", "listing": listing})
        await work.step(scripts.LIST, instance.repo_folder, str(limits.file_kib), timeout_s=limits.timeout_s)
        left_out = dict.fromkeys(
            (line.removeprefix("./") for line in (await work.text("large")).splitlines()),
            f"larger than {limits.file_kib} KiB",
        )
        try:
            after = await asyncio.to_thread(changes.read_listing, await work.text("after"))
        except changes.BadListing as error:
            raise NotTaken(str(error)) from error
        found = changes.changed(base.listing, after)
        if len(found) > limits.files:
            raise NotTaken(f"{len(found)} files were changed, more than {limits.files}")
        wanted = {change.entry.blob for change in found if change.entry is not None}
        settings = [change.path for change in found if protection.by_content(changes.shown(change.path))]
        wanted |= {base.listing[path].blob for path in settings if path in base.listing}
        contents = await self._contents(work, instance, wanted) if wanted else {}
        left_out |= {change.path: "its content can't be had" for change in found if _is_missing(change, contents)}
        kept = tuple(change for change in found if change.path not in left_out)
        return Solution(
            kept, contents, left_out, changes.ignored(kept, base.listing, contents, protection, base.places)
        )

    async def lay(self, work: WorkFolder, instance: SweInstance, base: Base, solution: Solution) -> Laid:
        """Lay what counts of a solution over the base in a sandbox that was made ready, and the hidden tests, unless
        something comes before them: that finds the tests that the base has, and they come by :meth:`lay_tests`.

        Raises:
            InfrastructureError: the sandbox did not do it.
        """
        kept, tests = "kept" if instance.before_tests else "", Protection(instance).tests
        stream = changes.import_stream(solution, base.commit)
        await work.write({"stream": base64.b64encode(stream).decode(), "tests": _names(tests)})
        arguments = (instance.repo_folder, base.commit, kept, *instance.hidden)
        done = await work.run(scripts.LAY, *arguments, timeout_s=self._limits.timeout_s)
        if done.return_code:
            raise InfrastructureError(f"the solution could not be laid over the base: {end_of(done)}")
        patch = await work.take("patch", limit=4 * self._limits.total_kib << 10)
        listing = changes.read_listing(await work.text("laid"))
        hidden = await work.text("kept.tar") if kept else ""
        if kept:
            await work.run('rm "$1/kept.tar"', timeout_s=self._limits.timeout_s)
        files = {path: entry.blob for path, entry in listing.items()}
        return Laid(work, changes.read_patch(patch.content or b"", solution, base.listing), files, tests, hidden)

    async def lay_tests(self, laid: Laid, instance: SweInstance) -> None:
        """Lay hidden tests, and what activates the environment, after code of the policy has run.

        Raises:
            NotTaken: it can't be done, by the policy's doing.
            AgentError: the policy used up its sandbox.
            InfrastructureError: the sandbox is gone.
        """
        await laid.work.write({"kept.tar": laid.kept, "tests": _names(laid.tests), "setup": _SETUP})
        arguments = (instance.repo_folder, *instance.hidden)
        await laid.work.step(scripts.RESTORE, *arguments, timeout_s=self._limits.timeout_s)

    async def _listing(self, work: WorkFolder, commit: str) -> Listing:
        known = self._listings.get(commit)
        if known is None:
            entries = await asyncio.to_thread(changes.read_listing, await work.text("listing"))
            known = self._listings.setdefault(commit, Listing(entries))
        return known

    async def _contents(self, work: WorkFolder, instance: SweInstance, wanted: set[str]) -> dict[str, bytes]:
        await work.write({"wanted": "".join(f"{blob}\n" for blob in sorted(wanted))})
        limit = self._limits.total_kib << 10
        timeout_s = self._limits.timeout_s
        await work.step(scripts.CONTENTS, instance.repo_folder, str(limit + 1), timeout_s=timeout_s)
        taken = await work.take("contents", limit=limit)
        if taken.content is None:
            raise NotTaken(f"the changed files are more than {self._limits.total_kib} KiB: {taken.problem}")
        return await asyncio.to_thread(changes.read_contents, taken.content)


async def _variables(work: WorkFolder) -> Mapping[str, str]:
    """What activation set. An image in which it fails is left as it is, as its maker's own shell would be."""
    before, after = [await _environment(work, name) for name in ("before", "setup-done")]
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    # The repository may belong to another of the image's users, from whom git would take nothing.
    trust = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    return trust | changed


async def _environment(work: WorkFolder, name: str) -> dict[str, str]:
    taken = await work.take(name, limit=1 << 20)
    lines = (taken.content or b"").decode("utf-8", "replace").splitlines()
    pairs = (line.partition("=") for line in lines)
    return {key: value for key, _, value in pairs if _VARIABLE.fullmatch(key) and key not in _KEPT_VARIABLES}


def _names(paths: Iterable[str]) -> str:
    """For ``xargs -0``, in the repository."""
    return "".join(f"./{path}\0" for path in sorted(paths))


def _is_missing(change: changes.Change, contents: Mapping[str, bytes]) -> bool:
    return change.entry is not None and change.entry.blob not in contents
