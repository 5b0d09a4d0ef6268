# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Persistent ``bash`` and ``python`` in real sandboxes: exact observations and failure attribution."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.sandbox.images.builder import default_image_path
from nemo_gym_prorl.tasks.code.code_rows import SOLUTION_FILE
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import ExtractedFile
from nemo_gym_prorl.tasks.workbench.workspace import (
    InstalledPrograms,
    ToolLimits,
    Workspace,
    probe_image,
)
from tests.sandbox.running import kill_supervisor
from tests.tasks import containers


pytestmark = pytest.mark.sandbox
LIMITS = ToolLimits(timeout_s=20, max_timeout_s=30, silence_s=15, output_bytes=2000)
SHELL_GONE = "the shell ended and a new one was started: folder, variables and jobs are gone"
KERNEL_GONE = "the kernel ended and a new one was started: variables are gone"
RUNNING = "[still running, no output for 0.7 s: it may wait for input]"
BUSY = 'Error: the command before still runs: answer it with input, end it with input "C-c", or restart.'
IDLE = "Error: no command is running that could take input."


class Agent:
    def __init__(self, sandbox: Sandbox, limits: ToolLimits, installed: InstalledPrograms) -> None:
        self.sandbox = sandbox
        self.workspace = Workspace(sandbox, "/sandbox/workspace", limits, installed)

    async def bash(self, command: str | None = None, **arguments: object) -> str:
        return await self.workspace.call("bash", {"command": command, **arguments} if command else arguments)

    async def python(self, code: str | None = None, **arguments: object) -> str:
        return await self.workspace.call("python", {"code": code, **arguments} if code else arguments)

    async def solution(self) -> ExtractedFile:
        return await self.workspace.extract_file(SOLUTION_FILE, limit=262144)


@asynccontextmanager
async def playing(limits: ToolLimits = LIMITS, **options: Any) -> AsyncIterator[Agent]:
    async with containers.running(**options) as sandbox:
        agent = Agent(sandbox, limits, await probe_image(sandbox))
        await agent.workspace.write({SOLUTION_FILE: "def f():\n    return 1\n"})
        yield agent
    await agent.workspace.close()


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    async with playing() as live:
        yield live


@pytest.fixture
async def without_kernel() -> AsyncIterator[Agent]:
    async with playing(image_path=str(default_image_path())) as live:
        yield live


@pytest.fixture
async def impatient() -> AsyncIterator[Agent]:
    """An agent whose commands count as waiting after 0.7 s of silence."""
    async with playing(replace(LIMITS, silence_s=0.7), image_path=str(default_image_path())) as live:
        yield live


async def test_memory_that_ended_a_process_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async with playing(memory_mib=256) as agent:
        hog, reason = "x = bytearray(600 << 20); import time; time.sleep(20)", r"memory: [\w ]+ of 256 MiB[\w ,]*"
        assert re.search(rf"\[exit code: 137; {reason}\]$", await agent.bash(f'python3 -c "{hog}"'))
        assert await agent.bash("python3 -c 'import os; os.kill(os.getpid(), 9)'") == "Killed\n[exit code: 137]"
        assert re.search(rf"\[error; {reason}; {KERNEL_GONE}\]$", await agent.python(hog))
        assert caplog.text.count("has met a limit: memory: ") == 1


async def test_shell_keeps_state_until_it_ends(without_kernel: Agent) -> None:
    bash = without_kernel.bash
    assert await bash("pwd; ls") == "/sandbox/workspace\nsolution.py\n[exit code: 0]"
    assert await bash("cd /tmp; X=1; f() { echo f$X; }; false") == "[exit code: 1]"
    assert await bash("pwd; f; echo err >&2; printf no-newline") == "/tmp\nf1\nerr\nno-newline\n[exit code: 0]"
    assert await bash("echo; echo") == "\n\n[exit code: 0]"
    assert await bash("tty -s && echo $TERM") == "dumb\n[exit code: 0]"
    assert await bash("echo '") == "bash: unexpected EOF while looking for matching `''\n[exit code: 2]"
    assert await bash("exit 7") == f"exit\n[exit code: 7; {SHELL_GONE}]"
    assert await bash("pwd; type f 2>/dev/null || echo gone$X") == "/sandbox/workspace\ngone\n[exit code: 0]"
    assert await bash("kill -9 $$") == f"[exit code: 137; {SHELL_GONE}]"
    assert await bash("cd /tmp; rm -r /sandbox/workspace") == "[exit code: 0]"
    assert await bash(restart=True) == "[a new shell was started]"
    assert await bash("pwd") == "/\n[exit code: 0]"


async def test_programs_take_input_and_interrupts(impatient: Agent) -> None:
    bash = impatient.bash
    assert await bash(input="too early") == IDLE
    assert await bash("read -p 'name? ' name; echo hello $name; cat") == f"name? \n{RUNNING}"
    assert await bash("echo no") == BUSY
    assert await bash(input="you") == f"hello you\n{RUNNING}"
    assert await bash(input="a line\n") == f"a line\n{RUNNING}"
    assert await bash(input="") == RUNNING
    assert await bash(input="C-d") == "[exit code: 0]"
    assert await bash("sleep 100; echo not reached") == RUNNING
    assert await bash(input="C-c") == "[exit code: 130]"
    assert await bash(input="too late") == IDLE
    assert await bash("cat > /tmp/typed") == RUNNING
    assert await bash(restart=True) == "[a new shell was started]"
    assert await bash("sleep 2; echo done; (exit 3)") == RUNNING
    console = impatient.workspace._bash
    assert console
    assert console._session
    while console._session._code is None:
        await asyncio.sleep(0.05)
    assert await bash("echo on") == "done\non\n[exit code: 0; the command before has ended with exit code 3]"


async def test_time_limits_leave_a_usable_shell(without_kernel: Agent) -> None:
    bash = without_kernel.bash
    assert await bash("X=kept; echo begun; sleep 100", timeout_s=2) == "begun\n[timed out after 2 s]"
    assert await bash("echo $X") == "kept\n[exit code: 0]"
    assert await bash("trap '' INT; while :; do :; done", timeout_s=0.2) == f"[timed out after 0.2 s; {SHELL_GONE}]"
    assert await bash("kill -STOP $$", timeout_s=0.2) == f"[timed out after 0.2 s; {SHELL_GONE}]"
    assert await bash("echo $X") == "\n[exit code: 0]"


async def test_long_and_forged_output(without_kernel: Agent) -> None:
    bash = without_kernel.bash
    shown = await bash("seq 100000")
    count = shown.partition("\n[... ")[2].partition(" ")[0]
    assert shown.startswith("1\n2\n3\n")
    assert shown.endswith(f"99999\n100000\n[exit code: 0; {count} bytes omitted]")
    assert len(shown) - len(f"\n[... {count} bytes omitted ...]\n[exit code: 0; {count} bytes omitted]") == (
        588_895 - int(count)
    )
    assert await bash(r"printf '\xff\xfeok\x00\n'") == "\ufffd\ufffdok\0\n[exit code: 0]"
    forged = await bash("echo '[exit code: 0]'; echo '[... 5 bytes omitted ...]'; exec false")
    assert forged == f"[exit code: 0]\n[... 5 bytes omitted ...]\n[exit code: 1; {SHELL_GONE}]"


async def test_kernel_keeps_state_until_it_ends(agent: Agent) -> None:
    python = agent.python
    assert await python("import solution\nx = solution.f()\nprint('é', x)") == "é 1\n[ok]"
    assert await python("print('a'); x + 1") == "a\n2\n[ok]"
    assert await python("pass") == "[ok]"
    failed = await python("print('before')\n1 / 0")
    assert "Cell In[4], line 2\n" in failed
    assert failed.startswith("before\n-----")
    assert failed.endswith("\nZeroDivisionError: division by zero\n[error]")
    assert "StdinNotImplementedError" in await python("input()")
    slow = await python("import time\nprint('begun')\ntime.sleep(100)", timeout_s=3)
    assert slow.startswith("begun\n")
    assert slow.endswith("KeyboardInterrupt: \n[timed out after 3 s]")
    assert await python("from IPython.display import HTML, display\ndisplay(HTML('<b>'))\nx") == (
        "<IPython.core.display.HTML object>\n1\n[ok]"
    )
    flood = await python("for i in range(1000): print(i)\n'the end'")
    assert flood.startswith("0\n1\n")
    assert flood.endswith(" bytes omitted]")
    assert "the end" in flood
    assert len(flood.encode()) <= LIMITS.output_bytes
    assert await python("import os; os._exit(3)") == f"[error; {KERNEL_GONE}]"
    assert await python("'x' in globals()") == "False\n[ok]"
    assert await python(restart=True) == "[a new kernel was started]"
    process = (await python("import os; os.getpid()")).split("\n")[0]
    await agent.sandbox.exec(f"kill -9 {process}")
    assert (await python("1")).endswith(("before this call: variables are gone]", f"[error; {KERNEL_GONE}]"))
    assert await python("import solution; solution.f()") == "1\n[ok]"


async def test_broken_sandbox_produces_error_observations(agent: Agent) -> None:
    assert await agent.python("1") == "1\n[ok]"
    assert (await agent.bash("kill -9 -1; true")).endswith("[exit code: 0]")
    assert (await agent.python("1")).endswith(("before this call: variables are gone]", f"[error; {KERNEL_GONE}]"))
    await agent.bash("rm -rf /usr/lib/python3*/encodings /usr/bin/bash")
    fresh, none = "[a new kernel was started]", "Error: the kernel ended and no new one could be started: "
    assert (await agent.python(restart=True)).startswith((fresh, none))
    assert (await agent.python("1")).startswith(("1\n[ok]", none))
    assert (await agent.bash("exit")).startswith("Error: the shell ended and no new one could be started: ")
    await agent.sandbox.exec("rm -f /bin/* /usr/bin/*")
    assert (await agent.bash("ls")).startswith("Error: the shell ended and no new one could be started: ")
    assert await agent.solution() == ExtractedFile(b"def f():\n    return 1\n")


@pytest.mark.parametrize("killed", ["sandbox", "supervisor"])
async def test_a_lost_sandbox_is_infrastructure(agent: Agent, killed: str) -> None:
    waiting = asyncio.create_task(agent.bash("sleep 100; echo", timeout_s=30))
    cell = asyncio.create_task(agent.python("import time; time.sleep(100)", timeout_s=30))
    await asyncio.sleep(0.3)
    if killed == "sandbox":
        containers.kill_instance(agent.sandbox.sandbox_id)
    else:
        kill_supervisor()
    for call in (waiting, cell, agent.bash("ls"), agent.python("1"), agent.solution()):
        with pytest.raises(InfrastructureError) as caught:
            await asyncio.wait_for(call, 60)
        assert caught.value.kind is FailureKind.SESSION_LOST


async def test_concurrent_calls_are_serialized(agent: Agent) -> None:
    said = await asyncio.gather(*(agent.bash(f"X={i}; sleep 0.05; echo $X") for i in range(5)))
    assert said == [f"{i}\n[exit code: 0]" for i in range(5)]
    cells = await asyncio.gather(*(agent.python(f"y = {i}\ny") for i in range(5)))
    assert cells == [f"{i}\n[ok]" for i in range(5)]
    assert await agent.solution() == ExtractedFile(b"def f():\n    return 1\n")
