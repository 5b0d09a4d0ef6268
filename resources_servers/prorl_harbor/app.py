# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym resources server of Harbor task folders: settings and task."""

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from nemo_gym_prorl.sandbox.images.builder import DEFAULT
from nemo_gym_prorl.sandbox.supervisor.state_dir import ScratchFolder, state_root, sweep
from nemo_gym_prorl.servers.task_server import TaskServer, TaskServerConfig
from nemo_gym_prorl.servers.verifier_fixture import verifier_fixture
from nemo_gym_prorl.tasks.harbor.task import HarborTasks
from nemo_gym_prorl.tasks.harbor.verification import VerifierSettings
from nemo_gym_prorl.tasks.harbor.verifier_tools import BIN, PYTHON, WHEELS


class ProRLHarborConfig(TaskServerConfig):
    """Configuration of the server; see the comments in ``configs/prorl_harbor.yaml``."""

    strict: Literal["auto"] | bool = "auto"
    verifier_tools: Path | None = None
    host_variables: list[str] = Field(default_factory=list)
    reward_key: str = Field(default="reward", min_length=1)
    output_field_kib: int = Field(default=32, ge=0)
    verifier_logs_mib: int = Field(default=256, ge=1)
    artifacts_folder: Path | None = None

    @model_validator(mode="after")
    def _folders_are_complete(self) -> Self:
        for setting in ("verifier_tools", "artifacts_folder"):
            folder = getattr(self, setting)
            if folder is not None and not (folder.is_absolute() and folder.is_dir()):
                raise ValueError(f"{setting}: must be the absolute path of a folder that exists, not {folder}")
        if self.verifier_tools is not None:
            for name in (BIN, PYTHON, WHEELS):
                if not (self.verifier_tools / name).is_dir():
                    raise ValueError(
                        f"verifier_tools: there is no folder {self.verifier_tools / name}: prorl image tools"
                    )
        return self


class ProRLHarborServer(TaskServer):
    config: ProRLHarborConfig
    own_image: ClassVar[str] = DEFAULT

    def make_task(self) -> HarborTasks:
        """Create the task from the settings, and remove the folders of dead servers in a background thread."""
        threading.Thread(target=_sweep, daemon=True).start()
        config = self.config
        verifier = VerifierSettings(
            ScratchFolder,
            config.verifier_tools,
            config.output_field_kib,
            config.verifier_logs_mib,
            config.reward_key,
            config.artifacts_folder,
        )
        return HarborTasks(
            config.tool_limits,
            verifier,
            config.strict,
            root=Path(__file__).parent,
            variables={name: os.environ[name] for name in config.host_variables if name in os.environ},
            snapshot_name=self.snapshot_prefix,
        )


def _sweep() -> None:
    """Remove the folders of dead servers. The supervisor does the same, but starts only with the first sandbox."""
    with suppress(OSError):
        sweep(state_root())


VERIFIER_FIXTURE = verifier_fixture(__file__, ProRLHarborServer)


if __name__ == "__main__":
    ProRLHarborServer.run_webserver()
