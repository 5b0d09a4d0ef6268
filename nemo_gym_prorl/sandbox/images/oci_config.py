# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Registry configuration of an image: environment variables, working folder, user.

Apptainer converts the variables to a shell script and drops all other settings. The script is not faithful: values are
escaped twice, commands in values run, and names that a shell refuses are dropped. So this module reads the
configuration from the blobs in a pull's download cache. The store keeps the configuration beside the image
(:mod:`.store`), and sandboxes apply the configuration without a shell.

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
"""``PATH`` of images that set none, the same as Docker's default."""

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MAX_BLOB_BYTES = 8 << 20  # registries refuse manifests above 4 MiB
_MAX_INDEX_DEPTH = 3  # bounds the recursion through untrusted indexes of multi-platform images
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_READ_ONLY = ("UID", "EUID", "GID", "PPID")
"""Variables that shells refuse to set."""

_SCRIPT = ".singularity.d/env/10-docker2singularity.sh"


@dataclass(frozen=True, slots=True)
class OciConfig:
    """Registry configuration of an image.

    Attributes:
        env: environment variables (``ENV``).
        workdir: absolute working folder of commands (``WORKDIR``); empty if not set.
        user: name or number of the image's user, without the group (``USER``); empty for root.
        shell: shell for the commands of Dockerfiles based on this image (``SHELL``); empty if not set.
    """

    env: dict[str, str]
    workdir: str = ""
    user: str = ""
    shell: tuple[str, ...] = ()

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> OciConfig:
        """Parse the ``config`` object of an OCI image configuration, or the result of :meth:`to_json`.

        Raises:
            ValueError: a field has the wrong type, or a variable can't be set; names the field.
        """
        env: dict[str, str] = {}
        for entry in _texts(config, "Env"):
            name, equals, value = entry.partition("=")
            if not equals or not name:
                continue  # container engines ignore such entries too
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
            tuple(_texts(config, "Shell")),
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that :meth:`parse` accepts."""
        return {
            "Env": [f"{name}={value}" for name, value in self.env.items()],
            "WorkingDir": self.workdir,
            "User": self.user,
            "Shell": list(self.shell),
        }

    def environment(self) -> dict[str, str]:
        """Return the environment variables of commands."""
        return {"PATH": DEFAULT_PATH, **self.env}

    def rewrite_script(self, root: Path) -> None:
        """Replace Apptainer's script of variables in a root folder by a faithful script, for builds on this image."""
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
    """Return the configuration of a pulled image from Apptainer's download cache, used for this image only.

    Raises:
        CallerError: the configuration can't be applied; names the field ``image``.
        InfrastructureError: the download cache has no readable configuration.
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
    """Return a user's id and home folder by the image's ``/etc/passwd``, or ``None`` if a name has no entry. A number
    without an entry has the home folder ``/``."""
    number = int(user) if re.fullmatch(r"[0-9]{1,9}", user) else None
    for line in _passwd(root):
        fields = line.split(":")
        if len(fields) >= 6 and fields[2].isdecimal() and (fields[0] == user or int(fields[2]) == number):
            return int(fields[2]), fields[5] if fields[5].startswith("/") else "/"
    return None if number is None else (number, "/")


def _passwd(root: Path) -> list[str]:
    try:
        # O_NONBLOCK: opening would block if the untrusted image has a named pipe at this path.
        opened = os.open(rootfs.resolve_inside(root, "/etc/passwd"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(opened, "rb") as file:
            return (file.read(_MAX_BLOB_BYTES) or b"").decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def _configurations(layout: Path, index: Mapping[str, Any], depth: int) -> Iterator[dict[str, Any]]:
    for entry in index.get("manifests", ()):
        manifest = _blob(layout, entry)
        if manifest is None:
            continue
        if "manifests" in manifest and depth < _MAX_INDEX_DEPTH:
            yield from _configurations(layout, manifest, depth + 1)
        elif (config := _blob(layout, manifest.get("config"))) is not None:
            yield config


def _blob(layout: Path, descriptor: Any) -> dict[str, Any] | None:
    digest = _DIGEST.fullmatch(str(descriptor.get("digest"))) if isinstance(descriptor, dict) else None
    path = layout / "blobs" / "sha256" / digest[1] if digest else None
    return _read(path) if path and path.is_file() else None


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        value = json.loads(file.read(_MAX_BLOB_BYTES))
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
