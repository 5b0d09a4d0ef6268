# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym resources server of software engineering tasks: settings and task."""

from nemo_gym_prorl.tasks import exit_unless_installed


if __name__ == "__main__":
    exit_unless_installed("swe")

from typing import ClassVar

from pydantic import Field

from nemo_gym_prorl.servers.task_server import TaskServer, TaskServerConfig
from nemo_gym_prorl.servers.verifier_fixture import verifier_fixture
from nemo_gym_prorl.tasks.swe.grading import GradingLimits
from nemo_gym_prorl.tasks.swe.patches import PatchLimits
from nemo_gym_prorl.tasks.swe.task import SoftwareEngineering
from nemo_gym_prorl.tasks.swe.testing import TestLimits


class ProRLSweConfig(TaskServerConfig):
    """Configuration of the server; see the comments in ``configs/prorl_swe.yaml``."""

    repository_timeout_s: float = Field(default=180.0, gt=0)
    patch_file_kib: int = Field(default=4096, ge=1)
    patch_total_kib: int = Field(default=32_768, ge=1)
    patch_files: int = Field(default=5000, ge=1)
    test_timeout_s: float = Field(default=1800.0, gt=0)
    before_tests_timeout_s: float = Field(default=900.0, gt=0)
    log_kib: int = Field(default=32_768, ge=16)
    parse_timeout_s: float = Field(default=60.0, gt=0)
    patch_field_kib: int = Field(default=4096, ge=1)
    log_field_kib: int = Field(default=8, ge=0)


class ProRLSweServer(TaskServer):
    config: ProRLSweConfig
    rows_name_images: ClassVar[bool] = True

    def make_task(self) -> SoftwareEngineering:
        config = self.config
        patches = PatchLimits(
            config.repository_timeout_s, config.patch_file_kib, config.patch_total_kib, config.patch_files
        )
        tests = TestLimits(config.test_timeout_s, config.before_tests_timeout_s, config.log_kib)
        grading = GradingLimits(tests, config.parse_timeout_s, config.patch_field_kib, config.log_field_kib)
        return SoftwareEngineering(config.tool_limits, patches, grading)


VERIFIER_FIXTURE = verifier_fixture(__file__, ProRLSweServer)


if __name__ == "__main__":
    ProRLSweServer.run_webserver()
