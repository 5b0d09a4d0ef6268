# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""NeMo RL's payload, advantages and loss of rows, compared with plain arithmetic; without Ray and servers."""

import asyncio
import copy
import dataclasses
import math
import random
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from nemo_gym_prorl.dapo.runner import TrainedRollout
from nemo_gym_prorl.nemo_rl.configuration import ProrlSettings, RewardShaping, settings_of
from nemo_gym_prorl.nemo_rl.controller_replacements import GroupAdvantages, MiniBatches, RolloutRows
from nemo_gym_prorl.nemo_rl.groups import TrainingGroup, record_of, training_group
from nemo_gym_prorl.policy.generation import Finish, Generation
from nemo_gym_prorl.policy.tokens.branches import branches_of, training_traces
from nemo_gym_prorl.policy.tokens.conversations import ConversationIndex, ConversationNode
from nemo_gym_prorl.rollout.gym_rows import take_tokens
from tests.nemo_rl.conftest import ROOT, needs_nemo_rl


if TYPE_CHECKING:
    from tests.nemo_rl.controller import Policy

pytestmark = [needs_nemo_rl, pytest.mark.timeout(300)]

GROUPS, SIZE = 16, 4


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)


@dataclasses.dataclass
class Row:
    """Rollout as its environment returns it, with its tokens.

    Attributes:
        tokens: tokens of the whole sequence.
        sampled: log-probability of each sampled token; ``None`` for observed tokens.
    """

    reward: float
    tokens: list[int] = dataclasses.field(default_factory=list)
    sampled: list[float | None] = dataclasses.field(default_factory=list)
    output: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def turn(self, observed: list[int], said: list[int], log_probs: list[float]) -> None:
        prompt = [*self.tokens, *observed]
        self.output.append(
            {"prompt_token_ids": prompt, "generation_token_ids": said, "generation_log_probs": log_probs}
        )
        self.tokens = [*prompt, *said]
        self.sampled += [None] * len(observed) + log_probs


def drawn_rows(seed: int, groups: int, size: int, turns: int, longest: int) -> list[list[Row]]:
    """Return groups of conversations of several turns; two groups have the same prompt."""
    draw = random.Random(seed)

    def ids(least: int) -> list[int]:
        return [draw.randrange(256) for _ in range(draw.randint(least, longest))]

    made = []
    for number in range(groups):
        prompt = made[0][0].output[0]["prompt_token_ids"] if number == 1 else ids(3)
        rewards = [draw.choice([0.0, 0.25, 1.0]) for _ in range(size - 2)] + [0.0, 1.0]
        group = []
        for reward in rewards:
            row = Row(reward)
            for turn in range(draw.randint(1, turns)):
                said = ids(1)
                # Thousandths of a power of two, so that single precision has them exactly.
                row.turn(prompt if turn == 0 else ids(0), said, [-draw.randint(1, 6000) / 1024 for _ in said])
            group.append(row)
        made.append(group)
    return made


@dataclasses.dataclass
class Trained:
    """Optimizer step: samples, weights before the step, and loss."""

    samples: list[str]
    weights: dict[str, Any]
    loss: float


def recorded(policy: "Policy") -> list[Trained]:
    """Return the list of steps that a policy will record, in double precision."""
    done: list[Trained] = []
    policy.model.double()
    train = policy.train_microbatches_from_meta

    def watched(meta: Any) -> None:
        weights = copy.deepcopy(policy.model.state_dict())
        train(meta)
        done.append(Trained(list(meta.sample_ids), weights, policy.losses[-1]))

    policy.train_microbatches_from_meta = watched  # type: ignore[method-assign]
    return done


def rollout_of(row: Row, name: str) -> TrainedRollout:
    """Return the runner's form of a rollout."""
    tokens = take_tokens({"output": copy.deepcopy(row.output)})
    return TrainedRollout(name, {}, row.reward, 0, False, tokens)


def groups_of(rows: list[list[Row]], shape: Any) -> list[TrainingGroup]:
    """Return training groups of these rows."""
    named = [
        [rollout_of(row, f"g{number}:{place}:0") for place, row in enumerate(group)]
        for number, group in enumerate(rows)
    ]
    return [training_group(rollouts, shape) for rollouts in named]


def batch(groups: list[TrainingGroup], plane: RolloutRows) -> tuple[Any, list[str]]:
    """Commit training groups to NeMo RL's own buffer; return meta-data and sample ids of the batch."""
    from nemo_rl.algorithms.async_utils.replay_buffer import TQReplayBuffer

    from tests.nemo_rl.controller import FIELDS, PARTITION

    columns = [*FIELDS, "reference_policy_logprobs", "prompt_ids_for_adv"]
    plane.register_partition(PARTITION, columns, 1000, ["train"])
    buffer = TQReplayBuffer(plane, PARTITION, pad_value_dict={"token_ids": 0, "input_ids": 0})

    async def committed() -> list[Any]:
        found = []
        for number, group in enumerate(groups):
            record = record_of(group, number, plane.multiple)
            slot = buffer.reserve(weight_version=0, target_step=0)
            plane.add(slot, group)
            found.append(await buffer.commit(slot, record, start_weight_version=0, end_weight_version=0))
        return found

    first, *others = asyncio.run(committed())
    whole = first.concat(*others)
    return whole, list(whole.sample_ids)


def prepared(policy: Any, plane: RolloutRows, meta: Any, master: Any) -> Any:
    """Prepare a batch with the code of NeMo RL's controller."""
    from nemo_rl.algorithms.grpo import _create_advantage_estimator
    from nemo_rl.algorithms.single_controller import SingleControllerActor
    from nemo_rl.algorithms.single_controller_utils.config import AdvantageConfig

    controller = object.__new__(SingleControllerActor.__ray_metadata__.modified_class)
    controller.__dict__.update(
        _dp_client=plane,
        _master_config=master,
        _advantage_cfg=AdvantageConfig(),
        _advantage_estimator=GroupAdvantages(_create_advantage_estimator(master)),
        _policy_logprobs_required=True,
        _reference_logprobs_required=True,
        _step_log_dict=defaultdict(list),
    )
    policy.get_logprobs_from_meta(meta)
    policy.get_reference_policy_logprobs_from_meta(meta)
    meta, some = asyncio.run(controller._advantage_stage(meta))
    assert some
    return meta


def stepped(trainer: Any, meta: Any, loss: Any) -> dict[str, Any]:
    """Take a step as the controller does; return its metrics."""
    from nemo_rl.algorithms.single_controller_utils.utils import aggregate_step_metrics

    trainer.begin_train_step(loss)
    trainer.train_microbatches_from_meta(meta)
    return aggregate_step_metrics(trainer.finish_train_step())


def recipe() -> tuple[Any, ProrlSettings]:
    """Return a shipped recipe as NeMo RL's model, and as the block ``prorl:``."""
    from nemo_rl.algorithms.single_controller_utils import MasterConfig

    from nemo_gym_prorl.nemo_rl.configuration import read

    config = read("dapo-swe-qwen3-4b", [], ["++data.train.data_path=rows.jsonl"])
    return MasterConfig(**config), settings_of(config)


def test_rewards_advantages_and_loss_by_arithmetic_of_our_own(tmp_path: Path) -> None:
    """64 rows of 16 groups in 4 optimizer steps, with the loss of a recipe."""
    import torch
    from nemo_rl.algorithms.loss import ClippedPGLossFn
    from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient

    from tests.nemo_rl.controller import PARTITION, Policy

    torch.manual_seed(0)
    master, settings = recipe()
    shape = RewardShaping.of(settings.model_copy(update={"overlong": settings.overlong.model_copy(update=SHORT)}))
    rows = drawn_rows(7, GROUPS, SIZE, turns=6, longest=200)
    plane = NoOpDataPlaneClient()
    policy = Policy(plane, tmp_path)
    done = recorded(policy)
    numbered = RolloutRows(plane)
    meta, samples = batch(groups_of(rows, shape), numbered)
    meta = prepared(policy, numbered, meta, master)
    trainer = MiniBatches(policy, settings.mini_batches, GROUPS * SIZE)
    metrics = stepped(trainer, meta, ClippedPGLossFn(master.loss_fn))

    flat = [row for group in rows for row in group]
    rewards = [reward_of(row) for row in flat]
    advantages = [a for first in range(0, len(flat), SIZE) for a in normalized(rewards[first : first + SIZE])]
    got = plane.get_samples(samples, PARTITION, ["total_reward", "advantages", "input_ids", "token_mask"])
    for place, row in enumerate(flat):
        assert got["total_reward"][place].item() == pytest.approx(rewards[place], abs=1e-7)
        assert got["input_ids"][place][: len(row.tokens)].tolist() == row.tokens
        assert got["token_mask"][place][: len(row.tokens)].tolist() == [chosen is not None for chosen in row.sampled]
        assert got["advantages"][place][: len(row.tokens)].tolist() == pytest.approx(
            [advantages[place]] * len(row.tokens), abs=5e-7
        )
    assert min(rewards) < -1.5, "nothing was taken off for length"

    part = len(flat) // settings.mini_batches
    before = [log_probs(done[0].weights, row.tokens) for row in flat]
    for number, one in enumerate(done):
        places = range(number * part, (number + 1) * part)
        assert one.samples == [samples[place] for place in places]
        now = {place: log_probs(one.weights, flat[place].tokens) for place in places}
        terms = [
            term(current, proximal, sampled, advantages[place])
            for place in places
            for current, proximal, sampled in zip(now[place], before[place], flat[place].sampled[1:], strict=True)
            if sampled is not None
        ]
        assert one.loss == pytest.approx(math.fsum(terms) / len(terms), abs=1e-7)
    assert metrics["loss"] == pytest.approx(math.fsum(one.loss for one in done) / 4)
    # The last part is trained under other weights than those of its log-probabilities.
    assert metrics["probs_ratio_min"] < 0.99
    assert metrics["probs_ratio_max"] > 1.01
    assert metrics["global_valid_toks"] == sum(chosen is not None for row in flat for chosen in row.sampled)
    print(f"{len(flat)} rows, {sum(len(row.tokens) for row in flat)} tokens, losses {[one.loss for one in done]}")


NO_TOKENS, MASKED, UNTRUSTED = "an infrastructure failure", "an agent failure", "tokens that cannot be trusted"


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize(
    "without_loss",
    [
        {},
        {0: NO_TOKENS},
        {4: MASKED},
        {1: UNTRUSTED},
        {0: NO_TOKENS, 2: MASKED, 3: NO_TOKENS},
        {0: MASKED, 1: NO_TOKENS, 2: MASKED, 4: MASKED},
    ],
    ids=lambda case: "+".join(f"{place} {why}" for place, why in case.items()) or "none",
)
def test_a_row_without_loss_does_not_shift_the_baseline_of_its_siblings(
    without_loss: dict[int, str], leave_one_out: bool
) -> None:
    """With NeMo RL's own estimator the advantages equal those of a group without that row."""
    import torch
    from nemo_rl.algorithms.advantage_estimator import AdvEstimatorConfig, GRPOAdvantageEstimator

    configured = AdvEstimatorConfig(use_leave_one_out_baseline=leave_one_out, normalize_rewards=True)
    estimator = GRPOAdvantageEstimator(configured, None)
    rewards = [0.0, 1.0, 0.25, 1.0, 0.0]
    padded, lengths = 12, []
    masks, flat = [], []
    for number, without in enumerate((without_loss, {})):
        rollouts = []
        for place, reward in enumerate(rewards):
            row = Row(0.0 if without.get(place) is NO_TOKENS else reward)
            if without.get(place) is not NO_TOKENS:
                row.turn([7, 8, 9, number], [1, 2], [-0.5, -0.25])
            if without.get(place) is UNTRUSTED:
                row.turn([5], [3], [-0.5])
                row.output[1]["prompt_token_ids"][0] += 1
            masked = without.get(place) in (NO_TOKENS, MASKED)
            rollouts.append(dataclasses.replace(rollout_of(row, f"g{number}:{place}"), masked=masked))
        group = training_group(rollouts, lambda raw, length: raw)
        flat += [member.reward for member in group.members]
        for completion in record_of(group, number).completions:
            mask = [float("generation_logprobs" in one) for one in completion.message_log for _ in one["token_ids"]]
            masks.append(mask + [0.0] * (padded - len(mask)))
            lengths.append(sum(mask))
    owners = [[-1 - place // len(rewards), place % len(rewards)] for place in range(len(flat))]
    given = {"prompt_ids": torch.tensor(owners), "rewards": torch.tensor(flat), "mask": torch.tensor(masks)}
    got = GroupAdvantages(estimator).compute_advantage(**given)
    assert got.isfinite().all()
    for first, without in ((0, without_loss), (len(rewards), {})):
        siblings = [first + place for place in range(len(rewards)) if place not in without]
        assert [place for place in range(first, first + len(rewards)) if lengths[place]] == siblings
        alone = estimator.compute_advantage(
            prompt_ids=torch.zeros(len(siblings), 1), rewards=given["rewards"][siblings], mask=given["mask"][siblings]
        )
        assert torch.equal(got[siblings], alone)


@dataclasses.dataclass
class Compacted:
    """Rollout whose agent edited its past, and later compacted it: three branches, two of which share a turn.

    Attributes:
        turns: prompt, sampled tokens and their log-probabilities of each turn.
        rollout: the runner's form of the rollout.
    """

    turns: list[tuple[list[int], list[int], list[float]]]
    rollout: TrainedRollout

    @classmethod
    def of(cls, seed: int, name: str, reward: float) -> "Compacted":
        """Sample four turns."""
        draw, history, turns = random.Random(seed), ConversationIndex(), []

        def sample(before: ConversationNode | None) -> ConversationNode:
            observed, said = ([draw.randrange(256) for _ in range(draw.randint(2, 30))] for _ in range(2))
            log_probs = [-draw.randint(1, 6000) / 1024 for _ in said]
            turn = history.ledger.append(before and before.turn, observed, Generation(said, log_probs, Finish.STOP))
            turns.append((turn.prompt(), said, log_probs))
            tools = [{"type": "function", "function": {"name": "shell"}}]
            asked, answer = {"role": "user", "content": "go"}, {"role": "assistant", "content": ""}
            return history.record(before, [asked], answer, turn, tools)

        first = sample(None)
        sample(first)
        sample(first)
        last = sample(None)
        ids = {turn: f"call {number}" for number, turn in enumerate(history.ledger.turns)}
        traces = training_traces(name, branches_of(history), ids)
        assert [len(trace["sampled_spans"]) for trace in traces["traces"]] == [1, 2, 1]
        tokens = last.turn.prompt(), [*last.turn.sampled], [*last.turn.log_probs]
        names = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
        packed = take_tokens({"output": [dict(zip(names, tokens, strict=True))]})
        body = orjson.dumps({"training_traces": traces})
        return cls(turns, TrainedRollout(name, {}, reward, 0, False, packed, body=body))


@pytest.mark.parametrize(("mini_batches", "multiple"), [(1, 1), (2, 4)])
def test_a_rollout_of_three_traces_trains_each_sampled_token_once_with_its_advantage(
    mini_batches: int, multiple: int, tmp_path: Path
) -> None:
    """Ordinary rollouts beside it; the rows of a batch are filled up for a trainer of several ranks."""
    import torch
    from nemo_rl.algorithms.loss import ClippedPGLossFn
    from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient

    from tests.nemo_rl.controller import PARTITION, Policy

    torch.manual_seed(0)
    master, settings = recipe()
    shape = RewardShaping.of(settings.model_copy(update={"overlong": settings.overlong.model_copy(update=SHORT)}))
    plane = NoOpDataPlaneClient()
    policy = Policy(plane, tmp_path)
    done = recorded(policy)
    groups, sampled = [], []
    for number, rows in enumerate(drawn_rows(3, 4, SIZE, turns=3, longest=40)):
        rollouts, told = [], []
        for place, row in enumerate(rows):
            compacted = Compacted.of(10 * number + place, f"g{number}:{place}", row.reward)
            turns = [
                (one["prompt_token_ids"], one["generation_token_ids"], one["generation_log_probs"])
                for one in row.output
            ]
            several = place < number
            rollouts.append(compacted.rollout if several else rollout_of(row, f"g{number}:{place}"))
            told.append(compacted.turns if several else turns)
        groups.append(training_group(rollouts, shape))
        advantages = normalized([2 * row.reward - 1 for row in rows])
        sampled += [(advantage, *turn) for advantage, turns in zip(advantages, told, strict=True) for turn in turns]
    numbered = RolloutRows(plane, multiple)
    meta, samples = batch(groups, numbered)
    assert len(samples) % multiple == 0
    assert len(samples) >= 16 + 2 * 6, "six rollouts have two rows more"
    meta = prepared(policy, numbered, meta, master)
    loss = ClippedPGLossFn(master.loss_fn)
    metrics = stepped(MiniBatches(policy, mini_batches, 16, multiple), meta, loss)
    assert len(done) == mini_batches
    assert all(len(one.samples) % multiple == 0 for one in done)

    columns = ["input_ids", "input_lengths", "token_mask", "advantages", "generation_logprobs"]
    got = plane.get_samples(samples, PARTITION, columns)
    trained = []
    for row in range(len(samples)):
        ids, mask, advantages, behaviour = (
            got[name][row].tolist() for name in ("input_ids", "token_mask", *columns[3:])
        )
        places = [place for place in range(int(got["input_lengths"][row])) if mask[place]]
        trained += [(tuple(ids[: place + 1]), behaviour[place], advantages[place]) for place in places]
    wanted = [
        (tuple(prompt + said[: place + 1]), log_prob, advantage)
        for advantage, prompt, said, behaviour in sampled
        for place, log_prob in enumerate(behaviour)
    ]
    assert len(trained) == len(wanted) == metrics["global_valid_toks"]
    for one, other in zip(sorted(trained), sorted(wanted), strict=True):
        assert one[0] == other[0]
        assert one[1:] == pytest.approx(other[1:], abs=5e-7)
    if mini_batches == 1:
        [one] = done
        terms = [
            term(current, current, log_prob, advantage)
            for advantage, prompt, said, behaviour in sampled
            for current, log_prob in zip(log_probs(one.weights, prompt + said)[-len(said) :], behaviour, strict=True)
        ]
        assert one.loss == pytest.approx(math.fsum(terms) / len(terms), abs=1e-7)
        print(f"{len(samples)} rows, {len(terms)} sampled tokens, loss {one.loss}")


SHORT = {"max_sequence_length": 1200, "buffer_length": 600}


def reward_of(row: Row) -> float:
    """Scale a reward to -1 to 1, and subtract the overlong penalty of up to 1."""
    return 2 * row.reward - 1 - min(max((len(row.tokens) - 600) / 600, 0), 1)


def normalized(rewards: list[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (deviation + 1e-6) for reward in rewards]


def log_probs(weights: Any, tokens: list[int]) -> list[float]:
    """Return the log-probabilities of all tokens but the first by the stand-in's layers, in numpy."""
    import numpy as np

    embedding, layer, bias = (weights[name].numpy() for name in ("0.weight", "1.weight", "1.bias"))
    logits = embedding[tokens[:-1]] @ layer.T + bias
    logits -= logits.max(-1, keepdims=True)
    found = logits[np.arange(len(tokens) - 1), tokens[1:]] - np.log(np.exp(logits).sum(-1))
    return [float(value) for value in found]


def term(current: float, proximal: float, sampled: float, advantage: float) -> float:
    """Return the loss of a token by the formula in docs/train-nemo-rl.md."""
    ratio = math.exp(current - proximal)
    clipped = min(max(ratio, 1 - 0.2), 1 + 0.28)
    weight = min(math.exp(proximal - sampled), 2.0)
    towards = proximal - current  # the reference is the policy as it was
    divergence = math.exp(towards) - towards - 1
    return -weight * min(ratio * advantage, clipped * advantage) + 1e-4 * divergence
