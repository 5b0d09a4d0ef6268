# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Repositories whose images have them as copies, compiled in part, or that are set up by a script of the record's own:
as the datasets' own harnesses do, what was changed is installed before it is tested."""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.sandbox.images.builder import APT_BASE, BuildRequest, build
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime
from nemo_gym_prorl.sandbox.started import StartedSandbox
from nemo_gym_prorl.tasks.swe.datasets import CONVERTERS
from nemo_gym_prorl.tasks.task import Grade
from tests.conftest import LONG
from tests.tasks import containers
from tests.tasks.swe import records, tally


pytestmark = pytest.mark.sandbox

TESTS = "checks/test_tally.py"


@cache
def image() -> Path:
    """The image, built if it is not there."""
    apt = ("gcc", "libc6-dev", "python3-dev", "python3-setuptools")
    template = str(Path(__file__).with_name("installed.def.j2"))
    order = BuildRequest(template, APT_BASE, "test-swe-installed", apt=apt, wheels=("pytest==8.3.5",), format="folder")
    return build(order, ImageStore(), require_runtime(), print)


def diff(path: str, old: str, new: str, line: int = 1) -> str:
    """A patch of one line."""
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -{line} +{line} @@\n-{old}\n+{new}\n"


def fix(name: str) -> str:
    """What brings in the row's own fix."""
    patch = base64.b64encode(ROWS[name]["patch"].encode()).decode()
    return f"echo {patch} | base64 -d | git apply --unidiff-zero"


def hidden_tests(*body: str) -> str:
    """A patch that adds a test."""
    added = "".join(f"+{line}\n" for line in ("", "", "def test_new():", *(f"    {line}" for line in body)))
    context = ' def test_plain():\n     assert parse("12.34") == 1234\n'
    hunk = f"@@ -4,2 +4,{5 + len(body)} @@\n{context}{added}"
    return f"diff --git a/{TESTS} b/{TESTS}\n--- a/{TESTS}\n+++ b/{TESTS}\n{hunk}"


WHOLE = "    return int(whole) * 100 + int(cents or 0)"
COPIED = {
    "patch": diff("tally/money.py", WHOLE, WHOLE.replace("whole", 'whole.replace(",", "")'), 7),
    "test_patch": hidden_tests('assert parse("1,000.50") == 100050'),
}
COMPILED = {
    "patch": diff(
        "tally/_adding.c", "    return PyLong_FromLong(one - two);", "    return PyLong_FromLong(one + two);", 8
    ),
    "test_patch": hidden_tests("import tally", "assert tally.add(2, 3) == 5"),
}
OWN_TESTS = hidden_tests(
    "import os, pathlib",
    "import tally",
    'assert "LANG" not in os.environ',
    'assert tally.MODE == "exact"',
    'assert parse(pathlib.Path("amount.txt").read_text()) == 100050',
)
OWN_SCRIPT = f"""\
#!/bin/bash
set -uxo pipefail
export TALLY_MODE=exact
amount() {{ printf '%s' "$1" > amount.txt; }}
cd /testbed
git config --global --add safe.directory /testbed
git status
git show
python setup.py -q install
git checkout 0123456789 {TESTS}
rm -f {TESTS}
git apply -v - <<'EOF_114329324912'
{OWN_TESTS}
EOF_114329324912
cd checks
: '>>>>> Start Test Output'
amount 1,000.50
pytest -rA --rootdir=/testbed test_tally.py
: '>>>>> End Test Output'
git checkout 0123456789 {TESTS}
"""
INSTALLED = {
    "repo": "old/one",
    "eval_script": records.eval_script(f"pytest -rA {TESTS}", "python setup.py build; python setup.py install"),
    "log_parser": "parse_log_pytest",
}
ROWS: dict[str, dict[str, Any]] = {
    "copied": {**INSTALLED, **COPIED},
    "compiled": {**INSTALLED, **COMPILED},
    "own script": {
        "repo": "new/one",
        "patch": COPIED["patch"],
        "test_patch": OWN_TESTS,
        "eval_script": OWN_SCRIPT,
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
    },
}


@asynccontextmanager
async def opened(needs: object = None) -> AsyncIterator[StartedSandbox]:
    """A fresh sandbox of the image."""
    sandbox = await containers.start_with_sessions(str(image()))
    try:
        yield sandbox
    finally:
        await sandbox.stop()


async def play(name: str, command: str, more: str = "") -> Grade:
    """What a policy earns that runs this, where the row runs more before its tests."""
    prefix = "" if name == "own script" else "checks/"
    names = {field: json.dumps([f"{prefix}test_tally.py::{test}"]) for field, test in LISTS.items()}
    record = records.swe_bench(base_commit=(image() / "testbed/.git/refs/heads/main").read_text().strip())
    row = CONVERTERS["swe-bench"](record | names | ROWS[name], None) | {"image": str(image())}
    row["swe"] |= {"before_tests": f"{row['swe']['before_tests']}\n{more}"}
    task = tally.shared_task()
    async with opened() as sandbox:
        bench = await task.tools.open(sandbox, task.needs(row))
        await task.prepare(row, bench)
        assert (await bench.call("bash", {"command": command})).endswith("[exit code: 0]")
        taken = await task.artefacts(row, bench)
        await bench.close()
    return await task.grade(row, taken, {}, opened)


REWRITES = """
import glob, os
for path in [*glob.glob("/tmp/prorl-*/*"), "/testbed/checks/test_tally.py"]:
    if os.path.isfile(path):
        with open(path, "w") as file:
            file.write("def test_new(): pass\\ndef test_plain(): pass\\n")
"""

LISTS = {"FAIL_TO_PASS": "test_new", "PASS_TO_PASS": "test_plain"}


@pytest.mark.longer("what is compiled without a fix, too")
@pytest.mark.parametrize("name", ROWS)
async def test_the_fix_earns_one_and_nothing_earns_nothing(name: str) -> None:
    fixed = await play(name, fix(name))
    assert (fixed.verdict, fixed.reward) == ("resolved", 1.0), fixed
    assert fixed.fields["resolved_by_dataset"] is True
    if name == "compiled" and not LONG:
        return  # which differs from a copied one in what a fix has to do
    left = await play(name, "printf '# Betr\\344ge\\n' >> tally/money.py && seq 100000 > amounts.txt")
    assert (left.verdict, left.reward, left.fields["resolved_by_dataset"]) == ("failed", 0.0, False), left
    assert list(left.fields["test_report"]["FAIL_TO_PASS"]["failures"]) == [
        "test_tally.py::test_new" if name == "own script" else f"{TESTS}::test_new"
    ]
    patch = left.fields["patch"]
    assert len(patch) > 256 << 10
    assert "\nGIT binary patch\n" in patch[patch.index("b/tally/money.py") :]
    assert patch[: patch.index("diff --git a/tally/money.py")].endswith("\n+100000\n")


async def test_an_installation_that_rewrites_the_tests_wins_nothing() -> None:
    grade = await play("copied", f"cat >> setup.py <<'END'\n{REWRITES}END\n")
    assert (grade.verdict, grade.reward) == ("failed", 0.0), grade


async def test_set_up_that_does_not_come_to_its_end_is_a_crash() -> None:
    grade = await play("own script", "echo 'import os; os.kill(os.getppid(), 15)' >> setup.py")
    assert (grade.verdict, grade.reward) == ("crashed", 0.0), grade
    assert "what comes before the tests" in grade.detail
