# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Garbage collection of a server that keeps much and makes few cycles."""

from __future__ import annotations

import gc


COLLECTED_AT = (5_000, 20, 50)
"""Thresholds of the three generations: they are collected every 25, 500 and 25,000 turns, about."""


def collect_rarely() -> None:
    """Exempt what is there now, which stays, and collect rarely from here on.

    What is kept of rollouts has no cycles and goes with its last reference, but a full collection walks through all of
    it, and through what some thousand modules made of themselves, while everything waits.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTED_AT)
