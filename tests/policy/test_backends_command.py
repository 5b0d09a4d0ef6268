# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl backends`` with two running model servers, found by a head server or by their addresses."""

import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fastapi import FastAPI

from nemo_gym_prorl.cli import submit
from nemo_gym_prorl.http.key_guard import KeyGuard
from nemo_gym_prorl.policy.http.api import add_control_routes
from tests.cli.command_line import GOOD, TOKEN, prorl, service, write
from tests.policy.runtimes import hosted
from tests.rollout.serving import serve


ENGINE = "http://127.0.0.1:9/v1"


@pytest.fixture
async def models() -> AsyncIterator[list[str]]:
    """Yield the addresses of two model servers without engines; the key is :data:`TOKEN`."""
    async with AsyncExitStack() as stack:
        urls = []
        for _ in range(2):
            app = FastAPI()
            add_control_routes(app, await stack.enter_async_context(hosted()))
            app.add_middleware(KeyGuard, key=TOKEN)
            urls.append(await stack.enter_async_context(serve(app)))
        yield urls


async def test_engines_are_listed_added_and_drained_at_each_model_server(models: list[str]) -> None:
    head = FastAPI()
    servers = [{"process_name": f"m{n}", "name": "prorl_model", "url": url} for n, url in enumerate(models)]
    head.get("/server_instances")(
        lambda: [*servers, {"process_name": "a", "name": "prorl_agent", "url": "http://127.0.0.1:9"}]
    )
    async with serve(head) as url:
        code, said = await prorl("backends", PRORL_HEAD=url)
        assert (code, said.count("0 engines, 0 turns waiting")) == (0, 2), said
        code, said = await prorl("backends", "add", ENGINE, "--run", "r", "--weight-version", "7", PRORL_HEAD=url)
        assert (code, said.count(f" at {ENGINE}")) == (0, 2), said
        code, said = await prorl("backends", PRORL_HEAD=url)
        lines = [line.split() for line in said.splitlines() if ENGINE in line]
        assert len(lines) == 2, said
        assert [line[1:3] + line[-1:] for line in lines] == [[ENGINE, "r", "7"]] * 2, said
        assert "draining" not in said
        code, said = await prorl("backends", "drain", lines[0][0], PRORL_HEAD=url)
        assert (code, said.count("gets no new rollouts")) == (0, 1), "ids are each server's own"
        code, said = await prorl("backends", "drain", f"{ENGINE}/", PRORL_HEAD=url)
        assert (code, said.count("gets no new rollouts")) == (0, 2), said
        assert (await prorl("backends", PRORL_HEAD=url))[1].count("draining") == 2


@pytest.mark.parametrize(
    ("of_the_agent", "health", "expected"),
    [
        (True, "down", r"engine http://127.0.0.1:9/v1 of m0 is down since \d\d:\d\d:\d\d"),
        (True, "away", "model server m0 cannot say which engines are down: no rollout service answers at "),
        (True, "none", "model server m0 has no engine; add one by `prorl backends add`"),
        (True, "paused", r"engine http://127.0.0.1:9/v1 of m0 is paused since \d\d:\d\d:\d\d; no turn is sampled"),
        (True, "draining", "engine http://127.0.0.1:9/v1 of m0 is draining; no new rollout is placed there"),
        (True, "of another run", "turns of m0 wait for an engine of run 'first'; none is registered"),
        (True, "of a run only", "turns of m0 wait for an engine of no run; none is registered"),
        (True, "up", None),
        (False, "down", None),
    ],
    ids=["down", "away", "no engine", "paused", "draining", "other run", "no run", "up", "another deployment"],
)
async def test_status_and_a_waiting_submit_name_the_engines_that_sample_nothing(
    of_the_agent: bool, health: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "NO_PROGRESS_S", 0.3)
    rows = write(tmp_path / "rows.jsonl", GOOD | {"plan": {"run": [{"seconds": 1.5}]}})
    head, app = FastAPI(), FastAPI()
    async with hosted() as runtime, service() as (agent, _):
        add_control_routes(app, runtime)
        async with serve(app) as model, serve(head) as url:
            if health != "none":
                runtime.dispatcher.apply(runtime.pool.add("e", ENGINE, run="a" if health == "of a run only" else None))
            if health == "down":
                runtime.pool.backends["e"].failed(time.monotonic())
            if health == "paused":
                await runtime.dispatcher.pause()
            if health == "draining":
                runtime.pool.drain("e")
            if health.startswith("of "):
                runtime.pool.request(1, "r", run="first" if health == "of another run" else None, now=time.monotonic())
            model = "http://127.0.0.1:9" if health == "away" else model
            servers = {"prorl_agent": agent if of_the_agent else "http://127.0.0.1:9", "prorl_model": model}
            listed = [{"process_name": "m0", "name": name, "url": at} for name, at in servers.items()]
            head.get("/server_instances")(lambda: listed)
            for words, otherwise in ((["status"], "no rollouts;"), (["submit", str(rows)], "1 succeeded")):
                code, said = await prorl(*words, url=agent, PRORL_HEAD=url)
                assert code == 0, said
                assert len(re.findall(expected or otherwise, said)) == 1, said
                assert ("engine" in said) == (expected is not None), said


@pytest.mark.parametrize(
    ("words", "env", "complaint"),
    [
        (["drain", "nope"], {}, "no model server has an engine nope"),
        ([], {"PRORL_TOKEN": "wrong"}, "HTTP 401: "),
        (["--url", "http://127.0.0.1:9"], {}, "answers at http://127.0.0.1:9"),
    ],
)
async def test_mistakes_are_one_line(models: list[str], words: list[str], env: dict[str, str], complaint: str) -> None:
    at = [] if "--url" in words else ["--url", models[0]]
    code, said = await prorl("backends", *words, *at, **env)
    assert (code, complaint in said, len(said.splitlines())) == (1, True, 1), said
