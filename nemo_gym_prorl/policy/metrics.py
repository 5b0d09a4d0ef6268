# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the policy side, one registry per server so that several can live in one process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from nemo_gym_prorl.policy.generation import Generation
from nemo_gym_prorl.policy.pool.dispatcher import Placed
from nemo_gym_prorl.policy.pool.pool import BackendPool


_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class PolicyMetrics:
    """Counters of a policy service and gauges read from its pool."""

    def __init__(self, pool: BackendPool) -> None:
        self._pool = pool
        registry = self._registry = CollectorRegistry()
        at = ("backend", "run")
        self._live = Gauge("prorl_policy_live_rollouts", "Rollouts that live there", at, registry=registry)
        self._tokens = Gauge(
            "prorl_policy_live_tokens", "Tokens of their prompts, shared ones once", at, registry=registry
        )
        self._in_flight = Gauge("prorl_policy_in_flight", "Requests in flight", at, registry=registry)
        self._up = Gauge("prorl_policy_up", "1 while the backend serves", at, registry=registry)
        self._limit = Gauge("prorl_policy_limit", "Live rollouts allowed there now", at, registry=registry)
        self._waiting = Gauge("prorl_policy_waiting", "Turns that wait for a backend", ("run",), registry=registry)
        self._failovers = Gauge("prorl_policy_failovers", "Requests that failed there", at, registry=registry)
        self._held = Gauge("prorl_policy_held", "Turns that wait for this very backend", at, registry=registry)
        self._migrations = Gauge(
            "prorl_policy_migrations", "Rollouts that moved to another backend", registry=registry
        )
        self._prompt = Counter("prorl_policy_prompt_tokens", "Prompt tokens sent", at, registry=registry)
        self._sampled = Counter("prorl_policy_sampled_tokens", "Tokens sampled", at, registry=registry)
        self._cached = Counter("prorl_policy_cached_prompt_tokens", "Prefix-cache hits", at, registry=registry)
        self._latency = Histogram(
            "prorl_policy_turn_seconds", "Seconds per turn", at, registry=registry, buckets=_SECONDS
        )
        self._queued = Histogram(
            "prorl_policy_queue_seconds",
            "Seconds until a backend was free",
            ("run",),
            registry=registry,
            buckets=_SECONDS,
        )
        self._branches = Histogram(
            "prorl_policy_branches", "Branches per rollout", registry=registry, buckets=(1, 2, 3, 5, 10)
        )
        self.rewrites = Counter(
            "prorl_policy_history_rewrites", "Turns whose template would rewrite history", registry=registry
        )
        self.differences = Counter(
            "prorl_policy_template_differences",
            "Turns after which the template writes otherwise than stand-ins for them showed; corrected",
            registry=registry,
        )
        self.neutralised = Counter(
            "prorl_policy_neutralised_tokens",
            "Control tokens that observations spelled, encoded as ordinary text",
            registry=registry,
        )
        self.forks = Counter(
            "prorl_policy_forks",
            "Turns that started a branch: sampled again, history edited by the agent, or rewritten by the template",
            ("why",),
            registry=registry,
        )
        self.ambiguous = Counter(
            "prorl_policy_ambiguous_turns",
            "Turns that continue one of several that look the same to the agent",
            registry=registry,
        )
        self.retokenised = Counter(
            "prorl_policy_retokenised_tokens", "Sampled tokens that were tokenised again", registry=registry
        )

    def turn(self, placed: Placed[Generation], seconds: float, prompt_tokens: int, run: str | None = None) -> None:
        """Count one turn of a run."""
        generation = placed.result
        prompt = len(generation.prompt_ids) if generation.prompt_ids is not None else prompt_tokens
        at = placed.backend, run or ""
        self._prompt.labels(*at).inc(prompt)
        self._sampled.labels(*at).inc(len(generation.ids))
        self._cached.labels(*at).inc(generation.cached_tokens or 0)
        self._latency.labels(*at).observe(seconds)
        self._queued.labels(run or "").observe(placed.queued_s)

    def finished(self, branches: int) -> None:
        """Count one forgotten rollout."""
        self._branches.observe(branches)

    def exposition(self) -> bytes:
        """The metrics in Prometheus text format."""
        at_backends = (self._live, self._tokens, self._in_flight, self._up, self._limit, self._failovers, self._held)
        for gauge in (*at_backends, self._waiting):
            gauge.clear()
        for backend in self._pool.backends.values():
            at = backend.id, backend.run or ""
            self._live.labels(*at).set(len(backend.live))
            self._tokens.labels(*at).set(backend.demand)
            self._in_flight.labels(*at).set(len(backend.in_flight))
            self._up.labels(*at).set(backend.health == "up")
            self._limit.labels(*at).set(backend.limit)
            self._failovers.labels(*at).set(backend.failovers)
            self._held.labels(*at).set(self._pool.held(backend.id))
        for run, waiting in self._pool.waiting_of.items():
            self._waiting.labels(run or "").set(waiting)
        self._migrations.set(self._pool.migrations)
        return generate_latest(self._registry)
