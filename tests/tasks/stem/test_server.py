# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The server over HTTP, with real containers: whole rollouts, and what becomes of them when something is down."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.tasks.stem.problems import row_for
from tests.prorl_code.conftest import Client, saying
from tests.prorl_code.conftest import serving as serving_any
from tests.tasks.stem.judges import TROUBLES, gullible, judging


pytestmark = pytest.mark.sandbox

ROWS = {
    "quantity": row_for("How fast is light in vacuum?", "3.00e8 m/s"),
    "choice": row_for("Which element is most electronegative?", "B", {"A": "Oxygen", "B": "Fluorine", "C": "Neon"}),
    "formula": row_for("What is the moment of inertia of a solid sphere?", r"\frac{2}{5} M R^2"),
}
TEXT = row_for("Which organelle makes most of the ATP?", "mitochondria")
serving = partial(serving_any, "prorl_stem")


async def test_search_and_python_side_by_side() -> None:
    async with serving() as url, Client(url) as client:
        row = ROWS["quantity"]
        await client.post("/seed_session", row)
        assert "299,792,458" in await client.tool("search", query="speed of light in vacuum")
        assert (await client.tool("search", query="")).startswith("Error in the arguments of search")
        assert await client.tool("python", code="c = 299792458.0") == "[ok]"
        assert await client.tool("python", code="print(c)") == "299792458.0\n[ok]"
        unreachable = await client.tool("python", code="import urllib.request as u\nu.urlopen('http://192.0.2.1')")
        assert unreachable.endswith("[error]")
        status, verdict, _ = await client.post("/verify", row | {"response": saying(r"\boxed{2.998e5 km/s}")})
        assert (status, verdict["reward"]) == (200, 1.0)


async def judged(client: Client, answer: str) -> tuple[int, Any, str | None]:
    assert (await client.post("/seed_session", TEXT))[0] == 200
    return await client.post("/verify", TEXT | {"response": saying(f"\\boxed{{{answer}}}")})


async def test_a_judge_that_is_down_slow_or_confused_is_no_reward() -> None:
    async with judging() as (judge_url, judge), serving(judge_url, judge_timeout_s=3.0) as url:
        async with Client(url) as client:
            status, verdict, _ = await judged(client, "the mitochondrion")
            assert (status, verdict["reward"], verdict["checked_by"]) == (200, 1.0, "judge")
            assert "VERDICT" in verdict["judge_reply"]
        for name in ("slow", "error", "two verdicts"):
            judge.answers = TROUBLES[name]
            async with Client(url) as client:
                status, problem, kind = await judged(client, "the mitochondrion")
                assert (status, kind) == (500, "verifier_error"), (name, problem)
                # Asked again when the judge has recovered, the same session is graded.
                judge.answers = judge.judge
                status, verdict, _ = await client.post("/verify", TEXT | {"response": saying(r"\boxed{ribosomes}")})
                assert (status, verdict["reward"], verdict["verdict"]) == (200, 0.0, "wrong")
        judge.answers = TROUBLES["error"]
        async with Client(url) as client:
            assert (await judged(client, "mitochondria"))[1]["reward"] == 1.0, "rules decide without the judge"


async def test_a_lenient_judge_is_refused_before_the_first_rollout() -> None:
    async with judging() as (judge_url, judge), serving(judge_url) as url, Client(url) as client:
        judge.reply = gullible
        status, problem, kind = await client.post("/seed_session", TEXT)
        assert (status, kind) == (500, "verifier_error")
        assert "the judge 'judge_model' is too lenient" in problem["detail"]


@pytest.mark.parametrize("engine", ["offline", "tavily"])
async def test_a_search_that_is_down_is_no_observation(engine: str, tmp_path: Path) -> None:
    search = {"engine": engine, "index": str(tmp_path / "nowhere"), "api_key": "k", "url": "http://127.0.0.1:1"}
    async with serving(search=search) as url, Client(url) as client:
        status, problem, kind = await client.post("/seed_session", ROWS["quantity"])
        if engine == "offline":
            assert (status, kind) == (500, "provider_unavailable")
            assert "prorl data index" in problem["detail"]
        else:
            assert status == 200
            status, _, kind = await client.post("/search", {"query": "light"})
            assert (status, kind) == (500, "transport_unreachable")
            assert await client.tool("python", code="1 + 1") == "2\n[ok]"
