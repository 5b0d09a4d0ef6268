# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What became of a command in a lasting shell, and of a kernel's cell: sandboxes tell it, a policy's tools read it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Action:
    """What became of one command.

    Attributes:
        output: what the terminal showed, at most the limit, with one line in place of what is left out.
        exit_code: its exit code; ``None`` if the command goes on running, or the shell ended without one.
        cwd: the shell's working folder afterwards, without links in its path.
        waiting: it was silent for the soft time-out and goes on running: it may wait for input.
        timed_out: its hard time-out was up and it was ended.
        exited: the shell has ended (``exit``, ``exec``, ``set -e``, or killed); its ``restart`` starts another.
        omitted: bytes of output that were left out.
        seconds: how long it took.
    """

    output: str
    exit_code: int | None
    cwd: str
    waiting: bool = False
    timed_out: bool = False
    exited: bool = False
    omitted: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Cell:
    """What became of a cell.

    Attributes:
        output: printed text, at most the limit, with one line in place of what is left out.
        data: rich results in order, each from MIME type to content (images as base64, objects as JSON).
        error: the traceback as plain text, or why the kernel was ended; ``None`` if neither.
        timed_out: it was interrupted because its time was up.
        died: the kernel has ended; its ``restart`` starts another.
        omitted: bytes of text, rich results and tracebacks that were left out.
    """

    output: str
    data: list[dict[str, str]] = field(default_factory=list)
    error: str | None = None
    timed_out: bool = False
    died: bool = False
    omitted: int = 0
