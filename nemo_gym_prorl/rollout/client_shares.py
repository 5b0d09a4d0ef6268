# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What one client may fill of a bound that all share, while others fill it too.

Clients with a share each have their part; all others have one together, as if they were a client with a share of 1.
A name costs nothing there: whoever may choose one would have a new part with each.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping


def is_within_part(client: str, bound: float, has: Mapping[str, float], shares: Mapping[str, float]) -> bool:
    """Whether a client has less than its part, so that it may have more although the bound is reached.

    Args:
        client: it.
        bound: of all together.
        has: what each client has of it.
        shares: of the clients that have one.
    """
    if client in shares:
        own, share = has.get(client, 0), shares[client]
    else:
        own, share = sum(had for name, had in has.items() if name not in shares), 1.0
    return own < bound * share / (sum(shares.values()) + 1.0)
