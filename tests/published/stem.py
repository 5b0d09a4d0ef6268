# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sets of questions of science."""

from __future__ import annotations

from tests.published.sets import CHAT, Published


FOUR = ["Helium", "Iron", "Neon and argon", "Oxygen"]
STEM = [
    Published(
        "MMLU-Pro",
        "stem",
        [
            {
                "question_id": 1,
                "question": "Which?",
                "options": [*FOUR, *"efghij"],
                "answer": "I",
                "answer_index": 8,
                "cot_content": "",
                "category": "chemistry",
                "src": "x",
            }
        ],
        ["I"],
        suffix=".parquet",
    ),
    Published(
        "SuperGPQA",
        "stem",
        [
            {
                "uuid": "1",
                "question": "Which?",
                "options": FOUR,
                "answer": "Iron",
                "answer_letter": "B",
                "discipline": "Science",
                "field": "Chemistry",
                "subfield": "x",
                "difficulty": "easy",
                "is_calculation": False,
            }
        ],
        ["B"],
    ),
    Published(
        "GPQA",
        "stem",
        [
            {
                "Record ID": "1",
                "Question": "Which?\nOne only.",
                "Correct Answer": "Iron",
                "Incorrect Answer 1": "Helium",
                "Incorrect Answer 2": "Neon, argon",
                "Incorrect Answer 3": "Oxygen\n",
                "Explanation": "x",
                "Subdomain": "y",
            }
        ],
        ["Iron"],
        suffix=".csv",
    ),
    Published("MMLU", "stem", [{"question": "Which?", "subject": "x", "choices": FOUR, "answer": 1}], ["B"]),
    Published(
        "ARC",
        "stem",
        [
            {"id": "1", "question": "Which?", "choices": {"text": FOUR, "label": list("ABCD")}, "answerKey": "B"},
            {"id": "2", "question": "And?", "choices": {"text": FOUR, "label": list("1234")}, "answerKey": "2"},
        ],
        ["B", "B"],
        suffix=".parquet",
    ),
    Published(
        "OpenBookQA",
        "stem",
        [{"id": "1", "question_stem": "Which?", "choices": {"text": FOUR, "label": list("ABCD")}, "answerKey": "D"}],
        ["D"],
    ),
    Published(
        "CommonsenseQA",
        "stem",
        [
            {
                "id": "1",
                "question": "Which?",
                "question_concept": "x",
                "choices": {"label": list("ABCD"), "text": FOUR},
                "answerKey": key,
            }
            for key in ("D", "")
        ],
        ["D"],
        1,
    ),
    Published(
        "SciQ",
        "stem",
        [
            {
                "question": "Which?",
                "distractor1": "Helium",
                "distractor2": "Neon",
                "distractor3": "Argon",
                "correct_answer": "Iron",
                "support": "x",
            }
        ],
        ["Iron"],
    ),
    Published(
        "MedQA",
        "stem",
        [
            {
                "question": "Which?",
                "answer": "Iron",
                "options": dict(zip("ABCD", FOUR, strict=True)),
                "meta_info": "step1",
                "answer_idx": "B",
            }
        ],
        ["B"],
    ),
    Published(
        "MedMCQA",
        "stem",
        [
            {
                "id": "1",
                "question": "Which?",
                "opa": "a",
                "opb": "b",
                "opc": "c",
                "opd": "d",
                "cop": cop,
                "choice_type": "single",
                "exp": None,
            }
            for cop in (2, -1)
        ],
        ["C"],
        1,
    ),
    Published(
        "Nemotron-RL-knowledge-mcqa",
        "stem",
        [
            {
                "responses_create_params": {"input": CHAT},
                "options": [{"A": "4"}, {"B": "5"}],
                "expected_answer": answer,
                "grading_mode": "strict_single_letter_boxed",
                "uuid": "1",
            }
            for answer in ("B", "N/A")
        ],
        ["B"],
        1,
    ),
    Published(
        "SciBench",
        "stem",
        [
            {
                "problem_text": "How long?",
                "answer_latex": "5.0",
                "answer_number": "5.0",
                "unit": "m",
                "source": "x",
                "problemid": "1",
                "comment": "",
                "solution": "",
            }
        ],
        ["5.0 m"],
    ),
    Published(
        "WebInstruct-verified",
        "stem",
        [
            {
                "id": 1,
                "question": "Which?",
                "answer": "Iron",
                "answer_type": "String",
                "category": "Chemistry",
                "difficulty": "Primary",
            }
        ],
        ["Iron"],
    ),
    Published(
        "NaturalReasoning",
        "stem",
        [{"question": "Which?", "reference_answer": answer, "responses": []} for answer in ("Iron", "")],
        ["Iron"],
        0,
        "line 2: ",
        refused=1,
    ),
    Published(
        "TheoremQA",
        "stem",
        [
            {"Question": "How many?", "Answer": "5", "Answer_type": "integer", "Picture": picture}
            for picture in (None, {"bytes": "x"})
        ],
        ["5"],
        1,
    ),
    Published(
        "HLE",
        "stem",
        [
            {
                "id": "1",
                "question": "Which?\nAnswer Choices:\nA. iron\nB. neon",
                "image": image,
                "answer": "B",
                "answer_type": "multipleChoice",
            }
            for image in ("", "data:image/png;base64,x")
        ],
        ["B"],
        1,
    ),
    Published(
        "SCP-116K",
        "stem",
        [
            {"domain": "Physics", "problem": "How?", "matched_solution": solution}
            for solution in ("So \\boxed{5}", "Easy.\nAs shown above with ease.")
        ],
        ["5"],
        1,
    ),
    Published(
        "MMMLU",
        "stem",
        [{"Question": "Which gas?", "A": "O2", "B": "CO2", "C": "He", "D": "Ne", "Answer": "B", "Subject": "x"}],
        ["B"],
        says='options: [{"A":"O2"},{"B":"CO2"},{"C":"He"},{"D":"Ne"}]',
        suffix=".csv",
    ),
    Published(
        "Global-MMLU",
        "stem",
        [
            {
                "question": "Which?",
                "option_a": "iron",
                "option_b": "neon",
                "option_c": "a",
                "option_d": "b",
                "answer": "B",
            }
        ],
        ["B"],
        says='options: [{"A":"iron"},{"B":"neon"},',
    ),
    Published(
        "MMLU-Redux",
        "stem",
        [
            {
                "question": "Which?",
                "choices": ["iron", "neon"],
                "answer": 1,
                "error_type": flaw,
                "source": None,
                "correct_answer": correct,
            }
            for flaw, correct in (("ok", None), ("wrong_groundtruth", "0"), ("no_correct_answer", None))
        ],
        ["B"],
        2,
        "dropped 1: error_type: the set says 'wrong_groundtruth'",
    ),
    Published(
        "RACE",
        "stem",
        [{"article": "Tom is red.", "question": "Who?", "options": ["Ann", "Tom"], "answer": "B", "example_id": "1"}],
        ["B"],
        says="Tom is red.",
    ),
    Published(
        "ScienceQA",
        "stem",
        [
            {"image": image, "question": "Who?", "choices": ["Ann", "Tom"], "answer": 1, "hint": "Tom is red."}
            for image in (None, {"bytes": "x"})
        ],
        ["B"],
        1,
        "Tom is red.",
    ),
    Published(
        "IFEval",
        "stem",
        [{"key": 1, "prompt": "Write.", "instruction_id_list": ["x"], "kwargs": [{}]}],
        says="IFEval cannot be used",
    ),
]
