# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Run the tests of a Harbor task once, in a fresh sandbox without processes of the agent.

The sandbox has these mounts. Files of the agent cannot redirect the mounts, see
:mod:`nemo_gym_prorl.sandbox.isolation.layer_archive`.

- ``/tests``: a copy of the tests, which the tests may write to.
- ``/logs/verifier``: an empty folder of the host, from which the reward is read after the sandbox has ended.
- with verifier tools: the tools folder, read-only and first on ``PATH``, and ``env``, ``uv`` and ``uvx`` in
  ``~/.local/bin``, where test scripts look for an installed ``uv``.

The mode (:class:`GradingMode`) decides which of the agent's files the sandbox contains.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import posixpath
import secrets
import shlex
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_validator

from nemo_gym_prorl.failures import AgentError, CallerError, FailureKind, InfrastructureError, RolloutError
from nemo_gym_prorl.tasks.harbor.agent_phase import (
    SetupFailed,
    bash,
    check_health,
    excerpt,
    upload_environment,
    usable_user,
)
from nemo_gym_prorl.tasks.harbor.artifacts import ARCHIVE, Archives, collect, paths_of, sanitize
from nemo_gym_prorl.tasks.harbor.located_task import LocatedTask, Step
from nemo_gym_prorl.tasks.harbor.rewards import MAX_REPORT_BYTES, REWARD_FILES, STDOUT, Outcome, read_outcome
from nemo_gym_prorl.tasks.harbor.task_folder import tree
from nemo_gym_prorl.tasks.harbor.verifier_tools import BIN, PYTHON, WHEELS, verifier_environment
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import OpenSandbox, SandboxNeeds


logger = logging.getLogger(__name__)

TESTS = "/tests"
LOGS = "/logs/verifier"
TOOLS = "/opt/prorl-verifier"
ARTIFACTS = "/opt/prorl-artifacts"

TIMED_OUT = "the tests did not end within"

TRIES = 2
"""Attempts to start a sandbox from the agent's files, before the files are held responsible."""

SCRIPT_TIMEOUT_S = 600.0  # the longest script unpacks GiBs of artifacts on a busy machine
CHECK_LOGS_S = 2.0  # seconds between measurements of writable mounts, which no disk limit of the sandbox covers
MAX_LOG_FILES = 10_000  # files that the tests may add to each writable mount; bounds the time of counting
MAX_LOG_DEPTH = 64  # nesting levels; os.fwalk holds one open descriptor per level

_UNPACK = f"""\
mkdir -p -- {{folder}} /logs/agent /logs/artifacts && chmod 0777 /logs/agent /logs/artifacts && \
tar -xf {ARTIFACTS}/{ARCHIVE} -C /"""

_HAS_LINKS_INTO_TESTS = f"""\
{{{{ find {TESTS} -exec stat -c %d:%i {{{{}}}} + | sort -u
find {{paths}} -xdev -type l -exec stat -L -c %d:%i {{{{}}}} + 2> /dev/null | sort -u; }}}} |
sort | uniq -d | grep -q ."""
"""Succeeds if a symlink of the agent leads to a file of the tests (same device and inode)."""

_TOOL_PROGRAMS = ("uv", "uvx")


class GradingMode(StrEnum):
    """Files of the agent that the tests see."""

    SHARED = "shared"
    """All files, from a snapshot."""
    STRICT = "strict"
    """The working folder and the declared artifacts, over the task's image."""
    SEPARATE = "separate"
    """The declared artifacts, in the verifier's image."""


class VerifierSettings(BaseModel):
    """Settings of verification; a mixin for the server's configuration.

    Attributes:
        make_scratch: creates a folder with ``path`` on the host for bind mounts, which a blocking ``close`` removes.
        strict: whether the tests of a shared verifier only see the working folder and declared artifacts; with
            ``auto``, in a second grading of positive rewards only.
        verifier_tools: tools folder for tests without a network, see :mod:`.verifier_tools`; ``None`` for no tools.
        reward_key: key of the reward that the policy is trained on.
        output_field_kib: size of the end of the tests' output in the rollout's row.
        verifier_logs_mib: maximum size that the tests may add to each writable mount.
        artifacts_folder: folder of the host that receives the artifacts; ``None`` discards them.
    """

    make_scratch: ClassVar[Any]

    strict: Literal["auto"] | bool = "auto"
    verifier_tools: Path | None = None
    reward_key: str = Field(default="reward", min_length=1)
    output_field_kib: int = Field(default=32, ge=0)
    verifier_logs_mib: int = Field(default=256, ge=1)
    artifacts_folder: Path | None = None

    @model_validator(mode="after")
    def _folders_are_complete(self) -> Self:
        for setting in ("verifier_tools", "artifacts_folder"):
            folder = getattr(self, setting)
            if folder is not None and not (folder.is_absolute() and folder.is_dir()):
                raise ValueError(f"{setting}: must be the absolute path of a folder that exists, not {folder}")
        if self.verifier_tools is not None:
            for name in (BIN, PYTHON, WHEELS):
                if not (self.verifier_tools / name).is_dir():
                    raise ValueError(
                        f"verifier_tools: there is no folder {self.verifier_tools / name}: prorl image tools"
                    )
        return self


async def verify(
    task: LocatedTask,
    step: Step,
    state: str,
    mode: GradingMode,
    folder: str,
    open_sandbox: OpenSandbox,
    settings: VerifierSettings,
) -> Outcome:
    """Run the tests on the snapshot ``state`` after a step. The mode is ``SEPARATE`` if and only if the step has a
    separate verifier; ``folder`` is the agent's working folder.

    The outcome has no rewards if the tests did not run to their end for a reason other than the machine.
    """
    mounts = _Mounts(task, step, settings)
    async with mounts.created_files() as binds:
        needs = replace(task.verifier_needs(step), binds=binds)
        problem = ""
        try:
            if mode is GradingMode.SEPARATE:
                async with collected(task, step, state, folder, open_sandbox, settings) as archives:
                    await asyncio.to_thread(sanitize, archives, mounts.artifacts / ARCHIVE)
                opened = open_sandbox(needs)
            else:
                if mode is GradingMode.STRICT:
                    needs = replace(needs, snapshot_paths=[folder, *paths_of(task.artifacts(step), folder)])
                opened = _restored(needs, state, open_sandbox)
            async with opened as sandbox:
                problem = await _run_tests(task, step, mode, sandbox, folder, mounts)
        except AgentError as error:
            problem = f"the sandbox of the tests ended: {error.reason}"
        except SetupFailed as error:
            problem = error.reason
        outcome = await asyncio.to_thread(
            read_outcome,
            mounts.logs,
            mounts.script,
            settings.output_field_kib << 10,
            settings.reward_key,
            mounts.named or REWARD_FILES,
        )
        return Outcome(None, problem, outcome.output) if problem else outcome


@contextlib.asynccontextmanager
async def collected(
    task: LocatedTask, step: Step, state: str, folder: str, open_sandbox: OpenSandbox, settings: VerifierSettings
) -> AsyncIterator[Archives]:
    """Collect the artifacts of a step from the step's snapshot, and delete the archives after the block. Raises
    AgentError or SetupFailed if the agent's files exceed a limit, or if no sandbox starts from these files."""
    artifacts = task.artifacts(step)
    made = await asyncio.to_thread(settings.make_scratch)
    try:
        needs = replace(task.needs(), network="none", snapshot_paths=paths_of(artifacts, folder))
        async with _restored(needs, state, open_sandbox) as sandbox:
            archives = await collect(sandbox, artifacts, folder, made.path)
        yield archives
    finally:
        await asyncio.to_thread(made.close)


@contextlib.asynccontextmanager
async def _restored(needs: SandboxNeeds, state: str, open_sandbox: OpenSandbox) -> AsyncIterator[Sandbox]:
    """Start a sandbox from the snapshot ``state``. Raises SetupFailed if the agent's files may prevent all starts."""
    async with contextlib.AsyncExitStack() as stack:
        for tries_left in reversed(range(TRIES)):
            try:
                sandbox = await stack.enter_async_context(open_sandbox(needs, state))
                break
            except RolloutError as error:
                if not _may_be_files_fault(error):
                    raise
                if not tries_left:
                    raise SetupFailed(f"no sandbox starts from the agent's files: {error.reason}") from error
        yield sandbox


def _may_be_files_fault(error: RolloutError) -> bool:
    """Return whether the agent's files may be the cause of an error at the start of a sandbox."""
    if isinstance(error, CallerError):
        return error.field == "checkpoint.snapshot"
    return isinstance(error, InfrastructureError) and error.kind is FailureKind.PROVIDER_UNAVAILABLE


async def _run_tests(
    task: LocatedTask, step: Step, mode: GradingMode, sandbox: Sandbox, folder: str, mounts: _Mounts
) -> str:
    """Run the test script; return why the script did not run to its end, else an empty text."""
    if mode is GradingMode.SEPARATE:
        own = task.separate_environment(step)
        folder = posixpath.normpath(own.workdir or sandbox.published[0] or "/")
        done = await sandbox.exec(_UNPACK.format(folder=shlex.quote(folder)), cwd="/", timeout_s=SCRIPT_TIMEOUT_S)
        if done.return_code:
            return f"the artifacts could not be laid out: {excerpt(done)}"
        if not task.separate_image(step).has_tests:
            await upload_environment(sandbox, task, folder)
        await check_health(sandbox, own.healthcheck, folder)
        # In the verifier's own image, the test script may lack the executable bit.
        await sandbox.exec(f"chmod +x {TESTS}/test.sh", cwd="/", timeout_s=SCRIPT_TIMEOUT_S)
    else:
        paths = shlex.join([folder, *paths_of(task.artifacts(step), folder)])
        found = await sandbox.exec(_HAS_LINKS_INTO_TESTS.format(paths=paths), cwd="/", timeout_s=SCRIPT_TIMEOUT_S)
        if found.return_code == 0:
            return "a link of the agent leads to the tests"
    wanted = task.verifier_user(step)
    image_user = sandbox.published[1] or ("" if mode is GradingMode.SEPARATE else task.row.harbor.image_user)
    user = await usable_user(sandbox, image_user if wanted is None else wanted)
    limit_s = task.verifier_timeout_s(step)
    running = asyncio.ensure_future(
        bash(
            sandbox,
            f"{mounts.exports}({TESTS}/test.sh) > {LOGS}/{STDOUT} 2>&1",
            cwd=folder,
            timeout_s=limit_s,
            user=user,
            env={**mounts.env, **task.verifier_env(step)},
        )
    )
    watching = asyncio.ensure_future(_wait_until_full(mounts.limits))
    try:
        await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            return (
                f"the tests wrote more than {mounts.settings.verifier_logs_mib} MiB, {MAX_LOG_FILES} files or "
                f"{MAX_LOG_DEPTH} levels to {LOGS} or {TESTS}, or closed a folder there"
            )
        done = running.result()
    finally:
        for work in (running, watching):
            work.cancel()
        await asyncio.wait((running, watching))
    if user is not None:
        # This server could not delete files that other users of the sandbox created.
        await sandbox.exec(f"chmod -R a+rwX {LOGS} {TESTS}", cwd="/", timeout_s=SCRIPT_TIMEOUT_S)
    if done.error_type == "timeout":
        return f"{TIMED_OUT} {limit_s:g} s"
    return "" if done.error_type is None else f"the tests could not run: {excerpt(done)}"


async def _wait_until_full(limits: Mapping[Path, tuple[float, float]]) -> None:
    """Return when a folder exceeds its limit of bytes or files."""
    while not await asyncio.to_thread(_is_full, limits):  # noqa: ASYNC110  # no event reports the size
        await asyncio.sleep(CHECK_LOGS_S)


def _is_full(limits: Mapping[Path, tuple[float, float]]) -> bool:
    return any(
        limit < now for folder, most in limits.items() for limit, now in zip(most, _usage(folder, *most), strict=True)
    )


def _usage(folder: Path, most_bytes: float = math.inf, most_files: float = math.inf) -> tuple[float, float]:
    """Return bytes and number of files in a folder; infinite with an unreadable subfolder or too many levels.

    Counting stops above one of the limits. Deleted files that are still open count for the sandbox's disk limit only.
    """
    size = files = 0
    # os.fwalk opens folders by descriptor, since the path of a deep folder may be too long to open.
    try:
        for path, folders, names, here in os.fwalk(folder, onerror=_refuse_closed):
            files += len(folders) + len(names)
            for name in (*folders, *names):
                with contextlib.suppress(FileNotFoundError):
                    size += os.stat(name, dir_fd=here, follow_symlinks=False).st_blocks * 512
            if path.count("/") > str(folder).count("/") + MAX_LOG_DEPTH:
                return math.inf, math.inf
            if size > most_bytes or files > most_files:
                break
    except PermissionError:
        return math.inf, math.inf
    return size, files


def _refuse_closed(error: OSError) -> None:
    if isinstance(error, PermissionError):
        raise error


class _Mounts:
    """Files of the host that are mounted for one verification."""

    def __init__(self, task: LocatedTask, step: Step, settings: VerifierSettings) -> None:
        self._task = task
        self._step = step
        self.settings = settings
        self.logs = Path()  # mounted as ``/logs/verifier``
        self.artifacts = Path()  # has the archive for a separate verifier
        self.limits: dict[Path, tuple[float, float]] = {}  # bytes and files, by folder that the tests can write to
        self.script = ""  # text of the test script, unless the image contains the tests
        self.named: set[str] = set()  # reward files that the tests name
        self.env: dict[str, str] = {}  # with ``exports``, leads the tests to the tools
        self.exports = ""

    @contextlib.asynccontextmanager
    async def created_files(self) -> AsyncIterator[list[str]]:
        """Create the files and yield the bind mounts; delete the files afterwards."""
        made = await asyncio.to_thread(self.settings.make_scratch)
        try:
            yield await asyncio.to_thread(self._make, made.path)
        finally:
            await asyncio.to_thread(made.close)

    def _make(self, folder: Path) -> list[str]:
        own = [*self._add_logs(folder), *self._add_tests(folder)]
        return [*own, *self._add_artifacts(folder), *self._add_tools(folder)]

    def _add_logs(self, folder: Path) -> list[str]:
        self.logs = folder / "logs"
        self.logs.mkdir()
        self.logs.chmod(0o777)
        self._limit(self.logs)
        return [f"{self.logs}:{LOGS}"]

    def _add_tests(self, folder: Path) -> list[str]:
        if self._task.config.is_separate(self._step) and self._task.separate_image(self._step).has_tests:
            return []
        tests = folder / "tests"
        tests.mkdir()
        for source in self._task.tests(self._step):
            for name, path in tree(source, self._task.folder):
                (tests / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, tests / name)
                with path.open("rb") as file:
                    text = file.read(MAX_REPORT_BYTES)
                self.named.update(one for one in REWARD_FILES if one.encode() in text)
                (tests / name).chmod(0o755 if os.access(path, os.X_OK) or name == "test.sh" else 0o644)
        with contextlib.suppress(OSError):
            self.script = (tests / "test.sh").read_text(errors="replace")
        for path in [tests, *tests.rglob("*")]:
            path.chmod(0o777 if path.is_dir() else path.stat().st_mode | 0o666)
        self._limit(tests)
        return [f"{tests}:{TESTS}"]

    def _limit(self, folder: Path) -> None:
        size, files = _usage(folder)
        self.limits[folder] = (size + (self.settings.verifier_logs_mib << 20), files + MAX_LOG_FILES)

    def _add_artifacts(self, folder: Path) -> list[str]:
        if not self._task.config.is_separate(self._step):
            return []
        self.artifacts = folder / "artifacts"
        self.artifacts.mkdir()
        return [f"{self.artifacts}:{ARTIFACTS}:ro"]

    def _add_tools(self, folder: Path) -> list[str]:
        tools = self.settings.verifier_tools
        if tools is None:
            return []
        env = folder / "env"
        self.exports = f"export PATH={TOOLS}/{BIN}:$PATH; "
        self.env = verifier_environment(TOOLS, f"/tmp/prorl-{secrets.token_hex(16)}")
        env.write_text(self.exports)
        user = self._task.verifier_user(self._step)
        home = f"/home/{user}" if isinstance(user, str) and user not in ("", "root", "0") else "/root"
        installed = f"{home}/.local/bin"
        programs = [name for name in _TOOL_PROGRAMS if (tools / BIN / name).is_file()]
        return [
            f"{tools}:{TOOLS}:ro",
            f"{env}:{installed}/env:ro",
            *(f"{tools}/{BIN}/{name}:{installed}/{name}:ro" for name in programs),
        ]


def step_name(step: Step) -> str:
    """Return the name of a step; empty for a task without steps."""
    return step.name if step else ""


def modes_of(task: LocatedTask, strict: bool) -> Sequence[GradingMode]:
    shared = GradingMode.STRICT if strict else GradingMode.SHARED
    return [GradingMode.SEPARATE if task.config.is_separate(step) else shared for step in task.steps]
