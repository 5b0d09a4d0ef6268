# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A verdict that says that nobody is to train on the rollout is understood and told in both words for it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.rollout.rows import is_masked, masked, unmasked
from tests.handlers.peers import ROW, Environment, deployment


GYM = {"mask_sample": True}
NEMO_RL = {"instance_config": {"mask_sample": True, "image": "x"}}
ODD = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.dictionaries(st.sampled_from(["mask_sample", "image"]), st.booleans())
)


@given(st.dictionaries(st.sampled_from(["mask_sample", "instance_config", "reward"]), ODD))
def test_a_row_that_was_masked_is_masked_and_keeps_all_else(row: dict[str, Any]) -> None:
    once = masked(row)
    assert is_masked(once)
    assert once["mask_sample"] is True
    assert once["instance_config"]["mask_sample"] is True
    assert once.get("reward") == row.get("reward")
    if isinstance(row.get("instance_config"), dict):
        assert once["instance_config"].get("image") == row["instance_config"].get("image")
    bare = unmasked(once)
    assert not is_masked(bare)
    assert masked(bare) == once
    assert is_masked({"mask_sample": row.get("mask_sample")}) == bool(row.get("mask_sample"))


@pytest.mark.parametrize("said", [GYM, NEMO_RL, {}, {"mask_sample": False, "instance_config": None}])
async def test_both_who_read_a_mask_find_it(said: dict[str, Any]) -> None:
    environment = Environment()
    environment.instead["/verify"] = lambda: {**environment.bodies[-1], "reward": 0.5, **said}
    wanted = is_masked(said)
    async with deployment(environment) as at:
        _, job, _ = await at.post("/v1/rollouts", {"row": ROW, "id": "mine"})
        while job["state"] != "succeeded":
            job = await at.get("/v1/rollouts/mine?wait=10")
        for row in (await at.run(ROW), job["result"]):
            assert row["reward"] == 0.5
            assert bool(row.get("mask_sample")) == wanted
            assert bool((row.get("instance_config") or {}).get("mask_sample")) == wanted
        assert (job["reward"], job["masked"]) == (0.5, wanted)
        if said is NEMO_RL:
            assert job["result"]["instance_config"]["image"] == "x"
