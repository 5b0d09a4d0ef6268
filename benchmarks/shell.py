# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sandboxes: one shell action, starting and ending a sandbox, many at once, and what is left afterwards.

Every peer runs the same ``echo`` the way its users run it: NeMo Gym's ``apptainer`` provider in a container of the
same image, SWE-ReX's local bash session and a tmux pane on the bare machine, which flatters those two.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path

from jupyter_client import AsyncKernelClient
from nemo_gym.sandbox.providers.apptainer import ApptainerProvider
from nemo_gym.sandbox.providers.base import SandboxSpec

from benchmarks import processes
from benchmarks.report import Figure, publish
from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.images.building.default import DEFAULT, KERNEL, ensure_image
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime
from nemo_gym_prorl.sandbox.sessions.jupyter.kernel import Kernel
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from nemo_gym_prorl.sandbox.supervisor.storage import state_dir


ECHO = "echo hello"

PEER_ATTEMPTS = 3
"""A peer that fails as often is left out."""

Action = Callable[[], Awaitable[str]]


async def our_shell(image: Path, runtime: Runtime) -> AsyncIterator[Action]:
    """A shell session of ours."""
    container = await Container.start(ContainerSpec(image=image), runtime)
    async with container, await Shell.start(container) as shell:

        async def action() -> str:
            return (await shell.run(ECHO)).output

        yield action


async def our_exec(image: Path, runtime: Runtime) -> AsyncIterator[Action]:
    """A command of ours without a shell session."""
    async with await Container.start(ContainerSpec(image=image), runtime) as container:

        async def action() -> str:
            return (await container.run(ECHO)).stdout

        yield action


async def gym_apptainer(image: Path, _runtime: Runtime) -> AsyncIterator[Action]:
    """NeMo Gym's own provider."""
    provider = ApptainerProvider(create={"extra_start_args": ["--writable-tmpfs"]})
    handle = await provider.create(SandboxSpec(image=str(image)))

    async def action() -> str:
        return (await provider.exec(handle, ECHO)).stdout or ""

    try:
        yield action
    finally:
        await provider.close(handle)


async def swe_rex(_image: Path, _runtime: Runtime) -> AsyncIterator[Action]:
    """SWE-ReX's session, without a container."""
    from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
    from swerex.runtime.local import LocalRuntime

    runtime = LocalRuntime()
    await runtime.create_session(CreateBashSessionRequest())

    async def action() -> str:
        return (await runtime.run_in_session(BashAction(command=ECHO))).output

    try:
        yield action
    finally:
        await runtime.close()


async def tmux(_image: Path, _runtime: Runtime) -> AsyncIterator[Action]:
    """A tmux pane that is typed into and captured until its mark is to be seen, without a container."""
    base = ["tmux", "-L", f"prorl-bench-{os.getpid()}"]
    await _run([*base, "new-session", "-d", "-x", "200", "-y", "50", "bash", "--norc", "--noprofile"])
    count = 0

    async def action() -> str:
        nonlocal count
        count += 1
        await _run([*base, "send-keys", f"{ECHO}; echo end-$(({count}))-", "Enter"])
        while f"\nend-{count}-" not in (seen := await _run([*base, "capture-pane", "-p", "-S", "-20"])):
            pass
        return seen

    try:
        yield action
    finally:
        await _run([*base, "kill-server"])


async def _run(argv: list[str]) -> str:
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    return output.decode()


async def latencies(action: Action, count: int) -> list[float]:
    """Milliseconds of each call, sorted; what comes back is checked."""
    taken = []
    for _ in range(count):
        begin = time.perf_counter()
        answer = await action()
        taken.append((time.perf_counter() - begin) * 1e3)
        assert "hello" in answer
    return sorted(taken)


def quantile(ordered: list[float], share: float) -> float:
    """The value below which ``share`` of them lie."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def actions(image: Path, runtime: Runtime, quick: bool) -> list[Figure]:
    """One action, ours and theirs."""
    count = 300 if quick else 2000
    subjects = {"ours": (our_shell, count), "our exec": (our_exec, count // 10), "Gym apptainer": (gym_apptainer, 30)}
    if find_spec("swerex"):
        subjects["SWE-ReX"] = (swe_rex, 30)
    if shutil.which("tmux"):
        subjects["tmux"] = (tmux, 100)
    middle, late = {}, {}
    for name, (subject, repeats) in subjects.items():
        for _attempt in range(PEER_ATTEMPTS):
            try:
                async with contextlib.asynccontextmanager(subject)(image, runtime) as action:
                    await latencies(action, 3)
                    ordered = await latencies(action, repeats)
            except Exception as error:
                # SWE-ReX gives up on a busy machine, for one.
                if name.startswith("our"):
                    raise
                print(f"{name} failed: {error}")
                continue
            middle[name], late[name] = quantile(ordered, 0.5), quantile(ordered, 0.99)
            break
    p50, p99 = middle.pop("ours"), late.pop("ours")
    return [
        Figure("shell action, p50", p50, "ms", goal="<= 1", peers=middle),
        Figure("shell action, p99", p99, "ms", goal="<= 5", peers=late),
        Figure("shell action, times faster than Gym's provider", middle["Gym apptainer"] / p50, "x", goal=">= 80"),
    ]


async def starts(image: Path, runtime: Runtime, quick: bool) -> list[Figure]:
    """From nothing to the first answer, and the end."""
    theirs = []
    first, last = await cold_starts(image, runtime, 10 if quick else 40)
    provider = ApptainerProvider(create={"extra_start_args": ["--writable-tmpfs"]})
    for _ in range(3 if quick else 10):
        begin = time.perf_counter()
        handle = await provider.create(SandboxSpec(image=str(image)))
        await provider.exec(handle, ECHO)
        theirs.append((time.perf_counter() - begin) * 1e3)
        await provider.close(handle)
    peers = {"Gym apptainer": quantile(sorted(theirs), 0.5)}
    return [
        Figure("cold start to first answer, p50", quantile(first, 0.5), "ms", goal="<= 100", peers=peers),
        Figure("end, proven, p50", quantile(last, 0.5), "ms"),
    ]


async def cold_starts(image: Path, runtime: Runtime, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds from nothing to the first answer, and of each end, both sorted."""
    first, last = [], []
    for _ in range(count):
        begin = time.perf_counter()
        container = await Container.start(ContainerSpec(image=image), runtime)
        await container.run(ECHO)
        first.append((time.perf_counter() - begin) * 1e3)
        begin = time.perf_counter()
        await container.close()
        last.append((time.perf_counter() - begin) * 1e3)
    return sorted(first), sorted(last)


async def sif_starts(image: Path, runtime: Runtime, quick: bool) -> list[Figure]:
    """The same from one file, which is mounted with FUSE; left out where that can't be had."""
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        sif = Path(folder, "image.sif")
        await _run([str(runtime.path), "--silent", "build", str(sif), str(image)])
        try:
            first, _last = await cold_starts(sif, runtime, 10 if quick else 40)
        except InfrastructureError as error:
            print(f"a SIF can't be started here: {error}")
            return []
    return [Figure("cold start from a SIF to first answer, p50", quantile(first, 0.5), "ms", goal="<= 250")]


async def cells(_image: Path, runtime: Runtime, quick: bool) -> list[Figure]:
    """A kernel's start in a fresh sandbox, and one cell in it."""
    image = await asyncio.to_thread(ensure_image, KERNEL, print)
    started = []
    for _ in range(5 if quick else 30):
        async with await Container.start(ContainerSpec(image=image), runtime) as container:
            begin = time.perf_counter()
            async with await Kernel.start(container):
                started.append((time.perf_counter() - begin) * 1e3)
    async with (
        await Container.start(ContainerSpec(image=image), runtime) as container,
        await Kernel.start(container) as kernel,
    ):

        async def action() -> str:
            return (await kernel.run("print('hello')")).output

        ordered = await latencies(action, 50 if quick else 500)
        theirs = await jupyter_client_cells(container, 50 if quick else 500)
    middle, late = ({"jupyter_client": quantile(theirs, part)} for part in (0.5, 0.99))
    return [
        Figure("kernel cell, p50", quantile(ordered, 0.5), "ms", goal="<= 3", peers=middle),
        Figure("kernel cell, p99", quantile(ordered, 0.99), "ms", peers=late),
        Figure("kernel start, p50", quantile(sorted(started), 0.5), "ms", goal="<= 40"),
    ]


async def jupyter_client_cells(container: Container, repeats: int) -> list[float]:
    """Milliseconds of the same cell by ``jupyter_client``'s own client, over the same sockets of the same kernel."""
    file = max(container.shared_folder.glob("k*.json"), key=lambda path: path.stat().st_mtime)
    facts = json.loads(file.read_text())
    client = AsyncKernelClient()
    client.load_connection_info({**facts, "ip": str(container.shared_folder / Path(facts["ip"]).name)})
    client.start_channels(stdin=False, hb=False)
    said: list[str] = []

    async def action() -> str:
        said.clear()
        await client.execute_interactive(
            "print('hello')",
            allow_stdin=False,
            output_hook=lambda message: said.append(message["content"].get("text", "")),
        )
        return "".join(said)

    try:
        await client.kernel_info(reply=True)
        return await latencies(action, repeats)
    finally:
        client.stop_channels()


async def together(image: Path, runtime: Runtime, quick: bool) -> list[Figure]:
    """Shells that wait at once, and sandboxes that live at once."""
    alive = 20 if quick else 200
    gate = asyncio.Semaphore(4)

    async def start() -> Container:
        async with gate:
            return await Container.start(ContainerSpec(image=image), runtime)

    containers = await asyncio.gather(*(start() for _ in range(alive)))
    memory = processes.memory_mib(processes.below(os.getpid()) - {os.getpid()}) / alive
    shells = await asyncio.gather(*(Shell.start(containers[number % alive]) for number in range(64)))
    begin = time.perf_counter()
    await asyncio.gather(*(shell.run("sleep 0.5") for shell in shells))
    seconds = time.perf_counter() - begin
    await asyncio.gather(*(shell.close() for shell in shells))
    answers = await asyncio.gather(*(container.run(ECHO) for container in containers))
    assert all(answer.stdout == "hello\n" for answer in answers)
    await asyncio.gather(*(container.close() for container in containers))
    return [
        Figure("64 shells, each sleep 0.5", seconds, "s", goal="<= 1"),
        Figure("sandboxes alive at once", alive, "", goal=None if quick else ">= 200"),
        Figure("memory of each", memory, "MiB"),
    ]


async def cycles(image: Path, runtime: Runtime, quick: bool) -> list[Figure]:
    """Create, use, destroy, over and over: what there is more of afterwards."""
    count = 20 if quick else 1000
    gate = asyncio.Semaphore(4)

    async def cycle() -> None:
        async with gate:
            container = await Container.start(ContainerSpec(image=image), runtime)
            async with container, await Shell.start(container) as shell:
                assert (await shell.run(f"{ECHO} > /tmp/file; cat /tmp/file")).output == "hello\n"

    await cycle()
    before = _counts()
    begin = time.perf_counter()
    await asyncio.gather(*(cycle() for _ in range(count)))
    seconds = time.perf_counter() - begin
    more = {name: after - before[name] for name, after in _counts().items()}
    left = [Figure(f"{name} more after {count} cycles", value, "", goal="<= 0") for name, value in more.items()]
    return [Figure("create, use, destroy, 4 at a time", count / seconds, "1/s"), *left]


def _counts() -> dict[str, int]:
    """Processes and mounts of ours, open files of this process and the supervisor, and files in the state folder."""
    me = os.getpid()
    supervisor = processes.supervisor_of(me)
    return {
        "processes": len(processes.below(me)),
        "mounts": len(Path("/proc/self/mounts").read_text().splitlines()),
        "open files": sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (me, supervisor)),
        "files": len(list(state_dir.state_root().rglob("*"))),
    }


async def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats; under a minute; writes nothing")
    quick = parser.parse_args().quick
    processes.subreaper()
    runtime = ensure_runtime(print)
    runtime.activate()
    image = ensure_image(DEFAULT, print)
    figures = []
    for part in (actions, cells, starts, sif_starts, together, cycles):
        figures += await part(image, runtime, quick)
        print(f"{part.__name__}: done", flush=True)
    publish("shell", figures, packages=("nemo-gym", "swe-rex"), quick=quick)


if __name__ == "__main__":
    asyncio.run(main())
