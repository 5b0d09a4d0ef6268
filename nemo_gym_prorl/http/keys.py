# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Keys of callers and their scopes; :mod:`.key_guard` enforces them."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from enum import StrEnum

from nemo_gym_prorl.failures import CallerError


def authorization(key: str | None) -> dict[str, str]:
    """Return the ``Authorization`` header with a key; no header for ``None`` or an empty key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def trusted_authorities() -> ssl.SSLContext | None:
    """Return a TLS context that trusts the certificate authorities in the file named by ``PRORL_CA``; ``None``
    without that variable, so that clients trust the system's authorities.

    Raises:
        CallerError: the file cannot be read, or has no certificates.
    """
    file = os.environ.get("PRORL_CA")
    if not file:
        return None
    try:
        return ssl.create_default_context(cafile=file)
    except OSError as error:  # ssl.SSLError is an OSError
        complaint = f"{file}: {error}; name a PEM file with certificates of authorities"
        raise CallerError(complaint, field="PRORL_CA") from error


CLIENT_KEY = "prorl_"
"""Prefix of clients' keys, so that scanners and people recognise a leaked key."""


class Scope(StrEnum):
    """Permissions of a key."""

    SUBMIT = "submit"
    READ = "read"
    """Read the client's own rollouts, and the state of the pools."""
    CANCEL = "cancel"
    """Cancel the client's own rollouts."""
    ADMIN = "admin"
    """All scopes, for all clients' rollouts; also drain the service, and change backends."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Authenticated sender of a request.

    Attributes:
        name: the client's name; ``None`` for the deployment itself (``control_token``, or a server without keys).
    """

    name: str | None
    scopes: frozenset[Scope]

    @property
    def is_admin(self) -> bool:
        """Return whether the caller may access all clients' rollouts."""
        return Scope.ADMIN in self.scopes

    def may(self, scope: Scope) -> bool:
        return self.is_admin or scope in self.scopes


DEPLOYMENT = Caller(None, frozenset({Scope.ADMIN}))
