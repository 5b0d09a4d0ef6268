# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a sandbox sees of the network: a loopback device of its own and nothing else, unless it was given the host's.

It is cut off by a network namespace in which there is no other device; the launcher has the loopback device up. One
that shares the host's network (``network: true``) is in the host's namespace and has its nameservers.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


NONE_BY_THE_RUNTIME = ("--net", "--network", "none")
"""What the container runtime is told for a sandbox without."""


def namespace(host: bool) -> int:
    """The ``CLONE_NEW*`` flag of its own network, or none."""
    return 0 if host else os.CLONE_NEWNET


def resolver(host: bool) -> str:
    """Text of ``/etc/resolv.conf``: the host's for a sandbox on its network, else empty."""
    with contextlib.suppress(OSError):
        if host:
            return Path("/etc/resolv.conf").read_text()
    return ""
