# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of a sandbox's bind mounts and image: which host files the sandbox may see, and at which paths.

A sandbox could escape through the sockets in the supervisors' folder, through the host's ``/proc``, or through the
sockets of the host's services in ``/run``. A bind may name a single file in ``/run``.

A bind that cannot be mounted is refused here, before the sandbox is created, since a failed mount has no useful error
message. The supervisor runs these checks itself and does not rely on checks by a client.
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
from nemo_gym_prorl.sandbox.supervisor.state_dir import SCRATCH


CLOSED = (Path("/proc"), Path("/sys"))
"""Host folders that a bind may neither contain nor lie in; each sandbox has its own ``/proc`` and ``/sys``."""

SOCKETS = Path("/run")
"""Host folder that no bind may show as a whole; a bind may name a file in this folder."""

OWN = ("/proc", "/sys", "/dev")
"""Folders of the sandbox that are created for each sandbox; no bind can be mounted in them."""

_RUNTIME_SYNTAX = re.compile(r'[,"\\\n]')
"""Characters with a special meaning in Apptainer's option ``--bind``."""


def check_binds(binds: Sequence[str], state: Path, image: Path) -> list[str]:
    """Return the binds with symlinks in their host paths resolved, so that a later change of a symlink has no effect.

    Args:
        binds: as in :class:`.spec.ContainerSpec`.
        state: the folder with the folders of all supervisors.
        image: path of the sandbox's image.

    Raises:
        CallerError: a bind is malformed, cannot be mounted, or exposes the host; names the fix.
    """
    state_folder = Path(os.path.realpath(state))
    accepted: list[_CheckedBind] = []
    for text in binds:
        bind = Bind.parse(text)
        source = _source(text, bind.source)
        if trouble := _exposed(source, state_folder):
            raise _refusal(text, f"would show {trouble}")
        if _RUNTIME_SYNTAX.search(text):
            raise _refusal(text, "has a comma, quote or backslash, which can't be bound: rename")
        if ".." in bind.target.split("/"):
            raise _refusal(text, "the path inside must not have '..' in it")
        candidate = _CheckedBind(text, source, f"/{os.path.normpath(bind.target).strip('/')}", bind.read_only)
        _check_target(candidate, image, accepted)
        accepted.append(candidate)
    return [f"{one.source}:{one.target}{':ro' if one.read_only else ''}" for one in accepted]


@dataclass(frozen=True, slots=True)
class _CheckedBind:
    """A bind mount: the caller's text, the host path with symlinks resolved, and the path inside the sandbox."""

    text: str
    source: Path
    target: str
    read_only: bool


def _refusal(text: str, reason: str) -> CallerError:
    return CallerError(f"{text!r}: {reason}", field="binds")


def check_image_folder(image: str, state: Path) -> None:
    """Refuse an image that contains the host's own files: sandboxes of root could read all files of root.

    Raises:
        CallerError: the image contains the supervisors' folder, or contains or lies in ``/proc`` or ``/sys``.
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
    if state.is_relative_to(source) or (source.is_relative_to(state) and state / SCRATCH not in source.parents[1:]):
        return (
            f"the sandboxes' own folder {state}, through which the host can be reached: bind a folder without it, "
            "or set PRORL_STATE to another folder"
        )
    for closed in CLOSED:
        if source.is_relative_to(closed) or closed.is_relative_to(source):
            return f"the host's {closed}: bind the file that is needed from elsewhere"
    if SOCKETS.is_relative_to(source):
        return f"the sockets of the host's services in {SOCKETS}: bind just the one that is needed"
    return ""


def _source(text: str, path: str) -> Path:
    try:
        source = Path(os.path.realpath(path, strict=True))
        source.stat()
    except FileNotFoundError as error:
        raise _refusal(text, f"there is no {path} on this machine: make it, or name another") from error
    except OSError as error:
        raise _refusal(text, f"{path} can't be read: {error.strerror}") from error
    return source


def _check_target(bind: _CheckedBind, image: Path, earlier: Sequence[_CheckedBind]) -> None:
    """Refuse a bind that cannot be mounted at its path inside the sandbox, after the ``earlier`` binds."""
    for other in earlier:
        if bind.target == other.target:
            raise _refusal(bind.text, f"has the same path inside as {other.text!r}: name another path")
        if other.target.startswith(f"{bind.target}/"):
            raise _refusal(bind.text, f"would hide {other.text!r}: list that bind after this one")
    for target in (bind.target, _resolve(bind.text, image, bind.target)):
        if target == "/":
            raise _refusal(bind.text, "would hide the image: name a folder inside, /mnt say")
        if own := next((own for own in OWN if target == own or target.startswith(f"{own}/")), ""):
            raise _refusal(bind.text, f"{own} is the sandbox's own: name another path, /mnt say")
        if target == "/etc" or target in mounts.RUNTIME_MOUNTED_FILES:
            reason = "has files that are made for each sandbox: bind other single files of /etc, or upload the file"
            raise _refusal(bind.text, f"{target} {reason}")
    # The target lies in the deepest earlier bind above the target, or else in the image. The files of an image that is
    # not unpacked cannot be checked.
    all_above = (one for one in earlier if bind.target.startswith(f"{one.target}/"))
    above = max(all_above, key=lambda one: len(one.target), default=None)
    root, path = (above.source, bind.target.removeprefix(above.target)) if above else (image, bind.target)
    if not root.is_dir():
        if above:
            raise _refusal(bind.text, f"{above.target} is a file, so nothing can be below it")
        return
    where, resolved = f"in {root}" if above else "in the image", _resolve(bind.text, root, path)
    found = Path(f"{root}{resolved}")
    for parent in Path(resolved).parents:
        if os.path.lexists(f"{root}{parent}") and not Path(f"{root}{parent}").is_dir():
            raise _refusal(bind.text, f"{parent} is no folder {where}, so nothing can be below it")
    if found.is_dir() and not bind.source.is_dir():
        reason = f"{bind.target} is a folder {where}, and this is a file: name {bind.target}/{bind.source.name}"
        raise _refusal(bind.text, reason)
    if bind.source.is_dir() and os.path.lexists(found) and not found.is_dir():
        raise _refusal(bind.text, f"{bind.target} is a file {where}, and this is a folder: name a folder")
    if above and not os.path.lexists(found):
        raise _refusal(bind.text, f"there is no {path} {where}, and nothing is made there for it: make it first")
    shell = "" if above else _resolve(bind.text, image, "/bin/sh")
    if shell.startswith(f"{resolved}/") and not os.path.lexists(f"{bind.source}{shell.removeprefix(resolved)}"):
        raise _refusal(bind.text, f"would hide the image's {shell}, which every command needs: name another path")


def _resolve(text: str, root: Path, path: str) -> str:
    """Return a path in the root folder ``root`` with symlinks resolved; no symlink leads out of ``root``."""
    try:
        return str("/" / rootfs.resolve_inside(root, path).relative_to(root))
    except OSError as error:
        raise _refusal(text, f"{path} leads nowhere in {root}: {error.strerror}") from error
