# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What is asked of a live sandbox: programs, paths, times and ports, checked before anybody acts on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, TypeAdapter

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox import fields


LONGEST_COMMAND = 64 << 20
"""Characters of a shell command; longer ones are programs, and belong into files."""

MOST_OUTPUT = 1 << 32


def _is_user(user: object) -> object:
    if isinstance(user, int) and not isinstance(user, bool):
        if not 0 <= user < (1 << 32) - 1:
            raise ValueError("can't be the number of a user")
    elif not isinstance(user, str) or not fields.no_text_trouble(user).strip():
        raise ValueError("must be the name or number of a user")
    return user


def _has_program(argv: Sequence[str]) -> Sequence[str]:
    if not argv or not argv[0]:
        raise ValueError("must begin with the name of a program")
    return argv


Argv = Annotated[Sequence[fields.AnyText], AfterValidator(_has_program)]


@dataclass(frozen=True, slots=True)
class _Program:
    """A program that is to be started."""

    argv: Argv = ("/bin/sh",)
    cwd: fields.SandboxPath | None = None
    env: fields.Variables = field(default_factory=dict)
    user: Annotated[Any, AfterValidator(_is_user)] | None = None


@dataclass(frozen=True, slots=True)
class _Bounds:
    """How long a command may run, and how much of its output is kept."""

    timeout_s: Annotated[fields.Number, fields.between(0, fields.MOST_SECONDS)] | None
    output_limit: Annotated[fields.Whole, fields.between(0, MOST_OUTPUT)]


_BOUNDS = TypeAdapter(_Bounds)
_PATH: TypeAdapter[str] = TypeAdapter(fields.SandboxPath)
_PROGRAM = TypeAdapter(_Program)
_TEXT: TypeAdapter[str] = TypeAdapter(fields.AnyText)


def check_program(argv: Sequence[str], cwd: str | None, env: Mapping[str, str] | None, user: str | int | None) -> None:
    """Refuse what can't be started anywhere; names the field."""
    fields.checked(_PROGRAM, {"argv": argv, "cwd": cwd, "env": env or {}, "user": user})


def check_bounds(timeout_s: float | None, output_limit: int) -> None:
    """Refuse what is no bound of a command."""
    fields.checked(_BOUNDS, {"timeout_s": timeout_s, "output_limit": output_limit})


def check_variables(env: Mapping[str, str]) -> None:
    """Refuse what the kernel takes for no variables."""
    fields.checked(_PROGRAM, {"env": env})


def check_command(command: str) -> None:
    """Refuse what can't be a command of the shell's."""
    fields.checked(_TEXT, command, "command")
    if len(command) > LONGEST_COMMAND:
        raise CallerError(f"has {len(command)} characters; upload a script of that size", field="command")


def check_path(path: str, name: str) -> None:
    """Refuse all but absolute paths; ``name`` is the field's."""
    fields.checked(_PATH, path, name)
