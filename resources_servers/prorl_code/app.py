# SPDX-License-Identifier: Apache-2.0
"""HumanEval in sandboxes, as a Gym resources server: its settings and its task, served by ``nemo_gym_prorl``."""

from pydantic import Field

from nemo_gym_prorl.task_server import TaskServer, TaskServerConfig
from nemo_gym_prorl.tasks.humaneval.grading import GradingLimits
from nemo_gym_prorl.tasks.humaneval.task import HumanEval


class ProRLCodeConfig(TaskServerConfig):
    """Configuration of the server; see the comments in ``configs/prorl_code.yaml``."""

    grading_timeout_s: float = Field(default=20.0, gt=0)
    grading_memory_mib: int = Field(default=1024, ge=64)


class ProRLCodeServer(TaskServer):
    """See the module's description."""

    config: ProRLCodeConfig

    def make_task(self) -> HumanEval:
        """HumanEval within the configured bounds."""
        grading = GradingLimits(self.config.grading_timeout_s, self.config.grading_memory_mib)
        return HumanEval(self.config.sandbox_root, self.config.tool_limits, grading)


if __name__ == "__main__":
    ProRLCodeServer.run_webserver()
