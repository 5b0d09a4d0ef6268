# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Forks through the client at a real vLLM: what it has of their first prompts already, by its own counters."""

import json
import re
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.rollout.client import ApiError
from nemo_gym_prorl.rollout.schemas import JobView
from nemo_gym_prorl.tasks.code.rows import humaneval_row, problems
from tests.handlers.gym_host import instance
from tests.handlers.test_resume import Stage
from tests.policy.engines import MODEL, tiny_model, vllm
from tests.tasks import containers


FORKS, TURN = 8, 10
CALL = r'<tool_call>\n\{"name": "bash", "arguments": \{"command": "seq [1-9]00 [1-9]4[0-9]"\}\}\n</tool_call>'
"""What the policy is held to, which otherwise ends when it likes. Its numbers are its own."""


def asking() -> dict[str, Any]:
    row = humaneval_row(problems()["HumanEval/2"])
    extra = json.dumps({"structured_outputs": {"regex": CALL}, "ignore_eos": False})
    params = row["responses_create_params"] | {"metadata": {"extra_body": extra}, "temperature": 1.0}
    return {**row, "responses_create_params": params | {"max_output_tokens": 128}}


def counted(url: str) -> Counter[str]:
    """Prompt tokens that the engine looked for in its cache, and found there."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    found = re.findall(r"^vllm:prefix_cache_(queries|hits)_total\S* (\S+)$", text, re.M)
    return Counter({name: int(float(value)) for name, value in found})


@pytest.mark.engine
@pytest.mark.long("starts a real vLLM; that siblings share their first prompt's tokens is in test_resume")
@pytest.mark.timeout(900)
async def test_a_real_engine_has_what_forks_begin_with(tmp_path: Path) -> None:
    model = tiny_model()
    with vllm(model, tmp_path / "vllm.log", "--block-size", "32") as (engine, _):
        shipped = containers.shipped_config()
        code = shipped["prorl_code"]["resources_servers"]["prorl_code"] | {"image": containers.image()}
        policy = {
            "base_url": f"{engine}/v1",
            "api_key": "none",
            "model": MODEL,
            "return_token_id_information": True,
            "uses_reasoning_parser": False,
            "policy": {"tokenizer": str(model)},
        }
        config = {
            "prorl_code": instance("resources_servers", "prorl_code", **code),
            "policy_model": instance("responses_api_models", "prorl_model", **policy),
        }
        stage = Stage(config | {"sandbox": shipped["sandbox"]})
        try:
            for name in config:
                await stage.start(name)
            async with stage.service(checkpoint_turns=1, max_steps=TURN + 1) as service, service.client() as client:
                await client.submit(asking(), id="parent", group="siblings")
                parent = await client.wait("parent")
                assert (parent.finish_reason, parent.turns) == ("max_steps", TURN + 1), parent.failure
                assert parent.checkpoints == [*range(1, TURN + 1)]
                before = counted(engine)
                forks = await client.fork("parent", TURN, FORKS, client="other")
                ended = [await client.wait(fork.id) for fork in forks]
                looked = counted(engine) - before
                check(parent, ended)
                assert looked["queries"] > 8 * 3000, "a turn of each"
                print(f"{looked['hits']} of {looked['queries']} tokens of {FORKS} first prompts were cached")
                assert looked["hits"] / looked["queries"] >= 0.95
                with pytest.raises(ApiError, match="there are those after turn 1, 2") as refused:
                    await client.fork("parent", 99)
                assert refused.value.problem.status == 409
        finally:
            await stage.close()


def check(parent: JobView, forks: list[JobView]) -> None:
    assert {(fork.client, fork.group, fork.turns) for fork in forks} == {("other", "siblings", TURN + 1)}
    asked = [fork.result["response"]["output"][2 * TURN]["prompt_token_ids"] for fork in forks if fork.result]
    assert parent.result is not None
    assert asked == [parent.result["response"]["output"][2 * TURN]["prompt_token_ids"]] * FORKS
    assert all(fork.forked_from and fork.forked_from.turn == TURN for fork in forks)
