# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Spans of rollouts, by OpenTelemetry's own SDK: each rollout is one trace, whoever's slot it takes."""

import asyncio
from typing import Any

import pytest
from opentelemetry import context, propagate, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_gym_prorl.http import tracing
from nemo_gym_prorl.servers.agent_server import ProRLAgent
from tests.agent.peers import COLLECTED, Environment, Policy, deployment


TRACES = ("0af7651916cd43dd8448eb211c80319c", "1bf7651916cd43dd8448eb211c80319c", "2cf7651916cd43dd8448eb211c80319c")


def joins(app: ASGIApp) -> ASGIApp:
    """What instrumented servers do, newer FastAPI itself among them, as far as a trace is joined."""

    async def joined(scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode(): value.decode() for name, value in scope.get("headers", [])}
        token = context.attach(propagate.extract(headers))
        try:
            await app(scope, receive, send)
        finally:
            context.detach(token)

    return joined


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    provider, told = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(told))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr(tracing, "_has_provider", lambda: True)
    monkeypatch.setattr(tracing, "_TRACER", provider.get_tracer("nemo_gym_prorl"))
    made = ProRLAgent.setup_webserver
    monkeypatch.setattr(ProRLAgent, "setup_webserver", lambda agent: joins(made(agent)))
    return told


def caller(number: int) -> dict[str, Any]:
    return {"headers": {"traceparent": f"00-{TRACES[number]}-b7ad6b7169203331-01"}}


def of_trace(spans: InMemorySpanExporter, number: int) -> list[ReadableSpan]:
    every = [span for span in spans.get_finished_spans() if span.name.startswith("prorl.")]
    return [span for span in every if span.context is not None and f"{span.context.trace_id:032x}" == TRACES[number]]


async def test_a_rollout_is_one_trace_whoever_had_its_slot_before(spans: InMemorySpanExporter) -> None:
    """One slot for three rollouts: the second and third begin in what another one's end did."""
    environment, policy = Environment(), Policy(turns=2, turn_s=0.05)
    async with deployment(environment, policy, stages={"init": 1, "ready": 1, "run": 1, "eval": 1}) as at:
        rows = [{**COLLECTED, "_ng_rollout_index": number} for number in range(3)]
        await asyncio.gather(*(at.post("/run", row, **caller(number)) for number, row in enumerate(rows)))
    for number in range(3):
        mine = of_trace(spans, number)
        assert [span.name for span in mine] == [
            *("prorl.init", "prorl.turn", "prorl.tool", "prorl.turn", "prorl.run", "prorl.eval")
        ]
        assert len({(span.attributes or {}).get("prorl.rollout") for span in mine} - {None}) == 1
        by_id = {span.context.span_id: span.name for span in mine if span.context is not None}
        parents = [by_id.get(span.parent.span_id) if span.parent else "nobody" for span in mine]
        assert parents == [None, "prorl.run", "prorl.run", "prorl.run", None, None], "else they are the caller's"
    for peer, path in ((environment, "/count"), (policy, "/v1/responses"), (environment, "/verify")):
        calls = zip(peer.calls, peer.headers, strict=True)
        told = {headers["traceparent"].split("-")[1] for (_, called), headers in calls if called == path}
        assert told == set(TRACES), path


async def test_gyms_switch_of_groups_is_ours(spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_gym_span_filter", lambda: lambda group: group == "rollout")
    async with deployment() as at:
        await at.post("/run", COLLECTED, **caller(0))
    assert {span.name for span in of_trace(spans, 0)} == {"prorl.init", "prorl.run", "prorl.eval"}
