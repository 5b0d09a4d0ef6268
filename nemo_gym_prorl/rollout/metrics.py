# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of a service: pools and queues now, outcomes and stage times so far.

Gauges are read from the scheduler when they are scraped, so they cannot drift from it.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nemo_gym_prorl.failures import Stage
from nemo_gym_prorl.rollout.job import Job
from nemo_gym_prorl.rollout.pipeline import Pipeline
from nemo_gym_prorl.rollout.service import RolloutService
from nemo_gym_prorl.serving.health import LoopMetrics


_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)


class _Pools(Collector):
    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def collect(self) -> Iterable[Metric]:
        scheduler = self._pipeline.scheduler
        slots = GaugeMetricFamily("prorl_stage_slots", "Slots of a stage's pool.", labels=["stage"])
        working = GaugeMetricFamily("prorl_stage_working", "Slots in use.", labels=["stage", "environment"])
        waiting = GaugeMetricFamily("prorl_stage_waiting", "Jobs queued for a stage.", labels=["stage", "environment"])
        for stage in Stage:
            slots.add_metric([stage.value], scheduler.sizes.of(stage))
        counts = scheduler.by_environment()
        errors = CounterMetricFamily("prorl_tool_errors", "Error answers of tools.", labels=["status", "environment"])
        for name in self._pipeline.environments.names:
            for status, count in self._pipeline.environments.environment(name).tool_errors.items():
                errors.add_metric([str(status), name], count)
            for stage in Stage:
                working.add_metric([stage.value, name], counts[name, stage, True])
                waiting.add_metric([stage.value, name], counts[name, stage, False])
        yield from (slots, working, waiting, errors)
        yield GaugeMetricFamily("prorl_sessions", "Sandboxes held by INIT, READY and RUN.", value=scheduler.sessions)
        yield GaugeMetricFamily(
            "prorl_retained_bytes", "What finished rollouts keep.", value=self._pipeline.store.retained_bytes
        )
        yield GaugeMetricFamily(
            "prorl_results_full",
            "1 while unread results fill retain_bytes, so that submissions are refused.",
            value=self._pipeline.store.full,
        )
        out = GaugeMetricFamily(
            "prorl_server_unreachable",
            "1 while no rollout of the environment begins since this server is out.",
            labels=["server", "environment"],
        )
        for outage in self._pipeline.held:
            out.add_metric([outage.server, outage.environment], 1)
        yield out
        yield GaugeMetricFamily("prorl_abandoned", "Calls that ignored cancellation.", value=self._pipeline.abandoned)


class ServiceMetrics:
    """The metrics of a service, in a registry of their own.

    Args:
        service: whose; hooks itself to the service's outcomes.
        state: tells how it is now.
    """

    def __init__(self, service: RolloutService, state: Collector) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(state)
        self._registry.register(LoopMetrics(service.loops))
        self._outcomes = Counter(
            "prorl_rollouts", "Rollouts that ended.", ["state", "failure_kind", "environment"], registry=self._registry
        )
        self._failures = Counter(
            "prorl_failed_attempts",
            "Attempts that failed.",
            ["stage", "failure_kind", "environment"],
            registry=self._registry,
        )
        labels = ["stage", "environment"]
        self._worked = Histogram(
            "prorl_stage_worked_seconds", "Work per rollout.", labels, buckets=_SECONDS, registry=self._registry
        )
        self._waited = Histogram(
            "prorl_stage_waited_seconds", "Queue time per rollout.", labels, buckets=_SECONDS, registry=self._registry
        )
        self._turns = Histogram(
            "prorl_turns",
            "Policy turns per rollout.",
            ["environment"],
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
            registry=self._registry,
        )
        service.on_finish.append(self._finished)

    def render(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self._registry)

    def _finished(self, job: Job) -> None:
        failure = job.outcome.failure if job.outcome else None
        where = job.environment
        self._outcomes.labels(job.state.value, failure.kind.value if failure else "", where).inc()
        for attempt in job.failures:
            self._failures.labels(attempt.stage.value if attempt.stage else "", attempt.kind.value, where).inc()
        for stage, spent in job.times.items():
            if spent.attempts:
                self._worked.labels(stage.value, where).observe(spent.worked_s)
                self._waited.labels(stage.value, where).observe(spent.waited_s)
        self._turns.labels(where).observe(job.progress.turns)


class PipelineMetrics(ServiceMetrics):
    """The metrics of a pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline, _Pools(pipeline))
