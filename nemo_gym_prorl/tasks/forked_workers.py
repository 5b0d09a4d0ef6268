# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Worker processes that run jobs on untrusted text, each job in a forked child with CPU and memory limits.

Libraries that parse a policy's text may hang, exhaust memory or crash. A worker imports such a module once (``python
-m nemo_gym_prorl.tasks.forked_workers MODULE``) and forks a child for each job. So a job cannot block the event loop
or affect the next job, and no job repeats the imports. The module defines ``warm_up()``, called once in the
worker, and ``answer(job)``, called in the child, which returns JSON.

Jobs and replies are JSON lines on standard input and output. A worker exits when its input closes, so it outlives its
owner by at most one child's CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NoReturn

from nemo_gym_prorl.processes import interpreter_environ


START_TIMEOUT_S = 120.0
"""Seconds for a worker's imports on a loaded machine."""

STARVED_S = 120.0
"""Seconds that a job may take beyond its CPU limit, for waiting for a processor; more is the machine's fault."""

MAX_REPLY_BYTES = 64 << 20
"""Maximum bytes of a reply: enough for the statuses of some 500,000 tests."""


class JobLost(Exception):
    """A job without a reply.

    Attributes:
        by_machine: whether the machine caused the loss; otherwise the content of the job may be the cause.
        timed_out: whether the job exceeded its CPU time, or no reply came in time.
    """

    def __init__(self, why: str, *, by_machine: bool, timed_out: bool = False) -> None:
        super().__init__(why)
        self.by_machine = by_machine
        self.timed_out = timed_out


class WorkerPool:
    """Pool of worker processes that run the jobs of one module. A process starts with a job, also after a lost one.

    Args:
        module: full name of a module with ``warm_up`` and ``answer``.
        count: number of concurrent jobs.
    """

    def __init__(self, module: str, count: int = 1) -> None:
        self._workers = [_Worker(module) for _ in range(count)]
        self._free: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._free.put_nowait(worker)

    async def ask(self, job: Mapping[str, Any], *, cpu_s: int, memory_mib: int, file_mib: int = 0) -> Any:
        """Run a job in a child of a free worker and return its reply.

        Args:
            job: JSON object.
            cpu_s: CPU time limit in seconds.
            memory_mib: limit on the child's address space in MiB, imports included.
            file_mib: limit on the size of a file that the child writes, in MiB; 0 forbids writing.

        Raises:
            JobLost: the job has no reply.
        """
        bounds = {"cpu_s": cpu_s, "memory_mib": memory_mib, "file_mib": file_mib}
        line = await asyncio.to_thread(json.dumps, {"job": job, **bounds})
        worker = await self._free.get()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await worker.start()
            async with asyncio.timeout(cpu_s + STARVED_S):
                reply = await worker.ask(line)
        except TimeoutError as error:
            await worker.end()
            raise JobLost(f"no reply within {cpu_s + STARVED_S:g} s", by_machine=True, timed_out=True) from error
        except (OSError, EOFError, ValueError) as error:
            await worker.end()
            raise JobLost(f"the worker process ended: {type(error).__name__} {error}", by_machine=True) from error
        except BaseException:
            await worker.end()  # the worker's next line would be the reply to this job
            raise
        finally:
            self._free.put_nowait(worker)
        if "reply" in reply:
            return reply["reply"]
        raise _loss(reply["exit_code"], reply["error"])

    async def aclose(self) -> None:
        """End the workers; running jobs are lost."""
        await asyncio.gather(*(worker.end() for worker in self._workers))


def _loss(exit_code: int, error: str) -> JobLost:
    match -exit_code:
        case signal.SIGXCPU:
            return JobLost("the job exceeded its CPU time", by_machine=False, timed_out=True)
        case signal.SIGKILL:
            return JobLost("the job's process was killed by another process or by the kernel", by_machine=True)
    return JobLost(f"the job failed: {error or f'exit code {exit_code}'}", by_machine=False)


class _Worker:
    def __init__(self, module: str) -> None:
        self._module = module
        self._process: Process | None = None

    async def start(self) -> None:
        """Start the process unless it runs, and wait for its imports; raises EOFError if the process ends first."""
        if self._process is not None and self._process.returncode is None:
            return
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-s", "-P", "-m", __name__, self._module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=MAX_REPLY_BYTES,
            # The environment has no secrets, and a fixed hash seed, since sympy orders symbols by hash.
            env=interpreter_environ() | {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
            cwd="/",
            start_new_session=True,
        )
        await self._line(self._process)

    async def ask(self, line: str) -> dict[str, Any]:
        """Return the worker's reply to a job; raises OSError or EOFError if the worker ended."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(line.encode() + b"\n")
        await process.stdin.drain()
        return await self._line(process)

    async def end(self) -> None:
        """Kill the worker and the child that runs its job."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    @staticmethod
    async def _line(process: Process) -> dict[str, Any]:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError("end of output")
        reply = json.loads(line)
        if not isinstance(reply, dict):
            raise ValueError("the reply is not a JSON object")
        return reply


def serve(module: ModuleType) -> None:
    """Run the jobs on standard input, one child at a time, until the input ends; called in the worker process."""
    module.warm_up()
    gc.freeze()
    _write({"ready": True})
    for line in sys.stdin.buffer:
        _write(_run_in_child(module, json.loads(line)))


def _run_in_child(module: ModuleType, asked: dict[str, Any]) -> dict[str, Any]:
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        os.close(receiving)
        try:
            _answer_and_exit(module, asked, sending)
        finally:
            os._exit(1)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        said = pipe.read(MAX_REPLY_BYTES)
    _pid, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code or not said:
        return {"exit_code": code, "error": said.decode(errors="replace")}
    return {"reply": json.loads(said)}


def _answer_and_exit(module: ModuleType, asked: dict[str, Any], sending: int) -> NoReturn:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    memory, size = asked["memory_mib"] << 20, asked["file_mib"] << 20
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = int(used.ru_utime + used.ru_stime) + asked["cpu_s"]
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open(sending, "wb") as pipe:
        try:
            reply = json.dumps(module.answer(asked["job"])).encode()
        except Exception as error:  # libraries may raise any exception on untrusted text
            pipe.write(type(error).__name__.encode())
            pipe.flush()
            os._exit(1)
        pipe.write(reply)
    os._exit(0)


def _write(reply: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve(importlib.import_module(sys.argv[1]))
