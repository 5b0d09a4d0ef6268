# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Validation by the rollout services, since NeMo RL's SingleController has none.

A validation begins when the engines have a weight version that is due, takes precedence in the services' queues, and
runs concurrently with training. The next weights wait until its rollouts have ended and its metrics are logged.
Therefore one policy samples the whole validation, and no result is lost at the end of training.
"""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from nemo_gym_prorl.failures import InfrastructureError, Origin
from nemo_gym_prorl.rollout.api.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.api.schemas import JobView
from nemo_gym_prorl.rollout.job import JobState


LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Validation:
    """Rows and schedule of validations; pickled for another process.

    Attributes:
        rows: rows with sampling parameters.
        period: weight versions between two validations.
        at_start: whether version 0 is validated.
        last: final weight version, which is not validated because its metrics would not be logged.
    """

    rows: Sequence[Mapping[str, Any]]
    period: int
    at_start: bool
    last: int

    def is_due(self, version: int) -> bool:
        """Return whether a weight version is to be validated."""
        if not version:
            return self.at_start
        return bool(self.period) and version % self.period == 0 and version < self.last


def validation_of(config: Mapping[str, Any]) -> Validation | None:
    """Return the validation that a resolved configuration asks for; ``None`` without rows or without a schedule."""
    grpo, generation = config["grpo"], config["policy"]["generation"]
    data = config["data"].get("validation")
    if not data or not (grpo["val_period"] or grpo.get("val_at_start")):
        return None
    lines = [line for line in Path(data["data_path"]).read_text().splitlines() if line.strip()]
    sampling = {name: generation.get(f"val_{name}", generation[name]) for name in ("temperature", "top_p")}
    sampling["max_new_tokens"] = generation["max_new_tokens"]
    rows = [with_sampling_params(json.loads(line), sampling) for line in lines] * int(data.get("repeat", 1))
    return Validation(rows, grpo["val_period"], bool(grpo.get("val_at_start")), grpo["max_num_steps"])


def with_sampling_params(row: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dataset row with the sampling parameters that NeMo RL's engines require."""
    params = dict(row["responses_create_params"])
    longest = params.get("max_output_tokens")
    own = generation["max_new_tokens"]
    params["temperature"], params["top_p"] = generation["temperature"], generation["top_p"]
    params["max_output_tokens"] = own if longest is None else min(longest, own)
    return {**row, "responses_create_params": params}


async def validate(
    version: int,
    rows: Sequence[Mapping[str, Any]],
    services: Sequence[RolloutClient],
    client: str,
    options: Mapping[str, Any],
) -> dict[str, float]:
    """Run one rollout of each row and return the metrics.

    Args:
        version: weight version of the policy.
        rows: validation rows.
        services: clients of rollout services, not yet open.
        client: client name of the submissions.
        options: further fields of each submission.
    """
    async with AsyncExitStack() as stack:
        for service in services:
            await stack.enter_async_context(service)

        async def outcome(place: int) -> JobView | None:
            service = services[place % len(services)]
            group = f"{client}:validation-{version}:{place}"
            try:
                # Before training rollouts in the queue, since the next weights wait for the validation.
                fields = {"group": group, "client": client, "priority": 1, **options}
                await service.submit(dict(rows[place]), id=f"{group}:0", **fields)
                return await service.wait(f"{group}:0")
            except (ApiError, InfrastructureError, aiohttp.ClientError, OSError) as error:
                LOG.warning("validation row %d has no reward: %s", place, error or type(error).__name__)
                return None

        jobs = await asyncio.gather(*map(outcome, range(len(rows))))
    scored = [(job, reward) for job in jobs if job and (reward := _reward_of(job)) is not None]
    found = {
        "validation/weight_version": float(version),
        "validation/rollouts": float(len(jobs)),
        "validation/without_reward": float(len(jobs) - len(scored)),
    }
    if scored:
        found["validation/reward"] = statistics.fmean(reward for _, reward in scored)
        found["validation/turns"] = statistics.fmean(job.turns for job, _ in scored)
    LOG.info("validation: %s", found)
    return found


def _reward_of(job: JobView) -> float | None:
    """Return the reward of a job; 0 for an agent failure, since leaving those out would favour quick rollouts."""
    if job.failure is not None and job.failure.origin is Origin.AGENT:
        return 0.0
    return job.reward if job.state is JobState.SUCCEEDED else None
