# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Configuration of a Harbor task: the tables of ``task.toml``, schema versions 1.0 to 1.4. Pure.

Field names, defaults and checks are those of Harbor's format. Unknown keys are ignored, as the format requires. A
feature that changes the task and is not supported is refused by name: GPU, TPU, MCP servers, Compose, another
operating system.

Durations are in seconds, memory and storage in MiB. A value ``${NAME}`` or ``${NAME:-default}`` of an ``env`` table is
replaced by an environment variable of the environment server.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
import unicodedata
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.network_access import parse_host
from nemo_gym_prorl.tasks.task import validation_refusal


SCHEMA_VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")

MAX_CHARACTERS = 64 << 10
"""Maximum characters of a ``task.toml``: the parser takes quadratic time for a key of many parts."""

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NetworkMode = Literal["public", "no-network", "allowlist"]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])i?B?\s*", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}
_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)
_PACKAGE = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_NOT_PORTABLE = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')


def _main_service(name: str) -> str:
    if name != "main":
        raise ValueError(f"{name!r} is a service of Compose, which is not supported")
    return name


Service = Annotated[str, AfterValidator(_main_service)]
Hosts = tuple[Annotated[str, AfterValidator(parse_host)], ...]


class _Table(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class NetworkOverride(_Table):
    """Network of one phase; without a ``network_mode`` the phase has the network of the environment."""

    network_mode: NetworkMode | None = None
    allowed_hosts: Hosts = ()

    @model_validator(mode="after")
    def _hosts_need_an_allowlist(self) -> Self:
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError("allowed_hosts: needs network_mode 'allowlist'")
        return self


class Healthcheck(_Table):
    """Command that must succeed before the agent or a separate verifier starts."""

    command: str = Field(min_length=1)
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: float = Field(default=0.0, ge=0)
    start_interval_sec: Seconds = 5.0
    retries: int = Field(default=3, ge=1)


class Artifact(_Table):
    """File or folder of the agent's sandbox that is kept, and handed to a separate verifier.

    Attributes:
        source: path in the sandbox, absolute or relative to the working folder.
        destination: path on the host, relative to the folder of artifacts; ``None`` for ``source``.
        exclude: glob patterns of files below ``source`` that are left out, as of ``tar --exclude``.
        service: name of a Compose service; only ``main`` is supported.
    """

    source: str = Field(min_length=1)
    destination: str | None = None
    exclude: tuple[str, ...] = ()
    service: Service = "main"

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value

    @field_validator("source", "destination")
    @classmethod
    def _stays_inside(cls, value: str | None) -> str | None:
        if value is not None and ".." in value.split("/"):
            raise ValueError("must not contain '..'")
        return value

    @field_validator("destination")
    @classmethod
    def _is_relative(cls, value: str | None) -> str | None:
        if value and (value.startswith("/") or "\\" in value or posixpath.normpath(value) in (".", "manifest.json")):
            raise ValueError("must be a relative path with '/', and not 'manifest.json'")
        return value or None


class CollectHook(_Table):
    """Command that runs after the agent and before artifacts are collected."""

    command: str = Field(min_length=1)
    timeout_sec: Seconds = 60.0
    user: str | int | None = None
    service: Service = "main"


class AgentConfig(NetworkOverride):
    """Table ``[agent]``; without ``timeout_sec`` the agent has no time limit."""

    timeout_sec: Seconds | None = None
    user: str | int | None = None


class EnvironmentConfig(NetworkOverride):
    """Table ``[environment]``, and ``[verifier.environment]`` of a separate verifier."""

    network_mode: NetworkMode = "public"
    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: int | None = None
    tpu: Any = None
    mcp_servers: tuple[Any, ...] = ()
    env: Mapping[str, str] = Field(default_factory=dict)
    healthcheck: Healthcheck | None = None
    workdir: str | None = Field(default=None, pattern=r"^/")

    @model_validator(mode="before")
    @classmethod
    def _upgrade(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        table = dict(value)
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if (size := table.pop(old, None)) is None:
                continue
            if not isinstance(size, str) or not (parts := _SIZE.fullmatch(size)):
                raise ValueError(f"{old}: must be a size such as '2G', not {size!r}")
            mib = round(float(parts[1]) * _MIB[parts[2].upper()])
            if table.setdefault(new, mib) != mib:
                raise ValueError(f"{old}: contradicts {new}; remove one")
        internet = table.pop("allow_internet", None)
        if internet is not None and table.get("allowed_hosts") is None:
            table.setdefault("network_mode", "public" if internet else "no-network")
        return table

    @field_validator("gpus", "tpu", "mcp_servers")
    @classmethod
    def _not_supported(cls, value: Any) -> Any:
        if value:
            raise ValueError("is not supported; only tasks without it can run")
        return value

    @field_validator("os")
    @classmethod
    def _is_linux(cls, value: str) -> str:
        if value.lower() != "linux":
            raise ValueError(f"{value!r} is not supported; only 'linux' is")
        return value.lower()


class VerifierConfig(NetworkOverride):
    """Table ``[verifier]``. Without ``environment_mode``, a verifier with an ``environment`` is separate.

    A step's verifier without ``environment_mode`` and ``environment`` inherits the mode of the task's verifier.
    """

    timeout_sec: Seconds = 600.0
    env: Mapping[str, str] = Field(default_factory=dict)
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentConfig | None = None
    collect: tuple[CollectHook, ...] = ()

    @model_validator(mode="after")
    def _shared_has_no_environment(self) -> Self:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError("environment_mode: 'shared' contradicts the table verifier.environment; remove one")
        return self

    @property
    def separate(self) -> bool:
        """Return whether the verifier has a fresh sandbox of its own, with only the artifacts of the agent."""
        return self.environment_mode == "separate" or (self.environment_mode is None and self.environment is not None)


class SolutionConfig(_Table):
    """Table ``[solution]``: environment variables of the reference solution."""

    env: Mapping[str, str] = Field(default_factory=dict)


class StepConfig(_Table):
    """Entry of ``[[steps]]``.

    Attributes:
        name: name of the step's folder below ``steps``.
        min_reward: minimum of the reward ``reward``, or minimum by key; if missed, the later steps do not count.
    """

    name: str = Field(min_length=1, max_length=255)
    agent: AgentConfig = AgentConfig()
    verifier: VerifierConfig = VerifierConfig()
    min_reward: float | Mapping[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: tuple[Artifact, ...] = ()

    @field_validator("name")
    @classmethod
    def _is_folder_name(cls, value: str) -> str:
        if _NOT_PORTABLE.search(value) or not value.strip(". ") or value.endswith((".", " ")):
            raise ValueError(f"{value!r} is no name of a folder")
        return value


class Package(_Table):
    """Table ``[task]``.

    Attributes:
        name: ``ORGANISATION/NAME``.
    """

    name: str

    @field_validator("name")
    @classmethod
    def _is_package(cls, value: str) -> str:
        if not _PACKAGE.fullmatch(value) or ".." in value:
            raise ValueError(f"must be ORGANISATION/NAME of letters, digits, '.', '_' and '-', not {value!r}")
        return value


class TaskConfig(_Table):
    """All tables of ``task.toml`` that decide how a task runs."""

    schema_version: str = "1.4"
    task: Package | None = None
    agent: AgentConfig = AgentConfig()
    verifier: VerifierConfig = VerifierConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    solution: SolutionConfig = SolutionConfig()
    artifacts: tuple[Artifact, ...] = ()
    steps: tuple[StepConfig, ...] = ()
    multi_step_reward_strategy: Literal["mean", "final"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _old_version_key(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and "version" in value and "schema_version" not in value:
            return {**value, "schema_version": value["version"]}
        return value

    @field_validator("schema_version")
    @classmethod
    def _known_version(cls, value: str) -> str:
        if value not in SCHEMA_VERSIONS:
            raise ValueError(f"version {value!r} is not supported; supported are {', '.join(SCHEMA_VERSIONS)}")
        return value

    @field_validator("steps")
    @classmethod
    def _unique_steps(cls, value: tuple[StepConfig, ...]) -> tuple[StepConfig, ...]:
        names = [unicodedata.normalize("NFC", step.name).casefold() for step in value]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two steps are named {min(twice)!r}")
        return value

    @model_validator(mode="after")
    def _steps_share_a_network(self) -> Self:
        if len({self.agent_network(step) for step in self.steps}) > 1:
            raise ValueError("steps: the steps' agents have different networks, but share one sandbox")
        return self

    def agent_network(self, step: StepConfig | None = None) -> NetworkOverride:
        """Return the network of the agent's phase: the step's, else the agent's, else the environment's."""
        for table in (step.agent if step else None, self.agent):
            if table is not None and table.network_mode is not None:
                return NetworkOverride(network_mode=table.network_mode, allowed_hosts=table.allowed_hosts)
        found = self.environment
        return NetworkOverride(network_mode=found.network_mode, allowed_hosts=found.allowed_hosts)

    def is_separate(self, step: StepConfig | None = None) -> bool:
        """Return whether the verifier of a step, or of a task without steps, has a sandbox of its own."""
        own = step.verifier if step else self.verifier
        inherits = own.environment_mode is None and own.environment is None
        return self.verifier.separate if inherits else own.separate


def parse_task_config(text: str) -> TaskConfig:
    """Return the configuration of a ``task.toml``.

    Raises:
        CallerError: the text is no TOML, or a value is wrong or unsupported; names the key, as ``environment.gpus``.
    """
    if len(text) > MAX_CHARACTERS:
        raise CallerError(f"has more than {MAX_CHARACTERS >> 10} KiB", field="task.toml")
    try:
        return TaskConfig.model_validate(tomllib.loads(text))
    except ValidationError as error:
        raise validation_refusal(error) from error
    except (ValueError, RecursionError) as error:  # ValueError: TOMLDecodeError, or an integer of too many digits
        raise CallerError(f"is not TOML: {error}", field="task.toml") from error


def resolve_variables(env: Mapping[str, str], variables: Mapping[str, str], table: str) -> dict[str, str]:
    """Replace the values ``${NAME}`` and ``${NAME:-default}`` in ``env`` by entries of ``variables``.

    Raises:
        CallerError: a variable without a default is not set; names the key below ``table``.
    """
    resolved = dict(env)
    for key, value in env.items():
        if match := _VARIABLE.fullmatch(value):
            found = variables.get(match[1], match[2])
            if found is None:
                raise CallerError(f"the variable {match[1]} is not set on this machine", field=f"{table}.{key}")
            resolved[key] = found
    return resolved
