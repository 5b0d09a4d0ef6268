# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Submission to Slurm with a stand-in for ``sbatch`` that records its call."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from nemo_gym_prorl import nemo_rl


SCRIPT = Path(nemo_rl.__file__).parent / "slurm.sh"
SBATCH = """#!/bin/bash
printf '%s\\n' "$@" > "$CALLS/arguments"
for name in COMMAND SETUP_COMMAND CONTAINER MOUNTS BASE_LOG_DIR GPUS_PER_NODE PWD; do
    printf '%s' "${!name}" > "$CALLS/$name"
done
"""
UV = """#!/bin/bash
printf '%s\\n' "$PWD" "$@" > "$CALLS/uv"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    root = tmp_path / "the checkout"
    (root / "3rdparty/Gym-workspace/Gym").mkdir(parents=True)
    (root / "3rdparty/Gym-workspace/Gym/pyproject.toml").touch()
    (root / "ray.sub").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "work").mkdir()
    for name, text in (("sbatch", SBATCH), ("uv", UV)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(tmp_path),
        "NRL_ROOT": str(root),
        "CONTAINER": "nemo-rl.sqsh",
        "SLURM_ACCOUNT": "us",
        "SLURM_PARTITION": "gpus",
    }


def submit(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    folder = Path(environment["CALLS"], "work")
    return subprocess.run(
        [SCRIPT, *arguments], env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=30
    )


def test_a_job_is_submitted_from_the_checkout(environment: dict[str, str]) -> None:
    calls = Path(environment["CALLS"])
    done = submit(environment | {"NODES": "6"}, "dapo-swe-qwen3-8b", "++data.train.data_path=it's rows.jsonl")
    assert done.returncode == 0, done.stderr
    arguments = (calls / "arguments").read_text().splitlines()
    assert {"--nodes=6", "--gres=gpu:8", "--job-name=dapo-swe-qwen3-8b", "--account=us"} <= set(arguments)
    assert arguments[-1] == "ray.sub"
    assert (calls / "PWD").read_text() == environment["NRL_ROOT"]
    assert environment["NRL_ROOT"] in (calls / "MOUNTS").read_text()
    # The text that ray.sub runs trains in the folder of the caller, with each argument as it was given.
    subprocess.run(["bash", "-c", (calls / "COMMAND").read_text()], env=environment, check=True, timeout=30)
    folder, *started = (calls / "uv").read_text().splitlines()
    assert folder == str(calls / "work")
    assert shlex.join(started) == shlex.join(
        [
            *("run", "--no-sync", "--project", environment["NRL_ROOT"]),
            *("python", "-m", "nemo_gym_prorl.nemo_rl.train"),
            *("--config", "dapo-swe-qwen3-8b", "++data.train.data_path=it's rows.jsonl"),
            *("++cluster.num_nodes=6", "++cluster.gpus_per_node=8"),
        ]
    )
    container = environment | {"UV_PROJECT_ENVIRONMENT": "/opt/venv"}
    subprocess.run(["bash", "-c", (calls / "SETUP_COMMAND").read_text()], env=container, check=True, timeout=30)
    folder, *started = (calls / "uv").read_text().splitlines()
    assert folder == environment["NRL_ROOT"]
    package = f"{SCRIPT.parents[2]}[math,stem,swe]"
    assert started == ["pip", "install", "--python", "/opt/venv", "-e", "3rdparty/Gym-workspace/Gym", package]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"NRL_ROOT": None}, "NRL_ROOT is not set"),
        ({"PRORL_PACKAGE": "/there/is/none"}, "PRORL_PACKAGE: /there/is/none"),
        ({"RECIPE": None}, "CONTAINER"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_what_is_missing_is_named(environment: dict[str, str], change: dict[str, str | None], says: str) -> None:
    told = {**environment, "RECIPE": "dapo-swe-qwen3-8b", **change}
    arguments = [told[name] for name in ("RECIPE",) if told[name]]
    refused = submit({name: value for name, value in told.items() if value is not None}, *arguments)
    assert refused.returncode == 2
    assert says in refused.stderr
    assert not Path(environment["CALLS"], "arguments").exists()
