# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym resources server of software engineering tasks: settings and task."""

from nemo_gym_prorl.tasks import exit_unless_installed


if __name__ == "__main__":
    exit_unless_installed("swe")

from typing import ClassVar

from nemo_gym_prorl.servers.task_server import TaskServer, TaskServerConfig
from nemo_gym_prorl.servers.verifier_fixture import verifier_fixture
from nemo_gym_prorl.tasks.swe.instance import SweLimits
from nemo_gym_prorl.tasks.swe.task import SoftwareEngineering


class ProRLSweConfig(TaskServerConfig, SweLimits):
    """Configuration of the server; see the comments in ``configs/prorl_swe.yaml``."""


class ProRLSweServer(TaskServer):
    config: ProRLSweConfig
    rows_name_images: ClassVar[bool] = True

    def make_task(self) -> SoftwareEngineering:
        return SoftwareEngineering(self.config.tool_limits, self.config)


VERIFIER_FIXTURE = verifier_fixture(__file__, ProRLSweServer)


if __name__ == "__main__":
    ProRLSweServer.run_webserver()
