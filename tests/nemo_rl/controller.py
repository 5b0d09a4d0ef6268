# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Arguments of NeMo RL's controller without a GPU: NeMo RL's own parts, and four stand-ins.

The policy is a small model on the CPU behind the trainer's interface, which records its input. Weight synchronization
does nothing. The engine is :mod:`tests.nemo_rl.engine`, and the data plane NeMo RL's own in memory.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import ray
import torch
from nemo_rl.algorithms.async_utils.replay_buffer import TQReplayBuffer
from nemo_rl.algorithms.grpo import _create_advantage_estimator, _get_grpo_save_state
from nemo_rl.algorithms.loss import ClippedPGLossFn
from nemo_rl.algorithms.metric_utils import SetupTimingMetrics
from nemo_rl.algorithms.single_controller_utils import MasterConfig
from nemo_rl.algorithms.single_controller_utils.config import AsyncRLConfig
from nemo_rl.algorithms.single_controller_utils.setup import SingleControllerActorArgs, _maybe_start_generation_router
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.utils import load_dataloader_state, setup_response_data
from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.nemo_gym import setup_nemo_gym_config
from nemo_rl.models.megatron.router_replay import router_replay_enabled
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerFast

from nemo_gym_prorl.nemo_rl.collector import validation_of
from nemo_gym_prorl.nemo_rl.configuration import settings_of
from nemo_gym_prorl.nemo_rl.plugins import sampler_block
from nemo_gym_prorl.nemo_rl.single_controller import train
from tests.nemo_rl.conftest import ROOT
from tests.nemo_rl.trainer import GENERATION


PROMPTS, GENERATIONS, STEPS = 2, 4, 3
PARTITION = "rollout_data"
FIELDS = [
    "input_ids",
    "input_lengths",
    "advantages",
    "prev_logprobs",
    "generation_logprobs",
    "token_mask",
    "sample_mask",
    "total_reward",
]


class Policy:
    """Model of two layers that sees one token, in place of NeMo RL's ``TQPolicy``."""

    def __init__(self, data_plane: Any, folder: Path, router_replay: bool = False) -> None:
        self.data_plane = data_plane
        self.router_replay = router_replay
        self.folder = folder
        self.model = torch.nn.Sequential(torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.loss_fn: Any = None
        self.steps = 0
        self.seen: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self.metrics: dict[str, list[float]] = {}

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        self.model.eval()

    def prepare_for_training(self) -> None:
        self.model.train()

    def get_logprobs_from_meta(self, meta: Any) -> None:
        self._put_log_probs(meta, "prev_logprobs")

    def get_reference_policy_logprobs_from_meta(self, meta: Any) -> None:
        self._put_log_probs(meta, "reference_policy_logprobs")

    def _put_log_probs(self, meta: Any, name: str) -> None:
        data = self._read(meta, ["input_ids"])
        with torch.no_grad():
            found = torch.nn.functional.pad(self._log_probs(data["input_ids"]), (1, 0))
        rows = [found[i, :length] for i, length in enumerate(meta.sequence_lengths)]
        from tensordict import TensorDict

        packed = TensorDict({name: torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, [len(rows)])
        self.data_plane.put_samples(meta.sample_ids, meta.partition_id, packed)

    def begin_train_step(self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
        assert self.loss_fn is None, "a train step is already open"
        self.loss_fn = loss_fn
        self.optimizer.zero_grad()
        self.seen, self.losses, self.metrics = [], [], {}

    def train_microbatches_from_meta(self, meta: Any) -> None:
        reference = ["reference_policy_logprobs"] if self.loss_fn.reference_policy_kl_penalty else []
        # NeMo RL computes none where the ratio is forced to 1.
        own = [name for name in FIELDS if name != "prev_logprobs" or not self.loss_fn.force_on_policy_ratio]
        data = self._read(meta, own + reference + (["routed_experts"] if self.router_replay else []))
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        rows, tokens = data["sample_mask"].sum(), mask.sum()
        loss, told = self.loss_fn(self._log_probs(data["input_ids"]), data, rows, tokens)
        loss.backward()
        for name, value in {**told, "global_valid_seqs": rows.item(), "global_valid_toks": tokens.item()}.items():
            self.metrics.setdefault(name, []).append(value)
        self.losses.append(loss.item())
        self.seen.append({"ids": meta.sample_ids, "tags": meta.tags, **data})

    def finish_train_step(self) -> dict[str, Any]:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)
        self.optimizer.step()
        torch.save(self.seen, self.folder / f"step-{self.steps}.pt")
        self.steps += 1
        self.loss_fn = None
        return {"loss": sum(self.losses), "grad_norm": norm, "all_mb_metrics": self.metrics}

    def save_checkpoint(self, *, weights_path: str, **_: Any) -> None:
        Path(weights_path).parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), weights_path)
        time.sleep(2)  # time in which the next batch becomes complete

    def finalize_async_save(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def _log_probs(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.model(ids[:, :-1])
        return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)

    def _read(self, meta: Any, names: list[str]) -> BatchedDataDict[Any]:
        data = self.data_plane.get_samples(meta.sample_ids, meta.partition_id, names)
        found = {}
        for name in names:
            column = data[name]
            if column.is_nested:
                column = torch.nested.to_padded_tensor(column, 0)
            found[name] = column.squeeze(-1) if column.dim() > 1 and column.shape[-1] == 1 else column
        return BatchedDataDict(found)


@dataclass
class Generation:
    """Generation interface of the controller."""

    dp_openai_server_base_urls: list[str]
    requires_kv_scale_sync: bool = False

    def invalidate_kv_cache(self) -> bool:
        """Scripted engines have no prefix cache."""
        return True

    def shutdown(self) -> None:
        pass


class Synchronizer:
    """Weight synchronizer that does nothing."""

    def sync_weights(self, *, timer: Any = None, kv_scales: Any = None) -> None:
        pass

    def shutdown(self) -> None:
        pass


@dataclass
class Lent:
    """Environment actor that survives its shutdown."""

    actor: Any
    told_to_end: bool = False

    @property
    def __ray_call__(self) -> Any:
        return self.actor.__ray_call__

    @property
    def health_check(self) -> Any:
        return self.actor.health_check

    @property
    def shutdown(self) -> "Lent":
        return self

    def remote(self) -> Any:
        self.told_to_end = True
        return ray.put(None)


@dataclass
class Shards:
    """Several Gym actors, with the interface of newer versions of NeMo RL; all survive their shutdown."""

    all_handles: list[Any]
    told_to_end: bool = False

    def shutdown(self) -> None:
        self.told_to_end = True


def configuration(rows: Sequence[Mapping[str, Any]], folder: Path, **overrides: Any) -> dict[str, Any]:
    """Return NeMo RL's own example for its controller, made small; ``__`` in ``overrides`` stands for a dot."""
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    register_omegaconf_resolvers()
    config = load_config(f"{ROOT}/examples/configs/grpo_math_1B_megatron_single_controller.yaml")
    OmegaConf.set_struct(config, False)
    given = {
        "grpo.num_prompts_per_step": PROMPTS,
        "grpo.num_generations_per_prompt": GENERATIONS,
        "grpo.max_num_steps": STEPS,
        "grpo.max_num_epochs": 1000,
        "grpo.use_leave_one_out_baseline": False,
        "grpo.skip_reference_policy_logprobs_calculation": True,
        "loss_fn.reference_policy_kl_penalty": 0.0,
        "loss_fn.use_importance_sampling_correction": True,
        "policy.train_global_batch_size": PROMPTS * GENERATIONS,
        "policy.generation": {**OmegaConf.to_container(config.policy.generation), **GENERATION},
        "async_rl.max_inflight_prompts": 4,
        "async_rl.sampler": {"name": "windowed", "max_staleness_versions": 1},
        "data.shuffle": False,
        "data.num_workers": 0,
        "data.train": {"data_path": str(data), "dataset_name": "NemoGymDataset"},
        "data.default": {"env_name": "nemo_gym", "processor": "nemo_gym_data_processor"},
        "env": {"should_use_nemo_gym": True},
        "logger.log_dir": str(folder / "logs"),
        "logger.monitor_gpus": False,
        "checkpointing.checkpoint_dir": str(folder / "checkpoints"),
        "prorl": {},
    }
    given |= {key.replace("__", "."): value for key, value in overrides.items()}
    given["prorl"] = {"filter_on": "reward", **given["prorl"]}  # rewards of the counting environment are tenths
    for name, value in given.items():
        OmegaConf.update(config, name, value, merge=False)
    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    return resolved


@dataclass
class Trained:
    """Result of a run.

    Attributes:
        result: result of the controller.
        steps: groups that the policy got in each step.
    """

    result: dict[str, Any]
    steps: list[list["TrainedGroup"]]


@dataclass
class TrainedGroup:
    """Group in the form that the policy gets.

    Attributes:
        rewards: rewards of the rollouts.
        advantages: advantages by rollout and token.
        tokens: tokens by rollout, without padding.
        masks: masks of trained tokens by rollout.
        log_probs: log-probabilities of sampling by rollout.
        version: weight version of NeMo RL.
    """

    rewards: list[float]
    advantages: list[list[float]]
    tokens: list[bytes]
    masks: list[list[int]]
    log_probs: list[list[float]]
    version: int

    def sampled(self, member: int) -> bytes:
        """Return the trained tokens of a rollout."""
        return bytes(token for token, on in zip(self.tokens[member], self.masks[member], strict=True) if on)


def trained(
    config: dict[str, Any],
    folder: Path,
    engines: Sequence[str],
    environments: Mapping[str, Any] | None = None,
    router: Any = None,
) -> Trained:
    """Train as ``single_controller.run`` does after NeMo RL's setup.

    Args:
        config: see :func:`configuration`.
        folder: for what the policy was given.
        engines: base URLs.
        environments: actors by name; those that the data set wants, if left out.
        router: NeMo RL's, if there is one.
    """
    settings = settings_of(config)
    sampler = sampler_block(config["async_rl"]["sampler"], settings)
    master = MasterConfig(**{**config, "async_rl": {**config["async_rl"], "sampler": sampler}})
    setup_nemo_gym_config(master, None)
    arguments = arguments_of(master, folder, engines, environments, router)
    result = train(master, arguments, SetupTimingMetrics(), settings, validation_of(config))
    return Trained(result, steps_in(folder, settings.mini_batches))


def logged(folder: Path) -> dict[str, list[float]]:
    """Return the metrics that NeMo RL's logger wrote, by name, in the order of steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[float]] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file)).Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name, []).extend(event.value for event in events.Scalars(name))
    return found


def arguments_of(
    master: Any, folder: Path, engines: Sequence[str], environments: Mapping[str, Any] | None, router: Any = None
) -> SingleControllerActorArgs:
    """Return the result that NeMo RL's ``setup_single_controller`` has with GPUs."""
    if environments is None:
        dataset, _, environments, _ = setup_response_data(tokenizer(), master.data, env_configs=master.env)
    else:
        dataset, _ = setup_response_data(tokenizer(), master.data, env_configs=None)
    saved = CheckpointManager(master.checkpointing)
    last = saved.get_latest_checkpoint_path()
    loader = StatefulDataLoader(
        dataset, batch_size=master.grpo.num_prompts_per_step, shuffle=False, collate_fn=rl_collate_fn, drop_last=True
    )
    if last is not None:
        load_dataloader_state(loader, last, master.data)
    router_replay = router_replay_enabled(master.policy)
    data_plane = NoOpDataPlaneClient()
    data_plane.register_partition(PARTITION, FIELDS, 1000, ["train"])
    return SingleControllerActorArgs(
        gen_handle=Generation([*engines]),
        trainer_handle=Policy(data_plane, folder, router_replay=router_replay),
        env_handles=dict(environments),
        train_cluster=None,
        inference_cluster=None,
        dp_client=data_plane,
        dataloader=loader,
        weight_synchronizer=Synchronizer(),
        advantage_estimator=_create_advantage_estimator(master),
        loss_fn=ClippedPGLossFn(master.loss_fn),
        rollout_manager=None,
        tq_buffer=TQReplayBuffer(
            data_plane,
            PARTITION,
            pad_value_dict={"token_ids": 0, "input_ids": 0},
            require_routed_experts=router_replay,
        ),
        partition_id=PARTITION,
        save_state=_get_grpo_save_state(saved.load_training_info(last)),
        last_checkpoint_path=last,
        generation_router=router,
    )


def steps_in(folder: Path, mini_batches: int = 1) -> list[list[TrainedGroup]]:
    """Return the groups that the policy got, by the controller's steps of ``mini_batches`` optimizer steps each."""
    files = [folder / f"step-{number}.pt" for number in range(len([*folder.glob("step-*.pt")]))]
    parts = [[group for chunk in torch.load(file, weights_only=False) for group in _groups(chunk)] for file in files]
    return [[group for part in step for group in part] for step in batched(parts, mini_batches)]


def _groups(chunk: dict[str, Any]) -> Iterator[TrainedGroup]:
    slots = [sample_id.rsplit("_g", 1)[0] for sample_id in chunk["ids"]]
    for slot in dict.fromkeys(slots):
        first, number = slots.index(slot), slots.count(slot)
        members = range(first, first + number)
        assert {*slots[first : first + number]} == {slot}
        assert number >= GENERATIONS
        lengths = [int(chunk["input_lengths"][i]) for i in members]

        def rows(name: str, members: range = members, lengths: list[int] = lengths) -> list[list[Any]]:
            return [chunk[name][i, :length].tolist() for i, length in zip(members, lengths, strict=True)]

        assert all(chunk["sample_mask"][i] == 1 for i in members)
        yield TrainedGroup(
            rewards=[float(chunk["total_reward"][i]) for i in members],
            advantages=rows("advantages"),
            tokens=[bytes(row) for row in rows("input_ids")],
            masks=rows("token_mask"),
            log_probs=rows("generation_logprobs"),
            version=chunk["tags"][first]["weight_version"],
        )


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a minimal tokenizer; the engine renders prompts."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"?": 0}, "?")), eos_token="?")


@contextmanager
def routed(model_url: str, engine_url: str) -> Iterator[Any]:
    """Put the engine behind NeMo RL's router, and give the router's handle."""
    master = MasterConfig.model_construct(async_rl=AsyncRLConfig(generation_router={"enabled": True}))
    router = _maybe_start_generation_router(Generation([engine_url]), master)
    swap_engines(model_url, [ray.get(router.base_url.remote())])
    try:
        yield router
    finally:
        swap_engines(model_url, [engine_url])
        ray.kill(router)


def swap_engines(model_url: str, engines: Sequence[str]) -> None:
    """Replace all engines of the model server."""
    call("DELETE", f"{model_url}/v1/backends")
    for engine in engines:
        call("POST", f"{model_url}/v1/backends", {"url": engine})


def call(method: str, url: str, body: Any = None) -> Any:
    """Call a control route and return its response."""
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"Content-Type": "application/json"}, method=method)) as response:
        return json.load(response)
