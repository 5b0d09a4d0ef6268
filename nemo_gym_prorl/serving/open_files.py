# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Open files: a rollout in flight is a few connections, and a process may have only so many.

The soft limit is often 1,024 where the hard one is far higher, so a server of ours raises it when it starts
(:func:`raise_limit`). What is left is still a bound. :class:`FileGuard` refuses what is beyond it, so that rollouts in
progress can still reach their sandbox and their model: refused work can come again, and a rollout that fails for want
of a socket would look as if its environment were broken.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Awaitable, Callable

from fastapi import Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.serving.problems import ProblemError


PER_ROLLOUT = 4
"""Descriptors that a rollout in flight may take in one process: its caller's connection, those to the model server and
the resources server, and one to spare."""

BASE = 256
"""Descriptors of a process of ours without any rollout."""

RETRY_AFTER_S = 2


def needed(rollouts: int) -> int:
    """The limit of open files that a process needs for that many rollouts at once."""
    return BASE + PER_ROLLOUT * rollouts


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one; gives the limit that then holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return _finite(hard)


def left() -> int:
    """How many files this process can still open."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Linux tells the number as the folder's size since 6.2, and 0 before.
    count = os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))  # noqa: PTH116, PTH208 - hot path
    return _finite(soft) - count


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


async def _problem(request: Request, error: ProblemError) -> Response:
    return error.response()


class FileGuard:
    """ASGI middleware: refuses rollouts beyond what the limit of open files allows, and closes the connection.

    It counts the requests inside rather than the descriptors that are left: when many callers come at once, those
    that are about to be refused hold descriptors too, and everybody would be refused, again and again.

    Args:
        app: what is guarded.
        refuse: makes the answer of a refused request. Default: the problem document, status 503.
        at_once: how many may be inside. Default: three quarters of the descriptors that are left now; the rest is for
            connections to other servers, and for callers that are being refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        refuse: Callable[[Request, ProblemError], Awaitable[Response]] = _problem,
        at_once: int | None = None,
    ) -> None:
        self._app = app
        self._refuse = refuse
        self._at_once = left() * 3 // 4 if at_once is None else at_once
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        # Only what holds a connection while a rollout runs: to read and to cancel must stay possible.
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in _HELD:
            await self._app(scope, receive, send)
            return
        if self._inside >= self._at_once:
            response = await self._refuse(Request(scope, receive), _refusal(self._at_once))
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        self._inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside -= 1


_HELD = frozenset({"/run", "/v1/responses"})


def _refusal(at_once: int) -> ProblemError:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ProblemError(
        503,
        "too-many-open-files",
        f"{at_once} rollouts are here, the limit of open files ({soft}) allows no more; raise it (ulimit -n)",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def _finite(limit: int) -> int:
    return 1 << 30 if limit == resource.RLIM_INFINITY else limit
