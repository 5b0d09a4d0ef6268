# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The first optimizer steps of recipes, with a real vLLM on the CPU and NeMo RL's controller.

vLLM samples behind NeMo RL's own chat server, whose parsers find the calls. The environment's tools decide the reward.
NeMo RL's controller and loss train the weights that vLLM samples from next. A dense model and a mixture of experts
have one engine each, with the settings of their recipes. Three parts stand in for GPUs: transformers trains the
weights, vLLM reads new weights from disk, and an HTTP route carries the call that resets the prefix cache.
"""

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.nemo_rl.configuration import RewardShaping, settings_of
from tests.nemo_rl import tiny
from tests.nemo_rl.conftest import REPOSITORY, ROOT, documented_servers
from tests.policy.engines import answers, begin, free_port, kill


PYTHON = os.environ.get("NRL_VLLM_PYTHON")
"""vLLM wants a newer openai than Gym, so NeMo RL's chat server has an environment of its own, as in NeMo RL."""
pytestmark = [
    pytest.mark.engine,
    pytest.mark.gym,
    pytest.mark.long("trains twelve optimizer steps against two real engines"),
    pytest.mark.timeout(1800),
    pytest.mark.skipif(PYTHON is None, reason="NRL_VLLM_PYTHON names no Python with both NeMo RL and vLLM"),
]

PROMPTS, GENERATIONS, STEPS = 2, 4, 3


@dataclass(frozen=True)
class Case:
    """A recipe, and the variants that it is combined with."""

    recipe: str
    variants: tuple[str, ...] = ()


CASES = {
    "dense": [
        Case("dapo-code-qwen3-4b"),
        Case("dapo-math-qwen3-4b", ("on-policy",)),
        Case("dapo-swe-qwen3-8b"),
    ],
    "mixture": [Case("dapo-swe-qwen3-30b-a3b")],
}
"""By the architecture of the model. The cases of one architecture share an engine."""
TAUGHT = {"dense": {"experts": 0}, "mixture": {"experts": 8, "seed": 1}}
LOG_PROB_TOLERANCE = 1e-3
"""Nats. Trainer and engine round differently by less; keys and values of earlier weights add more."""
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


def recipe(case: Case, folder: Path, *overrides: str, steps: int = STEPS) -> dict[str, Any]:
    """Return a recipe as it ships, made small."""
    from nemo_gym_prorl.nemo_rl.configuration import read

    places = [f"++data.train.data_path={folder / 'rows.jsonl'}", f"++logger.log_dir={folder / 'logs'}"]
    return read(case.recipe, case.variants, [*SMALLER, f"++grpo.max_num_steps={steps}", *places, *overrides])


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
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), ROOT]),
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

        from nemo_gym_prorl.nemo_rl.collector import validation_of
        from nemo_gym_prorl.nemo_rl.single_controller import train
        from tests.nemo_rl.controller import Lent, arguments_of, logged, swap_engines
        from tests.nemo_rl.tiny_trainer import ChatServers, FromDisk, TinyPolicy

        engine = f"{self.url}/{name}/v1"
        swap_engines(self.gym.server_urls()["policy_model"], [engine])
        master = MasterConfig(**config)
        setup_nemo_gym_config(master, None)
        arguments = arguments_of(master, folder, [engine], {"nemo_gym": Lent(self.gym.actor)})
        replay = router_replay_enabled(master.policy)
        arguments.trainer_handle = TinyPolicy(arguments.dp_client, folder, self.model, replay)
        arguments.gen_handle = ChatServers([engine])
        arguments.weight_synchronizer = FromDisk([engine], folder, self.model)
        result = train(master, arguments, SetupTimingMetrics(), settings_of(config), validation_of(config))
        assert result["train_steps"] == config["grpo"]["max_num_steps"]
        told = logged(folder / "logs")
        for metric in sorted(told):
            if metric.startswith(("prorl/", "train/loss", "train/reward", "train/grad")):
                print(metric, [round(value, 4) for value in told[metric]])
        return told

    def log_prob_modes(self) -> list[str | None]:
        """Return the mode of each backend's log-probs, as the model server probed it."""
        from tests.nemo_rl.controller import call

        listing = call("GET", f"{self.gym.server_urls()['policy_model']}/v1/backends")
        return [backend["log_probs"] for backend in listing["backends"]]

    def prefix_cache_resets(self, name: str) -> list[bool]:
        """Return what vLLM answered to each reset so far."""
        from tests.nemo_rl.controller import call

        resets: list[bool] = call("GET", f"{self.url}/{name}/prefix_cache_resets")
        return resets


@contextlib.contextmanager
def deployed(model: Path, cases: Iterable[Case], driver: Path, folder: Path) -> Iterator[Deployment]:
    """One engine and one set of servers for all of these recipes."""
    import ray
    from transformers import AutoTokenizer

    from tests.nemo_rl.trainer import Trainer

    config = documented_servers(driver, f"venvs-{uuid.uuid4().hex}")
    # Of a CPU that samples for all at once.
    config["counting_agent"] = {"responses_api_agents": {"prorl_agent": {"budgets": {"run": 120}, "max_steps": 6}}}
    generations = {case.recipe: recipe(case, folder)["policy"]["generation"] for case in cases}
    with chat_server(model, generations, folder / "vllm.log") as url:
        tokenizer, first = AutoTokenizer.from_pretrained(model), next(iter(generations))
        gym = Trainer([f"{url}/{first}/v1"], driver, config, model="tiny", tokenizer=tokenizer)
        try:
            yield Deployment(model, url, gym)
        finally:
            ray.get(gym.actor.shutdown.remote())


@pytest.fixture(scope="module")
def counter(
    request: pytest.FixtureRequest, nemo_rl: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """A model of the architecture in ``request.param`` that was trained to count."""
    from tests.nemo_rl.trainer import ADD_TOOL

    folder = tmp_path_factory.mktemp("tiny")
    model = Path(os.environ.get("PRORL_TINY_COUNTER", folder), request.param)
    if not model.exists():
        tiny.make(model, ADD_TOOL, **TAUGHT[request.param])
    with deployed(model, CASES[request.param], nemo_rl, folder) as deployment:
        yield deployment


@pytest.mark.parametrize(
    ("counter", "case"),
    [pytest.param(architecture, case, id=case.recipe) for architecture, cases in CASES.items() for case in cases],
    indirect=["counter"],
    scope="module",  # keeps an engine up for all cases of its architecture
)
def test_the_first_steps_of_a_recipe(case: Case, counter: Deployment, tmp_path: Path) -> None:
    import torch
    from transformers import AutoTokenizer

    from tests.nemo_rl.tiny_trainer import TinyPolicy

    config = recipe(case, tmp_path)
    vllm = config["policy"]["generation"]["vllm_cfg"]
    resets_before = len(counter.prefix_cache_resets(case.recipe))
    parsers = vllm["http_server_serving_chat_kwargs"]
    thinks = parsers["reasoning_parser"] is not None
    write_rows(tmp_path, lambda number: tiny.question(number, thinks=thinks))
    told = counter.trained(case.recipe, config, tmp_path)
    modes = counter.log_prob_modes()
    print(f"log-prob modes of the backends: {modes}")
    assert modes == ["processed"]
    # The controller also syncs weights before the first step.
    resets = counter.prefix_cache_resets(case.recipe)[resets_before:]
    print(f"prefix cache resets: vLLM answered {resets}")
    assert len(resets) == 1 + STEPS
    assert told["prorl/turns"][-1] > 1
    assert told["prorl/without_loss_share"][-1] == 0
    assert told["prorl/reward/counting"][-1] > 0

    tokenizer, shape = AutoTokenizer.from_pretrained(counter.model), RewardShaping.of(settings_of(config))
    replay = config["policy"].get("router_replay", {}).get("enabled", False)
    on_policy = settings_of(config).max_staleness == 0
    # vLLM refuses a reset while a request holds blocks; that of the last sync precedes no sampled token.
    assert resets[0]
    if on_policy:
        assert any(resets[1:-1])
    furthest, routed, same = 0.0, 0, 0
    for step in range(STEPS):
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
                assert chunk["total_reward"][row].item() == pytest.approx(shape(added(said, parsers) / 10, 0)), said
                assert ("<think>" in said) is thinks
                if step == 0 or (on_policy and resets[step]):  # one version made all tokens, keys and values
                    weights = TinyPolicy.weights(tmp_path, step) if step else counter.model
                    trainers = [log_probs_of(weights, ids)]
                    if "prev_logprobs" in chunk:
                        trainers.append(chunk["prev_logprobs"][row, :length])
                    for own in trainers:
                        off = (own - chunk["generation_logprobs"][row, :length])[mask].abs().max()
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
    assert furthest < LOG_PROB_TOLERANCE
    if replay:
        print(f"{same} of {routed} choices of experts are those of the trainer's own router")
        assert same / routed > 0.99


def log_probs_of(model: Path, ids: Any) -> Any:
    """Return each token's log-prob by transformers; the first token has none, which is 0."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        found = torch.log_softmax(loaded(input_ids=ids[None, :-1]).logits, -1)[0]
    return torch.nn.functional.pad(found.gather(-1, ids[1:, None])[:, 0], (1, 0))


def chosen(model: Path, ids: Any) -> Any:
    """The experts that the router of transformers chooses: of each token in each layer."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        logits = loaded(input_ids=ids[None], output_router_logits=True).router_logits
    return torch.stack([layer.topk(loaded.config.num_experts_per_tok, -1).indices for layer in logits], 1)


def added(said: str, parsers: dict[str, Any]) -> int:
    """Return the sum of a rollout's calls, independently of vLLM; a turn with an unreadable call makes none."""
    total = 0
    for turn in said.split("<|im_end|>"):
        if parsers["reasoning_parser"] == "deepseek_r1":  # takes a turn without </think> for a thought
            turn = turn.partition("</think>")[2]
        try:
            calls = [json.loads(call.split("</tool_call>")[0]) for call in turn.split("<tool_call>")[1:]]
            total += sum(int(call["arguments"]["number"]) for call in calls if call["name"] == "add")
        except (ValueError, KeyError, TypeError):
            continue
    return total
