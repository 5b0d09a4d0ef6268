# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Folders of Harbor tasks: checks, and conversion to rows of ``prorl_harbor``.

A row::

    {"responses_create_params": {"input": [...], "tools": [...]},   # the instruction, of the first step if several
     "data_source": "harbor", "instance_id": "org/name",
     "image": "docker://…" or "harbor-<16 hex>",                    # see HarborRow
     "network": "none", "cpu": 1, "memory_mib": 2048, "disk_gib": 10,   # only what the task sets
     "harbor": {"folder": "/tasks/name", "digest": "…", "config": {...}, ...}}   # see HarborTask

A folder is untrusted. Symlinks are followed only within the folder, and no file of the folder is executed here.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from nemo_gym_prorl.failures import CallerError, RolloutError
from nemo_gym_prorl.filesystems import read_text
from nemo_gym_prorl.network_access import HOST, Network
from nemo_gym_prorl.tasks.harbor.task_config import (
    EnvironmentConfig,
    StepConfig,
    TaskConfig,
    parse_task_config,
)
from nemo_gym_prorl.tasks.harbor.verifier_tools import VerifierNeeds, needs_of
from nemo_gym_prorl.tasks.task import ImageRow
from nemo_gym_prorl.tasks.workbench import workbench_schemas


TOOLS = ("bash", "str_replace_editor", "submit")

SUBMIT_DESCRIPTION = "Hand in your work as it is now."

CONFIG_FILE = "task.toml"

MAX_TEXT_BYTES = 1 << 20
"""Maximum bytes of an instruction; a longer one is a mistake, and would bloat each row."""

MAX_FILES = 100_000
"""Maximum number of files, folders and links of a task. Symlinks can make a few folders look like millions."""

MAX_TREE_BYTES = 4 << 30
"""Maximum bytes of a folder's files; a sparse file counts with its full length."""

MAX_DEPTH = 100

_NOT_CONTENT = frozenset({".DS_Store", ".git", "__pycache__"})
_COMPOSE_FILE = "docker-compose.yaml"


class _Table(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class VerifierImage(_Table):
    """Image of a separate verifier.

    Attributes:
        image: as :attr:`HarborRow.image`.
        has_tests: whether the image contains the tests, so that no tests are mounted.
    """

    image: str = Field(min_length=1)
    has_tests: bool = False


class HarborTask(_Table):
    """Field ``harbor`` of a row: the task.

    Attributes:
        folder: path of the task's folder, absolute or relative to the server's root of tasks.
        digest: :func:`folder_digest` when the row was made.
        config: ``task.toml``; the row only contains the keys that the task's author set.
        instructions: instruction of each step; empty for a task without ``[[steps]]``.
        image_user: user that the Dockerfile sets; empty without a ``USER``.
        image_workdir: working folder that the Dockerfile sets; empty without a ``WORKDIR``.
        verifier_images: by name of the step, the image of its separate verifier; ``""`` for a task without steps.
        builds: by name of an image that must be built, the folder of its Dockerfile, relative to the task's folder.
        replaced: by image that the task or its Dockerfile names, the image that the user chose instead.
        downloads: downloads that the text of the test scripts names.
    """

    folder: str = Field(min_length=1)
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    config: TaskConfig = TaskConfig()
    instructions: tuple[str, ...] = ()
    image_user: str = ""
    image_workdir: str = ""
    verifier_images: Mapping[str, VerifierImage] = Field(default_factory=dict)
    builds: Mapping[str, str] = Field(default_factory=dict)
    replaced: Mapping[str, str] = Field(default_factory=dict)
    downloads: VerifierNeeds = VerifierNeeds()


class HarborRow(ImageRow):
    """Row of ``prorl_harbor``. The image is the registry address of ``docker_image``, or the name of the image that
    ``prorl image build-all`` builds from the Dockerfile. The network is that of the agent's phase."""

    harbor: HarborTask

    @field_validator("network")
    @classmethod
    def _is_not_the_hosts(cls, value: Network | None) -> Network | None:
        if value == HOST:
            raise ValueError("a task never gets the host's network; name 'public', 'none' or hosts")
        return value


@dataclass(frozen=True, slots=True)
class DockerfileFacts:
    """All images that a Dockerfile names in ``FROM`` and ``--from``, and user and working folder that its last stage
    sets; empty where it sets none."""

    images: frozenset[str] = frozenset()
    user: str = ""
    workdir: str = ""


def make_row(
    folder: Path,
    data_source: str = "harbor",
    *,
    replaced: Mapping[str, str] | None = None,
    force_build: bool = False,
    facts_of: Callable[[Path], DockerfileFacts] | None = None,
) -> dict[str, Any]:
    """Return the row of a task's folder.

    Args:
        folder: the folder with ``task.toml``.
        data_source: name of the dataset.
        replaced: by image that the task or its Dockerfile names, the image to use instead. The name of a built image
            depends on its replaced bases.
        force_build: whether a Dockerfile is built although the task names a ``docker_image``.
        facts_of: reads a Dockerfile, and raises :class:`CallerError` if it cannot be built. ``None`` assumes that the
            Dockerfile names all images of ``replaced``, and sets no user and working folder.

    Raises:
        CallerError: the folder is no task, or needs an unsupported feature; names the file or the key.
    """
    folder = folder.resolve()
    config = parse_task_config(_text(folder, CONFIG_FILE))
    instructions = [_instruction(folder, f"steps/{step.name}/") for step in config.steps]
    images = _Images(folder, force_build, dict(replaced or {}), facts_of, {}, {})
    _refuse_ignore_rules(folder)
    environment = config.environment
    image, facts = images.of("environment", environment.docker_image, "environment.docker_image")
    task = HarborTask(
        folder=str(folder),
        digest=folder_digest(folder),
        instructions=tuple(instructions),
        image_user=facts.user,
        image_workdir=facts.workdir,
        verifier_images=_verifier_images(config, images, image),
        builds=images.builds,
        replaced=images.used,
        downloads=_downloads(folder, config),
    )
    return {
        "responses_create_params": {
            "input": [{"role": "user", "content": (instructions or [_instruction(folder)])[0]}],
            "tools": workbench_schemas(TOOLS, SUBMIT_DESCRIPTION),
            "parallel_tool_calls": False,
        },
        "data_source": data_source,
        "instance_id": config.task.name if config.task else folder.name,
        "image": image,
        **_limits(config),
        "harbor": {
            **task.model_dump(mode="json", exclude_defaults=True),
            # A value of a step overrides the task's even if it is the default.
            "config": config.model_dump(mode="json", exclude_unset=True),
        },
    }


@contextmanager
def refusing_anything() -> Iterator[None]:
    """Convert exceptions of an untrusted task to :class:`CallerError`, so that the work on other tasks continues."""
    try:
        yield
    except (RolloutError, MemoryError):
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or error
        raise CallerError(f"cannot be read: {type(error).__name__}: {reason!s:.300}") from error


def folder_digest(folder: Path) -> str:
    """Return a SHA-256 over names, contents and executable bits of the task's files that rollouts read.

    These are the files of ``tests``, ``solution`` and ``steps``, and those of ``environment`` if they are uploaded
    rather than built. The row itself contains the instruction and ``task.toml``.

    """
    folder = folder.resolve()
    names = ["solution", "steps", "tests", *(["environment"] if is_uploaded(folder) else [])]
    return _digest(folder, names).hexdigest()


def is_uploaded(folder: Path) -> bool:
    """Return whether the files of ``environment`` are uploaded to the sandbox, since they contain no Dockerfile."""
    return not (folder / "environment" / "Dockerfile").exists()


def built_image(folder: Path, context: str, replaced: Mapping[str, str]) -> str:
    """Return the name of the image that is built from the folder ``context`` of a task, with replaced base images."""
    summary = _digest(folder.resolve() / context, [""], root=folder.resolve())
    for name, base in sorted(replaced.items()):
        summary.update(f"\0{name}\0{base}".encode())
    return f"harbor-{summary.hexdigest()[:16]}"


def tree(top: Path, root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a folder, or a file itself, as (name relative to ``top``, path), sorted by name; links are
    followed.

    Raises:
        CallerError: a symlink is broken, leaves ``root`` or leads to one of its parent folders, a file is not regular,
            or there are too many files, bytes or levels; names the file.
    """
    found: dict[str, Path] = {}
    visited = total = 0
    above_all = os.path.relpath(top, root)
    left: list[tuple[Path, str, frozenset[Path]]] = [(top, "", frozenset())]
    while left:
        path, name, above = left.pop()
        where = os.path.normpath(f"{above_all}/{name}")
        try:
            real = path.resolve(strict=True)
            status = real.stat()
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symlinks
            raise CallerError("is a link that leads nowhere; remove it", field=where) from error
        if not real.is_relative_to(root):
            raise CallerError("is a link that leaves the task's folder; replace it by the file", field=where)
        if real in above:
            raise CallerError("is a link to a folder that contains it; remove it", field=where)
        if stat.S_ISREG(status.st_mode):
            found[name] = real
            total += status.st_size
        elif stat.S_ISDIR(status.st_mode):
            children = [child for child in real.iterdir() if child.name not in _NOT_CONTENT]
            left += [(child, f"{name}/{child.name}".lstrip("/"), above | {real}) for child in children]
        else:
            raise CallerError("is no file, folder or link", field=where)
        visited += 1
        if visited + len(left) > MAX_FILES or total > MAX_TREE_BYTES or len(above) > MAX_DEPTH:
            most = f"{MAX_FILES} files, {MAX_TREE_BYTES >> 30} GiB or {MAX_DEPTH} levels of folders"
            raise CallerError(f"more than {most}", field=above_all)
    yield from sorted(found.items())


def _digest(folder: Path, names: list[str], root: Path | None = None) -> hashlib._Hash:
    summary = hashlib.sha256()
    for top in names:
        if not (folder / top).exists() and not (folder / top).is_symlink():
            continue
        for name, path in tree(folder / top, root or folder):
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            is_executable = bool(path.stat().st_mode & stat.S_IXUSR)
            # NUL separates the fields, since no name contains it: different trees never hash the same text.
            summary.update(f"{top}/{name}\0{is_executable:d}{content}\0".encode("utf-8", "surrogateescape"))
    return summary


@dataclass(frozen=True, slots=True)
class _Images:
    """Images of one task; ``builds`` and ``used`` collect the row's fields ``builds`` and ``replaced``."""

    folder: Path
    force_build: bool
    replaced: dict[str, str]
    facts_of: Callable[[Path], DockerfileFacts] | None
    builds: dict[str, str]
    used: dict[str, str]

    def of(self, context: str, docker_image: str | None, field: str) -> tuple[str, DockerfileFacts]:
        dockerfile = self.folder / context / "Dockerfile"
        if (self.folder / context / _COMPOSE_FILE).exists():
            raise CallerError("Compose is not supported", field=f"{context}/{_COMPOSE_FILE}")
        if docker_image is not None and not (self.force_build and dockerfile.exists()):
            named = docker_image.strip().removeprefix("docker://")
            if not named:
                raise CallerError("is empty", field=field)
            if (base := self.replaced.get(named)) is not None:
                self.used[named] = base
                return base, DockerfileFacts()
            return f"docker://{named}", DockerfileFacts()
        if not dockerfile.exists():
            raise CallerError("missing, and there is no docker_image", field=f"{context}/Dockerfile")
        used, facts = self.replaced, DockerfileFacts()
        if self.facts_of is not None:
            dockerfile = plain_file(self.folder, f"{context}/Dockerfile")
            try:
                facts = self.facts_of(dockerfile)
            except CallerError as error:
                raise CallerError(error.reason.removeprefix("Dockerfile: "), field=f"{context}/Dockerfile") from error
            used = {name: base for name, base in used.items() if name in facts.images}
        name = built_image(self.folder, context, used)
        self.builds[name] = context
        self.used.update(used)
        return name, facts


def _verifier_images(config: TaskConfig, images: _Images, image: str) -> dict[str, VerifierImage]:
    """Return the images of separate verifiers: of the step's verifier, else the task's verifier, else ``image``.
    Raises CallerError if a step has no test script and no verifier's image, or needs an unsupported feature."""
    folder, found = images.folder, {}
    steps: tuple[StepConfig | None, ...] = config.steps or (None,)
    for step in steps:
        above = f"steps/{step.name}/" if step else ""
        if (folder / f"{above}trajectory.json").exists():
            raise CallerError("a trajectory before the task is not supported", field=f"{above}trajectory.json")
        levels = [(config.verifier.environment, "tests", "verifier.environment.docker_image")]
        if step:
            levels.insert(0, (step.verifier.environment, f"{above}tests", f"steps.{levels[0][2]}"))
        own = next((one for one in levels if _has_image(folder / one[1], one[0])), None)
        if config.is_separate(step):
            used = VerifierImage(image=image)
            if own:
                table, context, field = own
                named = table.docker_image if table else None
                used = VerifierImage(image=images.of(context, named, field)[0], has_tests=True)
            found[step.name if step else ""] = used
            if own:
                continue
        if not any((folder / context / "test.sh").is_file() for _table, context, _field in levels):
            raise CallerError("missing: there is nothing to grade with", field=f"{above}tests/test.sh")
    return found


def _refuse_ignore_rules(folder: Path) -> None:
    for pattern in ("tests", "solution", "steps/*/tests", "steps/*/solution"):
        for found in folder.glob(f"{pattern}/**/.harborignore"):
            name = str(found.relative_to(folder))
            raise CallerError("is not supported; remove it and the files that it names", field=name)


def _has_image(folder: Path, table: EnvironmentConfig | None) -> bool:
    named = bool(table and table.docker_image)
    return named or any((folder / name).exists() for name in ("Dockerfile", _COMPOSE_FILE))


def _downloads(folder: Path, config: TaskConfig) -> VerifierNeeds:
    paths = [folder / "tests/test.sh", *(folder / f"steps/{step.name}/tests/test.sh" for step in config.steps)]
    scripts = []
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                scripts.append(file.read(MAX_TEXT_BYTES).decode(errors="replace"))
    return needs_of("\n".join(scripts))


def _limits(config: TaskConfig) -> dict[str, Any]:
    """Return the row's network and resource limits, as far as the task sets them."""
    environment, step = config.environment, config.steps[0] if config.steps else None
    limits: dict[str, Any] = {}
    if (
        "network_mode" in environment.model_fields_set
        or config.agent.network_mode
        or (step and step.agent.network_mode)
    ):
        network = config.agent_network(step)
        names = {"no-network": "none", "allowlist": list(network.allowed_hosts)}
        limits["network"] = names.get(network.network_mode or "", "public")
    if environment.cpus is not None:
        limits["cpu"] = environment.cpus
    if environment.memory_mb is not None:
        limits["memory_mib"] = environment.memory_mb
    if environment.storage_mb is not None:
        limits["disk_gib"] = math.ceil(environment.storage_mb / 1024)
    return limits


def _instruction(folder: Path, above: str = "") -> str:
    """Return an instruction without the canary lines at the top, which identify published tasks in training data."""
    name = f"{above}instruction.md"
    lines = _text(folder, name).split("\n")
    cut = next((number for number, line in enumerate(lines) if not _is_canary(line.strip().lower())), len(lines))
    text = "\n".join(dropwhile(lambda line: not line.strip(), lines[cut:]))
    if not text:
        raise CallerError("is empty", field=name)
    return text


def _is_canary(line: str) -> bool:
    return "canary" in line and (line.startswith("#") or (line.startswith("<!--") and line.endswith("-->")))


def plain_file(folder: Path, name: str) -> Path:
    """Return the path of a task's regular file, with symlinks resolved; raises CallerError if there is none."""
    found = dict(tree(folder / name, folder)) if os.path.lexists(folder / name) else {}
    if "" not in found:
        raise CallerError("missing", field=name)
    return found[""]


def _text(folder: Path, name: str) -> str:
    path = plain_file(folder, name)
    try:
        return read_text(path, MAX_TEXT_BYTES)
    except (OSError, ValueError) as error:
        raise CallerError(f"cannot be read: {error}", field=name) from error
