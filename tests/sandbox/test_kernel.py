# SPDX-License-Identifier: Apache-2.0
"""An IPython kernel in a real container without network."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.cache import silent
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.images import ensure_kernel_image
from nemo_gym_prorl.sandbox.kernel import Kernel
from nemo_gym_prorl.sandbox.link import SandboxLost
from nemo_gym_prorl.sandbox.runtime import Runtime


pytestmark = pytest.mark.sandbox

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="


@pytest.fixture(scope="module")
def kernel_image(image: Path) -> Path:
    return ensure_kernel_image(silent)


@pytest_asyncio.fixture
async def kernel(kernel_image: Path, runtime: Runtime) -> AsyncIterator[Kernel]:
    container = await Container.start(ContainerSpec(image=kernel_image), runtime)
    async with container, await Kernel.start(container) as live:
        yield live


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
    with pytest.raises(SandboxLost):
        await kernel.run("1")
    await kernel.restart()
    assert (await kernel.run("import os; os._exit(3)")).died
    await kernel.restart()
    assert (await kernel.run("1")).data == [{"text/plain": "1"}]


async def test_a_cleaned_tmp_does_not_cut_it_off(kernel: Kernel) -> None:
    await kernel.run("import os; os.system('rm -rf /tmp/* /tmp/.*')")
    assert (await kernel.run("1")).data == [{"text/plain": "1"}]


async def test_its_sockets_are_its_sandboxes_own(kernel: Kernel, container: Container) -> None:
    folder = kernel._container.shared_folder
    assert folder.stat().st_mode & 0o777 == 0o700
    sockets = [entry for entry in os.scandir(folder) if entry.name.endswith("-1")]
    assert len(sockets) == 1
    assert (await container.run("ls -A /.prorl")).stdout == ""


async def test_an_image_without_a_kernel_is_said_to_be_one(container: Container) -> None:
    with pytest.raises(InfrastructureError, match="ipykernel"):
        await Kernel.start(container)
