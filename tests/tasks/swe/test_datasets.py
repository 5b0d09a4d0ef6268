# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Test commands of converted records: own scripts, SWE-Gym's table, R2E-Gym's commits."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.tasks.swe.changes import Change, Solution
from nemo_gym_prorl.tasks.swe.datasets import CONVERTERS
from nemo_gym_prorl.tasks.swe.instance import SweLimits, SweRow
from nemo_gym_prorl.tasks.swe.task import SoftwareEngineering
from nemo_gym_prorl.tasks.task import SandboxNeeds
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits
from tests.tasks.swe import records


OWN_SCRIPT = """\
#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
export TZ=UTC
cd /testbed
git config --global --add safe.directory /testbed
git status
git show
git -c core.fileMode=false diff 0123456
cat > settings.txt <<EOF
git checkout of words
EOF
python -m pip install -e .
git checkout 0123456 lib/tests/test_sums.py
git apply -v - <<'EOF_114329324912'
diff --git a/lib/tests/test_sums.py b/lib/tests/test_sums.py
+make -j
EOF_114329324912
make build
: '>>>>> Start Test Output'
cd lib
pytest -rA one.py
: '>>>>> End Test Output'
git checkout 0123456 lib/tests/test_sums.py
"""


def test_script_of_a_record_is_converted() -> None:
    image = "registry.example/one:latest"
    own = {"image": image, "eval_script": OWN_SCRIPT, "log_parser": "parse_log_pytest", "eval_type": "fail_only"}
    read = SweRow.parse(CONVERTERS["swe-bench"](records.swe_bench(repo="new/one", **own), None))
    assert read.image == f"docker://{image}"
    assert (read.swe.test_command, read.swe.log_parser) == ("cd lib\npytest -rA one.py", "parse_log_pytest")
    assert (read.swe.eval_type, read.swe.tests_network, read.network) == ("fail_only", True, None)
    assert read.swe.before_tests.splitlines() == [
        "set -uxo pipefail",
        "source /opt/miniconda3/bin/activate",
        "export TZ=UTC",
        "cd /testbed",
        "git config --global --add safe.directory /testbed",
        *(":", ":", ":"),
        "cat > settings.txt <<EOF",
        "git checkout of words",
        "EOF",
        "python -m pip install -e .",
        *(":", ":"),
        "make build",
    ]


@pytest.mark.parametrize(
    ("repo", "version", "before", "command"),
    [
        ("pandas-dev/pandas", "1.5", "-ve . --no-build-isolation", "pytest -rA --tb=long lib"),
        ("conan-io/conan", "2.0", "PIP_CONSTRAINT", "pytest -n0 -rA lib"),
        ("python/mypy", "0.9", "pytest-xdist", "pytest -n0 -rA -k 'testA or testB'"),
        ("python/mypy", "1.7", "hash -r", "pytest -rA -k 'testA or testB'"),
    ],
)
def test_swe_gym_commands_are_in_the_row(repo: str, version: str, before: str, command: str) -> None:
    cases = {"test_patch": "diff --git a/x.test b/x.test\n+[case testA]\n+[case testB]\n"} if "mypy" in repo else {}
    read = SweRow.parse(CONVERTERS["swe-gym"](records.swe_gym(repo=repo, version=version, **cases), None))
    assert read.swe.before_tests.startswith("set -uxo pipefail\n")
    assert before in read.swe.before_tests
    assert read.swe.test_command.startswith(command)
    assert (read.swe.tests_network, read.network) == (False, None)


def test_r2e_gym_fix_applies(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/sums.py").write_text("def add(a, b):\n    return a - b\n")
    patch = CONVERTERS["r2e-gym"](records.r2e_gym(), None)["swe"]["patch"]
    assert patch.count("diff --git") == 1  # neither the test nor the list of changes
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch, text=True, check=True)
    assert (tmp_path / "lib/sums.py").read_text() == "def add(a, b):\n    return a + b\n"


async def test_only_tests_reach_the_network() -> None:
    asked: list[SandboxNeeds | None] = []

    def open_sandbox(needs: SandboxNeeds | None = None) -> Any:
        asked.append(needs)
        raise InfrastructureError("there is none")

    task = SoftwareEngineering(ToolLimits(), SweLimits())
    for before in ("python -m pip install .", "export LANG=C"):
        script = records.eval_script("pytest -rA", before)
        row = CONVERTERS["swe-bench"](records.swe_bench(eval_script=script), None)
        assert task.needs(row).network is None
        with pytest.raises(InfrastructureError):
            await task.grade(row, Solution((Change("a.py", None, False),)), {}, open_sandbox)
    assert [needs.network if needs else None for needs in asked] == ["host", None]
