# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""One Gym deployment for all tests of what happens in a running one: a deployment is ten processes that import the
same 2,000 modules, which takes longer than what most tests look at.

The deployment is the shipped mixture of all four families, with a judge and a family whose verifier behaves as the row
says. The family ``code`` also has an agent of its own, which scores one rollout at a time.
"""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import yaml
from fastapi import FastAPI, Request, Response

from nemo_gym_prorl.cli.scripted.server import ScriptedConfig
from nemo_gym_prorl.cli.scripted.server import serve as serve_scripted
from nemo_gym_prorl.cli.scripted.text import MODEL_NAME
from nemo_gym_prorl.deployment.deployment import GymDeployment
from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.rollout.api.schemas import JobView
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.tasks.code.code_rows import humaneval_row, problems, row_for
from nemo_gym_prorl.tasks.stem import problems as stem
from scripts import swe_examples
from scripts.scripted_turns import code as code_scripts
from scripts.scripted_turns import humaneval as humaneval_scripts
from scripts.scripted_turns import math as math_scripts
from scripts.scripted_turns import stem as stem_scripts
from scripts.scripted_turns import swe as swe_scripts
from tests.deployment.gym_command import gym as gym_command
from tests.rollout.serving import serve
from tests.tasks.code.tables import CONTESTS, contest_problem
from tests.tasks.stem.judges import asked_in, honest


MIXTURE = "prorl_mixture"
FAMILIES = ("code", "math", "stem", "swe")
"""Names of the environments in ``environments/prorl_mixture``, which are what rows have in ``data_source``."""
ORACLE, NULL = "oracle", "null"
PLAYED = {ORACLE: "reference", NULL: "stub"}
MODEL = "policy_model"
DISK_MIB = 256

LOOPBACK = {"entrypoint": "app.py", "host": "127.0.0.1"}


def _named(kind: str, name: str) -> dict[str, str]:
    return {"type": kind, "name": name}


def _agent(implementation: str, family: str, **settings: Any) -> dict[str, Any]:
    servers = {
        "resources_server": _named("resources_servers", family),
        "model_server": _named("responses_api_models", MODEL),
    }
    return {"responses_api_agents": {implementation: LOOPBACK | servers | settings}}


def _further(judge_url: str) -> dict[str, Any]:
    faulty = {"resources_server": _named("resources_servers", "faulty_family"), "budgets": {"eval": 2}, "max_steps": 1}
    mixture = {"environments": {"faulty": faulty}}
    # The folder is that in which Gym starts it.
    entrypoint = {"entrypoint": "../../tests/faulty_family/app.py", "host": "127.0.0.1"}
    judging = {"judge_model_server": _named("responses_api_models", "judge_model"), "judge_timeout_s": 2}
    judge = LOOPBACK | {
        "base_url": f"{judge_url}/v1",
        "api_key": "none",
        "model": "judge",
        "return_token_id_information": False,
        "uses_reasoning_parser": False,
    }
    return {
        MIXTURE: {"responses_api_agents": {"prorl_agent": mixture}},
        "faulty_family": {"resources_servers": {"prorl_code": entrypoint | {"domain": "other", "verified": False}}},
        "prorl_stem": {"resources_servers": {"prorl_stem": judging}},
        "judge_model": {"responses_api_models": {"vllm_model": judge}},
        "prorl_code_agent": _agent("prorl_agent", "prorl_code", stages={"eval": 1}, max_attempts=2),
    }


@dataclass(frozen=True)
class Families:
    """The running deployment.

    Attributes:
        gym: it.
        disk: where its sandboxes are kept, if that is a file system of their own with little room.
    """

    gym: GymDeployment
    disk: Path | None

    async def collect(self, rows: list[dict[str, Any]], folder: Path, *arguments: str) -> list[dict[str, Any]]:
        """What Gym's own collector has to say of these rows."""
        sent, results = folder / "rows.jsonl", folder / "results.jsonl"
        sent.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        await gym_command(self.gym.cli, "eval", "run", "--no-serve", *arguments, "-i", str(sent), "-o", str(results))
        return [orjson.loads(line) for line in results.read_bytes().splitlines()]


@asynccontextmanager
async def deployed(ray: str, folder: Path) -> AsyncIterator[Families]:
    """It, with logs in ``folder``; at its end none of its sandboxes may be left."""
    config = folder / "further.yaml"
    with small_disk() as disk:
        async with serve_scripted(ScriptedConfig()) as policy, _judging() as judge:
            config.write_text(yaml.safe_dump(_further(judge)))
            async with GymDeployment(
                config_paths=[f"environments/{MIXTURE}/config.yaml", config],
                model_type="prorl_model",
                policy_base_url=policy,
                policy_model_name=MODEL_NAME,
                overrides=[ray],
                env={"PRORL_STATE": str(disk)} if disk else {},
                work_dir=folder / "gym",
            ) as gym:
                yield Families(gym, disk)
                async with RolloutClient(gym.url(MIXTURE)) as client:
                    assert (await client.status()).sessions == 0
        assert not disk or list(disk.glob("*/b-*")) == [], "a sandbox is left"


@contextmanager
def small_disk() -> Iterator[Path | None]:
    """A file system of its own with little room; ``None`` if this user can't make one."""
    folder = Path(tempfile.mkdtemp(prefix="prorl-disk-", dir="/tmp"))
    options = ["-o", f"size={DISK_MIB}m,mode=1777"]
    try:
        made = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)], check=False).returncode == 0
    except FileNotFoundError:
        made = False
    try:
        yield folder if made else None
    finally:
        if made:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


@asynccontextmanager
async def _judging() -> AsyncIterator[str]:
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


def rows_of(family: str, variant: str, most: int) -> list[dict[str, Any]]:
    """Some rows of a family of :data:`FAMILIES`, solved (:data:`ORACLE`) or left alone (:data:`NULL`).

    Those of software engineering have images where ``make swe-tasks`` has been run; there are none elsewhere.
    """
    match family:
        case "code":
            contests = [_contest_row(contest, variant) for contest in CONTESTS.values()]
            humaneval = [
                humaneval_row(problem, humaneval_scripts.script_for(problem, PLAYED[variant]))
                for problem in problems().values()
            ]
            rows = [row for pair in zip(humaneval, contests, strict=False) for row in pair]
        case "math":
            rows = [*math_scripts.example_rows(variant)]
        case "stem":
            rows = [_energy_row(mass, variant) for mass in range(2, 2 * most + 2, 2)]
        case _:
            made = [row for row in swe_examples.rows() if ImageStore().entry_named(str(row["image"]))]
            rows = [swe_scripts.scripted_row(row, variant) for row in made]
    return [{**row, "data_source": family} for row in rows[:most]]


def _contest_row(contest: Any, variant: str) -> dict[str, Any]:
    script = code_scripts.oracle(contest["solution"]) if variant == ORACLE else code_scripts.null()
    solved = contest_problem(contest)
    tests = solved.tests
    unit_tests = {"inputs": [test.input for test in tests], "outputs": [test.expected for test in tests]}
    metadata = {"unit_tests": unit_tests, "checker": dict(solved.checker)}
    return row_for(f"The problem {contest['name']!r}.", metadata, function=None, script=script)


def _energy_row(mass: int, variant: str) -> dict[str, Any]:
    question = f"What is the kinetic energy of {mass} kg at 3 m/s?"
    problem = stem.problem_of(stem.row_for(question, f"{mass * 9 / 2:g} J"))
    return stem.row_for(question, problem.expected, script=stem_scripts.script_for(problem, variant))


def solved(change: Callable[[str], str] = str, first_s: float = 0.0, by_shell: bool = False) -> dict[str, Any]:
    """A problem with two tests, and a program that solves it, changed first; written after ``first_s`` seconds
    of thought, by the editor or a shell."""
    row = rows_of("code", ORACLE, 2)[1]
    tests = row["verifier_metadata"]["unit_tests"]
    row["verifier_metadata"]["unit_tests"] = {kind: values[:2] for kind, values in tests.items()}
    script = orjson.loads(row["responses_create_params"]["metadata"]["script"])
    [write] = script["turns"][0]["tool_calls"]
    text = change(write["arguments"]["file_text"])
    write["arguments"]["file_text"] = text
    if by_shell:
        write |= {"name": "bash", "arguments": {"command": f"cat > solution.py <<'END'\n{text}\nEND"}}
    script["turns"][0]["latency_s"] = first_s
    row["responses_create_params"]["metadata"]["script"] = orjson.dumps(script).decode()
    return row


async def ended(client: RolloutClient, *rows: dict[str, Any]) -> list[JobView]:
    submitted = [await client.submit(row) for row in rows]
    return await asyncio.gather(*(client.wait(job.id) for job in submitted))


def masked(job: JobView) -> str:
    """The kind of a failure that nobody trains on."""
    assert job.reward is None, job
    assert job.failure is not None
    assert job.result is not None
    assert job.result["mask_sample"] is True
    return job.failure.kind.value
