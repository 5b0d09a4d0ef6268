# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The cases by which Gym checks our verifiers, with real sandboxes, also on a Gym that has no such check."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl import verifier_fixture
from nemo_gym_prorl.task_server import TaskServer, TaskVerifyRequest
from nemo_gym_prorl.verifier_fixture import CASES, IMAGE, as_shipped, play


pytestmark = pytest.mark.sandbox

SERVERS = sorted(path.parent.name for path in Path("resources_servers").glob("prorl_*/app.py"))


async def check(server: str, case: dict[str, Any]) -> None:
    """As Gym's ``exercise_verifier_fixture`` does it, but once also where that compares two rewards."""
    module = importlib.import_module(f"resources_servers.{server}.app")
    [kind] = [
        found
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, TaskServer) and found.__module__ == module.__name__
    ]
    folder = Path("resources_servers", server)

    async def reward() -> float:
        request = TaskVerifyRequest.model_validate(case["request"])
        return float((await play(as_shipped(folder, kind), request, folder / IMAGE))["reward"])

    if case["kind"] == "malformed":
        with pytest.raises(ValueError, match=re.escape(case["expected_error"])):
            await reward()
    else:
        assert await reward() == case["expected_reward"]


def cases(server: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("resources_servers", server, CASES).read_text().splitlines()]


@pytest.mark.skipif(verifier_fixture.VerifierFixture is not None, reason="each server's own test uses Gym's check")
@pytest.mark.parametrize("server", SERVERS)
async def test_each_case_is_judged_as_it_says(server: str) -> None:
    assert {case["kind"] for case in cases(server)} == {"full_reward", "zero_reward", "malformed", "determinism"}
    for case in cases(server):
        await check(server, case)


@pytest.mark.parametrize("kind", ["full_reward", "zero_reward", "malformed"])
async def test_a_case_that_says_what_is_not_so_is_found_out(kind: str) -> None:
    case = next(case for case in cases("prorl_code") if case["kind"] == kind)
    wrong = {"expected_error": "no such word"} if kind == "malformed" else {"expected_reward": 0.5}
    with pytest.raises(AssertionError):
        await check("prorl_code", case | wrong)
