# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym deployment as an async context manager: starts the servers with ``gym env start``, waits for them, ends them.

``gym env start`` may orphan servers when it is interrupted, and reports failures only in its output.

Invariants: entering returns when every server answers. Leaving ends every process of the deployment, or raises an
error. A server that dies raises an error with the log's tail; a supervised deployment restarts the server instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import aiohttp
import orjson
from omegaconf import OmegaConf
from yarl import URL

from nemo_gym_prorl.deployment.gym_cli import (
    RAY_FOLDER_PREFIX,
    RAY_FOLDERS,
    RAY_START_S,
    DeploymentError,
    GymCli,
    GymLog,
    lock_deployment,
    machine_load,
    ray_auth_mode,
    remove_orphans,
    start_error,
)
from nemo_gym_prorl.deployment.restarter import restarter_program
from nemo_gym_prorl.deployment.venvs import python_path_error
from nemo_gym_prorl.processes import INTERRUPT_GRACE_S, KILL_S, SETTLE_S, is_port_taken_by_others, reaper_command


_REAPER_GRACE_S = INTERRUPT_GRACE_S + SETTLE_S + KILL_S + 5.0
_WATCH_S = 0.5
START_TIMEOUT_S = 900.0  # until every server answers: minutes on a busy machine, or if sandbox images are built

WAITING_S = 15.0  # seconds between two lines about a start's progress


@dataclass(frozen=True, slots=True)
class Instance:
    """Running server of a deployment: its instance name, ``type/implementation``, URL and process id."""

    name: str
    server: str
    url: str
    pid: int


@dataclass(frozen=True, slots=True)
class ServerDeath:
    """End of a server in a supervised deployment, which restarts the server.

    Attributes:
        name: instance name of the server.
        how: exit status or signal.
        lived_s: seconds for which the server had run.
        pause_s: seconds until the restart.
    """

    name: str
    how: str
    lived_s: float
    pause_s: float


@dataclass(frozen=True, slots=True)
class NodeDeployment:
    """Deployment that each node runs.

    Attributes:
        deployment: arguments of :class:`GymDeployment`.
        agent: instance name of the deployment's ``prorl_agent``.
        token: the agent's key; ``None`` only if every node listens on loopback.
        log_dir: parent of one log folder per node; ``None`` for temporary folders.
    """

    deployment: Mapping[str, Any]
    agent: str
    token: str | None
    log_dir: Path | None


class GymDeployment:
    """Gym deployment; an async context manager.

    Args:
        config_paths: Gym configuration files: absolute paths, or names that Gym resolves.
        model_type: Gym's model server (``--model-type``); ``None`` if the configuration files have one.
        policy_base_url: URL of the inference endpoint, ending in ``/v1``, or a list of URLs. The list may be empty if
            the model server gets engines later.
        policy_model_name: name of the model at the endpoint.
        policy_api_key: key of the endpoint, stored in a file that only the user can read while the deployment lives.
        private: more configuration for the key's file, since other users can read command lines.
        overrides: more Hydra overrides, which take precedence.
        work_dir: folder for logs and Gym's files. Default: a temporary folder, removed after a run without an error.
        python, cwd, folder, env, head_port: see :class:`GymCli`.
        supervised: restart servers that die, instead of ending the deployment; see :meth:`watch`.

    Raises:
        DeploymentError: on entering, a server does not come up; on leaving, a process cannot be ended.
    """

    def __init__(
        self,
        *,
        config_paths: Sequence[str | Path] = (),
        model_type: str | None = "vllm_model",
        policy_base_url: str | Sequence[str] | None = None,
        policy_model_name: str = "policy",
        policy_api_key: str = "none",
        private: Mapping[str, Any] | None = None,
        overrides: Sequence[str] = (),
        work_dir: Path | None = None,
        python: str = sys.executable,
        cwd: Path | None = None,
        folder: Path | None = None,
        env: Mapping[str, str] | None = None,
        head_port: int | None = None,
        supervised: bool = False,
    ) -> None:
        self._keeps_work_dir = work_dir is not None
        unique = uuid.uuid4().hex[:12]
        self.work_dir = work_dir or Path(tempfile.gettempdir()) / f"prorl-gym-{unique}"
        self._ray_dir = RAY_FOLDERS / f"{RAY_FOLDER_PREFIX}{unique}"
        self._lock: int | None = None
        self._supervised = supervised
        self._joins_ray = any("ray_head_node_address=" in override for override in overrides)
        ray = {"RAY_TMPDIR": str(self._ray_dir)} | ({"RAY_AUTH_MODE": ray_auth_mode()} if self._joins_ray else {})
        self._python = python
        self.cli = GymCli(
            self.work_dir,
            python=python,
            cwd=cwd,
            folder=folder,
            env={**ray, **(env or {})},
            head_port=head_port,
            server_python=self._restarter if supervised else None,
        )
        self.log = GymLog(self.work_dir / "gym.log")
        self.instances: dict[str, Instance] = {}
        self.waiting: list[str] = []
        """Names of launched instances that do not answer yet."""
        self.start_s = 0.0
        """Duration of the start in seconds."""
        self._config_paths = [str(path) for path in config_paths]
        self._model_type = model_type
        self._private = dict(private or {})
        if policy_base_url is not None:
            self._private |= {
                "policy_base_url": policy_base_url if isinstance(policy_base_url, str) else [*policy_base_url],
                "policy_api_key": policy_api_key,
                "policy_model_name": policy_model_name,
            }
        self._overrides = list(overrides)
        self._process: asyncio.subprocess.Process | None = None

    def url(self, name: str) -> str:
        """Return the URL of a server by its instance name.

        Raises:
            DeploymentError: no such instance; the error lists all instances.
        """
        if name not in self.instances:
            raise DeploymentError(f"no instance {name!r} in this deployment; instances: {', '.join(self.instances)}")
        return self.instances[name].url

    async def watch(self, on_death: Callable[[ServerDeath], None] = lambda death: None) -> NoReturn:
        """Watch the deployment until it ends or the caller is cancelled.

        Args:
            on_death: called for every death of a server in a supervised deployment.

        Raises:
            DeploymentError: Gym ended, or, without supervision, a server ended; with the log's tail.
        """
        reported = 0
        while True:
            if self._supervised:
                deaths = await asyncio.to_thread(self._deaths)
                for death in deaths[reported:]:
                    on_death(death)
                reported = len(deaths)
            else:
                gone = [item.name for item in self.instances.values() if not _is_running(item.pid)]
                if gone:
                    raise DeploymentError(f"{', '.join(gone)} of the deployment died; {self.log.tail()}")
            self._raise_if_ended("while it was in use")
            await asyncio.sleep(_WATCH_S)

    async def report_start(self, say: Callable[[str], None], marker: str) -> NoReturn:
        """Report the progress of a start until cancelled.

        Progress lines of servers are reported as they are. Every 15 s, another line names the servers that do not
        answer yet, the load of the machine, and the last line of the log.

        Args:
            say: called with each line.
            marker: prefix of servers' progress lines in the log.
        """
        reported, start = 0, time.monotonic()
        while True:
            for _ in range(round(WAITING_S)):
                await asyncio.sleep(1)
                progress = [line for line in self.log.lines() if marker in line]
                for line in progress[reported:]:
                    say(line.partition(marker)[2])
                reported = len(progress)
            last = next((f"; its log: {line:.120}" for line in reversed(self.log.lines()) if line.strip()), "")
            say(f"{time.monotonic() - start:.0f} s, waiting for {self._awaited}; {machine_load()}{last}")

    async def guard[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work``, and cancel it if the deployment dies.

        Raises:
            DeploymentError: the deployment died, see :meth:`watch`.
        """
        working, watching = asyncio.ensure_future(work), asyncio.ensure_future(self.watch())
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                working.cancel()
                await asyncio.wait((working,))
                watching.result()
            return working.result()
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def __aenter__(self) -> Self:
        start = time.monotonic()
        try:
            await asyncio.wait_for(self._start(), START_TIMEOUT_S)
        except TimeoutError as error:
            tail = self.log.tail()
            await self._end()
            raise DeploymentError(
                f"the deployment is not up after {START_TIMEOUT_S:g} s, waiting for {self._awaited}; {tail}"
            ) from error
        except BaseException as error:
            await self._end_and_clean_up(error)
            raise
        self.start_s = time.monotonic() - start
        self._up.touch()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._end_and_clean_up(error)

    async def _end_and_clean_up(self, error: BaseException | None) -> None:
        try:
            await self._end()
        except asyncio.CancelledError:  # a second signal, after the servers have ended
            await self._clean_up(error)
            raise
        await self._clean_up(error)

    async def _clean_up(self, error: BaseException | None) -> None:
        # The user needs the log after an error; a cancellation is not one.
        succeeded = error is None or isinstance(error, asyncio.CancelledError)
        if succeeded and not self._keeps_work_dir:
            await asyncio.to_thread(shutil.rmtree, self.work_dir, ignore_errors=True)

    async def _start(self) -> None:
        await self._launch()
        await self._wait_ready()

    @property
    def _awaited(self) -> str:
        ray = "" if self._joins_ray else f"to start Ray (at most {RAY_START_S} s) and "
        return ", ".join(self.waiting) or f"Gym {ray}to launch its servers"

    async def _launch(self) -> None:
        if problem := python_path_error(self._python):
            raise DeploymentError(f"{problem}; install into a path without spaces")
        await remove_orphans()
        for folder in (self.work_dir, self._ray_dir):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise DeploymentError(f"cannot create {folder}: {error.strerror}; choose another folder") from error
        self._lock = lock_deployment(self._ray_dir, self.cli.mark, self._temporary)
        for file in (self._up, self._events):
            file.unlink(missing_ok=True)
        selection = [word for path in self._config_paths for word in ("--config", path)]
        if self._model_type:
            selection += ["--model-type", self._model_type]
        if self._private:
            selection += ["--config", str(self._write_private())]
        words, env, cwd = await self.cli.command("env", "start", *selection)
        mark = self.cli.mark
        with self.log.path.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *reaper_command(mark, [*words, *self._overrides], sys.executable, self._ray_dir, self._temporary),
                cwd=cwd,
                env=env | {mark.name: mark.value},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[self._lock],
            )

    @property
    def _temporary(self) -> Path | None:
        return None if self._keeps_work_dir else self.work_dir.absolute()

    @property
    def _up(self) -> Path:
        return self.work_dir.absolute() / "up"

    @property
    def _events(self) -> Path:
        return self.work_dir.absolute() / "deaths.jsonl"

    def _restarter(self, python: Path) -> str:
        return restarter_program(python, self._up, self._events)

    def _deaths(self) -> list[ServerDeath]:
        lines = self._events.read_bytes().splitlines(keepends=True) if self._events.exists() else []
        deaths = []
        for line in lines:
            with contextlib.suppress(orjson.JSONDecodeError):  # a full disk truncates a line
                deaths.append(ServerDeath(**orjson.loads(line)))
        return deaths

    @property
    def _private_file(self) -> Path:
        # The reaper and the next deployment remove the Ray folder even if this process is killed.
        return self._ray_dir / "private.yaml"

    def _write_private(self) -> Path:
        path = self._private_file
        path.touch(mode=0o600)
        path.write_text(OmegaConf.to_yaml(OmegaConf.create(self._private)))
        return path

    async def _wait_ready(self) -> None:
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            waiting: dict[str, Instance] | None = None
            while waiting is None or waiting:
                self._raise_if_ended("before its servers were up")
                if waiting is None:
                    # Gym publishes the list when all servers are launched.
                    listed = await _get_json(session, f"{self.cli.head_url}/server_instances")
                    if listed:
                        await self._require_own("Gym's head server", self.cli.head_url, "choose another: --head-port")
                        self.instances = {item.name: item for item in map(_instance, listed)}
                        waiting = dict(self.instances)
                else:
                    answers = await asyncio.gather(*(_is_reachable(session, item.url) for item in waiting.values()))
                    pairs = list(zip(waiting.items(), answers, strict=True))
                    for (name, item), answered in pairs:
                        if answered:
                            await self._require_own(name, item.url, "start again with other ports")
                    waiting = {name: item for (name, item), answered in pairs if not answered}
                self.waiting = list(waiting or ())
                await asyncio.sleep(0.2)

    async def _require_own(self, name: str, url: str, fix: str) -> None:
        """Raise DeploymentError unless this deployment owns the listener: deployments may race for a port."""
        port = URL(url).port
        own = await asyncio.to_thread(self.cli.mark.processes)
        if port and await asyncio.to_thread(is_port_taken_by_others, port, own):
            raise DeploymentError(f"port {port} of {name} is in use by another process; {fix}")

    def _raise_if_ended(self, when: str) -> None:
        if self._process is not None and self._process.returncode is not None:
            status = self._process.returncode
            why = f"log {self.log.path}"
            if not self._up.exists():  # only after a failed start does Gym's log end with the cause
                why = f"{error}; {why}" if (error := start_error(self.log.lines())) else self.log.tail()
            raise DeploymentError(f"gym env start ended with status {status} {when}; {why}")

    async def _end(self) -> None:
        # A second cancellation of the caller must not orphan servers.
        ending = asyncio.create_task(self._end_now())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    async def _end_now(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            # On SIGTERM, the reaper interrupts Gym, waits, and kills the processes that Gym leaves behind.
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _REAPER_GRACE_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        left = await self.cli.mark.kill(settle_s=0)
        self._private_file.unlink(missing_ok=True)
        await asyncio.to_thread(shutil.rmtree, self._ray_dir, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if left:
            listed = "; ".join(f"{pid}: {command[:120]}" for pid, command in left.items())
            raise DeploymentError(f"processes of the Gym deployment survived SIGKILL: {listed}")


async def _get_json(session: aiohttp.ClientSession, url: str) -> Any:
    try:
        async with session.get(url) as response:
            return orjson.loads(await response.read()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None


def _is_running(pid: int) -> bool:
    """Return whether a process runs; ``False`` for a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


async def _is_reachable(session: aiohttp.ClientSession, url: str) -> bool:
    """Return whether a server answers. Any status counts, as in Gym, because a server may have no route at ``/``."""
    try:
        async with session.get(url):
            return True
    except (aiohttp.ClientError, TimeoutError):
        return False


def _instance(listed: Mapping[str, Any]) -> Instance:
    server = f"{listed['server_type']}/{listed['name']}"
    return Instance(listed["process_name"], server, listed["url"], listed["pid"])
