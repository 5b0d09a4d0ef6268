# SPDX-License-Identifier: Apache-2.0
"""Gym deployments as a managed set of processes: start with Gym's own command line, wait, use, end without a trace.

``gym env start`` is made for a terminal: it takes a fixed port, wants a virtual environment per server, may orphan
servers when it is interrupted, and tells about failures in its output only. The demo, the tests and the benchmarks
need the same servers as a value with a beginning and an end. :class:`GymCli` knows how to call Gym from wherever this
package lives (wheel or checkout, nemo-gym 0.4 or later); :class:`GymDeployment` keeps one running deployment.

Invariants: a deployment is entered only when every server answers; after leaving it no process of it lives, or leaving
raises; a server that dies while starting is an error that carries the log's tail.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import aiohttp
import orjson
from omegaconf import OmegaConf

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.processes import INTERRUPT_GRACE_S, KILL_S, SETTLE_S, ProcessMark, keeper_command


SERVER_TYPES = ("resources_servers", "responses_api_agents", "responses_api_models", "environment_servers")
"""The folders in which Gym looks for servers."""

MARK_NAME = "PRORL_GYM_DEPLOYMENT"
"""Environment variable that marks the processes of a deployment."""

_HEAD_PORTS = range(20_001, 32_000)
"""Head server ports: outside Gym's own range for servers (10001-20000) and below the kernel's for outgoing
connections, from which Ray would otherwise take our port between our choice and Gym's use of it."""

_KEEPER_GRACE_S = INTERRUPT_GRACE_S + SETTLE_S + KILL_S + 5.0
_LOG_TAIL_LINES = 80
_RAY_LATE = "The current node timed out during startup"
"""Ray gives its own processes a fixed 30 s. On a busy machine that fails now and then; a second try is worth it."""

# Ask the interpreter that will run Gym, which need not be ours.
_PROBE = """
import importlib.util, json, os, shutil, sys
def parent(name):
    spec = importlib.util.find_spec(name)
    return os.path.dirname(list(spec.submodule_search_locations)[0]) if spec else None
print(json.dumps({"prefix": sys.prefix, "bin": os.path.dirname(sys.executable), "gym_root": parent("nemo_gym"),
    "our_root": parent("nemo_gym_prorl")}))
"""


class DeploymentError(InfrastructureError):
    """Gym could not be started, died, or left something behind."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One running server of a deployment: its instance name, ``type/implementation``, URL and process id."""

    name: str
    server: str
    url: str
    pid: int


@dataclass(frozen=True, slots=True)
class GymResult:
    """What a finished Gym command said."""

    arguments: tuple[str, ...]
    returncode: int
    output: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Installation:
    """Where things lie for one interpreter.

    Attributes:
        prefix: its environment.
        bin: folder of the interpreter and of Gym's console script.
        gym_root: the folder that holds ``nemo_gym`` and Gym's server folders.
        our_root: the folder that holds ``nemo_gym_prorl`` and our server folders.
    """

    prefix: Path
    bin: Path
    gym_root: Path
    our_root: Path | None

    @property
    def checkout(self) -> Path | None:
        """Our folder where it is not next to Gym's, so that Gym has to be told about it."""
        return self.our_root if self.our_root != self.gym_root else None


class GymCli:
    """Calls Gym's command line such that our servers are found and no server builds an environment of its own.

    Args:
        work_dir: folder for what Gym needs on disk; kept by the caller.
        python: the interpreter whose nemo-gym is used; its environment serves all servers.
        cwd: working directory of commands about servers. Default: the checkout if this package runs from one
            (nemo-gym 0.4 finds it only there), else ``work_dir``.
        env: environment variables on top of ours.
    """

    def __init__(
        self,
        work_dir: Path,
        *,
        python: str = sys.executable,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.work_dir = work_dir.absolute()
        self.head_port = _free_port()
        self.mark = ProcessMark(MARK_NAME, uuid.uuid4().hex)
        self._python = python
        self._cwd = cwd
        self._given_env = dict(env or {})
        self._installation: Installation | None = None

    @property
    def head_url(self) -> str:
        """URL of the head server of deployments started with this object's settings."""
        return f"http://127.0.0.1:{self.head_port}"

    @property
    def overrides(self) -> list[str]:
        """The Hydra overrides that every command about servers needs."""
        return [
            f"+uv_venv_dir={self._venvs}",
            "+skip_venv_if_present=true",
            "++head_server.host=127.0.0.1",
            f"++head_server.port={self.head_port}",
        ]

    async def prepare(self) -> Installation:
        """Look at the interpreter and lay out the shared environment; done once.

        Raises:
            DeploymentError: the interpreter has no nemo-gym.
        """
        if self._installation is None:
            self._installation = await self._probe()
            self.work_dir.mkdir(parents=True, exist_ok=True)
            await asyncio.to_thread(_link_environments, self._venvs, self._installation)
        return self._installation

    async def run(self, *arguments: str, timeout_s: float = 600.0, check: bool = True) -> GymResult:
        """Run one Gym command to its end, e.g. ``run("eval", "run", "--no-serve", …)``.

        Args:
            arguments: words of the command line after ``gym``; :attr:`overrides` are added where they apply.
            timeout_s: after that long the command and whatever it started is killed.
            check: raise if it fails.

        Raises:
            DeploymentError: it took too long, or failed and ``check`` is set.
        """
        command, env, cwd = await self.command(*arguments)
        start = time.monotonic()
        mark = ProcessMark(MARK_NAME, uuid.uuid4().hex)
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=cwd,
            env=env | {mark.name: mark.value},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
        except TimeoutError as error:
            raise DeploymentError(f"gym {' '.join(arguments)} took longer than {timeout_s:g} s") from error
        finally:
            if process.returncode is None:
                process.kill()
            await asyncio.shield(mark.kill(settle_s=1.0))
        result = GymResult(
            arguments, process.returncode or 0, output.decode(errors="replace"), time.monotonic() - start
        )
        if check and result.returncode:
            tail = "\n".join(result.output.splitlines()[-_LOG_TAIL_LINES:])
            raise DeploymentError(f"gym {' '.join(arguments)} ended with status {result.returncode}:\n{tail}")
        return result

    async def command(self, *arguments: str) -> tuple[list[str], dict[str, str], Path]:
        """Command line, environment and working directory of a Gym command."""
        installation = await self.prepare()
        words = [str(installation.bin / "gym"), *arguments]
        # Hydra leaves an "outputs" folder in the working directory; listings can't all be told to put it elsewhere,
        # and don't care where they run.
        if arguments[:1] not in (("env",), ("eval",), ("dataset",)):
            return words, self._environment(installation), self.work_dir
        words += [*self.overrides, f"hydra.run.dir={self.work_dir}/hydra", "hydra.output_subdir=null"]
        return words, self._environment(installation), self._cwd or installation.checkout or self.work_dir

    @property
    def _venvs(self) -> Path:
        return self.work_dir / "venvs"

    def _environment(self, installation: Installation) -> dict[str, str]:
        env = dict(os.environ)
        env["PATH"] = f"{installation.bin}{os.pathsep}{env.get('PATH', os.defpath)}"
        # Ray: no token file in the user's home, no usage report, the smallest object store it accepts, and no workers
        # ahead of the tasks (most deployments have none).
        env |= {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(80 * 1024 * 1024),
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
            "PYTHONUNBUFFERED": "1",
        }
        if checkout := installation.checkout:
            # From 0.5 on Gym looks for servers here too; before, the working directory has to be the checkout.
            env["NEMO_GYM_EXTRA_ROOTS"] = _join_paths(checkout, env.get("NEMO_GYM_EXTRA_ROOTS"))
            env["PYTHONPATH"] = _join_paths(checkout, env.get("PYTHONPATH"))
        return env | self._given_env

    async def _probe(self) -> Installation:
        # A checkout that is on our path only because we were started in it has to be on the child's path as well. For
        # another interpreter it does not count: "python -c" must not find it in the working directory.
        env = dict(os.environ) | self._given_env
        if self._python == sys.executable:
            env["PYTHONPATH"] = _join_paths(Path(__file__).parents[1], env.get("PYTHONPATH"))
        process = await asyncio.create_subprocess_exec(
            self._python,
            "-c",
            _PROBE,
            cwd="/",
            env=env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        if process.returncode:
            reason = errors.decode(errors="replace").strip().splitlines()[-1:]
            raise DeploymentError(f"{self._python} can't run NeMo Gym: {' '.join(reason)}; install nemo-gym into it")
        found = orjson.loads(output)
        return Installation(
            prefix=Path(found["prefix"]),
            bin=Path(found["bin"]),
            gym_root=Path(found["gym_root"]),
            our_root=Path(found["our_root"]) if found["our_root"] else None,
        )


class GymDeployment:
    """One running Gym deployment; an async context manager.

    Args:
        config_paths: Gym configuration files, absolute or as Gym resolves them.
        environment: name of an environment that Gym knows (``--environment``).
        model_type: Gym's model server, as ``--model-type`` takes it; ``None`` if the configuration files bring one.
        policy_base_url: URL of the inference endpoint, ending in ``/v1``.
        policy_model_name: the model's name there.
        policy_api_key: its key. It is written to a file that only the user can read.
        overrides: further Hydra overrides; they win.
        work_dir: folder for logs and Gym's files. Default: a temporary one, removed when all went well.
        python, cwd, env: as for :class:`GymCli`.
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
        policy_base_url: str | None = None,
        policy_model_name: str = "policy",
        policy_api_key: str = "none",
        overrides: Sequence[str] = (),
        work_dir: Path | None = None,
        python: str = sys.executable,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 240.0,
    ) -> None:
        self._keeps_work_dir = work_dir is not None
        unique = uuid.uuid4().hex[:12]
        self.work_dir = work_dir or Path(tempfile.gettempdir()) / f"prorl-gym-{unique}"
        # Ray's sockets lie below its folder, and a socket's path may have 107 bytes only: keep it short.
        self._ray_dir = Path("/tmp") / f"prorl-ray-{unique}"
        self.cli = GymCli(self.work_dir, python=python, cwd=cwd, env={"RAY_TMPDIR": str(self._ray_dir), **(env or {})})
        self.instances: dict[str, Instance] = {}
        self.start_s = 0.0
        """How long the start took, in seconds."""
        self._config_paths = [str(path) for path in config_paths]
        self._environment = environment
        self._model_type = model_type
        self._policy = None
        if policy_base_url:
            self._policy = {
                "policy_base_url": policy_base_url,
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

    async def run_gym(self, *arguments: str, timeout_s: float = 600.0, check: bool = True) -> GymResult:
        """Run another Gym command against this deployment; see :meth:`GymCli.run`."""
        return await self.cli.run(*arguments, timeout_s=timeout_s, check=check)

    async def __aenter__(self) -> Self:
        start = time.monotonic()
        try:
            await asyncio.wait_for(self._start(), self._start_timeout_s)
        except TimeoutError as error:
            tail = self._log_tail()
            await self._end()
            raise DeploymentError(f"servers not up after {self._start_timeout_s:g} s; {tail}") from error
        except BaseException:
            await self._end()
            raise
        self.start_s = time.monotonic() - start
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._end()
        if error is None and not self._keeps_work_dir:
            await asyncio.to_thread(shutil.rmtree, self.work_dir, ignore_errors=True)

    async def _start(self) -> None:
        await self._launch()
        try:
            await self._wait_ready()
        except DeploymentError:
            if _RAY_LATE not in self.log_path.read_text(errors="replace"):
                raise
            await self._end()
            await self._launch()
            await self._wait_ready()

    async def _launch(self) -> None:
        for folder in (self.work_dir, self._ray_dir):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        selection = [word for path in self._config_paths for word in ("--config", path)]
        if self._environment:
            selection += ["--environment", self._environment]
        if self._model_type:
            selection += ["--model-type", self._model_type]
        if self._policy:
            selection += ["--config", str(self._write_policy())]
        words, env, cwd = await self.cli.command("env", "start", *selection)
        mark = self.cli.mark
        with self._open_log() as log:
            self._process = await asyncio.create_subprocess_exec(
                *keeper_command(mark, [*words, *self._overrides], sys.executable),
                cwd=cwd,
                env=env | {mark.name: mark.value},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )

    def _open_log(self) -> IO[bytes]:
        return self.log_path.open("wb")

    def _write_policy(self) -> Path:
        path = self.work_dir.absolute() / "policy.yaml"
        path.touch(mode=0o600)
        path.write_text(OmegaConf.to_yaml(OmegaConf.create(self._policy)))
        return path

    async def _wait_ready(self) -> None:
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            waiting: dict[str, Instance] | None = None
            while waiting is None or waiting:
                self._raise_if_ended()
                if waiting is None:
                    # Gym publishes the list once, when all servers are launched.
                    listed = await _get_json(session, f"{self.cli.head_url}/server_instances")
                    if listed:
                        self.instances = {item.name: item for item in map(_instance, listed)}
                        waiting = dict(self.instances)
                else:
                    answers = await asyncio.gather(*(_answers(session, item.url) for item in waiting.values()))
                    pairs = zip(waiting.items(), answers, strict=True)
                    waiting = {name: item for (name, item), answered in pairs if not answered}
                await asyncio.sleep(0.2)

    def _raise_if_ended(self) -> None:
        if self._process is not None and self._process.returncode is not None:
            status = self._process.returncode
            raise DeploymentError(
                f"gym env start ended with status {status} before its servers were up; {self._log_tail()}"
            )

    def _log_tail(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines() if self.log_path.exists() else []
        return f"log {self.log_path}, its last lines:\n" + "\n".join(lines[-_LOG_TAIL_LINES:])

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
            # The keeper interrupts Gym, waits, and ends whatever Gym forgot.
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _KEEPER_GRACE_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        left = await self.cli.mark.kill(settle_s=0)
        await asyncio.to_thread(shutil.rmtree, self._ray_dir, ignore_errors=True)
        if left:
            listed = "; ".join(f"{pid}: {command[:120]}" for pid, command in left.items())
            raise DeploymentError(f"processes of the Gym deployment outlive a kill: {listed}")


def _free_port() -> int:
    for port in random.sample(_HEAD_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise DeploymentError(f"no free port in {_HEAD_PORTS.start}-{_HEAD_PORTS.stop - 1} for Gym's head server")


def _join_paths(first: Path, rest: str | None) -> str:
    return f"{first}{os.pathsep}{rest}" if rest else str(first)


def _link_environments(venvs: Path, installation: Installation) -> None:
    """Give every server that Gym could start the one environment we have, as Gym's layout wants it."""
    target = installation.prefix
    if not (target / "bin" / "activate").exists():
        target = _activatable(venvs.parent / "environment", installation)
    for root in {installation.gym_root, installation.our_root}:
        for server_type in SERVER_TYPES:
            folder = root / server_type if root else None
            if folder is None or not folder.is_dir():
                continue
            for server in folder.iterdir():
                link = venvs / server_type / server.name / ".venv"
                if server.is_dir() and not (link.is_symlink() and link.readlink() == target):
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.unlink(missing_ok=True)
                    link.symlink_to(target)


def _activatable(folder: Path, installation: Installation) -> Path:
    """A stand-in for a virtual environment where Python is installed without one, as in many containers."""
    bin_dir = folder / "bin"
    bin_dir.mkdir(parents=True, exist_ok=True)
    python = bin_dir / "python"
    python.unlink(missing_ok=True)
    python.symlink_to(installation.bin / "python3")
    (bin_dir / "activate").write_text(f'export PATH="{bin_dir}:{installation.bin}:$PATH"\n')
    return folder


async def _get_json(session: aiohttp.ClientSession, url: str) -> Any:
    try:
        async with session.get(url) as response:
            return orjson.loads(await response.read()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None


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
