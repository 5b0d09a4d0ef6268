# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the policy side, with one registry per server so that one process can run several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily

from nemo_gym_prorl.async_tasks import BackgroundLoops
from nemo_gym_prorl.http.applications import LoopMetrics
from nemo_gym_prorl.policy.generation import Generation
from nemo_gym_prorl.policy.pool.backend import Backend, Health
from nemo_gym_prorl.policy.pool.dispatcher import PlacedResult
from nemo_gym_prorl.policy.pool.pool import BackendPool


_BACKEND_GAUGES: Mapping[str, tuple[str, Callable[[Backend], float]]] = {
    "live_rollouts": ("Live rollouts of the backend", lambda backend: len(backend.live)),
    "live_tokens": (
        "Tokens of the live rollouts' prompts, shared prefixes counted once",
        lambda backend: backend.kv_demand,
    ),
    "in_flight": ("Requests in flight", lambda backend: len(backend.in_flight)),
    "held": ("Turns that wait for the backend of their rollout", lambda backend: len(backend.held)),
    "up": ("1 while the backend serves", lambda backend: backend.health is Health.UP),
    "limit": ("Maximum of live rollouts", lambda backend: backend.limit),
}
ROLLOUT_COUNTERS: Mapping[str, tuple[str, str]] = {
    "rewrites": ("history_rewrites", "Turns at which the template would rewrite history"),
    "differences": (
        "template_differences",
        "Turns whose boundary the rendering of the real conversation corrected",
    ),
    "neutralised": (
        "neutralised_tokens",
        "Control tokens in observations, encoded as ordinary text",
    ),
    "unreadable": ("unreadable_tokens", "Sampled ids without text in the tokenizer"),
    "ambiguous": ("ambiguous_turns", "Turns whose parent was ambiguous (identical visible histories)"),
    "retokenised": ("retokenised_tokens", "Sampled tokens that were tokenised again from text"),
}
"""Metric name and help text of the counters of irregularities, by their names in a rollout's JSON."""
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class PolicyMetrics:
    """Counters of a policy service, and metrics read from its pool."""

    def __init__(self, pool: BackendPool, loops: BackgroundLoops | None = None) -> None:
        self._pool = pool
        registry = self._registry = CollectorRegistry()
        if loops is not None:
            registry.register(LoopMetrics(loops))
        at = ("backend", "run")
        self._of_backends = {
            Gauge(f"prorl_policy_{name}", help_text, at, registry=registry): value
            for name, (help_text, value) in _BACKEND_GAUGES.items()
        }
        self._waiting = Gauge("prorl_policy_waiting", "Turns that wait for a backend", ("run",), registry=registry)
        registry.register(self)
        self._prompt = Counter("prorl_policy_prompt_tokens", "Prompt tokens sent", at, registry=registry)
        self._sampled = Counter("prorl_policy_sampled_tokens", "Tokens sampled", at, registry=registry)
        self._cached = Counter("prorl_policy_cached_prompt_tokens", "Prefix-cache hits", at, registry=registry)
        self._latency = Histogram(
            "prorl_policy_turn_seconds", "Seconds per turn", at, registry=registry, buckets=_SECONDS
        )
        self._queued = Histogram(
            "prorl_policy_queue_seconds",
            "Seconds a turn waited for a backend",
            ("run",),
            registry=registry,
            buckets=_SECONDS,
        )
        self._branches = Histogram(
            "prorl_policy_branches", "Branches per rollout", registry=registry, buckets=(1, 2, 3, 5, 10)
        )
        self.counts = {
            field: Counter(f"prorl_policy_{name}", help_text, registry=registry)
            for field, (name, help_text) in ROLLOUT_COUNTERS.items()
        }
        self._later_turns = Counter(
            "prorl_policy_later_turns",
            "Turns after the first of a conversation, by whether their prompt continued the rollout's tokens",
            ("token_in",),
            registry=registry,
        )
        self.forks = Counter(
            "prorl_policy_forks",
            "Turns that started a branch: sampled again, history edited by the agent, or rewritten by the template",
            ("why",),
            registry=registry,
        )

    def turn(
        self, placed: PlacedResult[Generation], seconds: float, prompt_tokens: int, run: str | None = None
    ) -> None:
        generation = placed.result
        prompt = len(generation.prompt_ids) if generation.prompt_ids is not None else prompt_tokens
        at = placed.backend, run or ""
        self._prompt.labels(*at).inc(prompt)
        self._sampled.labels(*at).inc(len(generation.ids))
        self._cached.labels(*at).inc(generation.cached_tokens or 0)
        self._latency.labels(*at).observe(seconds)
        self._queued.labels(run or "").observe(placed.queued_s)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the pool's counters, read at each scrape."""
        failovers = CounterMetricFamily(
            "prorl_policy_failovers", "Requests that failed on the backend", labels=("backend", "run")
        )
        for backend in self._pool.backends.values():
            failovers.add_metric((backend.id, backend.run or ""), backend.failovers)
        yield failovers
        yield CounterMetricFamily(
            "prorl_policy_migrations", "Rollouts that moved to another backend", self._pool.migrations
        )

    def token_in(self, continues: bool | None) -> None:
        """Count a turn by whether its prompt continued the ledger's tokens; ``None`` (a first turn) is not counted."""
        if continues is not None:
            self._later_turns.labels("yes" if continues else "no").inc()

    def finished(self, branches: int) -> None:
        """Record the number of branches of a rollout that is forgotten."""
        self._branches.observe(branches)

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus text format."""
        for gauge in (*self._of_backends, self._waiting):
            gauge.clear()
        for backend in self._pool.backends.values():
            at = backend.id, backend.run or ""
            for gauge, value in self._of_backends.items():
                gauge.labels(*at).set(value(backend))
        for run, waiting in self._pool.waiting_of.items():
            self._waiting.labels(run or "").set(waiting)
        return generate_latest(self._registry)
