# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The ``prorl_swe`` server over HTTP."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.prorl_code.conftest import RESPONSE, Client, serving
from tests.tasks.swe import tally


pytestmark = pytest.mark.sandbox

PARTIAL = 'sed -i \'s/text.strip()/text.strip().replace(",", "")/\' tally/money.py'


@pytest.fixture
async def base_url() -> AsyncIterator[str]:
    tally.image()
    async with serving("prorl_swe") as url:
        yield url


async def play(base_url: str, *commands: str, **swe: Any) -> tuple[int, Any, str | None]:
    row = tally.row(**swe)
    async with Client(base_url) as client:
        assert await client.post("/seed_session", row) == (200, {"release_path": "/release_session"}, None)
        for command in commands:
            assert (await client.tool("bash", command=command)).endswith("[exit code: 0]")
        assert (await client.tool("submit")).startswith("Submitted.")
        assert await client.post("/release_session") == (200, {"released": True}, None)
        answer = await client.post("/verify", row | {"response": RESPONSE})
        assert (await client.post("/close_session"))[0] == 200
    return answer


async def test_fix_earns_one_with_all_fields(base_url: str) -> None:
    status, done, _ = await play(base_url, tally.APPLY_FIX)
    assert (status, done["reward"], done["verdict"]) == (200, 1.0, "resolved")
    assert done["patch_files"] == ["tally/money.py"]
    assert "+    sign = -1 if text" in done["patch"]
    assert done["test_report"]["FAIL_TO_PASS"] == {"passed": 3, "failed": 0, "failures": {}}
    assert "5 passed" in done["test_log"]
    assert done["tool_calls"] == 2


async def test_fix_that_breaks_another_test_earns_nothing(base_url: str) -> None:
    status, done, _ = await play(base_url, tally.APPLY_FIX, "echo 'total = None' >> tally/money.py")
    assert (status, done["reward"], done["verdict"]) == (200, 0.0, "broke")


async def test_policy_repository_contains_no_later_history(base_url: str) -> None:
    async with Client(base_url) as client:
        assert (await client.post("/seed_session", tally.row()))[0] == 200
        history = await client.tool("bash", command="git log --all --format=%s%d; git status --short")
        assert history.splitlines() == ["base (HEAD -> master, tag: v1.0)", "[exit code: 0]"]
        every = "git cat-file --batch-all-objects --batch-check | cut -d' ' -f1 | git cat-file --batch | cat -v"
        objects = await client.tool("bash", command=every)
        assert "text.strip()" in objects
        assert "SECRET-FIX" not in objects
        assert "replace(" not in objects
        assert (await client.post("/close_session"))[0] == 200


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"image": "kernel"}, "image"),
        ({"swe": {"base_commit": "0" * 40}}, "swe.base_commit"),
        ({"swe": {"test_patch": tally.TEST_PATCH.replace("310", "311")}}, "swe.test_patch"),
        ({"swe": {"dataset": "swe-batch"}}, "swe.dataset"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_a_bad_row_is_refused_by_field(base_url: str, changes: dict[str, Any], field: str) -> None:
    row = tally.row(**changes.get("swe", {})) | {key: value for key, value in changes.items() if key != "swe"}
    async with Client(base_url) as client:
        status, answer, _ = await client.post("/seed_session", row)
    assert (status, answer["errors"][0]["field"]) == (422, field), answer


async def test_ungradable_row_is_a_task_failure(base_url: str) -> None:
    """The failure kind masks the rollout; see ``tests/agent/test_blame.py``."""
    status, answer, kind = await play(base_url, PARTIAL, test_command="python3 -m pytest -rA no_such_folder")
    assert (status, kind) == (422, "verifier_error")
    assert "no test has an outcome" in answer["detail"]
