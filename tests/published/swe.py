# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sets of issues of repositories."""

from __future__ import annotations

from tests.published.sets import Published
from tests.tasks.swe import records as swe


REBENCH = swe.swe_bench(
    repo="new/one",
    version="0.1",
    docker_image="swerebench/sweb.eval.x86_64.new_1776_one-1",
    image_name="x",
    FAIL_TO_PASS=["test_add"],
    PASS_TO_PASS=[],
    license_name="MIT",
    requirements="",
    environment="",
    meta={"has_issue": True},
    install_config={
        "python": "3.9",
        "install": "pip install -e .[dev]",
        "pre_install": None,
        "packages": "x",
        "test_cmd": "pytest --no-header -rA",
        "log_parser": "parse_log_pytest",
    },
)
OTHER = {"patch": swe.PATCH, "problem_statement": "It is wrong.", "repo": "a/b", "instance_id": "a__b-1"}
SWE = [
    Published("SWE-bench (Verified)", "swe-bench", [swe.swe_bench()], ["sympy__sympy-1"], suffix=".parquet"),
    Published("SWE-Gym", "swe-gym", [swe.swe_gym()], ["Project-MONAI__MONAI-1"]),
    Published("R2E-Gym", "r2e-gym", [swe.r2e_gym()], ["aiohttp__0123456789abcdef0123456789abcdef01234567"]),
    Published(
        "SWE-rebench",
        "swe-rebench",
        [REBENCH, REBENCH | {"instance_id": "new__one-2", "docker_image": None}],
        ["sympy__sympy-1"],
        1,
        suffix=".parquet",
    ),
    Published(
        "SWE-rebench-V2",
        "swe-rebench",
        [{name: value for name, value in REBENCH.items() if name != "docker_image"} | {"language": "go"}],
        says="SWE-rebench-V2 cannot be used",
    ),
    Published(
        "SWE-bench-extra",
        "swe-rebench",
        [{name: value for name, value in REBENCH.items() if name not in ("image_name", "docker_image")}],
        says="SWE-bench-extra cannot be used",
    ),
    Published(
        "SWE-smith",
        "swe-bench",
        [OTHER | {"FAIL_TO_PASS": ["x"], "PASS_TO_PASS": [], "image_name": "swesmith.x86_64.a", "created_at": "x"}],
        says="SWE-smith cannot be used",
    ),
    Published(
        "SWE-bench Pro",
        "swe-bench",
        [
            OTHER
            | {
                "base_commit": "0" * 40,
                "test_patch": "x",
                "fail_to_pass": "['x']",
                "pass_to_pass": "[]",
                "before_repo_set_cmd": "x",
                "selected_test_files_to_run": "[]",
                "dockerhub_tag": "x",
            }
        ],
        says="SWE-bench Pro cannot be used",
    ),
    Published(
        "SWE-bench-Live",
        "swe-bench",
        [
            OTHER
            | {
                "base_commit": "0" * 40,
                "test_patch": "x",
                "test_cmds": ["pytest -rA"],
                "log_parser": "pytest",
                "FAIL_TO_PASS": ["x"],
                "PASS_TO_PASS": [],
            }
        ],
        says="SWE-bench-Live cannot be used",
    ),
    Published(
        "SWE-bench in the editions before swebench 5",
        "swe-bench",
        [swe.swe_bench(eval_script=None, log_parser=None)],
        says="eval_script: missing: this edition does not say how its tests are run",
    ),
    Published(
        "SWE-bench Multimodal",
        "swe-bench",
        [swe.swe_bench(image_assets="{}")],
        says="SWE-bench Multimodal cannot be used",
    ),
    Published(
        "Multi-SWE-bench",
        "swe-bench",
        [{"org": "a", "repo": "b", "number": 1, "fix_patch": "x", "test_patch": "y", "f2p_tests": {}}],
        says="Multi-SWE-bench cannot be used",
    ),
]
