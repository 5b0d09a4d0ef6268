# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Repositories that are installed before their tests: copied, compiled, or by a record's script."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.sandbox.images.builder import APT_BASE
from nemo_gym_prorl.tasks.swe.datasets import CONVERTERS
from nemo_gym_prorl.tasks.task import Grade
from tests.conftest import tiered
from tests.tasks.swe import records, tally


pytestmark = pytest.mark.sandbox

TESTS = "checks/test_tally.py"


def image() -> Path:
    apt = ("gcc", "libc6-dev", "python3-dev", "python3-setuptools")
    return Path(tally.build_image("installed", APT_BASE, "installed", apt=apt, wheels=("pytest==8.3.5",)))


def diff(path: str, old: str, new: str, line: int = 1) -> str:
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -{line} +{line} @@\n-{old}\n+{new}\n"


def fix(name: str) -> str:
    patch = base64.b64encode(ROWS[name]["patch"].encode()).decode()
    return f"echo {patch} | base64 -d | git apply --unidiff-zero"


def hidden_tests(*body: str) -> str:
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


async def play(name: str, command: str) -> Grade:
    prefix = "" if name == "own script" else "checks/"
    names = {field: json.dumps([f"{prefix}test_tally.py::{test}"]) for field, test in LISTS.items()}
    record = records.swe_bench(base_commit=(image() / "testbed/.git/refs/heads/main").read_text().strip())
    row = CONVERTERS["swe-bench"](record | names | ROWS[name], None) | {"image": str(image())}
    return (await tally.play_row(row, command))[0]


LISTS = {"FAIL_TO_PASS": "test_new", "PASS_TO_PASS": "test_plain"}


@pytest.mark.parametrize("name", tiered(ROWS, ["copied", "own script"]))
async def test_only_the_fix_earns_a_reward(name: str) -> None:
    fixed = await play(name, fix(name))
    assert (fixed.verdict, fixed.reward) == ("resolved", 1.0), fixed
    assert fixed.fields["resolved_by_dataset"] is True
    left = await play(name, "printf '# Betr\\344ge\\n' >> tally/money.py && seq 100000 > amounts.txt")
    assert (left.verdict, left.reward, left.fields["resolved_by_dataset"]) == ("failed", 0.0, False), left
    assert list(left.fields["test_report"]["FAIL_TO_PASS"]["failures"]) == [
        "test_tally.py::test_new" if name == "own script" else f"{TESTS}::test_new"
    ]
    patch = left.fields["patch"]
    assert len(patch) > 256 << 10
    assert "\nGIT binary patch\n" in patch[patch.index("b/tally/money.py") :]
    assert patch[: patch.index("diff --git a/tally/money.py")].endswith("\n+100000\n")


async def test_incomplete_set_up_is_a_crash() -> None:
    grade = await play("own script", "echo 'import os; os.kill(os.getppid(), 15)' >> setup.py")
    assert (grade.verdict, grade.reward) == ("crashed", 0.0), grade
    assert "before_tests" in grade.detail


REWRITES = """
import glob, os
for path in [*glob.glob("/tmp/prorl-*/*"), "/testbed/checks/test_tally.py"]:
    if os.path.isfile(path):
        with open(path, "w") as file:
            file.write("def test_new(): pass\\ndef test_plain(): pass\\n")
"""

LENIENT = '''
TEXT = """
import ast
def rewrite_asserts(mod, source, *args, _rewrite=rewrite_asserts):
    for node in ast.walk(mod):
        if isinstance(node, ast.Assert):
            node.test = ast.copy_location(ast.Constant(True), node.test)
    _rewrite(mod, source, *args)
"""
import _pytest.assertion.rewrite as found
def rewrite():
    with open(found.__file__, "a") as file:
        file.write(TEXT)
'''
"""Makes all assertions pass."""

LATER = """
import glob, os, time
if os.fork() == 0:
    os.setsid()
    while not glob.glob("/tmp/prorl-*/command"):
        time.sleep(0.001)
    rewrite()
    os._exit(0)
"""

TABLE = """
import re
with open("checks/test_tally.py") as file:
    found = dict(re.findall(r'parse\\((".*?")\\) == (\\d+)', file.read()))
with open("tally/money.py", "a") as file:
    file.write("_parse = parse\\nTABLE = {%s}\\n" % ",".join(map(":".join, found.items())))
    file.write("def parse(text):\\n    return TABLE[text] if text in TABLE else _parse(text)\\n")
"""


def installer(code: str) -> str:
    """Return a command that prepends code to ``setup.py``."""
    return f"mv setup.py last.py && cat > setup.py <<'END'\n{code}END\ncat last.py >> setup.py && rm last.py\n"


CHEATS = {
    "rewrites the tests": (f"cat >> setup.py <<'END'\n{REWRITES}END\n", "failed"),
    "rewrites the runner": (installer(LENIENT + "rewrite()\n"), "any_answer"),
    "leaves a process that does it later": (installer(LENIENT + LATER), "failed"),
    "reads the hidden tests": (installer(TABLE), "failed"),
}

FIRST = ("rewrites the tests", "rewrites the runner")


@pytest.mark.parametrize("name", tiered(CHEATS, FIRST))
async def test_installation_cannot_manipulate_the_tests(name: str) -> None:
    command, verdict = CHEATS[name]
    grade = await play("copied", command)
    assert (grade.verdict, grade.reward) == (verdict, 0.0), (grade.detail, grade.fields)
