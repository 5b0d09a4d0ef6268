# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What an entry among the images is: a folder with the image, ``root`` or ``image.sif``, and ``image.json``."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

from nemo_gym_prorl.sandbox.images.building.recipe import Format
from nemo_gym_prorl.sandbox.images.entries import Entry
from nemo_gym_prorl.sandbox.images.oci_config import OciConfig


INFO_FILE = "image.json"
ROOT = "root"
SIF = "image.sif"


@dataclass(frozen=True, slots=True)
class Info:
    """What is noted down about an image when it is made.

    Attributes:
        kind: ``image`` (built), ``pulled`` or ``copy`` (unpacked).
        source: what it was made from, for people.
        format: what it is.
        bytes: its size on disk.
        made: when; seconds since 1970.
        config: of the registry's image that it is or was made from, if it is or was.
    """

    kind: str
    source: str
    format: Format
    bytes: int
    made: float
    config: OciConfig | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """One image that is there.

    Attributes:
        entry: where it lies, and when it was used.
        info: what was noted down about it.
        names: what users call it.
        unpacked: this machine has an unpacked copy of it, or it is a folder.
    """

    entry: Entry
    info: Info
    names: tuple[str, ...] = ()
    unpacked: bool = False


def write_info(folder: Path, info: Info) -> None:
    """Note down what an entry is, before it gets its name."""
    config = info.config.to_json() if info.config else None
    (folder / INFO_FILE).write_text(json.dumps({**asdict(info), "config": config}))


def read_info(folder: Path) -> Info | None:
    """What an entry is; ``None`` if it went away, or there is no such note in it, as where it was made by a version of
    this package that knew none. What a later version has noted down besides is none of ours."""
    try:
        noted = json.loads((folder / INFO_FILE).read_text())
    except (FileNotFoundError, ValueError):
        return None
    if any(field.name not in noted for field in fields(Info) if field.default is MISSING):
        return None
    known = {field.name: noted[field.name] for field in fields(Info) if field.name in noted}
    config = known.get("config")
    return Info(**{**known, "config": OciConfig.parse(config) if config else None})


def config_of(image: Path) -> OciConfig | None:
    """Return the configuration that was kept beside a root folder or SIF of a store; ``None`` elsewhere."""
    info = read_info(image.parent) if image.name in (ROOT, SIF) else None
    return info.config if info else None
