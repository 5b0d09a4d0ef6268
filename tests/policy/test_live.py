# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rollouts on two real engines with different weights, while engines die and weights change under them."""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from tokenizers import Tokenizer as FastTokenizer

from nemo_gym_prorl.policy.engines.connections import Connections
from nemo_gym_prorl.policy.engines.engine import origin_of
from nemo_gym_prorl.policy.engines.protocols import VllmCompletions
from nemo_gym_prorl.policy.metrics import PolicyMetrics
from nemo_gym_prorl.policy.pool.dispatcher import BackendDispatcher
from nemo_gym_prorl.policy.pool.pool import BackendPool
from nemo_gym_prorl.policy.service import PolicyService
from nemo_gym_prorl.policy.text.tokenizer import Tokenizer
from tests.policy.engines import MODEL, SCRIPTS, vllm, vllm_python
from tests.policy.families import FAMILIES
from tests.policy.test_exactness import TOLERANCE, Run, teacher_forced


pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
KEY = "of-the-other-engine"
OPEN = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def other_engine(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, subprocess.Popen]]:
    """A second vLLM with the same tokenizer, other weights, and a key."""
    folder = tmp_path_factory.mktemp("other")
    subprocess.run([vllm_python(), SCRIPTS / "make_tiny_model.py", folder / "model", "--seed", "1"], check=True)
    with vllm(folder / "model", folder / "engine.log", "--api-key", KEY) as (url, process):
        yield url, process


class Policy:
    """A policy service and its parts."""

    def __init__(self, connections: Connections, folder: Path) -> None:
        self.pool = BackendPool()
        self._keys: dict[str, dict[str, str]] = {}
        engine = VllmCompletions(connections, MODEL, self._keys)
        self.dispatcher = BackendDispatcher(self.pool, engine, tick_s=0.1, report_s=0.5)
        tokenizer = Tokenizer(FastTokenizer.from_file(str(folder / "tokenizer.json")))
        self.family = FAMILIES["thinking"]
        self.metrics = PolicyMetrics(self.pool)
        self.service = PolicyService(self.dispatcher, self.metrics, renderer=self.family.renderer(tokenizer))

    def add(self, name: str, url: str, version: str) -> None:
        self._keys[origin_of(url)] = OPEN
        self.dispatcher.apply(self.pool.add(name, url, version))

    def runs(self, count: int) -> list[Run]:
        return [Run(self.family, self.service, f"r{index}") for index in range(count)]


@pytest.fixture
async def policy(model_folder: Path) -> AsyncIterator[Policy]:
    async with Connections() as connections:
        policy = Policy(connections, model_folder)
        policy.dispatcher.start()
        yield policy
        await policy.dispatcher.aclose()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def check(run: Run, urls: dict[str, str]) -> set[str]:
    """An exact chain, each of whose spans has the log-probs of the weights that it names; returns their versions."""
    for earlier, later in itertools.pairwise(run.answers):
        assert later.turn.prompt()[: earlier.turn.end] == earlier.turn.prompt() + list(earlier.turn.sampled)
    (sequence,) = run.service.ledger(run.name).sequences()
    versions = {span.weight_version for span in sequence.spans if span.sampled}
    async with aiohttp.ClientSession(headers=OPEN) as session:
        for version in versions & urls.keys():
            forced = await teacher_forced(session, urls[version], list(sequence.ids))
            for span in sequence.spans:
                if span.weight_version == version:
                    recorded = sequence.log_probs[span.start : span.end]
                    pairs = zip(forced[span.start : span.end], recorded, strict=True)
                    assert max(abs(a - b) for a, b in pairs) <= TOLERANCE
    return versions


async def test_weights_change_while_fifty_rollouts_run(
    policy: Policy, engine_url: str, other_engine: tuple[str, subprocess.Popen]
) -> None:
    policy.add("old", engine_url, "1")
    runs = policy.runs(50)
    playing = asyncio.gather(*(run.play(random.Random(seed)) for seed, run in enumerate(runs)))
    await until(lambda: sum(len(run.answers) for run in runs) >= 60)
    assert await policy.dispatcher.pause()
    assert not any(backend.in_flight for backend in policy.pool.backends.values())
    policy.add("new", other_engine[0], "2")
    policy.dispatcher.apply(policy.pool.remove("old"))
    policy.dispatcher.apply(policy.pool.resume())
    await playing
    versions = [await check(run, {"1": engine_url, "2": other_engine[0]}) for run in runs]
    assert all(len(run.answers) == 4 for run in runs)
    assert {"1", "2"} in versions
    print(f"\n{sum(v == {'1', '2'} for v in versions)} of 50 rollouts span both weight versions, all spans verified")
