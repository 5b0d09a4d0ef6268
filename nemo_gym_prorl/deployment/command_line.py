# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym's own command line, called from wherever this package lives: wheel or checkout, nemo-gym 0.4 or later.

``gym`` is made for a terminal in Gym's checkout: it wants a virtual environment per server, finds servers by the
working directory, and has one fixed port. :class:`GymCli` gives each use its own port and folder, one environment for
all servers, and an end to every process that a command leaves behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import orjson

from nemo_gym_prorl.deployment import config_files, venvs
from nemo_gym_prorl.deployment.config_files import ROOTS_VARIABLE
from nemo_gym_prorl.deployment.venvs import Installation
from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.processes import ProcessMark


MARK_NAME = "PRORL_GYM_DEPLOYMENT"
"""Environment variable that marks the processes of a deployment."""

RAY_START_S = 90
"""How long Ray's own processes may take to start. Its default, 30 s, is short on a machine that has work."""

_HEAD_PORTS = range(20_001, 32_000)
"""Head server ports: outside Gym's own range for servers (10001-20000) and below the kernel's for outgoing
connections, from which Ray would otherwise take our port between our choice and Gym's use of it."""

# Ask the interpreter that will run Gym, which need not be ours.
_PROBE = """
import importlib.metadata, importlib.util, json, os, re, sys
def parent(name):
    spec = importlib.util.find_spec(name)
    return os.path.dirname(list(spec.submodule_search_locations)[0]) if spec else None
print(json.dumps({"prefix": sys.prefix, "bin": os.path.dirname(sys.executable), "gym_root": parent("nemo_gym"),
    "our_root": parent("nemo_gym_prorl"),
    "versions": {re.sub("[-_.]+", "-", found.name).lower(): found.version
        for found in importlib.metadata.distributions() if found.name}}))
"""


def running_rays_auth_mode() -> str:
    """Return the value of ``RAY_AUTH_MODE`` for a process that joins a running Ray: as set, else ``token`` if there is
    one. ``ray start --head`` decides so by itself, ``ray.init`` with an address does not."""
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    there = os.environ.get("RAY_AUTH_TOKEN") or file.is_file()
    return os.environ.get("RAY_AUTH_MODE", "token" if there else "disabled")


class DeploymentError(InfrastructureError):
    """Gym could not be started, died, or left something behind."""


class GymCli:
    """Calls Gym's command line such that our servers are found and no server builds an environment of its own.

    Args:
        work_dir: folder for what Gym needs on disk; kept by the caller.
        python: the interpreter whose nemo-gym is used; its environment serves all servers.
        cwd: working directory of commands about servers. Default: see ``folder``; else the checkout if this package
            runs from one (nemo-gym 0.4 finds it only there), else ``work_dir``.
        folder: where a user's own servers and environments may be; default: where this is. If there are any, commands
            about servers run where they and ours are together, by links.
        env: environment variables on top of ours.
        head_port: where Gym's head server listens. Default: a free port.
        server_python: makes the text of a program that starts the servers in the interpreter's place, from the
            interpreter's path. Default: the interpreter itself starts them.
    """

    def __init__(
        self,
        work_dir: Path,
        *,
        python: str = sys.executable,
        cwd: Path | None = None,
        folder: Path | None = None,
        env: Mapping[str, str] | None = None,
        head_port: int | None = None,
        server_python: Callable[[Path], str] | None = None,
    ) -> None:
        self.work_dir = work_dir.absolute()
        self.head_port = head_port or _free_port()
        self._server_python = server_python
        self.mark = ProcessMark(MARK_NAME, uuid.uuid4().hex)
        self._python = python
        self._cwd = cwd
        self._folder = folder or Path.cwd()
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
            installation, versions = await self._probe()
            self.work_dir.mkdir(parents=True, exist_ok=True)
            if self._cwd is None and config_files.has_servers(self._folder):
                roots = [self._folder, *filter(None, [installation.checkout])]
                self._cwd = await asyncio.to_thread(config_files.joined, self.work_dir / "servers", roots)
            program = self._server_python(installation.bin / "python3") if self._server_python else None
            await asyncio.to_thread(
                venvs.link_environments,
                self._venvs,
                installation,
                versions.get,
                python=program,
                cwd=self._cwd,
            )
            self._installation = installation
        return self._installation

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
            "RAY_raylet_start_wait_time_s": str(RAY_START_S),
            "PYTHONUNBUFFERED": "1",
        }
        if checkout := installation.checkout:
            # From 0.5 on Gym looks for servers here too; before, the working directory has to be the checkout.
            env[ROOTS_VARIABLE] = _join_paths(checkout, env.get(ROOTS_VARIABLE))
            env["PYTHONPATH"] = _join_paths(checkout, env.get("PYTHONPATH"))
        return env | self._given_env

    async def _probe(self) -> tuple[Installation, dict[str, str]]:
        # A checkout that is on our path only because we were started in it has to be on the child's path as well. For
        # another interpreter it does not count: "python -c" must not find it in the working directory.
        env = dict(os.environ) | self._given_env
        if self._python == sys.executable:
            env["PYTHONPATH"] = _join_paths(Path(__file__).parents[2], env.get("PYTHONPATH"))
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
        our_root = found["our_root"]
        installation = Installation(
            prefix=Path(found["prefix"]),
            bin=Path(found["bin"]),
            gym_root=Path(found["gym_root"]),
            our_root=Path(our_root) if our_root else None,
        )
        return installation, found["versions"]


def _free_port() -> int:
    for port in random.sample(_HEAD_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise DeploymentError(f"no free port in {_HEAD_PORTS.start}-{_HEAD_PORTS.stop - 1} for Gym's head server")


def _join_paths(first: Path, rest: str | None) -> str:
    return f"{first}{os.pathsep}{rest}" if rest else str(first)
