# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym deployments as a managed set of processes: start with Gym's own command line, wait, use, end without a trace.

``gym env start`` may orphan servers when it is interrupted, and tells about failures in its output only. The demo, the
tests and the benchmarks need the same servers as a value with a beginning and an end.

Invariants: a deployment is entered only when every server answers; after leaving it no process of it lives, or leaving
raises; a server that dies is an error that carries the log's tail, or, in a supervised deployment, is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, Self

import aiohttp
import orjson
from omegaconf import OmegaConf
from yarl import URL

from nemo_gym_prorl.deployment import leftovers
from nemo_gym_prorl.deployment.command_line import RAY_START_S, DeploymentError, GymCli, running_rays_auth_mode
from nemo_gym_prorl.deployment.restarter import restarter_program
from nemo_gym_prorl.deployment.venvs import cut_at_a_space
from nemo_gym_prorl.processes import INTERRUPT_GRACE_S, KILL_S, SETTLE_S, is_port_taken_by_others, reaper_command


_KEEPER_GRACE_S = INTERRUPT_GRACE_S + SETTLE_S + KILL_S + 5.0
_WATCH_S = 0.5
START_TIMEOUT_S = 900.0
"""Until every server answers: a minute on an idle machine, many on one that is busy or builds a sandbox image."""

LOG_TAIL_LINES = 80
"""Of what Gym printed, this much goes into an error."""

WAITING_S = 15.0
"""Seconds between two lines that say what a start waits for."""
_SERVER_ENDED = re.compile(r"RuntimeError: Process `(.+)` finished unexpectedly!")
_CHAIN = ("the direct cause of the following exception:", "another exception occurred:")
_RAY_LATE = "The current node timed out during startup"
"""Ray's own processes were not up within :data:`~.command_line.RAY_START_S`. On a busy machine that may be: a second
try is worth it."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One running server of a deployment: its instance name, ``type/implementation``, URL and process id."""

    name: str
    server: str
    url: str
    pid: int


@dataclass(frozen=True, slots=True)
class Death:
    """A server of a supervised deployment ended and is being started again.

    Attributes:
        name: its instance name.
        how: its status or the signal that killed it.
        lived_s: how long it had run, in seconds.
        pause_s: when it is started again, in seconds.
    """

    name: str
    how: str
    lived_s: float
    pause_s: float


class GymDeployment:
    """One running Gym deployment; an async context manager.

    Args:
        config_paths: Gym configuration files, absolute or as Gym resolves them.
        environment: name of an environment that Gym knows (``--environment``).
        model_type: Gym's model server, as ``--model-type`` takes it; ``None`` if the configuration files bring one.
        policy_base_url: URL of the inference endpoint, ending in ``/v1``; or a list of such, which may be empty where
            the model server is given engines later.
        policy_model_name: the model's name there.
        policy_api_key: its key. It is in a file that only the user can read, as long as the deployment lives.
        private: further configuration that goes into that file, since others can read command lines.
        overrides: further Hydra overrides; they win.
        work_dir: folder for logs and Gym's files. Default: a temporary one, removed unless there was an error.
        python, cwd, folder, env, head_port: as for :class:`GymCli`.
        supervised: start servers that die again, as they were, instead of ending; see :meth:`watch`.
        start_timeout_s: bound on the time until every server answers.

    Raises:
        DeploymentError: on entering, if a server does not come up; on leaving, if a process can't be ended.
    """

    def __init__(
        self,
        *,
        config_paths: Sequence[str | Path] = (),
        environment: str | None = None,
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
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._keeps_work_dir = work_dir is not None
        unique = uuid.uuid4().hex[:12]
        self.work_dir = work_dir or Path(tempfile.gettempdir()) / f"prorl-gym-{unique}"
        self._ray_dir = leftovers.FOLDERS / f"{leftovers.PREFIX}{unique}"
        self._lock: int | None = None
        self._supervised = supervised
        joins_ray = any("ray_head_node_address=" in override for override in overrides)
        ray = {"RAY_TMPDIR": str(self._ray_dir)} | ({"RAY_AUTH_MODE": running_rays_auth_mode()} if joins_ray else {})
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
        self.instances: dict[str, Instance] = {}
        self.waiting: list[str] = []
        """While it starts: instances that do not answer yet, once Gym has launched them."""
        self.start_s = 0.0
        """How long the start took, in seconds."""
        self._config_paths = [str(path) for path in config_paths]
        self._environment = environment
        self._model_type = model_type
        self._private = dict(private or {})
        if policy_base_url is not None:
            self._private |= {
                "policy_base_url": policy_base_url if isinstance(policy_base_url, str) else [*policy_base_url],
                "policy_api_key": policy_api_key,
                "policy_model_name": policy_model_name,
            }
        self._overrides = list(overrides)
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None

    @property
    def log_path(self) -> Path:
        """The file with everything that Gym and its servers print."""
        return self.work_dir / "gym.log"

    def url(self, name: str) -> str:
        """URL of a server by its instance name.

        Raises:
            DeploymentError: there is no such instance; the error lists those that are.
        """
        if name not in self.instances:
            raise DeploymentError(f"no instance {name!r} in this deployment; there are {', '.join(self.instances)}")
        return self.instances[name].url

    async def watch(self, on_death: Callable[[Death], None] = lambda death: None) -> NoReturn:
        """Look after the deployment, until it dies or the caller is cancelled.

        Args:
            on_death: told of every server that ended and is started again; only in a supervised deployment.

        Raises:
            DeploymentError: Gym ended, or, without supervision, a server did; with the log's tail.
        """
        seen = 0
        while True:
            if self._supervised:
                deaths = await asyncio.to_thread(self._deaths)
                for death in deaths[seen:]:
                    on_death(death)
                seen = len(deaths)
            else:
                gone = [item.name for item in self.instances.values() if not _lives(item.pid)]
                if gone:
                    raise DeploymentError(f"{', '.join(gone)} of the deployment died; {self._log_tail()}")
            self._raise_if_ended("while it was in use")
            await asyncio.sleep(_WATCH_S)

    async def tell(self, say: Callable[[str], None], marker: str) -> NoReturn:
        """Say how a start goes, until it is cancelled: what servers tell of themselves, and now and then which of them
        are waited for, how busy the machine is, and the log's last line.

        Args:
            say: is told each line.
            marker: stands in the log before what a server says of itself.
        """
        told, began = 0, time.monotonic()
        while True:
            for _ in range(round(WAITING_S)):
                await asyncio.sleep(1)
                said = [line for line in self._log_lines() if marker in line]
                for line in said[told:]:
                    say(line.partition(marker)[2])
                told = len(said)
            stage = ", ".join(self.waiting) or "Gym to launch them"
            last = next((f"; its log: {line:.120}" for line in reversed(self._log_lines()) if line.strip()), "")
            say(f"{time.monotonic() - began:.0f} s, waiting for {stage}; {machine_load()}{last}")

    async def guard[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Do some work with the deployment; if that dies, the work is cancelled and the death is the error.

        Raises:
            DeploymentError: as :meth:`watch`.
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
            await asyncio.wait_for(self._start(), self._start_timeout_s)
        except TimeoutError as error:
            tail = self._log_tail()
            await self._end()
            waited_for = ", ".join(self.waiting) or "Gym to launch its servers"
            raise DeploymentError(
                f"not up after {self._start_timeout_s:g} s, still waiting for {waited_for}; {tail}"
            ) from error
        except BaseException as error:
            await self._end_and_tidy(error)
            raise
        self.start_s = time.monotonic() - start
        self._up.touch()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._end_and_tidy(error)

    async def _end_and_tidy(self, error: BaseException | None) -> None:
        try:
            await self._end()
        except asyncio.CancelledError:  # by a second signal
            await self._tidy(error)
            raise
        await self._tidy(error)

    async def _tidy(self, error: BaseException | None) -> None:
        # After an error somebody wants the log; being told to end is none.
        good = error is None or isinstance(error, asyncio.CancelledError)
        if good and not self._keeps_work_dir:
            await asyncio.to_thread(shutil.rmtree, self.work_dir, ignore_errors=True)

    async def _start(self) -> None:
        for last in (False, True):
            await self._launch()
            try:
                await self._wait_ready()
            except DeploymentError as error:
                if _RAY_LATE not in self.log_path.read_text(errors="replace"):
                    raise
                await self._end()
                if last:
                    raise DeploymentError(
                        f"Ray did not start, twice, in the {RAY_START_S} s that it has: this machine is too busy or "
                        f"short of memory. Start again when it is less so. Log: {self.log_path}"
                    ) from error
            else:
                return

    async def _launch(self) -> None:
        if trouble := cut_at_a_space(self._python):
            raise DeploymentError(f"{trouble}: install into a folder whose path has none")
        await leftovers.sweep()
        for folder in (self.work_dir, self._ray_dir):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise DeploymentError(f"{folder} cannot be made: {error.strerror}; choose another folder") from error
        self._lock = leftovers.lock(self._ray_dir, self.cli.mark, self._temporary)
        for left in (self._up, self._events):
            left.unlink(missing_ok=True)
        selection = [word for path in self._config_paths for word in ("--config", path)]
        if self._environment:
            selection += ["--environment", self._environment]
        if self._model_type:
            selection += ["--model-type", self._model_type]
        if self._private:
            selection += ["--config", str(self._write_private())]
        words, env, cwd = await self.cli.command("env", "start", *selection)
        mark = self.cli.mark
        with self._open_log() as log:
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

    def _deaths(self) -> list[Death]:
        lines = self._events.read_bytes().splitlines(keepends=True) if self._events.exists() else []
        found = []
        for line in lines:
            with contextlib.suppress(orjson.JSONDecodeError):  # half of one, of a disk that was full
                found.append(Death(**orjson.loads(line)))
        return found

    def _open_log(self) -> IO[bytes]:
        return self.log_path.open("wb")

    @property
    def _private_file(self) -> Path:
        # There, since whoever outlives this process, killed, removes it.
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
                    # Gym publishes the list once, when all servers are launched.
                    listed = await _get_json(session, f"{self.cli.head_url}/server_instances")
                    if listed:
                        await self._require_own("Gym's head server", self.cli.head_url, "choose another: --head-port")
                        self.instances = {item.name: item for item in map(_instance, listed)}
                        waiting = dict(self.instances)
                else:
                    answers = await asyncio.gather(*(_answers(session, item.url) for item in waiting.values()))
                    pairs = list(zip(waiting.items(), answers, strict=True))
                    for (name, item), answered in pairs:
                        if answered:
                            await self._require_own(name, item.url, "start again, with other ports")
                    waiting = {name: item for (name, item), answered in pairs if not answered}
                self.waiting = list(waiting or ())
                await asyncio.sleep(0.2)

    async def _require_own(self, name: str, url: str, fix: str) -> None:
        """That something answers is no proof: of two deployments that take a port at a time one loses it."""
        port = URL(url).port
        ours = await asyncio.to_thread(self.cli.mark.processes)
        if port and await asyncio.to_thread(is_port_taken_by_others, port, ours):
            raise DeploymentError(f"port {port} of {name} is taken by somebody else's server; {fix}")

    def _raise_if_ended(self, when: str) -> None:
        if self._process is not None and self._process.returncode is not None:
            status = self._process.returncode
            error = None if self._up.exists() else start_error(self._log_lines())
            why = f"{error}; log {self.log_path}" if error else self._log_tail()
            raise DeploymentError(f"gym env start ended with status {status} {when}; {why}")

    def _log_tail(self) -> str:
        lines = without_interrupts(self._log_lines())[-LOG_TAIL_LINES:]
        if not any(map(str.strip, lines)):
            return f"Gym has printed nothing into {self.log_path}, so its own import is not over; {machine_load()}"
        return f"{machine_load()}; log {self.log_path}, its last lines:\n" + "\n".join(lines)

    def _log_lines(self) -> list[str]:
        try:
            return self.log_path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []

    async def _end(self) -> None:
        # Cancelling the caller a second time must not leave servers behind.
        ending = asyncio.create_task(self._end_now())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    async def _end_now(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            # The reaper interrupts Gym, waits, and ends whatever Gym forgot.
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _KEEPER_GRACE_S)
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
            raise DeploymentError(f"processes of the Gym deployment outlive a kill: {listed}")


async def _get_json(session: aiohttp.ClientSession, url: str) -> Any:
    try:
        async with session.get(url) as response:
            return orjson.loads(await response.read()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None


def machine_load() -> str:
    """Return how busy this machine is, in words."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def _lives(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody has asked about is a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether a server answers at all; like Gym, any status counts, since there may be no route at ``/``."""
    try:
        async with session.get(url):
            return True
    except (aiohttp.ClientError, TimeoutError):
        return False


def _instance(listed: Mapping[str, Any]) -> Instance:
    server = f"{listed['server_type']}/{listed['name']}"
    return Instance(listed["process_name"], server, listed["url"], listed["pid"])


def without_interrupts(lines: list[str]) -> list[str]:
    """A log less the tracebacks of servers that Gym interrupted while they started, because another one had died: they
    are long, come last, and are nobody's trouble."""
    kept: list[str] = []
    begin: int | None = None
    for line in lines:
        if line.endswith("Traceback (most recent call last):"):
            begin = len(kept)
        elif begin is not None and not line.startswith(" "):
            if line.strip() == "KeyboardInterrupt":
                del kept[begin:]
                begin = None
                continue
            begin = None
        kept.append(line)
    return kept


def start_error(lines: Sequence[str]) -> str | None:
    """The exception that ended a deployment while it started, in a line; ``None`` if a log of Gym has none.

    Gym's own exception, which comes last, only names the server that ended. The reason is that server's exception.
    """
    errors = _exceptions(without_interrupts([*lines]))
    ended = next((found for error in errors if (found := _SERVER_ENDED.fullmatch(error))), None)
    if ended is None:
        return errors[-1] if errors else None
    own = [error for error in errors if not _SERVER_ENDED.fullmatch(error) and not error.startswith("SystemExit")]
    return f"{ended[1]}: {own[0]}" if own else None


def _exceptions(lines: Sequence[str]) -> list[str]:
    """What the tracebacks of a log end with; of those that one exception made, the last one."""
    found: list[str] = []
    rest, chained = iter(enumerate(lines)), False
    for _, line in rest:
        chained = chained or line.endswith(_CHAIN)
        if not line.endswith("Traceback (most recent call last):"):
            continue
        speaker = line.removesuffix("Traceback (most recent call last):")
        number, error = next(((n, text) for n, text in rest if not text.startswith(f"{speaker} ")), (0, ""))
        error = error.removeprefix(speaker)
        if fields := re.match(r"[\w.]+: (\d+) validation errors? for ", error):
            error = _invalid_fields(lines[number + 1 :], int(fields[1]))
        else:
            error = re.sub(r"^(?:nemo_gym_prorl\.failures\.\w+: |(?:\w+\.)+)", "", error)
        found[len(found) - chained :] = [error]
        chained = False
    return found


def _invalid_fields(lines: Sequence[str], count: int) -> str:
    """The fields that pydantic names behind an exception, and why: each is a line, and indented ones behind it."""
    names = [number for number, line in enumerate(lines[:-1]) if not line.startswith(" ")][:count]
    pairs = [(lines[number], lines[number + 1].strip().split(" [type=")[0]) for number in names]
    return "; ".join(why if why.startswith(f"{name}: ") else f"{name}: {why}" for name, why in pairs)
