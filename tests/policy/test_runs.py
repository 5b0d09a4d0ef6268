# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Backends of several runs: what is asked of one run, and where its turns go."""

from __future__ import annotations

import asyncio

import pytest

from nemo_gym_prorl.policy.config import PolicyConfig
from nemo_gym_prorl.policy.engines.engine import BackendFailed
from nemo_gym_prorl.policy.host import PolicyRuntime
from nemo_gym_prorl.policy.pool.backend import AlreadyThere, Backend


async def url_of(backend: Backend) -> str:
    return backend.url


async def test_a_turn_runs_at_its_rollouts_run_only() -> None:
    host = PolicyRuntime(PolicyConfig(base_url=[], model="m", engine="vllm_chat", unreachable_s=1.0))
    dispatcher, pool = host.dispatcher, host.pool
    async with host.lifespan():
        for run in ("x", "y"):
            await host.add(f"http://127.0.0.1:1/{run}", run=run, weight_version="1")
        with pytest.raises(AlreadyThere, match="of run 'x'"):
            await host.add("http://127.0.0.1:1/x/v1", run="y")
        pool.label("2", run="y")
        for number in range(6):
            run = "xy"[number % 2]
            placed = await dispatcher.run(f"r{number}", None, url_of, run=run)
            assert placed.result.endswith(f"/{run}")
            assert placed.weight_version == {"x": "1", "y": "2"}[run]
        assert await dispatcher.pause(run="x")
        paused = asyncio.ensure_future(dispatcher.run("r0", None, url_of, run="x"))
        assert (await dispatcher.run("r1", None, url_of, run="y")).result.endswith("/y")
        assert not paused.done()
        dispatcher.apply(pool.resume(run="x", weight_version="3"))
        assert (await paused).weight_version == "3"
        dispatcher.apply(pool.clear(run="x"))
        assert [backend.run for backend in pool.backends.values()] == ["y"]
        waits = asyncio.ensure_future(dispatcher.run("r0", None, url_of, run="x"))
        await asyncio.sleep(0.2)
        assert pool.waiting_of["x"] == 1
        with pytest.raises(BackendFailed, match=r"no backend of run 'x' served for 1 s \(there is none\)"):
            await waits
        assert not pool.waiting


@pytest.mark.parametrize(
    ("update", "met"),
    [("label", {"y"}), ("resume", {"y"}), ("resume without a label", {"x", "y"})],
)
async def test_new_weights_have_engines_of_their_run_met_again(update: str, met: set[str]) -> None:
    host = PolicyRuntime(PolicyConfig(base_url=[], model="m", engine="vllm_chat"))
    async with host.lifespan():
        # The load reports, which also forget an engine that does not answer, come later.
        urls = {run: f"http://127.0.0.1:1/{run}" for run in ("x", "y")}
        for run, url in urls.items():
            await host.add(url, run=run)
            host.engine.contexts[url] = 100
        if update == "label":
            host.label("2", run="x")
        else:
            await host.resume(weight_version="2" if update == "resume" else None, run="x")
        assert {run for run, url in urls.items() if url in host.engine.contexts} == met
