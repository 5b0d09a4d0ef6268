# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""JSON that is kept for as long as a job is remembered."""

from __future__ import annotations

from typing import Any

import orjson


def lasting_json(value: Any) -> bytes:
    """JSON in no more memory than it is long: orjson 3.13 leaves what it has written in a buffer of up to ten times
    that.

    Raises:
        TypeError: it cannot be written.
    """
    return bytes(memoryview(orjson.dumps(value)))
