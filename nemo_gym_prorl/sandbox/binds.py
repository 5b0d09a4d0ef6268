# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which of the host's files a sandbox may be shown, bound or as its image, and where.

A bind that shows the folder where supervisors keep their sockets, or the files of other sandboxes, would be the way
out of all of them, and so would be the host's processes. So would be the sockets of the host's services, which lie in
``/run``: one of those is shown only if it is named.

What can't be mounted where it is asked for is refused here, too, before anything is made: either way of making a
sandbox would fail in the middle, in words of its own. The supervisor asks, and relies on no earlier check.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.images import rootfs
from nemo_gym_prorl.sandbox.isolation import mounts
from nemo_gym_prorl.sandbox.isolation.mounts import Bind
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.isolation.syscalls import first_untraversable_parent


CLOSED = (Path("/proc"), Path("/sys"))
"""Nothing of these is shown: a sandbox has its own."""

SOCKETS = Path("/run")
"""Not shown as a whole."""

OWN = ("/proc", "/sys", "/dev")
"""What a sandbox has of its own, and all below."""

_OF_THE_RUNTIME = re.compile(r'[,"\\\n]')
"""What means something else on the runtime's command line."""


def checked(binds: Sequence[str], state: Path, image: Path) -> list[str]:
    """Return the same binds, with the host's part free of links, so that it can't come to mean something else.

    Args:
        binds: as in :class:`.spec.ContainerSpec`.
        state: the folder of supervisors.
        image: what they are shown in.

    Raises:
        CallerError: one is none, can't be mounted, or would show what it must not; names the fix.
    """
    kept = Path(os.path.realpath(state))
    shown: list[_Shown] = []
    for text in binds:
        bind = Bind.parse(text)
        source = _source(text, bind.source)
        if trouble := _exposed(source, kept):
            raise _refusal(text, f"would show {trouble}")
        if _OF_THE_RUNTIME.search(text):
            raise _refusal(text, "has a comma, quote or backslash, which can't be bound: rename")
        if ".." in bind.target.split("/"):
            raise _refusal(text, "the place inside must not have '..' in it")
        fresh = _Shown(text, source, f"/{os.path.normpath(bind.target).strip('/')}", bind.read_only)
        _check_target(fresh, image, shown)
        shown.append(fresh)
    return [f"{one.source}:{one.target}{':ro' if one.read_only else ''}" for one in shown]


@dataclass(frozen=True, slots=True)
class _Shown:
    """A bind as it was asked for, where it lies without links, and where it is to be seen."""

    text: str
    source: Path
    target: str
    read_only: bool


def _refusal(text: str, reason: str) -> CallerError:
    return CallerError(f"{text!r}: {reason}", field="binds")


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


def _source(text: str, path: str) -> Path:
    """Return where it lies, without links."""
    try:
        source = Path(os.path.realpath(path, strict=True))
        source.stat()
    except FileNotFoundError as error:
        raise _refusal(text, f"there is no {path} on this machine: make it, or name another") from error
    except OSError as error:
        raise _refusal(text, f"{path} can't be looked at: {error.strerror}") from error
    if is_machine_root() and (wall := first_untraversable_parent(source)):
        reason = "sandboxes of root run under user ids that nobody has, which can't enter"
        raise _refusal(text, f"{reason} {wall}: chmod o+x it, or bind what lies elsewhere")
    return source


def _check_target(bind: _Shown, image: Path, earlier: Sequence[_Shown]) -> None:
    """Refuse a place where it can't be shown, beside those that are bound before."""
    for other in earlier:
        if bind.target == other.target:
            raise _refusal(bind.text, f"is to be seen where {other.text!r} is: name another place")
        if other.target.startswith(f"{bind.target}/"):
            raise _refusal(bind.text, f"would hide {other.text!r}: name that after this")
    for place in (bind.target, _led(bind.text, image, bind.target)):
        if place == "/":
            raise _refusal(bind.text, "would hide the image: name a folder inside, /mnt say")
        if own := next((own for own in OWN if place == own or place.startswith(f"{own}/")), ""):
            raise _refusal(bind.text, f"{own} is the sandbox's own: name another place, /mnt say")
        if place == "/etc" or place in mounts.RUNTIME_MOUNTED_FILES:
            reason = "has files that are made for each sandbox: bind single others of /etc, or upload what is needed"
            raise _refusal(bind.text, f"{place} {reason}")
    # What lies there: of the last bind that it is below, else of the image, if that is unpacked.
    above = max((one for one in earlier if bind.target.startswith(f"{one.target}/")), key=_depth, default=None)
    root, path = (above.source, bind.target.removeprefix(above.target)) if above else (image, bind.target)
    if not root.is_dir():
        if above:
            raise _refusal(bind.text, f"{above.target} is a file, so nothing can be below it")
        return
    where, place = f"in {root}" if above else "in the image", _led(bind.text, root, path)
    found = Path(f"{root}{place}")
    for parent in Path(place).parents:
        if os.path.lexists(f"{root}{parent}") and not Path(f"{root}{parent}").is_dir():
            raise _refusal(bind.text, f"{parent} is no folder {where}, so nothing can be below it")
    if found.is_dir() and not bind.source.is_dir():
        reason = f"{bind.target} is a folder {where}, and this is a file: name {bind.target}/{bind.source.name}"
        raise _refusal(bind.text, reason)
    if bind.source.is_dir() and os.path.lexists(found) and not found.is_dir():
        raise _refusal(bind.text, f"{bind.target} is a file {where}, and this is a folder: name a folder")
    if above and not os.path.lexists(found):
        raise _refusal(bind.text, f"there is no {path} {where}, and nothing is made there for it: make it first")
    shell = "" if above else _led(bind.text, image, "/bin/sh")
    if shell.startswith(f"{place}/") and not os.path.lexists(f"{bind.source}{shell.removeprefix(place)}"):
        raise _refusal(bind.text, f"would hide the image's {shell}, without which nothing runs")


def _depth(bind: _Shown) -> int:
    return len(bind.target)


def _led(text: str, root: Path, path: str) -> str:
    """Return where a path in a folder leads, with all links followed, none of which leads out of it."""
    try:
        return str("/" / rootfs.resolve_inside(root, path).relative_to(root))
    except OSError as error:
        raise _refusal(text, f"{path} leads nowhere in {root}: {error.strerror}") from error
