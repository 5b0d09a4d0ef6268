# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A rollout service for the tests that kill it and what it started: the real pipeline and job API, real sandboxes.

``rollouts.py DEFAULT_IMAGE KERNEL_IMAGE`` prints its URL. Each rollout has a sandbox with a shell and a kernel, acts
in both by turns, and is scored in a fresh sandbox. ``/victims`` says which processes there are to kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from nemo_gym_prorl.failures import Failure, FailureKind, InfrastructureError, Stage
from nemo_gym_prorl.rollout.api.routes import PipelineMetrics, rollout_router
from nemo_gym_prorl.rollout.handler import Environments
from nemo_gym_prorl.rollout.job import Job, Outcome, Trajectory, Verdict, failure_state
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.settings import PoolSizes
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime, require_runtime
from nemo_gym_prorl.sandbox.sessions.kernel import Kernel
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from nemo_gym_prorl.sandbox.supervisor import client, state_dir
from tests.rollout.handlers import FastSettings
from tests.rollout.serving import serve


@dataclass
class Session:
    """What a rollout holds while it runs."""

    container: Container
    shell: Shell
    kernel: Kernel


class Busy:
    """The handler: ``row["turns"]`` turns of a shell action and a cell, and their results checked."""

    name = "busy"

    def __init__(self, default: Path, kernel: Path, runtime: Runtime) -> None:
        self._default, self._kernel, self._runtime = default, kernel, runtime
        self.sessions: list[Session] = []

    async def init(self, job: Job) -> Session:
        container = await Container.start(ContainerSpec(image=self._kernel), self._runtime)
        try:
            shell, kernel = await Shell.start(container), await Kernel.start(container)
        except BaseException:
            await container.close()
            raise
        session = Session(container, shell, kernel)
        self.sessions.append(session)
        return session

    async def run(self, job: Job, session: Session) -> Trajectory:
        job.trajectory = Trajectory({"output": []})
        await session.shell.run("(setsid sh -c 'trap \"\" HUP TERM; sleep 1000' >/dev/null 2>&1 &)")
        for turn in range(job.row["turns"]):
            action = await session.shell.run(f"head -c 300000 /dev/urandom > /tmp/{turn}; sleep 0.05; echo {turn}")
            if action.exited:
                raise InfrastructureError("the shell died", kind=FailureKind.SESSION_LOST)
            cell = await session.kernel.run(f"import time; time.sleep(0.05); print({turn})")
            if cell.died:
                raise InfrastructureError("the kernel died", kind=FailureKind.SESSION_LOST)
            job.trajectory.response["output"].append((action.output, cell.output))
        return job.trajectory

    async def release(self, job: Job, session: Session) -> None:
        self.sessions.remove(session)
        await session.kernel.close()
        await session.shell.close()
        await session.container.close()

    async def eval(self, job: Job, trajectory: Trajectory) -> Verdict:
        wanted = [(f"{turn}\n", f"{turn}\n") for turn in range(job.row["turns"])]
        async with await Container.start(ContainerSpec(image=self._default), self._runtime) as fresh:
            empty = (await fresh.run("ls /tmp; sleep 0.1")).stdout == ""
        return Verdict(1.0, {"reward": 1.0, "as_told": empty and trajectory.response["output"] == wanted})

    def on_failure(self, job: Job, stage: Stage | None, failure: Failure) -> Outcome:
        return Outcome(failure_state(failure), {}, failure=failure)

    def victims(self) -> dict[str, list[tuple[int, int]]]:
        """Numbers and start times of what can be killed, by kind."""
        supervisor = client.own_supervisor
        inits = [] if supervisor is None else [space.init for space in state_dir.pid_namespaces_of(supervisor.folder)]
        found = {
            "server": [os.getpid()],
            "supervisor": [] if supervisor is None else [supervisor.popen.pid],
            "init": inits,
            "shell": [session.shell._bash.pid for session in self.sessions if session.shell._bash],
            "kernel": [session.kernel._process.pid for session in self.sessions if session.kernel._process],
            "helper": [] if supervisor is None else state_dir.helpers_of(supervisor.folder),
            "launcher": [] if supervisor is None else launchers(supervisor.popen.pid, inits),
        }
        return {
            kind: [(pid, started) for pid in pids if (started := state_dir.start_time(pid))]
            for kind, pids in found.items()
        }


def launchers(supervisor: int, inits: list[int]) -> list[int]:
    """What the supervisor has forked for itself, for a while or for ever: not what it has started in sandboxes."""
    found = []
    # Some end while we look.
    with contextlib.suppress(OSError):
        for pid in map(int, Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()):
            with contextlib.suppress(OSError):
                if pid not in inits and Path(f"/proc/{pid}/ns/pid").samefile("/proc/self/ns/pid"):
                    found.append(pid)
    return found


async def main() -> None:
    handler = Busy(Path(sys.argv[1]), Path(sys.argv[2]), require_runtime())
    settings = FastSettings(stages=PoolSizes(init=2, ready=1, run=3, eval=2), release_timeout_s=10.0, max_attempts=2)
    pipeline = Pipeline(Environments.of(handler), settings)
    app = FastAPI()
    app.include_router(rollout_router(pipeline, PipelineMetrics(pipeline)))

    @app.get("/victims")
    def victims() -> dict[str, Any]:
        return handler.victims()

    async with serve(app) as url:
        print(url, flush=True)
        await asyncio.sleep(1000)


asyncio.run(main())
