# SPDX-License-Identifier: Apache-2.0
"""The policy side over HTTP: its configuration, its control routes, its errors.

Everything here is independent of NeMo Gym; ``prorl_model`` adds Gym's own routes. Backends may be added, drained,
removed and given new weights while rollouts run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import aiohttp
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from nemo_gym_prorl.failures import CallerError, RolloutError
from nemo_gym_prorl.policy.backend import Backend
from nemo_gym_prorl.policy.backends import BackendPool
from nemo_gym_prorl.policy.chat import Renderer
from nemo_gym_prorl.policy.engines import ENGINES, detect
from nemo_gym_prorl.policy.metrics import PolicyMetrics
from nemo_gym_prorl.policy.parsers import FORMATS
from nemo_gym_prorl.policy.placement import Placement
from nemo_gym_prorl.policy.service import PolicyService, Rewriting


_log = logging.getLogger(__name__)


class PolicyConfig(BaseModel):
    """How to reach the policy and how to read it.

    Attributes:
        base_url: one backend or several, with or without ``/v1``.
        api_key: bearer token for the backends; empty for none.
        model: model name as the backends serve it.
        engine: wire protocol; ``auto`` asks the first backend.
        tokenizer: folder or Hugging Face name; ``null`` takes ``model`` if that is a folder with a tokenizer.
        chat_template: file of a Jinja template that replaces the tokenizer's own.
        tool_format: how the model writes tool calls.
        thoughts: whether a leading ``<think>`` block is taken as reasoning.
        history: keep tokens as sampled when the template would rewrite them, or start a branch.
        limit: live rollouts per backend at most.
        wait_s: how long a turn may wait for a backend, in seconds.
        keep_s: how long an unused rollout's tokens are remembered, in seconds.
        headers: sent to the backends with every request.
        control_token: bearer token that the control routes ask for; ``null`` for none.
    """

    model_config = ConfigDict(extra="forbid")

    base_url: list[str]
    api_key: str = ""
    model: str
    engine: Literal["auto", "vllm", "vllm_chat", "nemo_rl", "sglang"] = "auto"
    tokenizer: str | None = None
    chat_template: str | None = None
    tool_format: str = "hermes"
    thoughts: bool = True
    history: Rewriting = "keep"
    limit: Annotated[int, Field(ge=1)] = 256
    wait_s: Annotated[float, Field(gt=0)] = 600.0
    keep_s: Annotated[float, Field(gt=0)] = 3600.0
    headers: dict[str, str] = Field(default_factory=dict)
    control_token: str | None = None


class PolicyHost:
    """Owns a policy service: built at the first use, since that is when an event loop runs."""

    def __init__(self, config: PolicyConfig) -> None:
        if config.tool_format not in FORMATS:
            raise CallerError(f"{config.tool_format!r} is none of {', '.join(FORMATS)}", field="tool_format")
        self.config = config
        named = Path(config.model, "tokenizer.json").is_file()
        self._tokenizer = config.tokenizer or (config.model if named else None)
        self.pool = BackendPool(limit=config.limit)
        self.metrics = PolicyMetrics(self.pool)
        self._lock = asyncio.Lock()
        self._service: PolicyService | None = None
        self._session: aiohttp.ClientSession | None = None
        for index, url in enumerate(config.base_url):
            self.pool.add(f"backend{index}", url)

    async def service(self) -> PolicyService:
        """The running service."""
        async with self._lock:
            if self._service is None:
                self._service = await self._build()
            return self._service

    async def aclose(self) -> None:
        """Stop background work and close connections."""
        if self._service is not None:
            await self._service.placement.aclose()
        if self._session is not None:
            await self._session.close()

    async def _build(self) -> PolicyService:
        config = self.config
        session = self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        source = self._tokenizer
        protocol: str = config.engine
        if protocol == "auto":
            urls = [backend.url for backend in self.pool.backends.values()]
            protocol = await detect(session, urls[0], tokenizer=source is not None) if urls else "vllm"
        engine = ENGINES[protocol](session, config.model, config.api_key, config.headers)
        if engine.takes_tokens and source is None:
            raise CallerError(f"engine {protocol!r} takes tokens, so it needs a tokenizer", field="tokenizer")
        renderer = Renderer.load(source, config.chat_template) if source and engine.takes_tokens else None
        placement = Placement(self.pool, engine, wait_s=config.wait_s)
        placement.start()
        return PolicyService(
            engine,
            placement,
            self.metrics,
            renderer=renderer,
            tool_format=config.tool_format,
            thoughts=config.thoughts,
            history=config.history,
            keep_s=config.keep_s,
        )


class AlreadyThere(CallerError):
    """What is to be added exists."""


class NewBackend(BaseModel):
    """Body of ``POST /v1/backends``."""

    model_config = ConfigDict(extra="forbid")

    url: str
    id: str | None = None
    weight_version: str | None = None


class Swap(BaseModel):
    """Body of ``pause`` and ``resume``; without an id every backend is meant."""

    model_config = ConfigDict(extra="forbid")

    id: str | None = None
    weight_version: str | None = None
    timeout_s: Annotated[float, Field(gt=0)] = 600.0


def add_control_routes(app: FastAPI, host: PolicyHost) -> None:
    """Add ``/v1/backends``, ``/v1/rollouts``, ``/metrics`` and the error handler to an application."""

    def authorised(request: Request) -> None:
        token = host.config.control_token
        if token is not None and request.headers.get("authorization") != f"Bearer {token}":
            raise CallerError("the control token is missing or wrong", field="authorization")

    router = APIRouter(dependencies=[Depends(authorised)])

    @router.post("/v1/backends", status_code=201)
    async def add(body: NewBackend) -> dict[str, Any]:
        service = await host.service()
        if body.id in host.pool.backends:
            raise AlreadyThere(f"there is a backend {body.id!r} already", field="id")
        backend_id = body.id or f"backend{time.monotonic_ns():x}"
        service.placement.apply(host.pool.add(backend_id, body.url, body.weight_version))
        return _describe(host.pool.backends[backend_id])

    @router.get("/v1/backends")
    async def listing() -> dict[str, Any]:
        return {"backends": [_describe(b) for b in host.pool.backends.values()], "waiting": host.pool.waiting}

    @router.delete("/v1/backends/{backend_id}")
    async def remove(backend_id: str, drain: bool = False) -> dict[str, Any]:
        service = await host.service()
        decisions = host.pool.drain(backend_id) if drain else host.pool.remove(backend_id)
        service.placement.apply(decisions)
        return {"id": backend_id, "draining": drain}

    @router.delete("/v1/backends")
    async def clear() -> dict[str, Any]:
        service = await host.service()
        service.placement.apply(host.pool.clear())
        return {"backends": []}

    @router.post("/v1/backends/pause")
    async def pause(body: Swap) -> dict[str, Any]:
        service = await host.service()
        return {"drained": await service.placement.pause(body.id, body.timeout_s)}

    @router.post("/v1/backends/resume")
    async def resume(body: Swap) -> dict[str, Any]:
        service = await host.service()
        service.placement.apply(host.pool.resume(body.id, body.weight_version))
        return {"backends": [_describe(b) for b in host.pool.backends.values()]}

    # Like a turn of its rollout, these two are for whoever knows the rollout's id.
    @app.get("/v1/rollouts/{rollout}/tokens")
    async def tokens(rollout: str) -> dict[str, Any]:
        return trajectory(await host.service(), rollout)

    @app.delete("/v1/rollouts/{rollout}")
    async def finish(rollout: str) -> dict[str, Any]:
        service = await host.service()
        service.ledger(rollout)
        service.finish(rollout)
        return {"rollout": rollout}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(host.metrics.exposition(), media_type="text/plain; version=0.0.4")

    app.include_router(router)
    app.add_exception_handler(RolloutError, problem)


def trajectory(service: PolicyService, rollout: str) -> dict[str, Any]:
    """All tokens of a rollout: its sequences, where in them each answer lies, and what did not go straight.

    An answer's prompt is ``ids[:start]`` of its sequence, its generation ``ids[start:end]``.
    """
    sequences = service.ledger(rollout).sequences()
    paths = [set(leaf.path()) for leaf in service.ledger(rollout).leaves()]
    return {
        "rollout": rollout,
        "counts": asdict(service.counts(rollout)),
        "sequences": [
            {
                "ids": sequence.ids,
                "mask": [int(trained) for trained in sequence.mask],
                "log_probs": sequence.log_probs,
                "spans": [[s.start, s.end, int(s.sampled), s.weight_version] for s in sequence.spans],
            }
            for sequence in sequences
        ],
        "answers": {
            answer_id: {
                "sequence": next(index for index, path in enumerate(paths) if turn in path),
                "start": turn.start,
                "end": turn.end,
            }
            for answer_id, turn in service.answers(rollout).items()
        },
    }


async def problem(request: Request, error: Exception) -> JSONResponse:
    """An RFC 9457 problem document. Statuses are ones that Gym's client does not repeat for ever."""
    assert isinstance(error, RolloutError)
    _log.warning("%s %s: %s: %s", request.method, request.url.path, type(error).__name__, error.reason)
    field = error.field if isinstance(error, CallerError) else None
    status = 500
    if isinstance(error, AlreadyThere):
        status = 409
    elif isinstance(error, CallerError):
        status = {"authorization": 401, "rollout": 404, "id": 404}.get(field or "", 400)
    body = {
        "type": f"urn:nemo-gym-prorl:{error.kind}",
        "title": type(error).__name__,
        "status": status,
        "detail": error.reason,
        "field": field,
    }
    return JSONResponse(body, status_code=status, media_type="application/problem+json")


def _describe(backend: Backend) -> dict[str, Any]:
    return {
        "id": backend.id,
        "url": backend.url,
        "health": backend.health,
        "draining": backend.draining,
        "paused": backend.paused,
        "weight_version": backend.weight_version,
        "live_rollouts": len(backend.live),
        "in_flight": len(backend.in_flight),
        "limit": backend.limit,
        "live_tokens": backend.demand,
        "capacity": backend.capacity,
    }
