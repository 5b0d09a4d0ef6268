# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Control routes of the policy side, and their answers.

The routes are independent of NeMo Gym; ``prorl_model`` adds Gym's own routes. Backends may be added, drained, removed,
labelled and given new weights while rollouts run.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, FastAPI, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from nemo_gym_prorl.http.applications import health_router
from nemo_gym_prorl.http.problems import Declared, add_problem_handlers, no_other_parameters, problem_responses
from nemo_gym_prorl.policy.calls import KEY_PREFIX, CallGrant
from nemo_gym_prorl.policy.http.chat_requests import turn_request
from nemo_gym_prorl.policy.http.fields import chat_fields_of_responses
from nemo_gym_prorl.policy.pool.backend import Backend, Health
from nemo_gym_prorl.policy.runtime import PolicyRuntime
from nemo_gym_prorl.policy.service import PolicyService
from nemo_gym_prorl.policy.tokens.branches import token_in_rate
from nemo_gym_prorl.policy.tokens.conversations import SavedTurn, saved_turns
from nemo_gym_prorl.policy.turns import RolloutGone


type _Label = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f/?#]+$")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NewBackend(_Body):
    """Body of ``POST /v1/backends``; without ``api_key``, a key that is configured for the URL's origin is used."""

    url: Annotated[str, Field(max_length=2000)]
    id: _Label | None = None
    weight_version: _Label | None = None
    api_key: str | None = None
    run: _Label | None = None


class BackendSelector(_Body):
    """Backends that a request applies to; without an id, all backends of the training run."""

    id: _Label | None = None
    run: _Label | None = None


class Pause(BackendSelector):
    """Body of ``POST /v1/backends/pause``."""

    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0


class Resume(BackendSelector):
    """Body of ``POST /v1/backends/resume``."""

    weight_version: _Label | None = None
    reset_prefix_cache: bool = False


class SavedRollout(_Body):
    """A rollout's turns. ``began`` is the time of day that its template sees, ``waited_s`` its wait for backends."""

    run: _Label | None = None
    began: datetime
    waited_s: float = 0.0
    turns: Annotated[list[SavedTurn], Field(min_length=1)]


class NewKey(_Body):
    """Body of ``POST /v1/rollouts/{rollout}/key``."""

    group: Annotated[str, Field(max_length=2000)] | None = None
    run: _Label | None = None
    max_turns: Annotated[int, Field(ge=1)] | None = None
    max_total_tokens: Annotated[int, Field(ge=1)] | None = None
    params: dict[str, Any] = Field(
        default={}, description="Fields of the Responses API that override those of the calls."
    )


class Weights(BackendSelector):
    """Body of ``POST /v1/backends/weight_version``."""

    weight_version: _Label


class Share(_Body):
    """Body of ``POST /v1/backends/share``; ``parts`` is the number of model servers."""

    parts: Annotated[int, Field(ge=1, le=1_000_000)]
    run: _Label | None = None


def add_control_routes(app: FastAPI, runtime: PolicyRuntime, declared: Mapping[str, Declared] | None = None) -> None:
    """Add the control routes, the error handlers, and start and shutdown of the service to an application.

    Routes are below ``/v1/backends`` and ``/v1/rollouts``, with ``/metrics`` and the health route. For ``declared``
    see :func:`~nemo_gym_prorl.http.problems.add_problem_handlers`.
    """
    router = APIRouter(dependencies=[Depends(no_other_parameters)])

    @router.post("/v1/backends", status_code=201, responses=problem_responses(400, 403, 409))
    async def add(body: NewBackend) -> dict[str, Any]:
        """Add a backend for the rollouts of a training run. Waiting turns may be placed on the backend at once."""
        return _described(runtime, await runtime.add(body.url, body.id, body.weight_version, body.api_key, body.run))

    @router.get("/v1/backends", responses=problem_responses())
    async def listing(run: _Label | None = None) -> dict[str, Any]:
        """List backends with their state and the number of waiting turns, of all training runs or of a single run.

        `waiting_by_run` has the runs with waiting turns; the empty name stands for rollouts that name no run.
        """
        return _listing(runtime, run)

    @router.delete("/v1/backends/{backend_id}", responses=problem_responses(404))
    async def remove(backend_id: str, drain: bool = False) -> dict[str, Any]:
        """Remove a backend: at once, or with `drain` after its rollouts have ended."""
        runtime.dispatcher.apply(runtime.pool.drain(backend_id) if drain else runtime.pool.remove(backend_id))
        return {"id": backend_id, "draining": drain}

    @router.delete("/v1/backends", responses=problem_responses())
    async def clear(run: _Label | None = None) -> dict[str, Any]:
        """Remove all backends of a training run; without `run`, the backends for rollouts that name no run. Turns wait
        for new backends.
        """
        runtime.dispatcher.apply(runtime.pool.clear(run))
        return {"backends": []}

    @router.post("/v1/backends/pause", responses=problem_responses(400, 404))
    async def pause(body: Pause = Pause()) -> dict[str, Any]:
        """Start no turn until `resume`. Answers when no turn is in flight, or after the timeout."""
        return {"drained": await runtime.dispatcher.pause(body.id, body.timeout_s, body.run)}

    @router.post("/v1/backends/resume", responses=problem_responses(400, 404, 500))
    async def resume(body: Resume = Resume()) -> dict[str, Any]:
        """Resume backends, with a new label if the weights are new.

        With `reset_prefix_cache` each backend's prefix cache is emptied first, so that no turn reads keys and values
        of earlier weights. After an error, paused backends stay paused.
        """
        await runtime.resume(body.id, body.weight_version, body.run, reset_prefix_cache=body.reset_prefix_cache)
        return _listing(runtime, body.run)

    @router.post("/v1/backends/weight_version", responses=problem_responses(400, 404))
    async def label(body: Weights) -> dict[str, Any]:
        """Label the weights without a pause. A turn in flight begins with the old label and ends with the new one."""
        runtime.label(body.weight_version, body.id, body.run)
        return _listing(runtime, body.run)

    @router.post("/v1/backends/share", responses=problem_responses(400))
    async def share(body: Share) -> dict[str, Any]:
        """Set how many servers share a training run's backends; this server then uses `limit / parts` per backend."""
        runtime.dispatcher.apply(runtime.pool.share(body.parts, body.run))
        return _listing(runtime, body.run)

    @router.get("/v1/rollouts/{rollout}/tokens", response_model=dict[str, Any], responses=problem_responses(410))
    async def tokens(rollout: str) -> Response:
        """Return all tokens of a rollout's complete turns."""
        # FastAPI's encoder would walk a hundred thousand numbers on the event loop.
        return Response(orjson.dumps(trajectory(runtime.service, rollout)), media_type="application/json")

    @router.get("/v1/rollouts/{rollout}/waited", responses=problem_responses(410))
    async def waited(rollout: str) -> dict[str, float]:
        """Return the seconds in which turns of a rollout waited for a backend, up to now if one waits."""
        return {"waited_s": runtime.service.rollout(rollout).wait.seconds}

    @router.get("/v1/rollouts/{rollout}/turns", response_model=SavedRollout, responses=problem_responses(400, 410))
    async def turns(rollout: str, after: str | None = None) -> Response:
        """Return the rollout's turns, or those after an answer, for another server or rollout to continue."""
        state = runtime.service.rollout(rollout)
        if after is not None and after not in state.answers:
            raise RolloutGone(f"the rollout has no answer {after!r}", field="after")
        about = {"run": state.run, "began": state.began, "waited_s": state.wait.seconds}
        saved = orjson.dumps({**about, "turns": [*saved_turns(state.answers, after)]})
        return Response(saved, media_type="application/json")

    @router.put("/v1/rollouts/{rollout}/turns", responses=problem_responses(400, 409))
    async def restore(rollout: str, body: SavedRollout) -> dict[str, Any]:
        """Create a rollout from saved turns."""
        runtime.service.restore(rollout, body.run, body.began, body.turns)
        return {"rollout": rollout, "turns": len(body.turns)}

    @router.post("/v1/rollouts/{rollout}/key", status_code=201, responses=problem_responses())
    async def issue_key(rollout: str, body: NewKey = NewKey()) -> dict[str, Any]:
        """Create a rollout with a capability key, or replace the rollout's key.

        Send the key as bearer token or `x-api-key`: it permits turns of this rollout alone, within the limits.
        `context` is the engines' context length, if known.
        """
        service = runtime.service
        wanted = turn_request(chat_fields_of_responses(body.params), (), template_variables={}, extra_body={})
        service.calls(rollout, body.run).limit = None
        service.keys = {key: grant for key, grant in service.keys.items() if grant.rollout != rollout}
        key = KEY_PREFIX + secrets.token_urlsafe(32)
        service.keys[key] = CallGrant(
            rollout,
            **body.model_dump(exclude={"params"}),
            contexts=service.engine.contexts,
            sampling=wanted.sampling,
            template_variables=wanted.template_variables,
        )
        return {"key": key, "context": min(filter(None, service.engine.contexts.values()), default=None)}

    @router.delete("/v1/rollouts/{rollout}/key", responses=problem_responses(410))
    async def revoke_key(rollout: str) -> dict[str, Any]:
        """Revoke a rollout's key, cancel its turns in flight without counting these, and return its calls. Tokens
        stay.
        """
        runtime.service.revoke(rollout)
        return await calls(rollout)

    @router.get("/v1/rollouts/{rollout}/calls", responses=problem_responses(410))
    async def calls(rollout: str) -> dict[str, Any]:
        """Return a record of the calls of a rollout's program: turns, limit reached, refused calls, removed fields."""
        state = runtime.service.rollout(rollout)
        return {
            "turns": len(state.history.ledger.turns),
            "in_flight": len(state.calls.in_flight),
            "total_tokens": state.history.ledger.longest,
            "limit": state.calls.limit,
            "context_full": state.calls.context_full,
            "refused": state.calls.refused,
            "dropped": state.calls.dropped,
            "unanswered": len(state.calls.unanswered),
        }

    @router.delete("/v1/rollouts/{rollout}", responses=problem_responses())
    async def finish(rollout: str) -> dict[str, Any]:
        """Forget a rollout: cancel its turns and free its slot. Unknown rollouts are ignored."""
        runtime.service.finish(rollout)
        return {"rollout": rollout}

    @router.get("/metrics", response_class=PlainTextResponse, responses=problem_responses())
    async def metrics() -> Response:
        """Return the server's metrics in Prometheus text format."""
        return PlainTextResponse(runtime.metrics.exposition(), media_type="text/plain; version=0.0.4")

    app.include_router(router)
    app.include_router(health_router(runtime.dispatcher.loops))
    add_problem_handlers(app, declared)
    inner = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(served: FastAPI) -> AsyncIterator[Any]:
        async with runtime.lifespan(), inner(served) as state:
            yield state

    app.router.lifespan_context = lifespan


def _listing(runtime: PolicyRuntime, run: str | None) -> dict[str, Any]:
    pool = runtime.pool
    chosen = pool.backends.values() if run is None else pool.of_run(run)
    waiting = {of or "": turns for of, turns in pool.waiting_of.items() if turns and run in (None, of)}
    described = [_described(runtime, backend) for backend in chosen]
    return {"backends": described, "waiting": sum(waiting.values()), "waiting_by_run": waiting}


def _described(runtime: PolicyRuntime, backend: Backend) -> dict[str, Any]:
    return {
        "id": backend.id,
        "url": backend.url,
        "run": backend.run,
        "health": backend.health,
        "down_since": _time_of_day(backend.down_since if backend.health is Health.DOWN else None),
        "draining": backend.draining,
        "paused": backend.paused,
        "paused_since": _time_of_day(backend.paused_since),
        "weight_version": backend.weight_version,
        "live_rollouts": len(backend.live),
        "in_flight": len(backend.in_flight),
        "limit": backend.limit,
        "live_tokens": backend.kv_demand,
        "capacity": backend.capacity,
        "log_probs": runtime.engine.log_prob_modes.get(backend.url),
    }


def _time_of_day(moment: float | None) -> float | None:
    """Return the seconds since the epoch of a moment of the monotonic clock."""
    return None if moment is None else time.time() - (time.monotonic() - moment)


def trajectory(service: PolicyService, rollout: str) -> dict[str, Any]:
    """Return all tokens of a rollout: its sequences, the position of each answer in its sequence, and counters.

    An answer's prompt is ``ids[:start]`` of its sequence, its generation ``ids[start:end]``. The answer's
    ``weight_versions`` are the labels of the weights when sampling began and ended. The answer's ``routed_experts``,
    where the engine reports experts, belong to its new tokens and the token before. ``log_probs`` are the modes of the
    engines that sampled the rollout's turns on this server.

    Raises:
        RolloutGone: the rollout is unknown.
    """
    state = service.rollout(rollout)
    ledger = state.history.ledger
    paths = [set(leaf.path()) for leaf in ledger.leaves()]
    return {
        "rollout": rollout,
        "run": state.run,
        "counts": state.counts,
        "log_probs": sorted(state.log_prob_modes),
        "token_in_rate": token_in_rate(state.history),
        "sequences": [
            {
                "ids": sequence.ids.tolist(),
                "mask": sequence.mask,
                "log_probs": sequence.log_probs.tolist(),
                "spans": [[s.start, s.end, int(s.sampled), s.weight_version] for s in sequence.spans],
            }
            for sequence in ledger.sequences()
        ],
        "answers": {
            answer_id: {
                "sequence": next(index for index, path in enumerate(paths) if node.turn in path),
                "start": node.turn.start,
                "end": node.turn.end,
                "weight_versions": [node.turn.weight_version, node.turn.last_version],
                **({"routed_experts": experts} if (experts := node.turn.routed_experts) is not None else {}),
            }
            for answer_id, node in state.answers.items()
        },
    }
