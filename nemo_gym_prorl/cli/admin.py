# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Commands ``prorl key`` and ``prorl backends``, and the options ``--url`` and ``--token`` of several commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer


if TYPE_CHECKING:
    from nemo_gym_prorl.rollout.api.access_control import Clients


Url = Annotated[
    str | None,
    typer.Option(
        envvar="PRORL_URL",
        show_envvar=False,
        help="URL of the rollout service. Default: PRORL_URL, else the prorl_agent listed by Gym's head server.",
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="PRORL_TOKEN",
        show_envvar=False,
        help="Key of the service. Prefer PRORL_TOKEN: other users can read command lines.",
    ),
]


backends_app = typer.Typer(name="backends", help="List, add and drain the inference engines of model servers.")
ModelUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="URL of the model server, or several separated by commas. Default: all listed by Gym's head server.",
    ),
]


@backends_app.callback(invoke_without_command=True)
def backends(context: typer.Context, url: ModelUrl = None, token: Token = None) -> None:
    """List the engines of model servers: health, rollouts, turns in flight and weight version."""
    if context.invoked_subcommand is None:
        from nemo_gym_prorl.cli import service

        service.show_backends(url, token)


@backends_app.command("add")
def add_backend(
    engine: Annotated[str, typer.Argument(help="Base URL of the engine.")],
    run: Annotated[str | None, typer.Option(help="Use the engine only for rollouts of this training.")] = None,
    weight_version: Annotated[str | None, typer.Option(help="Label of the engine's weights.")] = None,
    key: Annotated[str | None, typer.Option(envvar="PRORL_API_KEY", help="Key of the engine.")] = None,
    url: ModelUrl = None,
    token: Token = None,
) -> None:
    """Add an engine, on which rollouts are then placed."""
    from nemo_gym_prorl.cli import service

    service.add_backend(url, token, engine, run, weight_version, key)


@backends_app.command("drain")
def drain_backend(
    engine: Annotated[str, typer.Argument(help="URL or id of the engine, as `prorl backends` prints it.")],
    url: ModelUrl = None,
    token: Token = None,
) -> None:
    """Place no new rollouts on an engine; its current rollouts continue."""
    from nemo_gym_prorl.cli import service

    service.drain_backend(url, token, engine)


key_app = typer.Typer(
    name="key", help="Create, list and revoke the keys of a service's clients.", no_args_is_help=True
)
File = Annotated[
    Path, typer.Option("--file", dir_okay=False, help="The service's keys file (setting keys_file, --keys-file).")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the client.")]


@key_app.command()
def new(
    name: Name,
    file: File,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="Permission of the client: submit, read, cancel or admin; repeatable. Default: the first three."
        ),
    ] = None,
    share: Annotated[
        float, typer.Option(help="Share of slots and sandboxes, relative to other clients' shares.")
    ] = 1.0,
) -> None:
    """Create a client and print its key. The file stores only a hash, so the key cannot be shown again.

    A running service accepts the key within a second.
    """
    from pydantic import ValidationError

    from nemo_gym_prorl.failures import CallerError
    from nemo_gym_prorl.http.problem_document import field_errors, in_words
    from nemo_gym_prorl.rollout.api.access_control import ALL_BUT_ADMIN, Client, hash_of, new_key, write_clients

    clients = _clients(file, missing_ok=True)
    if any(client.name == name for client in clients.clients):
        raise CallerError(f"client {name!r} exists already; revoke its key first", field="NAME")
    key = new_key()
    entry = {"name": name, "hash": hash_of(key), "scopes": scope or ALL_BUT_ADMIN, "share": share}
    try:
        clients.clients.append(Client.model_validate(entry))
    except ValidationError as error:
        raise CallerError(in_words(field_errors(error.errors()))) from None
    write_clients(file, clients)
    typer.echo(key)


@key_app.command("list")
def list_clients(file: File) -> None:
    """List the clients: name, share and permissions."""
    for client in _clients(file).clients:
        typer.echo(f"{client.name}\t{client.share:g}\t{','.join(client.scopes)}")


@key_app.command()
def revoke(name: Name, file: File) -> None:
    """Revoke a client's key. A running service refuses the key within a second; the client's rollouts continue."""
    from nemo_gym_prorl.failures import CallerError, suggest
    from nemo_gym_prorl.rollout.api.access_control import write_clients

    clients = _clients(file)
    left = [client for client in clients.clients if client.name != name]
    if len(left) == len(clients.clients):
        raise CallerError(f"no client {name!r}{suggest(name, (client.name for client in left))}", field="NAME")
    clients.clients = left
    write_clients(file, clients)


def _clients(file: Path, *, missing_ok: bool = False) -> Clients:
    from nemo_gym_prorl.rollout.api.access_control import Clients, read_clients

    return Clients() if missing_ok and not file.exists() else read_clients(file)
