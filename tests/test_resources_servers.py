# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Routes, refusals, keys and verifier cases of all shipped resources servers.

Tests of single servers are in ``tests/prorl_code``, ``tests/prorl_stem`` and ``tests/tasks``.
"""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from starlette.testclient import TestClient

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.servers import verifier_fixture
from nemo_gym_prorl.servers.task_server import TaskServer, TaskServerConfig, TaskVerifyRequest
from nemo_gym_prorl.servers.verifier_fixture import CASES, IMAGE, as_shipped, play
from nemo_gym_prorl.tasks.stem.problems import row_for
from tests.prorl_code.conftest import task_server


TOOLS = {
    "prorl_code": {"bash", "python", "str_replace_editor", "submit"},
    "prorl_harbor": {"bash", "str_replace_editor", "submit"},
    "prorl_math": {"python"},
    "prorl_stem": {"search", "python"},
    "prorl_swe": {"bash", "str_replace_editor", "submit"},
}
ROUTES = {"/seed_session", "/verify", "/aggregate_metrics", "/release_session", "/close_session"}


def of_module(server: str, kind: type) -> Any:
    module = importlib.import_module(f"resources_servers.{server}.app")
    [found] = [
        one
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, kind) and one.__module__ == module.__name__
    ]
    return found


def make_client(server: str, **settings: Any) -> TestClient:
    """Return a client of a server with its shipped configuration and changes."""
    whole = OmegaConf.load(f"resources_servers/{server}/configs/{server}.yaml")
    shipped = whole[server].resources_servers[server]
    config = of_module(server, TaskServerConfig)(
        **{"host": "127.0.0.1", "port": 1, "name": server, **shipped, **settings}
    )
    # Not a context manager, since the lifespan builds the sandbox image.
    return TestClient(task_server(of_module(server, TaskServer), config, whole).setup_webserver())


def test_each_server_has_its_row() -> None:
    assert sorted(TOOLS) == sorted(path.parent.name for path in Path("resources_servers").glob("prorl_*/app.py"))


@pytest.mark.parametrize("server", TOOLS)
def test_routes_and_unknown_sessions(server: str) -> None:
    client = make_client(server)
    paths = set(client.get("/openapi.json").json()["paths"])
    assert paths >= ROUTES
    assert {f"/{tool}" for tool in TOOLS[server]} == paths & {f"/{tool}" for tool in set().union(*TOOLS.values())}
    for tool in TOOLS[server]:
        answer = client.post(f"/{tool}", json={"command": "ls"})
        assert (answer.status_code, answer.headers["X-ProRL-Failure-Kind"]) == (500, "session_lost")
    assert client.post("/release_session").json() == {"released": True}
    assert client.post("/close_session").json() == {}


LIGHT = row_for("How fast is light in vacuum?", "3.00e8 m/s")


@pytest.mark.parametrize(
    ("server", "row", "field"),
    [
        *(
            (
                server,
                {"responses_create_params": {"tools": [{"name": "bassh"}]}},
                "responses_create_params.tools.0.name",
            )
            for server in TOOLS
        ),
        ("prorl_code", {}, "verifier_metadata"),
        ("prorl_math", {"question": "?"}, "expected_answer"),
        ("prorl_math", {"question": "?", "expected_answer": "A", "options": [{"A": "x"}, {"B": "y"}]}, "options"),
        ("prorl_harbor", {"instance_id": "a", "image": "x", "harbor": {"folder": "/a"}}, "harbor.digest"),
        ("prorl_swe", {}, "instance_id"),
        ("prorl_swe", {"instance_id": "a__b-1", "image": "x"}, "swe"),
        *(
            ("prorl_stem", LIGHT | change, field)
            for change, field in [
                ({"expected_answer": "mitochondria"}, "expected_answer"),
                ({"options": [{"A": "x"}, {"A": "y"}]}, "options"),
                ({"options": [{"A": "x"}, {"B": "y"}]}, "expected_answer"),
            ]
        ),
    ],
)
def test_a_bad_row_is_refused_and_the_field_named(server: str, row: dict[str, Any], field: str) -> None:
    answer = make_client(server).post("/seed_session", json=row)
    assert (answer.status_code, answer.headers["Content-Type"]) == (422, "application/problem+json")
    assert [error["field"] for error in answer.json()["errors"]] == [field]


@pytest.mark.parametrize(
    ("server", "settings", "says"),
    [
        *((server, {"host": "0.0.0.0"}, "control_token") for server in TOOLS),
        ("prorl_code", {"sandbox_provider": {"singularity": {"memory": 3}}}, "memory_mib"),
        ("prorl_stem", {"search": {"engine": "tavily"}}, "search.api_key"),
        ("prorl_stem", {"judge_model_server": {"type": "responses_api_models", "name": "gone"}}, "no server 'gone'"),
    ],
)
def test_invalid_setting_is_refused_at_start(server: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises((CallerError, InfrastructureError, ValueError), match=re.escape(says)):
        make_client(server, **settings)
    make_client(server, host="0.0.0.0", control_token="open-sesame")


@pytest.mark.parametrize("server", TOOLS)
def test_every_route_requires_the_key(server: str) -> None:
    client = make_client(server, control_token="open-sesame")
    for path in sorted({*ROUTES, *(f"/{tool}" for tool in TOOLS[server]), "/docs"}):
        assert client.post(path, json={}).status_code == 401
        assert client.post(path, json={}, headers={"Authorization": "Bearer open-sesame"}).status_code != 401


async def check(server: str, case: dict[str, Any]) -> None:
    """Check a case like Gym's ``exercise_verifier_fixture``, with a single reward."""
    folder = Path("resources_servers", server)

    async def reward() -> float:
        request = TaskVerifyRequest.model_validate(case["request"])
        shipped = as_shipped(folder, of_module(server, TaskServer))
        return float((await play(shipped, request, folder / IMAGE))["reward"])

    if case["kind"] == "malformed":
        with pytest.raises(ValueError, match=re.escape(case["expected_error"])):
            await reward()
    else:
        assert await reward() == case["expected_reward"]


def cases(server: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("resources_servers", server, CASES).read_text().splitlines()]


@pytest.mark.sandbox
@pytest.mark.skipif(verifier_fixture.VerifierFixture is not None, reason="each server's own test uses Gym's check")
@pytest.mark.parametrize("server", TOOLS)
async def test_verifier_cases(server: str) -> None:
    assert {case["kind"] for case in cases(server)} == {"full_reward", "zero_reward", "malformed", "determinism"}
    for case in cases(server):
        await check(server, case)
