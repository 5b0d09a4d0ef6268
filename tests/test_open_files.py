# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The limit of open files: raised where that is allowed, and never taken for another's fault.

``make test-long`` also sends a thousand rollouts at once to real servers with a soft limit of 1,024.
"""

import asyncio
import contextlib
import errno
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from nemo_gym_prorl.cli.scripted.text import MODEL_NAME
from nemo_gym_prorl.failures import FailureKind, Origin, Stage, classify
from nemo_gym_prorl.http.server_process import descriptor_exhaustion, open_files_needed, raise_open_file_limit
from tests.agent.gym_host import hosting, instance, url_of
from tests.agent.test_gym_environment import collected, gym_rows, scripted


def test_a_server_raises_its_soft_limit_to_the_hard_one() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200))\n"
        "from nemo_gym_prorl.http import server_process as o\n"
        "print(o.raise_open_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["200", "(200,", "200)"]
    assert open_files_needed(1000) > 4000


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_our_own_want_of_descriptors_is_named_as_such(number: int) -> None:
    failure = classify(OSError(number, os.strerror(number)), Stage.INIT)
    assert failure.kind is FailureKind.PROVIDER_QUOTA_EXHAUSTED
    assert failure.origin is Origin.INFRASTRUCTURE
    assert "ulimit -n" in failure.reason
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert str(limit) in descriptor_exhaustion().reason


CALLERS = 1000
SOFT = 1024
SLOTS = 32
"""Of the agent's RUN pool: the first ones take it up until everybody is there."""


@pytest.fixture
def room() -> Iterator[int]:
    """Descriptors enough for all callers in this process; the hard limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 4 * CALLERS:
        pytest.skip(f"{CALLERS} callers need a hard limit of open files of {4 * CALLERS}, here it is {before[1]}")
    raise_open_file_limit()
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.asynccontextmanager
async def servers(policy: str, hard: int) -> AsyncIterator[str]:
    """The agent, Gym's own resources server and a model server, a process each under that limit; the agent's URL."""
    names = {"type": "resources_servers", "name": "mcqa"}, {"type": "responses_api_models", "name": "policy_model"}
    model = {"base_url": policy, "api_key": "none", "model": MODEL_NAME, "policy": {"engine": "vllm_chat"}}
    config = {
        "mcqa": instance("resources_servers", "mcqa", domain="other"),
        "policy_model": instance("responses_api_models", "prorl_model", **model),
        "agent": instance("responses_api_agents", "prorl_agent", resources_server=names[0], model_server=names[1]),
    }
    async with contextlib.AsyncExitStack() as stack:
        for name in config:
            await stack.enter_async_context(hosting(config, name, files=(SOFT, hard)))
        yield url_of(config["agent"])


@pytest.mark.gym
@pytest.mark.timeout(1200)
@pytest.mark.long("takes two minutes")
async def test_a_thousand_run_at_once(scripted_policy: str, room: int) -> None:
    [row, *_] = gym_rows("mcqa")
    right = f"\\boxed{{{row['expected_answer']}}}"
    quick, slow = scripted(row, right), scripted(row, right, latency_s=10.0)
    rows = [slow if number < SLOTS else quick for number in range(CALLERS)]
    rows = [collected(row, number) if number % 2 else row for number, row in enumerate(rows)]
    everything = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None))

    async def reward(url: str, row: dict[str, Any]) -> float:
        async with http.post(f"{url}/run", json=row) as answer:
            assert answer.status == 200
            return float((await answer.json())["reward"])

    async with servers(scripted_policy, room) as url, everything as http:
        assert [*await asyncio.gather(*(reward(url, row) for row in rows))] == [1.0] * CALLERS
