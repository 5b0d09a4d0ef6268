# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How far to trust a mean of few repeats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence


_T95 = {
    **{2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262, 11: 2.228},
    12: 2.201,
}
"""By the number of repeats: how many standard errors to each side of the mean 95 % confidence takes (Student's t)."""


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the mean's 95 % confidence interval; ``None`` for a single value, which says nothing."""
    if len(values) < 2:
        return None
    return _T95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def jackknife(of: Callable[[Sequence[int]], float], repeats: int) -> tuple[float, float | None]:
    """What all repeats come to together, and half the width of its 95 % confidence interval: from how far it moves
    when one repeat is left out. For what is pooled, such as a percentile of the turns of all."""
    whole = of(range(repeats))
    if repeats < 2:
        return whole, None
    without = (of([kept for kept in range(repeats) if kept != left]) for left in range(repeats))
    return whole, interval([repeats * whole - (repeats - 1) * rest for rest in without])
