# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Commands for a running service: ``prorl status``, ``tail``, ``cancel`` and ``backends``.

The rollout service is at ``--url``, else at ``PRORL_URL``, else the ``prorl_agent`` listed by Gym's head server. The
model servers of ``prorl backends`` are at ``--url``, else all ``prorl_model`` servers listed by Gym's head server.
:class:`Service` uses the standard library, because :mod:`nemo_gym_prorl.rollout.api.client` is slow to import.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

import orjson
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from nemo_gym_prorl.cli.show import distinct_failures, failure_line, visible
from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError, Stage
from nemo_gym_prorl.http.keys import authorization, trusted_authorities


DEFAULT_HEAD = "http://127.0.0.1:11000"
"""Default URL of Gym's head server."""

HEAD_S = 30.0  # socket timeout of the head server, which may be busy starting servers
CALL_S = 180.0  # socket timeout of a service: a cancellation answers when the sandboxes are deleted
STREAM_S = 60.0  # socket timeout of the event stream: four heartbeats of 15 s

_ENGINES_S = 5.0  # socket timeout of a model server, which must not delay `prorl status` for long
_BACKENDS = "/v1/backends"
_PAGE = 1000  # rollouts per request: the service's maximum


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow no redirect, which would send the key to another host."""


class Service:
    """Blocking client of a rollout service, model server or head server; answers are parsed JSON. A request fails
    after ``timeout_s`` seconds without data."""

    def __init__(self, url: str, token: str | None, timeout_s: float = CALL_S) -> None:
        self.url = url.rstrip("/")
        self._headers = authorization(token)
        self._timeout_s = timeout_s

    def get(self, path: str, *needed: str, **query: str | None) -> Any:
        """Return the parsed answer to a GET request with query parameters; see :meth:`call`."""
        return self.call("GET", path, *needed, query=query)

    def rollout(self, rollout_id: str) -> dict[str, Any]:
        """Return a rollout's ``JobView``. The id is percent-encoded, because ids may be any printable text."""
        found: dict[str, Any] = self.get(f"/v1/rollouts/{quote(rollout_id, safe='')}", "id", "state")
        return found

    def rollouts(self, **query: str | None) -> Iterator[dict[str, Any]]:
        """Yield the ``JobView`` of each rollout that matches the query parameters, oldest first, without results."""
        page: str | None = None
        while True:
            listing = self.get("/v1/rollouts", "rollouts", limit=str(_PAGE), **{**query, "from": page})
            yield from listing["rollouts"]
            if (page := listing.get("next")) is None:
                return

    def events(self, after: str | None) -> Iterator[dict[str, Any]]:
        """Yield state changes after a cursor, or only new ones for ``None``, until the service closes the stream.

        Raises:
            ApiError: status 410: events after the cursor are no longer stored, or this reader was too slow.
            InfrastructureError, CallerError: see :meth:`call`.
        """
        with self._request("GET", "/v1/events", query={"after": after}, timeout_s=STREAM_S) as answer:
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
        """Send a request and return the parsed answer, which must have the fields ``needed``. A ``body`` is sent as
        JSON; query parameters of ``None`` are left out.

        Raises:
            ApiError: the service refuses the request.
            InfrastructureError: the service does not answer, or the answer is not JSON with the needed fields.
            CallerError: the URL is invalid.
        """
        with self._request(method, path, body=body, query=query or {}) as answer:
            found = orjson.loads(answer.read())
            if not all(name in found for name in needed):
                raise ValueError(f"an answer without {', '.join(needed)}")
            return found

    @contextmanager
    def _request(
        self, method: str, path: str, *, query: Mapping[str, str | None], body: object = None, timeout_s: float = 0
    ) -> Iterator[HTTPResponse]:
        if not self.url.startswith(("http://", "https://")):
            raise CallerError(f"must be a URL with http:// or https://, not {self.url!r}", field="url")
        given = {name: value for name, value in query.items() if value is not None}
        target = self.url + path + (f"?{urlencode(given)}" if given else "")
        data = None if body is None else orjson.dumps(body)
        # Header values are sent as Latin-1.
        headers = {name: value.encode().decode("latin-1") for name, value in self._headers.items()}
        headers |= {"Content-Type": "application/json"} if data else {}
        opener = build_opener(ProxyHandler({}), _NoRedirect, HTTPSHandler(context=trusted_authorities()))
        request = Request(target, data, headers, method=method)
        try:
            with opener.open(request, timeout=timeout_s or self._timeout_s) as answer:
                yield answer
        except HTTPError as error:
            raise _refusal(self.url, error.code, error.read()) from None
        except URLError as error:
            raise InfrastructureError(
                f"no rollout service answers at {self.url}: {error.reason}", kind=FailureKind.TRANSPORT_UNREACHABLE
            ) from (error.reason if isinstance(error.reason, OSError) else error)
        except (OSError, HTTPException) as error:
            raise InfrastructureError(
                f"the connection to {self.url} broke: {str(error) or type(error).__name__}",
                kind=FailureKind.TRANSPORT_PEER_DROP,
            ) from error
        except (ValueError, TypeError) as error:
            raise InfrastructureError(
                f"the server at {self.url} is not a rollout service of this version",
                kind=FailureKind.TRANSPORT_UNREACHABLE,
            ) from error


def _refusal(url: str, status: int, content: bytes) -> Exception:
    from nemo_gym_prorl.http.problem_document import ApiError, problem_of_answer

    return ApiError(problem_of_answer(url, status, content))


def connect(url: str | None, token: str | None) -> Service:
    """Return a client of the service at ``url``; ``None`` finds the service by the head server.

    Raises:
        CallerError: ``url`` has several URLs; see also :func:`find_service`.
        InfrastructureError, ApiError: see :func:`find_servers`.
    """
    urls = split_urls(url)
    if len(urls) > 1:
        raise CallerError("must be one URL; only `prorl submit` accepts several", field="--url")
    return Service(urls[0] if urls else find_service(head_url(), token), token)


def split_urls(url: str | None) -> list[str]:
    return [part for part in map(str.strip, (url or "").split(",")) if part]


def head_url() -> str:
    """Return ``PRORL_HEAD``, the URL of a head server or gateway, with a scheme; default :data:`DEFAULT_HEAD`."""
    head = os.environ.get("PRORL_HEAD", DEFAULT_HEAD)
    return head if "://" in head else f"http://{head}"


def find_service(head: str, token: str | None = None) -> str:
    """Return the URL of the ``prorl_agent`` that a head server or gateway lists.

    Raises:
        CallerError: the deployment does not have exactly one ``prorl_agent``.
        InfrastructureError, ApiError: see :func:`find_servers`.
    """
    agents = find_servers(head, token, "prorl_agent")
    if len(agents) != 1:
        names = ", ".join(f"{name} ({url})" for name, url in agents.items()) or "none"
        raise CallerError(f"is required: the deployment at {head} has {names}, not one prorl_agent", field="--url")
    return next(iter(agents.values()))


def find_servers(head: str, token: str | None, implementation: str) -> dict[str, str]:
    """Return the URLs of a deployment's servers of one implementation, such as ``prorl_agent``, by instance name. A
    gateway requires the key ``token``; Gym's head server ignores it.

    Raises:
        CallerError: the URL is invalid.
        InfrastructureError: no head server answers.
        ApiError: the key is missing or wrong.
    """
    try:
        listed = Service(head, token, HEAD_S).get("/server_instances")
        return {
            str(server["process_name"]): str(server["url"]) for server in listed if server["name"] == implementation
        }
    except InfrastructureError as error:
        cause = error.__cause__
        why = (cause.strerror or str(cause)) if isinstance(cause, OSError) else error.reason
    except (LookupError, TypeError):
        why = "the answer is not a list of servers"
    except Exception as error:
        from nemo_gym_prorl.http.problem_document import ApiError  # imports pydantic, which is slow

        if not isinstance(error, ApiError) or error.problem.status in (401, 403):
            raise
        why = str(error)
    raise InfrastructureError(
        f"no NeMo Gym deployment answers at {head}: {why}; start one, or set --url, PRORL_URL or PRORL_HEAD",
        kind=FailureKind.TRANSPORT_UNREACHABLE,
    )


def cancel(url: str | None, token: str | None, ids: list[str], group: str | None) -> int:
    """Cancel rollouts and print their states; return the number of unknown ids, or 1 for an unknown group.

    Raises:
        CallerError: neither ids nor a group are given, or both.
    """
    if bool(ids) == (group is not None):
        raise CallerError("give either ids of rollouts or --group", field="IDS")
    console = Console(highlight=False, soft_wrap=True)
    body = {"ids": ids} if ids else {"group": group}
    answer = connect(url, token).call("POST", "/v1/rollouts/cancel", "rollouts", "unknown", body=body)
    for job in answer["rollouts"]:
        console.print(f"{job['id']} {job['state']}", markup=False)
    for unknown in answer["unknown"]:
        console.print(f"{unknown} unknown", style="red", markup=False)
    if group is not None and not answer["rollouts"]:
        console.print(f"{group} unknown: the group has no rollouts", style="red", markup=False)
        return 1
    return len(answer["unknown"])


# Engines: every change is sent to all model servers, because each model server assigns its own rollouts to engines.


def show_backends(url: str | None, token: str | None) -> None:
    console = Console(highlight=False, emoji=False, soft_wrap=True, width=1000)  # wide, so that no URL is wrapped
    for model in _model_servers(url, token):
        found = model.get(_BACKENDS, "backends", "waiting")
        table = Table(box=None, pad_edge=False)
        for column in ("id", "url", "run", "health", "rollouts", "turns", "limit", "weights"):
            table.add_column(column, overflow="fold")
        for engine in found["backends"]:
            states = ", ".join([engine["health"], *(name for name in ("draining", "paused") if engine[name])])
            numbers = str(engine["live_rollouts"]), str(engine["in_flight"]), str(engine["limit"] or "")
            run, weights = engine["run"] or "", engine["weight_version"] or ""
            table.add_row(engine["id"], engine["url"], run, states, *numbers, weights)
        engines, turns = len(found["backends"]), found["waiting"]
        engines_text = f"{engines} engine{'s' * (engines != 1)}, {turns} turn{'s' * (turns != 1)} waiting"
        console.print(f"{model.url}: {engines_text}", markup=False)
        if found["backends"]:
            console.print(table)


def add_backend(
    url: str | None, token: str | None, engine: str, run: str | None, weight_version: str | None, key: str | None
) -> None:
    fields = {"url": engine, "run": run, "weight_version": weight_version, "api_key": key}
    body = {name: value for name, value in fields.items() if value is not None}
    for model in _model_servers(url, token):
        added = model.call("POST", _BACKENDS, "id", "url", body=body)
        print(f"{model.url}: {added['id']} at {added['url']}")


def drain_backend(url: str | None, token: str | None, engine: str) -> None:
    """Drain an engine, given by id or URL, at each model server that has the engine.

    Raises:
        CallerError: no model server has the engine.
    """
    drained = 0
    for model in _model_servers(url, token):
        known = model.get(_BACKENDS, "backends")["backends"]
        # Ids differ between model servers, and one model server may list a URL once per training run.
        for backend in [entry for entry in known if engine.rstrip("/") in (entry["id"], entry["url"])]:
            model.call("DELETE", f"{_BACKENDS}/{quote(backend['id'], safe='')}", query={"drain": "true"})
            print(f"{model.url}: {backend['id']} at {backend['url']} gets no new rollouts")
            drained += 1
    if not drained:
        raise CallerError(f"no model server has an engine {engine}; `prorl backends` lists engines", field="ENGINE")


def _model_servers(url: str | None, token: str | None) -> list[Service]:
    """Return clients of the model servers at ``url`` (comma-separated), else of those that the head server lists."""
    urls = split_urls(url) if url is not None else [*find_servers(head_url(), token, "prorl_model").values()]
    if not urls:
        raise CallerError(
            f"is required: {head_url()} lists no prorl_model; give its URL, or that of a node's prorl_model",
            field="--url",
        )
    return [Service(model, token) for model in urls]


_RECONNECT_S = 2.0  # pause before `prorl tail` reconnects, so that a restarting service gets few requests


def pools(status: Mapping[str, Any]) -> Table:
    table = Table("stage", "waiting", "working", "slots", box=None, pad_edge=False)
    for stage in Stage:
        pool = status["stages"][stage]
        table.add_row(stage.value, str(pool["waiting"]), str(pool["working"]), str(pool["slots"]))
    return table


def pools_line(status: Mapping[str, Any]) -> str:
    pools_by_stage = ((stage, status["stages"][stage]) for stage in Stage)
    return ", ".join(
        f"{stage.upper()} {pool['working']} of {pool['slots']} working, {pool['waiting']} waiting"
        for stage, pool in pools_by_stage
    )


def show_status(url: str | None, token: str | None) -> None:
    service = connect(url, token)
    status = service.get("/status", "stages", "held", "states", "sessions", "draining")
    down = [
        f"{name} cannot be reached since {_clock(held['since'])}, so its rollouts are on hold: {held['reason']}"
        for name, held in status["held"].items()
    ]
    down += engine_outages(service.url, token)
    states = ", ".join(f"{count} {state}" for state, count in status["states"].items() if count) or "no rollouts"
    more = "; draining" if status["draining"] else ""
    console = Console(highlight=False, emoji=False)
    lines = (Text(visible(line), style="red") for line in down)
    console.print(
        Group(pools(status), *lines, f"{states}; {status['sessions']} sandboxes in use{more}"), soft_wrap=True
    )


def engine_outages(agent: str, token: str | None) -> Iterator[str]:
    """Yield a line for each engine that is down, paused or draining, for each training run whose turns wait without an
    engine, and for each model server that has no engine or does not answer. Yields nothing if the head server does not
    list the URL ``agent``: the listed model servers are then unrelated."""
    try:
        if agent not in (found.rstrip("/") for found in find_servers(head_url(), token, "prorl_agent").values()):
            return
        models = find_servers(head_url(), token, "prorl_model")
    except Exception:  # without a head server, the model servers are unknown
        return
    for name, model in models.items():
        try:
            found = Service(model, token, _ENGINES_S).get(_BACKENDS, "backends", "waiting_by_run")
            if not (engines := found["backends"]):
                yield f"model server {name} has no engine; add one by `prorl backends add`"
            for run in sorted(found["waiting_by_run"].keys() - {engine["run"] or "" for engine in engines}):
                which = f"run {run!r}" if run else "no run"
                yield f"turns of {name} wait for an engine of {which}; none is registered"
            for engine in engines:
                what = f"engine {engine['url']} of {name} is"
                if (since := engine["down_since"]) is not None:
                    yield f"{what} down since {_clock(since)}"
                if (since := engine["paused_since"]) is not None:
                    yield f"{what} paused since {_clock(since)}; no turn is sampled until POST /v1/backends/resume"
                if engine["draining"]:
                    yield f"{what} draining; no new rollout is placed there"
        except Exception as error:
            yield f"model server {name} cannot say which engines are down: {error}"


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def show_rollout(url: str | None, token: str | None, rollout_id: str) -> None:
    job = connect(url, token).rollout(rollout_id)
    Console().print_json(data={name: value for name, value in job.items() if name != "result"})


def show_rollouts(url: str | None, token: str | None, group: str | None, failed: bool) -> None:
    """Print the rollouts of ``group``, oldest first; ``None`` matches every group. ``failed``: only rollouts that
    failed or were retried, except cancelled rollouts."""
    console = Console(highlight=False, emoji=False)
    table = Table("id", "state", box=None, pad_edge=False)
    for column in ("reward", "turns", "seconds"):
        table.add_column(column, justify="right")
    table.add_column("failures", overflow="fold")
    for job in connect(url, token).rollouts(group=group):
        failures = distinct_failures(job)
        if failed and (job["state"] == "cancelled" or not failures):
            continue
        seconds = (job["finished_at"] or time.time()) - job["submitted_at"]
        reward = "" if job["reward"] is None else f"{job['reward']:g}"
        told = Text("\n".join(visible(failure_line(failure, times)) for failure, times in failures))
        table.add_row(escape(job["id"]), job["state"], reward, str(job["turns"]), f"{seconds:.1f}", told)
    if table.row_count:
        console.print(table)
    console.print(f"{table.row_count} rollouts", style="dim")


def tail(url: str | None, token: str | None, after: str | None, group: str | None) -> None:
    """Print state changes after a cursor (``None``: new ones only) of a group (``None``: of all rollouts), until
    interrupted. Reconnect after a lost connection, but raise as :meth:`Service.call` if the first request fails."""
    from nemo_gym_prorl.http.problem_document import ApiError

    console = Console(highlight=False, emoji=False, soft_wrap=True)
    seen = after
    service = connect(url, token)
    service.get("/status", "stages")  # fails instead of reconnecting if the service is unreachable from the start
    while True:
        try:
            for event in service.events(seen):
                seen = event["cursor"]
                if group in (None, event["group"]):
                    console.print(_transition(event), markup=False)
            why = "the service closed the connection"
        except ApiError as error:
            if error.problem.status != 410:
                raise
            why, seen = f"{error.problem.detail}; continuing with new events", None
        except InfrastructureError as error:
            why = str(error)
        console.print(f"{why}; reconnecting", style="yellow", markup=False)
        time.sleep(_RECONNECT_S)


def _transition(event: Mapping[str, Any]) -> str:
    moment = _clock(event["at"])
    end = "" if event.get("reward") is None else f" reward {event['reward']:g}"
    if (kind := event.get("failure_kind")) is not None:
        end += f" again after {kind}" if event["state"] == "queued" else f" {kind}"
    return f"{event['cursor']} {moment} {event['id']} {event['state']}{end}"
