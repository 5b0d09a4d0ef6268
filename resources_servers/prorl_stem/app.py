# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym resources server of science questions with search and Python: settings and task."""

from nemo_gym_prorl.tasks import exit_unless_installed, require_extras


if __name__ == "__main__":
    exit_unless_installed("stem")

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from nemo_gym_prorl.sandbox.images.builder import MATH
from nemo_gym_prorl.servers.gym_client import JudgeModelConfig
from nemo_gym_prorl.servers.task_server import TaskServer, TaskServerConfig
from nemo_gym_prorl.servers.verifier_fixture import verifier_fixture
from nemo_gym_prorl.tasks.math.checker import CheckLimits, MathChecker
from nemo_gym_prorl.tasks.stem.judge import Judge
from nemo_gym_prorl.tasks.stem.quantities import RELATIVE_TOLERANCE
from nemo_gym_prorl.tasks.stem.search import SearchSettings, SearchTool, engine_of
from nemo_gym_prorl.tasks.stem.task import Rules, Stem


class ProRLStemConfig(TaskServerConfig, JudgeModelConfig):
    """Configuration of the server; see the comments in ``configs/prorl_stem.yaml``."""

    search: SearchSettings = SearchSettings()
    checking_cpu_s: int = Field(default=5, ge=1)
    checking_memory_mib: int = Field(default=1024, ge=512)
    checking_workers: int = Field(default=2, ge=1)
    tolerance: float = Field(default=RELATIVE_TOLERANCE, ge=0, lt=1)


class ProRLStemServer(TaskServer):
    config: ProRLStemConfig
    own_image: ClassVar[str] = MATH

    def make_task(self) -> Stem:
        require_extras("stem")
        config = self.config
        engine = engine_of(config.search, Path(__file__).parent / "data/passages.jsonl")
        formulas = MathChecker(CheckLimits(config.checking_cpu_s, config.checking_memory_mib, config.checking_workers))
        model = config.judge_model(self.server_client.global_config_dict)
        judge, judges = (Judge(model, model.name), [model]) if model else (None, [])
        search, rules = SearchTool(engine, config.search), Rules(formulas, config.tolerance)
        return Stem(config.sandbox_root, config.tool_limits, search, rules, judge, [engine, formulas, *judges])


VERIFIER_FIXTURE = verifier_fixture(__file__, ProRLStemServer)


if __name__ == "__main__":
    ProRLStemServer.run_webserver()
