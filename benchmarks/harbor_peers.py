# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Seconds and core-seconds of sandboxes and of commands in the image of a Harbor task, for one subject per run.

``python -m benchmarks.harbor_peers SUBJECT IMAGE`` prints a line of JSON. Subjects:

- ``ours``: this package.
- ``exec``: a new ``apptainer exec`` for each command, which keeps no files from one command to the next.
- ``harbor``: Harbor's own Apptainer environment, with a SIF file as image. Requires Harbor in the interpreter, this
  repository in ``PYTHONPATH`` and a program ``singularity`` in ``PATH``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

from benchmarks.processes import core_seconds, subreaper


Run = Callable[[str], Awaitable[str]]

COMMAND = "echo hello"
COMMANDS_EACH = 5
"""Commands in each of the concurrent sandboxes."""


async def ours(image: Path) -> AsyncIterator[Run]:
    from nemo_gym_prorl.sandbox.container import Container, ContainerSpec

    async with await Container.start(ContainerSpec(image=image)) as container:

        async def run(command: str) -> str:
            return (await container.run(command)).stdout

        yield run


async def fresh_exec(image: Path) -> AsyncIterator[Run]:
    from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime

    runtime = require_runtime()

    async def run(command: str) -> str:
        argv = [runtime.path, "exec", "--containall", "--writable-tmpfs", image, "bash", "-c", command]
        pipes = {"stdin": asyncio.subprocess.DEVNULL, "stdout": asyncio.subprocess.PIPE}
        process = await asyncio.create_subprocess_exec(*argv, **pipes, env=runtime.environ())
        return (await process.communicate())[0].decode()

    yield run


async def harbor(image: Path) -> AsyncIterator[Run]:
    from harbor.environments.singularity.singularity import SingularityEnvironment
    from harbor.models.task.config import EnvironmentConfig
    from harbor.models.trial.paths import TrialPaths

    with tempfile.TemporaryDirectory() as folder:
        (files := Path(folder, "environment")).mkdir()
        config = EnvironmentConfig(docker_image=str(image))
        paths = TrialPaths(Path(folder, "trial"))
        environment = SingularityEnvironment(files, "task", secrets.token_hex(4), paths, config)

        async def run(command: str) -> str:
            return (await environment.exec(command)).stdout or ""

        try:
            await environment.start(force_build=False)
            yield run
        finally:
            await environment.stop(delete=True)


SUBJECTS = {"ours": ours, "exec": fresh_exec, "harbor": harbor}


async def measure(subject: str, image: Path, starts: int, commands: int, at_once: int) -> dict[str, object]:
    """Return the figures of one subject: mean seconds and core-seconds of a start and of a command, and those of
    ``at_once`` concurrent sandboxes together."""
    opening = contextlib.asynccontextmanager(SUBJECTS[subject])
    found: dict[str, object] = {"subject": subject, "image": str(image), "load": os.getloadavg()[0]}

    @contextlib.contextmanager
    def timed(name: str, count: int) -> Iterator[None]:
        begin, before = time.perf_counter(), core_seconds(os.getpid())
        yield
        found[f"{name}_s"] = (time.perf_counter() - begin) / count
        found[f"{name}_core_s"] = (core_seconds(os.getpid()) - before) / count

    async def use(run: Run, count: int) -> None:
        for _ in range(count):
            assert "hello" in await run(COMMAND)

    async def one() -> None:
        async with opening(image) as run:
            await use(run, COMMANDS_EACH)

    async with contextlib.AsyncExitStack() as stack:
        run = await stack.enter_async_context(opening(image))
        await use(run, 1)  # warms up
        with timed("start", starts):
            for _ in range(starts):
                run = await stack.enter_async_context(opening(image))
                await use(run, 1)
        with timed("command", commands):
            await use(run, commands)
    with timed("at_once", 1):
        ended = await asyncio.gather(*(one() for _ in range(at_once)), return_exceptions=True)
    failed = [f"{error!r}"[:200] for error in ended if error is not None]
    return {**found, "at_once": at_once, "failed": len(failed), "why": failed[:1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("image", type=Path)
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--commands", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=64)
    options = parser.parse_args()
    subreaper()
    print(json.dumps(asyncio.run(measure(**vars(options)))))


if __name__ == "__main__":
    main()
