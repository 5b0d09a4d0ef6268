# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The prepared images of a supervisor, each made when a sandbox of its image is first asked for.

Whoever asks for the same image meanwhile waits for the one that is being made. An image is told by the path and by
what changes when it is another (``order["image_identity"]``).
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from nemo_gym_prorl.background import log_exceptions, run_uncancellable, spawn_task
from nemo_gym_prorl.sandbox.isolation.prepared_image import PreparedImage, open_image, received
from nemo_gym_prorl.sandbox.launcher import requests
from nemo_gym_prorl.sandbox.runtime.launch import read_environment
from nemo_gym_prorl.sandbox.supervisor import runtime_start
from nemo_gym_prorl.sandbox.supervisor.processes.children import Answer, Children
from nemo_gym_prorl.sandbox.supervisor.processes.launcher import Launcher
from nemo_gym_prorl.sandbox.supervisor.rpc.answers import Refused
from nemo_gym_prorl.sandbox.supervisor.rpc.connection import drop
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message
from nemo_gym_prorl.sandbox.supervisor.sandbox import STUCK_S, Sandbox
from nemo_gym_prorl.sandbox.supervisor.storage import state_dir


MOST = 256
"""That are kept; the one that was not used for longest goes first, of those of which no sandbox is left."""


class PreparedImages:
    """See the module.

    Args:
        folder: the owner's.
        children: its children.
        launcher: what erases for it.
        held: those from which sandboxes were made that are not gone yet.
    """

    def __init__(
        self, folder: Path, children: Children, launcher: Launcher, held: Callable[[], Iterable[PreparedImage | None]]
    ) -> None:
        self._folder = folder
        self._children = children
        self._launcher = launcher
        self._held = held
        self._made: dict[str, PreparedImage] = {}
        """The last in order is the last used."""
        self._making: dict[str, asyncio.Task[PreparedImage]] = {}

    async def get(self, order: Message) -> PreparedImage:
        """The prepared image for an order.

        Raises:
            Refused: there is none; says why.
        """
        key = order["image_identity"]
        if prepared := self._made.pop(key, None):
            self._made[key] = prepared
            return prepared
        if key not in self._making:
            self._making[key] = spawn_task(self._make(key, order), expected=Refused)
            self._making[key].add_done_callback(lambda _task: self._making.pop(key))
        return await asyncio.shield(self._making[key])

    async def _make(self, key: str, order: Message) -> PreparedImage:
        environment = await self._variables(order) if order["scripted"] else {}
        made = received(environment, *await self._children.run(partial(open_image, order["image"])))
        self._made[key] = made
        self._forget_oldest()
        return made

    async def _variables(self, order: Message) -> dict[str, str]:
        """What scripts of the image's own set, as only its runtime knows.

        It is started once, with no network, no file of the host, and nothing in it but the waiting shell, whose
        variables are read.
        """
        folder = self._folder / f"m-{secrets.token_hex(6)}"
        alone = {**order, "uid": 0, "network": False, "binds": []}
        asked = Sandbox(folder.name, folder, alone, [], [])
        try:
            async with asyncio.timeout(order["start_timeout_s"]):
                runtime_start.make_folder(folder, order)
                runtime_start.lay_out(asked)
                space = await runtime_start.start(self._children, asked)
                return (await self._children.run(partial(_read, space.init)))[0]
        except TimeoutError:
            raise Refused(
                {"error": f"the runtime did not start the image within {order['start_timeout_s']:g} s"}
            ) from None
        finally:
            with log_exceptions():
                await run_uncancellable(self._end(asked))

    async def _end(self, asked: Sandbox) -> None:
        """An honest shell ends with its socket, and the runtime with that; neither is asked whether it would."""
        if asked.channel:
            drop(asked.channel)
        runtime_start.look_for_first(asked)
        async with asyncio.timeout(STUCK_S):
            while asked.space and asked.space.alive:  # only the kernel knows
                asked.space.kill()
                await asyncio.sleep(state_dir.LOOK_S)
        if asked.starter:
            asked.starter.kill()
            await asked.starter.wait()
        asked.take_log()
        await self._launcher.run(requests.erase(asked.folder, None))

    def _forget_oldest(self) -> None:
        held = {id(prepared) for prepared in self._held()}
        for key, prepared in list(self._made.items())[:-MOST]:
            if id(prepared) not in held:
                os.close(prepared.image)
                os.close(prepared.parent_namespace)
                del self._made[key]


def _read(first: int) -> Answer:
    """In a child forked for it: the shell may say of any part of its memory that they are there."""
    return read_environment(f"/proc/{first}/environ"), []
