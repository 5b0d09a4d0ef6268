# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How a caller shows the key of a server; who may call without one is told in :mod:`.access`."""

from __future__ import annotations


def authorization(key: str | None) -> dict[str, str]:
    """The header by which a caller shows a key; none without one, or for an empty one."""
    return {"Authorization": f"Bearer {key}"} if key else {}
