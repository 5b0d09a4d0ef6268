# SPDX-License-Identifier: Apache-2.0
"""The ``prorl`` command against a real service. Signals that its process gets: test_submit.py."""

import asyncio
import io
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from nemo_gym_prorl.cli import main
from nemo_gym_prorl.commands.jobs import find_service
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.api import rollout_router
from nemo_gym_prorl.rollout.metrics import PipelineMetrics
from nemo_gym_prorl.rollout.settings import PipelineSettings
from nemo_gym_prorl.serving.access import KeyGuard
from tests.rollout.handlers import Bench
from tests.rollout.serving import serve


TOKEN = "t0ken"


@asynccontextmanager
async def service(bench_settings: PipelineSettings | None = None) -> AsyncIterator[str]:
    pipeline = Bench(bench_settings or PipelineSettings()).pipeline()
    app = FastAPI()
    app.include_router(rollout_router(pipeline, PipelineMetrics(pipeline)))
    app.add_middleware(KeyGuard, key=TOKEN)
    async with serve(app) as url:
        yield url
        await pipeline.close()


async def prorl(*arguments: str, url: str | None = None, **env: str) -> tuple[int, str]:
    """Exit code and output of a command. Not in a process of its own, which works a second before it begins."""
    env = {"PRORL_TOKEN": TOKEN, "COLUMNS": "200"} | ({"PRORL_URL": url} if url else {}) | env
    return await asyncio.wait_for(asyncio.to_thread(_prorl, arguments, env), 60)


def _prorl(arguments: tuple[str, ...], env: dict[str, str]) -> tuple[int, str]:
    said, code = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(said), redirect_stderr(said):
        patched.setattr(sys, "argv", ["prorl", *arguments])
        patched.setattr(asyncio.SelectorEventLoop, "add_signal_handler", lambda *_: None)  # the main thread's right
        for name, value in env.items():
            patched.setenv(name, value)
        try:
            main()
        except SystemExit as end:
            if isinstance(end.code, str):  # as the interpreter does
                said.write(f"{end.code}\n")
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, said.getvalue()


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


GOOD = {"responses_create_params": {"input": "hi"}}
BAD = {"responses_create_params": {"input": "hi"}, "plan": {"run": [{"how": "agent"}]}}
LONG = {"responses_create_params": {"input": "hi"}, "plan": {"run": [{"seconds": 600}]}}


async def test_submit_follows_to_the_end_and_writes_results(tmp_path: Path) -> None:
    async with service() as url:
        results = tmp_path / "results.jsonl"
        code, output = await prorl(
            "submit",
            str(write(tmp_path / "rows.jsonl", GOOD, BAD)),
            "--repeats",
            "3",
            "--output",
            str(results),
            url=url,
        )
        assert code == 1, output
        assert "3 failed, 3 succeeded, mean reward 1.000 over 3, agent_run_error: 3" in output
        lines = [json.loads(line) for line in results.read_text().splitlines()]
        assert sorted(line["rollout"]["state"] for line in lines) == ["failed"] * 3 + ["succeeded"] * 3
        assert [line["reward"] for line in lines if line["rollout"]["state"] == "succeeded"] == [1.0] * 3
        code, output = await prorl("submit", str(write(tmp_path / "good.jsonl", GOOD)), url=url)
        assert (code, "1 succeeded" in output) == (0, True)


async def test_detached_rollouts_can_be_seen_and_cancelled(tmp_path: Path) -> None:
    async with service() as url:
        code, output = await prorl("submit", str(write(tmp_path / "rows.jsonl", LONG, LONG)), "--detach", url=url)
        assert code == 0
        first, second = output.splitlines()[:2]
        assert [first.split("-")[-2:], second.split("-")[-2:]] == [["1", "0"], ["2", "0"]]
        group = second.rpartition("-")[0]
        code, output = await prorl("status", url=url)
        assert "2 running; 2 sandboxes held" in output
        code, output = await prorl("status", first, url=url)
        assert json.loads(output)["group"] == first.rpartition("-")[0]
        code, output = await prorl("cancel", first, "nobody", url=url)
        assert code == 1
        assert f"{first} cancelled" in output
        assert "nobody unknown" in output
        code, output = await prorl("cancel", "--group", "nosuch", url=url)
        assert code == 1
        assert "nosuch unknown" in output
        code, output = await prorl("cancel", "--group", group, url=url)
        assert code == 0
        assert f"{second} cancelled" in output


async def test_tail_prints_transitions(tmp_path: Path) -> None:
    async with service() as url:
        await prorl("submit", str(write(tmp_path / "rows.jsonl", GOOD)), url=url)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "from nemo_gym_prorl.cli import main; main()",
            "tail",
            "--after",
            "0",
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PRORL_TOKEN": TOKEN, "PRORL_URL": url, "PYTHONUNBUFFERED": "1"},
        )
        assert process.stdout is not None
        try:
            lines = [(await asyncio.wait_for(process.stdout.readline(), 30)).decode() for _ in range(6)]
        finally:
            process.terminate()
            await process.wait()
        assert [line.split()[3] for line in lines] == [
            "queued", "initializing", "ready", "running", "evaluating", "succeeded",
        ]  # fmt: skip
        assert "reward 1" in lines[-1]


async def test_mistakes_are_one_line_that_names_them(tmp_path: Path) -> None:
    broken, empty = tmp_path / "broken.jsonl", write(tmp_path / "empty.jsonl", {})
    broken.write_text(json.dumps(GOOD) + "\n{oops\n")
    async with service() as url:
        for command, complaint in {
            "cancel": "give either rollout ids or --group",
            "status nobody": "no rollout 'nobody'",
            f"submit {broken}": "broken.jsonl:2: is not JSON",
            f"submit {empty}": "empty.jsonl:1: row.responses_create_params: Field required",
            "status --failed --token other": "; set PRORL_TOKEN",
            "status nobody --url nonsense": "'nonsense' is no address",
            "status --failed --state failed": "give either --state or --failed",
            "tail --url http://127.0.0.1:9": "127.0.0.1:9",
        }.items():
            code, output = await prorl(*command.split(), url=url)
            assert (code, complaint in output, "Traceback" in output) == (1, True, False), (command, output)


async def test_no_service_says_where_it_looked(tmp_path: Path) -> None:
    code, output = await prorl("status", PRORL_HEAD="http://127.0.0.1:9")
    assert code == 1
    assert "no NeMo Gym deployment answers at http://127.0.0.1:9" in output
    code, output = await prorl("status", url="http://127.0.0.1:9")
    assert (code, "no rollout service answers at http://127.0.0.1:9" in output) == (1, True)


async def test_the_service_is_found_through_gyms_head_server() -> None:
    app = FastAPI()
    instances = [{"process_name": "a", "name": "prorl_agent", "url": "http://127.0.0.1:1"}]

    @app.get("/server_instances")
    async def server_instances() -> list[dict[str, str]]:
        return instances

    async with serve(app) as head:
        assert await find_service(head) == "http://127.0.0.1:1"
        instances.append({"process_name": "b", "name": "prorl_agent", "url": "http://127.0.0.1:2"})
        with pytest.raises(CallerError, match=r"must have one prorl_agent, has a .*b "):
            await find_service(head)
