# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The configuration that a registry's image was published with: variables, working folder, user, entrypoint.

Apptainer turns the variables into a shell script and loses the rest. The script is no faithful copy: values are
escaped twice, commands in values run, and names that a shell does not accept are dropped. So the configuration is read
from the blobs that a pull leaves behind, kept beside the image (:mod:`.store`), and applied without a shell.

Contents are untrusted: whoever published the image controls them.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.fields import variable_trouble
from nemo_gym_prorl.sandbox.images import rootfs
from nemo_gym_prorl.sandbox.launcher.requests import MOST_VARIABLES


DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""``PATH`` of images that set none, as container engines have it."""

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_LARGEST_BLOB = 8 << 20  # bytes; registries refuse manifests above 4 MiB
_DEEPEST_INDEX = 3
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_READ_ONLY = ("UID", "EUID", "GID", "PPID")
"""Variables that shells refuse to set."""

_SCRIPT = ".singularity.d/env/10-docker2singularity.sh"


@dataclass(frozen=True, slots=True)
class OciConfig:
    """See the module.

    Attributes:
        env: the image's variables.
        workdir: where commands start, absolute; empty if not set.
        user: name or number of its user, without the group; empty for root.
        entrypoint: the program that the image is published for, with its default arguments; never started unasked.
        extended: the image was built on the published one, so scripts of its own may set more variables.
    """

    env: dict[str, str]
    workdir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    extended: bool = False

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> OciConfig:
        """Read the ``config`` object of an image's configuration.

        Raises:
            ValueError: a field has the wrong type, or a variable can't be set; names it.
        """
        env: dict[str, str] = {}
        for entry in _texts(config, "Env"):
            name, equals, value = entry.partition("=")
            if not equals or not name:
                continue  # container engines ignore such entries, too
            if trouble := variable_trouble(name, value):
                raise ValueError(f"Env: {trouble}")
            env[name] = value
        if sum(len(os.fsencode(name + value)) + 2 for name, value in env.items()) > MOST_VARIABLES:
            raise ValueError(f"Env: holds more than {MOST_VARIABLES >> 20} MiB")
        workdir = _text(config, "WorkingDir")
        return cls(
            env,
            posixpath.normpath(f"/{workdir.lstrip('/')}") if workdir else "",
            _text(config, "User").partition(":")[0],
            (*_texts(config, "Entrypoint"), *_texts(config, "Cmd")),
            config.get("extended") is True,
        )

    def to_json(self) -> dict[str, Any]:
        """What :meth:`parse` reads."""
        return {
            "Env": [f"{name}={value}" for name, value in self.env.items()],
            "WorkingDir": self.workdir,
            "User": self.user,
            "Entrypoint": list(self.entrypoint),
            "extended": self.extended,
        }

    def environment(self, reported: Mapping[str, str]) -> dict[str, str]:
        """The variables of commands, of those that the runtime ``reported`` only what the image's scripts add."""
        return {"PATH": DEFAULT_PATH, **self.env, **(reported if self.extended else {})}

    def rewrite_script(self, root: Path) -> None:
        """Replace Apptainer's script of variables in a root folder, so that images built on it start from exact
        values."""
        script = rootfs.inside(root, _SCRIPT)
        if not script.parent.is_dir():
            return
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in self.env.items() if is_settable(name)]
        script.unlink(missing_ok=True)
        script.write_text("".join(["#!/bin/sh\n", *lines]))
        script.chmod(0o755)


def is_settable(name: str) -> bool:
    """Return whether a shell can set a variable of this name."""
    return bool(_IDENTIFIER.fullmatch(name)) and name not in _READ_ONLY


def of_pull(downloads: Path) -> OciConfig:
    """Read the configuration of the one image that was pulled into a cache folder of the runtime's.

    Args:
        downloads: the runtime's cache folder, used for this image only.

    Raises:
        CallerError: the configuration can't be applied; for the field ``image``.
        InfrastructureError: the runtime left no configuration there.
    """
    layout = downloads / "cache" / "blob"
    try:
        found = list(_configurations(layout, _read(layout / "index.json"), 0))
    except (OSError, ValueError) as error:
        raise InfrastructureError(f"the pulled image's configuration can't be read: {error}") from error
    if not found:
        raise InfrastructureError(f"the runtime left no configuration of the pulled image in {layout}")
    config = found[-1].get("config") or {}
    try:
        if not isinstance(config, dict):
            raise ValueError("is no object")
        return OciConfig.parse(config)
    except ValueError as error:
        raise CallerError(f"the image's configuration can't be applied: {error}", field="image") from error


def account(user: str, root: Path) -> tuple[int, str] | None:
    """Number and home folder of an image's user by the ``/etc/passwd`` of its root folder; ``None`` if there is no
    such user. A number needs no entry."""
    number = int(user) if re.fullmatch(r"[0-9]{1,9}", user) else None
    for line in _passwd(root):
        fields = line.split(":")
        if len(fields) >= 6 and fields[2].isdecimal() and (fields[0] == user or int(fields[2]) == number):
            return int(fields[2]), fields[5] if fields[5].startswith("/") else "/"
    return None if number is None else (number, "/")


def _passwd(root: Path) -> list[str]:
    try:
        # It may be a pipe.
        opened = os.open(rootfs.inside(root, "/etc/passwd"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(opened, "rb") as file:
            return (file.read(_LARGEST_BLOB) or b"").decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def _configurations(layout: Path, index: Mapping[str, Any], depth: int) -> Iterator[dict[str, Any]]:
    """The configurations that a layout holds; of images for several processors only one was fetched."""
    for entry in index.get("manifests", ()):
        manifest = _blob(layout, entry)
        if manifest is None:
            continue
        if "manifests" in manifest and depth < _DEEPEST_INDEX:
            yield from _configurations(layout, manifest, depth + 1)
        elif (config := _blob(layout, manifest.get("config"))) is not None:
            yield config


def _blob(layout: Path, descriptor: Any) -> dict[str, Any] | None:
    digest = _DIGEST.fullmatch(str(descriptor.get("digest"))) if isinstance(descriptor, dict) else None
    path = layout / "blobs" / "sha256" / digest[1] if digest else None
    return _read(path) if path and path.is_file() else None


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        value = json.loads(file.read(_LARGEST_BLOB))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no object")
    return value


def _text(config: Mapping[str, Any], name: str) -> str:
    value = config.get(name) or ""
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{name}: must be text")
    return value


def _texts(config: Mapping[str, Any], name: str) -> list[str]:
    value = config.get(name) or []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{name}: must be a list of texts")
    return value
