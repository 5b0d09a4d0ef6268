# SPDX-License-Identifier: Apache-2.0
"""The moulds of a supervisor, each made when a sandbox of its image is first asked for.

Whoever asks for the same image meanwhile waits for the one that is being made. An image is told by the path and by
what changes when it is another (``order["image_identity"]``). A mould with which no sandbox could be made, where the
runtime could, is not tried again: the reason is told with each sandbox that is made in the other way instead.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from nemo_gym_prorl.sandbox.isolation.mould import cast as moulds
from nemo_gym_prorl.sandbox.isolation.mould.cast import Mould
from nemo_gym_prorl.sandbox.runtime import image_environment
from nemo_gym_prorl.sandbox.supervisor.processes import background
from nemo_gym_prorl.sandbox.supervisor.processes.children import Answer, Children
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message
from nemo_gym_prorl.sandbox.supervisor.storage import state_dir


OVERTIME_S = 2.0
"""How much longer than a start may take its mould may take to be made, which first ends in its own way."""

MOST = 256
"""Moulds that are kept; the one that was not used for longest goes first, of those of which no sandbox is left."""


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
        self._made: dict[str, Mould] = {}
        """The last in order is the last used."""
        self._making: dict[str, asyncio.Task[Mould]] = {}
        self.broken: dict[str, str] = {}
        """By the identity of an image: why its sandboxes can't be made from a mould."""

    async def get(self, order: Message) -> Mould:
        """The mould for an order.

        Raises:
            Refused: there is none; says why.
        """
        key = order["image_identity"]
        if mould := self._made.pop(key, None):
            self._made[key] = mould
            return mould
        if key not in self._making:
            self._making[key] = background.begin(self._make(key, order))
            self._making[key].add_done_callback(lambda _task: self._making.pop(key))
        return await asyncio.shield(self._making[key])

    async def _make(self, key: str, order: Message) -> Mould:
        folder = self._folder / f"m-{secrets.token_hex(6)}"
        try:
            made = self._made[key] = moulds.received(*await self._children.run(partial(_make, order, folder)))
        finally:
            if folder.exists():
                # Its maker was killed, or took too long and was ended by its own clock.
                background.begin(self._children.run(partial(_discard, folder)))
        self._forget_oldest()
        return made

    def _forget_oldest(self) -> None:
        held = {id(mould) for mould in self._held()}
        for key, mould in list(self._made.items())[:-MOST]:
            if id(mould) not in held:
                os.close(mould.image)
                os.close(mould.domain)
                del self._made[key]


def _discard(folder: Path) -> Answer:
    state_dir.discard(folder)
    return {}, []


def _make(order: Message, folder: Path) -> Answer:
    # Nobody waits for it any longer, whatever holds it up.
    signal.setitimer(signal.ITIMER_REAL, order["start_timeout_s"] + OVERTIME_S)
    try:
        return moulds.open_mould(
            order["image"], lambda: image_environment.ask(order, folder, order["start_timeout_s"])
        )
    except image_environment.RuntimeFailed as error:
        return {"error": str(error), "log": error.log}, []
