# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The limit of open files: a rollout in flight is a few connections, and a process may have only so many.

The soft limit is often 1,024 where the hard one is far higher, so a server of ours raises it when it starts
(:func:`raise_limit`). Beyond the hard limit rollouts fail with an infrastructure error that names the limit.
"""

from __future__ import annotations

import errno
import resource

from nemo_gym_prorl.failures import FailureKind, InfrastructureError


PER_ROLLOUT = 4
"""Descriptors that a rollout in flight may take in one process: its caller's connection, those to the model server and
the resources server, and one to spare."""

BASE = 256
"""Descriptors of a process of ours without any rollout."""


def needed(rollouts: int) -> int:
    """The limit of open files that a process needs for that many rollouts at once."""
    return BASE + PER_ROLLOUT * rollouts


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one; gives the limit that then holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return _finite(hard)


def is_exhaustion(error: BaseException) -> bool:
    """Whether an error says that this process or this machine can open no further file."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def exhausted() -> InfrastructureError:
    """Our own want of descriptors, as the failure that it is."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return InfrastructureError(
        f"this process has no file descriptor left (limit {soft}); raise the limit of open files (ulimit -n), "
        f"{PER_ROLLOUT} for each rollout in flight, or run fewer at once",
        kind=FailureKind.PROVIDER_QUOTA_EXHAUSTED,
    )


def _finite(limit: int) -> int:
    return 1 << 30 if limit == resource.RLIM_INFINITY else limit
