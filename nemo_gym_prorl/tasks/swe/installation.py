# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What came before the tests did to what runs them.

An installation runs code of the solution with all of the sandbox's rights: it may rewrite the test runner, Python or
the shell, add what Python reads when it starts, plugins, settings and tests. So files that take part in a run and were
written meanwhile are told with what they are now, and the grader compares: with the image, and where they differ with
what the same commands leave that have the row's own fix, or nothing, in the solution's place. What is the package's
own is left alone.

Files are found by the time at which the kernel saw them change, which no program sets. The programs that look for
them might be replaced too: they, and the libraries that they load, are read from outside, where a sandbox gives that.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.tasks.sandbox import HasFiles
from nemo_gym_prorl.tasks.swe.changes import shown
from nemo_gym_prorl.tasks.swe.instance import SweInstance
from nemo_gym_prorl.tasks.swe.paths import (
    METADATA,
    RUNNER_FILES,
    RUNNERS,
    SETTINGS_FILES,
    Protection,
    pytest_settings,
)
from nemo_gym_prorl.tasks.swe.repository import Base
from nemo_gym_prorl.tasks.swe.work_folder import WorkFolder


LOOK_TIMEOUT_S = 180.0
LONGEST_LIST = 64 << 20
LARGEST_PROGRAM = 64 << 20
LARGEST_SETTINGS = 1 << 20

_ENTRY_POINTS = "entry_points.txt"
_RUNNER_SETTINGS = RUNNER_FILES | SETTINGS_FILES
_NAMES = ("*.py", "*.pyc", "*.so", "*.so.*", "*.pth", "*.egg", "python*.zip", "pyvenv.cfg", _ENTRY_POINTS)
_NAMED = " -o ".join(
    [
        *(f"-name {shlex.quote(name)}" for name in (*_NAMES, *sorted(_RUNNER_SETTINGS))),
        *(f"-path {shlex.quote(path)}" for path in ("*/bin/*", "/etc/ld.so.*")),
    ]
)
"""What Python imports, or reads when it starts, programs and libraries, and settings of runners."""

_NOBODY_LOOKS = re.compile(r"/(var/)?tmp/|/run/|.*/\.cache/")
_PACKAGES = frozenset({"site-packages", "dist-packages"})

_BEGIN = """\
find / -maxdepth 0 -newerct @0 > /dev/null 2>&1 || exit 41
: > "$1/begun"
find "$1/begun" -printf '%C@\\n'
for tool in sh bash env timeout find xargs sha1sum git base64 tar cp mv rm mkdir; do command -v "$tool"; done |
    tee "$1/tools"
xargs ldd < "$1/tools" 2> /dev/null | grep -o '/[^ :]*'
printf '%s\\n' /etc/ld.so.preload /etc/ld.so.cache
"""
"""When it began, and what the programs are that look for changes and lay the tests."""

_TELL = """\
xargs -0 -r sh -c 'find "$@" -maxdepth 0 -type l -printf "link %l  %p\\n"
find "$@" -maxdepth 0 -type f -exec sha1sum {} +' _ < "$1/names" > "$1/told" 2> /dev/null || :
"""

_FIND = (
    f"""\
roots=/
[ "$(stat -c %d /)" = "$(stat -c %d "$2")" ] || roots="/ $2"
changed() {{
    find $roots -xdev \\( -path /proc -o -path /sys -o -path /dev \\) -prune -o -newerct "@$begun" "$@" || :
}}
begun=$3
changed -type f -path '*/__pycache__/*' -exec rm -f {{}} +  # compiled anew of what is there
changed \\( -type l -o -type f \\( {_NAMED} \\) \\) -print0 > "$1/names"
"""
    + _TELL
)


@dataclass(frozen=True, slots=True)
class Watch:
    """What is known before an installation.

    Attributes:
        begun: the sandbox's time, in seconds.
        programs: path to hash, of those that look for changes; empty if they can't be read from outside.
    """

    begun: str
    programs: Mapping[str, str]


class Installation:
    """An installation in a sandbox with a solution.

    Args:
        work: the folder beside the repository.
        instance: the task.
        base: what the solution was laid over.
    """

    def __init__(self, work: WorkFolder, instance: SweInstance, base: Base) -> None:
        self._work = work
        self._instance = instance
        self._base = base
        self._protection = Protection(instance)
        self._own = own_modules(base.listing)

    async def begin(self) -> Watch:
        """Before it.

        Raises:
            CallerError: the image's programs can't tell what is changed.
            InfrastructureError: the sandbox did not do it.
        """
        done = await self._work.run(_BEGIN, timeout_s=LOOK_TIMEOUT_S)
        if done.return_code == 41:
            raise CallerError("it has no find of GNU, which a row with swe.before_tests takes", field="image")
        begun, *programs = (done.stdout or "").split() or [""]
        if not re.fullmatch(r"\d+\.\d+", begun):
            raise InfrastructureError(f"the sandbox does not say when it began: {done.stderr}"[:600])
        return Watch(begun, await self._programs(programs if isinstance(self._work.sandbox, HasFiles) else ()))

    async def changes(self, watch: Watch) -> dict[str, str]:
        """After it: path to what it is now, of what takes part in a run and was written meanwhile.

        Raises:
            AgentError: the solution used up the sandbox.
            InfrastructureError: the sandbox is gone.
        """
        programs = await self._programs(watch.programs)
        found = {path: now for path, now in programs.items() if now != watch.programs[path]}
        await self._work.run(_FIND, self._instance.repo_folder, watch.begun, timeout_s=LOOK_TIMEOUT_S)
        return found | await self._told(self._takes_part)

    async def now(self, paths: Iterable[str]) -> dict[str, str]:
        """What files are, as :meth:`changes` tells it; those that are not there are left out."""
        await self._work.write({"names": "".join(f"{path}\0" for path in paths)})
        await self._work.run(_TELL, timeout_s=LOOK_TIMEOUT_S)
        return await self._told(lambda _: True)

    async def _told(self, asked: Callable[[str], bool]) -> dict[str, str]:
        taken = await self._work.take("told", limit=LONGEST_LIST)
        found = {}
        for line in (taken.content or b"").decode("utf-8", "backslashreplace").split("\n"):
            now, _, path = line.removeprefix("\\").partition("  ")
            if path.startswith("/") and asked(path):
                found[path] = now
        for path in found:
            if self._is_settings(path):
                content = (await self._work.take(path, limit=LARGEST_SETTINGS)).content
                found[path] = found[path] if content is None else _said(path, content)
        return {path: now for path, now in found.items() if now}

    def _takes_part(self, path: str) -> bool:
        inside = self._inside(path)
        parts = PurePosixPath(path).parts
        if found := [number for number, part in enumerate(parts) if part in _PACKAGES]:
            # An egg has a package's own modules one folder deeper.
            own = [part for part in parts[found[-1] + 1 :] if not part.endswith(".egg") or part == parts[-1]]
            return not (own and own[0].partition(".")[0] in self._own) or path.endswith(".pth")
        if inside is not None and not inside.startswith(".venv/"):
            new = inside not in self._base.listing
            why = self._protection.why(inside, self._base.places if new else None)
            return inside not in self._protection.tests and (self._is_settings(path) or why not in (None, METADATA))
        if parts[-1] in _RUNNER_SETTINGS:
            return self._instance.repo_folder.startswith(path.rpartition("/")[0] + "/")
        return not _NOBODY_LOOKS.match(path)

    def _is_settings(self, path: str) -> bool:
        inside = self._inside(path)
        return path.endswith("/" + _ENTRY_POINTS) or (inside is not None and self._protection.by_content(inside))

    def _inside(self, path: str) -> str | None:
        root = self._instance.repo_folder.rstrip("/") + "/"
        return path.removeprefix(root) if path.startswith(root) else None

    async def _programs(self, paths: Iterable[str]) -> dict[str, str]:
        found = {}
        for path in paths:
            taken = await self._work.take(path, limit=LARGEST_PROGRAM)
            found[path] = "" if taken.content is None else hashlib.sha256(taken.content).hexdigest()
        return found


def own_modules(paths: Iterable[str]) -> frozenset[str]:
    """Names under which a repository's packages and modules are installed, wherever in it they lie; none of a runner's
    or of Python's but those of its own packages."""
    files = [PurePosixPath(path) for path in map(shown, paths) if path.endswith(".py")]
    packages = {file.parent for file in files if file.name == "__init__.py"}
    roots = {package for package in packages if package.parent not in packages}
    named = {root.name for root in roots} | {file.stem for file in files if file.parent not in packages}
    its = {root.name for root in roots if str(root.parent) in (".", "src", "lib")}
    return frozenset(named - RUNNERS - sys.stdlib_module_names | its)


def _said(path: str, content: bytes) -> str:
    """What settings say to a runner; empty if nothing."""
    try:
        if path.endswith(_ENTRY_POINTS):
            sections = re.split(r"^(?=\s*\[)", content.decode(), flags=re.MULTILINE)
            return "\n".join(" ".join(part.split()) for part in sections if "pytest11" in part.partition("]")[0])
        return repr(pytest_settings(path, content) or "")
    except (ValueError, RecursionError):
        return hashlib.sha256(content).hexdigest()
