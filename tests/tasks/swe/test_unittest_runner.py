# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Runners that give outcomes to unittest's results, as Django's does, have a second witness too."""

import pytest

from tests.tasks.swe import tally


pytestmark = pytest.mark.sandbox

TEST_PATCH = """\
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
    "test_patch": TEST_PATCH,
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
OTHERS = SEEN.format(
    """made, other = (_build(function, name, *bases) for _ in range(2))
        other.test_negative = lambda self: None
        other.test_negative.__doc__ = "Less than nothing."
        module = sys.modules[made.__module__]
        module.load_tests = lambda loader, tests, pattern: loader.loadTestsFromTestCase(other)"""
)

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
        (f"cat >> tally/__init__.py <<'E'\n{OTHERS}\nE", "any_answer"),
    ],
    ids=["the fix", "leaves", "prints", "replaces asserts", "replaces code", "replaces a class"],
)
async def test_only_the_fix_earns(command: str, verdict: str) -> None:
    grade, _ = await tally.play(command, **SWE)
    assert (grade.verdict, grade.reward) == (verdict, float(verdict == "resolved")), (grade.detail, grade.fields)
