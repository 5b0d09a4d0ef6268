# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How a caller shows the key of a server, and who a key says that it is; who may call is told in :mod:`.key_guard`."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from enum import StrEnum

from nemo_gym_prorl.failures import CallerError


def authorization(key: str | None) -> dict[str, str]:
    """The header by which a caller shows a key; none without one, or for an empty one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def trusted_authorities() -> ssl.SSLContext | None:
    """Return the authorities whose certificates a caller believes: those in the file that ``PRORL_CA`` names; ``None``
    without that variable, for the system's.

    Raises:
        CallerError: the file cannot be read, or has no certificates.
    """
    file = os.environ.get("PRORL_CA")
    if not file:
        return None
    try:
        return ssl.create_default_context(cafile=file)
    except OSError as error:  # ssl.SSLError is one
        complaint = f"{file}: {error}; it must have certificates of authorities as PEM"
        raise CallerError(complaint, field="PRORL_CA") from error


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
