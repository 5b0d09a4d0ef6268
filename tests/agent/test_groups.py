# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Verifiers that answer nobody before all of a group are there: each is scored, with fewer slots than siblings.

Gym's own ``genrm_compare``, of whichever version is installed, compares answers by asking a model: that is played.
What becomes of groups that are not whole is tried with a server of its kind.
"""

import asyncio
import importlib.metadata
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest
from fastapi import Request

from tests.agent.gym_host import hosting, instance
from tests.agent.peers import Deployment, Environment, Peer, Policy, deployment, hang, once, status
from tests.rollout.serving import serve


def row(prompt: object) -> dict[str, Any]:
    return {"responses_create_params": {"input": [{"role": "user", "content": f"prompt {prompt}"}]}}


async def submit(at: Deployment, *ids: str, **options: Any) -> None:
    """Rollouts ``PROMPT:MEMBER``, at once."""
    for rollout in ids:
        prompt = rollout.partition(":")[0]
        body = {"row": row(prompt), "id": rollout, "group": f"group-{prompt}", **options}
        code, said, _ = await at.post("/v1/rollouts", body)
        assert code == 202, said


async def ended(at: Deployment, *ids: str) -> dict[str, dict[str, Any]]:

    async def one(rollout: str) -> dict[str, Any]:
        while not (job := await at.get(f"/v1/rollouts/{rollout}?wait=20"))["finished_at"]:
            pass
        return dict(job)

    return dict(zip(ids, await asyncio.gather(*map(one, ids)), strict=True))


def worth(rollout: str) -> int:
    """What the judge thinks of a rollout's answer: 1 to 5."""
    return 1 + int(rollout.partition(":")[2].partition(".")[0]) % 5


@dataclass
class Judge(Peer):
    """The model that ``genrm_compare`` asks: an answer is worth the number that it is."""

    def answer(self, method: str, path: str, request: Request) -> Any:
        told = self.bodies[-1]["metadata"]
        verdict = {"score_1": int(told["response_1"]), "score_2": int(told["response_2"]), "ranking": 3.5}
        text = {"type": "output_text", "text": orjson.dumps(verdict).decode(), "annotations": []}
        return {"output": [{"type": "message", "role": "assistant", "content": [text]}]}


async def test_gyms_comparison_of_siblings_scores_all_of_them() -> None:
    prompts, size, slots, judge = 4, 4, 2, Judge()
    async with serve(judge.app()) as judge_url:
        model = instance("responses_api_models", "genrm_model")
        at = urlsplit(judge_url)
        model["responses_api_models"]["genrm_model"] |= {"host": at.hostname, "port": at.port}
        comparison = instance(
            "resources_servers",
            "genrm_compare",
            domain="rlhf",
            genrm_model_server={"type": "responses_api_models", "name": "genrm_model"},
            genrm_responses_create_params={"input": []},
            num_rollouts_per_prompt=size,
        )
        [block] = comparison["resources_servers"].values()
        policy = Policy(turns=1, says=lambda rollout: str(worth(rollout)))
        settings: dict[str, Any] = {"stages": {"run": size - 1, "eval": slots}, "budgets": {"eval": 60.0}}
        where = {"type": "resources_servers", "name": "comparison"}
        async with (
            hosting({"comparison": comparison, "genrm_model": model}, "comparison"),
            deployment(policy=policy, elsewhere={"comparison": block}, resources_server=where, **settings) as service,
        ):
            ids = [f"{prompt}:{member}" for member in range(size) for prompt in range(prompts)]
            await submit(service, *ids)
            jobs = await ended(service, *ids)
    assert {job["state"] for job in jobs.values()} == {"succeeded"}
    unlike = {name: job["reward"] for name, job in jobs.items() if job["reward"] != worth(name)}
    # Gym 0.4 counts no comparison that is under way when those of the last sibling are there: who has no other gets 3.
    assert len(unlike) <= (len(ids) // 8 if importlib.metadata.version("nemo-gym").startswith("0.4.") else 0), unlike
    assert set(unlike.values()) <= {3.0}
    assert len(judge.bodies) == prompts * size, "each answer was compared with two others, once"
    assert not any("_ng_group_id" in job["result"] for job in jobs.values()), "the rows are the callers'"


@dataclass
class Together(Environment):
    """Scores four rollouts together, and knows them by Gym 0.7's marks."""

    there: dict[str, dict[int, asyncio.Event]] = field(default_factory=dict)

    def answer(self, method: str, path: str, request: Request) -> Any:
        return self._verify(self.bodies[-1]) if path == "/verify" else super().answer(method, path, request)

    async def _verify(self, body: dict[str, Any]) -> Any:
        cohort = self.there.setdefault(body["_ng_group_id"], {})
        assert body["_ng_rollout_index"] not in cohort, "each has a place of its own"
        mine = cohort[body["_ng_rollout_index"]] = asyncio.Event()
        if len(cohort) == 4:
            for event in cohort.values():
                event.set()
        await mine.wait()
        return {**body, "reward": 1.0}


TOGETHER: dict[str, Any] = {"scores_groups_of": 4, "stages": {"run": 2, "ready": 0, "eval": 1}}


@pytest.mark.parametrize(
    ("on_timeout", "becomes"),
    [("mask", ("timed_out", None)), ("zero", ("succeeded", 0.0)), ("score", ("succeeded", 1.0))],
)
async def test_a_member_whose_time_is_up_takes_part_for_its_siblings_sake(on_timeout: str, becomes: Any) -> None:
    environment = Together()
    environment.instead["/count"] = once(hang(60))
    async with deployment(environment, Policy(turns=2), **TOGETHER, on_timeout=on_timeout, budgets={"run": 1.0}) as at:
        ids = [f"0:{member}" for member in range(4)]
        await submit(at, *ids)
        jobs = await ended(at, *ids)
    told = sorted(((job["state"], job["reward"]) for job in jobs.values()), key=lambda one: one == becomes)
    assert told == [("succeeded", 1.0)] * 3 + [becomes]
    assert environment.counts["/verify"] == 4
    for job in jobs.values():
        assert job["masked"] == (job["state"] == "timed_out")
        if job["masked"]:
            assert (job["failure"]["kind"], job["failure"]["origin"]) == ("agent_timeout", "agent")
            assert job["result"]["mask_sample"] is True


async def test_a_group_that_is_not_whole() -> None:
    environment = Together()
    async with deployment(environment, Policy(turns=1), **TOGETHER, budgets={"eval": 1.5}) as at:
        code, problem, _ = await at.post("/v1/rollouts", {"row": row(0)})
        assert (code, problem["errors"][0]["field"]) == (422, "group")
        await submit(at, "0:0", "0:1", "0:2")
        while (waiting := (await at.get("/status"))["stages"]["eval"])["waiting"] < 3:
            await asyncio.sleep(0.02)
        assert waiting["working"] == 0, "who waits for siblings holds no slot"
        await submit(at, "1:0", "1:1", "1:2", "1:3")
        whole = await ended(at, "1:0", "1:1", "1:2", "1:3")
        assert {job["reward"] for job in whole.values()} == {1.0}, "it holds up no other group"
        async with at.http.delete(f"{at.url}/v1/rollouts/0:1") as answer:
            assert (await answer.json())["state"] == "cancelled"
        await submit(at, "0:3", "0:4")
        mended = await ended(at, "0:0", "0:2", "0:3", "0:4")
        assert {job["reward"] for job in mended.values()} == {1.0}, "another one in its place"
        asked = environment.counts["/verify"]
        await submit(at, "2:0", "2:1")
        for job in (await ended(at, "2:0", "2:1")).values():
            assert (job["failure"]["kind"], job["failure"]["origin"]) == ("cohort_incomplete", "infrastructure")
            assert job["masked"]
        assert environment.counts["/verify"] == asked == 8


async def test_a_cohort_that_was_not_scored_is_scored_again_and_as_another() -> None:
    environment = Together(instead={"/verify": once(status(503))})
    async with deployment(environment, Policy(turns=1), **TOGETHER, budgets={"eval": 1.0}, max_attempts=2) as at:
        ids = [f"0:{member}" for member in range(4)]
        await submit(at, *ids)
        jobs = await ended(at, *ids)
    assert [job["reward"] for job in jobs.values()] == [1.0] * 4
    assert [len(cohort) for cohort in environment.there.values()] == [3, 4]
