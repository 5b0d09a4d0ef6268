# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym resources server of mathematical problems with Python: settings and task."""

from nemo_gym_prorl.tasks import exit_unless_installed


if __name__ == "__main__":
    exit_unless_installed("math")

from typing import ClassVar

from pydantic import Field

from nemo_gym_prorl.sandbox.images.builder import MATH
from nemo_gym_prorl.servers.task_server import TaskServer, TaskServerConfig
from nemo_gym_prorl.servers.verifier_fixture import verifier_fixture
from nemo_gym_prorl.tasks.math.checker import CheckLimits, MathChecker
from nemo_gym_prorl.tasks.math.task import Math


class ProRLMathConfig(TaskServerConfig):
    """Configuration of the server; see the comments in ``configs/prorl_math.yaml``."""

    checking_cpu_s: int = Field(default=5, ge=1)
    checking_memory_mib: int = Field(default=1024, ge=512)
    checking_workers: int = Field(default=2, ge=1)


class ProRLMathServer(TaskServer):
    config: ProRLMathConfig
    own_image: ClassVar[str] = MATH

    def make_task(self) -> Math:
        config = self.config
        limits = CheckLimits(config.checking_cpu_s, config.checking_memory_mib, config.checking_workers)
        return Math(config.sandbox_root, config.tool_limits, MathChecker(limits))


VERIFIER_FIXTURE = verifier_fixture(__file__, ProRLMathServer)


if __name__ == "__main__":
    ProRLMathServer.run_webserver()
