# SPDX-License-Identifier: Apache-2.0
"""An IPython kernel in a sandbox, spoken to directly: ZeroMQ over Unix sockets in a folder of that sandbox alone.

No port is open and no gateway stands between, so a sandbox without network can have one. The sockets lie outside of
the sandbox's own ``/tmp``, which agents like to empty. Messages are signed with a key that travels in a file that only
the sandbox's user can read; nothing is on a command line.

Every wait ends with the kernel: a dead one is reported, not waited for.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.connect import KernelConnectionInfo

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.sandbox.container import SHARED_FOLDER, Container
from nemo_gym_prorl.sandbox.link import MAX_SOCKET_PATH, Process, SandboxLost
from nemo_gym_prorl.sandbox.output import HeadTail


OUTPUT_LIMIT = 64 << 10
"""Bytes of a cell's text that are kept."""

START_TIMEOUT_S = 60.0
CELL_TIMEOUT_S = 180.0
INTERRUPT_GRACE_S = 2.0
"""How long a cell may take to end after it was interrupted; then the kernel is killed."""

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
_LOG_KEPT = 2000
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Cell:
    """What became of a cell.

    Attributes:
        output: printed text, at most the limit, with one line in place of what is left out.
        data: rich results in order, each from MIME type to content (images as base64).
        error: the traceback as plain text, or ``None``.
        timed_out: it was interrupted because its time was up.
        died: the kernel has ended; :meth:`Kernel.restart` starts another.
        omitted: bytes of text that were left out.
    """

    output: str
    data: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    timed_out: bool = False
    died: bool = False
    omitted: int = 0


class Kernel:
    """One kernel. Belongs to one event loop; one cell at a time."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._client: AsyncKernelClient | None = None
        self._process: Process | None = None
        self._log = -1

    @classmethod
    async def start(cls, container: Container, *, timeout_s: float = START_TIMEOUT_S) -> Kernel:
        """Start a kernel and wait until it answers; best done while the job waits for something else.

        Raises:
            InfrastructureError: the image has no ipykernel, or it does not answer; says what it said.
        """
        kernel = cls(container)
        await kernel.restart(timeout_s=timeout_s)
        return kernel

    async def restart(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """End the kernel, if it lives, and start a fresh one."""
        await self.close()
        name = f"k{secrets.token_hex(4)}"
        folder = self._container.shared_folder
        inside = f"{SHARED_FOLDER}/{name}"
        if len(os.fsencode(folder / f"{name}-1")) > MAX_SOCKET_PATH:
            raise InfrastructureError(f"{folder} is too long for a Unix socket; set PRORL_STATE to a shorter path")
        facts: dict[str, Any] = {f"{channel}_port": number for number, channel in enumerate(CHANNELS, 1)}
        facts |= {"transport": "ipc", "key": secrets.token_hex(32), "signature_scheme": "hmac-sha256"}
        await asyncio.to_thread(self._write_facts, folder / f"{name}.json", json.dumps({**facts, "ip": inside}))
        self._log = os.memfd_create("kernel", os.MFD_CLOEXEC)
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._process = await self._container.spawn(
                ["python3", "-m", "ipykernel_launcher", "-f", f"{inside}.json"], [null, self._log, self._log]
            )
        except CallerError as error:
            await self.close()
            raise _no_kernel(error.reason) from error
        finally:
            os.close(null)
        self._client = AsyncKernelClient()
        self._client.load_connection_info(cast(KernelConnectionInfo, {**facts, "ip": str(folder / name)}))
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_it_answers(folder / f"{name}-1")
        except (TimeoutError, SandboxLost) as error:
            begin = max(0, os.fstat(self._log).st_size - _LOG_KEPT)
            said = os.pread(self._log, _LOG_KEPT, begin).decode("utf-8", "replace")
            await self.close()
            raise _no_kernel(said.strip()) from error

    async def run(self, code: str, *, timeout_s: float = CELL_TIMEOUT_S, output_limit: int = OUTPUT_LIMIT) -> Cell:
        """Run one cell.

        Raises:
            SandboxLost: the kernel had ended before.
        """
        client, process = self._client, self._process
        if client is None or process is None or process.ended.done():
            raise SandboxLost("the kernel has ended; restart it")
        kept = HeadTail(output_limit)
        cell = Cell("", [])
        error: str | None = None
        timed_out = died = False
        request = client.execute(code, allow_stdin=False)
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    message = await self._or_death(client.get_iopub_msg())
            except TimeoutError:
                # First it is asked to stop, then it is made to.
                await self._container.signal(process, signal.SIGKILL if timed_out else signal.SIGINT)
                deadline = asyncio.get_running_loop().time() + INTERRUPT_GRACE_S
                timed_out = True
                continue
            except SandboxLost:
                died = True
                break
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    kept.add(content["text"].encode("utf-8", "surrogateescape"))
                case "execute_result" | "display_data":
                    cell.data.append(content["data"])
                case "error":
                    traceback = "\n".join(content["traceback"]) or f"{content['ename']}: {content['evalue']}"
                    error = _COLOURS.sub("", traceback)
                case "status" if content["execution_state"] == "idle":
                    break
        return Cell(kept.text(), cell.data, error, timed_out, died, kept.omitted)

    async def interrupt(self) -> None:
        """Interrupt the cell that runs, as Ctrl-C does."""
        if self._process is not None:
            await self._container.signal(self._process, signal.SIGINT)

    async def close(self) -> None:
        """End the kernel. Harmless when it has ended."""
        if self._client is not None:
            self._client.stop_channels()
            self._client = None
        if self._process is not None and not self._process.ended.done() and self._container.alive:
            await self._container.signal(self._process, signal.SIGKILL)
            await asyncio.wait([self._process.ended])
        self._process = None
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    async def __aenter__(self) -> Kernel:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    def _write_facts(self, path: Path, text: str) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            self._container.give(descriptor)

    async def _until_it_answers(self, shell_socket: Path) -> None:
        """Wait for its sockets, then ask who it is until it answers on both channels that cells use.

        A subscription takes effect some time after it was asked for, and what is published before is lost.
        """
        assert self._client is not None
        while not await asyncio.to_thread(_is_socket, shell_socket):
            await self._or_death(asyncio.sleep(0.02))
        # No heartbeat: its socket pair takes a Unix socket's silence for the kernel's death.
        self._client.start_channels(hb=False, stdin=False)
        while True:
            request = self._client.kernel_info()
            while True:
                try:
                    async with asyncio.timeout(0.3):
                        message = await self._or_death(self._client.get_iopub_msg())
                except TimeoutError:
                    break
                if message["parent_header"].get("msg_id") == request:
                    return

    async def _or_death(self, waiting: Any) -> Any:
        """Wait for ``waiting``, or raise if the kernel ends before."""
        assert self._process is not None
        task = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait([task, self._process.ended], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise SandboxLost("the kernel has ended")
        finally:
            task.cancel()


def _no_kernel(said: str) -> InfrastructureError:
    return InfrastructureError(
        f"no kernel answers in the sandbox; it needs python3 with ipykernel in the image: {said}",
        kind=FailureKind.PROVIDER_UNAVAILABLE,
    )


def _is_socket(path: Path) -> bool:
    # The folder is the sandbox's to write in: a link there may lead to somebody else's socket.
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False
