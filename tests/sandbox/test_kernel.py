# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""An IPython kernel in a real container without network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.kernel import Kernel
from nemo_gym_prorl.sandbox.sessions.kernel_pipes import DATA_LIMIT, OUTPUT_LIMIT
from nemo_gym_prorl.sandbox.supervisor.errors import SandboxBroken, SandboxLost


pytestmark = [pytest.mark.sandbox, pytest.mark.usefixtures("way")]

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="


@pytest_asyncio.fixture
async def kernel(kernel_image: Path, runtime: Runtime) -> AsyncIterator[Kernel]:
    async with (
        await Container.start(ContainerSpec(image=kernel_image), runtime) as container,
        await Kernel.start(container) as live,
    ):
        yield live


async def test_a_kernel_is_told_nothing_of_the_host(kernel: Kernel) -> None:
    told = (await kernel.run("print(open('/proc/self/environ').read())")).output
    assert "PATH=" in told
    assert "APPTAINER" not in told


async def test_a_kernel_has_the_rights_of_any_program(kernel: Kernel) -> None:
    fields = "('Uid', 'Gid', 'Groups', 'CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb', 'NoNewPrivs', 'Seccomp:')"
    look = f"""
import os, resource
print(*(line for line in open('/proc/self/status') if line.startswith({fields})), sep='')
print(os.getcwd(), os.getpgid(0) == os.getsid(0) == os.getpid(), os.umask(0o22))
print([(name, resource.getrlimit(getattr(resource, name))) for name in sorted(dir(resource)) if 'RLIMIT' in name])
print(sorted(os.environ), [os.readlink(f'/proc/self/ns/{{name}}') for name in sorted(os.listdir('/proc/self/ns'))])
"""
    told = (await kernel.run(look)).output
    plain = await kernel._container.execute(["python3", "-c", look])
    # What a kernel sets itself.
    ours = {"PAGER", "GIT_PAGER", "MPLBACKEND"}
    cleaned = told
    for name in ours:
        cleaned = cleaned.replace(f"'{name}', ", "").replace(f", '{name}'", "")
    assert cleaned.split() == plain.stdout.split()


async def test_a_restarted_kernel_keeps_nothing(kernel: Kernel) -> None:
    await kernel.run("x = 1")
    await kernel.restart()
    assert "NameError" in ((await kernel.run("x")).error or "")


async def test_cells_share_state_and_say_what_happened(kernel: Kernel) -> None:
    assert (await kernel.run("x = 20\nprint('é', x)")).output == "é 20\n"
    assert (await kernel.run("x + 22")).data == [{"text/plain": "42"}]
    failed = await kernel.run("print('before')\n1 / 0")
    assert failed.output == "before\n"
    assert "ZeroDivisionError: division by zero" in (failed.error or "")
    assert (await kernel.run("x = = 1")).error
    assert (await kernel.run("import sys; print('err', file=sys.stderr)")).output == "err\n"
    image = await kernel.run(
        f"import base64\nfrom IPython.display import Image, display\ndisplay(Image(base64.b64decode('{PIXEL}')))"
    )
    assert image.data[0]["image/png"].strip() == PIXEL
    assert (await kernel.run("print(x)")).output == "20\n"


async def test_output_is_bounded(kernel: Kernel) -> None:
    flood = await kernel.run("for i in range(200): print('x' * 9999)", output_limit=1000)
    assert flood.omitted == 200 * 10_000 - 1000
    assert len(flood.output) < 1100


async def test_output_of_one_write_is_bounded(kernel: Kernel) -> None:
    cell = await kernel.run("import sys; _ = sys.stdout.write('x' * (18 << 20)); sys.stdout.flush()", timeout_s=60)
    assert cell.omitted == (18 << 20) - OUTPUT_LIMIT
    assert not set(cell.output.split("[...")[0]) - set("x\n")


async def test_time_limit_interrupt_and_death(kernel: Kernel) -> None:
    await kernel.run("kept = 1")
    slow = await kernel.run("print('begun', flush=True)\nimport time; time.sleep(100)", timeout_s=0.5)
    assert slow.timed_out
    assert slow.output == "begun\n"
    assert "KeyboardInterrupt" in (slow.error or "")
    assert (await kernel.run("kept")).data == [{"text/plain": "1"}]
    running = asyncio.create_task(kernel.run("while True: pass"))
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


async def test_a_flood_of_messages_does_not_hide_the_end(kernel: Kernel) -> None:
    flood = "for i in range(2000): print(i, flush=True)\nfrom IPython.display import display\n"
    flood += "for i in range(500): display({'text/plain': 'x' * 40_000}, raw=True)"
    cell = await kernel.run(flood, timeout_s=60)
    assert not cell.timed_out
    assert sum(len(data["text/plain"]) for data in cell.data) <= DATA_LIMIT
    assert (await kernel.run("1")).data == [{"text/plain": "1"}]


async def test_rich_results_and_tracebacks_are_bounded(kernel: Kernel) -> None:
    large = await kernel.run(f"from IPython.display import HTML, display; display(HTML('x' * {DATA_LIMIT})); 1")
    assert large.data == [{"text/plain": "1"}]
    assert large.omitted > DATA_LIMIT
    failed = await kernel.run("raise ValueError('x' * 1_000_000)", output_limit=1000)
    assert len(failed.error or "") < 1100
    assert failed.omitted > 900_000


async def test_cells_take_turns_and_one_that_nobody_waits_for_is_interrupted(kernel: Kernel) -> None:
    cells = await asyncio.gather(*(kernel.run(f"import time; time.sleep(0.05); print({n})") for n in range(4)))
    assert [cell.output for cell in cells] == ["0\n", "1\n", "2\n", "3\n"]
    left = asyncio.create_task(kernel.run("while True: pass"))
    await asyncio.sleep(0.2)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert (await kernel.run("print('free')", timeout_s=20)).output == "free\n"


async def test_a_cleaned_tmp_does_not_cut_it_off(kernel: Kernel) -> None:
    await kernel.run("import os; os.system('rm -rf /tmp/* /tmp/.*')")
    assert (await kernel.run("1")).data == [{"text/plain": "1"}]


async def test_an_image_without_a_kernel_is_said_to_be_one(container: Container) -> None:
    with pytest.raises(InfrastructureError, match="IPython"):
        await Kernel.start(container)
