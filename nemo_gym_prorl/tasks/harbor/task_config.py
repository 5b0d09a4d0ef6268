# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Configuration of a Harbor task: the tables of ``task.toml``, schema versions 1.0 to 1.4. Pure.

Field names and defaults are those of the format. Unknown keys are ignored, as the format asks. A feature that changes
the task and is not supported here (GPU, TPU, Compose, another operating system) is refused by name.

Durations are in seconds, memory and storage in MiB. ``${NAME}`` and ``${NAME:-default}`` in ``env`` tables stand for
variables of the machine that runs the environment server.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from nemo_gym_prorl.failures import CallerError


SCHEMA_VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NetworkMode = Literal["public", "no-network", "allowlist"]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])i?B?\s*", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


class _Table(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class NetworkOverride(_Table):
    """Network of one phase; ``None`` keeps the network of the environment."""

    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _hosts_need_an_allowlist(self) -> Self:
        if self.allowed_hosts and self.network_mode not in ("allowlist", None):
            raise ValueError("allowed_hosts: needs network_mode 'allowlist'")
        return self


class Healthcheck(_Table):
    """Command that must succeed before the agent starts."""

    command: str = Field(min_length=1)
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: float = Field(default=0.0, ge=0)
    start_interval_sec: Seconds = 5.0
    retries: int = Field(default=3, ge=1)


class Artifact(_Table):
    """File or folder of the agent's sandbox that is kept, and handed to a separate verifier.

    Attributes:
        source: absolute path inside, or relative to the working folder.
        destination: path relative to the folder of artifacts; the source's by default.
        exclude: glob patterns of names below ``source`` that are left out.
        service: name of a Compose service; only ``main`` is supported.
    """

    source: str = Field(min_length=1)
    destination: str | None = None
    exclude: tuple[str, ...] = ()
    service: Literal["main"] = "main"

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


class CollectHook(_Table):
    """Command that runs after the agent and before artifacts are collected."""

    command: str = Field(min_length=1)
    timeout_sec: Seconds = 60.0
    user: str | int | None = None
    service: Literal["main"] = "main"


class AgentConfig(NetworkOverride):
    """Table ``[agent]``; ``timeout_sec`` ``None`` is no limit."""

    timeout_sec: Seconds | None = None
    user: str | int | None = None


class EnvironmentConfig(NetworkOverride):
    """Table ``[environment]``, also that of a separate verifier."""

    network_mode: NetworkMode = "public"
    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: Literal["linux"] = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: Literal[0] | None = None
    tpu: Literal[None] = None
    env: Mapping[str, str] = Field(default_factory=dict)
    healthcheck: Healthcheck | None = None
    workdir: str | None = Field(default=None, pattern=r"^/")

    @model_validator(mode="before")
    @classmethod
    def _upgrade(cls, value: Any) -> Any:
        """Rename the keys of older schema versions."""
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
        if (internet := table.pop("allow_internet", None)) is not None:
            mode = "public" if internet else "no-network"
            if table.setdefault("network_mode", mode) != mode:
                raise ValueError("allow_internet: contradicts network_mode; remove one")
        return table


class VerifierConfig(NetworkOverride):
    """Table ``[verifier]``; ``environment_mode`` ``None`` is ``separate`` if there is an ``environment``."""

    timeout_sec: Seconds = 600.0
    env: Mapping[str, str] = Field(default_factory=dict)
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentConfig | None = None
    collect: tuple[CollectHook, ...] = ()

    @property
    def separate(self) -> bool:
        """Whether the verifier gets a fresh sandbox with the artifacts only."""
        return self.environment_mode == "separate" or (self.environment_mode is None and self.environment is not None)


class SolutionConfig(_Table):
    """Table ``[solution]``."""

    env: Mapping[str, str] = Field(default_factory=dict)


class StepConfig(_Table):
    """An entry of ``[[steps]]``.

    Attributes:
        name: name of its folder below ``steps``.
        min_reward: reward below which the later steps do not count: of ``reward``, or per key.
    """

    name: str = Field(pattern=r"^[\w][\w.-]*$")
    agent: AgentConfig = AgentConfig()
    verifier: VerifierConfig = VerifierConfig()
    min_reward: float | Mapping[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: tuple[Artifact, ...] = ()


class TaskConfig(_Table):
    """All tables of ``task.toml`` that decide how a task runs."""

    schema_version: str = "1.4"
    agent: AgentConfig = AgentConfig()
    verifier: VerifierConfig = VerifierConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    solution: SolutionConfig = SolutionConfig()
    artifacts: tuple[Artifact, ...] = ()
    steps: tuple[StepConfig, ...] = ()
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"

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
        names = [step.name.lower() for step in value]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two steps are named {min(twice)!r}")
        return value


def parse_task_config(text: str) -> TaskConfig:
    """Return the configuration of a ``task.toml``.

    Raises:
        CallerError: not TOML, or a value is wrong or unsupported; names the key, for example ``environment.gpus``.
    """
    try:
        return TaskConfig.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise CallerError(f"is not TOML: {error}", field="task.toml") from error
    except ValidationError as error:
        raise validation_refusal(error) from error


def validation_refusal(error: ValidationError) -> CallerError:
    """Return the first error of a validation as a refusal that names the key."""
    fault = error.errors(include_url=False, include_context=False)[0]
    path, message = [str(part) for part in fault["loc"]], fault["msg"].removeprefix("Value error, ")
    if named := re.fullmatch(r"(\w+): (.*)", message, re.DOTALL):
        path.append(named[1])
        message = named[2]
    given = "" if fault["type"] in ("missing", "value_error") else f" (given: {fault['input']!r:.100})"
    return CallerError(f"{message}{given}", field=".".join(path) or None)


def resolve_variables(env: Mapping[str, str], variables: Mapping[str, str], table: str) -> dict[str, str]:
    """Replace ``${NAME}`` and ``${NAME:-default}`` by variables of the machine.

    Raises:
        CallerError: a variable without a default is not set; names the key below ``table``.
    """

    resolved = {}
    for key, value in env.items():
        for match in _VARIABLE.finditer(value):
            if match[2] is None and match[1] not in variables:
                raise CallerError(f"the variable {match[1]} is not set on this machine", field=f"{table}.{key}")
        resolved[key] = _VARIABLE.sub(lambda match: variables.get(match[1], match[2] or ""), value)
    return resolved


def working_folder(config: TaskConfig, image_workdir: str) -> str:
    """Return the folder in which commands of the agent and the verifier run."""
    return posixpath.normpath(config.environment.workdir or image_workdir or "/")
