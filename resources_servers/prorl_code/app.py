# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym resources server of programming problems: settings and task."""

from pathlib import Path

from pydantic import Field

from nemo_gym_prorl.servers.task_server import TaskServer, TaskServerConfig
from nemo_gym_prorl.servers.verifier_fixture import verifier_fixture
from nemo_gym_prorl.tasks.code.grading import CodeLimits, RewardRule
from nemo_gym_prorl.tasks.code.task import ProgrammingProblems


class ProRLCodeConfig(TaskServerConfig):
    """Configuration of the server; see the comments in ``configs/prorl_code.yaml``."""

    grading_memory_mib: int = Field(default=1024, ge=64)
    test_time_limit_s: float = Field(default=10.0, gt=0)
    tests_time_limit_s: float = Field(default=300.0, gt=0)
    test_output_mib: int = Field(default=16, ge=1, le=256)
    reward: RewardRule = "all"
    tests_folder: Path | None = None


class ProRLCodeServer(TaskServer):
    config: ProRLCodeConfig

    def make_task(self) -> ProgrammingProblems:
        config = self.config
        limits = CodeLimits(
            time_s=config.test_time_limit_s,
            memory_mib=config.grading_memory_mib,
            total_s=config.tests_time_limit_s,
            output_bytes=config.test_output_mib << 20,
        )
        return ProgrammingProblems(config.sandbox_root, config.tool_limits, limits, config.reward, config.tests_folder)


VERIFIER_FIXTURE = verifier_fixture(__file__, ProRLCodeServer)


if __name__ == "__main__":
    ProRLCodeServer.run_webserver()
