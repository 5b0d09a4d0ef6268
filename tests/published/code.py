# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sets of programming problems."""

from __future__ import annotations

import json

from nemo_gym_prorl.tasks.code.rows import problems
from tests.published.sets import CALL, CHAT, STDIN, SUM, Published, packed, verl


HUMAN = problems()["HumanEval/0"]
HUMAN_EVAL = {
    "task_id": HUMAN.task_id,
    "prompt": HUMAN.prompt,
    "entry_point": HUMAN.entry_point,
    "canonical_solution": HUMAN.reference,
    "test": "def check(candidate):\n    assert candidate([1.0, 2.0], 0.5) == False\n",
}
LIVE = {
    "question_title": "Sum",
    "question_content": SUM,
    "platform": "atcoder",
    "question_id": "1",
    "contest_id": "1",
    "contest_date": "2025-01-01",
    "starter_code": "",
    "difficulty": "easy",
    "metadata": "{}",
    "public_test_cases": json.dumps([STDIN | {"testtype": "stdin"}]),
    "private_test_cases": packed([STDIN | {"testtype": "stdin"}] * 2),
}
FORCES = {
    "id": "1/A",
    "contest_id": "1",
    "index": "A",
    "title": "Sum",
    "description": SUM,
    "time_limit": 2.0,
    "memory_limit": 256.0,
    "input_format": "Two.",
    "output_format": "One.",
    "interaction_format": None,
    "note": None,
    "examples": [STDIN],
    "official_tests": [STDIN],
    "official_tests_complete": True,
    "input_mode": "stdio",
    "generated_checker": None,
    "executable": True,
    "generated_tests": 0,
}
LEET = {
    "task_id": "sum",
    "question_id": 1,
    "difficulty": "Easy",
    "problem_description": SUM,
    "prompt": "import math",
    "starter_code": "class Solution:\n    def add(self, a: int, b: int) -> int:\n",
    "entry_point": "Solution().add",
    "test": "def check(candidate):\n    assert candidate(a=2, b=3) == 5\n    assert candidate(a=0, b=-1) == -1\n",
    "input_output": [{"input": "a = 2, b = 3", "output": "5"}],
}
KOD = {
    "style": "instruct",
    "subset": "Prefill",
    "question_id": "1",
    "question": SUM,
    "solution": "x",
    "test": "from solution import add\n\ndef test_add():\n    assert add(2, 3) == 5\n    assert [1] == add([1], [])\n",
    "test_info": [{"function_name": "add"}],
}
PRIME = {
    "problem_id": "vcp_1",
    "source": "apps",
    "task_type": "verifiable_code",
    "prompt": SUM,
    "in_source_id": "1",
    "gold_standard_solution": "x",
    "metadata": "{}",
    "verification_info": {"language": "python", "test_cases": [STDIN | {"type": "stdin_stdout", "fn_name": None}]},
}
CODE = [
    Published(
        "LiveCodeBench (v6)",
        "code",
        [
            LIVE,
            LIVE
            | {
                "metadata": '{"func_name": "add"}',
                "starter_code": "class Solution:\n    def add(self, a, b):",
                "public_test_cases": json.dumps([CALL | {"testtype": "functional"}]),
                "private_test_cases": packed([CALL | {"testtype": "functional"}]),
            },
        ],
        [3, 2],
    ),
    Published(
        "open-r1/codeforces",
        "code",
        [
            FORCES,
            FORCES | {"interaction_format": "Ask."},
            FORCES | {"input_mode": "file"},
            FORCES | {"generated_checker": "import sys"},
            FORCES | {"official_tests_complete": False},
            FORCES | {"official_tests": []},
        ],
        [1],
        5,
        "dropped 2: official_tests: the record lacks tests",
    ),
    Published(
        "KodCode-V1",
        "code",
        [
            KOD,
            KOD | {"test": "import pytest\ndef test():\n    with pytest.raises(ValueError):\n        f(1)\n"},
        ],
        [2],
        1,
        suffix=".parquet",
    ),
    Published(
        "DeepCoder (primeintellect)",
        "code",
        [{"problem": SUM, "solutions": ["x"], "tests": json.dumps([STDIN | {"type": "stdin_stdout"}])}],
        [1],
    ),
    Published(
        "DeepCoder (taco)",
        "code",
        [{"problem": SUM, "solutions": ["x"], "tests": json.dumps({"inputs": ["2 3"], "outputs": ["5"]})}],
        [1],
    ),
    Published(
        "DeepCoder (lcbv5)",
        "code",
        [
            {
                "problem": SUM,
                "starter_code": "",
                "metadata": {},
                "tests": json.dumps([CALL | {"testtype": "functional", "metadata": {"func_name": "add"}}]),
            }
        ],
        [1],
    ),
    Published(
        "verifiable-coding-problems",
        "code",
        [PRIME, PRIME | {"verification_info": {"language": "rust", "test_cases": [STDIN]}}],
        [1],
        1,
    ),
    Published(
        "SYNTHETIC-1 (code)",
        "code",
        [
            PRIME | {"verification_info": repr(PRIME["verification_info"])},
            PRIME | {"verification_info": "{'ground_truth': '5'}"},
        ],
        [1],
        1,
    ),
    Published("HumanEval", "code", [HUMAN_EVAL], [7], suffix=".jsonl.gz"),
    Published(
        "HumanEval+",
        "code",
        [
            HUMAN_EVAL
            | {"test": "def check(candidate):\n    for i in inputs:\n        assertion(candidate(*i), 0, 0)\n"}
        ],
        says="HumanEval+ cannot be used",
    ),
    Published(
        "MBPP",
        "code",
        [
            {
                "task_id": 1,
                "text": SUM,
                "code": "x",
                "test_list": ["assert add(2, 3) == 5", "assert add(0, 0) == 0"],
                "test_setup_code": "",
                "challenge_test_list": [],
            },
            {"task_id": 2, "text": SUM, "code": "x", "test_list": ["assert add((2,), (3,)) == 5"]},
        ],
        [2],
        1,
    ),
    Published(
        "AceCode-87K",
        "code",
        [
            {
                "id": "1",
                "source": "oss",
                "question": SUM,
                "test_cases": ["assert add(2, 3) == 5"],
                "inferences": [],
                "context_messages": [],
            }
        ],
        [1],
        suffix=".parquet",
    ),
    Published("LeetCodeDataset", "code", [LEET], [2]),
    Published(
        "Skywork-OR1-RL-Data (code)",
        "code",
        [
            verl(json.dumps({"inputs": ["2 3"], "outputs": ["5"]}), "code"),
            verl(json.dumps({"test_code": "def check(x): ...", "entry_point": "add"}), "code"),
        ],
        [1],
        1,
    ),
    Published(
        "Code-R1",
        "code",
        [
            verl(json.dumps({"inputs": ["2 3"], "outputs": ["5"]}), "coding"),
            verl(json.dumps({"functional": "def check(x): ..."}), "coding"),
        ],
        [1],
        1,
    ),
    Published(
        "Eurus-2-RL-Data (code)",
        "code",
        [verl(json.dumps({"inputs": ["2 3"], "outputs": ["5"]}), "code"), verl("5")],
        [1],
        1,
    ),
    Published(
        "TACO",
        "code",
        [
            {
                "question": SUM,
                "input_output": json.dumps({"inputs": ["2 3"], "outputs": ["5"]}),
                "source": "codechef",
                "starter_code": "",
            }
        ],
        [1],
    ),
    Published(
        "APPS",
        "code",
        [
            {
                "problem_id": 1,
                "question": SUM,
                "solutions": "",
                "input_output": tests,
                "difficulty": "interview",
                "url": "u",
                "starter_code": "",
            }
            for tests in (json.dumps({"inputs": [[2**70, 1]], "outputs": [2**70 + 1], "fn_name": "add"}), "")
        ],
        [1],
        1,
    ),
    Published(
        "CodeContests",
        "code",
        [
            {
                "name": "1_A",
                "input_file": file,
                "description": SUM,
                "public_tests": {"input": ["2 3"], "output": ["5"]},
                "private_tests": {"input": [], "output": []},
                "generated_tests": {"input": [], "output": []},
                "time_limit": {"seconds": 2, "nanos": 0},
                "memory_limit_bytes": 256 << 20,
            }
            for file in ("", "input.txt")
        ],
        [1],
        1,
        "dropped 1: input_file: the program is to read and write files",
    ),
    Published(
        "Nemotron-RL-coding (competitive_coding)",
        "code",
        [
            {
                "responses_create_params": {"input": CHAT},
                "verifier_metadata": {"unit_tests": {"inputs": ["2 3"], "outputs": ["5"], "fn_name": None}},
                "hash_id": "1",
            }
        ],
        [1],
    ),
    Published(
        "BigCodeBench",
        "code",
        [
            {
                "task_id": "BigCodeBench/0",
                "complete_prompt": "x",
                "instruct_prompt": SUM,
                "canonical_solution": "x",
                "test": "import unittest",
                "entry_point": "task_func",
                "libs": "['random']",
            }
        ],
        says="BigCodeBench cannot be used",
    ),
    Published(
        "DS-1000",
        "code",
        [{"prompt": SUM, "reference_code": "x", "metadata": {}, "code_context": "y"}],
        says="DS-1000 cannot be used",
    ),
    Published(
        "MultiPL-E",
        "code",
        [
            {
                "name": "x",
                "language": "rs",
                "prompt": "fn",
                "doctests": "transform",
                "original": "x",
                "tests": "y",
                "stop_tokens": ["\n}"],
            }
        ],
        says="MultiPL-E cannot be used",
    ),
    Published(
        "OpenCodeReasoning",
        "code",
        [
            {
                "id": "1",
                "input": SUM,
                "output": "x",
                "source": "apps",
                "license": "mit",
                "dataset": "apps",
                "split": "train",
                "difficulty": "x",
                "solution": "y",
            }
        ],
        says="OpenCodeReasoning cannot be used",
    ),
]
