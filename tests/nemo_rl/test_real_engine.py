# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Recipes' first steps with nothing kind in between: a real vLLM samples on the CPU behind NeMo RL's own chat
server, whose parsers find the calls; the environment's tools decide the reward; NeMo RL's controller and loss train
the weights that are sampled from next."""

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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

PROMPTS, GENERATIONS = 2, 4
RECIPES = {
    "dapo-code-qwen3-4b": 3,
    "dapo-swe-qwen3-30b-a3b": 1,
    "dapo-swe-qwen3-8b": 1,
    "dapo-math-qwen3-4b": 1,
}
"""Each with its own parsers, and so many optimizer steps."""
UNTAUGHT = os.environ.get("PRORL_UNTAUGHT_MODEL")
LESSON = """You count with the function add. To add 3, write exactly this:
<tool_call>
{"name": "add", "arguments": {"number": 3}}
</tool_call>
"""
START_S = 600
ANSWER = "<|im_start|>tool"
SMALLER = [
    f"++grpo.num_prompts_per_step={PROMPTS}",
    f"++grpo.num_generations_per_prompt={GENERATIONS}",
    f"++policy.train_global_batch_size={PROMPTS * GENERATIONS}",
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


def recipe(name: str, steps: int, folder: Path, *overrides: str) -> dict[str, Any]:
    """A recipe as it ships, made small."""
    from nemo_gym_prorl.nemo_rl.configuration import read

    places = [f"++data.train.data_path={folder / 'rows.jsonl'}", f"++logger.log_dir={folder / 'logs'}"]
    return read(name, (), [*SMALLER, f"++grpo.max_num_steps={steps}", *places, *overrides])


def write_rows(folder: Path, ask: Callable[[int], str]) -> None:
    """Rows of the counting environment."""
    from tests.nemo_rl.trainer import ADD_TOOL

    with (folder / "rows.jsonl").open("w") as rows:
        for number in range(12):
            asked = {"input": [{"role": "user", "content": ask(number)}], "tools": [ADD_TOOL]}
            agent = {"type": "responses_api_agents", "name": "counting_agent"}
            rows.write(json.dumps({"agent_ref": agent, "responses_create_params": asked}) + "\n")


@contextlib.contextmanager
def chat_server(model: Path, generations: dict[str, Any], log: Path) -> Iterator[str]:
    """NeMo RL's chat server; gives its URL once it answers."""
    port = free_port()
    command = [str(PYTHON), "-m", "tests.nemo_rl.chat_server", str(model), str(port), json.dumps(generations)]
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
        yield f"http://127.0.0.1:{port}"
    finally:
        kill(process)


@dataclass
class Deployment:
    """A model behind NeMo RL's chat server, by recipe, and Gym's servers.

    Attributes:
        model: its folder.
        url: of the chat server.
        gym: NeMo RL's actor, with the counting environment.
    """

    model: Path
    url: str
    gym: Any

    def trained(self, name: str, config: dict[str, Any], folder: Path) -> dict[str, list[float]]:
        """Train by a recipe; what NeMo RL's logger wrote."""
        from nemo_rl.algorithms.metric_utils import SetupTimingMetrics
        from nemo_rl.algorithms.single_controller_utils import MasterConfig
        from nemo_rl.environments.nemo_gym import setup_nemo_gym_config
        from nemo_rl.models.megatron.router_replay import router_replay_enabled

        from nemo_gym_prorl.nemo_rl.single_controller import train
        from nemo_gym_prorl.nemo_rl.validation import validation_of
        from tests.nemo_rl.controller import Lent, arguments_of, logged, swap_engines
        from tests.nemo_rl.tiny_trainer import FromDisk, TinyPolicy

        engine = f"{self.url}/{name}/v1"
        swap_engines(self.gym.server_urls()["policy_model"], [engine])
        master = MasterConfig(**config)
        setup_nemo_gym_config(master, None)
        arguments = arguments_of(master, folder, [engine], {"nemo_gym": Lent(self.gym.actor)})
        replay = router_replay_enabled(master.policy)
        arguments.trainer_handle = TinyPolicy(arguments.dp_client, folder, self.model, replay)
        arguments.weight_synchronizer = FromDisk([engine], folder, self.model)
        result = train(master, arguments, SetupTimingMetrics(), settings_of(config), validation_of(config))
        assert result["train_steps"] == config["grpo"]["max_num_steps"]
        told = logged(folder / "logs")
        for metric in sorted(told):
            if metric.startswith(("prorl/", "train/loss", "train/reward", "train/grad")):
                print(metric, [round(value, 4) for value in told[metric]])
        return told


@contextlib.contextmanager
def deployed(model: Path, names: Iterable[str], driver: Path, folder: Path) -> Iterator[Deployment]:
    """One engine and one set of servers for all of these recipes."""
    import ray
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer

    from tests.nemo_rl.trainer import Trainer

    venvs = str(driver / f"venvs-{uuid.uuid4().hex}")
    exec(documented("python")[0].replace(VENVS, venvs), {})
    block, *_ = documented("yaml")
    config = OmegaConf.to_container(OmegaConf.create(block.replace(VENVS, venvs)))["env"]["nemo_gym"]
    config["config_paths"].append(str(driver / "resources_servers/counting/counting.yaml"))
    # Of a CPU that samples for all at once.
    config["counting_agent"] = {"responses_api_agents": {"prorl_agent": {"budgets": {"run": 120}, "max_steps": 6}}}
    generations = {name: recipe(name, 1, folder)["policy"]["generation"] for name in names}
    with chat_server(model, generations, folder / "vllm.log") as url:
        tokenizer, first = AutoTokenizer.from_pretrained(model), next(iter(generations))
        gym = Trainer([f"{url}/{first}/v1"], driver, config, model="tiny", tokenizer=tokenizer)
        try:
            yield Deployment(model, url, gym)
        finally:
            ray.get(gym.actor.shutdown.remote())


@pytest.fixture(scope="module")
def counter(nemo_rl: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The policy that was taught to count."""
    from tests.nemo_rl.trainer import ADD_TOOL

    folder = tmp_path_factory.mktemp("tiny")
    if not (taught := os.environ.get("PRORL_TINY_COUNTER")):
        tiny.make(folder / "model", ADD_TOOL)
    with deployed(Path(taught or folder / "model"), RECIPES, nemo_rl, folder) as deployment:
        yield deployment


@pytest.mark.parametrize("name", RECIPES)
def test_the_first_steps_of_a_recipe(name: str, counter: Deployment, tmp_path: Path) -> None:
    import torch
    from transformers import AutoTokenizer

    steps = RECIPES[name]
    config = recipe(name, steps, tmp_path)
    parsers = config["policy"]["generation"]["vllm_cfg"]["http_server_serving_chat_kwargs"]
    thinks = parsers["reasoning_parser"] is not None
    write_rows(tmp_path, lambda number: tiny.question(number, thinks=thinks))
    told = counter.trained(name, config, tmp_path)
    assert told["prorl/turns"][-1] > 1
    assert told["prorl/without_loss_share"][-1] == 0
    assert told["prorl/reward/counting"][-1] > 0

    tokenizer, shape = AutoTokenizer.from_pretrained(counter.model), Shaping.of(settings_of(config))
    replay = config["policy"].get("router_replay", {}).get("enabled", False)
    furthest, routed, same = 0.0, 0, 0
    for step in range(steps):
        called, calls = 0, 0
        for chunk in torch.load(tmp_path / f"step-{step}.pt", weights_only=False):
            for row in range(len(chunk["ids"])):
                length = int(chunk["input_lengths"][row])
                ids, mask = chunk["input_ids"][row, :length], chunk["token_mask"][row, :length].bool()
                said, heard = tokenizer.decode(ids[mask]), tokenizer.decode(ids[~mask])
                # A tool answers whom the engine's parser understood.
                calls += heard.count(ANSWER)
                called += ANSWER in heard
                # What the tool was called with, as far as it was a call, is what the reward is.
                assert chunk["total_reward"][row].item() == pytest.approx(shape(added(said) / 10, 0)), said
                assert ("<think>" in said) is thinks
                if step == 0 and "prev_logprobs" in chunk:  # of the very weights that it was sampled from
                    off = (chunk["prev_logprobs"] - chunk["generation_logprobs"])[row, :length][mask].abs().max()
                    furthest = max(furthest, off.item())
                assert ("routed_experts" in chunk) is replay
                if step == 0 and replay:
                    rows, own = chunk["routed_experts"][row, : length - 1], chosen(counter.model, ids[:-1])
                    routed += own.shape[0] * own.shape[1]
                    same += int((rows.sort(-1).values == own.sort(-1).values).all(-1).sum())
        print(f"step {step + 1}: {called} of {PROMPTS * GENERATIONS} rollouts called the tool, {calls} times")
        # It samples at a temperature of 1, and what it was taught wears off as it is trained.
        assert called >= 0.75 * PROMPTS * GENERATIONS
    print(f"log-probabilities of trainer and engine differ by {furthest:.2g} at most")
    assert furthest < 1e-3
    if replay:
        print(f"{same} of {routed} choices of experts are those of the trainer's own router")
        assert same / routed > 0.99


def chosen(model: Path, ids: Any) -> Any:
    """The experts that the router of transformers chooses: of each token in each layer."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        logits = loaded(input_ids=ids[None], output_router_logits=True).router_logits
    return torch.stack([layer.topk(loaded.config.num_experts_per_tok, -1).indices for layer in logits], 1)


@pytest.mark.skipif(not UNTAUGHT, reason="PRORL_UNTAUGHT_MODEL names no folder of a model")
def test_a_model_that_nobody_taught(nemo_rl: Path, tmp_path: Path) -> None:
    """Shown an example it calls now and then, and seldom well; not shown, never, and nothing can be learnt."""
    from nemo_gym_prorl.dapo.contract import NothingToLearn

    model = tmp_path / "model"
    shutil.copytree(str(UNTAUGHT), model)
    tiny.show_tools(model)
    name = next(iter(RECIPES))
    shown, bare = tmp_path / "shown", tmp_path / "bare"
    with deployed(model, [name], nemo_rl, tmp_path) as deployment:
        for folder, lesson in ((shown, LESSON), (bare, "")):
            folder.mkdir()
            write_rows(folder, lambda number, lesson=lesson: lesson + tiny.question(number))  # type: ignore[misc]
        told = deployment.trained(name, recipe(name, 1, shown), shown)
        assert told["prorl/tool_calls"][-1] > 0
        with pytest.raises(NothingToLearn, match="too easy or too hard"):
            deployment.trained(name, recipe(name, 1, bare, "++prorl.max_fruitless=3"), bare)


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
