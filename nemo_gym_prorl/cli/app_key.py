# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl key``: who may use a service, in the file that its setting ``keys_file`` names. As in ``cli.py``, modules
are imported by the command that needs them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer


if TYPE_CHECKING:
    from nemo_gym_prorl.rollout.api.access_control import Clients

app = typer.Typer(name="key", help="Keys of a service's clients, in its keys_file.", no_args_is_help=True)
File = Annotated[Path, typer.Option("--file", dir_okay=False, help="The service's keys_file.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The client's.")]


@app.command()
def new(
    name: Name,
    file: File,
    scope: Annotated[
        list[str] | None, typer.Option(help="submit, read, cancel or admin; several times. Default: the first three.")
    ] = None,
    share: Annotated[float, typer.Option(help="Of slots, sandboxes and bounds, in proportion to others'.")] = 1.0,
) -> None:
    """Make a client and its key, and print that, once: the file has its hash alone. A service that runs takes it."""
    from pydantic import ValidationError

    from nemo_gym_prorl.failures import CallerError
    from nemo_gym_prorl.http.problem_document import field_errors, in_words
    from nemo_gym_prorl.rollout.api.access_control import ALL_BUT_ADMIN, Client, hash_of, new_key, write_clients

    clients = _clients(file, missing_ok=True)
    if any(client.name == name for client in clients.clients):
        raise CallerError(f"there is a client {name!r} already; revoke its key first", field="NAME")
    key = new_key()
    said = {"name": name, "hash": hash_of(key), "scopes": scope or ALL_BUT_ADMIN, "share": share}
    try:
        clients.clients.append(Client.model_validate(said))
    except ValidationError as error:
        raise CallerError(in_words(field_errors(error.errors()))) from None
    write_clients(file, clients)
    typer.echo(key)


@app.command("list")
def list_clients(file: File) -> None:
    """Show the clients: name, share, scopes."""
    for client in _clients(file).clients:
        typer.echo(f"{client.name}\t{client.share:g}\t{','.join(client.scopes)}")


@app.command()
def revoke(name: Name, file: File) -> None:
    """Take a client's key away. A service that runs refuses it within a second; its rollouts go on."""
    from nemo_gym_prorl.failures import CallerError, suggest
    from nemo_gym_prorl.rollout.api.access_control import write_clients

    clients = _clients(file)
    left = [client for client in clients.clients if client.name != name]
    if len(left) == len(clients.clients):
        raise CallerError(f"there is no {name!r}{suggest(name, (client.name for client in left))}", field="NAME")
    clients.clients = left
    write_clients(file, clients)


def _clients(file: Path, *, missing_ok: bool = False) -> Clients:
    from nemo_gym_prorl.rollout.api.access_control import Clients, read_clients

    return Clients() if missing_ok and not file.exists() else read_clients(file)
