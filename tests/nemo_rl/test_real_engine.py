# SPDX-License-Identifier: Apache-2.0
"""A recipe's first steps with nothing kind in between: a real vLLM samples on the CPU behind NeMo RL's own chat
server, whose parsers find the calls; the environment's tools decide the reward; NeMo RL's controller and loss train
the weights that are sampled from next."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.nemo_rl.settings import settings_of
from nemo_gym_prorl.nemo_rl.shaping import Shaping
from tests.nemo_rl import tiny
from tests.nemo_rl.conftest import REPOSITORY, ROOT, VENVS, documented
from tests.policy.engines import answers, begin, free_port, kill


PYTHON = os.environ.get("NRL_VLLM_PYTHON")
"""vLLM wants a newer openai than Gym, so NeMo RL's chat server has an environment of its own, as in NeMo RL."""
pytestmark = [
    pytest.mark.engine,
    pytest.mark.gym,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(PYTHON is None, reason="NRL_VLLM_PYTHON names no Python with both NeMo RL and vLLM"),
]

STEPS, PROMPTS, GENERATIONS = 3, 2, 4
START_S = 600
SMALLER = [
    f"++grpo.num_prompts_per_step={PROMPTS}",
    f"++grpo.num_generations_per_prompt={GENERATIONS}",
    f"++grpo.max_num_steps={STEPS}",
    "++prorl.mini_batches=1",
    "++prorl.filter_on=reward",
    "++async_rl.max_inflight_prompts=4",
    "++async_rl.stall_watchdog.interval_s=1",
    f"++policy.max_total_sequence_length={tiny.CONTEXT}",
    "++policy.generation.max_new_tokens=64",
    "++policy.generation.vllm_cfg.enable_vllm_metrics_logger=false",
    "++data.num_workers=0",
    "++checkpointing.enabled=false",
    "++logger.monitor_gpus=false",
    "++prorl.overlong=null",
    "++prorl.agent=counting_agent",
]


def recipe(folder: Path, *overrides: str) -> dict[str, Any]:
    """A recipe as it ships, made small, with rows of the counting environment."""
    from nemo_gym_prorl.nemo_rl.configuration import read
    from tests.nemo_rl.trainer import ADD_TOOL

    data = folder / "rows.jsonl"
    with data.open("w") as rows:
        for number in range(12):
            asked = {"input": [{"role": "user", "content": tiny.question(number)}], "tools": [ADD_TOOL]}
            agent = {"type": "responses_api_agents", "name": "counting_agent"}
            rows.write(json.dumps({"agent_ref": agent, "responses_create_params": asked}) + "\n")
    places = [f"++data.train.data_path={data}", f"++logger.log_dir={folder / 'logs'}"]
    return read("dapo-code-qwen3-4b", (), [*SMALLER, *places, *overrides])


@contextlib.contextmanager
def chat_server(model: Path, generation: dict[str, Any], log: Path) -> Iterator[str]:
    """NeMo RL's chat server; gives its base URL once it answers."""
    port = free_port()
    command = [str(PYTHON), "-m", "tests.nemo_rl.chat_server", str(model), str(port), json.dumps(generation)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(ROOT)]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    process = begin(command, log, environment)
    try:
        deadline = time.monotonic() + START_S
        while not answers(f"http://127.0.0.1:{port}/openapi.json"):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"NeMo RL's chat server did not start: {log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        kill(process)


@pytest.fixture(scope="module")
def model(nemo_rl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.nemo_rl.trainer import ADD_TOOL

    if taught := os.environ.get("PRORL_TINY_COUNTER"):
        return Path(taught)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny.make(folder, ADD_TOOL)
    return folder


@contextlib.contextmanager
def gym_servers(engine: str, folder: Path, model: Path, log: Path) -> Iterator[Any]:
    """NeMo RL's actor with the counting environment, whose policy is that engine."""
    import ray
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer

    from tests.nemo_rl.trainer import Trainer

    venvs = str(folder / "venvs-of-the-real-engine")
    exec(documented("python")[0].replace(VENVS, venvs), {})
    block, *_ = documented("yaml")
    config = OmegaConf.to_container(OmegaConf.create(block.replace(VENVS, venvs)))["env"]["nemo_gym"]
    config["config_paths"].append(str(folder / "resources_servers/counting/counting.yaml"))
    # Of a CPU that samples for all at once.
    config["counting_agent"] = {"responses_api_agents": {"prorl_agent": {"budgets": {"run": 120}, "max_steps": 6}}}
    trainer = Trainer([engine], folder, config, model="tiny", tokenizer=AutoTokenizer.from_pretrained(model))
    try:
        yield trainer
    finally:
        ray.get(trainer.actor.shutdown.remote())


def test_the_first_steps_of_a_recipe(
    nemo_rl: Path, model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import torch
    from nemo_rl.algorithms.metric_utils import SetupTimingMetrics
    from nemo_rl.algorithms.single_controller_utils import MasterConfig
    from nemo_rl.environments.nemo_gym import setup_nemo_gym_config

    from nemo_gym_prorl.nemo_rl.single_controller import train
    from nemo_gym_prorl.nemo_rl.validation import validation_of
    from tests.nemo_rl.controller import Lent, arguments_of, logged
    from tests.nemo_rl.tiny_trainer import FromDisk, TinyPolicy

    config = recipe(tmp_path)
    with (
        chat_server(model, config["policy"]["generation"], tmp_path / "vllm.log") as engine,
        gym_servers(engine, nemo_rl, model, tmp_path) as gym,
    ):
        master = MasterConfig(**config)
        setup_nemo_gym_config(master, None)
        arguments = arguments_of(master, tmp_path, [engine], {"nemo_gym": Lent(gym.actor)})
        arguments.trainer_handle = TinyPolicy(arguments.dp_client, tmp_path, model)
        arguments.weight_synchronizer = FromDisk([engine], tmp_path)
        result = train(master, arguments, SetupTimingMetrics(), settings_of(config), validation_of(config))
    assert result["train_steps"] == STEPS

    told = logged(tmp_path / "logs")
    for name in sorted(told):
        if name.startswith(("prorl/", "train/loss", "train/reward", "train/grad")):
            print(name, [round(value, 4) for value in told[name]])
    assert told["prorl/turns"][-1] > 1
    assert told["prorl/tool_calls"][-1] > 0
    assert told["prorl/without_loss_share"][-1] == 0
    assert told["prorl/reward/counting"][-1] > 0

    from transformers import AutoTokenizer

    tokenizer, shape = AutoTokenizer.from_pretrained(model), Shaping.of(settings_of(config))
    furthest = 0.0
    for step in range(STEPS):
        for chunk in torch.load(tmp_path / f"step-{step}.pt", weights_only=False):
            for row in range(len(chunk["ids"])):
                length = int(chunk["input_lengths"][row])
                ids, mask = chunk["input_ids"][row, :length], chunk["token_mask"][row, :length].bool()
                said = tokenizer.decode(ids[mask])
                # What the tool was called with, as far as it was a call, is what the reward is.
                assert chunk["total_reward"][row].item() == pytest.approx(shape(added(said) / 10, 0)), said
                if step == 0:  # of the very weights that it was sampled from
                    off = (chunk["prev_logprobs"] - chunk["generation_logprobs"])[row, :length][mask].abs().max()
                    furthest = max(furthest, off.item())
    print(f"log-probabilities of trainer and engine differ by {furthest:.2g} at most")
    assert furthest < 1e-3


def added(said: str) -> int:
    """What the turns of a rollout added up to, by hand: a turn with a call that can't be read makes none."""
    total = 0
    for turn in said.split("<|im_end|>"):
        try:
            calls = [json.loads(call.split("</tool_call>")[0]) for call in turn.split("<tool_call>")[1:]]
            total += sum(int(call["arguments"]["number"]) for call in calls if call["name"] == "add")
        except (ValueError, KeyError, TypeError):
            continue
    return total
