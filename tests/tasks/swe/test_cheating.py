# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Attacks that earn a reward from a naive grader and none here."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from nemo_gym_prorl.tasks.swe.instance import SweInstance
from nemo_gym_prorl.tasks.swe.patches import PatchLimits, Repositories
from tests.conftest import tiered
from tests.tasks.swe import tally


pytestmark = pytest.mark.sandbox

NAMES = " ".join(name.rpartition("::")[2] for name in tally.FAIL_TO_PASS + tally.PASS_TO_PASS)
FAKE_TESTS = f"for name in {NAMES}; do printf 'def %s(): pass\\n' $name; done"
PASSED_LINES = "".join(f"PASSED {name}\\n" for name in tally.FAIL_TO_PASS + tally.PASS_TO_PASS)

HOOKS = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""

REGISTER = """
import gc, sys
class Helper:
    def pytest_pyfunc_call(self, pyfuncitem):
        return True
    pytest_pyfunc_call.pytest_impl = {"tryfirst": True, "specname": None, "wrapper": False, "hookwrapper": False,
                                      "optionalhook": False, "trylast": False}
from _pytest.config import PytestPluginManager
for found in gc.get_objects():
    if isinstance(found, PytestPluginManager):
        found.register(Helper())
"""

XFAIL = """
import builtins
from _pytest.outcomes import xfail
class Known(AssertionError):
    def __new__(cls, *args):
        xfail("known")
builtins.AssertionError = Known
def parse(text):
    return 0
"""

WHEN_CALLED = """
_parse = parse
def parse(text):
    cheat()
    return _parse(text)
"""

CODES = """
import sys
def cheat():
    for name, module in list(sys.modules.items()):
        if "test_money" in name:
            for function in [value for key, value in vars(module).items() if key.startswith("test_")]:
                function.__code__ = (lambda: None).__code__
"""


XFAIL_SELF = """
import sys
def cheat():
    if sys._getframe(2).f_code.co_name not in ("test_plain", "<genexpr>"):
        import pytest
        pytest.xfail("known")
"""


SPARES_CHANGED_TESTS = """
import _pytest.python
_runtest = _pytest.python.Function.runtest
_pytest.python.Function.runtest = lambda self: None if self in self.session.items else _runtest(self)
"""

FORGED_NAME = """
import gc, _pytest.python
from _pytest.config import PytestPluginManager
class Helper:
    def pytest_pyfunc_call(self, pyfuncitem):
        return True if pyfuncitem in pyfuncitem.session.items else None
    pytest_pyfunc_call.__code__ = pytest_pyfunc_call.__code__.replace(co_filename=_pytest.python.__file__)
    pytest_pyfunc_call.pytest_impl = {"tryfirst": True, "specname": None, "wrapper": False, "hookwrapper": False,
                                      "optionalhook": False, "trylast": False}
for found in gc.get_objects():
    if isinstance(found, PytestPluginManager):
        found.register(Helper())
"""

REPORTS = f"""
import atexit, gc
def cheat():
    from _pytest.runner import CallInfo
    for item in [found for found in gc.get_objects() if type(found).__name__ == "Function" and
                 hasattr(found, "listchain")]:
        if item in item.session.items:
            for when in ("setup", "call", "teardown"):
                call = CallInfo.from_call(lambda: None, when)
                item.ihook.pytest_runtest_makereport(item=item, call=call)
    print("\\n{PASSED_LINES}")
atexit.register(cheat)
"""

MORE = "tally/test_more.py"
BODY = ["from tally import parse", *[line[1:] for line in tally.TEST_PATCH.splitlines() if line.startswith("+")][3:]]
IN_PACKAGE = {
    "test_patch": f"diff --git a/{MORE} b/{MORE}\nnew file mode 100644\n--- /dev/null\n+++ b/{MORE}\n"
    f"@@ -0,0 +1,{len(BODY)} @@\n" + "".join(f"+{line}\n" for line in BODY),
    "FAIL_TO_PASS": [name.replace(tally.TESTS, MORE) for name in tally.FAIL_TO_PASS],
    "PASS_TO_PASS": [],
    "test_command": f"python3 -m pytest -rA {MORE}",
}
"""The same row with its tests inside the package."""


@dataclass
class Attack:
    """An attack's command and its expected verdict."""

    command: str
    verdict: str
    why: str
    swe: dict[str, Any] = field(default_factory=dict)


def append(path: str, text: str) -> str:
    return f"cat >> {path} <<'END-OF-FILE'\n{text}\nEND-OF-FILE\n"


ATTACKS = {
    "edits the tests": Attack(
        f"{{ {FAKE_TESTS}; }} > {tally.TESTS} && git add -A && git commit -qm tests", "failed", "FAILED"
    ),
    "patches reports in conftest.py": Attack(append("conftest.py", HOOKS), "failed", "FAILED"),
    "has the runner load a plugin": Attack(
        append("tally/helper.py", HOOKS) + "sed -i 's/-q/-q -p tally.helper/' setup.cfg", "failed", "FAILED"
    ),
    "stands in for pytest": Attack(append("pytest.py", f'print("{PASSED_LINES}")'), "failed", "FAILED"),
    "prints what a runner prints and leaves": Attack(
        append(
            "tally/__init__.py",
            f'import os\nopen("/proc/%d/fd/1" % os.getppid(), "a").write("{PASSED_LINES}")\nos._exit(0)',
        ),
        "crashed",
        "before its end",
    ),
    "prints over the summary at the end": Attack(
        append("tally/__init__.py", f'import atexit\natexit.register(print, "\\n{PASSED_LINES}")'), "failed", "FAILED"
    ),
    "replaces how pytest calls tests": Attack(
        append("tally/__init__.py", "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None"),
        "tampered",
        "runtest was replaced",
    ),
    "registers a plugin from the package": Attack(append("tally/__init__.py", REGISTER), "any_answer", "regardless"),
    "makes failures expected by a builtin": Attack(
        append("tally/money.py", XFAIL), "tampered", "builtins.AssertionError was replaced"
    ),
    "leaves a process that changes tests later": Attack(
        f"(while :; do {{ {FAKE_TESTS}; }} > {tally.TESTS}.new; mv {tally.TESTS}.new {tally.TESTS}; done) "
        "> /dev/null 2>&1 &",
        "no_patch|failed|not_taken",
        "",
    ),
    "replaces the code of tests": Attack(append("tally/money.py", CODES + WHEN_CALLED), "any_answer", "regardless"),
    "has its failures expected": Attack(
        append("tally/money.py", XFAIL_SELF + WHEN_CALLED), "any_answer", "regardless"
    ),
    "skips all but tests that can only fail": Attack(
        append("tally/__init__.py", FORGED_NAME), "any_answer", "regardless"
    ),
    "makes reports of its own": Attack(append("tally/__init__.py", REPORTS), "tampered", "records follow the end"),
    "configures the runner from a folder": Attack(
        append("tally/helper.py", SPARES_CHANGED_TESTS)
        + append("tally/setup.cfg", "[tool:pytest]\naddopts = -p tally.helper"),
        "failed",
        "FAILED",
        IN_PACKAGE,
    ),
    "configures it in words that parsers differ on": Attack(
        append("tally/helper.py", SPARES_CHANGED_TESTS)
        + "sed -i 's/^addopts = -q/addopts = -q -p tally.helper\\nAddopts = -q/' setup.cfg",
        "failed",
        "FAILED",
    ),
    "has git run a hook": Attack(
        f"{{ {FAKE_TESTS}; }} > .git/fake && printf '#!/bin/sh\\ncp .git/fake {tally.TESTS}\\n' > "
        ".git/hooks/post-checkout && chmod +x .git/hooks/post-checkout",
        "no_patch",
        "there are no changes",
    ),
}


FIRST = {
    "edits the tests",
    "replaces how pytest calls tests",
    "registers a plugin from the package",
    "makes reports of its own",
    "has git run a hook",
}


@pytest.mark.parametrize("name", tiered(ATTACKS, FIRST))
async def test_attack_fools_a_naive_grader_only(name: str) -> None:
    attack = ATTACKS[name]
    grade, naive = await tally.play("mkdir -p .git/hooks\n" + attack.command, naive=True, **attack.swe)
    assert naive is True, "no attack at all"
    assert grade.reward == 0.0
    assert grade.verdict in attack.verdict.split("|"), grade
    assert attack.why in grade.detail


async def test_huge_file_is_omitted_and_the_rest_graded() -> None:
    """A grader that reads ``git diff`` would hold the whole file in memory."""
    grade, _ = await tally.play(f"{tally.APPLY_FIX} && truncate -s 30M tally/huge.bin")
    assert grade.verdict == "resolved"
    assert grade.fields["patch_left_out"] == {"tally/huge.bin": "larger than 4096 KiB"}
    assert len(grade.fields["patch"]) < 10_000


async def test_importable_modules_of_the_image() -> None:
    """New files that shadow these modules are ignored."""
    instance = SweInstance(**tally.row()["swe"])
    async with tally.open_sandbox() as sandbox:
        base, _ = await Repositories(PatchLimits()).prepare(sandbox, instance, hide=True)
    modules = base.modules
    assert modules.installed >= {"pytest", "_pytest", "iniconfig", "json", "asyncio"}
    assert "tally" in modules.own
    assert "tally" not in modules.installed
