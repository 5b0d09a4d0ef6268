# SPDX-License-Identifier: Apache-2.0
"""The mixture of all four families as Gym's command line starts it: what it says, and what goes wrong in one."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from fastapi import FastAPI, Request, Response

from benchmarks.mixed_rows import FAMILIES, NULL, ORACLE, rows_of
from benchmarks.mixture import server_process
from nemo_gym_prorl.gym.deployment import GymDeployment
from nemo_gym_prorl.rollout.client import RolloutClient
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.schemas import JobView
from nemo_gym_prorl.scripted.text import MODEL_NAME
from nemo_gym_prorl.tasks.stem import problems as stem
from scripts.scripted_turns.stem import script_for
from tests.faulty_family.app import ANSWERS
from tests.rollout.serving import serve
from tests.tasks import containers
from tests.tasks.stem.judges import asked_in, honest


pytestmark = [pytest.mark.gym, pytest.mark.sandbox, pytest.mark.timeout(900)]

MIXTURE = "prorl_mixture"
FURTHER = {
    MIXTURE: {
        "responses_api_agents": {
            "prorl_agent": {
                "environments": {
                    "faulty": {
                        "resources_server": {"type": "resources_servers", "name": "faulty_family"},
                        "budgets": {"eval": 2},
                        "max_steps": 1,
                    }
                },
            }
        }
    },
    "faulty_family": {
        "resources_servers": {
            "prorl_code": {  # the folder in which Gym starts it
                "entrypoint": "../../tests/faulty_family/app.py",
                "host": "127.0.0.1",
                "domain": "other",
                "verified": False,
            }
        }
    },
    "prorl_stem": {
        "resources_servers": {
            "prorl_stem": {
                "judge_model_server": {"type": "responses_api_models", "name": "judge_model"},
                "judge_timeout_s": 3,
            }
        }
    },
}
"""One more environment, and a judge."""

JUDGE = {"entrypoint": "app.py", "host": "127.0.0.1", "api_key": "none", "model": "judge"} | {
    "return_token_id_information": False,
    "uses_reasoning_parser": False,
}
ORGANELLE = "Which organelle makes most of the ATP?"


@asynccontextmanager
async def judging() -> AsyncIterator[str]:
    """An endpoint that judges honestly; a question that tells it to hang or to fail is done that favour."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def judge(request: Request) -> Response:
        compared, tag = asked_in((await request.json())["messages"])
        if "hang" in compared["question"]:
            await asyncio.sleep(60)
        if "fail" in compared["question"]:
            return Response("out of memory", 500)
        said = honest(compared["question"], compared["first"], compared["second"], tag)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
        body = {"id": "c", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice]}
        return Response(orjson.dumps(body), media_type="application/json")

    async with serve(app) as url:
        yield url


def judged(question: str) -> dict[str, Any]:
    """A row of science whose answer is text, answered in other words."""
    problem = stem.problem_of(stem.row_for(question, "mitochondria"))
    script = script_for(problem, "oracle")
    script["turns"][-1]["content"] = "The answer is \\boxed{the mitochondrion}."
    return {**stem.row_for(question, "mitochondria", script=script), "data_source": "stem"}


def faulty(fault: str) -> dict[str, Any]:
    script = orjson.dumps({"turns": [{"content": "Done.", "tool_calls": []}]}).decode()
    params = {"input": [{"role": "user", "content": "Go."}], "metadata": {"script": script}}
    return {"responses_create_params": params, "data_source": "faulty", "fault": fault}


async def test_a_mixture_of_all_families(scripted_policy: str, shared_ray: str, tmp_path: Path) -> None:
    config = tmp_path / "further.yaml"
    async with judging() as judge:
        judge_model = {"judge_model": {"responses_api_models": {"vllm_model": JUDGE | {"base_url": f"{judge}/v1"}}}}
        config.write_text(yaml.safe_dump(FURTHER | judge_model))
        async with (
            GymDeployment(
                config_paths=[f"environments/{MIXTURE}/config.yaml", config],
                model_type="vllm_model/vllm_model_for_training",
                policy_base_url=scripted_policy,
                policy_model_name=MODEL_NAME,
                overrides=[shared_ray],
                work_dir=tmp_path / "gym",
                start_timeout_s=500,
            ) as gym,
            RolloutClient(gym.url(MIXTURE)) as client,
        ):
            await _earns_what_it_should(gym, tmp_path)
            await _verifiers_that_fail_are_no_reward(client)
            await _judges_that_fail_are_no_reward(gym, client)
            await _sandboxes_killed_in_eval_are_no_reward(client)
            await _a_server_that_hangs_holds_up_its_own(gym, client)
            assert (await client.status()).sessions == 0
    assert containers.instances() == set()


async def _earns_what_it_should(gym: GymDeployment, folder: Path) -> None:
    """Gym's own collector."""
    rows = [row for family in FAMILIES for variant in (ORACLE, NULL) for row in rows_of(family, variant, 2)]
    sent, results = folder / "rows.jsonl", folder / "results.jsonl"
    sent.write_bytes(b"".join(orjson.dumps({**row, "variant": row["data_source"]}) + b"\n" for row in rows))
    await gym.run_gym("eval", "run", "--no-serve", "--agent", MIXTURE, "-i", str(sent), "-o", str(results))
    done = [orjson.loads(line) for line in results.read_bytes().splitlines()]
    families = {row["data_source"] for row in rows}
    assert {"code", "math", "stem"} <= families
    assert Counter((row["rollout"]["environment"], row["reward"]) for row in done) == {
        (family, reward): 2 for family in families for reward in (0.0, 1.0)
    }
    [metrics] = orjson.loads((folder / "results_aggregate_metrics.json").read_bytes())
    assert {metrics["agent_metrics"][f"{family}/mean/reward"] for family in families} == {0.5}


async def _ended(client: RolloutClient, *rows: dict[str, Any]) -> list[JobView]:
    submitted = [await client.submit(row) for row in rows]
    return await asyncio.gather(*(client.wait(job.id) for job in submitted))


def _masked(job: JobView) -> str:
    """The kind of a failure that nobody trains on."""
    assert job.reward is None
    assert job.failure is not None
    assert job.result is not None
    assert job.result["mask_sample"] is True
    return job.failure.kind.value


async def _verifiers_that_fail_are_no_reward(client: RolloutClient) -> None:
    faults = [*ANSWERS, "hangs"]
    jobs = dict(zip(faults, await _ended(client, *map(faulty, faults)), strict=True))
    assert {_masked(job) for job in jobs.values()} == {"verifier_error"}
    tries = {fault: job.timings["eval"].attempts for fault, job in jobs.items()}
    assert tries == {"error": 3, "no JSON": 3, "hangs": 3, "no object": 1, "no reward": 1, "no number": 1, "truth": 1}
    assert {job.timings["run"].attempts for job in jobs.values()} == {1}
    assert (await client.status()).environments["faulty"].budgets["eval"] == 2


async def _judges_that_fail_are_no_reward(gym: GymDeployment, client: RolloutClient) -> None:
    honest, hanging, failing = await _ended(
        client, judged(ORGANELLE), judged(f"{ORGANELLE} (hang)"), judged(f"{ORGANELLE} (fail)")
    )
    assert honest.reward == 1.0, honest
    assert [_masked(job) for job in (hanging, failing)] == ["verifier_error"] * 2
    assert [job.timings["eval"].attempts for job in (hanging, failing)] == [3, 3]
    os.kill(server_process(gym, "judge_model"), signal.SIGSTOP)
    [stopped] = await _ended(client, judged(ORGANELLE))
    os.kill(server_process(gym, "judge_model"), signal.SIGCONT)
    assert _masked(stopped) == "verifier_error"


async def _sandboxes_killed_in_eval_are_no_reward(client: RolloutClient) -> None:
    """After one it is graded in another; where none lives, not even one that grades what is known, it is masked."""
    row = next(row for row in rows_of("code", ORACLE, 2) if "unit_tests" in row["verifier_metadata"])
    script = orjson.loads(row["responses_create_params"]["metadata"]["script"])
    [write] = script["turns"][0]["tool_calls"]
    source = write["arguments"]["file_text"]

    async def killed(most: int, takes_s: int) -> JobView:
        write["arguments"]["file_text"] = f"import time\ntime.sleep({takes_s})\n{source}"
        row["responses_create_params"]["metadata"]["script"] = orjson.dumps(script).decode()
        job, hit = await client.submit(row), set[int]()
        while not (seen := await client.get(job.id)).state.terminal:
            there = containers.first_processes() - hit if seen.state is JobState.EVALUATING else set()
            for pid in [*there][: most - len(hit)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                hit.add(pid)
            await asyncio.sleep(0.02)
        assert hit, "none was killed in time"
        return await client.wait(job.id)

    assert (await killed(1, 1)).reward == 1.0
    always = await killed(1000, 12)  # long enough to be met on a busy machine, too
    assert _masked(always) in ("provider_unavailable", "verifier_error")
    assert always.timings["eval"].attempts == 3


async def _a_server_that_hangs_holds_up_its_own(gym: GymDeployment, client: RolloutClient) -> None:
    server = server_process(gym, "prorl_math")
    os.kill(server, signal.SIGSTOP)
    stuck = [await client.submit(row) for row in rows_of("math", ORACLE, 3)]
    others = await _ended(client, *rows_of("code", ORACLE, 2), *rows_of("stem", ORACLE, 2))
    assert {job.reward for job in others} == {1.0}
    async with asyncio.timeout(60):
        while "prorl_math" not in (status := await client.status()).held:
            await asyncio.sleep(0.2)
    assert status.held["prorl_math"].environments == ["math"]
    os.kill(server, signal.SIGCONT)
    assert {(await client.wait(job.id)).reward for job in stuck} == {1.0}
    assert not (await client.status()).held
