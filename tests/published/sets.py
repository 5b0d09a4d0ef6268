# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a published set is in the tables of this folder. Records have the field names of the sets' cards and invented
contents."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from dataclasses import dataclass, field
from typing import Any


NAN = float("nan")
Q = "What is $2 + 3$?"
CHAT = [{"role": "user", "content": Q}]
STDIN = {"input": "2 3\n", "output": "5\n"}
CALL = {"input": "2\n3", "output": "5"}
SUM = "Add the numbers."


def packed(cases: list[dict[str, Any]]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def verl(truth: Any, ability: str = "math", **more: Any) -> dict[str, Any]:
    rule = {"style": "rule", "ground_truth": truth}
    return {
        "data_source": "x",
        "prompt": CHAT,
        "ability": ability,
        "reward_model": rule,
        "extra_info": {"index": 1},
    } | more


@dataclass(frozen=True)
class Published:
    """A set, some of its records, and what is to become of them.

    Attributes:
        name: of the set.
        family: the command.
        records: in the order of the file.
        kept: expected answers, letters, numbers of tests or instances of the rows.
        dropped: how many records the set publishes that cannot be graded.
        says: what is printed.
        suffix: of the file.
        refused: how many records are malformed.
    """

    name: str
    family: str
    records: list[Any]
    kept: list[Any] = field(default_factory=list)
    dropped: int = 0
    says: str = ""
    suffix: str = ".jsonl"
    refused: int = 0
