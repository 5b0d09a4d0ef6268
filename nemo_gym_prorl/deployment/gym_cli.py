# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Run Gym's own command line, for a wheel or checkout of this package and for nemo-gym 0.4 or later.

``gym`` expects to run in Gym's checkout: it builds a virtual environment per server, searches servers in the working
directory, and has one fixed port. :class:`GymCli` gives each deployment its own port and folder, and shares one Python
environment among all servers. Processes of a command are marked, so that all of them can be ended.

A batch system kills all processes of a job, including the reaper that deletes the deployment's Ray folder with the
policy's key. Each deployment therefore holds a lock on its Ray folder. The kernel frees the lock when both the owner
and the reaper are gone; the user's next deployment then removes the orphan.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import re
import secrets
import shutil
import socket
import sys
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import orjson
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_gym_prorl.deployment import venvs
from nemo_gym_prorl.deployment.venvs import SERVER_TYPES, Installation, running_installation
from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.processes import ProcessMark


ROOTS_VARIABLE = "NEMO_GYM_EXTRA_ROOTS"
"""Environment variable with more folders in which Gym (0.5 or later) searches servers and files."""


def load_merged(paths: Iterable[str]) -> DictConfig:
    """Merge configuration files and the files in their ``config_paths``; later files win. Interpolations stay.

    Raises:
        FileNotFoundError: a file does not exist.
        OSError, YAMLError, OmegaConfBaseException: a file cannot be read, or is not a mapping.
    """
    files, names = [OmegaConf.create({})], [*map(str, paths)]
    for name in names:  # the loop appends the files' config_paths
        content = OmegaConf.load(find_file(name))
        if not isinstance(content, DictConfig):
            raise OmegaConfBaseException(f"{name} must be a mapping")
        files.append(content)
        names += [other for other in content.get("config_paths") or () if other not in names]
    merged = OmegaConf.merge(*files)
    assert isinstance(merged, DictConfig)
    return merged


def environment_names() -> set[str]:
    return {path.parent.name for root in _roots() for path in root.glob("environments/*/config.yaml")}


def has_servers(folder: Path) -> bool:
    """Return whether a folder has a user's own servers or environments; ``False`` for Gym's and this project's."""
    here = running_installation()
    installed = (here.gym_root, here.our_root)
    return folder not in installed and any((folder / kind).is_dir() for kind in (*SERVER_TYPES, "environments"))


def link_roots(folder: Path, roots: Sequence[Path]) -> Path:
    """Recreate ``folder`` with symlinks to the servers and environments of all roots, for nemo-gym 0.4, which searches
    a single root. Of several entries with one name, the first root's wins. Entries of other kinds, such as files, are
    linked from the first root only.
    """
    shutil.rmtree(folder, ignore_errors=True)
    kinds = (*SERVER_TYPES, "environments")
    own = {entry for entry in roots[0].iterdir() if entry.name not in kinds and entry.name[0] != "."}
    for entry in [*own, *(entry for root in roots for kind in kinds for entry in (root / kind).glob("*"))]:
        link = folder / (entry.name if entry in own else f"{entry.parent.name}/{entry.name}")
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(entry.absolute())
    return folder


def _roots() -> list[Path]:
    here = running_installation()
    extra = filter(None, os.environ.get(ROOTS_VARIABLE, "").split(os.pathsep))
    return [*map(Path, extra), Path.cwd(), *filter(None, (here.gym_root, here.our_root))]


def find_file(path: str) -> Path:
    """Find a file below :data:`ROOTS_VARIABLE`'s folders, the current directory, Gym's folder or this project's.

    Raises:
        FileNotFoundError: no such file; the error lists the folders searched.
    """
    roots = _roots()
    for root in roots:
        if (root / path).is_file():
            return root / path
    tried = ", ".join(str(root) for root in dict.fromkeys(roots))
    raise FileNotFoundError(f"no file {path} in {tried}")


MARK_NAME = "PRORL_GYM_DEPLOYMENT"
"""Environment variable that marks the processes of a deployment."""

RAY_START_S = 300  # limit of Ray's start; Ray's default of 30 s is too short on a busy machine

_HEAD_PORTS = range(20_001, 32_000)
"""Ports for Gym's head server: above Gym's range for servers (10001-20000), and below the kernel's range for outgoing
connections, from which Ray could take the port before Gym listens."""

# Runs in the interpreter that will run Gym, which may differ from the current one.
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


def ray_auth_mode() -> str:
    """Return the value of ``RAY_AUTH_MODE`` for a process that joins a running Ray.

    A ``RAY_AUTH_MODE`` that is set wins; otherwise the mode is ``token`` if a token exists. ``ray start --head``
    applies the same rule, but ``ray.init`` with an address does not.
    """
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    has_token = os.environ.get("RAY_AUTH_TOKEN") or file.is_file()
    return os.environ.get("RAY_AUTH_MODE", "token" if has_token else "disabled")


class DeploymentError(InfrastructureError):
    """Gym could not be started, died, or left processes behind."""


class GymCli:
    """Builder of Gym commands that find this project's servers and share one Python environment.

    Args:
        work_dir: folder for Gym's files; the caller removes it.
        python: interpreter with nemo-gym; all servers share its environment.
        cwd: working directory of commands about servers. Default: a folder of links if ``folder`` has servers, else
            the checkout if this package runs from one (nemo-gym 0.4 searches only there), else ``work_dir``.
        folder: folder of a user's own servers and environments. Default: the current directory. Commands about servers
            run in a folder that links these servers and this project's.
        env: more environment variables, which take precedence.
        head_port: port of Gym's head server. Default: a free port.
        server_python: returns the text of a program that starts servers in place of the interpreter, given the
            interpreter's path. Default: the interpreter starts them.
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
        self._ray_token = secrets.token_hex(32)
        self._installation: Installation | None = None

    @property
    def head_url(self) -> str:
        return f"http://127.0.0.1:{self.head_port}"

    @property
    def overrides(self) -> list[str]:
        """Hydra overrides of every command about servers."""
        return [
            f"+uv_venv_dir={self._venvs}",
            "+skip_venv_if_present=true",
            "++head_server.host=127.0.0.1",
            f"++head_server.port={self.head_port}",
        ]

    async def prepare(self) -> Installation:
        """Inspect the interpreter and link the shared environment. Later calls return the same result.

        Raises:
            DeploymentError: the interpreter has no nemo-gym.
        """
        if self._installation is None:
            installation, versions = await self._probe()
            self.work_dir.mkdir(parents=True, exist_ok=True)
            if self._cwd is None and has_servers(self._folder):
                roots = [self._folder, *filter(None, [installation.checkout])]
                self._cwd = await asyncio.to_thread(link_roots, self.work_dir / "servers", roots)
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
        """Return command line, environment and working directory of a Gym command."""
        installation = await self.prepare()
        words = [str(installation.bin / "gym"), *arguments]
        # Hydra creates a folder "outputs" in the working directory. Commands that only list work in any folder, and
        # some have no option for the folder "outputs".
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
        # Ray listens on all interfaces. Without a token, whoever reaches its ports runs code as this user.
        if "RAY_AUTH_MODE" not in self._given_env:
            env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._ray_token}
        # Ray: no usage report, the smallest object store, and no prestarted workers, because most deployments run no
        # Ray tasks.
        env |= {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(80 * 1024 * 1024),
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_raylet_start_wait_time_s": str(RAY_START_S),
            "PYTHONUNBUFFERED": "1",
        }
        if checkout := installation.checkout:
            # Gym 0.5 or later searches these roots; Gym 0.4 needs the checkout as working directory.
            env[ROOTS_VARIABLE] = _join_paths(checkout, env.get(ROOTS_VARIABLE))
            env["PYTHONPATH"] = _join_paths(checkout, env.get("PYTHONPATH"))
        return env | self._given_env

    async def _probe(self) -> tuple[Installation, dict[str, str]]:
        # A checkout that is only importable through the current directory must be importable in the child as well.
        # Another interpreter must not import the checkout: "python -c" searches its cwd, which is therefore "/".
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
            raise DeploymentError(f"{self._python} cannot run NeMo Gym: {' '.join(reason)}; install nemo-gym there")
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


TAIL_LINES = 80  # log lines in an error message: enough for the traceback of one server

_TRACEBACK = "Traceback (most recent call last):"
_ERROR = re.compile(r"(?!INFO|WARNING)[A-Za-z_][\w.]*(: |$)")  # last line of a traceback
_SERVER_LINE = re.compile(r"\((\S+)\) ")
_SERVER_ENDED = re.compile(r"RuntimeError: Process `(.+)` finished unexpectedly!")
_CHAIN = ("the direct cause of the following exception:", "another exception occurred:")


class GymLog:
    """Log file with the output of Gym and its servers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[str]:
        """Return the lines so far; empty if the file does not exist."""
        try:
            return self.path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []

    def tail(self) -> str:
        """Return the last lines for an error message, with the load of the machine."""
        lines = without_interrupts(self.lines())[-TAIL_LINES:]
        if not any(map(str.strip, lines)):
            return f"Gym is still importing and has not printed anything into {self.path}; {machine_load()}"
        return f"{machine_load()}; log {self.path}, its last lines:\n" + "\n".join(lines)


def machine_load() -> str:
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def without_interrupts(lines: list[str]) -> list[str]:
    """Remove the tracebacks of servers that Gym interrupted because another server had died."""
    kept: list[str] = []
    traceback_start: int | None = None
    for line in lines:
        if line.endswith(_TRACEBACK):
            traceback_start = len(kept)
        elif traceback_start is not None and not line.startswith(" "):
            if line.strip() == "KeyboardInterrupt":
                del kept[traceback_start:]
                traceback_start = None
                continue
            traceback_start = None
        kept.append(line)
    return kept


def start_error(lines: Sequence[str]) -> str | None:
    """Return the exception that ended a start, in one line; ``None`` if the log has none.

    Gym's own exception comes last and only names the server that ended; the exception of this server is the reason.
    Lines of a running server begin with its name, and lines of several servers alternate.
    """
    by_server: defaultdict[str, list[str]] = defaultdict(list)
    for line in lines:
        named = _SERVER_LINE.match(line)
        by_server[named[1] if named else ""].append(line[named.end() :] if named else line)
    errors = _exceptions(by_server[""])
    for number, error in enumerate(errors):
        if ended := _SERVER_ENDED.fullmatch(error):
            own = [*_exceptions(by_server[ended[1]]), *errors[:number]]
            return next((f"{ended[1]}: {error}" for error in own if not error.startswith("SystemExit")), None)
    return errors[-1] if errors else None


def _exceptions(lines: list[str]) -> list[str]:
    """Return the last line of each traceback; only the last exception of a chain counts."""
    found: list[str] = []
    lines = without_interrupts(lines)
    rest, chained = iter(enumerate(lines)), False
    for _, line in rest:
        chained = chained or line.endswith(_CHAIN)
        if not line.endswith(_TRACEBACK):
            continue
        number, error = next(((n, text) for n, text in rest if _ERROR.match(text)), (0, ""))
        if fields := re.match(r"[\w.]+: (\d+) validation errors? for ", error):
            error = _invalid_fields(lines[number + 1 :], int(fields[1]))
        else:
            error = re.sub(r"^(?:nemo_gym_prorl\.failures\.\w+: |(?:\w+\.)+)", "", error)
        found[len(found) - chained :] = [error]
        chained = False
    return found


def _invalid_fields(lines: Sequence[str], count: int) -> str:
    """Return pydantic's invalid fields with reasons. In the log, an indented line with the reason follows the name.

    An error of the model as a whole has no line with a name.
    """
    found = re.findall(r"(?:^(\S.*)\n)?^  (\S.*?)(?: \[type=.*)?$", "\n".join(lines), re.MULTILINE)
    pairs = [(name, why.removeprefix("Value error, ")) for name, why in found[:count]]
    return "; ".join(f"{name}: {why}" if name and not why.startswith(f"{name}: ") else why for name, why in pairs)


RAY_FOLDERS = Path("/tmp")
"""Parent of the deployments' Ray folders: short, because paths of Ray's sockets must not exceed 107 bytes."""
RAY_FOLDER_PREFIX = "prorl-ray-"
_LOCK_FILE = "lock"


def lock_deployment(folder: Path, mark: ProcessMark, temporary: Path | None) -> int:
    """Lock a deployment's folder; return the descriptor, which holds the lock until all its copies are closed.

    Args:
        folder: the deployment's Ray folder, below :data:`RAY_FOLDERS`.
        mark: mark of the deployment's processes.
        temporary: folder to remove too if the deployment is orphaned; ``None`` for no folder.
    """
    new_file = folder / f".{_LOCK_FILE}"
    descriptor = os.open(new_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, orjson.dumps({"mark": [mark.name, mark.value], "temporary": str(temporary or "")}))
    new_file.rename(folder / _LOCK_FILE)  # the lock file becomes visible only once it is locked
    return descriptor


async def remove_orphans() -> None:
    """Remove the processes and folders of orphaned deployments; running deployments are not touched."""
    for folder, held in _orphans():
        try:
            # The lock file may be empty after a power failure, and missing if another start has removed the orphan.
            with suppress(OSError, ValueError, LookupError, TypeError):
                owner = orjson.loads((folder / _LOCK_FILE).read_bytes())
                await ProcessMark(*owner["mark"]).kill(settle_s=0)
                if owner["temporary"]:
                    await asyncio.to_thread(shutil.rmtree, owner["temporary"], ignore_errors=True)
            await asyncio.to_thread(_remove_folder, folder)
        finally:
            os.close(held)


def _remove_folder(folder: Path) -> None:
    """Remove a folder, its lock file last, so that the next start can continue an interrupted removal."""
    with suppress(FileNotFoundError):
        for path in [path for path in folder.iterdir() if path.name != _LOCK_FILE]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _orphans() -> Iterator[tuple[Path, int]]:
    for folder in RAY_FOLDERS.glob(f"{RAY_FOLDER_PREFIX}*"):
        with suppress(OSError):  # no lock file, a lock in use, or a folder that was just removed
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                raise
            yield folder, descriptor
