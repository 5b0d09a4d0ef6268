# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What may be written where an image is asked for, and what is meant by it. Pure.

| written                             | meant                                                      |
|-------------------------------------|------------------------------------------------------------|
| ``docker://python:3.12``            | an image of a registry, Docker Hub's if none is named      |
| ``/images/x.sif``, ``./folder``     | a path: a SIF or an unpacked root folder                   |
| ``cache:swe-tasks/images/x.sif``    | a path below the cache folder, wherever that is            |
| ``swe-base``                        | an image that ``prorl image build`` or ``pull`` has named  |
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
"""Before a path below the cache folder: rows that name images so are good on any machine that has made these."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

_HUB = "docker.io"
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*")
_HOST = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::\d+)?")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RegistryImage:
    """An image in a registry.

    Attributes:
        uri: its address, complete: with the registry's name, and a tag or digest.
    """

    uri: str

    def entry(self, machine: str) -> str:
        """The name of its entry among our images: readable, unique, and a file name."""
        readable = re.sub(r"[^A-Za-z0-9._]+", "-", self.uri.partition("://")[2].partition("/")[2])[-60:].strip("-.")
        return f"{readable}-{hashlib.sha256(f'{self.uri} {machine}'.encode()).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True)
class LocalImage:
    """A path on this machine."""

    path: Path


@dataclass(frozen=True, slots=True)
class NamedImage:
    """The name of an image of ours."""

    name: str


Reference = RegistryImage | LocalImage | NamedImage


def parse(text: str, field: str = "image") -> Reference:
    """Understand what a user wrote.

    Raises:
        CallerError: nothing that there is; for ``field``.
    """
    if "://" in text:
        return parse_registry(text, field)
    if "\0" in text:
        raise CallerError("must not hold a NUL character", field=field)
    if text.startswith(CACHE_PREFIX):
        below = PurePosixPath(text.removeprefix(CACHE_PREFIX))
        if below.is_absolute() or ".." in below.parts or not below.name:
            raise CallerError(f"{text!r} is not below the cache folder", field=field)
        return LocalImage(cache_dir() / below)
    if "/" in text or text.endswith(".sif") or text.startswith(("~", ".")):
        # A user that nobody knows stays a part of the name.
        return LocalImage(Path(os.path.expanduser(text)).absolute())  # noqa: PTH111
    return NamedImage(check_name(text, field))


def portable_path(path: Path) -> str:
    """How to write down where an image lies: below the cache folder, if it is there."""
    cache = cache_dir()
    return f"{CACHE_PREFIX}{path.relative_to(cache)}" if path.is_relative_to(cache) else str(path)


def parse_registry(text: str, field: str = "image") -> RegistryImage:
    """As :func:`parse`, where only an image of a registry can be meant and ``docker://`` may be left out.

    Raises:
        CallerError: it is not the name of an image; for ``field``.
    """
    scheme, separator, rest = text.strip().rpartition("://")
    if separator and scheme != "docker":
        raise CallerError(f"{text!r} can't be had: docker:// addresses, paths and names can", field=field)
    rest, _, digest = rest.partition("@")
    host, slash, path = rest.partition("/")
    # As every tool does: the first part is a host if it looks like one.
    if not slash or not (set(".:") & set(host) or host == "localhost"):
        host, path = _HUB, rest
    path, colon, tag = path.partition(":")
    if host in (_HUB, "index.docker.io", "registry-1.docker.io"):
        host = _HUB
        path = path if "/" in path else f"library/{path}"
    fine = _HOST.fullmatch(host) and _REPOSITORY.fullmatch(path) and (not colon or _TAG.fullmatch(tag))
    if not fine or ("@" in text and not _DIGEST.fullmatch(digest)):
        raise CallerError(
            f"{text!r} is not the address of an image: HOST/NAME:TAG or HOST/NAME@sha256:DIGEST is", field=field
        )
    return RegistryImage(f"docker://{host}/{path}" + (f"@{digest}" if digest else f":{tag or 'latest'}"))


def check_name(text: str, field: str = "name") -> str:
    """The name as it is.

    Raises:
        CallerError: it can't be one; for ``field``.
    """
    if not NAME.fullmatch(text):
        raise CallerError(
            f"{text!r} is no name of an image: letters, digits, '.', '_' and '-' make one (a path holds a '/', and an "
            "image of a registry begins with docker://)",
            field=field,
        )
    return text
