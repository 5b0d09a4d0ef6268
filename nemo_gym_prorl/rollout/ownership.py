# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Whose a rollout is: what a client with a key of its own may see and do of it, and what nobody else learns.

A job is its client's. To another one that exists is refused, an id that does not exist is unknown: who followed a
service that was restarted must be able to tell. So that an id is taken can be learnt, as it is from submitting under
it; nothing else can. The places in the service's logs that a client is given are sealed: the numbers in them would
count what others do.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from types import MappingProxyType

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.cursors import Cursor, CursorExpired
from nemo_gym_prorl.rollout.job import Job
from nemo_gym_prorl.rollout.request import NO_CLIENT, JobConflict, JobRequest, NotYours
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


_SEALED = re.compile(r"([0-9a-z]+)-([0-9a-f]{48})", re.ASCII)


class Places:
    """Cursors as callers have them: an administrator as they are, clients sealed.

    Args:
        store: whose logs they are places in.
    """

    def __init__(self, store: JobStore) -> None:
        self._epochs = frozenset({store.epoch, store.life})
        self._life = store.life
        self._key = store.seal

    def shown(self, caller: Caller, cursor: Cursor) -> str:
        """A place as text."""
        if caller.is_admin:
            return str(cursor)
        nonce = secrets.token_bytes(8)
        return f"{cursor.epoch}-{(nonce + self._sealed(cursor.epoch, nonce, cursor.position)).hex()}"

    def parse(self, caller: Caller, text: str, field: str = "after") -> Cursor:
        """A place from the text that its caller was given.

        Raises:
            CallerError: it was not given by a service to a client; names ``field``.
            CursorExpired: it was, by one that has been restarted.
        """
        if caller.is_admin or text == "0":
            return Cursor.parse(text, field)
        if (match := _SEALED.fullmatch(text)) is None:
            raise CallerError(f"{text[:100]!r} is no cursor; send one as the service gave it, or 0", field=field)
        if match[1] not in self._epochs:
            return Cursor(match[1], 0)  # to be refused where it is looked up
        sealed = bytes.fromhex(match[2])
        nonce, hidden = sealed[:8], sealed[8:16]
        position = int.from_bytes(hidden) ^ int.from_bytes(self._stream(match[1], nonce))
        if not hmac.compare_digest(sealed[8:], self._sealed(match[1], nonce, position)):
            raise CallerError(f"{text!r} is no cursor of this service", field=field)
        return Cursor(match[1], position)

    async def transitions(self, caller: Caller, every: AsyncIterator[Transition]) -> AsyncIterator[Transition]:
        """Those of the caller's own jobs; for a client ``seq`` counts them from here on."""
        seen = 0
        async for one in every:
            if caller.is_admin:
                yield one
            elif is_own(caller, one):
                seen += 1
                yield replace(one, seq=seen, cursor=self.shown(caller, Cursor(self._life, one.seq)))

    def told(self, caller: Caller, error: CursorExpired) -> CursorExpired:
        """Why a place cannot be gone on from, without what it says of others."""
        if caller.is_admin:
            return error
        return CursorExpired("what lies behind it is partly forgotten; list again, follow from there", field="after")

    def _stream(self, epoch: str, nonce: bytes) -> bytes:
        return hashlib.blake2b(epoch.encode() + nonce, key=self._key, digest_size=8, person=b"stream").digest()

    def _sealed(self, epoch: str, nonce: bytes, position: int) -> bytes:
        hidden = (position ^ int.from_bytes(self._stream(epoch, nonce))).to_bytes(8)
        text = epoch.encode() + nonce + hidden
        return hidden + hashlib.blake2b(text, key=self._key, digest_size=8, person=b"seal").digest()
