# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Where nodes come from: whoever starts and watches them tells here which there are.

Each is a rollout service with a client for it. A list of addresses is the plain case (:class:`NodeList`); nodes of a
Ray cluster come and go (:mod:`nemo_gym_prorl.gym.ray_nodes`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from yarl import URL

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.client import RolloutClient


@dataclass(frozen=True, slots=True)
class Joined:
    """A node is there. ``client`` is not open yet; whoever uses the node opens and closes it."""

    node: str
    client: RolloutClient


@dataclass(frozen=True, slots=True)
class Left:
    """A node is gone for good, and whatever it ran."""

    node: str
    why: str


class Nodes(Protocol):
    """A source of nodes."""

    @property
    def present(self) -> Sequence[Joined]:
        """Those that are there before any change is waited for."""
        ...

    def changes(self) -> AsyncIterator[Joined | Left]:
        """What comes and goes after that; ends if nothing ever will. An id that has left may join again."""
        ...


class NodeList:
    """Services that somebody else has started, each under its address; nobody tells of their end.

    Args:
        clients: one of each.

    Raises:
        CallerError: there is none, or one twice, or what is no address.
    """

    def __init__(self, clients: Sequence[RolloutClient], *, field: str = "services") -> None:
        urls = [client.url for client in clients]
        if not urls:
            raise CallerError("at least one rollout service is needed", field=field)
        for url in urls:
            if not (URL(url).scheme in ("http", "https") and URL(url).host):
                raise CallerError(f"{url!r} is no address; it begins with http:// or https://", field=field)
        if twice := [url for url in urls if urls.count(url) > 1]:
            raise CallerError(f"{twice[0]} is there twice", field=field)
        self._present = [Joined(client.url, client) for client in clients]

    @property
    def present(self) -> Sequence[Joined]:
        """All of them."""
        return self._present

    async def changes(self) -> AsyncIterator[Joined | Left]:
        """None."""
        for change in list[Joined | Left]():
            yield change
