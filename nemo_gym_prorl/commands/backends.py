# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl backends``: list, add and drain the inference engines of running model servers.

Model servers are found as services are: by ``--url``, else by asking Gym's head server which of its servers are
``prorl_model``. A change goes to each of them, since each places rollouts on its own.
"""

from __future__ import annotations

from urllib.parse import quote

from rich.console import Console
from rich.table import Table

from nemo_gym_prorl.commands.jobs import Service, find_servers, head_url, split_urls
from nemo_gym_prorl.failures import CallerError


_PATH = "/v1/backends"


def show(url: str | None, token: str | None) -> None:
    """Print the engines of each model server."""
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    for model in _models(url, token):
        found = model.get(_PATH, "backends", "waiting")
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


def add(
    url: str | None, token: str | None, engine: str, run: str | None, weight_version: str | None, key: str | None
) -> None:
    """Add an engine to each model server."""
    asked = {"url": engine, "run": run, "weight_version": weight_version, "api_key": key}
    body = {name: value for name, value in asked.items() if value is not None}
    for model in _models(url, token):
        added = model.call("POST", _PATH, "id", "url", body=body)
        print(f"{model.url}: {added['id']} at {added['url']}")


def drain(url: str | None, token: str | None, engine: str) -> None:
    """Drain an engine, by id or address, at each model server that has it.

    Raises:
        CallerError: none has it.
    """
    drained = 0
    for model in _models(url, token):
        known = model.get(_PATH, "backends")["backends"]
        # Each model server has ids of its own; an address may be there once for each run.
        for each in [one["id"] for one in known if engine.rstrip("/") in (one["id"], one["url"])]:
            model.call("DELETE", f"{_PATH}/{quote(each, safe='')}", query={"drain": "true"})
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
