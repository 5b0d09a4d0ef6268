# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A finding, and looking things up in a configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError


@dataclass(frozen=True, slots=True)
class Finding:
    """Something for which a training is not to start.

    Attributes:
        field: its path, e.g. ``grpo.num_prompts_per_step``.
        what: what is wrong.
        fix: what to do.
    """

    field: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field}: {self.what}. {self.fix}."


def at(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a path with dots; ``default`` where there is none."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value


def block_at(config: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """The block at a path; an empty one, if there is none. What is there instead is for others to refuse."""
    value = at(config, path)
    return value if isinstance(value, Mapping) else {}


def number_at(config: Mapping[str, Any], path: str) -> float | None:
    """The number at a path, if there is one; what is there instead is for NeMo RL's models to refuse."""
    value = at(config, path)
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def of_validation(block: str, error: ValidationError) -> Iterator[Finding]:
    """What a model refused, by field."""
    for one in error.errors(include_url=False):
        key = one["loc"][-1] if one["loc"] else ""
        # The name of a union's member is no part of the path in a file; pydantic writes it as a tag between keys.
        path = ".".join(str(key) for key in one["loc"] if str(key).isidentifier() or isinstance(key, int))
        what = one["msg"].removeprefix("Value error, ").removeprefix(f"{key}: ").rstrip(".")
        field = ".".join(part for part in (block, path) if part)
        yield Finding(field or "(the configuration)", what, "Correct it there or on the command line")
