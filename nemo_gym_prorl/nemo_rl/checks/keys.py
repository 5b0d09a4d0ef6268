# SPDX-License-Identifier: Apache-2.0
"""Settings that nobody reads: NeMo RL's models take any key, so that a misspelt one does nothing, silently.

What NeMo RL reads is what its models declare, and what the files say that a recipe inherits.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NotRequired, Required, Union, get_args, get_origin, get_type_hints, is_typeddict

from pydantic import BaseModel

from nemo_gym_prorl.nemo_rl.checks.finding import Finding


type Keys = Mapping[str, Keys] | None
"""The settings below a key; ``None`` where anything may stand."""

OURS = "prorl"
"""Our own block, which has a model that takes no other key."""

GYMS = "env"
"""Gym's configuration stands in there."""


def unknown_keys(
    config: Mapping[str, Any], known: Keys, mentioned: Callable[[str], bool], path: str = ""
) -> Iterator[Finding]:
    """A finding for each setting that nobody reads.

    Args:
        config: the configuration, or a part of it.
        known: what may stand there.
        mentioned: whether NeMo RL's sources have such a key somewhere; then it may be one that no model declares.
        path: of the part.
    """
    if known is None:
        return
    for key, value in config.items():
        here = f"{path}.{key}" if path else str(key)
        if here in (OURS, GYMS):
            continue
        if key not in known:
            if mentioned(str(key)):
                what = "NeMo RL declares no such setting, though its sources have the name"
                yield Finding(here, what, "Look whether it is read", fatal=False)
            else:
                yield Finding(here, "NeMo RL has no such setting", "Correct it, or take it out")
        elif isinstance(value, Mapping) and not _free(here, value):
            yield from unknown_keys(value, known[key], mentioned, here)


def keys_of_file(config: Mapping[str, Any]) -> dict[str, Keys]:
    """The settings that a file of NeMo RL's has. Below an empty one anything may stand."""
    return {str(key): _of_value(value) for key, value in config.items()}


def keys_of_model(model: Any) -> Keys:
    """The settings that a model of NeMo RL's declares: none below a plain value, any where it takes any mapping."""
    return _of_type(model, ())


def merged(model: Keys, file: Keys) -> Keys:
    """What either has. A file that says nothing of a setting leaves it to the model, and a model that takes anything
    is not bound to what a file happens to have."""
    if model is None or file is None:
        return model
    return {
        key: merged(model[key], file[key]) if key in model and key in file else model.get(key, file.get(key))
        for key in {**model, **file}
    }


def _of_value(value: Any) -> Keys:
    if isinstance(value, Mapping):
        return keys_of_file(value) or None
    return None if value is None else {}


def _free(path: str, value: Mapping[str, Any]) -> bool:
    """A sampler of somebody's own is made with all the keys of its block."""
    return path == "async_rl.sampler" and value.get("name") == "custom"


def _of_type(kind: Any, above: tuple[Any, ...]) -> Keys:
    if kind in above or _any_mapping(kind):
        return None
    origin = get_origin(kind)
    if origin in (Annotated, NotRequired, Required):
        return _of_type(get_args(kind)[0], above)
    if origin in (Union, types.UnionType):
        members = [_of_type(member, above) for member in get_args(kind)]
        return None if None in members else functools.reduce(merged, members)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: _of_type(field.annotation, (*above, kind)) for name, field in kind.model_fields.items()}
    if is_typeddict(kind):
        return {name: _of_type(hint, (*above, kind)) for name, hint in _hints(kind).items()}
    return {}


def _any_mapping(kind: Any) -> bool:
    return kind is Any or (get_origin(kind) or kind) in (dict, Mapping)


def _hints(kind: Any) -> Mapping[str, Any]:
    try:
        return get_type_hints(kind, include_extras=True)
    except (NameError, TypeError):  # a name that is there for type checkers only
        return dict.fromkeys(kind.__annotations__, Any)
