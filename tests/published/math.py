# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sets of mathematics."""

from __future__ import annotations

import json

from tests.published.sets import CHAT, NAN, SUM, Published, Q, verl


MATH = [
    Published(
        "NuminaMath-1.5",
        "math",
        [
            {
                "problem": Q,
                "solution": "...",
                "answer": answer,
                "problem_type": "Algebra",
                "question_type": kind,
                "problem_is_valid": valid,
                "solution_is_valid": "Yes",
                "source": "olympiads",
                "synthetic": False,
            }
            for answer, kind, valid in (
                ("5", "math-word-problem", "Yes"),
                ("proof", "proof", "Yes"),
                ("notfound", "math-word-problem", "Yes"),
                ("7", "math-word-problem", "Incomplete"),
                ("B", "MCQ", "Yes"),
            )
        ],
        ["5", "B"],
        3,
        "dropped 1: answer: 'proof' stands for no answer",
        ".parquet",
    ),
    Published(
        "NuminaMath-CoT",
        "math",
        [
            {"source": "cn_k12", "problem": Q, "solution": "We add. So $\\boxed{5}$.", "messages": CHAT},
            {"source": "olympiads", "problem": Q, "solution": "It follows at once.", "messages": CHAT},
        ],
        ["5"],
        1,
        "dropped 1: solution: is worked out",
    ),
    Published(
        "BeyondAIME",
        "math",
        [{"problem": f"{Q} ({at})", "answer": 10**29 + at} for at in range(2)],
        [str(10**29), str(10**29 + 1)],
        suffix=".json",
    ),
    Published(
        "GSM8K",
        "math",
        [
            {"question": Q, "answer": "Add <<2+3=5>>5.\n#### 5"},
            {"question": "How much?", "answer": "Much.\n#### 1,005"},
        ],
        ["5", "1005"],
    ),
    Published(
        "MATH",
        "math",
        [
            {
                "problem": Q,
                "level": "Level 1",
                "type": "Algebra",
                "solution": "As $2+3$, it is $\\boxed{\\frac{10}{2}}$.",
            }
        ],
        ["\\frac{10}{2}"],
    ),
    Published(
        "MATH-500",
        "math",
        [{"problem": Q, "solution": "x", "answer": "5", "subject": "Algebra", "level": 1, "unique_id": "test/1.json"}],
        ["5"],
    ),
    Published("DeepScaleR-Preview", "math", [{"problem": Q, "answer": "5", "solution": "x"}], ["5"], suffix=".json"),
    Published(
        "DAPO-Math-17k",
        "math",
        [verl("5", "MATH", extra_info={"index": str(index)}) for index in range(100)],
        ["5"],
        99,
        "dropped 99: makes the same row as an earlier one",
    ),
    Published(
        "DAPO-Math-17k-Processed",
        "math",
        [{**verl("34", "MATH"), "prompt": Q, "solution": "34", "source_prompt": CHAT}],
        ["34"],
        suffix=".parquet",
    ),
    Published(
        "Big-Math-RL-Verified",
        "math",
        [{"problem": Q, "answer": "5", "source": "orca_math", "domain": ["Algebra"], "llama8b_solve_rate": 0.5}],
        ["5"],
        suffix=".parquet",
    ),
    Published(
        "OpenR1-Math-220k",
        "math",
        [
            {
                "problem": Q,
                "solution": "x",
                "answer": answer,
                "problem_type": "Algebra",
                "question_type": "MCQ",
                "source": "amc",
                "uuid": "1",
                "is_reasoning_complete": [True],
                "generations": ["y"],
                "correctness_math_verify": [True],
                "problem_is_valid": "Yes",
                "solution_is_valid": "Yes",
            }
            for answer in ("5", "NaN", "nan", "None", "N/A")
        ],
        ["5"],
        4,
    ),
    Published(
        "OpenMathReasoning",
        "math",
        [
            {
                "expected_answer": answer,
                "problem_type": kind,
                "problem_source": "aops_c6",
                "generation_model": "x",
                "pass_rate_72b_tir": "n/a",
                "problem": Q,
                "generated_solution": "\\boxed{6}",
                "inference_mode": "cot",
            }
            for answer, kind in (("5", "has_answer_extracted"), (None, "no_answer_extracted"))
        ],
        ["5"],
        1,
        "dropped 1: expected_answer: is empty",
    ),
    Published(
        "OpenMathInstruct-2",
        "math",
        [{"problem": Q, "generated_solution": "x", "expected_answer": "5", "problem_source": "augmented_math"}],
        ["5"],
    ),
    Published(
        "DeepMath-103K",
        "math",
        [
            {
                "question": Q,
                "final_answer": "\\dfrac{1}{2}",
                "difficulty": 4.5,
                "topic": "Algebra",
                "r1_solution_1": "x",
            }
        ],
        ["\\dfrac{1}{2}"],
    ),
    Published(
        "Skywork-OR1-RL-Data (math)",
        "math",
        [verl('["5"]'), verl('["\\\\frac{1}{2}"]', prompt=[{"role": "user", "content": "Half?"}])],
        ["5", "\\frac{1}{2}"],
        suffix=".parquet",
    ),
    Published(
        "Eurus-2-RL-Data (math)",
        "math",
        [
            verl(
                "5",
                prompt=[
                    {"role": "user", "content": f"{Q}\n\nPresent the answer in LaTex format: \\boxed{{Your answer}}"}
                ],
            ),
            verl(json.dumps({"inputs": ["1"], "outputs": ["1"]}), "code"),
        ],
        ["5"],
        1,
        "dropped 1: ability: 'code' is a task for `prorl data code`",
    ),
    Published(
        "ORZ-57k",
        "math",
        [[{"from": "human", "value": Q}, {"from": "assistant", "ground_truth": {"value": "5"}}]],
        ["5"],
        suffix=".json",
    ),
    Published(
        "SYNTHETIC-1 (math)",
        "math",
        [
            {
                "problem_id": "vfm_1",
                "source": "numina",
                "task_type": "verifiable_math",
                "prompt": Q,
                "in_source_id": "1",
                "gold_standard_solution": "x",
                "verification_info": "{'ground_truth': '5'}",
                "metadata": "{}",
            },
            {
                "problem_id": "vfc_1",
                "source": "taco",
                "task_type": "verifiable_code",
                "prompt": SUM,
                "in_source_id": "2",
                "gold_standard_solution": "x",
                "verification_info": "{'test_cases': []}",
                "metadata": "{}",
            },
        ],
        ["5"],
        1,
    ),
    Published(
        "INTELLECT-2-RL-Dataset",
        "math",
        [
            {
                "problem_id": "1",
                "task_type": "verifiable_math",
                "prompt": Q,
                "solve_rate_qwen_r1_distill_7b": 0.5,
                "verification_info": json.dumps({"ground_truth": "5"}),
            },
            {
                "problem_id": "2",
                "task_type": "prime_rl_code",
                "prompt": SUM,
                "solve_rate_qwen_r1_distill_7b": 0.5,
                "verification_info": json.dumps({"test_cases": []}),
            },
        ],
        ["5"],
        1,
    ),
    Published("AIME (2024)", "math", [{"ID": "2024-I-1", "Problem": Q, "Solution": "x", "Answer": 5}], ["5"]),
    Published(
        "AMC (aimo-validation-amc)",
        "math",
        [{"id": 0, "problem": Q, "answer": 5.0, "url": "u"}, {"id": 1, "problem": "?", "answer": NAN, "url": "u"}],
        ["5.0"],
        1,
        "nan",
        ".parquet",
    ),
    Published(
        "OlympiadBench",
        "math",
        [
            {
                "id": 1,
                "question": Q,
                "solution": ["x"],
                "final_answer": ["5"],
                "is_multiple_answer": False,
                "unit": None,
                "answer_type": "Numerical",
                "error": None,
                "modality": "Text-only",
            },
            {
                "id": 2,
                "question": "Prove it.",
                "solution": ["x"],
                "final_answer": None,
                "is_multiple_answer": False,
                "unit": None,
                "answer_type": None,
                "error": None,
                "modality": "Text-only",
            },
            {
                "id": 3,
                "question": "See the figure.",
                "solution": ["x"],
                "final_answer": ["1"],
                "image_1": {"path": "1.png"},
            },
        ],
        ["5"],
        2,
        "dropped 1: image_1: the problem needs a picture",
    ),
    Published("Polaris-53K", "math", [{"problem": Q, "answer": "5", "difficulty": "3/8"}], ["5"]),
    Published(
        "Omni-MATH",
        "math",
        [{"domain": ["A"], "difficulty": 5.0, "problem": Q, "solution": "x", "answer": "5", "source": "imo"}],
        ["5"],
    ),
    Published(
        "Orca-Math",
        "math",
        [{"question": Q, "answer": "We add both. The sum is 5."}, {"question": "And?", "answer": "5"}],
        ["5"],
        1,
        "dropped 1: answer: is worked out",
    ),
    Published(
        "SVAMP",
        "math",
        [
            {
                "ID": "1",
                "Body": "Ann has 2 and 3.",
                "Question": "How many?",
                "Equation": "2+3",
                "Answer": "5",
                "Type": "x",
            }
        ],
        ["5"],
        says="row 1: Ann has 2 and 3. How many?",
    ),
    Published(
        "AceReason-Math",
        "math",
        [{"problem": Q, "answer": "5"}, {"problem": "Which?", "options": ["4", "5"], "answer": 1}],
        ["5"],
        1,
        "dropped 1: options: is a multiple choice",
    ),
    Published(
        "PRM800K",
        "math",
        [{"question": {"problem": Q}, "label": {"steps": []}, "is_quality_control_question": False}],
        says="PRM800K cannot be used",
    ),
    Published(
        "miniF2F",
        "math",
        [{"name": "x", "formal_statement": "theorem x", "informal_prefix": "y"}],
        says="formal theorems",
    ),
    Published(
        "OpenThoughts",
        "math",
        [{"system": "x", "conversations": [{"from": "user", "value": Q}]}],
        says="a set of chats",
    ),
    Published(
        "Nemotron post-training",
        "math",
        [{"uuid": "1", "messages": CHAT, "category": "math", "license": "x"}],
        says="a set of chats",
    ),
    Published("UltraFeedback", "math", [{"prompt": Q, "chosen": CHAT, "rejected": CHAT}], says="a set of preferences"),
]
