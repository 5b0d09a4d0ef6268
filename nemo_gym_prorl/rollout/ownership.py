# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Access control: clients with keys see and change only the rollouts that they submitted.

Another client's job is refused, an unknown id is unknown, so that a follower of a restarted service can tell them
apart. A client can learn that an id is taken, and from cursors how many outcomes there were; nothing else.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import MappingProxyType

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.job import Job
from nemo_gym_prorl.rollout.request import NO_CLIENT, Cursor, JobConflict, JobRequest, NotYours
from nemo_gym_prorl.rollout.store import JobStore, Transition
from nemo_gym_prorl.serving.keys import Caller, Scope


ROUTES = MappingProxyType(
    {
        **dict.fromkeys(
            [
                ("POST", "/v1/rollouts"),
                ("POST", "/v1/rollouts/{rollout_id}/fork"),
                ("POST", "/run"),
                ("POST", "/v1/responses"),
                ("POST", "/ng-rollout/{rollout_id}/v1/responses"),
                ("POST", "/ng-rollout/{rollout_id}/training-token-capture/v1/responses"),
                ("POST", "/aggregate_metrics"),
                ("POST", "/process"),
            ],
            Scope.SUBMIT,
        ),
        **dict.fromkeys(
            [
                ("GET", "/v1/rollouts"),
                ("GET", "/v1/rollouts/{rollout_id}"),
                ("GET", "/v1/rollouts/{rollout_id}/checkpoints"),
                ("GET", "/v1/events"),
                ("GET", "/status"),
                ("GET", "/metrics"),
                ("GET", "/openapi.json"),
                ("GET", "/docs"),
                ("GET", "/docs/oauth2-redirect"),
                ("GET", "/redoc"),
            ],
            Scope.READ,
        ),
        **dict.fromkeys(
            [("DELETE", "/v1/rollouts/{rollout_id}"), ("POST", "/v1/rollouts/cancel"), ("POST", "/cancel")],
            Scope.CANCEL,
        ),
        **dict.fromkeys(
            [
                ("POST", "/v1/drain"),
                ("POST", "/v1/resume"),
                ("POST", "/start"),
                ("POST", "/stop"),
                ("POST", "/add_llm_server"),
                ("POST", "/clear_llm_server"),
            ],
            Scope.ADMIN,
        ),
    }
)
"""What a key must be good for, by method and route; a route that is not here asks for ``admin``."""


def is_own(caller: Caller, one: Job | Transition) -> bool:
    """Whether it is the caller's own to see, as everything is an administrator's."""
    return caller.is_admin or one.client == caller.name


def require_own(caller: Caller, job: Job, field: str | None = None) -> None:
    """Refuse another client's job.

    Raises:
        NotYours: it is one; names ``field``.
    """
    if not is_own(caller, job):
        raise NotYours(f"rollout {job.id!r} is another client's", field=field)


def submitted_by(caller: Caller, wanted: JobRequest, store: JobStore) -> JobRequest:
    """A job as its caller may submit it: under the name that belongs to its key.

    Raises:
        NotYours: it names another client, or where other services had a rollout, which may be anybody's.
        CallerError: its priority would go before other clients' rollouts, whatever their shares.
        JobConflict: its id is another client's.
    """
    if caller.name is None:
        return wanted
    if wanted.client == NO_CLIENT:
        wanted = replace(wanted, client=caller.name)
    if caller.is_admin:
        return wanted
    if wanted.begin is not None:
        raise NotYours("is for administrators; fork a rollout of your own", field="begin")
    if wanted.client != caller.name:
        raise NotYours(
            f"{wanted.client!r} is not the client of this key, {caller.name!r}; leave it out", field="client"
        )
    if wanted.priority > 0:
        raise CallerError(
            "above 0 is for administrators: it goes before all other clients, not your own", field="priority"
        )
    known = None if wanted.id is None else store.get(wanted.id)
    if known is not None and not known.delivered:
        require_own_id(caller, known)
    return wanted


def require_own_id(caller: Caller, job: Job) -> None:
    """Refuse to submit under the id of another client's job.

    Raises:
        JobConflict: it is one.
    """
    if not is_own(caller, job):
        raise JobConflict.with_anothers(job.id)


def own_key(caller: Caller, key: bytes | None) -> bytes | None:
    """What makes two posts the same rollout, of one client: another's is another rollout, whatever it is like."""
    return key if key is None or caller.name is None else caller.name.encode() + b"/" + key


async def ended_of(
    caller: Caller, store: JobStore, start: Cursor, limit: int, wait: float, *, content: bool = False
) -> tuple[list[Job], Cursor]:
    """Outcomes behind a place, the caller's own alone, and the place to go on from. What others end meanwhile is gone
    past, so that it neither ends the waiting nor makes empty pages.

    Raises:
        CursorExpired, CallerError: as :meth:`JobStore.ended_after`.
    """
    until = asyncio.get_running_loop().time() + wait
    while True:
        if (left := until - asyncio.get_running_loop().time()) > 0:
            await store.wait_for_end(start, left)
        ended, cursor = await store.ended_after(start, limit, content=content)
        own = [job for job in ended if is_own(caller, job)]
        if own or not ended or caller.is_admin:
            return own, cursor
        start = cursor
        await asyncio.sleep(0)  # a log may be long
