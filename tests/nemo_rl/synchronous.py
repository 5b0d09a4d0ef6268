# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What ``grpo_train`` is called with where there is no GPU: its policy and its generation are stand-ins."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from nemo_rl.algorithms.grpo import MasterConfig, _get_grpo_save_state
from nemo_rl.algorithms.loss import ClippedPGLossFn
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.utils import setup_response_data
from nemo_rl.environments.nemo_gym import setup_nemo_gym_config
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.logger import Logger
from torchdata.stateful_dataloader import StatefulDataLoader

from nemo_gym_prorl.nemo_rl.settings import settings_of
from nemo_gym_prorl.nemo_rl.synchronous import train, with_agent
from tests.nemo_rl.controller import GENERATIONS, TrainedGroup, tokenizer
from tests.nemo_rl.engine import Engine
from tests.tasks import containers


@dataclass
class Asleep:
    """What was still going on when the engines went to sleep.

    Attributes:
        requests: at the engine.
        sandboxes: that lived.
    """

    requests: int
    sandboxes: set[str]


@dataclass
class Generation:
    """NeMo RL's generation, whose engines sleep between two batches."""

    cfg: Mapping[str, Any]
    engine: Engine
    asleep: list[Asleep] = field(default_factory=list)
    requires_kv_scale_sync: bool = False
    is_stale: bool = True
    synchronised: int = 0

    @property
    def weight_synchronizer(self) -> "Generation":
        return self

    def sync_weights(self, **_: Any) -> dict[str, float]:
        self.synchronised += 1
        return {}

    def prepare_for_generation(self, *_: Any, **__: Any) -> None:
        pass

    def finish_generation(self) -> None:
        self.asleep.append(Asleep(self.engine.in_flight, containers.instances()))

    def clear_logger_metrics(self) -> None:
        pass

    def get_logger_metrics(self) -> dict[str, Any]:
        return {}

    def shutdown(self) -> None:
        pass


class Policy:
    """Two layers that know the token before, trained in mini-batches; in place of NeMo RL's workers."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.model = torch.nn.Sequential(torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.batches: list[dict[str, torch.Tensor]] = []
        self.optimizer_steps = 0

    def prepare_for_lp_inference(self) -> None:
        self.model.eval()

    def prepare_for_training(self) -> None:
        self.model.train()

    def offload_after_refit(self) -> None:
        pass

    def get_logprobs(self, data: Any, timer: Any = None) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return {"logprobs": torch.nn.functional.pad(self._log_probs(data["input_ids"]), (1, 0))}

    def get_reference_policy_logprobs(self, data: Any, timer: Any = None) -> dict[str, torch.Tensor]:
        return {"reference_logprobs": self.get_logprobs(data)["logprobs"]}

    def train(self, data: Any, loss_fn: Any, timer: Any = None) -> dict[str, Any]:
        self.batches.append({name: data[name].clone() for name in data})
        losses, metrics, norm = [], {}, torch.tensor(0.0)
        for first in range(0, data.size, self.batch_size):
            part = data.slice(first, first + self.batch_size)
            mask = part["token_mask"][:, 1:] * part["sample_mask"].unsqueeze(-1)
            self.optimizer.zero_grad()
            rows, tokens = part["sample_mask"].sum(), mask.sum()
            loss, told = loss_fn(self._log_probs(part["input_ids"]), part, rows, tokens)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)
            self.optimizer.step()
            self.optimizer_steps += 1
            losses.append(loss.detach())
            for name, value in {**told, "global_valid_seqs": rows.item(), "global_valid_toks": tokens.item()}.items():
                metrics.setdefault(name, []).append(value)
        return {"loss": torch.stack(losses), "grad_norm": norm, "all_mb_metrics": metrics}

    def _log_probs(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.model(ids[:, :-1])
        return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


@dataclass
class Trained:
    """What came of a run.

    Attributes:
        batches: the groups of each.
        masks: of rollouts, 0 for those without loss.
        generation: what it was told.
        policy: what it was given.
        wall_s: how long it took.
    """

    batches: list[list[TrainedGroup]]
    masks: list[list[float]]
    generation: Generation
    policy: Policy
    wall_s: float


def trained(config: dict[str, Any], engine: Engine, gym: Any, batch_size: int) -> Trained:
    """Train, by what ``synchronous.run`` does when NeMo RL has set everything up."""
    master = MasterConfig(**config)
    setup_nemo_gym_config(master, None)
    settings = settings_of(config)
    rows, _ = setup_response_data(tokenizer(), master.data, env_configs=None)
    rows.dataset = with_agent(rows.dataset, settings.agent)
    policy, generation = Policy(batch_size), Generation(master.policy["generation"], engine)
    made = set_up(master, rows, policy, generation, gym)
    began = time.monotonic()
    train(master, settings, gym, (*made[:2], *made[4:6], _padding(), *made[6:10]))
    return told(policy, generation, time.monotonic() - began)


def set_up(master: Any, rows: Any, policy: Policy, generation: Generation, gym: Any) -> tuple[Any, ...]:
    """What NeMo RL's ``setup`` gives where there are GPUs."""
    loader = StatefulDataLoader(
        rows, batch_size=master.grpo.num_prompts_per_step, shuffle=False, collate_fn=rl_collate_fn, drop_last=True
    )
    loss, logger = ClippedPGLossFn(master.loss_fn), Logger(master.logger)
    checkpoints, state = CheckpointManager(master.checkpointing), _get_grpo_save_state(None)
    return policy, generation, gym, None, loader, None, loss, logger, checkpoints, state, master, {}, {}


def told(policy: Policy, generation: Generation, wall_s: float) -> Trained:
    """What the stand-ins were told meanwhile."""
    return Trained(
        [_groups(batch) for batch in policy.batches],
        [batch["sample_mask"].tolist() for batch in policy.batches],
        generation,
        policy,
        wall_s,
    )


def _padding() -> Any:
    made = tokenizer()
    made.pad_token_id = 0
    return made


def _groups(batch: dict[str, torch.Tensor]) -> list[TrainedGroup]:
    """Rewards are not among what a policy is given, so they are read off the advantages' signs elsewhere."""
    groups = []
    for first in range(0, len(batch["input_ids"]), GENERATIONS):
        members = range(first, first + GENERATIONS)

        def rows(name: str, members: range = members) -> list[list[Any]]:
            lengths = [int(batch["input_lengths"][member]) for member in members]
            return [batch[name][i, :length].tolist() for i, length in zip(members, lengths, strict=True)]

        groups.append(
            TrainedGroup(
                rewards=[],
                advantages=rows("advantages"),
                tokens=[bytes(row) for row in rows("input_ids")],
                masks=rows("token_mask"),
                log_probs=rows("generation_logprobs"),
                version=-1,
            )
        )
    return groups
