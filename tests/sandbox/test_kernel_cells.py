# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What ordinary cells print, show and raise, as an agent gets it from a kernel in a container."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.jupyter.kernel import Kernel
from nemo_gym_prorl.sandbox.supervisor.errors import SandboxBroken


pytestmark = [pytest.mark.sandbox, pytest.mark.asyncio(loop_scope="module")]


@dataclass(frozen=True)
class Case:
    """A cell, and parts of what it must print, show and raise; ``None`` for a cell that must not fail."""

    code: str
    output: str = ""
    error: str | None = None
    shown: str | None = None


GROUP = "raise ExceptionGroup('two', [ValueError('a'), KeyError('b')])"
TASKS = """
import asyncio
async def bad(): raise RuntimeError('in a task')
async with asyncio.TaskGroup() as group:
    group.create_task(bad())
"""
HANDLER = """
get_ipython().set_custom_exc((LookupError,), lambda shell, kind, value, trace, tb_offset=None: print('handled'))
{}['x']
"""
DISPLAY = "from IPython.display import display, clear_output, HTML\n"

CASES = {
    "printed": Case("print('a'); print('b')", "a\nb\n"),
    "standard error": Case("import sys; print('err', file=sys.stderr)", "err\n"),
    "value": Case("20 + 22", shown="42"),
    "raised": Case("1 / 0", error="ZeroDivisionError: division by zero"),
    "no syntax": Case("x = = 1", error="SyntaxError"),
    "exception group": Case(GROUP, error="ExceptionGroup"),
    "task group": Case(TASKS, error="ExceptionGroup"),
    "bare group": Case("raise BaseExceptionGroup('g', [KeyboardInterrupt()])", error="BaseExceptionGroup"),
    "no such magic": Case("%nope", error="UsageError"),
    "no such cell magic": Case("%%nope\nx", error="UsageError"),
    "magic with a wrong option": Case("%timeit -z 1", error="UsageError"),
    "custom handler": Case(HANDLER, "handled", error="KeyError"),
    "failing command of a magic": Case("%%bash\necho said\nexit 3", "said\n", error="CalledProcessError"),
    "failing command": Case("!echo said; exit 3", "said"),
    "input": Case("input('? ')", error="StdinNotImplementedError"),
    "assertion": Case("assert 1 == 2, 'no'", error="AssertionError: no"),
    "KeyboardInterrupt": Case("raise KeyboardInterrupt", error="KeyboardInterrupt"),
    "own base exception": Case("class Odd(BaseException): pass\nraise Odd('so')", error="so"),
    "byte that is not UTF-8": Case("print('odd', b'\\xff'.decode('utf8', 'surrogateescape'))", "odd "),
    "half a surrogate pair": Case("print('x\\ud800y')", "surrogates not allowed"),
    "odd byte in a trace": Case("raise ValueError(b'\\xff'.decode('utf8', 'surrogateescape'))", error="ValueError"),
    "odd byte of a command": Case("!printf 'a\\xffb'", "a"),
    "odd byte shown": Case(DISPLAY + "display(HTML(b'h\\xff'.decode('utf8', 'surrogateescape')))", shown="h\ufffd"),
    "not a number": Case("float('nan')", shown="nan"),
    "help": Case("len?", "Return the number of items in a container"),
    "help of what is not there": Case("nothing_here?", "Object `nothing_here` not found"),
    "source": Case("import textwrap\ntextwrap.dedent??", "def dedent"),
    "display": Case(DISPLAY + "display('shown')", shown="shown"),
    "updated display": Case(DISPLAY + "h = display('first', display_id=True)\nh.update('second')", shown="second"),
    "cleared": Case(DISPLAY + "print('old')\nclear_output()\nprint('new')", "new\n"),
    "cleared at the next output": Case(DISPLAY + "print('old')\nclear_output(wait=True)\nprint('new')", "new\n"),
    "cleared without a next output": Case(DISPLAY + "print('old')\nclear_output(wait=True)", "old\n"),
    "top-level await": Case("import asyncio\nawait asyncio.sleep(0)\nprint('slept')", "slept\n"),
    "semicolon": Case("3;"),
    "comment": Case("# nothing"),
    "empty": Case(""),
    "thread": Case("import threading\nt = threading.Thread(target=print, args=['said'])\nt.start(); t.join()", "said"),
    "failing thread": Case("t = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()", "ZeroDivisionError"),
    "carriage returns": Case("print('10%\\r20%\\r30%')", "30%"),
    "colours": Case("print('\\x1b[31mred\\x1b[0m')", "red"),
    "last line without an end": Case("print('end', end='')", "end"),
    "subprocess": Case("import subprocess\nsubprocess.run(['echo', 'out']).returncode", "out", shown="0"),
    "descriptor": Case("import os\nos.write(1, b'by descriptor\\n')", "by descriptor", shown="14"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kernel(kernel_image: Path, runtime: Runtime) -> AsyncIterator[Kernel]:
    async with (
        await Container.start(ContainerSpec(image=kernel_image), runtime) as container,
        await Kernel.start(container) as live,
    ):
        yield live


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_a_cell(case: Case, kernel: Kernel) -> None:
    cell = await kernel.run(case.code)
    assert case.output in cell.output
    if case.output.endswith("\n"):
        assert cell.output.endswith(case.output)
    if case.error is None:
        assert cell.error is None
    else:
        assert case.error in (cell.error or "")
    shown = "".join(text for data in cell.data for text in data.values())
    assert shown == "" if case.shown is None else case.shown in shown
    assert cell.omitted == 0
    assert not cell.died


async def test_an_updated_display_is_there_once(kernel: Kernel) -> None:
    cell = await kernel.run(CASES["updated display"].code)
    assert [list(data.values()) for data in cell.data] == [["'second'"]]
    cell = await kernel.run("h.update('third')")
    assert [list(data.values()) for data in cell.data] == [["'third'"]]


async def test_what_a_thread_prints_between_cells_is_in_the_next(kernel: Kernel) -> None:
    await kernel.run("import threading, time\nthreading.Timer(0.2, print, ['late']).start()")
    await asyncio.sleep(1)
    assert (await kernel.run("print('next')")).output == "late\nnext\n"
    assert (await kernel.run("print('last')")).output == "last\n"
    await kernel.run("threading.Timer(0.1, print, ['of the ended kernel']).start()")
    await asyncio.sleep(0.5)
    await kernel.restart()
    assert (await kernel.run("print('fresh')")).output == "fresh\n"


@pytest.mark.parametrize("ignores", [False, True], ids=["interrupted", "killed"])
async def test_a_cancelled_cell_keeps_its_turn_until_it_has_ended(kernel: Kernel, ignores: bool) -> None:
    code = "import signal, time\n" + ("signal.signal(signal.SIGINT, signal.SIG_IGN)\n" if ignores else "")
    left = asyncio.create_task(kernel.run(code + "while True: print('left', flush=True); time.sleep(0.01)"))
    await asyncio.sleep(0.3)
    left.cancel()
    following = asyncio.create_task(kernel.run("print('next')"))
    with pytest.raises(asyncio.CancelledError):
        await left
    if ignores:
        with pytest.raises(SandboxBroken, match="restart"):
            await following
        await kernel.restart()
    else:
        assert (await following).output == "next\n"
