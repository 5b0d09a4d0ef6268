# SPDX-License-Identifier: Apache-2.0
"""Configurations in which a key that nobody reads is refused, since it was meant for something.

Pydantic ignores it, or says that it is not permitted; ``max_turn: 3`` would leave rollouts without a bound.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError


class KnownKeys(BaseModel):
    """Mixed into a configuration. An unknown key is named, with the nearest that there is."""

    @classmethod
    def other_keys(cls) -> Iterable[str]:
        """Keys that may stand there for somebody else to read."""
        return ()

    @model_validator(mode="before")
    @classmethod
    def _all_known(cls, given: Any) -> Any:
        if isinstance(given, dict):
            unknown = sorted(map(str, given.keys() - {*cls.model_fields, *cls.other_keys()}))
            if unknown:
                errors = [
                    InitErrorDetails(type=_no_such(key, cls), loc=(key,), input=given.get(key)) for key in unknown
                ]
                raise ValidationError.from_exception_data(cls.__name__, errors)
        return given


def _no_such(key: str, config: type[BaseModel]) -> PydanticCustomError:
    near = difflib.get_close_matches(key, config.model_fields, 1, 0.5)
    nearest = f"; the nearest that there is: {near[0]}" if near else ""
    return PydanticCustomError(
        "unknown_key", "{key}: there is no such setting{nearest}", {"key": key, "nearest": nearest}
    )
