# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The agent's phase of a Harbor task: set-up of the sandbox, the task's steps, and a snapshot after each step.

The sandbox never contains the tests, and the reference solution only if :meth:`AgentPhase.solve` runs it.
"""

from __future__ import annotations

import asyncio
import logging
import posixpath
import shlex
import time
from pathlib import Path

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.tasks.harbor.located_task import LocatedTask, Step
from nemo_gym_prorl.tasks.harbor.task_config import Healthcheck
from nemo_gym_prorl.tasks.harbor.task_folder import is_uploaded, tree
from nemo_gym_prorl.tasks.sandbox import ExecResult, Sandbox


logger = logging.getLogger(__name__)

SETUP_TIMEOUT_S = 600.0  # for a step's setup.sh; Harbor's format has no limit for it

FILES_TIMEOUT_S = 60.0  # for mkdir, chmod and the check of a user

SOLUTION_TIMEOUT_S = 3600.0  # for the solution of a task without a time limit for the agent

_MAKE_FOLDERS = """\
mkdir -p -- {folder} /logs/agent /logs/verifier /logs/artifacts && \
chmod 0777 /logs/agent /logs/verifier /logs/artifacts"""

_EXCERPT_CHARS = 600


class SetupFailed(InfrastructureError):
    """The sandbox could not be set up for a step."""


class AgentPhase:
    """Steps of a task in the agent's sandbox of one session.

    Attributes:
        folder: working folder of the agent.
        user: user of the agent; ``None`` for the sandbox's own.
        number: index of the current step, from 0.
        snapshots: names of the snapshots after the steps that have ended, in order.
    """

    def __init__(self, task: LocatedTask, sandbox: Sandbox, snapshot_name: str) -> None:
        self.task = task
        self.folder = "/"
        self.user: str | int | None = None
        self.number = 0
        self.snapshots: list[str] = []
        self._sandbox = sandbox
        self._snapshot_name = snapshot_name

    @property
    def step(self) -> Step:
        return self.task.steps[self.number]

    @property
    def is_last(self) -> bool:
        return self.number == len(self.task.steps) - 1

    async def set_up(self) -> None:
        """Prepare the sandbox for the first step. Raises :class:`SetupFailed` if an upload, a health check or
        ``setup.sh`` fails, or if the image lacks the agent's user."""
        self.folder = self.task.working_folder(self._sandbox.published[0])
        await self._require(_MAKE_FOLDERS.format(folder=shlex.quote(self.folder)), FILES_TIMEOUT_S)
        await upload_environment(self._sandbox, self.task, self.folder)
        await self._begin()

    async def begin_next(self) -> str:
        """Prepare the next step, like :meth:`set_up`, and return its instruction."""
        self.number += 1
        await self._begin()
        return self.task.row.harbor.instructions[self.number]

    async def finish(self) -> None:
        """Run the collect hooks of the current step, and take a snapshot; errors as of :meth:`.Sandbox.checkpoint`. A
        failing hook is only logged."""
        for hook in self.task.hooks(self.step):
            try:
                user = await usable_user(self._sandbox, hook.user)
            except SetupFailed as error:
                logger.warning("%s: a collect hook did not run: %s", self.task.row.instance_id, error.reason)
                continue
            done = await bash(self._sandbox, hook.command, cwd=self.folder, timeout_s=hook.timeout_sec, user=user)
            if done.return_code:
                logger.warning("%s: a collect hook failed: %s", self.task.row.instance_id, excerpt(done))
        taken = await self._sandbox.checkpoint(self._snapshot_name)
        self.snapshots.append(taken.name)

    async def solve(self) -> str:
        """Run the reference solution of the current step; return its exit status and the end of its output."""
        source = self.task.solution(self.step)
        assert source is not None
        await upload_tree(self._sandbox, source, "/solution", self.task.folder)
        await self._require("chmod +x /solution/solve.sh", FILES_TIMEOUT_S)
        timeout_s = self.task.agent_timeout_s(self.step) or SOLUTION_TIMEOUT_S
        log = "/logs/agent/oracle.txt"
        command = f"(/solution/solve.sh) > {log} 2>&1; s=$?; tail -c {_EXCERPT_CHARS} {log}; exit $s"
        env = self.task.solution_env()
        done = await bash(self._sandbox, command, cwd=self.folder, timeout_s=timeout_s, user=self.user, env=env)
        return excerpt(done)

    async def _begin(self) -> None:
        step, image_user = self.step, self.task.row.harbor.image_user or self._sandbox.published[1]
        wanted = self.task.agent_user(step)
        self.user = await usable_user(self._sandbox, image_user if wanted is None else wanted)
        if self.number == 0:
            await check_health(self._sandbox, self.task.config.environment.healthcheck, self.folder)
        if step is None:
            return
        workdir = self.task.step_folder(step) / "workdir"
        if workdir.is_dir():
            await upload_tree(self._sandbox, workdir, self.folder, self.task.folder)
            if (workdir / "setup.sh").is_file():
                await self._require(f"bash {shlex.quote(self.folder.rstrip('/') + '/setup.sh')}", SETUP_TIMEOUT_S)
        await check_health(self._sandbox, step.healthcheck, self.folder)

    async def _require(self, command: str, timeout_s: float) -> None:
        # ``cd`` may fail, since one of these commands creates the folder.
        done = await bash(
            self._sandbox, f"cd {shlex.quote(self.folder)} 2> /dev/null; {command}", cwd="/", timeout_s=timeout_s
        )
        if done.return_code or done.error_type:
            raise SetupFailed(f"the sandbox could not be set up: {command[:200]}: {excerpt(done)}")


async def bash(
    sandbox: Sandbox,
    command: str,
    *,
    cwd: str,
    timeout_s: float,
    user: str | int | None = None,
    env: dict[str, str] | None = None,
) -> ExecResult:
    """Run a command with bash, which also runs scripts whose first line names no interpreter."""
    return await sandbox.exec(f"exec bash -c {shlex.quote(command)}", cwd=cwd, timeout_s=timeout_s, user=user, env=env)


async def upload_tree(sandbox: Sandbox, source: Path, target: str, root: Path) -> None:
    """Copy the files below ``source``, a folder of the task in ``root``, into the sandbox's folder ``target``."""
    try:
        for name, path in await asyncio.to_thread(lambda: list(tree(source, root))):
            await sandbox.upload(path, posixpath.join(target, name))
    except CallerError as error:
        # The task's folder passed its checks, so a path in the sandbox is at fault.
        raise SetupFailed(f"the files of {source.name} could not be uploaded: {error.reason}") from error


async def upload_environment(sandbox: Sandbox, task: LocatedTask, folder: str) -> None:
    """Copy the files of the task's ``environment`` into the working folder, if no image is built from these files."""
    source = task.folder / "environment"
    if is_uploaded(task.folder) and source.is_dir():
        await upload_tree(sandbox, source, folder, task.folder)


async def usable_user(sandbox: Sandbox, user: str | int | None) -> str | int | None:
    """Return ``user``; ``None`` for root, and if the sandbox only has one user. Raises SetupFailed for a user that the
    image lacks."""
    if user in (None, "", "root", "0", 0):
        return None
    done = await sandbox.exec("true", cwd="/", timeout_s=FILES_TIMEOUT_S, user=user)
    if done.error_type is None:
        return user
    if "has one user" in (done.stderr or ""):
        logger.warning("commands of user %r run as the sandbox's own user: set users: true", user)
        return None
    raise SetupFailed(f"commands cannot run as the task's user: {excerpt(done)}")


async def check_health(sandbox: Sandbox, check: Healthcheck | None, folder: str) -> None:
    """Run a health check, if any, until success. Raises SetupFailed after ``retries`` failures; those within
    ``start_period_sec`` do not count."""
    if check is None:
        return
    begin, failures = time.monotonic(), 0
    while True:
        is_starting = time.monotonic() < begin + check.start_period_sec
        done = await bash(sandbox, check.command, cwd=folder, timeout_s=check.timeout_sec)
        if not done.return_code:
            return
        if not is_starting:
            failures += 1
            if failures >= check.retries:
                raise SetupFailed(f"the health check failed {failures} times: {check.command[:200]}: {excerpt(done)}")
        await asyncio.sleep(check.start_interval_sec if is_starting else check.interval_sec)


def excerpt(done: ExecResult) -> str:
    """Return a command's exit status and the end of its output, for messages."""
    text = "\n".join(filter(None, [done.stdout, done.stderr])).strip()
    status = "timed out" if done.error_type == "timeout" else f"exit code {done.return_code}"
    return f"{status}: {text[-_EXCERPT_CHARS:]}" if text else status
