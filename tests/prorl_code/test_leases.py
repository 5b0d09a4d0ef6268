# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sandboxes of sessions whose lease expires are stopped."""

import asyncio
import time

import pytest

from nemo_gym_prorl.agent.gym_http import LEASE_HEADER
from nemo_gym_prorl.servers import task_server
from nemo_gym_prorl.tasks.sessions import LEASE_SWEEPS
from tests.conftest import tiered
from tests.prorl_code.conftest import Client, row, serving
from tests.tasks import containers


pytestmark = pytest.mark.sandbox

SWEEP_S = 0.25
SLOW = "import time\ntime.sleep(100)\n"


async def call(client: Client) -> None:
    await client.tool("bash", command="sleep 100", timeout_s=100)


async def verdict(client: Client) -> None:
    await client.tool("str_replace_editor", command="create", path="solution.py", file_text=SLOW)
    await client.verify()


@pytest.mark.parametrize("doing", tiered([call, verdict], [call]))
async def test_vanished_caller_leaves_no_sandbox(doing: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_server, "RENEW_S", SWEEP_S)
    async with serving() as url, Client(url) as client, Client(url) as renewing:
        before = containers.instances()
        client.headers[LEASE_HEADER] = "lease"
        status, paths, _ = await client.post("/seed_session", row("HumanEval/2"))
        assert (status, paths["lease_path"]) == (200, "/renew_leases")
        assert callable(doing)
        at_it = asyncio.create_task(doing(client))
        until = time.monotonic() + 3 * LEASE_SWEEPS * SWEEP_S
        while time.monotonic() < until:
            assert await renewing.post(paths["lease_path"], {"leases": ["another", "lease"]}) == (200, {}, None)
            await asyncio.sleep(SWEEP_S)
        assert len(containers.instances() - before) == 1
        async with asyncio.timeout(60):
            while containers.instances() != before:
                await asyncio.sleep(0.1)
        at_it.cancel()
        assert (await client.post("/bash", {"command": "ls"}))[2] == "session_lost"
