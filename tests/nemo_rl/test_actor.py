# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""NeMo RL's own actor over our servers: what its code makes of rollouts, of failures, and what is done beside them.

INFRA is dispatched again, DATA is given up after a second try, and what arrives is trained on unless it is masked. So
infrastructure has to be INFRA, a wrong row DATA, and what the policy did a masked row as long as it did anything.
"""

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import orjson
import pytest

from nemo_gym_prorl.rollout.api.client import RolloutClient
from nemo_gym_prorl.tasks.code.rows import humaneval_row, problems
from tests.nemo_rl.conftest import KEY, NODE_ADDRESS
from tests.tasks import containers


if TYPE_CHECKING:
    from tests.nemo_rl.engine import Engine
    from tests.nemo_rl.trainer import Trainer

pytestmark = [pytest.mark.gym, pytest.mark.timeout(420)]

EXAMPLES = Path(__file__).parents[2] / "resources_servers/prorl_code/data/example.jsonl"


def test_the_head_server_tells_where_the_servers_are(trainer: "Trainer") -> None:
    urls = trainer.server_urls()
    hosts = {name: urlsplit(url).hostname for name, url in urls.items()}
    ours = dict.fromkeys(("policy_model", "counting_agent", "prorl_code", "prorl_code_agent"), "127.0.0.1")
    # NeMo RL has servers listen on the node's address, for everybody; ours only where their block says so.
    assert hosts == {**ours, "counting": NODE_ADDRESS}
    with urlopen(f"{urls['counting_agent']}/healthz") as response:
        assert json.load(response) == {"status": "ok"}


def test_a_key_of_the_environment_is_asked_for_and_told_to_nobody(trainer: "Trainer") -> None:
    """NeMo RL's head server hands the configuration out, and Gym puts it on the command lines of its servers."""
    with pytest.raises(HTTPError) as refused:
        urlopen(f"{trainer.server_urls()['prorl_code_agent']}/status")
    assert refused.value.code == 401
    with urlopen(f"{trainer.head_url}/global_config_dict_yaml") as response:
        assert KEY not in response.read().decode()
    assert not [process for process in Path("/proc").glob("[0-9]*/cmdline") if KEY.encode() in _read(process)]


@pytest.mark.sandbox
def test_sandboxes_of_a_cancelled_group_are_gone_at_once(trainer: "Trainer", engine: "Engine") -> None:
    """Four rollouts of one group are cancelled in mid-turn; four of another go on to their reward."""
    containers.image()
    aborted, before = engine.aborted, containers.instances()
    doomed = trainer.start([code_row("prompt-1", latency_s=600) for _ in range(4)])
    spared = trainer.start([code_row("prompt-2", latency_s=20) for _ in range(4)])
    deadline = time.monotonic() + 120
    while engine.in_flight < 8:
        assert time.monotonic() < deadline, f"{engine.in_flight} of 8 came to their second turn"
        time.sleep(0.1)
    assert len(containers.instances() - before) == 8

    async def cancel() -> int:
        async with RolloutClient(trainer.server_urls()["prorl_code_agent"], KEY) as client:
            return len((await client.cancel(group="prompt-1")).rollouts)

    started = time.monotonic()
    assert asyncio.run(cancel()) == 4
    seconds = time.monotonic() - started
    assert len(containers.instances() - before) == 4
    assert seconds < 15, seconds  # 2 s where nothing else runs
    print(f"4 sandboxes gone after {seconds:.2f} s")
    assert engine.aborted - aborted == 4

    got = trainer.drain(doomed)
    assert type(got.error).__name__ == "RayTaskError(GymTransportError)", got.error
    got = trainer.drain(spared)
    assert got.error is None
    assert [got.results[index]["full_result"]["reward"] for index in range(4)] == [0.0] * 4
    assert containers.instances() == before


def test_a_row_tells_which_weights_sampled_its_turns(trainer: "Trainer") -> None:
    """Labels change without draining: turns in flight go on, and say that two versions sampled them."""
    from tests.nemo_rl.trainer import counting_row, turn

    label(trainer, "step-7")
    stream = trainer.start([counting_row(turn("Seven.", 7), turn("Ten.", 3, latency_s=3.0), turn("Done."))])
    time.sleep(2.0)
    started = time.monotonic()
    label(trainer, "step-8")
    assert time.monotonic() - started < 1.0, "a label waits for nothing"
    got = trainer.drain(stream)
    assert got.error is None
    assert got.results[0]["full_result"]["rollout"]["weight_versions"] == [
        {"turn": 0, "first": "step-7", "last": "step-7"},
        {"turn": 1, "first": "step-7", "last": "step-8"},
        {"turn": 2, "first": "step-8", "last": "step-8"},
    ]


def test_tokens_arrive_as_they_were_sampled(trainer: "Trainer", engine: "Engine") -> None:
    """NeMo RL asserts that each prompt continues all tokens before it; and they are the engine's own."""
    from tests.nemo_rl.trainer import solving_row

    asked = len(engine.requests)
    batch = trainer.batch(*(solving_row() for _ in range(8))).final_batch
    assert len(engine.requests) - asked == 8 * 3
    assert batch["total_reward"].tolist() == [1.0] * 8
    assert batch["mask_sample"].tolist() == [False] * 8
    for log in batch["message_log"]:
        assert [message["role"] for message in log] == ["user", "assistant"] * 3
        for message in log[1::2]:
            # With the space that the text of a turn does not show, and a log-probability for each token.
            assert bytes(message["token_ids"][-2:].tolist()) == b" \xfe"
            expected = [-(token % 7) / 8 - 0.125 for token in message["token_ids"].tolist()]
            assert message["generation_logprobs"].tolist() == expected
    print(f"{sum(len(message['token_ids']) for log in batch['message_log'] for message in log)} tokens of 8 rows")


@pytest.mark.sandbox
def test_humaneval_in_sandboxes(trainer: "Trainer") -> None:
    """The data set that ships with ``prorl_code``, with its scripted solutions, graded in sandboxes."""
    containers.image()
    agent = {"type": "responses_api_agents", "name": "prorl_code_agent"}
    rows = [orjson.loads(line) | {"agent_ref": agent} for line in EXAMPLES.read_bytes().splitlines()]
    batch = trainer.batch(*rows).final_batch
    assert batch["total_reward"].tolist() == [1.0] * len(rows)
    assert all(len(log) >= 4 for log in batch["message_log"])
    tokens = sum(len(message["token_ids"]) for log in batch["message_log"] for message in log)
    print(f"{tokens} tokens of {len(rows)} rows in sandboxes")


@pytest.mark.parametrize(
    ("trouble", "failure", "about"),
    [
        ({"seed": 500}, "GymTransportError", "HTTP 503"),
        ({"verify": 500}, "GymTransportError", "HTTP 503"),
        ({"verify": 403}, "GymTransportError", "HTTP 503"),  # a deployment's trouble, not the row's
        ({"seed": 422}, "RolloutDataFailure", "HTTP 422"),
        ({"verify": 422}, "RolloutDataFailure", "HTTP 422"),
    ],
    ids=["seed-500", "verify-500", "verify-403", "seed-422", "verify-422"],
)
def test_a_failing_environment(trainer: "Trainer", trouble: dict[str, int], failure: str, about: str) -> None:
    from tests.nemo_rl.trainer import counting_row, turn

    assert_error(trainer, counting_row(turn("Done."), trouble=trouble), failure, about)


@pytest.mark.parametrize(
    "wrong",
    [{"input": 10}, {"metadata": {"extra_body": "{"}}, {"tools": [{"type": "function"}]}],
    ids=["input", "metadata", "tools"],
)
def test_a_wrong_row_is_data(trainer: "Trainer", wrong: dict[str, Any]) -> None:
    from tests.nemo_rl.trainer import counting_row, turn

    row = counting_row(turn("Done."))
    row["responses_create_params"] |= wrong
    assert_error(trainer, row, "RolloutDataFailure", "HTTP 422")


def test_a_policy_that_ran_out_of_time_is_masked_with_its_tokens(trainer: "Trainer") -> None:
    from tests.nemo_rl.trainer import counting_row, solving_row, turn

    batch = trainer.batch(counting_row(turn("First seven.", 7), turn("Well …", latency_s=60)), solving_row())
    assert batch.final_batch["mask_sample"].tolist() == [True, False]
    [prompt, sampled] = batch.final_batch["message_log"][0]
    assert b"First seven." in bytes(sampled["token_ids"].tolist())
    assert len(sampled["generation_logprobs"]) == len(sampled["token_ids"])
    assert len(prompt["token_ids"]) > 0


def test_what_arrived_before_a_failure_is_kept(trainer: "Trainer") -> None:
    """A failing row ends its stream; NeMo RL keeps what has arrived and dispatches the others again."""
    from tests.nemo_rl.trainer import counting_row, solving_row, turn

    late = counting_row(turn("Done.", latency_s=3.0), trouble={"verify": 500})
    got = trainer.run(solving_row(), solving_row(), late)
    assert type(got.error).__name__ == "RayTaskError(GymTransportError)"
    assert sorted(got.results) == [0, 1]


async def test_single_controller_completes_a_group_that_infrastructure_broke(trainer: "Trainer") -> None:
    """NeMo RL's own code for a prompt's group: what is missing is dispatched again, and every row arrives once."""
    from tests.nemo_rl.trainer import counting_row, turn

    trouble = {"verify": 500, "times": 2, "name": "two of four"}
    group, redispatched = await trainer.group(counting_row(turn("Ten.", 10), turn("Done."), trouble=trouble), 4)
    assert [completion.reward for completion in group.completions] == [1.0] * 4
    assert 1 <= redispatched <= 8


def assert_error(trainer: "Trainer", row: dict[str, Any], failure: str, about: str) -> None:
    """The row ends its stream with a failure of NeMo RL's taxonomy, classified as it should be."""
    got = trainer.run(row)
    assert got.results == {}
    assert type(got.error).__name__ == f"RayTaskError({failure})", got.error
    assert about in str(got.error)
    assert got.verdict is not None
    assert got.verdict.value == ("infra" if failure == "GymTransportError" else "data")


def code_row(group: str, latency_s: float) -> dict[str, Any]:
    """A row that opens a sandbox, and then thinks."""
    row = humaneval_row(problems()["HumanEval/2"])
    call = {"name": "bash", "arguments": {"command": "echo $PWD"}}
    script = {"turns": [{"tool_calls": [call]}, {"content": "I give up.", "latency_s": latency_s}]}
    params = {**row["responses_create_params"], "metadata": {"script": json.dumps(script)}}
    agent = {"type": "responses_api_agents", "name": "prorl_code_agent"}
    return {**row, "responses_create_params": params, "agent_ref": agent, "rollout": {"group": group}}


def label(trainer: "Trainer", version: str) -> None:
    """Say which weights the engines have."""
    request = Request(
        f"{trainer.server_urls()['policy_model']}/v1/backends/weight_version",
        json.dumps({"weight_version": version}).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request) as response:
        assert response.status == 200


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # the process has ended
        return b""
