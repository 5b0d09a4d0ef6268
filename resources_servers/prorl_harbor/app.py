# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym resources server of Harbor task folders: settings and task."""

import os
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from nemo_gym_prorl.sandbox.images.builder import DEFAULT
from nemo_gym_prorl.sandbox.supervisor.state_dir import ScratchFolder
from nemo_gym_prorl.servers.task_server import TaskServer, TaskServerConfig
from nemo_gym_prorl.servers.verifier_fixture import verifier_fixture
from nemo_gym_prorl.tasks.harbor.task import HarborTasks
from nemo_gym_prorl.tasks.harbor.verification import VerifierSettings


class ProRLHarborConfig(TaskServerConfig, VerifierSettings):
    """Configuration of the server; see the comments in ``configs/prorl_harbor.yaml``."""

    make_scratch: ClassVar[Any] = ScratchFolder

    host_variables: list[str] = Field(default_factory=list)


class ProRLHarborServer(TaskServer):
    config: ProRLHarborConfig
    own_image: ClassVar[str] = DEFAULT

    def make_task(self) -> HarborTasks:
        return HarborTasks(
            self.config.tool_limits,
            self.config,
            root=Path(__file__).parent,
            variables={name: os.environ[name] for name in self.config.host_variables if name in os.environ},
            snapshot_name=self.snapshot_prefix,
        )


VERIFIER_FIXTURE = verifier_fixture(__file__, ProRLHarborServer)


if __name__ == "__main__":
    ProRLHarborServer.run_webserver()
