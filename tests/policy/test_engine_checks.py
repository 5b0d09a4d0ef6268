# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl doctor --policy-url``: one line for each defect that a rollout would meet, with its fix."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fastapi import Body, FastAPI
from typer.testing import CliRunner

from nemo_gym_prorl.cli.app import app
from nemo_gym_prorl.policy.engine_checks import EngineFinding, check_engine
from nemo_gym_prorl.policy.runtime import PolicyConfig
from tests.policy.engines import MODEL
from tests.policy.families import TEMPLATES
from tests.policy.runtimes import words_in
from tests.policy.scripted_engine import answer_of, completion, says
from tests.rollout.serving import serve as serving


async def _findings(url: str, **settings: Any) -> dict[str, EngineFinding]:
    config = PolicyConfig(base_url=[url], **({"model": MODEL} | settings))
    return {one.name: one async for one in check_engine(config)}


@pytest.mark.engine
async def test_a_real_engine_is_looked_over(engine_url: str, model_folder: Path) -> None:
    template = str(TEMPLATES / "chatml.jinja")
    found = await _findings(engine_url, tokenizer=str(model_folder), chat_template=template)
    levels = {name: one.level for name, one in found.items()}
    assert levels == {
        **dict.fromkeys(("Template", "Engine", "Tokenizer", "Log-probs", "Context", "Token ids", "Grammars"), "ok"),
        "Prefix cache": "warn",
    }, found
    assert "hermes" in found["Template"].found
    assert "VLLM_SERVER_DEV_MODE=1" in found["Prefix cache"].fix


@pytest.mark.engine
@pytest.mark.parametrize(
    ("settings", "name", "said"),
    [
        ({"model": "nope"}, "Engine", "serves tiny, not 'nope'"),
        ({"tool_call_parser": "mistral"}, "Template", "'mistral' does not read the template's calls, 'hermes' does"),
        ({"chat_template": "opened", "tokenizer": None, "engine": "sglang"}, "Engine", "has no /generate"),
        ({"tokenizer": "words"}, "Template", "the tokenizer has no ids for 'Sayone'"),
        ({"tokenizer": "nowhere-at-all"}, "Template", "neither a folder nor a model"),
        ({"tool_call_parser": "nosuch"}, "Template", "'nosuch' is none of hermes"),
    ],
)
async def test_what_does_not_fit_is_named(
    engine_url: str, model_folder: Path, tmp_path: Path, settings: dict[str, Any], name: str, said: str
) -> None:
    given = {"tokenizer": str(model_folder), "chat_template": str(TEMPLATES / "chatml.jinja")} | settings
    if given["tokenizer"] == "words":
        given |= {"tokenizer": words_in(tmp_path, *"abcdefghijklmnopqrstuvwxyz", "?"), "tool_call_parser": "plain"}
    found = (await _findings(engine_url, **given))[name]
    assert found.level == "missing"
    assert said in found.found


@pytest.mark.parametrize("mode", ["raw", "scaled"])
async def test_an_engine_whose_log_probs_leave_settings_out_is_named_with_the_fix(mode: str) -> None:
    app = FastAPI(openapi_url=None)

    @app.post("/v1/chat/completions")
    async def answer(body: dict[str, Any] = Body()) -> dict[str, Any]:
        return answer_of(body, mode)

    async with serving(app) as url:
        found = (await _findings(url))["Log-probs"]
    assert (found.level, found.found.partition(":")[0]) == ("warn", mode)
    assert found.fix == "start vLLM with --logprobs-mode processed_logprobs"


async def test_an_engine_that_is_not_there_ends_the_checks() -> None:
    found = await _findings("http://127.0.0.1:9/v1")
    assert {name: one.level for name, one in found.items()} == {"Engine": "missing"}


async def test_the_command_shows_the_lines_and_its_exit_code_tells() -> None:
    async with serving(says("/v1/chat/completions", lambda _: completion(), published=False)) as url:
        arguments = ["doctor", "--policy-url", f"{url}/v1", "--policy-model", "m", "--engine", "vllm_chat"]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)  # it runs a loop of its own
    assert result.exit_code == 1
    assert "Log-probs" in result.output
    assert "Token ids" in result.output
