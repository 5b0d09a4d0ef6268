# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The limit of open files: raised where that is allowed, refused at where not, and never taken for another's fault.

``make test-long`` also sends a thousand rollouts at once to real servers under a limit of 1,024.
"""

import asyncio
import contextlib
import errno
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from nemo_gym_prorl.failures import FailureKind, Origin, Stage, classify
from nemo_gym_prorl.scripted.text import MODEL_NAME
from nemo_gym_prorl.serving import open_files
from tests.handlers import peers
from tests.handlers.gym_host import hosting, instance, url_of
from tests.handlers.test_gym_environment import collected, gym_rows, scripted


SERVER = """
import asyncio, resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 256))
from fastapi import FastAPI, Response
from nemo_gym_prorl.serving import open_files
from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.handlers.gym_http import Address, CookieJar, GymServer, HttpClient
import uvicorn
print(open_files.raise_limit(), flush=True)
app = FastAPI()
app.add_middleware(open_files.FileGuard)
http = HttpClient()
@app.post("/run")
async def run():
    await asyncio.sleep(0.1)
    await GymServer("model", Address(sys.argv[1]), http).call("GET", "/", None, CookieJar())
    return {}
@app.get("/left")
async def left():
    return open_files.left()
listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
print(listener.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listener])
"""


def test_a_server_raises_its_soft_limit_to_the_hard_one() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200))\n"
        "from nemo_gym_prorl.serving import open_files as o\n"
        "print(o.raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE), o.left())"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert said[:3] == ["200", "(200,", "200)"]
    assert 150 < int(said[3]) < 200


def test_what_is_left_counts_down() -> None:
    before = open_files.left()
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(10)]
    assert open_files.left() == before - 10
    for descriptor in opened:
        os.close(descriptor)
    assert open_files.needed(1000) > 4000


async def _ask(port: int, method: str, path: str) -> int:
    """Status of one request on a connection of its own; 0 if that was closed without an answer."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        line = await reader.readline()
        writer.close()
    except OSError:
        return 0
    return int(line.split()[1]) if line else 0


async def test_more_callers_than_descriptors_are_refused_and_those_inside_go_on() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as model:
        url = f"http://127.0.0.1:{model.sockets[0].getsockname()[1]}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SERVER, url), stdout=asyncio.subprocess.PIPE
        )
        try:
            assert await process.stdout.readline() == b"256\n"
            port = int(await process.stdout.readline())
            statuses: list[int] = []
            waiting = callers = 400
            async with asyncio.timeout(200):
                while waiting:
                    said = await asyncio.gather(*(_ask(port, "POST", "/run") for _ in range(waiting)))
                    statuses += said
                    waiting = sum(status in (0, 503) for status in said)
                    await asyncio.sleep(0.2)
            assert set(statuses) <= {0, 200, 503}, "nothing inside failed for want of a descriptor"
            assert statuses.count(200) == callers
            assert await _ask(port, "GET", "/left") == 200
        finally:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_our_own_want_of_descriptors_is_named_as_such(number: int) -> None:
    failure = classify(OSError(number, os.strerror(number)), Stage.INIT)
    assert failure.kind is FailureKind.PROVIDER_QUOTA_EXHAUSTED
    assert failure.origin is Origin.INFRASTRUCTURE
    assert "ulimit -n" in failure.reason
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert str(limit) in open_files.exhausted().reason


async def test_beyond_the_bound_a_rollout_is_refused_with_a_reason_and_other_routes_are_not() -> None:
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/run":
            await go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask(method: str, path: str) -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await guard({"type": "http", "method": method, "path": path, "headers": []}, _nothing, send)
        return sent

    guard = open_files.FileGuard(app, at_once=2)
    inside = [asyncio.create_task(ask("POST", "/run")) for _ in range(2)]
    await asyncio.sleep(0)
    start, body = await ask("POST", "/run")
    assert start["status"] == 503
    assert {(b"retry-after", b"2"), (b"connection", b"close")} <= {*start["headers"]}
    assert b"limit of open files" in body["body"]
    assert (await ask("GET", "/status"))[0]["status"] == 200
    go_on.set()
    assert [(await task)[0]["status"] for task in inside] == [200, 200]
    assert (await ask("POST", "/run"))[0]["status"] == 200


async def _nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}


async def test_beyond_the_bound_gyms_collector_gets_a_row_since_an_error_would_end_its_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_files, "left", lambda: 0)
    async with peers.deployment() as agent:
        status, row, _ = await agent.post("/run", peers.COLLECTED)
        assert status == 200
        assert row["mask_sample"] is True
        assert row["failure_kind"] == row["_ng_failure_class"] == FailureKind.PROVIDER_QUOTA_EXHAUSTED
        assert not {"_ng_failure_terminal", "_ng_no_persist"} & row.keys(), "Gym does it again when it resumes"
        for path, body in (("/run", peers.ROW), ("/run", [1]), ("/v1/responses", peers.ROW)):
            status, problem, headers = await agent.post(path, body)
            assert (status, problem["type"].rpartition(":")[2]) == (503, "too-many-open-files")
            assert headers["retry-after"] == "2"
        async with agent.http.post(f"{agent.url}/run", data=b"\xff{") as answer:
            assert answer.status == 503
        assert agent.environment.calls == []


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
    open_files.raise_limit()
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


async def _done(http: aiohttp.ClientSession, url: str, row: dict[str, Any], said: Counter[str]) -> dict[str, Any]:
    """A row's answer as a caller gets it who comes again where it is told to, or where it got no answer."""
    while True:
        try:
            async with http.post(f"{url}/run", json=row) as answer:
                body = await answer.json(content_type=None)
                if answer.status == 200:
                    said[body.get("failure_kind", "rewarded")] += 1
                    return dict(body)
                assert (answer.status, body["type"].rpartition(":")[2]) == (503, "too-many-open-files"), body
                said["refused"] += 1
                pause_s = float(answer.headers["Retry-After"])
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            said["dropped"] += 1
            pause_s = 0.5  # Gym's client does the same
        await asyncio.sleep(pause_s)


@pytest.mark.gym
@pytest.mark.timeout(1200)
@pytest.mark.long("takes two minutes")
@pytest.mark.parametrize("bound", [False, True], ids=["soft limit of 1024", "hard limit of 1024"])
async def test_a_thousand_run_at_once(scripted_policy: str, room: int, bound: bool) -> None:
    [row, *_] = gym_rows("mcqa")
    right = f"\\boxed{{{row['expected_answer']}}}"
    quick, slow = scripted(row, right), scripted(row, right, latency_s=10.0)
    rows = [slow if number < SLOTS else quick for number in range(CALLERS)]
    rows = [collected(row, number) if number % 2 else row for number, row in enumerate(rows)]
    said: Counter[str] = Counter()
    everything = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None))
    async with servers(scripted_policy, SOFT if bound else room) as url, everything as http:
        done = await asyncio.gather(*(_done(http, url, row, said) for row in rows))
    print(f"hard limit {SOFT if bound else room}: {dict(said)}")
    if not bound:
        assert said == {"rewarded": CALLERS}
    else:
        assert said["refused"] >= 1
        assert said[FailureKind.PROVIDER_QUOTA_EXHAUSTED] >= 1
    for asked, answered in zip(rows, done, strict=True):
        if answered.get("mask_sample"):  # what only Gym's collector gets: an error would end its collection
            assert "_ng_task_index" in asked
            assert answered["failure_kind"] == FailureKind.PROVIDER_QUOTA_EXHAUSTED
            assert "_ng_failure_terminal" not in answered
        else:
            assert answered["reward"] == 1.0
    assert said["rewarded"] + said[FailureKind.PROVIDER_QUOTA_EXHAUSTED] == CALLERS
