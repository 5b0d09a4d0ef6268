# SPDX-License-Identifier: Apache-2.0
"""Configurations of our Gym servers: a key that nobody reads is refused, since it was meant for something.

Gym's own classes ignore what they don't know, so that ``max_turn: 3`` would leave rollouts without a bound.
"""

from __future__ import annotations

import difflib
from typing import Any

from nemo_gym.config_types import BaseRunServerTypeConfig
from pydantic import BaseModel, model_validator


_ABOUT = frozenset({"description", "license", "value", "verified", "verified_url"})
"""What Gym's registry reads of an environment's file, and no server."""


class KnownKeys(BaseModel):
    """Mixed into a server's configuration. Gym's keys are those of the Gym that is installed."""

    @model_validator(mode="before")
    @classmethod
    def _all_known(cls, given: Any) -> Any:
        if isinstance(given, dict):
            known = {*cls.model_fields, *BaseRunServerTypeConfig.model_fields, *_ABOUT}
            for key in given.keys() - known:
                near = difflib.get_close_matches(str(key), cls.model_fields, 1, 0.0)
                raise ValueError(f"{key}: there is no such setting; the nearest that there is: {near[0]}")
        return given
