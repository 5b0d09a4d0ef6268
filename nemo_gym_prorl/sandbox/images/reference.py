# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Parse references to images. Pure.

| text                                | meaning                                                    |
|-------------------------------------|------------------------------------------------------------|
| ``docker://python:3.12``            | an image in a registry; Docker Hub by default              |
| ``/images/x.sif``, ``./folder``     | a path: a SIF or an unpacked root folder                   |
| ``cache:tasks/x.sif``               | a path below the cache folder                              |
| ``swe-base``                        | an image named by ``prorl image build`` or ``pull``        |
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.images.entries import cache_dir


CACHE_PREFIX = "cache:"
"""Prefix of paths below the cache folder, so that rows work on machines with different cache folders."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

_HUB = "docker.io"
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*")
_HOST = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::\d+)?")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RegistryImage:
    """An image in a registry, by complete address: ``docker://`` with registry, repository, and tag or digest."""

    uri: str

    def entry(self, machine: str) -> str:
        """Return the name of the store entry for an architecture (:func:`.entries.machine`), a valid file name."""
        readable = re.sub(r"[^A-Za-z0-9._]+", "-", self.uri.partition("://")[2].partition("/")[2])[-60:].strip("-.")
        return f"{readable}-{hashlib.sha256(f'{self.uri} {machine}'.encode()).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True)
class LocalImage:
    """An image at a path on this machine."""

    path: Path


@dataclass(frozen=True, slots=True)
class NamedImage:
    """An image in the store, by its short name."""

    name: str


Reference = RegistryImage | LocalImage | NamedImage


def parse(text: str, field: str = "image") -> Reference:
    """Parse a reference to an image.

    Raises:
        CallerError: the text is not a valid reference; names ``field``.
    """
    if "://" in text:
        return parse_registry(text, field)
    if text.startswith(CACHE_PREFIX):
        below = PurePosixPath(text.removeprefix(CACHE_PREFIX))
        if below.is_absolute() or ".." in below.parts or not below.name:
            raise CallerError(f"{text!r} must be a path below the cache folder, without '..'", field=field)
        return LocalImage(cache_dir() / below)
    if "/" in text or text.endswith(".sif") or text.startswith(("~", ".")):
        # os.path.expanduser leaves unknown users unchanged; Path.expanduser raises.
        return LocalImage(Path(os.path.expanduser(text)).absolute())  # noqa: PTH111
    return NamedImage(check_name(text, field))


def parse_registry(text: str, field: str = "image") -> RegistryImage:
    """Parse the address of an image in a registry; ``docker://`` is optional.

    Raises:
        CallerError: the text is not a valid address; names ``field``.
    """
    scheme, separator, rest = text.strip().rpartition("://")
    if separator and scheme != "docker":
        raise CallerError(f"{text!r} is not supported: use a docker:// address, a path or a name", field=field)
    rest, _, digest = rest.partition("@")
    host, slash, path = rest.partition("/")
    # As in Docker, the first part is a host if it has a dot or a port, or is localhost.
    if not slash or not (set(".:") & set(host) or host == "localhost"):
        host, path = _HUB, rest
    path, colon, tag = path.partition(":")
    if host in (_HUB, "index.docker.io", "registry-1.docker.io"):
        host = _HUB
        path = path if "/" in path else f"library/{path}"
    fine = _HOST.fullmatch(host) and _REPOSITORY.fullmatch(path) and (not colon or _TAG.fullmatch(tag))
    if not fine or ("@" in text and not _DIGEST.fullmatch(digest)):
        raise CallerError(
            f"{text!r} is not the address of an image: use HOST/NAME:TAG or HOST/NAME@sha256:DIGEST", field=field
        )
    return RegistryImage(f"docker://{host}/{path}" + (f"@{digest}" if digest else f":{tag or 'latest'}"))


def check_name(text: str, field: str = "name") -> str:
    """Return ``text`` if it is a valid short name of an image.

    Raises:
        CallerError: the name is invalid; names ``field``.
    """
    if not NAME.fullmatch(text):
        raise CallerError(
            f"{text!r} is no name of an image: use letters, digits, '.', '_' and '-' (a path contains '/', and an "
            "image of a registry starts with docker://)",
            field=field,
        )
    return text
