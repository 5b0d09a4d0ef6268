# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What may stand in a field that comes from outside: types for it, and one way to say what is wrong, with the fix.

Types are strict: a number in quotes or ``true`` for 1 is a mistake in somebody's configuration, and guessing what was
meant would hide it. Numbers have a least and a most, since what no machine has is a mistake, too, and some of it the
kernel would only refuse when half of a sandbox is there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Strict, TypeAdapter, ValidationError

from nemo_gym_prorl.failures import CallerError


MOST_MIB = 1 << 24
"""16 TiB; beyond that it is bytes that somebody meant."""

MOST_SECONDS = 366 * 86400.0

LONGEST_PATH = 4095
"""Bytes of a path that the kernel takes."""

LONGEST_VARIABLE = (1 << 17) - 1
"""Bytes of one variable with its name, and of one argument, that the kernel takes."""

SHOWN = 100
"""Characters of a wrong value that are told."""


def between(least: float, most: float, zero: str = "") -> Any:
    """A check of a number's size; ``zero`` is what 0 means where that is allowed and not obvious."""

    def check(value: float) -> float:
        # Says no to NaN, too.
        if not least <= value <= most:
            raise ValueError(f"must be a number from {least:g}{f' ({zero})' if zero else ''} to {most:.12g}")
        return value

    return AfterValidator(check)


def above_zero(most: float) -> Any:
    """As :func:`between`, for what may be small, but not nothing."""

    def check(value: float) -> float:
        if not 0 < value <= most:
            raise ValueError(f"must be more than 0, and {most:.12g} at most")
        return value

    return AfterValidator(check)


def no_text_trouble(text: str) -> str:
    """The same text, if the kernel can be given it.

    Raises:
        ValueError: it can't; says why.
    """
    if "\0" in text:
        raise ValueError("must not hold a NUL character, with which it would end")
    try:
        # What is no UTF-8 in a name of the file system comes and goes as half a surrogate pair.
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise ValueError("holds half a surrogate pair, which is no character and no byte") from error
    return text


def _filled(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty; leave it out instead")
    return text


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError("must be an absolute path in the sandbox")
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise ValueError(f"is longer than the {LONGEST_PATH} bytes that a path may have")
    return path


def _listed(value: object) -> object:
    # Configurations bring lists of types of their own.
    return list(value) if type(value).__module__.startswith("omegaconf") else value  # type: ignore[call-overload]


def variable_trouble(name: str, value: str) -> str:
    """Why the kernel does not take something for a variable; empty if it does."""
    if not name or "=" in name:
        return f"{name!r} can't be the name of a variable"
    try:
        size = len(os.fsencode(no_text_trouble(f"{name}={value}")))
    except ValueError as error:
        return f"{name!r} {error}"
    if size > LONGEST_VARIABLE:
        return f"{name!r} is longer than the {LONGEST_VARIABLE} bytes that a variable may have; write it to a file"
    return ""


def _variables(env: Mapping[str, str]) -> Mapping[str, str]:
    for name, value in env.items():
        if trouble := variable_trouble(name, value):
            raise ValueError(trouble)
    return env


Flag = Annotated[bool, Strict()]
Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict()]
AnyText = Annotated[str, Strict(), AfterValidator(no_text_trouble)]
Text = Annotated[AnyText, AfterValidator(_filled)]
SandboxPath = Annotated[AnyText, AfterValidator(_absolute)]
Texts = Annotated[Sequence[Text], BeforeValidator(_listed)]
Variables = Annotated[Mapping[Annotated[str, Strict()], Annotated[str, Strict()]], AfterValidator(_variables)]
Mib = Annotated[Whole, between(0, MOST_MIB, "no limit")]
Seconds = Annotated[Number, above_zero(MOST_SECONDS)]
UserId = Annotated[Whole, between(0, (1 << 32) - 2)]


def checked[T](adapter: TypeAdapter[T], value: object, field: str = "", inside: str = "") -> T:
    """The value, as it was or as a type makes it.

    Args:
        adapter: of the type that it is to have.
        value: what came.
        field: its name, or empty if it holds the fields.
        inside: of what the fields are, if the caller knows them by a longer name.

    Raises:
        CallerError: it is wrong; names the field, what is there and what could be.
    """
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        names = [name for name in (inside, field, *map(str, first["loc"])) if name]
        raise CallerError(_complaint(first), field=_name(names)) from error


def _name(names: list[str]) -> str | None:
    # The name of a type that was tried, and the place in a mapping, which is no field.
    plain = [name for name in names if "[" not in name and "-" not in name]
    return ".".join(plain)[:SHOWN] or None


def _complaint(error: Any) -> str:
    own = error.get("ctx", {}).get("error")
    reason = str(own or error["msg"]).replace("Input should be", "must be")
    value = error["input"]
    if not isinstance(value, str | int | float | None):
        # What is in it may be nobody's business: variables, say.
        return f"{reason}; this is a {type(value).__name__}" if own is None else reason
    shown = repr(value)
    return f"{reason}, not {shown if len(shown) <= SHOWN else f'{shown[:SHOWN]}…'}"
