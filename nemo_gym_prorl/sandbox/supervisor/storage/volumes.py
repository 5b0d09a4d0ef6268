# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Folders that several sandboxes share: which there are, who has which, and when one goes.

Written as ``NAME:INSIDE`` or ``NAME:INSIDE:ro``, as container tools have it; no path of the host is ever named. A
volume is there as long as a sandbox that has it, and goes with the last one's files. They lie in a folder of their
own that only the supervisor's user may enter. Root shows them to each sandbox under that one's own ids, with what is
root's here as the sandbox's own; so members agree on who owns what.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import quote

from nemo_gym_prorl.failures import CallerError


ALL = "."
"""The volume of whoever sets up and clears away others: an empty folder, with which none of the others ends."""

LONGEST_NAME = 200
"""Bytes of a volume's name as that of its folder, which is somewhat longer; the kernel takes 255."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,199}")


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume as one sandbox has it.

    Attributes:
        name: of the volume, which is made if there is none.
        target: where it is to be seen inside.
        read_only: whether it can't be changed there.
    """

    name: str
    target: str
    read_only: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read one.

        Raises:
            CallerError: it is not written as the module says.
        """
        name, _, rest = text.partition(":")
        target, _, options = rest.partition(":")
        if name != ALL and (
            not _NAME.fullmatch(name) or ".." in name.split("/") or len(quote(name, safe="")) > LONGEST_NAME
        ):
            reason = f"{name!r} can't be the name of a volume: letters, digits, '.', '_', '-' and '/' make a short one"
            raise CallerError(reason, field="volumes")
        if (
            not target.startswith("/")
            or "\0" in target
            or ".." in target.split("/")
            or options not in ("", "ro", "rw")
        ):
            raise CallerError(f"{text!r} is not NAME:INSIDE or NAME:INSIDE:ro", field="volumes")
        return cls(name, target, options == "ro")

    @property
    def folder(self) -> str:
        """Name of the volume's folder: all are side by side, so none can hold a way into another. None is
        called as what is noted down of sandboxes (:mod:`.state_dir`)."""
        return f"volume{quote(self.name, safe='') if self.name != ALL else '%'}"


class Volumes:
    """See the module. ``folder`` is the owner's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "volumes"
        self._users: dict[str, list[Volume]] = {}

    def take(self, sandbox: str, wanted: Iterable[str]) -> list[str]:
        """Give volumes to a sandbox that is to be; returns them as binds, ``HOST:INSIDE`` with options.

        Raises:
            OSError: one can't be made.
        """
        volumes = [Volume.parse(text) for text in wanted]
        if not volumes:
            return []
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for volume in volumes:
            (self._folder / volume.folder).mkdir(mode=0o755, exist_ok=True)
        self._users[sandbox] = volumes
        return [
            f"{self._folder / volume.folder}:{volume.target}{':ro' if volume.read_only else ''}" for volume in volumes
        ]

    def release(self, sandbox: str, into: Path) -> None:
        """Nothing of a sandbox runs any more: the volumes that no other has go ``into`` its folder, and with that."""
        left = [volume for name, others in self._users.items() if name != sandbox for volume in others]
        if sandbox in self._users and not any(volume.name == ALL for volume in left):
            self._clear(left, into)
        # Not before: what can't be moved is tried again.
        self._users.pop(sandbox, None)

    def _clear(self, left: list[Volume], into: Path) -> None:
        kept = {volume.folder for volume in left}
        # It may have been given up before it had a folder.
        into.mkdir(mode=0o700, exist_ok=True)
        for path in self._folder.iterdir():
            if path.name not in kept:
                path.rename(into / path.name)
        if not kept:
            self._folder.rmdir()
