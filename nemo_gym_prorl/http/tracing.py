# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans of a rollout, all in one trace: stages, turns, tool calls, and the sampling of turns.

Spans go to the process's OpenTelemetry tracer provider. Gym 0.7 sets a provider in each server (``telemetry: {enabled:
true}``, with its extra ``telemetry``), as does ``opentelemetry-instrument``; both add the spans of HTTP requests.
Gym's setting ``span_groups`` also selects our spans. Without a provider, the default, no span is created, because an
unrecorded span also takes time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from enum import StrEnum

from opentelemetry import propagate, trace


_TRACER = trace.get_tracer("nemo_gym_prorl")


class SpanGroup(StrEnum):
    """Gym's span groups to which the spans of this package belong."""

    ROLLOUT = "rollout"
    AGENT = "agent"
    MODEL_CALL = "model_call"


def span(
    group: SpanGroup, name: str, /, **attributes: str | int | float | None
) -> contextlib.AbstractContextManager[trace.Span]:
    """Return a context manager for a span, which records an exception that leaves the block.

    Args:
        group: Gym's span group; if Gym disables the group, or without a tracer provider, nothing is recorded.
        name: name of the operation, without ids.
        attributes: span attributes, stored with the prefix ``prorl.``; values ``None`` are left out.
    """
    if not _has_provider() or not _gym_span_filter()(group):
        return contextlib.nullcontext(trace.INVALID_SPAN)
    prefixed = {f"prorl.{key}": value for key, value in attributes.items() if value is not None}
    return _TRACER.start_as_current_span(name, attributes=prefixed)


def note(this: trace.Span, /, **attributes: str | int | float | None) -> None:
    if this.is_recording():
        this.set_attributes({f"prorl.{key}": value for key, value in attributes.items() if value is not None})


def failed(this: trace.Span, why: str) -> None:
    """Set a span's status to error, for a failure that raises no exception in the span's block."""
    if this.is_recording():
        this.set_status(trace.StatusCode.ERROR, why)


def trace_headers() -> dict[str, str]:
    """Return the request headers that add the called server's spans to the current trace; empty without a trace."""
    headers: dict[str, str] = {}
    if _has_provider():
        propagate.inject(headers)
    return headers


@functools.cache
def _has_provider() -> bool:
    """Return whether the process has a tracer provider. Cached: a provider set after the first call has no effect."""
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


@functools.cache
def _gym_span_filter() -> Callable[[str], bool]:
    """Return Gym's predicate for enabled span groups; if Gym's telemetry is off, all groups are enabled."""
    try:
        from nemo_gym.telemetry import get_telemetry, is_span_group_enabled
    except ImportError:  # Gym before 0.7
        return lambda _: True
    wants: Callable[[str], bool] = is_span_group_enabled
    return wants if get_telemetry() is not None else lambda _: True
