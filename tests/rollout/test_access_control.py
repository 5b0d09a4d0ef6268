# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Clients with keys: what a file of keys may say, and that no client sees, holds up or ends what another does.

The services are real, over real sockets. An administrator does all of it, of which the log tells.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from fastapi import FastAPI

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.http.key_guard import KeyGuard, RouteScopes
from nemo_gym_prorl.http.keys import Caller, Scope, authorization
from nemo_gym_prorl.http.problems import add_problem_handlers
from nemo_gym_prorl.rollout.api.access_control import ROUTES, KeysFile, hash_of, new_key, read_clients
from nemo_gym_prorl.rollout.api.attached_callers import AttachedCallers
from nemo_gym_prorl.rollout.api.client import ApiError, RolloutClient
from nemo_gym_prorl.rollout.api.original_wire import wire_router
from nemo_gym_prorl.rollout.api.routes import PipelineMetrics, rollout_router
from nemo_gym_prorl.rollout.job import JobState
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.settings import PipelineSettings, PoolSizes
from nemo_gym_prorl.rollout.storage.journal import Journal
from tests.cli.command_line import prorl
from tests.rollout.handlers import Act, Bench
from tests.rollout.serving import serve
from tests.rollout.test_api import FOREVER, reach, refused, row
from tests.rollout.test_original_wire import Backends


OF = {"alice": {"name": "alice", "hash": hash_of("a")}, "bob": {"name": "bob", "hash": hash_of("b"), "share": 3}}


def write(path: Path, *clients: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps({"clients": clients}))
    path.chmod(0o600)
    return path


def written(file: str) -> tuple[str, int]:
    [client] = yaml.safe_load(Path(file).read_text())["clients"]
    assert client.keys() == {"name", "hash", "scopes", "share"}
    return client["hash"], Path(file).stat().st_mode & 0o777


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"share": 0}, r"clients\.0\.share: Input should be greater than 0"),
        ({"scopes": ["write"]}, r"clients\.0\.scopes\.0: Input should be 'submit', 'read', 'cancel' or 'admin'"),
        ({"scope": ["read"]}, r"clients\.0\.scope: Extra inputs are not permitted"),
        ({"hash": "a"}, r"clients\.0\.hash: .* must be sha256: and 64 hexadecimal digits"),
        ({"name": "default"}, r"clients\.0\.name: .* is the client of rollouts without a client"),
        ({"name": "bob"}, r"clients\.1\.name: used by another client"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_the_name_of_its_field(
    tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    path = write(tmp_path / "keys.json", {**OF["alice"], **wrong}, OF["bob"])
    with pytest.raises(CallerError, match=rf"keys_file: {path}: {said}") as refused:
        read_clients(path)
    assert refused.value.field == "keys_file"


@pytest.mark.parametrize("mode", [0o604, 0o620])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "keys.json", OF["alice"])
    path.chmod(mode)
    with pytest.raises(CallerError, match=rf"others may read or write .* \(mode {mode:04o}\): chmod 600"):
        read_clients(path)


def test_a_file_that_changes_is_taken_and_one_that_is_wrong_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now, shares = 0.0, list[Mapping[str, float]]()
    path = write(tmp_path / "keys.json", OF["alice"], OF["bob"])
    keys = KeysFile(path, shares.append, lambda: now)
    alice = Caller("alice", frozenset({Scope.SUBMIT, Scope.READ, Scope.CANCEL}))
    assert keys.caller("a") == alice
    assert keys.caller("c") is None
    assert shares == [{"alice": 1.0, "bob": 3.0}]
    write(path, OF["bob"])
    assert keys.caller("a") == alice, "it is looked at once a second at most"
    now = 1.1
    assert keys.caller("a") is None, "revoked"
    assert shares[1:] == [{"bob": 3.0}]
    for break_it in (lambda: path.write_text("{"), lambda: path.chmod(0o644), path.unlink):
        break_it()
        now += 1.1
        with caplog.at_level(logging.ERROR):
            assert keys.caller("b") is not None
            now += 1.1
            assert keys.caller("b") is not None
        assert "the previous keys stay valid" in caplog.text
        assert len(caplog.records) == 1, "told once"
        caplog.clear()
    write(path, OF["alice"])
    now += 1.1
    assert keys.caller("a") == alice
    assert keys.caller("b") is None
    assert len(shares) == 3


async def test_a_key_from_the_command_line_to_its_end(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.yaml")
    code, key = await prorl("key", "new", "alice", "--file", file, "--scope", "read", "--share", "2.5")
    assert code == 0
    key = key.strip()
    assert written(file) == (hash_of(key), 0o600), "its hash alone is kept"
    assert KeysFile(Path(file), lambda shares: None).caller(key) == Caller("alice", frozenset({Scope.READ}))
    assert (await prorl("key", "new", "alice", "--file", file))[0] == 1, "a name is one client's"
    code, said = await prorl("key", "new", "bob", "--file", file, "--scope", "write")
    assert (code, "scopes.0: Input should be 'submit'" in said) == (1, True)
    assert (await prorl("key", "new", "bob", "--file", file))[0] == 0
    assert await prorl("key", "list", "--file", file) == (0, "alice\t2.5\tread\nbob\t1\tsubmit,read,cancel\n")
    assert (await prorl("key", "revoke", "alicia", "--file", file))[0] == 1
    assert (await prorl("key", "revoke", "alice", "--file", file))[0] == 0
    assert await prorl("key", "list", "--file", file) == (0, "bob\t1\tsubmit,read,cancel\n")
    assert len({new_key() for _ in range(100)}) == 100
    assert all(len(new_key().removeprefix("prorl_")) == 43 for _ in range(10)), "256 bits"


class Service:
    """A service, and a client of it for each who has a key: the deployment, alice, bob."""

    def __init__(self, url: str, pipeline: Pipeline, bench: Bench, keys: Path, http: aiohttp.ClientSession) -> None:
        self.url, self.pipeline, self.bench, self.keys, self.http = url, pipeline, bench, keys, http
        self.admin = RolloutClient(url, "admin", patience_s=0)
        self.alice = RolloutClient(url, "a", patience_s=0)
        self.bob = RolloutClient(url, "b", patience_s=0)

    async def call(self, key: str | None, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.http.request(method, self.url + path, json=body, headers=authorization(key)) as response:
            return response.status, await response.json(content_type=None)


@asynccontextmanager
async def service(
    folder: Path, settings: PipelineSettings = PipelineSettings(), journal: Journal | None = None
) -> AsyncIterator[Service]:
    bench = Bench(settings)
    pipeline = bench.pipeline(journal)
    path = write(folder / "keys.json", OF["alice"], OF["bob"])
    keys = KeysFile(path, pipeline.share, lambda: asyncio.get_running_loop().time() * 100)
    app = FastAPI()
    add_problem_handlers(app)
    app.add_middleware(KeyGuard, key="admin", clients=keys.caller, scopes=RouteScopes(ROUTES))
    backends = Backends()
    app.include_router(wire_router(pipeline, AttachedCallers(pipeline, grace_s=0.1), backends.add, backends.clear))
    app.include_router(rollout_router(pipeline, PipelineMetrics(pipeline)))
    async with serve(app) as url, aiohttp.ClientSession() as http:
        at = Service(url, pipeline, bench, path, http)
        async with at.admin, at.alice, at.bob:
            yield at
            await pipeline.close()


async def test_a_job_is_its_clients_and_nobody_elses(tmp_path: Path) -> None:
    async with service(tmp_path) as at:
        assert (await at.alice.submit(row(run=[Act("held")]), id="r", group="g")).client == "alice"
        await reach(at.alice, "r", "running")
        assert await refused(at.bob.get("r")) == (403, "not-yours", None)
        assert await refused(at.bob.cancel(["none", "r"])) == (403, "not-yours", "ids.1")
        assert (await at.call("b", "DELETE", "/v1/rollouts/r"))[0] == 403
        assert await refused(at.bob.submit(row(run=[Act("held")]), id="r")) == (409, "id-conflict", "id")
        assert await refused(at.bob.submit(row(), client="alice")) == (403, "not-yours", "client")
        begin = {"tries": ["r"]}
        assert await refused(at.bob.submit(row(), begin=begin)) == (403, "not-yours", "begin"), "nor begins there"
        assert await refused(at.bob.checkpoints("r")) == (403, "not-yours", None)
        assert await at.alice.checkpoints("r") == []
        assert (await at.admin.submit(row(), begin=begin)).failed_attempts == []
        assert await refused(at.bob.submit(row(), priority=1)) == (422, "invalid-request", "priority")
        assert (await at.bob.submit(row(), priority=-1)).priority == -1
        assert (await at.admin.submit(row(), priority=1)).priority == 1
        assert (await refused(at.bob.get("none")))[0] == 404
        assert (await at.bob.cancel(["none"])).unknown == ["none"]
        assert (await at.alice.get("r")).state is JobState.RUNNING, "none of it did anything"
        assert (await at.alice.submit(row(run=[Act("held")]), id="r", client="alice")).id == "r", "its own joins it"
        at.bench.handler.let_go.set()
        assert (await at.alice.wait("r")).reward == 1.0
        assert (await at.admin.get("r")).reward == 1.0
        assert (await at.admin.submit(row(), client="bob")).client == "bob", "on behalf of one"
        assert (await at.admin.submit(row())).client == "default"


async def test_what_memory_forgot_is_its_clients_still(tmp_path: Path) -> None:
    none_kept = PipelineSettings(retain_bytes=1)
    async with service(tmp_path, none_kept, Journal(str(tmp_path / "journal"))) as at:
        await at.alice.wait((await at.alice.submit(row(), id="r")).id)
        assert at.pipeline.store.get("r") is None
        assert await refused(at.bob.submit(row(), id="r")) == (409, "id-conflict", "id"), "as when it runs"
        assert await refused(at.bob.get("r")) == (403, "not-yours", None)
        assert (await at.alice.submit(row(), id="r")).reward == 1.0


async def test_groups_of_one_name_do_not_mix(tmp_path: Path) -> None:
    async with service(tmp_path) as at:
        mine = [await at.alice.submit(row(run=[Act("held")]), group="g") for _ in range(2)]
        theirs = [await at.bob.submit(row(run=[Act("held")]), group="g") for _ in range(2)]
        assert [job.id async for job in at.alice.every(group="g")] == [job.id for job in mine]
        assert {job.id for job in (await at.bob.cancel(group="g")).rollouts} == {job.id for job in theirs}
        assert not any(job.state.terminal for job in (await at.alice.list(group="g")).rollouts)
        at.bench.handler.let_go.set()
        assert [(await at.alice.wait(job.id)).state for job in mine] == [JobState.SUCCEEDED] * 2
        assert len((await at.admin.list(group="g")).rollouts) == 4


async def test_the_logs_tell_a_client_of_its_own_alone(tmp_path: Path) -> None:
    async with service(tmp_path) as at:
        for number in range(20):
            await at.alice.wait((await at.alice.submit(row(), id=f"a{number}", group="secret")).id)
            if number % 5 == 0:
                await at.bob.wait((await at.bob.submit(row(), id=f"b{number}")).id)
        own = ["b0", "b5", "b10", "b15"]
        first = await at.bob.list(limit=3)
        assert first.next is not None
        rest = await at.bob.list(limit=3, page=first.next)
        assert [job.id for job in (*first.rollouts, *rest.rollouts)] == own
        after, ended = "0", list[str]()
        for _ in own:  # a page is never empty while there is more
            page = await at.bob.ended(after, limit=1)
            ended += [job.id for job in page.rollouts]
            after = page.cursor
        assert ended == own
        assert (await at.bob.ended(after)).rollouts == []
        seen = []
        async for event in at.bob.events(after="0"):
            assert event.client == "bob"
            seen.append(event)
            if (event.id, event.state) == ("b15", JobState.SUCCEEDED):
                break
        assert {event.id for event in seen} == set(own)
        assert len(seen) == 6 * len(own)
        async for event in at.bob.events(after=seen[-2].cursor):
            assert (event.id, event.state) == ("b15", JobState.SUCCEEDED)
            break
        assert len((await at.admin.list(limit=100)).rollouts) == 24


async def test_a_flood_leaves_the_other_its_part_of_the_queue(tmp_path: Path) -> None:
    settings = PipelineSettings(stages=PoolSizes(init=1, ready=0, run=1, eval=1), max_queued=10)
    async with service(tmp_path, settings) as at:
        flood = row(run=[Act("held")])

        async def until_full(caller: RolloutClient, **options: Any) -> int:
            taken = 0
            while True:
                try:
                    await caller.submit_once(flood, **options)
                except ApiError as error:
                    if "the queue is full" in str(error):
                        return taken
                    raise
                taken += 1

        assert await until_full(at.alice) == 11, "all of it, while nobody else is there; one runs"
        assert await until_full(at.bob) == 6, "3 of 5 shares of 10: the deployment itself has one"
        assert await until_full(at.admin, client="x") == 2
        assert await until_full(at.admin, client="y") == 0, "a name is no further part"
        assert await until_full(at.alice) == 0


async def test_a_key_that_is_revoked_ends_what_is_open(tmp_path: Path) -> None:
    async with service(tmp_path) as at:
        events = at.bob.events(after="0")
        await at.bob.submit(row(run=[Act("held")]), id="b")
        assert (await anext(events)).id == "b"
        write(at.keys, OF["alice"])
        await asyncio.sleep(0.05)
        assert await refused(at.bob.get("b")) == (401, "unauthorized", None)
        at.bench.handler.let_go.set()
        async with asyncio.timeout(30):
            after = {event.state async for event in events}
        assert after <= {"initializing", "ready", "running"}, "what came later was not for it any more"
        assert (await at.admin.wait("b")).reward == 1.0, "its rollouts go on"
        assert (await at.alice.submit(row())).client == "alice"


async def test_the_original_wire_format_obeys_it_too(tmp_path: Path) -> None:
    instance = {**row(run=[Act("held")]), "prompt": "hi"}
    async with service(tmp_path) as at:
        for key, status in ((None, 401), ("b", 403), ("admin", 200)):
            assert (await at.call(key, "POST", "/start"))[0] == status
        process = {"job_id": "j", "instance": instance}
        first = asyncio.create_task(at.call("a", "POST", "/process", process))
        while at.pipeline.store.get("j") is None:
            await asyncio.sleep(0.01)
        status, problem = await at.call("b", "POST", "/process", process)
        assert (status, problem["errors"][0]["field"]) == (409, "job_id"), "it does not join another's"
        status, problem = await at.call("b", "POST", "/cancel", {"job_id": "j"})
        assert (status, problem["errors"][0]["field"]) == (403, "job_id")
        again = asyncio.create_task(at.call("a", "POST", "/process", process))
        await asyncio.sleep(0.1)
        at.bench.handler.let_go.set()
        assert (await first)[0] == (await again)[0] == 200
        assert at.bench.handler.calls["j", "run"] == 1, "its own client joined it"


async def test_the_log_tells_of_every_call_that_only_an_administrator_may_make(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with service(tmp_path) as at:
        await at.alice.submit(row(run=[Act("held")]), id="r")
        await at.alice.submit(row(run=[Act("ok", FOREVER)]), id="s", group="g")
        with caplog.at_level(logging.WARNING):
            await at.admin.drain()
            await at.admin.resume()
            for key in ("a", "wrong"):
                await at.call(key, "POST", "/v1/drain")
            await at.call("a", "GET", "/v1/nothing%0Aadmin: forged")
            await at.admin.cancel(["r"])
            await at.call("admin", "DELETE", "/v1/rollouts/s")
            assert (await at.admin.get("s")).state is JobState.CANCELLED
            await at.admin.status()
            await at.alice.cancel(["r"])
        told = [record.getMessage() for record in caplog.records if record.name.endswith("key_guard")]
        assert told == [
            "admin: POST '/v1/drain' by the deployment from 127.0.0.1: 200",
            "admin: POST '/v1/resume' by the deployment from 127.0.0.1: 200",
            "admin: POST '/v1/drain' by client 'alice' from 127.0.0.1: 403",
            "admin: POST '/v1/drain' by no known key from 127.0.0.1: 401",
            "admin: GET '/v1/nothing\\nadmin: forged' by client 'alice' from 127.0.0.1: 403",
            "admin: POST '/v1/rollouts/cancel' by the deployment from 127.0.0.1: 200",
            "admin: DELETE '/v1/rollouts/s' by the deployment from 127.0.0.1: 200",
        ]
        assert not at.pipeline.draining
