# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What NeMo RL makes of a row that failed: that which the failure's class deserves.

INFRA is dispatched again, DATA is given up after a second try, and what arrives is trained on unless it is masked. So
infrastructure has to be INFRA, a wrong row DATA, and what the policy did a masked row as long as it did anything.
"""

from typing import TYPE_CHECKING, Any

import pytest


if TYPE_CHECKING:
    from tests.nemo_rl.trainer import Trainer

pytestmark = [pytest.mark.gym, pytest.mark.timeout(420)]


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


def test_a_policy_that_sampled_nothing_in_time_is_tried_again(trainer: "Trainer") -> None:
    from tests.nemo_rl.trainer import counting_row, turn

    assert_error(trainer, counting_row(turn("Well …", latency_s=60)), "GymTransportError", "HTTP 503")


def test_refused_sampling_costs_one_row_and_not_the_engine(trainer: "Trainer") -> None:
    """NeMo RL's engine answers 500 to sampling parameters that it does not train with, and has no ``/health``."""
    from tests.nemo_rl.trainer import counting_row, solving_row, turn

    refused = counting_row(turn("Done."))
    refused["responses_create_params"]["metadata"]["extra_body"] = '{"top_k": 5}'
    got = trainer.run(refused)
    assert got.results == {}
    assert got.error is not None
    got = trainer.run(*(solving_row() for _ in range(4)))
    assert got.error is None
    assert len(got.results) == 4


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


async def test_single_controller_does_not_repeat_a_wrong_row(trainer: "Trainer") -> None:
    from tests.nemo_rl.trainer import counting_row, turn

    with pytest.raises(Exception, match="HTTP 422") as failed:
        await trainer.group(counting_row(turn("Done."), trouble={"verify": 422}), 4)
    assert type(failed.value).__name__ == "RayTaskError(RolloutDataFailure)"
    assert trainer.redispatched == 0


def assert_error(trainer: "Trainer", row: dict[str, Any], failure: str, about: str) -> None:
    """The row ends its stream with a failure of NeMo RL's taxonomy, classified as it should be."""
    got = trainer.run(row)
    assert got.results == {}
    assert type(got.error).__name__ == f"RayTaskError({failure})", got.error
    assert about in str(got.error)
    assert got.verdict is not None
    assert got.verdict.value == ("infra" if failure == "GymTransportError" else "data")
