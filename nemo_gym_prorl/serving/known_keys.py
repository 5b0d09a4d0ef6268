# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Configurations in which a key that nobody reads is refused, since it was meant for something.

Pydantic ignores it, or says that it is not permitted; ``max_turn: 3`` would leave rollouts without a bound.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import BaseModel, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError


CHECKPOINT_FOLDER = "checkpoint_folder"
"""A key of ours at the top of Gym's whole configuration, since several servers read it: a folder that all nodes of a
fleet see, in which rollouts are kept for each other."""


class KnownKeys(BaseModel):
    """Mixed into a configuration. An unknown key is named, with the nearest that there is."""

    renamed_keys: ClassVar[Mapping[str, str]] = {}
    """Keys that one may know from elsewhere or before → what they are called here."""

    @classmethod
    def misplaced_keys(cls) -> Mapping[str, str]:
        """Keys that stand elsewhere → where."""
        return {}

    @classmethod
    def other_keys(cls) -> Iterable[str]:
        """Keys that may stand there for somebody else to read."""
        return ()

    @model_validator(mode="before")
    @classmethod
    def _all_known(cls, given: Any) -> Any:
        if isinstance(given, dict):
            refuse_unknown(cls, given, cls.other_keys(), cls.renamed_keys, cls.misplaced_keys())
        return given


def refuse_unknown(
    config: type[BaseModel],
    given: Mapping[str, Any],
    others: Iterable[str] = (),
    renamed: Mapping[str, str] = MappingProxyType({}),
    misplaced: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Refuse keys that a model does not read.

    Args:
        config: the model; one that takes what it does not know (``extra="allow"``) reads every key.
        given: what is to be validated.
        others: keys that it may have besides.
        renamed: other name of a key → its name.
        misplaced: key → where it stands.

    Raises:
        ValidationError: names each such key, and what it is called, where it stands or the nearest that there is.
    """
    if config.model_config.get("extra") == "allow":
        return
    known = {*config.model_fields, *others}
    for field in config.model_fields.values():
        known |= {name for name in (field.alias, field.validation_alias) if isinstance(name, str)}
    errors = [
        InitErrorDetails(type=_no_such(key, config, renamed, misplaced), loc=(key,), input=given.get(key))
        for key in sorted(map(str, given.keys() - known))
    ]
    if errors:
        raise ValidationError.from_exception_data(config.__name__, errors)


def _no_such(
    key: str, config: type[BaseModel], renamed: Mapping[str, str], misplaced: Mapping[str, str]
) -> PydanticCustomError:
    if key in renamed:
        return PydanticCustomError("renamed_key", "{key}: is called {name} here", {"key": key, "name": renamed[key]})
    if key in misplaced:
        return PydanticCustomError("misplaced_key", "{key}: belongs {where}", {"key": key, "where": misplaced[key]})
    found = difflib.get_close_matches(key, config.model_fields, 1, 0.5)
    nearest = f"; the nearest that there is: {found[0]}" if found else ""
    return PydanticCustomError(
        "unknown_key", "{key}: there is no such setting{nearest}", {"key": key, "nearest": nearest}
    )


def near(name: str, known: Iterable[str]) -> str:
    """The end of a complaint about a name: the nearest that there is, and all of them."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, 1, 0.5)
    hint = f"; the nearest: {nearest[0]}" if nearest else ""
    return f"{hint}; there are: {', '.join(known) or 'none'}"
