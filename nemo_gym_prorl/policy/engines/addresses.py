# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Addresses of backends."""

from __future__ import annotations

from urllib.parse import urlsplit

from nemo_gym_prorl.failures import CallerError


def checked_url(url: str, field: str = "url") -> str:
    """A backend's URL, put together from its parts, so that nobody reads another host in it.

    Raises:
        CallerError: it is none.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise CallerError(f"{url!r} is no URL: {error}", field=field) from error
    host = parts.hostname or ""
    plain = url.isascii() and url.isprintable() and not set(url) & set(" \\@?#")
    if parts.scheme not in ("http", "https") or not host or not plain:
        raise CallerError(f"{url!r} must be http(s)://host[:port][/path], and no more", field=field)
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}{f':{port}' if port else ''}{parts.path}"


def root_of(url: str) -> str:
    """The URL of a server, whose routes begin with ``/v1`` or not."""
    return url.rstrip("/").removesuffix("/v1")


def origin_of(url: str) -> str:
    """Scheme, host and port of a URL: what a key belongs to."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{parts.hostname}:{port}"
