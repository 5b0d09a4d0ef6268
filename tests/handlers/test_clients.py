# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Clients with keys of their own at Gym's routes of the agent."""

import asyncio
from pathlib import Path
from typing import Any

from nemo_gym_prorl.serving.keys import authorization
from tests.handlers.peers import COLLECTED, ROW, Deployment, Environment, deployment
from tests.rollout.test_keys_file import OF, write


SLOW = "/seed_session"


async def post(at: Deployment, key: str, body: Any, path: str = "/run") -> tuple[int, Any]:
    status, answer, _ = await at.post(path, body, headers=authorization(key))
    return status, answer


async def owners(at: Deployment) -> dict[str, str]:
    async with at.http.get(f"{at.url}/v1/rollouts", headers=authorization("admin")) as answer:
        return {job["id"]: job["client"] for job in (await answer.json())["rollouts"]}


async def test_a_row_that_several_post_is_a_rollout_for_each(tmp_path: Path) -> None:
    """Two collectors of one client may have the same row, too."""
    come, go = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        come.set()
        await go.wait()

    environment = Environment()
    environment.instead[SLOW] = slow
    keys = write(tmp_path / "keys.json", OF["alice"], OF["bob"])
    async with deployment(environment, control_token="admin", keys_file=str(keys)) as at:
        posts = [asyncio.create_task(post(at, key, COLLECTED)) for key in ("a", "b", "a")]
        await come.wait()
        async with asyncio.timeout(60):
            while len(await owners(at)) < 3:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        go.set()
        answers = [await one for one in posts]
        assert [(status, answer["reward"]) for status, answer in answers] == [(200, 1.0)] * 3
        ids = [answer["rollout"]["id"] for _, answer in answers]
        assert len({*ids}) == 3
        assert sorted((await owners(at)).values()) == ["alice", "alice", "bob"]


async def test_a_row_cannot_name_another_client_or_anothers_rollout(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys.json", OF["alice"], OF["bob"])
    async with deployment(control_token="admin", keys_file=str(keys)) as at:
        status, problem = await post(at, "b", {**ROW, "rollout": {"client": "alice"}})
        assert (status, problem["type"].rpartition(":")[2]) == (403, "not-yours")
        assert problem["errors"][0]["field"] == "rollout.client"
        assert (await post(at, "a", {"row": ROW, "id": "mine"}, "/v1/rollouts"))[0] == 202
        status, problem = await post(at, "b", {**ROW, "rollout": {"id": "mine"}})
        assert (status, problem["errors"][0]["field"]) == (409, "rollout.id")
        status, row = await post(at, "b", {**COLLECTED, "rollout": {"client": "alice"}})
        assert (status, row["mask_sample"], "rollout.client" in row["failure_reason"]) == (200, True, True)
        assert set((await owners(at)).values()) == {"alice"}
        assert (await post(at, "admin", {**ROW, "rollout": {"client": "bob"}}))[0] == 200
        assert set((await owners(at)).values()) == {"alice", "bob"}


async def test_a_key_that_is_not_good_for_rollouts_runs_none(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys.json", {**OF["alice"], "scopes": ["read", "cancel"]})
    async with deployment(control_token="admin", keys_file=str(keys)) as at:
        for path in ("/run", "/v1/responses", "/aggregate_metrics", "/v1/rollouts"):
            assert (await post(at, "a", COLLECTED, path))[0] == 403
            assert (await post(at, "nobody", COLLECTED, path))[0] == 401
        assert at.environment.calls == []
