# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A running service from the command line: which one it is, how it is asked, ``prorl cancel`` and ``prorl backends``.

The service is found by ``--url``, else ``PRORL_URL``, else by asking Gym's head server which of its servers is a
``prorl_agent``. Commands that ask and print use :class:`Service`, on the standard library: the client of
:mod:`nemo_gym_prorl.rollout.api.client` takes half a second to import.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import orjson
from rich.console import Console
from rich.table import Table

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.http.keys import authorization, trusted_authorities


DEFAULT_HEAD = "http://127.0.0.1:11000"
"""Where Gym's head server listens unless told otherwise."""

HEAD_S = 30.0
"""Longest wait for a head server's answer."""

CALL_S = 180.0
"""Longest silence of a service: a cancellation answers when the sandboxes are gone."""

STREAM_S = 60.0
"""Longest silence of a stream of events, which has a heartbeat every 15 s."""

_BACKENDS = "/v1/backends"
_PAGE = 1000
"""As many rollouts as a service lists at once."""


class Service:
    """Blocking client of one service; answers are JSON as the service sends it.

    Args:
        url: base URL, of ``http`` or ``https``.
        token: the service's key.
        timeout_s: longest silence.
    """

    def __init__(self, url: str, token: str | None, timeout_s: float = CALL_S) -> None:
        self.url = url.rstrip("/")
        self._headers = authorization(token)
        self._timeout_s = timeout_s

    def get(self, path: str, *needed: str, **query: str | None) -> Any:
        """Return the answer to GET; ``needed`` are the fields that it must have."""
        return self.call("GET", path, *needed, query=query)

    def rollout(self, rollout_id: str) -> dict[str, Any]:
        """Return a rollout as the service has it now. An id is any printable text, so it travels percent-encoded."""
        found: dict[str, Any] = self.get(f"/v1/rollouts/{quote(rollout_id, safe='')}", "id", "state")
        return found

    def rollouts(self, **query: str | None) -> Iterator[dict[str, Any]]:
        """Yield the rollouts that the service remembers and that fit, oldest first, without their results."""
        page: str | None = None
        while True:
            listing = self.get("/v1/rollouts", "rollouts", limit=str(_PAGE), **{**query, "from": page})
            yield from listing["rollouts"]
            if (page := listing.get("next")) is None:
                return

    def events(self, after: str | None) -> Iterator[dict[str, Any]]:
        """Yield transitions as they happen, from cursor ``after`` on, until the service closes the stream.

        Raises:
            ApiError: some behind ``after`` are forgotten, or this reader was too slow.
        """
        with self._answer("GET", "/v1/events", query={"after": after}, timeout_s=STREAM_S) as answer:
            kind = b""
            for line in answer:
                if line.startswith(b"event: "):
                    kind = line[7:].strip()
                elif line.startswith(b"data: ") and kind == b"problem":
                    raise _refusal(self.url, answer.status, line[6:])
                elif line.startswith(b"data: "):
                    yield orjson.loads(line[6:])

    def call(
        self, method: str, path: str, *needed: str, body: object = None, query: Mapping[str, str | None] | None = None
    ) -> Any:
        """Return the answer to a request.

        Raises:
            ApiError: the service refuses it.
            InfrastructureError: nothing answers, or something else than such a service.
            CallerError: the URL is none.
        """
        with self._answer(method, path, body=body, query=query or {}) as answer:
            found = orjson.loads(answer.read())
            if not all(name in found for name in needed):
                raise ValueError(f"an answer without {', '.join(needed)}")
            return found

    @contextmanager
    def _answer(
        self, method: str, path: str, *, query: Mapping[str, str | None], body: object = None, timeout_s: float = 0
    ) -> Iterator[HTTPResponse]:
        told = {name: value for name, value in query.items() if value is not None}
        data = None if body is None else orjson.dumps(body)
        headers = {name: value.encode() for name, value in self._headers.items()}  # in any alphabet
        headers |= {"Content-Type": b"application/json"} if data else {}
        with closing(self._connection(timeout_s or self._timeout_s)) as connection:
            try:
                connection.connect()
            except OSError as error:
                raise InfrastructureError(
                    f"no rollout service answers at {self.url}: {error}", kind=FailureKind.TRANSPORT_UNREACHABLE
                ) from error
            try:
                target = urlsplit(self.url).path + path + (f"?{urlencode(told)}" if told else "")
                connection.request(method, target, data, headers)
                answer = connection.getresponse()
                if answer.status >= 400:
                    raise _refusal(self.url, answer.status, answer.read())
                yield answer
            except (OSError, HTTPException) as error:
                raise InfrastructureError(
                    f"the connection to {self.url} broke: {str(error) or type(error).__name__}",
                    kind=FailureKind.TRANSPORT_PEER_DROP,
                ) from error
            except (ValueError, TypeError) as error:
                raise InfrastructureError(
                    f"the server at {self.url} is no rollout service of this version",
                    kind=FailureKind.TRANSPORT_UNREACHABLE,
                ) from error

    def _connection(self, timeout_s: float) -> HTTPConnection:
        try:
            place = urlsplit(self.url)
            if place.scheme == "https" and place.hostname:
                return HTTPSConnection(place.hostname, place.port, timeout=timeout_s, context=trusted_authorities())
            if place.scheme == "http" and place.hostname:
                return HTTPConnection(place.hostname, place.port, timeout=timeout_s)
        except (ValueError, HTTPException):  # a port that is none
            pass
        raise CallerError(f"{self.url!r} is no URL; it must begin with http:// or https://", field="url")


def _refusal(url: str, status: int, content: bytes) -> Exception:
    from nemo_gym_prorl.http.problem_document import ApiError, problem_of_answer

    return ApiError(problem_of_answer(url, status, content))


def connect(url: str | None, token: str | None) -> Service:
    """Return the one service that ``url`` names, or that the head server knows.

    Raises:
        InfrastructureError, CallerError: see :func:`find_service`; several are named.
    """
    urls = split_urls(url)
    if len(urls) > 1:
        raise CallerError("names several services, which only prorl submit takes; give one", field="--url")
    return Service(urls[0] if urls else find_service(head_url(), token), token)


def split_urls(url: str | None) -> list[str]:
    """Return the URLs of an option that takes several, with commas between."""
    return [one for one in map(str.strip, (url or "").split(",")) if one]


def head_url() -> str:
    """Return the address of Gym's head server, or of a front."""
    return os.environ.get("PRORL_HEAD", DEFAULT_HEAD)


def find_service(head: str, token: str | None = None) -> str:
    """Return the URL of the one ``prorl_agent`` that a head server of Gym, or a front, tells.

    Raises:
        CallerError: the deployment has none, or several.
        InfrastructureError, ApiError: see :func:`find_servers`.
    """
    agents = find_servers(head, token, "prorl_agent")
    if len(agents) != 1:
        names = ", ".join(f"{name} ({url})" for name, url in agents.items()) or "none"
        raise CallerError(f"the deployment at {head} must have one prorl_agent, has {names}", field="--url")
    return next(iter(agents.values()))


def find_servers(head: str, token: str | None, implementation: str) -> dict[str, str]:
    """Return the URLs of a deployment's servers of one implementation, by instance name.

    Args:
        head: URL of Gym's head server, or of a front.
        token: the service's key. A front wants it for each answer; Gym's head server does not look at it.
        implementation: ``prorl_agent``, say.

    Raises:
        InfrastructureError: no head server answers.
        ApiError: the key is missing or wrong.
    """
    try:
        listed = Service(head, token, HEAD_S).get("/server_instances")
        return {str(one["process_name"]): str(one["url"]) for one in listed if one["name"] == implementation}
    except InfrastructureError as error:
        cause = error.__cause__
        why = (cause.strerror or str(cause)) if isinstance(cause, OSError) else error.reason
    except (LookupError, TypeError):
        why = "what it lists are no servers"
    except Exception as error:
        from nemo_gym_prorl.http.problem_document import ApiError  # by pydantic, which takes long to import

        if not isinstance(error, ApiError) or error.problem.status in (401, 403):
            raise
        why = str(error)
    raise InfrastructureError(
        f"no NeMo Gym deployment answers at {head}: {why}; start one, or give --url or PRORL_URL",
        kind=FailureKind.TRANSPORT_UNREACHABLE,
    )


def cancel(url: str | None, token: str | None, ids: list[str], group: str | None) -> int:
    """Cancel rollouts; return how many ids, or whether the group, the service does not know.

    Raises:
        CallerError: neither ids nor a group are given, or both.
    """
    if bool(ids) == (group is not None):
        raise CallerError("give either rollout ids or --group", field="IDS")
    console = Console(highlight=False, soft_wrap=True)
    body = {"ids": ids} if ids else {"group": group}
    answer = connect(url, token).call("POST", "/v1/rollouts/cancel", "rollouts", "unknown", body=body)
    for job in answer["rollouts"]:
        console.print(f"{job['id']} {job['state']}", markup=False)
    for unknown in answer["unknown"]:
        console.print(f"{unknown} unknown", style="red", markup=False)
    if group is not None and not answer["rollouts"]:
        console.print(f"{group} unknown: no rollouts of this group", style="red", markup=False)
        return 1
    return len(answer["unknown"])


# Inference engines of model servers; a change goes to each of them, since each places rollouts on its own


def show_backends(url: str | None, token: str | None) -> None:
    """Print the engines of each model server."""
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    for model in _models(url, token):
        found = model.get(_BACKENDS, "backends", "waiting")
        table = Table(box=None, pad_edge=False)
        for column in ("id", "url", "run", "health", "rollouts", "turns", "limit", "weights"):
            table.add_column(column, overflow="fold")
        for one in found["backends"]:
            states = ", ".join([one["health"], *(name for name in ("draining", "paused") if one[name])])
            numbers = str(one["live_rollouts"]), str(one["in_flight"]), str(one["limit"] or "")
            table.add_row(one["id"], one["url"], one["run"] or "", states, *numbers, one["weight_version"] or "")
        console.print(f"{model.url}: {len(found['backends'])} engines, {found['waiting']} turns wait", markup=False)
        if found["backends"]:
            console.print(table)


def add_backend(
    url: str | None, token: str | None, engine: str, run: str | None, weight_version: str | None, key: str | None
) -> None:
    """Add an engine to each model server."""
    asked = {"url": engine, "run": run, "weight_version": weight_version, "api_key": key}
    body = {name: value for name, value in asked.items() if value is not None}
    for model in _models(url, token):
        added = model.call("POST", _BACKENDS, "id", "url", body=body)
        print(f"{model.url}: {added['id']} at {added['url']}")


def drain_backend(url: str | None, token: str | None, engine: str) -> None:
    """Drain an engine, by id or address, at each model server that has it.

    Raises:
        CallerError: none has it.
    """
    drained = 0
    for model in _models(url, token):
        known = model.get(_BACKENDS, "backends")["backends"]
        # Each model server has ids of its own; an address may be there once for each run.
        for each in [one["id"] for one in known if engine.rstrip("/") in (one["id"], one["url"])]:
            model.call("DELETE", f"{_BACKENDS}/{quote(each, safe='')}", query={"drain": "true"})
            print(f"{model.url}: {each} gets no new rollouts")
            drained += 1
    if not drained:
        raise CallerError(f"no model server has an engine {engine}; prorl backends lists them", field="ENGINE")


def _models(url: str | None, token: str | None) -> list[Service]:
    """Return the model servers.

    Raises:
        CallerError: the deployment has none of ours.
        InfrastructureError, ApiError: see :func:`find_servers`.
    """
    urls = split_urls(url) if url is not None else [*find_servers(head_url(), token, "prorl_model").values()]
    if not urls:
        raise CallerError(
            f"{head_url()} knows no prorl_model; name one, or that of a node of the fleet", field="--url"
        )
    return [Service(one, token) for one in urls]
