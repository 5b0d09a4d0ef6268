# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Who may call the agent: what each route asks of a key, clients at Gym's routes, and the second port with TLS."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.routing import BaseRoute, Route

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.http.key_guard import OPEN_PATHS
from nemo_gym_prorl.http.keys import Scope, authorization
from nemo_gym_prorl.rollout.api.access_control import ROUTES, hash_of
from nemo_gym_prorl.rollout.api.client import ApiError, RolloutClient
from responses_api_agents.prorl_agent.tests.test_app import agent
from tests.agent.gym_host import free_port
from tests.agent.peers import COLLECTED, ROW, Deployment, deployment
from tests.cli.command_line import prorl
from tests.rollout.test_access_control import OF, write


KEYS = {"all": [*Scope]} | {
    f"all-but-{scope}": [other for other in Scope if other not in (scope, Scope.ADMIN)] for scope in Scope
}
OTHERS = {
    "GET /v1/rollouts/{rollout_id}": None,
    "GET /v1/rollouts/{rollout_id}/checkpoints": None,
    "DELETE /v1/rollouts/{rollout_id}": None,
    "POST /v1/rollouts/{rollout_id}/fork": {},
    "POST /v1/rollouts/cancel": {"ids": ["theirs"]},
    "POST /cancel": {"job_id": "theirs"},
}
"""Routes that are asked of a rollout, and the bodies that name another's."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FastAPI, TestClient]]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    clients = [{"name": name, "hash": hash_of(name), "scopes": scopes} for name, scopes in KEYS.items()]
    path.write_text(json.dumps({"clients": clients}))
    path.chmod(0o600)
    app = agent(prorl_wire=True, control_token="s3cret", keys_file=str(path)).setup_webserver()
    with TestClient(app) as client:
        yield app, client


def routes_of(routes: Iterable[BaseRoute]) -> set[tuple[str, str]]:
    """Method and path of all, Gym's and FastAPI's own among them."""
    found = set[tuple[str, str]]()
    for route in routes:
        if (router := getattr(route, "original_router", None)) is not None:  # newer FastAPIs keep it whole
            found |= routes_of(router.routes)
            continue
        assert isinstance(route, Route), f"{route}: nobody knows what that answers"
        found |= {(method, route.path) for method in route.methods or () if method != "HEAD"}
    return found


def call(client: TestClient, method: str, path: str, key: str | None, body: Any = None) -> tuple[int, str]:
    answer = client.request(method, path.format(rollout_id="theirs"), json=body, headers=authorization(key))
    return answer.status_code, str(answer.json().get("type", "")).rpartition(":")[2]


def test_the_table_has_every_route_and_every_route_needs_a_key_that_is_good_for_it(
    served: tuple[FastAPI, TestClient],
) -> None:
    app, client = served
    routes = {(method, path) for method, path in routes_of(app.router.routes) if path not in OPEN_PATHS}
    assert len(routes) > 20
    assert not routes - ROUTES.keys(), "each has its line"
    gym_07 = {(method, path) for method, path in ROUTES if path.startswith("/ng-rollout/")}
    assert not ROUTES.keys() - routes - gym_07, "each line has its route"
    for method, path in sorted(routes):
        for key in (None, "wrong", ""):
            assert call(client, method, path, key) == (401, "unauthorized"), (method, path)
        needed = ROUTES[method, path]
        assert call(client, method, path, f"all-but-{needed}") == (403, "not-allowed"), (method, path)


def test_a_route_that_the_table_has_not_is_an_administrators(served: tuple[FastAPI, TestClient]) -> None:
    _, client = served
    for path in (
        "/v1/rollouts/a/b",
        "/v1/none",
        "/v1/rollouts/",
        "/stats",
        "/ng-rollout/1-0/v1/drain",
        "//v1/rollouts",
    ):
        assert call(client, "GET", path, "all-but-admin") == (403, "not-allowed"), path
        assert client.get(path, headers=authorization("s3cret")).status_code in (200, 404), path
    assert call(client, "PUT", "/v1/rollouts", "all-but-admin") == (403, "not-allowed")


def test_with_anothers_key_a_rollout_is_refused(served: tuple[FastAPI, TestClient]) -> None:
    app, client = served
    routes = {f"{method} {path}" for method, path in routes_of(app.router.routes)}
    asked_of_one = {route for route in routes if "{rollout_id}" in route and "/ng-rollout/" not in route}
    asked_of_one |= {route for route in routes if "/cancel" in route}
    assert asked_of_one == OTHERS.keys(), "of which all are tried"
    row = {"responses_create_params": {"input": "hi"}}
    assert call(client, "POST", "/v1/rollouts", "all", {"row": row, "id": "theirs"}) == (202, "")
    assert call(client, "POST", "/v1/drain", "all", {}) == (200, "")
    for route, body in OTHERS.items():
        method, path = route.split()
        status = call(client, method, path, "all-but-admin", body)
        # The wire format knows its own jobs only; tests/rollout/test_access_control.py has one of another's there.
        assert status == ((404, "unknown-rollout") if path == "/cancel" else (403, "not-yours")), route
        if method == "GET":
            assert call(client, method, path, "all") == (200, "")
    listed = client.get("/v1/rollouts", headers=authorization("all-but-admin")).json()
    assert listed["rollouts"] == []


def test_clients_keys_are_keys_enough(tmp_path: Path) -> None:
    """A server that has them and no control_token may listen for others, and lets nobody in without."""
    path = tmp_path / "keys.yaml"
    path.write_text("clients: []")
    path.chmod(0o600)
    with TestClient(agent(host="0.0.0.0", keys_file=str(path)).setup_webserver()) as client:
        assert call(client, "GET", "/status", None) == (401, "unauthorized")
        assert client.get("/status", headers={"Authorization": "None"}).status_code == 401


async def post(at: Deployment, key: str, body: Any, path: str = "/run") -> tuple[int, Any]:
    status, answer, _ = await at.post(path, body, headers=authorization(key))
    return status, answer


async def owners(at: Deployment) -> dict[str, str]:
    async with at.http.get(f"{at.url}/v1/rollouts", headers=authorization("admin")) as answer:
        return {job["id"]: job["client"] for job in (await answer.json())["rollouts"]}


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


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of its own for loopback; its key is beside it."""
    folder = tmp_path_factory.mktemp("tls")
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made += ["-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=prorl", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(made, cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem"


def settings(certificate: Path, **others: Any) -> dict[str, Any]:
    tls = {"tls_port": free_port(), "tls_cert": certificate, "tls_key": certificate.with_name("key.pem")}
    return {"control_token": "s3cret", **tls, **others}


async def test_a_rollout_by_tls_and_one_by_the_plain_address(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = settings(certificate)
    async with deployment(**own) as at:
        url = f"https://127.0.0.1:{own['tls_port']}"
        async with RolloutClient(url, "s3cret") as stranger:
            with pytest.raises(InfrastructureError, match="certificate verify failed"):
                await stranger.status()
        monkeypatch.setenv("PRORL_CA", str(certificate))
        async with RolloutClient(url, "s3cret") as client, RolloutClient(at.url, "s3cret") as plain:
            job = await client.submit(ROW)
            assert (await client.wait(job.id)).reward == 1.0
            assert (await plain.get(job.id)).reward == 1.0
        async with RolloutClient(url) as nobody:
            with pytest.raises(ApiError, match="401"):
                await nobody.status()
        code, said = await prorl("status", url=url, PRORL_TOKEN="s3cret", PRORL_CA=str(certificate))
        assert (code, "succeeded" in said) == (0, True), said


@pytest.mark.parametrize(
    ("others", "field", "said"),
    [
        ({"tls_key": None}, "tls_port", "set all of tls_port"),
        ({"control_token": None}, "control_token", "would listen on all interfaces"),
        ({"tls_cert": Path(__file__)}, "tls_cert", "must be a certificate and its key"),
    ],
)
async def test_a_door_that_cannot_be_is_refused(
    certificate: Path, others: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(CallerError, match=said) as refused:
        async with deployment(**settings(certificate, **others)):
            pass
    assert refused.value.field == field
