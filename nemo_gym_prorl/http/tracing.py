# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Spans of a rollout, so that one trace holds it whole: stages, turns, calls of tools, and where a turn was sampled.

They go where the process's OpenTelemetry tracer provider sends them. Gym 0.7 sets one in each server (``telemetry:
{enabled: true}``, which needs its extra ``telemetry``), and so does ``opentelemetry-instrument``; either brings the
spans of HTTP requests between which ours stand. Of Gym's, its setting ``span_groups`` says which of ours are wanted,
too. Without a provider, which is the rule, nothing is made: a span that nobody records would cost 10 µs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from enum import StrEnum

from opentelemetry import propagate, trace


_TRACER = trace.get_tracer("nemo_gym_prorl")


class SpanGroup(StrEnum):
    """Gym's groups of spans that ours belong to."""

    ROLLOUT = "rollout"
    AGENT = "agent"
    MODEL_CALL = "model_call"


def span(
    group: SpanGroup, name: str, /, **attributes: str | int | float | None
) -> contextlib.AbstractContextManager[trace.Span]:
    """A span around a block; an exception that leaves the block is noted in it.

    Args:
        group: which of Gym's groups switches it.
        name: of the operation, without ids.
        attributes: by their names under ``prorl.``; those without a value are left out.
    """
    if not _on() or not _gym_wants()(group):
        return contextlib.nullcontext(trace.INVALID_SPAN)
    told = {f"prorl.{key}": value for key, value in attributes.items() if value is not None}
    return _TRACER.start_as_current_span(name, attributes=told)


def note(this: trace.Span, /, **attributes: str | int | float | None) -> None:
    """What a span's block has found out."""
    if this.is_recording():
        this.set_attributes({f"prorl.{key}": value for key, value in attributes.items() if value is not None})


def failed(this: trace.Span, why: str) -> None:
    """The block ended as it should, and what it did failed."""
    if this.is_recording():
        this.set_status(trace.StatusCode.ERROR, why)


def trace_headers() -> dict[str, str]:
    """The headers by which a server's spans join the trace; none without one."""
    headers: dict[str, str] = {}
    if _on():
        propagate.inject(headers)
    return headers


def _on() -> bool:
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


@functools.cache
def _gym_wants() -> Callable[[str], bool]:
    """Gym's own switch, where it is Gym's telemetry that is on."""
    try:
        from nemo_gym.telemetry import get_telemetry, is_span_group_enabled
    except ImportError:  # Gym before 0.7
        return lambda _: True
    wants: Callable[[str], bool] = is_span_group_enabled
    return wants if get_telemetry() is not None else lambda _: True
