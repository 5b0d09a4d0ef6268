# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Base class of the servers' configurations, which refuses unknown keys; Gym's own classes ignore them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from nemo_gym.config_types import BaseRunServerTypeConfig
from pydantic import BaseModel, ConfigDict, model_validator


class ServerConfig(BaseModel):
    """Mixin for a server's configuration, to be listed after Gym's class."""

    model_config = ConfigDict(extra="forbid")

    # Keys for the installed version of Gym and its registry, which no server reads.
    ignored_keys: ClassVar[Iterable[str]] = frozenset(
        {*BaseRunServerTypeConfig.model_fields, "description", "license", "value", "verified", "verified_url"}
    )

    @model_validator(mode="before")
    @classmethod
    def _without_ignored(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        ignored = {*cls.ignored_keys} - cls.model_fields.keys()
        return {key: value for key, value in given.items() if key not in ignored}
