# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a task asks of the sandbox that it is handed. Protocols only: tasks do not know who provides sandboxes.

Every sandbox runs commands and takes files. One that :class:`HasSessions` also has a shell and a Python kernel that
live from one call to the next; a task must do without where a provider has none.

Trouble with machines is an :class:`InfrastructureError` of whatever a sandbox or session is asked. A session that
ended while its sandbox lives was ended from inside. A sandbox that ended because what ran in it used up its disk says
so with an :class:`AgentError`, whatever it is asked; one that has no process left for what it is asked, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Protocol, runtime_checkable

from nemo_gym_prorl.session_results import CellResult, ShellResult


class ExecResult(Protocol):
    """What a sandbox says of a command."""

    @property
    def stdout(self) -> str | None: ...

    @property
    def stderr(self) -> str | None: ...

    @property
    def return_code(self) -> int: ...

    @property
    def error_type(self) -> str | None: ...


class Sandbox(Protocol):
    """The part of Gym's ``AsyncSandbox`` that tasks use."""

    async def exec(
        self, command: str, *, cwd: str | None = None, timeout_s: int | float | None = None
    ) -> ExecResult: ...

    async def upload(self, local_path: Path | str, remote_path: str) -> None: ...

    async def status(self) -> Enum: ...

    async def stop(self) -> None: ...


class ShellSession(Protocol):
    """A shell on a terminal; one command at a time."""

    @property
    def running(self) -> bool: ...

    @property
    def exited(self) -> bool: ...

    async def run(
        self, command: str, *, timeout_s: float, silence_s: float | None, output_limit: int = ...
    ) -> ShellResult: ...

    async def aside(self, command: str, *, timeout_s: float, output_limit: int = ...) -> ShellResult: ...

    async def wait(self, *, timeout_s: float, silence_s: float | None) -> ShellResult: ...

    async def send(self, text: str) -> None: ...

    async def interrupt(self) -> None: ...

    async def restart(self) -> None: ...

    async def close(self) -> None: ...


class KernelSession(Protocol):
    """An IPython kernel; one cell at a time."""

    async def run(self, code: str, *, timeout_s: float, output_limit: int = ...) -> CellResult: ...

    async def restart(self) -> None: ...

    async def close(self) -> None: ...


@runtime_checkable
class HasSessions(Protocol):
    """A sandbox whose provider has sessions. Both start in the sandbox's working folder."""

    async def shell(self, *, env: Mapping[str, str] | None = None) -> ShellSession: ...

    async def kernel(self) -> KernelSession: ...


@runtime_checkable
class KnowsWhoseDoing(Protocol):
    """A sandbox that can tell what ended by its inmates' doing from what ended by the machine's."""

    async def check(self) -> None:
        """Look whether it lives.

        Raises:
            AgentError: what ran in it has ended it.
            InfrastructureError: it ended otherwise, or the machine ended something in it.
        """
        ...


@runtime_checkable
class KnowsItsRoom(Protocol):
    """A sandbox that can tell whether what was written in it may have failed for want of the machine's disk."""

    async def has_room(self) -> bool:
        """Whether there is any left."""
        ...


class Kept(Protocol):
    """What was kept of a sandbox: its name and size, and how many programs of its inmates are not in it."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def programs(self) -> int: ...


@runtime_checkable
class KeepsFiles(Protocol):
    """A sandbox whose files can be kept for others that go on from there."""

    async def checkpoint(self, name: str) -> Kept:
        """Keep them.

        Raises:
            AgentError: what ran in it wrote what can't be kept.
        """
        ...


@runtime_checkable
class HasFiles(Protocol):
    """A sandbox whose files can be had without a program in it. Names are looked up inside, as its own user.

    An :class:`OSError` says what stands in the way inside, as for a program there.
    """

    async def read_file(self, path: str, *, limit: int) -> bytes:
        """An ordinary file of at most ``limit`` bytes; ``EFBIG`` if it is longer, ``EINVAL`` if it is none."""
        ...

    async def write_file(self, path: str, data: bytes) -> bool:
        """Write a whole file, and the folders above it; says whether there was one, which keeps its permissions."""
        ...
