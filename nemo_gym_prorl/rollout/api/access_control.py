# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Access control: clients and their keys, and the rollouts that each client may see and change.

Clients with keys see and change only the rollouts that they submitted. Another client's job is refused with 403 and an
unknown id with 404, so that a client of a restarted service can tell a lost rollout from another client's. Of other
clients, a client can learn only that an id is taken and, from cursors, how many outcomes there are.

A key is 256 random bits, so its SHA-256 cannot be reversed by guessing, and a slow password hash would only delay each
request. The keys file has only hashes; a client that lost its key needs a new key.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.http.keys import CLIENT_KEY, Caller, Scope
from nemo_gym_prorl.http.problem_document import field_errors, in_words
from nemo_gym_prorl.rollout.api.schemas import Identifier
from nemo_gym_prorl.rollout.job import Job
from nemo_gym_prorl.rollout.request import NO_CLIENT, Cursor, JobConflict, JobRequest, NotOwner
from nemo_gym_prorl.rollout.storage.store import JobStore, Transition


LOGGER = logging.getLogger(__name__)

ALL_BUT_ADMIN = (Scope.SUBMIT, Scope.READ, Scope.CANCEL)

_RELOAD_INTERVAL_S = 1.0
"""Seconds between two checks of the keys file for a change; a revoked key stays valid for at most this time."""
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


def _name(value: str) -> str:
    if value == NO_CLIENT:
        raise ValueError(f"{NO_CLIENT!r} is the client of rollouts without a client; choose another name")
    return value


def _hash(value: str) -> str:
    if _HASH.fullmatch(value) is None:
        raise ValueError("must be sha256: and 64 hexadecimal digits, as `prorl key new` writes it")
    return value


class Client(BaseModel):
    """Client with the hash of its key, its scopes and its share."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[Identifier, AfterValidator(_name)]
    hash: Annotated[str, AfterValidator(_hash)]
    scopes: list[Scope] = Field(default=[*ALL_BUT_ADMIN], min_length=1)
    share: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    """Share of sandboxes, slots and limits, relative to other clients' shares."""


class Clients(BaseModel):
    """Content of the keys file."""

    model_config = ConfigDict(extra="forbid")

    clients: list[Client] = Field(default_factory=list)


def read_clients(path: Path) -> Clients:
    """Read the keys file.

    Raises:
        CallerError: the file is missing, invalid, accessible to other users, or writable by its group.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & (stat.S_IRWXO | stat.S_IWGRP):
                raise CallerError(f"others may read or write {path} (mode {mode:04o}): chmod 600", field="keys_file")
            found = Clients.model_validate(yaml.safe_load(file) or {})
    except OSError as error:
        raise CallerError(f"{path}: {error.strerror}; `prorl key new` creates it", field="keys_file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CallerError(f"{path} is neither YAML nor JSON: {error}", field="keys_file") from error
    except ValidationError as error:
        raise CallerError(f"{path}: {in_words(field_errors(error.errors()))}", field="keys_file") from error
    seen = set[str]()
    for number, client in enumerate(found.clients):
        for field in ("name", "hash"):
            if (text := getattr(client, field)) in seen:
                raise CallerError(f"{path}: clients.{number}.{field}: used by another client", field="keys_file")
            seen.add(text)
    return found


def write_clients(path: Path, clients: Clients) -> None:
    """Replace the keys file, or the target of its symlink, atomically and readable only by this user."""
    path = path.resolve()
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            yaml.safe_dump(clients.model_dump(mode="json"), file, sort_keys=False)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def new_key() -> str:
    return f"{CLIENT_KEY}{secrets.token_urlsafe(32)}"


def hash_of(key: str) -> str:
    """Return the hash of a key in the form of the keys file: ``sha256:`` and hexadecimal digits."""
    return f"sha256:{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()}"


class KeysFile:
    """Clients of a service by their keys; the file is read again when it changes.

    Args:
        path: the keys file.
        changed: called with the shares by client, at the start and after each change of the file.
        clock: returns monotonic seconds.

    Raises:
        CallerError: see :func:`read_clients`. If the file becomes invalid later, the error is logged and the previous
            keys stay valid.
    """

    def __init__(
        self,
        path: Path,
        changed: Callable[[Mapping[str, float]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path = path.expanduser().absolute()
        self._changed = changed
        self._clock = clock
        self._by_hash: dict[str, Caller] = {}
        self._loaded = self._signature()
        self._checked_at = clock()
        self._apply(read_clients(path))

    def caller(self, key: str) -> Caller | None:
        """Return the client of a key; ``None`` for an unknown or revoked key."""
        self._reload()
        # A lookup by hash: callers cannot choose digits of the hash, so its timing reveals nothing about other keys.
        return self._by_hash.get(hash_of(key))

    def _reload(self) -> None:
        now = self._clock()
        if now - self._checked_at < _RELOAD_INTERVAL_S:
            return
        self._checked_at = now
        signature = self._signature()
        if signature == self._loaded:
            return
        self._loaded = signature
        try:
            self._apply(read_clients(self._path))
        except CallerError as error:
            LOGGER.error("keys file not reloaded: %s; the previous keys stay valid", error.reason)

    def _apply(self, found: Clients) -> None:
        self._by_hash = {client.hash: Caller(client.name, frozenset(client.scopes)) for client in found.clients}
        self._changed({client.name: client.share for client in found.clients})

    def _signature(self) -> tuple[int, ...] | None:
        try:
            about = self._path.stat()
        except OSError:
            return None
        return about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


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
"""Required scope by method and route. Other routes require ``admin``, except ``/healthz``, which needs no key."""


def is_own(caller: Caller, one: Job | Transition) -> bool:
    """Return whether the caller submitted the job or event, or is an administrator."""
    return caller.is_admin or one.client == caller.name


def require_own(caller: Caller, job: Job, field: str | None = None) -> None:
    """Raise :class:`NotOwner` with ``field`` unless the caller may see and change the job."""
    if not is_own(caller, job):
        raise NotOwner(f"rollout {job.id!r} belongs to another client", field=field)


def submitted_by(caller: Caller, wanted: JobRequest, store: JobStore) -> JobRequest:
    """Check a request against the caller's rights, and return the request with the client name of the caller's key.

    Requests of a caller without a name (a service without keys) and of administrators are not restricted.

    Raises:
        NotOwner: the request names another client, or rollouts of other services, which may belong to any client.
        CallerError: the priority is above 0, which would bypass the shares of other clients.
        JobConflict: the id belongs to another client.
    """
    if caller.name is None:
        return wanted
    if wanted.client == NO_CLIENT:
        wanted = replace(wanted, client=caller.name)
    if caller.is_admin:
        return wanted
    if wanted.resume_point is not None:
        raise NotOwner("only administrators may set this; fork a rollout of your own", field="begin")
    if wanted.client != caller.name:
        raise NotOwner(
            f"{wanted.client!r} is not the client of this key, {caller.name!r}; leave it out", field="client"
        )
    if wanted.priority > 0:
        raise CallerError(
            "must be at most 0 without an administrator's key: higher would precede all other clients",
            field="priority",
        )
    known = None if wanted.id is None else store.get(wanted.id)
    if known is not None and not known.delivered:
        require_own_id(caller, known)
    return wanted


def require_own_id(caller: Caller, job: Job) -> None:
    """Raise :class:`JobConflict` unless the caller owns the job, whose id a submission of the caller uses."""
    if not is_own(caller, job):
        raise JobConflict.with_anothers(job.id)


def scoped_key(caller: Caller, key: bytes | None) -> bytes | None:
    """Return an idempotency key that is distinct per client; ``None`` stays ``None``."""
    return key if key is None or caller.name is None else caller.name.encode() + b"/" + key


async def ended_of(
    caller: Caller, store: JobStore, start: Cursor, limit: int, wait: float, *, content: bool = False
) -> tuple[list[Job], Cursor]:
    """Return the caller's own outcomes behind a cursor, and the next cursor; wait up to ``wait`` seconds if there are
    none. Outcomes of other clients are skipped: they neither end the wait nor cause empty pages.

    Raises:
        CursorExpired, CallerError: as for :meth:`JobStore.ended_after`.
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
        await asyncio.sleep(0)  # yield to the event loop: the log may be long
