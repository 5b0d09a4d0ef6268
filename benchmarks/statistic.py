# SPDX-License-Identifier: Apache-2.0
"""How far to trust a mean of few repeats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


_T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""By the number of repeats: how many standard errors to each side of the mean 95 % confidence takes (Student's t)."""


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the mean's 95 % confidence interval; ``None`` for a single value, which says nothing."""
    if len(values) < 2:
        return None
    return _T95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
