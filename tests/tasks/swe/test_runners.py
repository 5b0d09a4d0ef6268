# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Runners other than pytest, and tests whose output exceeds the log limit."""

import pytest

from nemo_gym_prorl.failures import TaskError
from nemo_gym_prorl.tasks.swe.grading import seed_of
from nemo_gym_prorl.tasks.swe.instance import SweRow
from tests.tasks.swe import tally
from tests.tasks.swe.test_cheating import append


pytestmark = pytest.mark.sandbox

UNITTESTS = """\
diff --git a/tests/test_amounts.py b/tests/test_amounts.py
new file mode 100644
--- /dev/null
+++ b/tests/test_amounts.py
@@ -0,0 +1,12 @@
+import unittest
+
+from tally import parse
+
+
+class Amounts(unittest.TestCase):
+    def test_plain(self):
+        self.assertEqual(parse("12.34"), 1234)
+
+    def test_negative(self):
+        \"\"\"Less than nothing.\"\"\"
+        self.assertEqual(parse("-1.50"), -150)
"""
SWE = {
    "test_patch": UNITTESTS,
    "FAIL_TO_PASS": ["Less than nothing."],
    "PASS_TO_PASS": ["test_plain (tests.test_amounts.Amounts.test_plain)"],
    "test_command": "python3 -m unittest -v tests.test_amounts",
    "log_parser": "parse_log_django",
}
LIES = """print("test_x (x) ... ok\\nLess than nothing. ... ok")
print("test_plain (tests.test_amounts.Amounts.test_plain) ... ok")"""

SEEN = """
import builtins, sys
_build = builtins.__build_class__
def build(function, name, *bases, **given):
    made = _build(function, name, *bases, **given)
    if name == "Amounts":
        {}
    return made
builtins.__build_class__ = build
"""
CODES = SEEN.format("made.test_negative.__code__ = (lambda self: None).__code__")

LIES_INSIDE = LIES.replace("\n", "\n    ")


@pytest.mark.parametrize(
    ("command", "verdict"),
    [
        (tally.APPLY_FIX, "resolved"),
        (f'cat >> tally/__init__.py <<"E"\nimport os\n{LIES}\nos._exit(0)\nE', "crashed"),
        (
            f'cat >> tally/__init__.py <<"E"\nimport atexit\n@atexit.register\ndef lie():\n    {LIES_INSIDE}\nE',
            "failed",
        ),
        (
            'cat >> tally/__init__.py <<"E"\nimport unittest\nunittest.TestCase.assertEqual = lambda *args: None\nE',
            "tampered",
        ),
        (f"cat >> tally/__init__.py <<'E'\n{CODES}\nE", "any_answer"),
    ],
    ids=["the fix", "leaves", "prints", "replaces asserts", "replaces code"],
)
async def test_only_the_fix_earns_with_unittest(command: str, verdict: str) -> None:
    grade, _ = await tally.play(command, **SWE)
    assert (grade.verdict, grade.reward) == (verdict, float(verdict == "resolved")), (grade.detail, grade.fields)


FLOOD = "python3 -c \"print(('x' * 99 + '\\n') * {lines})\"\n"
LOUD = """
_parse = parse
def parse(text):
    print("PASSED\\n" * 10**6)
    return _parse(text)
"""
BY_LOG_ONLY = {"runner": "log"}


async def test_row_with_too_much_output_is_not_charged() -> None:
    command = FLOOD.format(lines=2000) + tally.row()["swe"]["test_command"]
    with pytest.raises(TaskError, match="not even with the reference fix"):
        await tally.play(tally.APPLY_FIX, task=tally.make_task(log_kib=64), test_command=command, **BY_LOG_ONLY)


async def test_flood_by_the_policy_scores_zero() -> None:
    commands = f"{tally.APPLY_FIX}\n{append('tally/money.py', LOUD)}"
    grade, _ = await tally.play(commands, task=tally.make_task(log_kib=64), **BY_LOG_ONLY)
    assert (grade.reward, grade.verdict) == (0.0, "log_unreadable"), grade


def test_seed_depends_on_the_row_only() -> None:
    def seed(**swe: str) -> str:
        return seed_of(SweRow.model_validate(tally.row(**swe) | {"instance_id": "a__b-1"}))

    assert seed() == seed()
    assert len({seed(), seed(patch=""), seed(test_patch=tally.TEST_PATCH + "\n")}) == 3
