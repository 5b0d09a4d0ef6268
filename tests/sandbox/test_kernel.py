# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""An IPython kernel in a sandbox: output, results and errors of cells, interrupts, and the kernel's end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.kernel import Kernel
from nemo_gym_prorl.sandbox.sessions.kernel_pipes import DATA_LIMIT, OUTPUT_LIMIT
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxBroken, SandboxLost


pytestmark = [pytest.mark.sandbox, pytest.mark.asyncio(loop_scope="module")]


@dataclass(frozen=True)
class Case:
    """A cell with parts of its expected output, error and results; ``error`` is ``None`` for success."""

    code: str
    output: str = ""
    error: str | None = None
    shown: str | None = None


TASKS = """
import asyncio
async def bad(): raise RuntimeError('in a task')
async with asyncio.TaskGroup() as group:
    group.create_task(bad())
"""
ORDER = """
import os, subprocess, sys
print('print'); subprocess.run(['echo', 'child']); os.write(2, b'descriptor\\n'); print('error', file=sys.stderr)
!echo command
print('last')
"""
FORK = """
import os
child = os.fork()
print('child' if child == 0 else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
if child == 0:
    display('of the child')
"""
POOL = """
import multiprocessing
def square(number):
    print(f'{number} {number * number}')
with multiprocessing.Pool(2) as pool:
    pool.map(square, [2, 3])
"""
WRAPPED = """
import gc, io, sys
sys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'utf-8')
print('wrapped', flush=True)
sys.stdout = sys.__stdout__
gc.collect()
print('and back')
"""
REPLACED = """
import os
kept = os.dup(1)
os.dup2(os.open('/dev/null', os.O_WRONLY), 1)
print('seen')
!echo not
os.dup2(kept, 1);
"""
NO_REPR = "class Odd:\n    def __repr__(self): raise ValueError('no text')\nOdd()"
DISPLAY = "from IPython.display import display, clear_output, HTML\n"

CASES = {
    "value": Case("20 + 22", shown="42"),
    "shown value that fails": Case(NO_REPR, error="ValueError: no text"),
    "raised": Case("1 / 0", error="ZeroDivisionError: division by zero"),
    "no syntax": Case("x = = 1", error="SyntaxError"),
    "task group": Case(TASKS, error="ExceptionGroup"),
    "failing command of a magic": Case("%%bash\necho said\nexit 3", "said\n", error="CalledProcessError"),
    "input": Case("input('? ')", error="StdinNotImplementedError"),
    "KeyboardInterrupt": Case("raise KeyboardInterrupt", error="KeyboardInterrupt"),
    "byte that is not UTF-8": Case("print('odd', b'\\xff'.decode('utf8', 'surrogateescape'))", "odd "),
    "half a surrogate pair": Case("print('x\\ud800y')", error="surrogates not allowed"),
    "odd byte shown": Case(DISPLAY + "display(HTML(b'h\\xff'.decode('utf8', 'surrogateescape')))", shown="h\ufffd"),
    "help": Case("len?", "Return the number of items in a container"),
    "cleared output": Case(DISPLAY + "print('old')\nclear_output()\nprint('new')", "old\nnew\n"),
    "top-level await": Case("import asyncio\nawait asyncio.sleep(0)\nprint('slept')", "slept\n"),
    "thread": Case("import threading\nt = threading.Thread(target=print, args=['said'])\nt.start(); t.join()", "said"),
    "failing thread": Case("t = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()", "ZeroDivisionError"),
    "in order": Case(ORDER, "print\nchild\ndescriptor\nerror\ncommand\nlast\n"),
    "forked child": Case(FORK, "child\n0\n"),
    "forked child that exits": Case(FORK.replace("print(", "if child == 0: raise SystemExit(3)\nprint(", 1), "3\n"),
    "lines of several processes": Case(POOL, "2 4"),
    "wrapped stream": Case(WRAPPED, "wrapped\nand back\n"),
    "closed stream": Case("import sys\nsys.stdout.close()\nprint('goes on')", "goes on\n"),
    "replaced descriptor": Case(REPLACED, "seen\n"),
    "non-blocking pipe": Case("import os\nos.set_blocking(1, False)\nprint('x' * 60_000 + 'end')", "end\n"),
    "NUL": Case("print('a\\0b\\0')", "a\0b\0\n"),
    "picture": Case("from IPython.display import Image\nImage(data=b'\\x89PNG123')", shown="iVBORzEyMw=="),
    "object": Case("from IPython.display import JSON\nJSON({'a': [1]})", shown='{"a": [1]}'),
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


WAITS = {
    "loop": "while True: pass",
    "await": "import asyncio\nawait asyncio.sleep(100)",
    "lock": "import threading\nthreading.Event().wait()",
}


@pytest.mark.parametrize("code", WAITS.values(), ids=WAITS)
async def test_an_interrupt_ends_a_cell_and_keeps_what_was(code: str, kernel: Kernel) -> None:
    await kernel.run("kept = 1")
    cell = await kernel.run(f"print('begun')\n{code}", timeout_s=1.5)
    assert (cell.output, cell.timed_out, cell.died) == ("begun\n", True, False)
    assert "KeyboardInterrupt" in (cell.error or "")
    assert (await kernel.run("kept")).data == [{"text/plain": "1"}]


async def test_an_interrupt_between_cells_is_none(kernel: Kernel) -> None:
    await kernel.run("kept = 2")
    await kernel.interrupt()
    cell = await kernel.run("kept")
    assert (cell.data, cell.error) == ([{"text/plain": "2"}], None)


async def test_tasks_go_on_between_cells(kernel: Kernel) -> None:
    await kernel.run("""
import asyncio
async def count():
    for number in range(3):
        await asyncio.sleep(0.05)
        display(number)
    return "counted"
counting = asyncio.create_task(count())
""")
    await asyncio.sleep(1)
    cell = await kernel.run("await counting")
    assert [data["text/plain"] for data in cell.data] == ["0", "1", "2", "'counted'"]


async def test_a_kernel_that_is_closed_meanwhile_gives_what_there_was(kernel: Kernel) -> None:
    running = asyncio.create_task(kernel.run("print('begun')\nimport time; time.sleep(100)"))
    await asyncio.sleep(0.5)
    await kernel.close()
    cell = await running
    assert (cell.output, cell.died) == ("begun\n", True)
    with pytest.raises(CallerError, match="restart"):
        await kernel.run("1")
    await kernel.restart()


@pytest_asyncio.fixture(loop_scope="module")
async def kernel_by_way(kernel_image: Path, runtime: Runtime, way: str) -> AsyncIterator[Kernel]:
    async with (
        await Container.start(ContainerSpec(image=kernel_image), runtime) as container,
        await Kernel.start(container) as live,
    ):
        yield live


async def test_a_kernel_has_the_rights_of_any_program(kernel_by_way: Kernel) -> None:
    fields = "('Uid', 'Gid', 'Groups', 'CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb', 'NoNewPrivs', 'Seccomp:')"
    look = f"""
import os, resource
print(*(line for line in open('/proc/self/status') if line.startswith({fields})), sep='')
print(os.getcwd(), os.getpgid(0) == os.getsid(0) == os.getpid(), os.umask(0o22))
print([(name, resource.getrlimit(getattr(resource, name))) for name in sorted(dir(resource)) if 'RLIMIT' in name])
print(sorted(os.environ), [os.readlink(f'/proc/self/ns/{{name}}') for name in sorted(os.listdir('/proc/self/ns'))])
"""
    told = (await kernel_by_way.run(look)).output
    assert "APPTAINER" not in (await kernel_by_way.run("print(open('/proc/self/environ').read())")).output
    plain = await kernel_by_way._container.execute(["python3", "-c", look])
    # What a kernel sets itself.
    ours = {"PAGER", "GIT_PAGER", "MPLBACKEND"}
    cleaned = told
    for name in ours:
        cleaned = cleaned.replace(f"'{name}', ", "").replace(f", '{name}'", "")
    assert cleaned.split() == plain.stdout.split()


async def test_a_kernel_that_is_ended_says_by_whom(kernel_by_way: Kernel) -> None:
    kernel = kernel_by_way
    running = asyncio.create_task(kernel.run("print('begun', flush=True)\nwhile True: pass"))
    await asyncio.sleep(0.3)
    await kernel.interrupt()
    assert "KeyboardInterrupt" in ((await running).error or "")
    stubborn = await kernel.run(
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(100)", timeout_s=0.3
    )
    assert stubborn.timed_out
    assert stubborn.died
    with pytest.raises(SandboxBroken, match="restart"):
        await kernel.run("1")
    await kernel.restart()
    assert (await kernel.run("import os; os._exit(3)")).died
    with pytest.raises(SandboxBroken, match="restart"):
        await kernel.run("1")
    await kernel.restart()
    assert (await kernel.run("import os; os.kill(os.getpid(), 9)")).died
    with pytest.raises(SandboxLost, match="restart"):
        await kernel.run("1")
    await kernel.restart()
    assert (await kernel.run("1")).data == [{"text/plain": "1"}]


async def test_text_results_and_tracebacks_are_bounded(kernel: Kernel) -> None:
    flood = await kernel.run("for i in range(200): print('x' * 9999)", output_limit=1000)
    assert flood.omitted == 200 * 10_000 - 1000
    assert len(flood.output) < 1100
    at_once = await kernel.run("import sys; _ = sys.stdout.write('x' * (18 << 20)); sys.stdout.flush()", timeout_s=60)
    assert at_once.omitted == (18 << 20) - OUTPUT_LIMIT
    large = await kernel.run(f"from IPython.display import HTML, display; display(HTML('x' * {DATA_LIMIT})); 1")
    assert large.data == [{"text/plain": "1"}]
    assert large.omitted > DATA_LIMIT
    loop = "for i in range(9000): display(f'{i:05}' + 'x' * 1000)"  # a display that is updated
    updated = await kernel.run(f"{loop}\n'result'", timeout_s=60)
    assert updated.data[-1] == {"text/plain": "'result'"}
    assert "08999" in updated.data[-2]["text/plain"]
    assert updated.omitted > 0
    failed = await kernel.run("raise ValueError('x' * 1_000_000)", output_limit=1000)
    assert len(failed.error or "") < 1100
    assert failed.omitted > 900_000
