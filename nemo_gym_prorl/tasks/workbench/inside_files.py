# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Files of a sandbox that does not :class:`.HasFiles`: by the program inside, the agent's word.

Never by the provider's upload and download: where those share a folder with the host they would follow a symlink of
the agent's on the *host*. What answers may be the agent in the program's place, so no answer speaks of the machine.
"""

from __future__ import annotations

import base64
import errno
import os

from nemo_gym_prorl.failures import OF_THE_MACHINE
from nemo_gym_prorl.tasks.workbench.one_off import Ask


READ_BYTES = 256 << 10
"""So much is read at once: providers bound what a command prints."""

WRITTEN_BYTES = 48 << 10
"""So much is written at once: the kernel takes no argument beyond 128 KiB."""


class NotAnswered(OSError):
    """The program was killed, or something else answered for it; says which."""


class InsideFiles:
    """A :class:`~nemo_gym_prorl.tasks.sandbox.HasFiles`.

    Args:
        ask: carries out a request.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def read_file(self, path: str, *, limit: int) -> bytes:
        """An ordinary file of at most ``limit`` bytes."""
        content = bytearray()
        while len(content) <= limit:
            request = {"op": "read", "path": path, "from": len(content), "size": READ_BYTES}
            answer = await self._asked(request)
            try:
                part = base64.b64decode(str(answer["content"]), validate=True)
            except (KeyError, ValueError) as error:
                raise NotAnswered("something else answered for the reader") from error
            content += part
            if len(part) < READ_BYTES:
                break
        if len(content) > limit:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return bytes(content)

    async def write_file(self, path: str, data: bytes) -> bool:
        """Write a whole file, and the folders above it; says whether there was one."""
        existed = []
        for at in range(0, max(1, len(data)), WRITTEN_BYTES):
            content = base64.b64encode(data[at : at + WRITTEN_BYTES]).decode()
            answer = await self._asked({"op": "write", "path": path, "content": content, "more": at > 0})
            existed.append(answer.get("existed") is True)
        return existed[0]

    async def _asked(self, request: dict[str, object]) -> dict[str, object]:
        answer = await self._ask(request, 0.0)
        if answer is None:
            raise NotAnswered("the program that has its files was killed")
        if "problem" in answer:
            number, said = answer.get("errno"), str(answer["problem"])
            raise OSError(said) if number in OF_THE_MACHINE else OSError(number, said)
        return answer
