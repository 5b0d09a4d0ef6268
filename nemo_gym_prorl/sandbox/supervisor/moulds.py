# SPDX-License-Identifier: Apache-2.0
"""The moulds of a supervisor, each made when a sandbox of its image is first asked for.

Whoever asks for the same image meanwhile waits for the one that is being made. An image is told by the path and by
what changes when it is another (``order["image_identity"]``). A mould with which no sandbox could be made, where the
runtime could, is not tried again: the reason is told with each sandbox that is made in the other way instead.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from nemo_gym_prorl.sandbox.isolation.mould import cast as moulds
from nemo_gym_prorl.sandbox.isolation.mould.cast import Mould
from nemo_gym_prorl.sandbox.runtime import image_environment
from nemo_gym_prorl.sandbox.supervisor.processes.children import Children
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message
from nemo_gym_prorl.sandbox.supervisor.storage import state_dir


OVERTIME_S = 2.0
"""How much longer than a start may take its mould may take to be made, which first ends in its own way."""

MOST = 256
"""Moulds that are kept; the one that was not used for longest goes first, of those of which no sandbox is left."""

Waiting = Callable[[Mould | None, Message], None]
"""Is told the mould, or else why there is none."""


@dataclass(slots=True)
class _Entry:
    mould: Mould | None = None
    waiting: list[Waiting] = field(default_factory=list)
    broken: str = ""


class Moulds:
    """See the module.

    Args:
        folder: the owner's.
        children: its children.
        held: those from which sandboxes were made that are not gone yet.
    """

    def __init__(self, folder: Path, children: Children, held: Callable[[], Iterable[Mould | None]]) -> None:
        self._folder = folder
        self._children = children
        self._held = held
        self._all: dict[str, _Entry] = {}

    def broken(self, order: Message) -> str:
        """Why sandboxes of that image can't be made from a mould; empty if that is not known."""
        entry = self._all.get(order["image_identity"])
        return entry.broken if entry else ""

    def mark_broken(self, order: Message, reason: str) -> None:
        """Sandboxes of that image can't be made from a mould."""
        self._all.setdefault(order["image_identity"], _Entry()).broken = reason

    def get(self, order: Message, then: Waiting) -> None:
        """Have ``then`` told the mould for an order, at once if there is one."""
        key = order["image_identity"]
        # The last in order is the last used.
        entry = self._all[key] = self._all.pop(key, _Entry())
        if entry.mould:
            then(entry.mould, {})
            return
        entry.waiting.append(then)
        if len(entry.waiting) == 1:
            folder = self._folder / f"m-{secrets.token_hex(6)}"
            self._children.fork(partial(_make, order, folder), partial(self._made, key, folder), files=())

    def _made(self, key: str, folder: Path, answer: Message, files: list[int]) -> None:
        if folder.exists():
            # Its maker was killed, or took too long and was ended by its own clock.
            self._children.fork(partial(_discard, folder), lambda _answer, _files: None, files=())
        entry = self._all[key]
        waiting, entry.waiting = entry.waiting, []
        if "error" in answer:
            del self._all[key]
        else:
            entry.mould = moulds.received(answer, files)
        for then in waiting:
            then(entry.mould, answer)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        known = [(key, entry.mould) for key, entry in self._all.items() if entry.mould]
        if len(known) <= MOST:
            return
        held = {id(mould) for mould in self._held()}
        for key, mould in known[:-MOST]:
            if id(mould) not in held:
                os.close(mould.image)
                os.close(mould.domain)
                del self._all[key]


def _discard(folder: Path) -> tuple[Message, list[int]]:
    state_dir.discard(folder)
    return {}, []


def _make(order: Message, folder: Path) -> tuple[Message, list[int]]:
    # Nobody waits for it any longer, whatever holds it up.
    signal.setitimer(signal.ITIMER_REAL, order["start_timeout_s"] + OVERTIME_S)
    try:
        return moulds.open_mould(
            order["image"], lambda: image_environment.ask(order, folder, order["start_timeout_s"])
        )
    except image_environment.RuntimeFailed as error:
        return {"error": str(error), "log": error.log}, []
