# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Clients with keys of their own at a front: what each may, what it gets, and what of another's it never meets."""

from pathlib import Path

import aiohttp
import pytest

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.fleet.front import Front, front_app
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.service import ServiceSettings
from nemo_gym_prorl.serving.keys import authorization
from tests.rollout.fleet.fleets import Changing, fleet
from tests.rollout.fleet.test_front import HELD, ROW, lasting, until
from tests.rollout.test_keys_file import OF, write


async def test_a_front_tells_its_clients_apart(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys.json", OF["alice"], OF["bob"])
    async with (
        fleet(1, key="admin", clients=keys) as there,
        RolloutClient(there.url, "a", patience_s=0) as alice,
        RolloutClient(there.url, "b", patience_s=0) as bob,
        aiohttp.ClientSession() as http,
    ):
        for method, path in [("GET", "/v1/rollouts"), ("GET", "/v1/nodes"), ("GET", "/server_instances")]:
            for key, status in [(None, 401), ("c", 401), ("a", 403 if path == "/v1/nodes" else 200), ("admin", 200)]:
                async with http.request(method, there.url + path, headers=authorization(key)) as answer:
                    assert answer.status == status, (path, key)
        async with http.post(f"{there.url}/v1/nodes/drain", json={"node": "x"}, headers=authorization("b")) as answer:
            assert answer.status == 403
        assert (await alice.submit(HELD, id="r", group="g")).client == "alice"
        assert (await bob.submit(HELD, id="s", group="g")).client == "bob"
        with pytest.raises(ApiError, match="403"):
            await bob.get("r")
        with pytest.raises(ApiError, match="403"):
            await bob.cancel(["r"])
        assert [job.id async for job in alice.every(group="g")] == ["r"]
        (node,) = there.services
        await until(lambda: len(node.handler.sessions) == 2)
        groups = {job.group for job in node.pipeline.store.live()}
        assert len(groups) == 2, "at the node they are no siblings"
        node.handler.let_go.set()
        done = await alice.wait("r")
        assert (done.state, done.group) == (JobState.SUCCEEDED, "g")


async def test_who_floods_a_front_has_no_more_than_its_share(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys.json", OF["alice"], OF["bob"])  # 1 to 3
    async with (
        fleet(2, settings=ServiceSettings(max_queued=40), key="admin", clients=keys) as there,
        RolloutClient(there.url, "a", patience_s=0) as alice,
        RolloutClient(there.url, "b", patience_s=0) as bob,
    ):
        for number in range(48):  # two windows of 4, and what may wait
            # Those behind last, since shares are of slots that are held.
            await alice.submit(HELD if number < 8 else lasting(0.3), id=f"a{number}")
        with pytest.raises(ApiError, match="429: 40 rollouts are waiting"):
            await alice.submit_once(HELD)
        for number in range(20):
            await bob.submit(lasting(0.3), id=f"b{number}")
        for node in there.services:
            node.handler.let_go.set()
        cursor, clients = "0", list[str]()
        while len(clients) < 68:
            page = await there.client.ended(cursor, wait=20, limit=100)
            clients, cursor = clients + [job.client for job in page.rollouts], page.cursor
        assert 15 <= clients[8:32].count("bob") <= 20, "three of four, while it has any"
        await alice.submit(ROW)


async def test_a_file_of_keys_that_is_none_is_told_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="`prorl key new` makes one"):
        front_app(Front(Changing()), key=None, clients=tmp_path / "none")
