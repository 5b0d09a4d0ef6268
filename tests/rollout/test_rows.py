# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""JSON at the border: what is taken can be written again, and everything else says where it is wrong."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.rows import MAX_DEPTH, check_row, read_json


TEXT = st.text(st.characters(codec=None, categories=None))  # surrogates too
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def refusal(body: bytes) -> CallerError | None:
    """Why a body is not taken; checks that what is taken can be written."""
    try:
        taken = read_json(body)
    except CallerError as error:
        return error
    assert orjson.loads(orjson.dumps(taken)) == taken == json.loads(body)
    return None


@given(JSON)
def test_what_is_taken_is_what_was_sent_and_what_is_refused_cannot_be_written(value: Any) -> None:
    body = json.dumps(value).encode()
    refused = refusal(body)
    if refused is None:
        return
    assert refused.field
    refused.reason.encode()  # the complaint itself can be written
    try:
        written = orjson.loads(orjson.dumps(json.loads(body)))
    except TypeError:
        return
    assert written != json.loads(body), "NaN comes out as null"


@given(st.binary(max_size=50))
def test_bytes_that_are_no_json_are_refused_and_nothing_else_happens(body: bytes) -> None:
    refused = refusal(body)
    assert refused is None or refused.http_status == 422


@pytest.mark.parametrize("levels", [MAX_DEPTH, MAX_DEPTH + 1, 3_000, 100_000])
def test_the_depth_is_bounded(levels: int) -> None:
    body = b"[" * levels + b"]" * levels
    if levels <= MAX_DEPTH:
        assert orjson.dumps(read_json(body)) == body
    else:
        with pytest.raises(CallerError, match=f"deeper than {MAX_DEPTH}"):
            read_json(body)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (5, "body"),
        ({}, "responses_create_params"),
        ({"responses_create_params": {}}, "responses_create_params.input"),
        ({"responses_create_params": {"input": [5]}}, "responses_create_params.input"),
    ],
)
def test_what_is_no_row_says_which_field(row: Any, field: str) -> None:
    with pytest.raises(CallerError) as refused:
        check_row(row)
    assert str(refused.value.field).startswith(field)
    assert refused.value.complaint


def test_a_row_is_taken_with_whatever_else_it_has() -> None:
    check_row({"responses_create_params": {"input": "hi", "temperature": 1}, "task": {"deep": [1]}})
