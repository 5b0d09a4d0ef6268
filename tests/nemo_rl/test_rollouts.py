# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What NeMo RL's own code makes of the rollouts: tokens, log-probabilities, rewards."""

from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest

from tests.tasks import containers


if TYPE_CHECKING:
    from tests.nemo_rl.engine import Engine
    from tests.nemo_rl.trainer import Trainer

EXAMPLES = Path(__file__).parents[2] / "resources_servers/prorl_code/data/example.jsonl"

pytestmark = [pytest.mark.gym, pytest.mark.timeout(420)]


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
