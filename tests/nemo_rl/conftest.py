# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""NeMo RL's real actor, if ``NRL_ROOT`` names a checkout that the tests' interpreter can import.

NeMo RL cannot be installed as a package; ``docs/train-nemo-rl.md`` lists what the interpreter needs.
"""

import functools
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from omegaconf import OmegaConf

from nemo_gym_prorl.nemo_rl.configuration import RECIPES
from tests.policy.vllm_parser import VllmParser


if TYPE_CHECKING:
    from tests.nemo_rl.engine import Engine
    from tests.nemo_rl.trainer import Trainer


REPOSITORY = Path(__file__).parents[2]
ROOT = os.environ.get("NRL_ROOT", "")
NODE_ADDRESS = "127.0.0.2"
KEY = "k3y-of-prorl-code-agent"
VENVS = "/opt/prorl/venvs"


def documented(language: str) -> list[str]:
    """Return the snippets of ``docs/train-nemo-rl.md`` in a language."""
    text = (REPOSITORY / "docs/train-nemo-rl.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def _reason_to_skip() -> str | None:
    if not ROOT:
        return "NRL_ROOT names no checkout of NeMo RL"
    if not Path(ROOT, "nemo_rl").is_dir():
        return f"NRL_ROOT={ROOT} is no checkout of NeMo RL"
    missing = [name for name in ("torch", "ray", "transformers") if importlib.util.find_spec(name) is None]
    return f"this environment cannot import NeMo RL: no {', '.join(missing)}" if missing else None


needs_nemo_rl = pytest.mark.skipif(_reason_to_skip() is not None, reason=_reason_to_skip() or "")


@pytest.fixture(scope="session")
def nemo_rl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make NeMo RL importable and start Ray on loopback; give the driver's working directory."""
    reason = _reason_to_skip()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("nemo-rl")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        # The actor and its servers get the driver's environment.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), ROOT]))
        patch.setenv("NO_VCS_VERSION", "1")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_enable_worker_prestart", "0")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("PRORL_TEST_KEY", KEY)
        patch.chdir(folder)
        import ray

        # Not pytest's own folder: a Unix socket's path must be short.
        sockets = Path(tempfile.mkdtemp(prefix="prorl-r-", dir="/tmp"))

        ray.init(
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=80 * 1024 * 1024,
            # Address of a node, which differs from the default address of servers.
            _node_ip_address=NODE_ADDRESS,
            _temp_dir=str(sockets),
        )
        try:
            yield folder
        finally:
            ray.shutdown()
            shutil.rmtree(sockets, ignore_errors=True)


@pytest.fixture(scope="session")
def engine(nemo_rl: Path) -> Iterator["Engine"]:
    """Engine behind the session's servers, with the parser of a recipe."""
    from tests.nemo_rl.engine import Engine

    vllm = OmegaConf.load(RECIPES / "models/qwen3-4b.yaml").policy.generation.vllm_cfg
    with VllmParser("<tool_call>", "</tool_call>") as parsers:
        yield Engine(functools.partial(parsers, vllm.http_server_serving_chat_kwargs.tool_parser))


@pytest.fixture(scope="session")
def engine_url(engine: "Engine") -> Iterator[str]:
    """Base URL of the engine."""
    from tests.nemo_rl.engine import serving

    with serving(engine) as base_url:
        yield base_url


def documented_servers(folder: Path, environments: str) -> dict[str, Any]:
    """Make the environments of ``docs/train-nemo-rl.md``; return its ``env.nemo_gym`` with a counting server."""
    venvs = str(folder / environments)
    exec(documented("python")[0].replace(VENVS, venvs), {})
    block, *_ = documented("yaml")
    config = OmegaConf.to_container(OmegaConf.create(block.replace(VENVS, venvs)))["env"]["nemo_gym"]
    config["config_paths"].append(str(folder / "resources_servers/counting/counting.yaml"))
    return config


@pytest.fixture(scope="session")
def trainer(nemo_rl: Path, engine_url: str, state: Path) -> Iterator["Trainer"]:
    """Actor with the servers of ``docs/train-nemo-rl.md``, a counting environment, and a key for one agent."""
    import ray

    from tests.nemo_rl.trainer import Trainer

    trainer = Trainer([engine_url], nemo_rl, documented_servers(nemo_rl, "venvs"))
    try:
        yield trainer
    finally:
        ray.get(trainer.actor.shutdown.remote())
