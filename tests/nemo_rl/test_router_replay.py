# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A mixture's experts, token by token, from the engine to what NeMo RL trains on."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest


if TYPE_CHECKING:
    from tests.nemo_rl.engine import Engine
    from tests.nemo_rl.trainer import Trainer

pytestmark = [pytest.mark.gym, pytest.mark.timeout(420)]


@pytest.fixture
def mixture(engine: "Engine") -> "Iterator[Engine]":
    engine.mixture = True
    try:
        yield engine
    finally:
        engine.mixture = False


def check(ids: list[int], experts: Any) -> None:
    """Those that the engine said; the last token was never read by it, so its are NeMo RL's to make up."""
    from tests.nemo_rl.engine import routes

    assert len(experts) == len(ids)
    assert experts[:-1].tolist() == routes(ids)[:-1].tolist()
    assert experts[-1].tolist() == [[0, 1]] * 3


def said(error: BaseException | None, seen: set[int]) -> str:
    """All that an error says, and what is behind it, of Ray's and in groups."""
    if error is None or id(error) in seen:
        return ""
    seen.add(id(error))
    inner = [*getattr(error, "exceptions", ()), getattr(error, "cause", None), error.__cause__]
    return str(error) + "".join(said(one, seen) for one in inner)


@pytest.mark.usefixtures("mixture")
def test_a_trainer_gets_the_experts_of_each_token(trainer: "Trainer", engine_url: str, tmp_path: Path) -> None:
    """Of several turns each, by NeMo RL's buffer, which refuses a group without them."""
    import torch

    from tests.nemo_rl.controller import STEPS, Lent, configuration, trained
    from tests.nemo_rl.test_single_controller import counting

    rows = [counting(10, 0, name=f" Prompt {number}.") for number in range(6)]
    config = configuration(
        rows,
        tmp_path,
        prorl={"agent": "counting_agent"},
        policy__router_replay={"enabled": True},
        loss_fn__force_on_policy_ratio=True,  # as the recipe of a mixture has it
    )
    got = trained(config, tmp_path, [engine_url], {"nemo_gym": Lent(trainer.actor)})
    assert got.result["train_steps"] == STEPS
    rollouts = 0
    for step in range(STEPS):
        for chunk in torch.load(tmp_path / f"step-{step}.pt", weights_only=False):
            assert chunk["routed_experts"].dtype == torch.int8
            for row, length in enumerate(chunk["input_lengths"].tolist()):
                ids = chunk["input_ids"][row, :length].tolist()
                assert bytes(ids).count(b" \xfe") == 2, "two turns"
                check(ids, chunk["routed_experts"][row, :length])
                rollouts += 1
    assert rollouts == STEPS * 8


def test_an_engine_that_tells_no_experts_ends_it_in_words(trainer: "Trainer", engine_url: str, tmp_path: Path) -> None:
    from tests.nemo_rl.controller import Lent, configuration, trained
    from tests.nemo_rl.test_single_controller import counting

    rows = [counting(10, 0, name=f" Prompt {number}.") for number in range(6)]
    config = configuration(rows, tmp_path, prorl={"agent": "counting_agent"}, policy__router_replay={"enabled": True})
    with pytest.raises(Exception, match=r"\S") as failed:
        trained(config, tmp_path, [engine_url], {"nemo_gym": Lent(trainer.actor)})
    assert "router_replay.enabled=true requires routed_experts" in said(failed.value, set())


def test_rows_have_them_as_NeMo_RL_reads_them(trainer: "Trainer", mixture: "Engine") -> None:
    """By the actor's own code, which takes each turn's from its whole prompt, and mends the seams."""
    import torch

    from tests.nemo_rl.trainer import solving_row

    batch = trainer.batch(*(solving_row() for _ in range(4))).final_batch
    for log in batch["message_log"]:
        assert [message["role"] for message in log] == ["user", "assistant"] * 3
        ids = torch.cat([message["token_ids"] for message in log]).tolist()
        check(ids, torch.cat([message["routed_experts"] for message in log]))


@pytest.mark.usefixtures("mixture")
def test_a_turn_that_another_engine_had_to_sample_has_that_ones(trainer: "Trainer", engine_url: str) -> None:
    """One that is gone is left; what the other says is what counts. And who is cut keeps those of its whole turns."""
    import torch

    from tests.nemo_rl.controller import swap_engines
    from tests.nemo_rl.trainer import counting_row, turn
    from tests.policy.engines import free_port

    model = trainer.server_urls()["policy_model"]
    swap_engines(model, [f"http://127.0.0.1:{free_port()}/v1", engine_url])
    try:
        rows = [
            counting_row(
                turn("One.", 1), turn(None, 2), turn("Late.", latency_s=600), rollout={"budgets": {"run": 5}}
            ),
            counting_row(turn("One.", 1), turn(None, 2), turn("Done.")),
        ]
        got = trainer.batch(*rows).final_batch
    finally:
        swap_engines(model, [engine_url])
    assert got["mask_sample"].tolist() == [True, False]
    for log, turns in zip(got["message_log"], (2, 3), strict=True):
        assert len(log) == 2 * turns
        ids = torch.cat([message["token_ids"] for message in log]).tolist()
        check(ids, torch.cat([message["routed_experts"] for message in log]))
