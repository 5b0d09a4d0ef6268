# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl data swe``: records of the three datasets become rows, or are refused by the name of what is wrong."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow.parquet import write_table
from typer.testing import CliRunner

from nemo_gym_prorl.cli_data import app
from nemo_gym_prorl.commands.images import wanted_images
from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.tasks.swe import test_commands
from nemo_gym_prorl.tasks.swe.changes import Change, Solution
from nemo_gym_prorl.tasks.swe.datasets import CONVERTERS
from nemo_gym_prorl.tasks.swe.grading import GradingLimits
from nemo_gym_prorl.tasks.swe.instance import row_of
from nemo_gym_prorl.tasks.swe.repository import PatchLimits
from nemo_gym_prorl.tasks.swe.task import SoftwareEngineering
from nemo_gym_prorl.tasks.task import SandboxNeeds
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits
from tests.tasks.swe import records


RECORDS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "swe-bench": records.swe_bench,
    "swe-gym": records.swe_gym,
    "r2e-gym": records.r2e_gym,
}


@pytest.mark.parametrize(
    ("dataset", "instance", "image", "command", "parser"),
    [
        (
            "swe-bench",
            "sympy__sympy-1",
            "docker://docker.io/swebench/sweb.eval.x86_64.sympy_1776_sympy-1:latest",
            records.SYMPY,
            "parse_log_sympy",
        ),
        (
            "swe-gym",
            "Project-MONAI__MONAI-1",
            "docker://docker.io/xingyaoww/sweb.eval.x86_64.project-monai_s_monai-1:latest",
            "pytest -rA lib/tests/test_sums.py",
            "parse_log_pytest",
        ),
        (
            "r2e-gym",
            "aiohttp__0123456789abcdef0123456789abcdef01234567",
            "docker://docker.io/namanjain12/aiohttp_final:0123456789abcdef0123456789abcdef01234567",
            "bash run_tests.sh",
            "r2e_gym",
        ),
    ],
)
def test_records_become_rows(dataset: str, instance: str, image: str, command: str, parser: str) -> None:
    row = CONVERTERS[dataset](RECORDS[dataset](), None)
    read = row_of(row)
    assert (read.instance_id, read.image, row["data_source"]) == (instance, image, dataset)
    assert (read.swe.test_command, read.swe.log_parser) == (command, parser)
    assert row["responses_create_params"]["input"][-1]["content"] == "Sums are differences."
    assert "return a + b" in read.swe.patch
    if dataset == "r2e-gym":
        assert read.swe.expected_output == {"": "PASSED", "test_add": "PASSED", "TestAll.test_zero": "FAILED"}
        assert read.swe.test_timeout_s == 300
    else:
        assert "def test_add" in read.swe.test_patch
        assert all("test_" in test for test in read.swe.FAIL_TO_PASS + read.swe.PASS_TO_PASS)


@pytest.mark.parametrize(
    ("dataset", "image"),
    [
        ("swe-bench", "docker://registry.example/us/sweb.eval.x86_64.sympy_1776_sympy-1:latest"),
        ("swe-gym", "docker://registry.example/us/sweb.eval.x86_64.project-monai_s_monai-1:latest"),
        ("r2e-gym", "docker://registry.example/us/aiohttp_final:0123456789abcdef0123456789abcdef01234567"),
    ],
)
def test_images_may_lie_elsewhere(dataset: str, image: str) -> None:
    assert CONVERTERS[dataset](RECORDS[dataset](), "registry.example/us")["image"] == image


FAULTS = [
    *[("swe-bench", name, ...) for name in ("instance_id", "repo", "version", "base_commit", "problem_statement")],
    *[("swe-gym", name, ...) for name in ("patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS")],
    ("swe-bench", "eval_script", ...),
    ("swe-bench", "eval_script", "pytest"),
    ("swe-bench", "repo", 7),
    ("swe-bench", "base_commit", "master"),
    ("swe-bench", "instance_id", "../../etc/passwd"),
    ("swe-bench", "FAIL_TO_PASS", "test_add"),
    ("swe-bench", "FAIL_TO_PASS", "[]"),
    ("swe-bench", "PASS_TO_PASS", '["test_add"]'),
    ("swe-gym", "test_patch", records.PATCH.replace("sums.py", "sums.txt")),
    ("swe-gym", "FAIL_TO_PASS", [7]),
    ("swe-gym", "repo", "nobody/nothing"),
    *[("r2e-gym", name, ...) for name in ("repo_name", "docker_image", "commit_hash", "problem_statement")],
    ("r2e-gym", "docker_image", "an image; rm -rf /"),
    ("r2e-gym", "parsed_commit_content", "{"),
    ("r2e-gym", "parsed_commit_content", "{}"),
    ("r2e-gym", "expected_output_json", "{}"),
    ("r2e-gym", "expected_output_json", '{"test_add": "MAYBE"}'),
]


@pytest.mark.parametrize(
    ("dataset", "name", "value"),
    FAULTS,
    ids=[
        f"{number}-{dataset}-{name}{'-missing' if value is ... else ''}"
        for number, (dataset, name, value) in enumerate(FAULTS)
    ],
)
def test_what_is_wrong_with_a_record_is_named(dataset: str, name: str, value: Any) -> None:
    record = RECORDS[dataset](**{name: value})
    if value is ...:
        del record[name]
    with pytest.raises(CallerError) as caught:
        CONVERTERS[dataset](record, None)
    assert (caught.value.field or "").split(".")[0] == name


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


def test_a_records_own_script_says_how_it_is_tested() -> None:
    image = "registry.example/one:latest"
    own = {"image": image, "eval_script": OWN_SCRIPT, "log_parser": "parse_log_pytest", "eval_type": "fail_only"}
    read = row_of(CONVERTERS["swe-bench"](records.swe_bench(repo="new/one", **own), None))
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


ODD_SCRIPT = """\
if true; then
  git checkout 0123456 lib/tests/test_sums.py
fi
lay() {
  git status
}
bits=$((1 << 3))
cat <<< "word" > /dev/null
git apply -v - <<'EOF_1'
+++ b/lib/tests/test_sums.py
EOF_1
git checkout 0123456 \\
  lib/tests/test_sums.py
git apply - <<< "$patch"
cat <<-'END-OF'
\tgit diff of words
\tEND-OF
cat <<EOF
 EOF
git status of words
EOF
cat <<\\EOF
git show $of words
EOF
: '>>>>> Start Test Output'
pytest
: '>>>>> End Test Output'
"""


def test_only_gits_part_is_left_out_of_an_odd_script() -> None:
    before = test_commands.of_script(ODD_SCRIPT, "parse_log_pytest").before
    git = "git() { echo called; }"
    done = subprocess.run(["bash", "-c", f"{git}\n{before}\nlay"], capture_output=True, text=True, check=True)
    words = ["git diff of words", " EOF", "git status of words", "git show $of words"]
    assert done.stdout.splitlines() == words


def test_a_script_without_its_marks_is_refused() -> None:
    for script in (
        OWN_SCRIPT.replace(">>>>> Start", ""),
        OWN_SCRIPT.replace(">>>>> End", ""),
        ">>>>> Start Test Output",
    ):
        with pytest.raises(CallerError, match="between the marks"):
            CONVERTERS["swe-bench"](records.swe_bench(eval_script=script, log_parser="parse_log_pytest"), None)


@pytest.mark.parametrize(
    ("repo", "version", "before", "command"),
    [
        ("pandas-dev/pandas", "1.5", "-ve . --no-build-isolation", "pytest -rA --tb=long lib"),
        ("conan-io/conan", "2.0", "PIP_CONSTRAINT", "pytest -n0 -rA lib"),
        ("conan-io/conan", "1.62", "export PYTHONPATH=", "pytest -n0 -rA lib"),
        ("python/mypy", "0.9", "pytest-xdist", "pytest -n0 -rA -k 'testA or testB'"),
        ("python/mypy", "1.7", "hash -r", "pytest -rA -k 'testA or testB'"),
    ],
)
def test_what_swe_gyms_harness_runs_is_in_the_row(repo: str, version: str, before: str, command: str) -> None:
    cases = {"test_patch": "diff --git a/x.test b/x.test\n+[case testA]\n+[case testB]\n"} if "mypy" in repo else {}
    read = row_of(CONVERTERS["swe-gym"](records.swe_gym(repo=repo, version=version, **cases), None))
    assert read.swe.before_tests.startswith("set -uxo pipefail\n")
    assert before in read.swe.before_tests
    assert read.swe.test_command.startswith(command)
    assert (read.swe.tests_network, read.network) == (False, None)


def test_the_fix_of_a_taken_apart_commit_applies(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/sums.py").write_text("def add(a, b):\n    return a - b\n")
    patch = CONVERTERS["r2e-gym"](records.r2e_gym(), None)["swe"]["patch"]
    assert patch.count("diff --git") == 1  # neither the test nor the list of changes
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch, text=True, check=True)
    assert (tmp_path / "lib/sums.py").read_text() == "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("dataset", RECORDS)
def test_files_become_rows_and_lists_of_images(dataset: str, suffix: str, tmp_path: Path) -> None:
    file, rows = tmp_path / f"dataset.{suffix}", tmp_path / "rows.jsonl"
    record = RECORDS[dataset]()
    if suffix == "parquet":
        write_table(pyarrow.Table.from_pylist([record]), file)
    else:
        file.write_text(json.dumps(record) + "\n")
    done = CliRunner().invoke(app, ["swe", str(file), "--dataset", dataset, "-o", str(rows)])
    assert done.exit_code == 0, done.output
    [row] = map(json.loads, rows.read_text().splitlines())
    assert row == CONVERTERS[dataset](record, None)
    [image] = wanted_images([], rows, "image")
    assert image.uri == row["image"]


def test_a_bad_line_is_named_and_the_others_are_written(tmp_path: Path) -> None:
    file, rows = tmp_path / "dataset.jsonl", tmp_path / "rows.jsonl"
    bad = records.swe_bench(base_commit=None)
    file.write_text("".join(json.dumps(one) + "\n" for one in (records.swe_bench(), bad, [1])))
    done = CliRunner().invoke(app, ["swe", str(file), "--dataset", "swe-bench", "-o", str(rows)])
    assert done.exit_code == 1
    assert "line 2: base_commit" in done.output
    assert "line 3: " in done.output
    assert len(rows.read_text().splitlines()) == 1


def test_an_unknown_dataset_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "dataset.jsonl"
    file.write_text("{}\n")
    done = CliRunner().invoke(app, ["swe", str(file), "--dataset", "swe-lean"])
    assert isinstance(done.exception, CallerError)
    assert done.exception.field == "--dataset"


async def test_the_tests_reach_the_network_and_the_policy_does_not() -> None:
    asked: list[SandboxNeeds | None] = []

    def open_sandbox(needs: SandboxNeeds | None = None) -> Any:
        asked.append(needs)
        raise InfrastructureError("there is none")

    task = SoftwareEngineering(ToolLimits(), PatchLimits(), GradingLimits())
    for before in ("python -m pip install .", "export LANG=C"):
        script = records.eval_script("pytest -rA", before)
        row = CONVERTERS["swe-bench"](records.swe_bench(eval_script=script), None)
        assert task.needs(row).network is None
        with pytest.raises(InfrastructureError):
            await task.grade(row, Solution((Change("a.py", None, False),)), {}, open_sandbox)
    assert [needs.network if needs else None for needs in asked] == [True, None]
