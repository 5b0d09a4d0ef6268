# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A Harbor task on this machine: row, folder and the settings of each step.

A task without ``[[steps]]`` has one step, ``None``. A step's setting overrides the task's.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.network_access import Network
from nemo_gym_prorl.tasks.harbor.artifacts import ARTIFACTS_FOLDER
from nemo_gym_prorl.tasks.harbor.task_config import (
    Artifact,
    CollectHook,
    EnvironmentConfig,
    NetworkOverride,
    StepConfig,
    TaskConfig,
    resolve_variables,
)
from nemo_gym_prorl.tasks.harbor.task_folder import HarborRow, VerifierImage, folder_digest
from nemo_gym_prorl.tasks.task import SandboxNeeds


Step = StepConfig | None


@dataclass(frozen=True, slots=True)
class LocatedTask:
    """A task on this machine."""

    row: HarborRow
    folder: Path
    variables: Mapping[str, str]
    """Environment variables of the server that ``env`` tables may use."""

    @classmethod
    def of(cls, row: Mapping[str, object], root: Path, variables: Mapping[str, str]) -> LocatedTask:
        """Return the task of a row, whose folder may be relative to ``root`` and is not read. Raises CallerError with
        the field if the row is invalid, or names an environment variable that is not set."""
        parsed = HarborRow.parse(row)
        task = cls(parsed, root / parsed.harbor.folder, variables)
        for step in task.steps:
            task.verifier_env(step)
            task.verifier_needs(step)
        task.solution_env()
        return task

    def check_folder(self) -> None:
        """Check that the folder exists and has not changed since the row was made; raises CallerError otherwise."""
        if not self.folder.is_dir():
            raise CallerError(f"there is no folder {self.folder} on this machine", field="harbor.folder")
        if folder_digest(self.folder) != self.row.harbor.digest:
            reason = "the folder's files changed since the row was made; make the row again"
            raise CallerError(reason, field="harbor.digest")

    @property
    def config(self) -> TaskConfig:
        return self.row.harbor.config

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.config.steps or (None,)

    @property
    def has_solution(self) -> bool:
        return all(self.solution(step) is not None for step in self.steps)

    def needs(self) -> SandboxNeeds:
        return self.row.needs(self.env(self.config.environment))

    def verifier_needs(self, step: Step) -> SandboxNeeds:
        needs = replace(self.needs(), network=self._verifier_network(step))
        if not self.config.is_separate(step):
            return needs
        own = self.separate_environment(step)
        return replace(
            needs,
            image=self.separate_image(step).image,
            env=self.env(own),
            cpu=own.cpus or needs.cpu,
            memory_mib=own.memory_mb or needs.memory_mib,
            disk_gib=math.ceil(own.storage_mb / 1024) if own.storage_mb else needs.disk_gib,
        )

    def _verifier_network(self, step: Step) -> Network | None:
        """Return the network of the tests: the verifier's, its environment's, else the row's; ``None``: the server's.
        The row's network does not count if it is one that the task sets for the agent's phase only."""
        agents = [self.config.agent, *([step.agent] if step else [])]
        agent_differs = any(table.network_mode is not None for table in agents)
        own = self.separate_environment(step) if self.config.is_separate(step) else self.config.environment
        tables: list[NetworkOverride] = [*([step.verifier] if step else []), self.config.verifier]
        if "network_mode" in own.model_fields_set and (agent_differs or own is not self.config.environment):
            tables.append(own)
        found = next((table for table in tables if table.network_mode is not None), None)
        if found is None:
            return None if agent_differs else self.row.network
        return _mode(found)

    def separate_environment(self, step: Step) -> EnvironmentConfig:
        """Return a separate verifier's environment: the step's own, else that of the task's verifier or the task."""
        own = step.verifier.environment if step else None
        return own or self.config.verifier.environment or self.config.environment

    def separate_image(self, step: Step) -> VerifierImage:
        return self.row.harbor.verifier_images.get(step.name if step else "") or VerifierImage(image=self.row.image)

    def working_folder(self, published: str) -> str:
        """Return the agent's working folder: the task's, the Dockerfile's, the image's (``published``), else ``/``."""
        return posixpath.normpath(self.config.environment.workdir or self.row.harbor.image_workdir or published or "/")

    def env(self, table: EnvironmentConfig) -> dict[str, str]:
        """Return the environment variables that a table sets for all commands of a sandbox."""
        return resolve_variables(table.env, self.variables, "harbor.config.environment.env")

    def verifier_env(self, step: Step) -> dict[str, str]:
        own = {**self.config.verifier.env, **(step.verifier.env if step else {})}
        return resolve_variables(own, self.variables, "harbor.config.verifier.env")

    def solution_env(self) -> dict[str, str]:
        own = resolve_variables(self.config.solution.env, self.variables, "harbor.config.solution.env")
        return {"DEBIAN_FRONTEND": "noninteractive", **own}

    def agent_user(self, step: Step) -> str | int | None:
        """Return the user that runs the agent's commands; ``None`` for the image's user."""
        own = step.agent.user if step else None
        return self.config.agent.user if own is None else own

    def verifier_user(self, step: Step) -> str | int | None:
        """Return the user that runs the tests; ``None`` for the image's user."""
        own = step.verifier.user if step else None
        return self.config.verifier.user if own is None else own

    def agent_timeout_s(self, step: Step) -> float | None:
        return (step.agent.timeout_sec if step else None) or self.config.agent.timeout_sec

    def agent_total_s(self) -> float | None:
        """Return the agent's time limit for all steps, in seconds; ``None`` if a step has no limit."""
        limits = [self.agent_timeout_s(step) for step in self.steps]
        return None if None in limits else sum(filter(None, limits))

    def verifier_timeout_s(self, step: Step) -> float:
        own = step.verifier if step and "timeout_sec" in step.verifier.model_fields_set else self.config.verifier
        return own.timeout_sec

    def hooks(self, step: Step) -> tuple[CollectHook, ...]:
        """Return the commands that run after the agent has ended a step."""
        return (*self.config.verifier.collect, *(step.verifier.collect if step else ()))

    def artifacts(self, step: Step) -> tuple[Artifact, ...]:
        """Return the declared artifacts, preceded by :data:`.artifacts.ARTIFACTS_FOLDER` if that is not declared."""
        own = (*self.config.artifacts, *(step.artifacts if step else ()))
        is_declared = any(one.source.rstrip("/") == ARTIFACTS_FOLDER for one in own)
        return own if is_declared else (Artifact(source=ARTIFACTS_FOLDER), *own)

    def step_folder(self, step: StepConfig) -> Path:
        return self.folder / "steps" / step.name

    def tests(self, step: Step) -> list[Path]:
        """Return the folders with tests; a file of a later folder replaces the same file of an earlier folder."""
        folders = [self.folder / "tests", *([self.step_folder(step) / "tests"] if step else [])]
        return [folder for folder in folders if folder.is_dir()]

    def solution(self, step: Step) -> Path | None:
        """Return the folder of the reference solution: the step's, else the task's; ``None`` without a solution."""
        folders = [*([self.step_folder(step) / "solution"] if step else []), self.folder / "solution"]
        return next((folder for folder in folders if (folder / "solve.sh").is_file()), None)


def _mode(table: NetworkOverride) -> Network:
    """Convert a table's ``network_mode`` to the notation of rows; without a mode, ``public``."""
    if table.network_mode == "allowlist":
        return table.allowed_hosts
    return "none" if table.network_mode == "no-network" else "public"
