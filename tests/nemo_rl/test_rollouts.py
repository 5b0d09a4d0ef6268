# SPDX-License-Identifier: Apache-2.0
"""What NeMo RL's own code makes of the rollouts: tokens, log-probabilities, rewards."""

from typing import TYPE_CHECKING

import pytest


if TYPE_CHECKING:
    from tests.nemo_rl.engine import Engine
    from tests.nemo_rl.trainer import Trainer

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
