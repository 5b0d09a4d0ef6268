# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How a caller shows the key of a server, and who a key says that it is; who may call is told in :mod:`.access`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


def authorization(key: str | None) -> dict[str, str]:
    """The header by which a caller shows a key; none without one, or for an empty one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


CLIENT_KEY = "prorl_"
"""What the keys of clients begin with, so that they are known for what they are, by people who find one too."""


class Scope(StrEnum):
    """What a key may be good for."""

    SUBMIT = "submit"
    """To submit rollouts."""
    READ = "read"
    """To read one's own, and the pools."""
    CANCEL = "cancel"
    """To cancel one's own."""
    ADMIN = "admin"
    """All of that, with everybody's; to drain, and to change backends."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose key came with a request.

    Attributes:
        name: of the client; ``None`` for the deployment itself: by ``control_token``, or where no key is asked for.
        scopes: what it may do.
    """

    name: str | None
    scopes: frozenset[Scope]

    @property
    def is_admin(self) -> bool:
        """Everybody's rollouts are its own."""
        return Scope.ADMIN in self.scopes

    def may(self, scope: Scope) -> bool:
        """Whether its key is good for that."""
        return self.is_admin or scope in self.scopes


DEPLOYMENT = Caller(None, frozenset({Scope.ADMIN}))
