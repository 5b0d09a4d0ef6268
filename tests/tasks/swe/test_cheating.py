# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Attacks that earn a reward from a naive grader and none here."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from nemo_gym_prorl.tasks.swe.instance import SweInstance, SweLimits
from nemo_gym_prorl.tasks.swe.patches import Repositories
from tests.conftest import tiered
from tests.tasks.swe import tally


pytestmark = pytest.mark.sandbox

NAMES = " ".join(name.rpartition("::")[2] for name in tally.FAIL_TO_PASS + tally.PASS_TO_PASS)
FAKE_TESTS = f"for name in {NAMES}; do printf 'def %s(): pass\\n' $name; done"
PASSED_LINES = "".join(f"PASSED {name}\\n" for name in tally.FAIL_TO_PASS + tally.PASS_TO_PASS)

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


@dataclass
class Attack:
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
    "leaves a process that changes tests later": Attack(
        f"(while :; do {{ {FAKE_TESTS}; }} > {tally.TESTS}.new; mv {tally.TESTS}.new {tally.TESTS}; done) "
        "> /dev/null 2>&1 &",
        "no_patch|failed|not_taken",
        "",
    ),
    "makes reports of its own": Attack(append("tally/__init__.py", REPORTS), "tampered", "records follow the end"),
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


async def assert_fools_a_naive_grader_only(attack: Attack) -> None:
    grade, naive = await tally.play("mkdir -p .git/hooks\n" + attack.command, naive=True, **attack.swe)
    assert naive is True, "no attack at all"
    assert grade.reward == 0.0
    assert grade.verdict in attack.verdict.split("|"), grade
    assert attack.why in grade.detail


@pytest.mark.parametrize("name", tiered(ATTACKS, FIRST))
async def test_attack_fools_a_naive_grader_only(name: str) -> None:
    await assert_fools_a_naive_grader_only(ATTACKS[name])


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
        base, _ = await Repositories(SweLimits()).prepare(sandbox, instance, hide=True)
    modules = base.modules
    assert modules.installed >= {"pytest", "_pytest", "iniconfig", "json", "asyncio"}
    assert "tally" in modules.own
    assert "tally" not in modules.installed
