# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Configurations of our Gym servers: Gym's own classes ignore keys that they don't know."""

from __future__ import annotations

from collections.abc import Iterable

from nemo_gym.config_types import BaseRunServerTypeConfig

from nemo_gym_prorl.serving.known_keys import KnownKeys


_ABOUT = frozenset({"description", "license", "value", "verified", "verified_url"})
"""What Gym's registry reads of an environment's file, and no server."""


class ServerConfig(KnownKeys):
    """Mixed into a server's configuration. Gym's keys are those of the Gym that is installed."""

    @classmethod
    def other_keys(cls) -> Iterable[str]:
        """Gym's."""
        return {*BaseRunServerTypeConfig.model_fields, *_ABOUT}
