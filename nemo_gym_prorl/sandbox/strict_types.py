# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Strict Pydantic types of configured values, and their conversion of validation errors to :class:`.CallerError`.

Types are not coerced: a quoted number, or ``true`` for 1, is a mistake in a configuration. Numbers have bounds,
because the kernel would refuse some of them only in the middle of a sandbox's start.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, Strict, TypeAdapter, ValidationError, model_validator

from nemo_gym_prorl.failures import CallerError


MAX_MIB = 1 << 24  # 16 TiB; a larger number is most likely in bytes

MAX_SECONDS = 366 * 86400.0  # a year; a larger number is most likely in milliseconds

MAX_VARIABLE_BYTES = (1 << 17) - 1  # the kernel's MAX_ARG_STRLEN without the final NUL: name, "=" and value

EXCERPT_CHARS = 100
"""Characters of a wrong value in an error message; enough to recognise the value."""


def kernel_text(text: str) -> str:
    """Return ``text`` if it can be passed to the kernel, as an argument, variable or path.

    Raises:
        ValueError: the text has a NUL, or a lone surrogate that represents no byte.
    """
    if "\0" in text:
        raise ValueError("must not hold a NUL character")
    try:
        # A lone low surrogate represents a byte that is not UTF-8, and is valid.
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
    return path


def _has_program(argv: Sequence[str]) -> Sequence[str]:
    if not argv or not argv[0]:
        raise ValueError("must begin with the name of a program")
    return argv


def listed(value: object) -> object:
    """Convert OmegaConf's list, which is no ``Sequence``, to a Python list; return any other value unchanged."""
    return list(value) if type(value).__module__.startswith("omegaconf") else value  # type: ignore[call-overload]


def variable_trouble(name: str, value: str) -> str:
    """Return why a name and a value are not a valid environment variable; empty if they are valid."""
    if not name or "=" in name:
        return f"{name!r} can't be the name of a variable"
    try:
        size = len(os.fsencode(kernel_text(f"{name}={value}")))
    except ValueError as error:
        return f"{name!r} {error}"
    if size > MAX_VARIABLE_BYTES:
        return f"{name!r} is longer than the {MAX_VARIABLE_BYTES} bytes that a variable may have; write it to a file"
    return ""


def _variables(env: Mapping[str, str]) -> Mapping[str, str]:
    for name, value in env.items():
        if trouble := variable_trouble(name, value):
            raise ValueError(trouble)
    return env


Flag = Annotated[bool, Strict()]
Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
AnyText = Annotated[str, Strict(), AfterValidator(kernel_text)]
Text = Annotated[AnyText, AfterValidator(_filled)]
SandboxPath = Annotated[AnyText, AfterValidator(_absolute)]
Texts = Annotated[Sequence[Text], BeforeValidator(listed)]
Argv = Annotated[Sequence[AnyText], AfterValidator(_has_program)]
Variables = Annotated[Mapping[Annotated[str, Strict()], Annotated[str, Strict()]], AfterValidator(_variables)]
Mib = Annotated[Whole, Field(ge=0, le=MAX_MIB)]
Seconds = Annotated[Number, Field(gt=0, le=MAX_SECONDS)]
OutputBytes = Annotated[Whole, Field(ge=0)]
Timeout = Annotated[Number, Field(ge=0, le=MAX_SECONDS)] | None
User = Annotated[Whole, Field(ge=0, lt=(1 << 32) - 1)] | Text


class Checked:
    """Base of Pydantic dataclasses whose constructor raises a :class:`.CallerError` with the first wrong field."""

    @model_validator(mode="wrap")
    @classmethod
    def _refuse(cls, values: object, construct: Callable[[object], Self]) -> Self:
        try:
            return construct(values)
        except ValidationError as error:
            raise _refusal(error) from error


def checked[T](value: T, kind: Any, field: str) -> T:
    """Return a value unchanged if it is valid for the type ``kind``.

    Raises:
        CallerError: the value is not valid; names ``field``.
    """
    try:
        _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise _refusal(error, field) from error
    return value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _refusal(error: ValidationError, field: str = "") -> CallerError:
    first = error.errors(include_url=False)[0]
    # Pydantic's location also has the types of a union and keys of a mapping, which are not fields.
    names = [name for name in (field, *map(str, first["loc"])) if name and not {"[", "-"} & set(name)]
    own = first.get("ctx", {}).get("error")
    reason, value = str(own or first["msg"]).replace("Input should be", "must be"), first["input"]
    if isinstance(value, str | int | float | None):
        shown = repr(value)
        reason += f", not {shown if len(shown) <= EXCERPT_CHARS else f'{shown[:EXCERPT_CHARS]}…'}"
    elif own is None:
        # Only the type is shown: a list or mapping may contain secrets, such as environment variables.
        reason += f"; this is a {type(value).__name__}"
    return CallerError(reason, field=".".join(names)[:EXCERPT_CHARS] or None)
