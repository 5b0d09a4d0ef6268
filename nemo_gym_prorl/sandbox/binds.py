# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which of the host's files a sandbox may be shown, bound or as its image, and where: none that would hand it over.

A bind that shows the folder where supervisors keep their sockets, or the files of other sandboxes, would be the way
out of all of them, and so would be the host's processes. So would be the sockets of the host's services, which lie in
``/run``: one of those is shown only if it is named.

What can't be mounted where it is asked for is refused here, too, before anything is made: by either way of making a
sandbox it would fail, in the middle and in words of its own. Whether a target is a file or a folder is known of an
unpacked image only.

Asked by the supervisor, which relies on nobody's having looked before; its refusal names the field.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.images import rootfs
from nemo_gym_prorl.sandbox.isolation import mounts
from nemo_gym_prorl.sandbox.isolation.mounts import Bind
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.isolation.syscalls import walled_in


CLOSED = (Path("/proc"), Path("/sys"))
"""Nothing of these is shown: a sandbox has its own."""

SOCKETS = Path("/run")
"""Not shown as a whole."""

OWN = ("/proc", "/sys", "/dev")
"""What a sandbox has of its own, and all below."""

_OF_THE_RUNTIME = re.compile(r'[,"\\\n]')
"""What means something else on the runtime's command line."""


def checked(binds: Sequence[str], state: Path, image: Path) -> list[str]:
    """The same binds, with the host's part free of links, so that it can't come to mean something else.

    Args:
        binds: as in :class:`.spec.ContainerSpec`.
        state: the folder of supervisors.
        image: what they are shown in.

    Raises:
        CallerError: one is none, can't be mounted, or would show what it must not; names the fix.
    """
    kept = Path(os.path.realpath(state))
    safe, taken = [], dict[str, _Shown]()
    for bind in binds:
        parsed = Bind.parse(bind)
        source = _source(bind, parsed.source)
        if trouble := _exposed(source, kept):
            raise CallerError(f"{bind!r} would show {trouble}", field="binds")
        if _OF_THE_RUNTIME.search(bind):
            raise CallerError(f"{bind!r} has a comma, quote or backslash, which can't be bound: rename", field="binds")
        shown = _Shown(bind, source)
        target = _target(shown, parsed.target, image, taken)
        safe.append(f"{source}:{target}{':ro' if parsed.read_only else ''}")
    return safe


@dataclass(frozen=True, slots=True)
class _Shown:
    """Something that is to be seen inside.

    Attributes:
        text: as it was asked for.
        source: where it lies.
    """

    text: str
    source: Path

    @property
    def is_folder(self) -> bool:
        """Whether it is one."""
        return self.source.is_dir()

    def led(self, root: Path, path: str) -> str:
        """Where a path in an image or another folder leads, with all links followed, none of which leads out of it."""
        try:
            return str("/" / rootfs.inside(root, path).relative_to(root))
        except OSError as error:
            raise self.refused(f"{path} leads nowhere in {root}: {error.strerror}") from error

    def refused(self, reason: str) -> CallerError:
        """The error that names it."""
        return CallerError(f"{self.text!r}: {reason}", field="binds")


def check_image_folder(image: str, state: Path) -> None:
    """Refuse the host's own root, by whatever name, as an image: root's sandboxes would read all of root's in it.

    Args:
        image: its path.
        state: the folder of supervisors.

    Raises:
        CallerError: it would show what it must not; for the field ``image``.
    """
    source = Path(os.path.realpath(image))
    if Path(os.path.realpath(state)).is_relative_to(source) or any(
        closed.is_relative_to(source) or source.is_relative_to(closed) for closed in CLOSED
    ):
        raise CallerError(
            f"{image} is not an image but this machine's own files, or has the sandboxes' folder {state} in it: name "
            "the root folder of an image",
            field="image",
        )


def _exposed(source: Path, state: Path) -> str:
    if state.is_relative_to(source) or source.is_relative_to(state):
        return (
            f"the sandboxes' own folder {state}, and with it the way to the host: bind a folder that it is not in, "
            "or set PRORL_STATE to one elsewhere"
        )
    for closed in CLOSED:
        if source.is_relative_to(closed) or closed.is_relative_to(source):
            return f"the host's {closed}: bind the file that is needed from elsewhere"
    if SOCKETS.is_relative_to(source):
        return f"the sockets of the host's services in {SOCKETS}: bind just the one that is needed"
    return ""


def _source(bind: str, path: str) -> Path:
    """Where it lies, without links."""
    try:
        source = Path(os.path.realpath(path, strict=True))
        source.stat()
    except FileNotFoundError as error:
        reason = f"{bind!r}: there is no {path} on this machine: make it, or name another"
        raise CallerError(reason, field="binds") from error
    except OSError as error:
        raise CallerError(f"{bind!r} can't be looked at: {path}: {error.strerror}", field="binds") from error
    if is_machine_root() and (wall := walled_in(source)):
        raise CallerError(
            f"{bind!r}: sandboxes of root run under user ids that nobody has, which can't enter {wall}: chmod o+x it, "
            "or bind what lies elsewhere",
            field="binds",
        )
    return source


def _target(shown: _Shown, path: str, image: Path, taken: dict[str, _Shown]) -> str:
    """Where it is to be seen, if it can be shown there; ``taken`` is what is to be seen besides, and gets it."""
    if ".." in path.split("/"):
        raise shown.refused("the place inside must not have '..' in it")
    target = f"/{os.path.normpath(path).strip('/')}"
    for other, there in taken.items():
        if target == other:
            raise shown.refused(f"is to be seen where {there.text!r} is: name another place")
        if other.startswith(f"{target}/"):
            raise shown.refused(f"would hide {there.text!r}: name that after this")
    for place in {target, shown.led(image, target)}:
        _check_place(shown, place)
    above = max((other for other in taken if target.startswith(f"{other}/")), key=len, default="")
    below = taken[above].source if above else image
    if below is not None and below.is_dir():
        _check_kind(shown, target, below, target.removeprefix(above), of_the_image=not above)
    elif below is not None and above:
        raise shown.refused(f"{above} is a file, so nothing can be below it")
    taken[target] = shown
    return target


def _check_place(shown: _Shown, place: str) -> None:
    """Refuse the places that are every sandbox's own."""
    if place == "/":
        raise shown.refused("would hide the image: name a folder inside, /mnt say")
    if own := next((own for own in OWN if place == own or place.startswith(f"{own}/")), ""):
        raise shown.refused(f"{own} is the sandbox's own: name another place, /mnt say")
    if place == "/etc" or place in mounts.OF_THE_RUNTIME:
        raise shown.refused(
            f"{place} has files that are made for each sandbox: bind single others of /etc, or upload what is needed "
            "once it runs"
        )


def _check_kind(shown: _Shown, target: str, root: Path, path: str, *, of_the_image: bool) -> None:
    """Refuse a file on a folder, the reverse, and what leaves nothing to run.

    Args:
        shown: what is to be seen.
        target: where.
        root: the folder in which that lies, of an image or bound.
        path: its path in there.
        of_the_image: which of both; only there can something be made to mount on.
    """
    where = "in the image" if of_the_image else f"in {root}"
    place = shown.led(root, path)
    found = _kind_at(root, place)
    for parent in Path(place).parents:
        if _kind_at(root, str(parent)) == "file":
            raise shown.refused(f"{parent} is no folder {where}, so nothing can be below it")
    if found == "folder" and not shown.is_folder:
        name = shown.source.name if shown.source else ""
        raise shown.refused(f"{target} is a folder {where}, and this is a file: name {target}/{name}")
    if found == "file" and shown.is_folder:
        raise shown.refused(f"{target} is a file {where}, and this is a folder: name a folder, or what is not there")
    if not found and not of_the_image:
        raise shown.refused(f"there is no {path} {where}, and nothing is made there for it: make it first")
    shell = shown.led(root, "/bin/sh") if of_the_image else ""
    hidden = shell.startswith(f"{place}/") and shown.is_folder
    if hidden and not (shown.source and os.path.lexists(f"{shown.source}{shell.removeprefix(place)}")):
        raise shown.refused(f"would hide the image's {shell}, without which nothing runs")


def _kind_at(root: Path, path: str) -> Literal["file", "folder", ""]:
    """What a path without links is in a folder."""
    try:
        return "folder" if stat.S_ISDIR(Path(f"{root}{path}").lstat().st_mode) else "file"
    except OSError:
        return ""
