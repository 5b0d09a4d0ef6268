# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The configuration that a registry's image was published with: variables, working folder, user, entrypoint.

Apptainer turns the variables into a shell script and loses the rest. The script is not faithful: values are escaped
twice, commands in values run, and names that a shell refuses are dropped. So this module reads the configuration from
the blobs that a pull leaves behind. The configuration is stored beside the image (:mod:`.store`) and applied without a
shell.

Contents are untrusted: the publisher of the image controls them.
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
from nemo_gym_prorl.sandbox.images import rootfs
from nemo_gym_prorl.sandbox.launcher.requests import MAX_ENVIRONMENT_BYTES
from nemo_gym_prorl.sandbox.strict_types import variable_trouble


DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""``PATH`` of images that set none, as in container engines."""

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_LARGEST_BLOB = 8 << 20  # bytes; registries refuse manifests above 4 MiB
_DEEPEST_INDEX = 3
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_READ_ONLY = ("UID", "EUID", "GID", "PPID")
"""Variables that shells refuse to set."""

_SCRIPT = ".singularity.d/env/10-docker2singularity.sh"


@dataclass(frozen=True, slots=True)
class OciConfig:
    """An image's configuration.

    Attributes:
        workdir: absolute working folder of commands; empty if not set.
        user: name or number of the image's user, without the group; empty for root.
        entrypoint: program of the image (``ENTRYPOINT``); started only on request.
        command: the program's default arguments, or the program where ``entrypoint`` is empty (``CMD``).
        shell: shell of a Dockerfile's commands in images built on this one (``SHELL``); empty if not set.
        extended: whether the image was built on the published one, so that its own scripts may set more variables.
    """

    env: dict[str, str]
    workdir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    extended: bool = False
    shell: tuple[str, ...] = ()

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> OciConfig:
        """Parse the ``config`` object of an image's configuration.

        Raises:
            ValueError: a field has the wrong type, or a variable can't be set; names the field.
        """
        env: dict[str, str] = {}
        for entry in _texts(config, "Env"):
            name, equals, value = entry.partition("=")
            if not equals or not name:
                continue  # ignored by container engines, too
            if trouble := variable_trouble(name, value):
                raise ValueError(f"Env: {trouble}")
            env[name] = value
        if sum(len(os.fsencode(name + value)) + 2 for name, value in env.items()) > MAX_ENVIRONMENT_BYTES:
            raise ValueError(f"Env: holds more than {MAX_ENVIRONMENT_BYTES >> 20} MiB")
        workdir = _text(config, "WorkingDir")
        return cls(
            env,
            posixpath.normpath(f"/{workdir.lstrip('/')}") if workdir else "",
            _text(config, "User").partition(":")[0],
            tuple(_texts(config, "Entrypoint")),
            tuple(_texts(config, "Cmd")),
            config.get("extended") is True,
            tuple(_texts(config, "Shell")),
        )

    def to_json(self) -> dict[str, Any]:
        """Return an object that :meth:`parse` accepts."""
        return {
            "Env": [f"{name}={value}" for name, value in self.env.items()],
            "WorkingDir": self.workdir,
            "User": self.user,
            "Entrypoint": list(self.entrypoint),
            "Cmd": list(self.command),
            "extended": self.extended,
            "Shell": list(self.shell),
        }

    def environment(self, reported: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of commands; the ``reported`` ones of the runtime only count where the image's scripts
        add some."""
        return {"PATH": DEFAULT_PATH, **self.env, **(reported if self.extended else {})}

    def rewrite_script(self, root: Path) -> None:
        """Replace Apptainer's variables script in a root folder by exact values, for images that are built on it."""
        script = rootfs.resolve_inside(root, _SCRIPT)
        if not script.parent.is_dir():
            return
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in self.env.items() if is_settable(name)]
        script.unlink(missing_ok=True)
        script.write_text("".join(["#!/bin/sh\n", *lines]))
        script.chmod(0o755)


def is_settable(name: str) -> bool:
    """Return whether a shell can set a variable of this name."""
    return bool(_IDENTIFIER.fullmatch(name)) and name not in _READ_ONLY


def read_pulled_config(downloads: Path) -> OciConfig:
    """Return the configuration of the image that was pulled into a cache folder of the runtime.

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
            raise ValueError("it is not an object")
        return OciConfig.parse(config)
    except ValueError as error:
        raise CallerError(f"the image's configuration can't be applied: {error}", field="image") from error


def lookup_account(user: str, root: Path) -> tuple[int, str] | None:
    """Return id and home folder of a user by the image's ``/etc/passwd``; ``None`` if there is no such user.

    A number needs no entry.
    """
    number = int(user) if re.fullmatch(r"[0-9]{1,9}", user) else None
    for line in _passwd(root):
        fields = line.split(":")
        if len(fields) >= 6 and fields[2].isdecimal() and (fields[0] == user or int(fields[2]) == number):
            return int(fields[2]), fields[5] if fields[5].startswith("/") else "/"
    return None if number is None else (number, "/")


def _passwd(root: Path) -> list[str]:
    try:
        # O_NONBLOCK: the image may have a pipe there.
        opened = os.open(rootfs.resolve_inside(root, "/etc/passwd"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(opened, "rb") as file:
            return (file.read(_LARGEST_BLOB) or b"").decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def _configurations(layout: Path, index: Mapping[str, Any], depth: int) -> Iterator[dict[str, Any]]:
    """Yield the configurations in a layout; of a multi-platform image only one was downloaded."""
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
        raise ValueError(f"{path.name} is not a JSON object")
    return value


def _text(config: Mapping[str, Any], name: str) -> str:
    value = config.get(name) or ""
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{name}: must be a string without NUL")
    return value


def _texts(config: Mapping[str, Any], name: str) -> list[str]:
    value = config.get(name) or []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{name}: must be a list of strings")
    return value
