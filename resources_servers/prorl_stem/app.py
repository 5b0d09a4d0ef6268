# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Questions of science with search and Python, as a Gym resources server: its settings and its task."""

from nemo_gym_prorl.tasks.extras import exit_unless_installed, require_extras


if __name__ == "__main__":
    exit_unless_installed("stem")

from pathlib import Path
from typing import Any, ClassVar

from nemo_gym.config_types import ModelServerRef
from omegaconf import OmegaConf
from pydantic import Field

from nemo_gym_prorl.sandbox.images.builder import MATH
from nemo_gym_prorl.servers.task_models import TaskModel
from nemo_gym_prorl.servers.task_server import TaskServer, TaskServerConfig
from nemo_gym_prorl.servers.verifier_fixture import verifier_fixture
from nemo_gym_prorl.tasks.math.checker import CheckLimits, MathChecker
from nemo_gym_prorl.tasks.stem.judge import Judge
from nemo_gym_prorl.tasks.stem.quantities import RELATIVE_TOLERANCE
from nemo_gym_prorl.tasks.stem.search import SearchSettings, SearchTool, engine_of
from nemo_gym_prorl.tasks.stem.task import Rules, Stem
from nemo_gym_prorl.tasks.task import AsyncCloseable


SAMPLE = Path(__file__).parent / "data/passages.jsonl"
"""What is searched where no index is named."""


class ProRLStemConfig(TaskServerConfig):
    """Configuration of the server; see the comments in ``configs/prorl_stem.yaml``."""

    search: SearchSettings = SearchSettings()
    checking_cpu_s: int = Field(default=5, ge=1)
    checking_memory_mib: int = Field(default=1024, ge=512)
    checking_workers: int = Field(default=2, ge=1)
    tolerance: float = Field(default=RELATIVE_TOLERANCE, ge=0, lt=1)
    judge_model_server: ModelServerRef | None = None
    judge_responses_create_params: dict[str, Any] = Field(default_factory=dict)
    judge_timeout_s: float = Field(default=120.0, gt=0)
    judge_concurrency: int = Field(default=32, ge=1)


class ProRLStemServer(TaskServer):
    """See the module's description."""

    config: ProRLStemConfig
    own_image: ClassVar[str] = MATH

    def make_task(self) -> Stem:
        """The task with its search engine, its checker of formulas and its judge, if there is one."""
        require_extras("stem")
        config = self.config
        engine = engine_of(config.search, SAMPLE)
        formulas = MathChecker(CheckLimits(config.checking_cpu_s, config.checking_memory_mib, config.checking_workers))
        holds: list[AsyncCloseable] = [engine, formulas]
        judge = None
        if config.judge_model_server is not None:
            model = TaskModel(
                OmegaConf.to_container(self.server_client.global_config_dict, resolve=True),
                config.judge_model_server.name,
                config.judge_responses_create_params,
                timeout_s=config.judge_timeout_s,
                concurrency=config.judge_concurrency,
            )
            judge = Judge(model, config.judge_model_server.name)
            holds.append(model)
        search = SearchTool(engine, config.search)
        rules = Rules(formulas, config.tolerance)
        return Stem(config.sandbox_root, config.tool_limits, search, rules, judge, holds)


VERIFIER_FIXTURE = verifier_fixture(__file__, ProRLStemServer)


if __name__ == "__main__":
    ProRLStemServer.run_webserver()
