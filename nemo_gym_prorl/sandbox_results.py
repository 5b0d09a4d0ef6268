# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Result types of shell commands and kernel cells, shared by sandbox sessions and a policy's tools."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ShellResult:
    """Result of one command in a persistent shell.

    Attributes:
        output: terminal output within the output limit, with one line in place of omitted bytes.
        exit_code: exit code; ``None`` if the command still runs, or the shell ended without an exit code.
        cwd: the shell's working folder after the command, with symlinks resolved.
        waiting: whether the command still runs after the soft time limit without output, perhaps waiting for input.
        timed_out: whether the command was ended at its hard time limit.
        exited: whether the shell has ended (``exit``, ``exec``, ``set -e``, or killed); ``restart`` starts another.
        omitted: number of omitted bytes of output.
    """

    output: str
    exit_code: int | None
    cwd: str
    waiting: bool = False
    timed_out: bool = False
    exited: bool = False
    omitted: int = 0


@dataclass(frozen=True, slots=True)
class CellResult:
    """Result of one cell in a Python kernel.

    Attributes:
        output: printed text within the output limit, with one line in place of omitted bytes.
        data: rich results in order, each a map from MIME type to content (images as base64, objects as JSON).
        error: traceback as plain text, or why the kernel was killed; ``None`` if the cell succeeded.
        timed_out: whether the cell was interrupted at its time limit.
        died: whether the kernel has ended; ``restart`` starts another.
        omitted: number of omitted bytes of text, rich results and tracebacks.
    """

    output: str
    data: list[dict[str, str]] = field(default_factory=list)
    error: str | None = None
    timed_out: bool = False
    died: bool = False
    omitted: int = 0
