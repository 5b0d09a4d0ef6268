# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A repository in a sandbox: made ready, and what became of it taken out.

- **Made ready** the same way for the policy and for grading: the image's working tree becomes the one commit of a new
  repository. So there is nothing in it of the fix that the image's history may hold, in commits, tags, reflogs
  or unreachable objects, and both start from the same base to the byte.
- **Extracted** are contents, not a text: a repository of ours beside the policy's lists what is there now, with a
  configuration, index, hooks and attributes of its own, and the service compares. Commits, ``assume-unchanged``,
  filters and a removed ``.git`` make no difference. The policy may have replaced git itself; all that it could win by
  that is another solution of its own, since everything is applied over a base that it never touched.

All is done by programs of ``sh`` and files in a folder of ours beside the repository (:class:`WorkFolder`). The
arguments of each program that begins with :data:`SCRIPT_HEADER` are that folder, the repository, and then its own.
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
from nemo_gym_prorl.tasks.sandbox import ExecResult, HasHealthCheck, Sandbox
from nemo_gym_prorl.tasks.swe import changes
from nemo_gym_prorl.tasks.swe.changes import (
    JUNK,
    Entry,
    ImportableModules,
    Patch,
    Protection,
    Solution,
    importable_modules,
)
from nemo_gym_prorl.tasks.swe.instance import SweInstance
from nemo_gym_prorl.tasks.workbench.workspace import ExtractedFile, ToolLimits, Workspace


SCRIPT_HEADER = """\
set -eu
work=$1 repo=$2; shift 2
export HOME="$work" LC_ALL=C GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL="$work/.gitconfig" GIT_ATTR_NOSYSTEM=1
export GIT_TERMINAL_PROMPT=0 GIT_OPTIONAL_LOCKS=0
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_EXTERNAL_DIFF GIT_CONFIG_COUNT || :
mkdir -p "$work"
printf '[safe]\\ndirectory = *\\n[core]\\nhooksPath = /dev/null\\nautocrlf = false\\n' > "$work/.gitconfig"
refuse() { printf '%s\\n' "$2"; exit "$1"; }
"""
"""Beginning of each script: git is not told anything by anybody else."""

RAW_ATTRIBUTES = "* -text -filter -ident -working-tree-encoding !diff\n"
"""Attributes by which git takes files as they are; they come before those of the repository."""

PREPARE = (
    SCRIPT_HEADER
    + """\
base=$1; shift
command -v git > /dev/null || refuse 41 "the image has no git"
[ -d "$repo" ] || refuse 41 "the image has no folder $repo"
cd "$repo"
[ "$(git rev-parse --show-toplevel 2> /dev/null)" = "$(pwd -P)" ] || refuse 41 "$repo is no git repository"
git cat-file -e 'HEAD^{tree}' 2> /dev/null || refuse 41 "the repository in $repo has no commit"
if [ -n "$base" ]; then
    git cat-file -e "$base^{commit}" 2> /dev/null || refuse 42 "the repository in $repo has no commit $base"
    git merge-base --is-ancestor "$base" HEAD || refuse 42 "$base is not at or before HEAD of $repo"
fi
count=0
for path; do
    count=$((count + 1))
    [ -e "$path" ] || [ -L "$path" ] || continue
    mkdir -p "$work/hidden/$count"
    mv "$path" "$work/hidden/$count/it"
done
tag=$(git describe --tags --abbrev=0 HEAD 2> /dev/null || :)
tree=$(git rev-parse 'HEAD^{tree}')
git init -q --template= "$work/new"
{ echo "$tree"; git ls-tree -r -t "$tree" | awk '$2 != "commit" { print $3 }'; } |
    git pack-objects -q "$work/new/.git/objects/pack/pack" > /dev/null
find . -name .git -prune -exec rm -rf {} +
mv "$work/new/.git" .git
mkdir -p .git/info
cat "$work/attributes" > .git/info/attributes
cat "$work/junk" > .git/info/exclude
git config gc.auto 0
git config user.name agent
git config user.email agent@localhost
git read-tree "$tree"
git add -A .
tree=$(git write-tree)
commit=$(echo base | GIT_AUTHOR_NAME=base GIT_AUTHOR_EMAIL=base GIT_AUTHOR_DATE='@0 +0000' GIT_COMMITTER_NAME=base \
GIT_COMMITTER_EMAIL=base GIT_COMMITTER_DATE='@0 +0000' git commit-tree "$tree")
git update-ref HEAD "$commit"
[ -z "$tag" ] || git update-ref "refs/tags/$tag" "$commit"
rm -rf .git/logs
[ "$(stat -c %u .)" = "$(id -u)" ] || chown -R --reference=. .git || :
[ ! -s "$work/test.patch" ] || git apply --cached --check --whitespace=nowarn "$work/test.patch" 2>&1 || exit 43
git ls-files -s > "$work/listing"
echo "commit $commit"
"""
)

LIST_FILES = (
    SCRIPT_HEADER
    + """\
cd "$repo"
export GIT_DIR="$work/git" GIT_WORK_TREE="$repo"
git init -q --template=
mkdir -p "$GIT_DIR/info" "$GIT_DIR/objects/info"
cat "$work/attributes" > "$GIT_DIR/info/attributes"
cat "$work/junk" > "$GIT_DIR/info/exclude"
[ -L .git ] || [ ! -d .git/objects ] || echo "$repo/.git/objects" > "$GIT_DIR/objects/info/alternates"
find . -mindepth 2 -name .git -prune -exec rm -rf {} +
git update-index --index-info < "$work/listing"
: > "$work/large"
find . -path ./.git -prune -o -type f -size +"$1"k -exec sh -c 'for path; do
    git ls-files --error-unmatch -- ":(literal)$path" > /dev/null 2>&1 && continue
    printf "%s\\n" "$path" >> "$0"; rm -f "$path"
done' "$work/large" {} +
git -c core.compression=0 -c core.looseCompression=0 -c core.symlinks=true -c core.fileMode=true add -A .
git ls-files -s > "$work/after"
"""
)

READ_CONTENTS = (
    SCRIPT_HEADER
    + """\
cd "$repo"
export GIT_DIR="$work/git"
git cat-file --batch < "$work/wanted" | head -c "$1" > "$work/contents"
"""
)

_SHOW_HIDDEN = """\
count=0
for path; do
    count=$((count + 1))
    [ -e "$work/hidden/$count" ] || continue
    rm -rf "$path"
    mv "$work/hidden/$count/it" "$path"
done
"""

APPLY_SOLUTION = (
    SCRIPT_HEADER
    + """\
cd "$repo"
commit=$1 kept=$2
shift 2
base64 -d "$work/stream" | git fast-import --quiet
git diff --binary --no-ext-diff --no-textconv --no-renames --no-color "$commit" refs/prorl/solution > "$work/patch"
git read-tree --reset -u refs/prorl/applied
mkdir "$work/objects"
[ ! -s "$work/test.patch" ] || GIT_OBJECT_DIRECTORY="$work/objects" GIT_ALTERNATE_OBJECT_DIRECTORIES=.git/objects \
    git apply --index --whitespace=nowarn "$work/test.patch"
git ls-files -s > "$work/applied"
if [ "$kept" ]; then
    mkdir -p "$work/kept/tests" "$work/hidden"
    xargs -0 -r sh -c 'for path; do
        [ ! -e "$path" ] && [ ! -L "$path" ] || cp -a --parents "$path" "$0"
    done' "$work/kept/tests" < "$work/tests"
    mv "$work/hidden" "$work/kept/hidden"
    tar -C "$work/kept" -cf - . | base64 > "$work/kept.tar"
    rm -rf "$work/kept"
    git read-tree --reset -u refs/prorl/applied
fi
git read-tree "$commit"
git update-ref -d refs/prorl/solution
git update-ref -d refs/prorl/applied
rm -rf "$work/objects" "$work/test.patch"  # what tests ask is nowhere but in them
"""
    + _SHOW_HIDDEN
)
"""Its own are the base's commit, whether tests and hidden files are put into ``kept.tar``, and the hidden paths."""

APPLY_TESTS = (
    SCRIPT_HEADER
    + """\
cd "$repo"
mkdir "$work/kept"
base64 -d "$work/kept.tar" | tar -C "$work/kept" -xf -
mv "$work/kept/hidden" "$work/hidden"
xargs -0 -r rm -rf < "$work/tests"
cp -a "$work/kept/tests/." .
rm -rf "$work/kept" "$work/kept.tar"
"""
    + _SHOW_HIDDEN
)

READ_ENVIRONMENT = """\
cd "$2" && env > "$1/before"
{ . "$1/setup"; } > /dev/null 2>&1
env > "$1/setup-done"
{ command -v python || command -v python3; } > /dev/null || exit 0
"$(command -v python || command -v python3)" - "$2" > "$1/modules" 2> /dev/null <<'END'
import os, sys
real = os.path.realpath
repo, prefix = real(sys.argv[1]), real(sys.prefix)
for entry in filter(None, sys.path):
    inside = os.path.relpath(real(entry), repo)
    if not inside.startswith("..") and not real(entry).startswith(prefix + "/"):
        print("folder " + ("" if inside == "." else inside))
    elif os.path.isdir(entry):
        for name in os.listdir(entry):
            print("module " + name.partition(".")[0])
END
"""


MAX_LISTING_BYTES = 64 << 20
"""Most bytes of a repository's listing: some 500,000 files."""

BASH = "bash --noprofile --norc"


class PatchExtractionError(Exception):
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

    async def read(self, name: str, *, limit: int) -> ExtractedFile:
        """A file in it, or of any absolute path."""
        return await self._files.extract_file(name, limit=limit)

    async def text(self, name: str) -> str:
        """A file in it that has to be there.

        Raises:
            PatchExtractionError: it is not.
        """
        taken = await self.read(name, limit=MAX_LISTING_BYTES)
        if taken.content is None:
            raise PatchExtractionError(taken.problem or name)
        return taken.content.decode("utf-8", "backslashreplace")

    async def run(self, script: str, *arguments: str, timeout_s: float, shell: str = "sh") -> ExecResult:
        """A script, whose first argument is the folder."""
        words = " ".join(map(shlex.quote, (script, "_", self.path, *arguments)))
        return await self.sandbox.exec(f"exec {shell} -c {words}", cwd="/", timeout_s=timeout_s)

    async def step(self, script: str, *arguments: str, timeout_s: float) -> None:
        """A script where the policy has been: that it fails is the policy's doing if the sandbox lives.

        Raises:
            PatchExtractionError: it failed.
            AgentError: the policy used up its sandbox.
            InfrastructureError: the sandbox is gone.
        """
        done = await self.run(script, *arguments, timeout_s=timeout_s)
        if done.return_code == 0 and done.error_type is None:
            return
        await self.require_sandbox()
        raise PatchExtractionError(f"the repository can't be read: {end_of(done)}")

    async def require_sandbox(self) -> None:
        """See that the sandbox lives, if it can tell.

        Raises:
            AgentError: what ran in it has ended it.
            InfrastructureError: it ended otherwise.
        """
        if isinstance(self.sandbox, HasHealthCheck):
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
    modules: ImportableModules


@dataclass(frozen=True, slots=True)
class AppliedSolution:
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
                "attributes": RAW_ATTRIBUTES,
                "junk": "\n".join(JUNK) + "\n",
                "test.patch": instance.test_patch,
                "setup": _SETUP,
            }
        )
        arguments = (instance.repo_folder, instance.base_commit, *instance.hidden)
        done = await work.run(PREPARE, *arguments, timeout_s=timeout_s)
        said = (done.stdout or "").strip()[-500:]
        if field := _ROW_FIELDS.get(done.return_code):
            raise CallerError(said, field=field)
        match = re.fullmatch(r"commit ([0-9a-f]{40})", said.rpartition("\n")[2])
        if done.return_code or match is None:
            raise InfrastructureError(f"the repository was not made ready: {said} {end_of(done)}")
        listing = await self._listing(work, match[1])
        await work.run(READ_ENVIRONMENT, instance.repo_folder, timeout_s=timeout_s, shell=BASH)
        modules = await work.read("modules", limit=1 << 20)
        told = (modules.content or b"").decode("utf-8", "replace")
        base = Base(match[1], listing, await _variables(work), importable_modules(map(changes.shown, listing), told))
        if hide:
            await work.run('rm -rf "$1"', timeout_s=timeout_s)
        return base, work

    async def extract(self, sandbox: Sandbox, instance: SweInstance, base: Base, protection: Protection) -> Solution:
        """What the policy changed.

        Raises:
            PatchExtractionError: it can't be had, by the policy's doing.
            AgentError: the policy used up its sandbox.
            InfrastructureError: the sandbox is gone.
        """
        work, limits = WorkFolder(sandbox), self._limits
        listing = "".join(f"{entry.mode} {entry.blob} 0\t{path}\n" for path, entry in base.listing.items())
        await work.write({"attributes": RAW_ATTRIBUTES, "junk": "\n".join(JUNK) + "\n", "listing": listing})
        await work.step(LIST_FILES, instance.repo_folder, str(limits.file_kib), timeout_s=limits.timeout_s)
        left_out = dict.fromkeys(
            (line.removeprefix("./") for line in (await work.text("large")).splitlines()),
            f"larger than {limits.file_kib} KiB",
        )
        try:
            after = await asyncio.to_thread(changes.read_listing, await work.text("after"))
        except changes.BadListing as error:
            raise PatchExtractionError(str(error)) from error
        found = changes.changed(base.listing, after)
        if len(found) > limits.files:
            raise PatchExtractionError(f"{len(found)} files were changed, more than {limits.files}")
        wanted = {change.entry.blob for change in found if change.entry is not None}
        settings = [change.path for change in found if protection.by_content(changes.shown(change.path))]
        wanted |= {base.listing[path].blob for path in settings if path in base.listing}
        contents = await self._contents(work, instance, wanted) if wanted else {}
        left_out |= {change.path: "its content can't be had" for change in found if _is_missing(change, contents)}
        kept = tuple(change for change in found if change.path not in left_out)
        return Solution(
            kept, contents, left_out, changes.ignored(kept, base.listing, contents, protection, base.modules)
        )

    async def apply(self, work: WorkFolder, instance: SweInstance, base: Base, solution: Solution) -> AppliedSolution:
        """Lay what counts of a solution over the base in a sandbox that was made ready, and the hidden tests, unless
        something comes before them: that finds the tests that the base has, and they come by :meth:`apply_tests`.

        Raises:
            InfrastructureError: the sandbox did not do it.
        """
        kept, tests = "kept" if instance.before_tests else "", Protection(instance).tests
        stream = changes.import_stream(solution, base.commit)
        await work.write({"stream": base64.b64encode(stream).decode(), "tests": _names(tests)})
        arguments = (instance.repo_folder, base.commit, kept, *instance.hidden)
        done = await work.run(APPLY_SOLUTION, *arguments, timeout_s=self._limits.timeout_s)
        if done.return_code:
            raise InfrastructureError(f"the solution could not be applied over the base: {end_of(done)}")
        patch = await work.read("patch", limit=4 * self._limits.total_kib << 10)
        listing = changes.read_listing(await work.text("applied"))
        hidden = await work.text("kept.tar") if kept else ""
        if kept:
            await work.run('rm "$1/kept.tar"', timeout_s=self._limits.timeout_s)
        files = {path: entry.blob for path, entry in listing.items()}
        return AppliedSolution(
            work, changes.read_patch(patch.content or b"", solution, base.listing), files, tests, hidden
        )

    async def apply_tests(self, applied: AppliedSolution, instance: SweInstance) -> None:
        """Lay hidden tests, and what activates the environment, after code of the policy has run.

        Raises:
            PatchExtractionError: it can't be done, by the policy's doing.
            AgentError: the policy used up its sandbox.
            InfrastructureError: the sandbox is gone.
        """
        await applied.work.write({"kept.tar": applied.kept, "tests": _names(applied.tests), "setup": _SETUP})
        arguments = (instance.repo_folder, *instance.hidden)
        await applied.work.step(APPLY_TESTS, *arguments, timeout_s=self._limits.timeout_s)

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
        await work.step(READ_CONTENTS, instance.repo_folder, str(limit + 1), timeout_s=timeout_s)
        taken = await work.read("contents", limit=limit)
        if taken.content is None:
            raise PatchExtractionError(
                f"the changed files are more than {self._limits.total_kib} KiB: {taken.problem}"
            )
        return await asyncio.to_thread(changes.read_contents, taken.content)


async def _variables(work: WorkFolder) -> Mapping[str, str]:
    """What activation set. An image in which it fails is left as it is, as its maker's own shell would be."""
    before, after = [await _environment(work, name) for name in ("before", "setup-done")]
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    # The repository may belong to another of the image's users, from whom git would take nothing.
    trust = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    return trust | changed


async def _environment(work: WorkFolder, name: str) -> dict[str, str]:
    taken = await work.read(name, limit=1 << 20)
    lines = (taken.content or b"").decode("utf-8", "replace").splitlines()
    pairs = (line.partition("=") for line in lines)
    return {key: value for key, _, value in pairs if _VARIABLE.fullmatch(key) and key not in _KEPT_VARIABLES}


def _names(paths: Iterable[str]) -> str:
    """For ``xargs -0``, in the repository."""
    return "".join(f"./{path}\0" for path in sorted(paths))


def _is_missing(change: changes.Change, contents: Mapping[str, bytes]) -> bool:
    return change.entry is not None and change.entry.blob not in contents
