# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Spans of a rollout in one trace: stages, turns, tool calls, and the sampling of turns.

Spans go to the process's OpenTelemetry tracer provider. Gym 0.7 sets a provider in each server (``telemetry: {enabled:
true}``, with its extra ``telemetry``), as does ``opentelemetry-instrument``; both add the spans of HTTP requests.
Gym's setting ``span_groups`` also selects our spans. Without a provider, the default, no span is created: an
unrecorded span would cost 10 µs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from enum import StrEnum

from opentelemetry import propagate, trace


_TRACER = trace.get_tracer("nemo_gym_prorl")


class SpanGroup(StrEnum):
    """Gym's span groups that our spans belong to."""

    ROLLOUT = "rollout"
    AGENT = "agent"
    MODEL_CALL = "model_call"


def span(
    group: SpanGroup, name: str, /, **attributes: str | int | float | None
) -> contextlib.AbstractContextManager[trace.Span]:
    """Return a context manager with a span; an exception that leaves the block is recorded.

    Args:
        group: Gym's group that enables the span.
        name: name of the operation, without ids.
        attributes: stored under ``prorl.``; ``None`` is left out.
    """
    if not _on() or not _gym_wants()(group):
        return contextlib.nullcontext(trace.INVALID_SPAN)
    told = {f"prorl.{key}": value for key, value in attributes.items() if value is not None}
    return _TRACER.start_as_current_span(name, attributes=told)


def note(this: trace.Span, /, **attributes: str | int | float | None) -> None:
    if this.is_recording():
        this.set_attributes({f"prorl.{key}": value for key, value in attributes.items() if value is not None})


def failed(this: trace.Span, why: str) -> None:
    """Mark a span whose block did not raise as failed."""
    if this.is_recording():
        this.set_status(trace.StatusCode.ERROR, why)


def trace_headers() -> dict[str, str]:
    """Return the headers that connect a server's spans to the trace; none without a trace."""
    headers: dict[str, str] = {}
    if _on():
        propagate.inject(headers)
    return headers


@functools.cache
def _on() -> bool:
    """Return whether the process has a tracer provider, as of the first request: a look-up is slow."""
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


@functools.cache
def _gym_wants() -> Callable[[str], bool]:
    """Return Gym's filter of span groups, if Gym's telemetry is on."""
    try:
        from nemo_gym.telemetry import get_telemetry, is_span_group_enabled
    except ImportError:  # Gym before 0.7
        return lambda _: True
    wants: Callable[[str], bool] = is_span_group_enabled
    return wants if get_telemetry() is not None else lambda _: True
