# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How long a rollout has waited for a backend: nobody's time, so that no budget is charged for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Wait:
    """Seconds in which at least one turn of a rollout waited for a backend, or through a pause."""

    def __init__(self) -> None:
        self._turns = 0
        self._since = self._over_s = 0.0

    @contextlib.contextmanager
    def of_a_turn(self) -> Iterator[None]:
        """A turn of the rollout waits while this is entered."""
        if not self._turns:
            self._since = time.monotonic()
        self._turns += 1
        try:
            yield
        finally:
            self._turns -= 1
            if not self._turns:
                self._over_s += time.monotonic() - self._since

    @property
    def seconds(self) -> float:
        """Until now."""
        return self._over_s + (time.monotonic() - self._since if self._turns else 0.0)
