# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Verdicts of the table of kept log-probs, on made-up samples and on a real engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.policy.engines import vllm_python
from tests.policy.log_prob_table import Engine, Result, Sample, compute_truth, judge, measure, table
from tests.policy.sampling_ways import NEUTRAL, Way


def _sample(sampling: dict[str, Any], kept: list[float], sent: dict[str, Any] | None = None) -> Sample:
    return Sample(Way("any", sampling), (1, 2), [3, 4], kept, sampling if sent is None else sent)


TRUTH = [{"log_probs": [-1.0, -2.0], "raw": [-1.5, -2.0]}]
ROWS: dict[str, tuple[list[Sample], str]] = {
    "equal": ([_sample({}, [-1.0, -2.0])], "0.0e+00"),
    "within the tolerance": ([_sample({}, [-1.0, -2.00005])], "5.0e-05"),
    "one token differs": ([_sample({}, [-1.0, -2.5])], "FALSE 0.50"),
    "beyond the tolerance": ([_sample({}, [-1.0, -2.001])], "FALSE 1.0e-03"),
    "rounding at a low temperature": (
        [_sample({"temperature": 0.01}, [-1, -2.001])],
        "1.0e-03",
    ),
    "greedy is exact": ([_sample({"temperature": 0.0}, [-1, -2.001])], "FALSE 1.0e-03"),
    "not a number": ([_sample({}, [float("nan"), -2.0])], "FALSE inf"),
    "not sent": ([_sample({"top_k": 5}, [-1.0, -2.0], {})], "FALSE 0.0e+00, not sent: top_k"),
    "sent otherwise": ([_sample({"top_k": 5}, [-1.0, -2.0], {"top_k": 6})], "FALSE 0.0e+00, not sent: top_k"),
    "nothing sampled": ([], "FALSE 0.0e+00"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_judged(name: str) -> None:
    samples, shown = ROWS[name]
    result = judge(samples, TRUTH[: len(samples)])
    assert result.shown == shown
    assert result.is_false == shown.startswith("FALSE")


def test_a_refusal_is_not_false() -> None:
    refused = Result(refused="temperature")
    assert (refused.shown, refused.is_false) == ("refused: temperature", False)
    assert table({"raw": {"any": refused}}).splitlines()[1].split() == ["any", "refused:", "temperature", "-"]


async def test_a_real_engine_is_measured(engine_url: str, model_folder: Path) -> None:
    """The row without settings is true in any log-prob mode, and false once a log-prob is changed."""
    engine = Engine(engine_url, model_folder)
    played = await engine.play(lambda way: way is NEUTRAL)
    samples = played[NEUTRAL]
    assert isinstance(samples, list)
    truths = compute_truth(str(vllm_python()), model_folder, samples)
    assert judge(samples, truths).shown[0].isdigit()
    wrong = replace(samples[-1], kept=[*samples[-1].kept[:-1], samples[-1].kept[-1] - 0.01])
    assert judge([*samples[:-1], wrong], truths).is_false


@pytest.mark.long("four engines, each with thirty ways to sample")
def test_no_way_to_sample_is_false(tmp_path: Path) -> None:
    columns = dict(measure(tmp_path))
    print(table(columns))
    false = [(mode, name) for mode, results in columns.items() for name, each in results.items() if each.is_false]
    assert not false
