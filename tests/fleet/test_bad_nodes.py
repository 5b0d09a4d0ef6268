# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Addresses at which no node of ours answers, or none any more: each is named, and holds nobody up."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI, Response

from nemo_gym_prorl.failures import FailureKind
from nemo_gym_prorl.fleet import dispatcher, forwarder
from nemo_gym_prorl.fleet import gateway as gateway_module
from nemo_gym_prorl.fleet.placement import NodeJoined
from nemo_gym_prorl.rollout import status
from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.rollout.api.schemas import JobView, TurnView
from nemo_gym_prorl.rollout.job import JobState
from tests.agent.test_keys import certificate  # noqa: F401
from tests.cli.command_line import prorl, write
from tests.fleet.fleets import Fleet, fleet, service
from tests.fleet.test_gateway import HELD, lasting, outcomes
from tests.rollout.serving import serve, until


def refusing(status: int) -> FastAPI:
    """Another HTTP service, or ours for others."""
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def any_route(path: str) -> Response:
        return Response("<html>nothing here</html>", status)

    return app


@asynccontextmanager
async def listening(context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A port that takes connections and never says anything, beyond what TLS does."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read()
        finally:
            writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0, ssl=context)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at nodes more often, and waits for them less long."""
    monkeypatch.setattr(dispatcher, "SURVEY_S", 0.1)
    monkeypatch.setattr(dispatcher, "_ANSWER_S", 0.5)
    monkeypatch.setattr(forwarder, "GIVE_UP_S", 1.0)


async def usable(there: Fleet) -> dict[str, bool]:
    async with aiohttp.ClientSession(there.url) as http, http.get("/v1/nodes") as answer:
        return {view["node"]: view["usable"] for view in await answer.json()}


async def test_what_is_no_node_is_named_and_gets_nothing(
    hasty: None,
    certificate: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A busy machine may need more than half a second for what breaks a connection.
    monkeypatch.setattr(dispatcher, "_ANSWER_S", 3.0)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, certificate.with_name("key.pem"))
    async with fleet(1) as there, AsyncExitStack() as stack:
        bad = {
            "404": await stack.enter_async_context(serve(refusing(404))),
            "401": await stack.enter_async_context(serve(refusing(401))),
            "silent": await stack.enter_async_context(listening()),
            "tls": await stack.enter_async_context(listening(tls)),
        }
        for name, url in bad.items():
            there.nodes.tell(NodeJoined(name, RolloutClient(url)))
        await until(lambda: len(there.gateway.dispatcher.nodes) == 5)
        for i in range(30):
            await there.client.submit(lasting(0.01), id=f"r{i}")
        jobs = await outcomes(there, 30)
        assert {(job.state, len(job.failed_attempts)) for job in jobs} == {(JobState.SUCCEEDED, 0)}
        own = there.services[0].joined.node
        async with asyncio.timeout(60):
            while await usable(there) != {own: True, **dict.fromkeys(bad, False)} or len(there.said) < len(bad):
                await asyncio.sleep(0.05)
        said = "\n".join(there.said)
        for name, why in {"404": "HTTP 404", "401": "HTTP 401", "silent": "no answer in", "tls": "broke"}.items():
            assert f"waiting for the service at {bad[name]}" in said
            assert why in said


class Cut:
    """Passes on what a service is told and says, until packets vanish: connections stay, and new ones hang."""

    def __init__(self) -> None:
        self.passes = asyncio.Event()
        self.passes.set()

    @asynccontextmanager
    async def before(self, url: str) -> AsyncIterator[str]:
        host, port = url.removeprefix("http://").split(":")
        tasks = set[asyncio.Task[None]]()

        async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                await self.passes.wait()
                writer.write(data)
            writer.close()

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self.passes.wait()
            there, to = await asyncio.open_connection(host, int(port))
            tasks.update(map(asyncio.create_task, (pipe(reader, to), pipe(there, writer))))

        server = await asyncio.start_server(take, "127.0.0.1", 0)
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        for task in tasks:
            task.cancel()


async def test_of_a_node_that_is_cut_off_all_begins_elsewhere_and_what_it_says_late_concerns_nobody(
    hasty: None,
) -> None:
    cut = Cut()
    async with fleet(1) as there, service() as node, cut.before(node.url) as url:
        there.nodes.tell(NodeJoined("far", RolloutClient(url)))
        await until(lambda: len(there.gateway.dispatcher.statuses) == 2)
        for i in range(8):
            await there.client.submit(HELD, id=f"r{i}")
        await until(lambda: len(node.handler.sessions) == 3)
        cut.passes.clear()
        await until(lambda: not there.gateway.dispatcher.nodes["far"])
        node.handler.let_go.set()
        there.handlers[0].let_go.set()
        jobs = await outcomes(there, 8)
        assert {job.state for job in jobs} == {JobState.SUCCEEDED}
        lost = [failure for job in jobs for failure in job.failed_attempts]
        assert [failure.kind for failure in lost] == [FailureKind.SESSION_LOST] * 4
        assert [failure.reason for failure in lost] == [f"{url} does not answer"] * 4
        cut.passes.set()
        await until(lambda: there.gateway.dispatcher.nodes["far"])
        await until(lambda: not node.pipeline.store.live())
        assert len((await there.client.ended("0")).rollouts) == 8
        before = node.handler.calls.total()
        await asyncio.gather(*(there.client.submit(lasting(0.1), id=f"s{i}") for i in range(12)))
        await outcomes(there, 20)
        assert node.handler.calls.total() > before, "it is a node again"


async def test_submit_names_what_is_no_use_and_goes_on_with_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = write(tmp_path / "rows.jsonl", *[lasting(0.01)] * 10)
    monkeypatch.setattr(status, "VERSION", "0.1.0")
    async with service() as good, service() as old, serve(refusing(404)) as other:
        older = old.pipeline.status().model_copy(update={"version": "0.0.9"})
        monkeypatch.setattr(old.pipeline, "status", lambda: older)
        code, said = await prorl("submit", str(rows), url=old.url)
        assert (code, f"{old.url} is not compatible: it runs nemo-gym-prorl 0.0.9" in said) == (1, True), said
        code, said = await prorl("submit", str(rows), url=f"{good.url},{old.url},{other}")
        assert code == 0, said
        assert f"{old.url} gets no rollouts: it runs nemo-gym-prorl 0.0.9" in said
        assert f"waiting for the service at {other}: HTTP 404" in said
        assert not old.handler.calls
        code, said = await prorl("submit", str(rows), url=f"{good.url},{good.url}/")
        assert (code, f"--url: {good.url} is listed twice" in said) == (1, True), said


async def test_what_a_lost_service_had_is_submitted_elsewhere(hasty: None, tmp_path: Path) -> None:
    """Without a gateway, too: nothing is missing from the results."""
    rows, output, cut = write(tmp_path / "rows.jsonl", *[lasting(1.5)] * 8), tmp_path / "results.jsonl", Cut()
    async with service() as far, service() as near, cut.before(far.url) as url:

        async def cut_off() -> None:
            await until(lambda: far.handler.sessions and near.handler.sessions)
            cut.passes.clear()

        cutting = asyncio.create_task(cut_off())
        code, said = await prorl("submit", str(rows), "--output", str(output), url=f"{url},{near.url}")
        await cutting
        assert code == 0, said
        assert "8 succeeded" in said
        assert len(output.read_text().splitlines()) == 8
        cut.passes.set()


LIES: dict[str, dict[str, Any]] = {
    "without times": {"timings": {}},
    "tokens that are no numbers": {
        "tokens": [TurnView(item=0, kept=0, observed="AAAA", sampled="AAAA", log_probs="AAAA")]
    },
    "failed, with a reward": {"state": JobState.FAILED, "reward": 1.0},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_a_node_that_lies_harms_no_other_rollout(lie: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a lie an outcome: the one that it is told of ends some day, as lost."""
    monkeypatch.setattr(gateway_module, "MAX_LOST_NODES", 2)
    monkeypatch.setattr(forwarder, "RETRY_S", 0.05)
    async with fleet(1) as there:
        (carried,) = there.gateway.dispatcher._forwarders.values()
        get = carried.client.get

        async def lying(rollout: str, **options: Any) -> JobView:
            view = await get(rollout, **options)
            return view.model_copy(update=lie) if rollout.startswith("a~") and view.state.terminal else view

        monkeypatch.setattr(carried.client, "get", lying)
        await there.client.submit(HELD, id="b")
        await there.client.submit(lasting(0.05), id="a")
        job = await there.client.wait("a")
        assert (job.reward, job.failure and job.failure.kind) == (None, FailureKind.SESSION_LOST)
        assert "invalid outcome" in job.failed_attempts[0].reason
        assert not (await there.client.get("b")).state.terminal
        there.handlers[0].let_go.set()
        assert (await there.client.wait("b")).reward == 1.0
