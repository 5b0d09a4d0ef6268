# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""NeMo RL's own actor with this package's servers: rollouts, classification of failures, and weight labels.

NeMo RL dispatches INFRA failures again, gives DATA failures up after a second try, and trains on results unless
masked. Therefore infrastructure failures must be INFRA, wrong rows DATA, and agent failures masked rows.
"""

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.nemo_rl.conftest import KEY


if TYPE_CHECKING:
    from tests.nemo_rl.engine import Engine
    from tests.nemo_rl.trainer import Trainer

pytestmark = [pytest.mark.gym, pytest.mark.timeout(420, func_only=True)]


def test_a_key_of_the_environment_is_asked_for_and_told_to_nobody(trainer: "Trainer") -> None:
    """The configuration is public: NeMo RL's head server and Gym's command lines show it."""
    with pytest.raises(HTTPError) as refused:
        urlopen(f"{trainer.server_urls()['prorl_code_agent']}/status")
    assert refused.value.code == 401
    with urlopen(f"{trainer.head_url}/global_config_dict_yaml") as response:
        assert KEY not in response.read().decode()
    assert not [process for process in Path("/proc").glob("[0-9]*/cmdline") if KEY.encode() in _read(process)]


def test_tokens_arrive_as_they_were_sampled(trainer: "Trainer", engine: "Engine") -> None:
    """NeMo RL asserts that each prompt continues the tokens before it; the tokens are the engine's."""
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


@pytest.mark.parametrize(
    ("trouble", "failure", "about"),
    [
        ({"verify": 500}, "GymTransportError", "HTTP 503"),
        ({"verify": 403}, "GymTransportError", "HTTP 503"),  # a deployment's trouble, not the row's
        ({"seed": 422}, "RolloutDataFailure", "HTTP 422"),
        ({}, "RolloutDataFailure", "HTTP 422"),  # a row with a wrong field
    ],
    ids=["verify-500", "verify-403", "seed-422", "row"],
)
def test_a_failure_is_classified_by_nemo_rl(
    trainer: "Trainer", trouble: dict[str, int], failure: str, about: str
) -> None:
    """The row ends its stream with a failure of NeMo RL's taxonomy, classified as it should be."""
    from tests.nemo_rl.trainer import counting_row, turn

    row = counting_row(turn("Done."), trouble=trouble)
    row["responses_create_params"] |= {} if trouble else {"tools": [{"type": "function"}]}
    got = trainer.run(row)
    assert got.results == {}
    assert type(got.error).__name__ == f"RayTaskError({failure})", got.error
    assert about in str(got.error)
    assert got.verdict is not None
    assert got.verdict.value == ("infra" if failure == "GymTransportError" else "data")


def test_a_policy_that_ran_out_of_time_is_masked_with_its_tokens(trainer: "Trainer") -> None:
    from tests.nemo_rl.trainer import counting_row, solving_row, turn

    batch = trainer.batch(counting_row(turn("First seven.", 7), turn("Well …", latency_s=60)), solving_row())
    assert batch.final_batch["mask_sample"].tolist() == [True, False]
    [prompt, sampled] = batch.final_batch["message_log"][0]
    assert b"First seven." in bytes(sampled["token_ids"].tolist())
    assert len(sampled["generation_logprobs"]) == len(sampled["token_ids"])
    assert len(prompt["token_ids"]) > 0


async def test_single_controller_completes_a_group_that_infrastructure_broke(trainer: "Trainer") -> None:
    """NeMo RL's own code dispatches missing rows of a group again, and every row arrives once."""
    from tests.nemo_rl.trainer import counting_row, turn

    trouble = {"verify": 500, "times": 2, "name": "two of four"}
    group, redispatched = await trainer.group(counting_row(turn("Ten.", 10), turn("Done."), trouble=trouble), 4)
    assert [completion.reward for completion in group.completions] == [1.0] * 4
    assert 1 <= redispatched <= 8


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # the process has ended
        return b""
