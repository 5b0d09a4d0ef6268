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
    """Return the header with a key; no header for ``None`` or an empty key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def trusted_authorities() -> ssl.SSLContext | None:
    """Return the certificate authorities in the file that ``PRORL_CA`` names; ``None`` without that variable, for the
    system's.

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
    """Read one's own rollouts, and the pools."""
    CANCEL = "cancel"
    """Cancel one's own rollouts."""
    ADMIN = "admin"
    """All scopes, for all clients' rollouts; drain, and change backends."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Client of a request.

    Attributes:
        name: the client; ``None`` for the deployment itself: with ``control_token``, or without keys.
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
