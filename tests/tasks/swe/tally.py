# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The repository ``tally`` in an image, its task, and policies that work on it."""

import base64
import shlex
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from nemo_gym_prorl.sandbox.images.builder import BuildRequest, build
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.swe.instance import SweInstance, SweLimits
from nemo_gym_prorl.tasks.swe.report import answer, job_of
from nemo_gym_prorl.tasks.swe.task import SoftwareEngineering, tool_schemas
from nemo_gym_prorl.tasks.task import Grade
from nemo_gym_prorl.tasks.workbench.workspace import ToolLimits, Workspace
from tests.tasks import containers


TESTS = "tests/test_money.py"
FAIL_TO_PASS = [f"{TESTS}::{name}" for name in ("test_negative", "test_thousands", "test_one_digit")]
PASS_TO_PASS = [f"{TESTS}::{name}" for name in ("test_plain", "test_total")]

TEST_PATCH = """\
diff --git a/tests/test_money.py b/tests/test_money.py
--- a/tests/test_money.py
+++ b/tests/test_money.py
@@ -7,3 +7,15 @@
 
 def test_total():
     assert total(["1.10", "2"]) == 310
+
+
+def test_negative():
+    assert parse("-1.50") == -150
+
+
+def test_thousands():
+    assert parse("1,234.50") == 123450
+
+
+def test_one_digit():
+    assert parse("0.5") == 50
"""

FIX = """\
diff --git a/tally/money.py b/tally/money.py
--- a/tally/money.py
+++ b/tally/money.py
@@ -3,8 +3,10 @@
 
 def parse(text):
     \"\"\"Cents of an amount such as ``12.34``.\"\"\"
-    whole, _, cents = text.strip().partition(".")
-    return int(whole) * 100 + int(cents or 0)
+    text = text.strip().replace(",", "")
+    sign = -1 if text.startswith("-") else 1
+    whole, _, cents = text.lstrip("-").partition(".")
+    return sign * (int(whole) * 100 + int((cents + "00")[:2]))
 
 
 def total(texts):
"""

APPLY_FIX = f"echo {base64.b64encode(FIX.encode()).decode()} | base64 -d | git apply"


@cache
def build_image(definition: str, base: str, name: str, words: tuple[tuple[str, str], ...] = (), **more: Any) -> str:
    """Build an image from a definition beside this file, with words replaced, and return its folder."""
    text = Path(__file__).with_name(f"{definition}.def").read_text()
    for word, value in words:
        text = text.replace(word, value)
    order = BuildRequest(text, base, f"test-swe-{name}", **more)
    return str(build(order, ImageStore(), require_runtime(), print))


def image() -> str:
    return build_image("tally", containers.image(), "tally", wheels=("pytest==8.3.5",))


@cache
def base_commit() -> str:
    return Path(image(), "testbed/.git/refs/heads/main").read_text().strip()


def row(**swe: Any) -> dict[str, Any]:
    task = {
        "dataset": "made",
        "repo": "tests/tally",
        "version": "1.0",
        "base_commit": base_commit(),
        "problem_statement": "Negative amounts, thousands and single digits of cents are read wrongly.",
        "patch": FIX,
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": FAIL_TO_PASS,
        "PASS_TO_PASS": PASS_TO_PASS,
        "test_command": f"python3 -m pytest -rA {TESTS}",
    }
    return {
        "responses_create_params": {
            "input": [{"role": "user", "content": task["problem_statement"]}],
            "tools": tool_schemas(),
        },
        "data_source": "made",
        "instance_id": f"tests__tally-{zlib.crc32(repr(sorted(swe.items())).encode())}" if swe else "tests__tally-1",
        "image": image(),
        "swe": task | swe,
    }


def make_task(**limits: Any) -> SoftwareEngineering:
    return SoftwareEngineering(ToolLimits(), SweLimits(test_timeout_s=60, **limits))


@cache
def shared_task() -> SoftwareEngineering:
    """Return the task shared by a module's tests without own limits."""
    return make_task()


@asynccontextmanager
async def open_sandbox(needs: object = None, image_path: str | None = None) -> AsyncIterator[Sandbox]:
    """Start a fresh sandbox of an image, by default the repository's."""
    sandbox = await containers.start(image_path or image())
    try:
        yield sandbox
    finally:
        await sandbox.stop()


async def play(
    *commands: str, task: SoftwareEngineering | None = None, naive: bool = False, **swe: Any
) -> tuple[Grade, bool | None]:
    """Play a policy that runs these commands; return its grade and what a naive grader says."""
    try:
        return await play_row(row(**swe), *commands, task=task, naive=naive)
    finally:
        if task is not None:
            await task.aclose()


async def play_row(
    given: dict[str, Any], *commands: str, task: SoftwareEngineering | None = None, naive: bool = False
) -> tuple[Grade, bool | None]:
    task, opened = task or shared_task(), partial(open_sandbox, image_path=given["image"])
    async with opened() as sandbox:
        tools = await task.tools.open(sandbox, task.needs(given))
        await task.prepare(given, tools)
        for command in commands:
            said = await tools.call("bash", {"command": command, "timeout_s": 60})
            assert said.endswith("[exit code: 0]"), said
        solution = await task.artefacts(given, tools)
        resolved = await graded_naively(tools, SweInstance(**given["swe"])) if naive else None
        await tools.close()
    return await task.grade(given, solution, {}, opened), resolved


async def graded_naively(bench: Workspace, instance: SweInstance) -> bool:
    """Grade like a naive grader: apply the tests in the policy's sandbox and trust the log."""
    encoded = base64.b64encode(instance.test_patch.encode()).decode()
    tests = f"git checkout -q -- tests; echo {encoded} | base64 -d | git apply"
    command = f"cd /testbed && {tests}; {instance.test_command} 2>&1"
    done = await bench.sandbox.exec(f"sh -c {shlex.quote(command)}", cwd="/", timeout_s=60)
    told = answer(job_of(instance, [done.stdout or ""], 0, "tests__tally-1"))
    assert told is not None
    return bool(told["resolved"])
