# SPDX-License-Identifier: Apache-2.0
"""``prorl_model`` as several processes behind one address, before a stand-in engine in vLLM's protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
import uvicorn
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from nemo_gym_prorl.policy.workers.server import bound_to
from nemo_gym_prorl.policy.workers.shards import Shard, shard_of
from tests.policy.engines import answers, free_port


WORKERS = 3
LIMIT = 4
START_S = 400


@dataclass
class Engine:
    """Samples two tokens for every prompt, after a while."""

    delay_s: float = 0.0
    running: int = 0
    most: int = 0
    prompts: list[list[int]] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while (event := await receive())["type"] == "http.request":
            body += event["body"]
            if not event["more_body"]:
                break
        status, said = 404, {}
        if scope["path"] == "/v1/models":
            status, said = 200, {"data": [{"id": "tiny", "max_model_len": 10**6}]}
        elif scope["path"] == "/v1/completions":
            status, said = 200, await self._sample(json.loads(body)["prompt"], receive)
        head = {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]}
        await send(head)
        await send({"type": "http.response.body", "body": json.dumps(said).encode()})

    async def _sample(self, prompt: list[int], receive: Any) -> dict[str, Any]:
        self.running += 1
        self.most = max(self.most, self.running)
        self.prompts.append(prompt)
        try:
            async with asyncio.timeout(self.delay_s or 0.001):
                while (await receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            pass
        finally:
            self.running -= 1
        logged = {"token_logprobs": [-0.5, -0.25]}
        return {"choices": [{"token_ids": [1, 2], "logprobs": logged, "finish_reason": "length"}]}


@contextlib.contextmanager
def in_thread(app: Any) -> Iterator[str]:
    """An application on a loop of its own, so that it outlives a test's."""
    served = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=free_port(), log_level="warning"))
    thread = threading.Thread(target=served.run)
    thread.start()
    while not served.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{served.config.port}"
    finally:
        served.should_exit = True
        thread.join()


@dataclass
class Server:
    """The processes of one model server."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    async def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as http,
            http.request(method, f"{self.url}{path}", json=body, headers=headers) as said,
        ):
            return said.status, await said.json(content_type=None)

    async def text(self, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}{path}") as said:
            return said.status, await said.text()

    def workers(self) -> list[int]:
        return [pid for task in Path(f"/proc/{self.process.pid}/task").iterdir() for pid in children(task)]

    def worker(self, index: int) -> int:
        """The process of a worker, by the name of its socket."""
        (pid,) = [pid for pid in self.workers() if f"worker={index}" in marks(pid)]
        return pid


def children(task: Path) -> list[int]:
    return [int(pid) for pid in (task / "children").read_text().split()]


def marks(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    given = next(v for v in variables if v.startswith("NEMO_GYM_PRORL_WORKER="))
    return f"worker={given.partition('=')[2].split()[0]}"


def tokenizer(folder: Path) -> str:
    words = ["?", "hi", "ho", "u", "a", "s"]
    rehearsed = ["Rules", "Askone", "Sayone", "Asktwo", "Saytwo", "Askthree"]  # tried out at the start
    fast = FastTokenizer(WordLevel({word: at for at, word in enumerate([*words, *rehearsed])}, unk_token="?"))
    fast.pre_tokenizer = Whitespace()
    fast.save(str(folder / "tokenizer.json"))
    ended = "{% if add_generation_prompt %}a {% endif %}"
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}" + ended
    )
    return str(folder)


def started(
    engine: str | None, folder: Path, wait: bool = True, workers: int = WORKERS, port: int | None = None, **policy: Any
) -> Server:
    port = port or free_port()
    settings = {"tokenizer": str(folder), "engine": "vllm", "limit": LIMIT, **policy}
    program = [sys.executable, "-m", "tests.policy.worker_server", str(port), str(workers)]
    program.append(f"{engine}/v1" if engine else "")
    log = folder / f"server-{port}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*program, json.dumps(settings)], stdout=out, stderr=out, cwd=Path(__file__).parents[2]
        )
    server = Server(process, f"http://127.0.0.1:{port}", log)
    deadline = time.monotonic() + START_S
    while wait and not answers(f"{server.url}/v1/backends"):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    return server


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[Engine, str]]:
    app = Engine()
    with in_thread(app) as url:
        yield app, url


@pytest.fixture(scope="module")
def server(engine: tuple[Engine, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("workers")
    tokenizer(folder)
    running = started(engine[1], folder)
    yield running
    running.process.kill()
    running.process.wait()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        yield session


async def turn(
    http: aiohttp.ClientSession, server: Server, rollout: str, after: str | None = None, text: str = "hi ho", **kw: Any
) -> tuple[int, dict[str, Any]]:
    body = {"input": text, "max_output_tokens": 8, **({"previous_response_id": after} if after else {})}
    headers = {"X-Rollout-Id": rollout, "X-Rollout-Tokens": "deferred"}
    async with http.post(f"{server.url}/v1/responses", json=body, headers=headers, **kw) as response:
        return response.status, await response.json()


async def get(http: aiohttp.ClientSession, url: str) -> tuple[int, Any]:
    async with http.get(url) as response:
        return response.status, await response.json(content_type=None)


def of_worker(index: int, number: int = 0) -> str:
    """A rollout of this worker's."""
    shard = Shard(index, WORKERS)
    return [name for name in (f"w{index}-{n}" for n in range(200)) if shard.has(name)][number]


async def test_a_rollouts_turns_meet_whatever_connection_they_come_on(
    http: aiohttp.ClientSession, server: Server
) -> None:
    names = [f"meet {n} é" for n in range(3 * WORKERS)]
    assert {shard_of(name, WORKERS) for name in names} == set(range(WORKERS))
    last: dict[str, str | None] = dict.fromkeys(names)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as one:
        for number in range(4):
            for name in names:
                async with aiohttp.ClientSession() as fresh:
                    status, answer = await turn((one, fresh)[number % 2], server, quote(name), last[name])
                assert status == 200, answer
                last[name] = answer["id"]
        for name in names:
            status, kept = await get(one, f"{server.url}/v1/rollouts/{quote(name)}/tokens")
            assert (status, len(kept["answers"]), len(kept["sequences"])) == (200, 4, 1)
            status, waited = await get(http, f"{server.url}/v1/rollouts/{quote(name)}/waited")
            assert status == 200
            assert waited["waited_s"] >= 0
            async with one.delete(f"{server.url}/v1/rollouts/{quote(name)}") as response:
                assert response.status == 200
            assert (await turn(http, server, quote(name), last[name]))[0] == 410


async def test_a_session_cookie_leads_back_to_its_worker(http: aiohttp.ClientSession, server: Server) -> None:
    """As Gym's own agent does: the cookie of each answer with the next request, the ids of each turn along."""
    body: dict[str, Any] = {"max_output_tokens": 8}
    for start in range(4 * WORKERS):
        cookies: dict[str, str] = {}
        items: list[Any] = [{"role": "user", "content": f"hi {start}"}]
        for _ in range(3):
            async with (
                aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as fresh,
                fresh.post(f"{server.url}/v1/responses", json=body | {"input": items}, cookies=cookies) as said,
            ):
                answer = await said.json()
                assert said.status == 200, answer
                cookies |= {name: morsel.value for name, morsel in said.cookies.items()}
            items += [
                {k: v for k, v in item.items() if "token" not in k and "log_probs" not in k}
                for item in answer["output"]
            ]
            items.append({"role": "user", "content": "ho"})
        # Without its ids, only the worker that sampled them can know that there were two in each turn.
        prompt = answer["output"][-1]["prompt_token_ids"]
        assert prompt.count(1) == 1 + 2, prompt
    async with http.get(f"{server.url}/metrics") as response:
        assert "prorl_policy_retokenised_tokens_total 0.0" in await response.text()


async def test_limit_and_queue_are_those_of_one_pool(
    http: aiohttp.ClientSession, server: Server, engine: tuple[Engine, str]
) -> None:
    engine[0].delay_s, engine[0].most = 0.3, 0
    try:
        asked = [asyncio.create_task(turn(http, server, f"limit{n}")) for n in range(4 * LIMIT)]
        assert {status for status, _ in await asyncio.gather(*asked)} == {200}
    finally:
        engine[0].delay_s = 0.0
    assert engine[0].most == LIMIT


async def test_backends_are_managed_over_any_connection(
    http: aiohttp.ClientSession, server: Server, engine: tuple[Engine, str]
) -> None:
    url = f"{server.url}/v1/backends"
    async with in_new_thread() as (other, address):
        for _ in range(WORKERS + 1):
            async with (
                aiohttp.ClientSession() as fresh,
                fresh.post(url, json={"url": address, "id": "other"}) as added,
            ):
                assert added.status == 201
                assert (await added.json())["id"] == "other"
        async with http.post(f"{url}/pause", json={"id": "backend0"}) as paused:
            assert await paused.json() == {"drained": True}
        names = [of_worker(index, 3) for index in range(WORKERS)]
        before = len(other.prompts)
        assert [(await turn(http, server, name))[0] for name in names] == [200] * WORKERS
        assert len(other.prompts) == before + WORKERS
        async with http.post(f"{url}/resume", json={"id": "backend0", "weight_version": "step-1"}) as resumed:
            assert resumed.status == 200
        async with http.delete(f"{url}/other") as removed:
            assert removed.status == 200
        for name in names:
            status, answer = await turn(http, server, name + "b")
            assert status == 200
            _, kept = await get(http, f"{server.url}/v1/rollouts/{name}b/tokens")
            assert kept["answers"][answer["id"]]["weight_versions"] == ["step-1", "step-1"]
        for _ in range(WORKERS):
            async with http.delete(f"{url}/other") as removed:
                assert removed.status == 404
                assert (await removed.json())["type"] == "urn:nemo-gym-prorl:problem:no-such-backend"


@contextlib.asynccontextmanager
async def in_new_thread() -> AsyncIterator[tuple[Engine, str]]:
    app = Engine()
    with in_thread(app) as url:
        yield app, url


async def test_large_and_odd_messages_pass(http: aiohttp.ClientSession, server: Server) -> None:
    large = "hi " * 200_000
    status, answer = await turn(http, server, "large", text=large)
    assert (status, answer["usage"]["input_tokens"]) == (200, 200_002)

    async def pieces() -> AsyncIterator[bytes]:
        content = json.dumps({"input": large, "max_output_tokens": 8}).encode()
        for start in range(0, len(content), 50_000):
            yield content[start : start + 50_000]

    headers = {"X-Rollout-Id": "chunked", "Content-Type": "application/json"}
    async with http.post(f"{server.url}/v1/responses", data=pieces(), headers=headers) as response:
        assert (await response.json())["usage"]["input_tokens"] == 200_002
    stream = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with http.post(f"{server.url}/v1/messages", json=stream) as response:
        assert response.headers["transfer-encoding"] == "chunked"
        assert b"message_stop" in await response.read()
    async with http.head(f"{server.url}/v1/backends") as response:
        assert response.status == 405
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    writer.write(b"GET /v1/backends HTTP/1.1\r\nHost: h\r\n\r\n" * 3)
    writer.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n")
    said = await reader.read()
    assert said.count(b"HTTP/1.1 200 OK") == 3
    assert said.count(b"HTTP/1.1 400 Bad Request") == 1
    assert b"urn:nemo-gym-prorl:problem:malformed-request" in said
    writer.close()


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
async def test_a_body_is_no_request_whatever_the_head_offers(server: Server, protocol: bytes) -> None:
    """Its head and its body come one after the other: who believes the offer takes the body for a request."""
    body = json.dumps({"input": "hi " * 7}).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nHost: h\r\nX-Rollout-Id: offers\r\nContent-Type: application/json\r\n"
    offer = b"Connection: Upgrade\r\nUpgrade: %b\r\nContent-Length: %d\r\n\r\n" % (protocol, len(body))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    for _ in range(2):
        writer.write(head + offer)
        await asyncio.sleep(0.3)
        writer.write(body)
        said = await reader.readuntil(b"\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 200 OK")
        length = int(said.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert json.loads(await reader.readexactly(length))["usage"]["input_tokens"] >= 7
    writer.close()


async def test_a_caller_that_hangs_up_stops_its_engine(
    http: aiohttp.ClientSession, server: Server, engine: tuple[Engine, str]
) -> None:
    engine[0].delay_s = 120.0
    try:
        asked = [asyncio.create_task(turn(http, server, f"hang{n}")) for n in range(3 * LIMIT)]
        await until(lambda: engine[0].running == LIMIT)
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: engine[0].running == 0)
    finally:
        engine[0].delay_s = 0.0
    await until_free(http, server)


async def until(true: Any) -> None:
    async with asyncio.timeout(120):
        while not true():
            await asyncio.sleep(0.05)


async def until_free(http: aiohttp.ClientSession, server: Server) -> None:
    """Nothing waits, nothing runs."""
    async with asyncio.timeout(120):
        while True:
            _, listed = await get(http, f"{server.url}/v1/backends")
            if not listed["waiting"] and not any(one["in_flight"] for one in listed["backends"]):
                return
            await asyncio.sleep(0.1)


async def test_a_killed_worker_loses_its_own_rollouts_and_no_others(
    http: aiohttp.ClientSession, server: Server, engine: tuple[Engine, str]
) -> None:
    begun = {index: (await turn(http, server, of_worker(index, 5)))[1]["id"] for index in range(WORKERS)}
    victim = server.worker(1)
    engine[0].delay_s = 3.0
    try:
        running = {index: asyncio.create_task(turn(http, server, of_worker(index, 6))) for index in range(WORKERS)}
        waiting = [asyncio.create_task(turn(http, server, of_worker(1, 7 + n))) for n in range(LIMIT)]
        await until(lambda: engine[0].running == LIMIT)
        os.kill(victim, signal.SIGKILL)
        lost = [await one for one in (running[1], *waiting)]
        for status, problem in lost:
            assert (status, problem["type"]) == (410, "urn:nemo-gym-prorl:problem:rollout-gone")
        assert [(await running[index])[0] for index in (0, 2)] == [200, 200]
    finally:
        engine[0].delay_s = 0.0
    await until_free(http, server)
    # It waits for the worker that is started again, which knows nothing of it.
    assert (await turn(http, server, of_worker(1, 5), begun[1]))[0] == 410
    assert (await turn(http, server, of_worker(1, 20)))[0] == 200
    for index in (0, 2):
        assert (await turn(http, server, of_worker(index, 5), begun[index]))[0] == 200
    assert server.worker(1) != victim
    async with http.get(f"{server.url}/metrics") as response:
        text = await response.text()
    assert "prorl_policy_worker_restarts 1.0" in text
    assert text.count("prorl_policy_process_memory_bytes{") == WORKERS + 1


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)


async def test_nothing_outlives_a_server_that_is_killed_or_told_to_end(
    engine: tuple[Engine, str], tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    tokenizer(tmp_path)
    for number in (signal.SIGKILL, signal.SIGINT):
        server = await asyncio.to_thread(started, engine[1], tmp_path)
        workers = server.workers()
        assert len(workers) == WORKERS
        engine[0].delay_s = 60.0
        try:
            asked = asyncio.create_task(turn(http, server, "late"))
            await until(lambda: engine[0].running == 1)
            server.process.send_signal(number)
            await asyncio.to_thread(server.process.wait, 60)
            await until(lambda workers=workers: gone(workers))
            with contextlib.suppress(aiohttp.ClientError):
                assert (await asked)[0] >= 400
        finally:
            engine[0].delay_s = 0.0


async def test_a_server_whose_workers_cannot_start_does_not_start(engine: tuple[Engine, str], tmp_path: Path) -> None:
    server = started(engine[1], tmp_path, wait=False)
    status = await asyncio.to_thread(server.process.wait, START_S)
    assert status not in (0, None)
    assert "tokenizer: no tokenizer.json in" in server.log.read_text()


async def test_no_part_of_an_answer_waits_for_its_caller() -> None:
    """A listening socket that does not say that it is TCP gives connections whose second small write is held back."""
    accepted: asyncio.Future[asyncio.BaseTransport] = asyncio.get_running_loop().create_future()

    class Accepts(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            accepted.set_result(transport)

    server = await asyncio.get_running_loop().create_server(Accepts, sock=bound_to("127.0.0.1", 0))
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        connection = (await accepted).get_extra_info("socket")
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        (await accepted).close()
