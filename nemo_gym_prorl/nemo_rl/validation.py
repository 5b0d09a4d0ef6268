# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Validation on NeMo RL's SingleController, which has none: rows that are never trained on, by the rollout services.

It begins when the engines have weights that are due, ahead of what else is in the queues, and goes on beside training.
The next weights wait for it and until it is told, so one policy has sampled all of it, and none is lost at the end.
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
    """What is validated on, and when; goes to another process as a pickle.

    Attributes:
        rows: ready to be sampled.
        period: of weight versions that are due.
        at_start: the first ones are, too.
        last: weights of the end, which nobody would be told about.
    """

    rows: Sequence[Mapping[str, Any]]
    period: int
    at_start: bool
    last: int

    def is_due(self, version: int) -> bool:
        """Whether these weights are to be validated."""
        if not version:
            return self.at_start
        return bool(self.period) and version % self.period == 0 and version < self.last


def validation_of(config: Mapping[str, Any]) -> Validation | None:
    """What a resolved configuration asks for in NeMo RL's own words; ``None`` if it has no rows or no occasion."""
    grpo, generation = config["grpo"], config["policy"]["generation"]
    data = config["data"].get("validation")
    if not data or not (grpo["val_period"] or grpo.get("val_at_start")):
        return None
    lines = [line for line in Path(data["data_path"]).read_text().splitlines() if line.strip()]
    sampling = {name: generation.get(f"val_{name}", generation[name]) for name in ("temperature", "top_p")}
    sampling["max_new_tokens"] = generation["max_new_tokens"]
    rows = [sampled_row(json.loads(line), sampling) for line in lines] * int(data.get("repeat", 1))
    return Validation(rows, grpo["val_period"], bool(grpo.get("val_at_start")), grpo["max_num_steps"])


def sampled_row(row: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a data set with the sampling parameters that NeMo RL's engines insist on."""
    params = dict(row["responses_create_params"])
    longest = params.get("max_output_tokens")
    own = generation["max_new_tokens"]
    params["temperature"], params["top_p"] = generation["temperature"], generation["top_p"]
    params["max_output_tokens"] = own if longest is None else min(longest, own)
    return {**row, "responses_create_params": params}


async def validated(
    version: int,
    rows: Sequence[Mapping[str, Any]],
    services: Sequence[RolloutClient],
    client: str,
    options: Mapping[str, Any],
) -> dict[str, float]:
    """Metrics of a policy, when each row has its outcome.

    Args:
        version: its weights.
        rows: one rollout of each.
        services: clients that are not open yet.
        client: under which they are submitted.
        options: more for each submission.
    """
    async with AsyncExitStack() as stack:
        for service in services:
            await stack.enter_async_context(service)

        async def outcome(place: int) -> JobView | None:
            service = services[place % len(services)]
            group = f"{client}:validation-{version}:{place}"
            try:
                # Ahead of what else waits there: the next weights wait for it.
                about = {"group": group, "client": client, "priority": 1, **options}
                await service.submit(dict(rows[place]), id=f"{group}:0", **about)
                return await service.wait(f"{group}:0")
            except (ApiError, InfrastructureError, aiohttp.ClientError, OSError) as error:
                LOG.warning("row %d of the validation has no reward: %s", place, error or type(error).__name__)
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
    """An agent's bad end is worth 0: a mean of those that came to an end would be that of the quick ones."""
    if job.failure is not None and job.failure.origin is Origin.AGENT:
        return 0.0
    return job.reward if job.state is JobState.SUCCEEDED else None
