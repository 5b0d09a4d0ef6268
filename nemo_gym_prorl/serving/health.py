# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Health of a server: ``/healthz`` answers 503 while a background loop fails, and a counter tells of restarts."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from nemo_gym_prorl.background import LONGEST_PAUSE_S, PROCESS_LOOPS, BackgroundLoops
from nemo_gym_prorl.serving.problems import ProblemError, ProblemRoute, problem_responses


def require_running(*loops: BackgroundLoops) -> None:
    """Raise while a background loop of a server, or one of the process, fails.

    Raises:
        ProblemError: names each failing loop. The route is open, so the message of the exception is in the log only.
    """
    failing = {name: error for each in (*loops, PROCESS_LOOPS) for name, error in each.failing.items()}
    if failing:
        names = ", ".join(failing)
        raise ProblemError(
            503,
            "background-loop-failing",
            f"background loops that failed and are restarted: {names}; the log has the traceback",
            errors=[{"field": name, "message": f"the last pass ended with {kind}"} for name, kind in failing.items()],
            headers={"Retry-After": str(int(LONGEST_PAUSE_S))},
        )


def health_router(*loops: BackgroundLoops) -> APIRouter:
    """Return the route ``/healthz`` of a server with these loops."""
    router = APIRouter(route_class=ProblemRoute)

    @router.get("/healthz", tags=["service"], responses=problem_responses(503))
    async def healthz() -> dict[str, str]:
        """Answers while the event loop turns and no background loop fails."""
        require_running(*loops)
        return {"status": "ok"}

    return router


class LoopMetrics(Collector):
    """Restarts of background loops, for a Prometheus registry."""

    def __init__(self, loops: BackgroundLoops) -> None:
        self._loops = loops

    def collect(self) -> Iterable[Metric]:
        restarts = CounterMetricFamily(
            "prorl_background_restarts", "Restarts of background loops after an exception.", labels=["loop"]
        )
        for name, count in (self._loops.restarts + PROCESS_LOOPS.restarts).items():
            restarts.add_metric([name], count)
        yield restarts
