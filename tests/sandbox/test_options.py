# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The table of options in the documentation has every option that there is, as it is."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_gym.sandbox.providers.base import SandboxResources, SandboxSpec

from nemo_gym_prorl.sandbox.container import ContainerSpec
from nemo_gym_prorl.sandbox.spec import SPEC_OPTIONS, ProviderOptions


TEXT = (Path(__file__).parents[2] / "docs" / "sandbox.md").read_text()
ROWS = {
    name: (kind, unit, default, gym, what)
    for name, kind, unit, default, gym, what in re.findall(
        r"^\| `(\w+)` \| (\w+) \| (\w*) ?\| ([^|]+) \| ([^|]*) ?\| ([^|]+) \|$", TEXT, re.MULTILINE
    )
}
KINDS: dict[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "text", Path: "text"}
UNITS = {"mib": "MiB", "s": "s"}


def kind_of(hint: Any) -> str:
    """What a reader is told of a type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Mapping, Sequence):
        return "map" if origin is Mapping else "list"
    if origin is typing.Literal:
        return "text"
    [kind] = {KINDS[one] for one in arguments or [hint] if one is not type(None)}
    return kind


def fields() -> dict[str, tuple[str, Any]]:
    """Every option with its type and its default; the provider's word for the image is the one that users meet."""
    found = {}
    for owner in (ContainerSpec, ProviderOptions):
        hints = typing.get_type_hints(owner)
        for field in dataclasses.fields(owner):
            default = field.default_factory() if callable(field.default_factory) else field.default
            found[field.name] = kind_of(hints[field.name]), default
    return found


def test_every_option_is_in_the_table_with_its_type_and_default() -> None:
    there = fields()
    assert set(ROWS) == set(there)
    for name, (kind, default) in there.items():
        written_kind, unit, written, _gym, what = ROWS[name]
        assert written_kind == kind, name
        assert unit == UNITS.get(name.rpartition("_")[2], unit), name
        if default is None and name != "ttl_s":
            # What holds then is said in words.
            assert written not in ("none", "empty"), name
        else:
            assert written == as_written(default), name
        own = {field.name for field in dataclasses.fields(ProviderOptions)} - {*SPEC_OPTIONS}
        only = "the provider's" if name in own - {"image"} else "one sandbox's"
        assert (f"{only} only" in what) == (name not in (*SPEC_OPTIONS, "image")), name


def as_written(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, bool | str):
        return str(default).lower()
    return f"{default:.10g}" if isinstance(default, int | float) else "empty"


def test_gyms_names_are_gyms() -> None:
    spec, resources = ({field.name for field in dataclasses.fields(one)} for one in (SandboxSpec, SandboxResources))
    for name, (_kind, _unit, _default, gym, _what) in ROWS.items():
        first, _, second = gym.strip(" `").partition(".")
        assert not first or (second in resources if second else first in spec), name
