# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym's ``SupportsSandboxSnapshot``: snapshots and checkpoints of sandboxes.

Gym finds the capability by its methods, so on a Gym that does not know it the methods are simply there. The code that
takes snapshots is imported on demand, so single sandboxes neither wait for it nor depend on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_gym.sandbox.providers.base import SandboxHandle

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.container import container_of
from nemo_gym_prorl.sandbox.spec import SNAPSHOT


if TYPE_CHECKING:
    from nemo_gym_prorl.sandbox.compose import snapshots


class SnapshotSupport:
    """See the module; a part of :class:`.provider.SingularityProvider`."""

    _kept: str | None
    """Folder of snapshots, if not the usual one."""

    async def snapshot(self, handle: SandboxHandle, name: str = "snapshot") -> str:
        """Keep what the sandbox has written; it stands still meanwhile. ``create`` takes the result as the option
        ``snapshot_id``, in place of an image; see :mod:`.snapshots`."""
        from nemo_gym_prorl.sandbox.compose import snapshots

        return (await snapshots.take(container_of(handle), self._snapshots_folder(), name)).name

    async def checkpoint(self, handle: SandboxHandle, name: str) -> snapshots.Taken:
        """As :meth:`snapshot`, of one in which nobody has anything running but a shell that waits, unless that left
        something in the background; and what there is to tell of it."""
        from nemo_gym_prorl.sandbox.compose import snapshots

        return await snapshots.take(container_of(handle), self._snapshots_folder(), name, at_rest=True)

    async def delete_old_snapshots(self, name: str, age_s: float) -> None:
        """Delete the snapshots that were taken under that name, or renewed, more than so many seconds ago."""
        from nemo_gym_prorl.sandbox.compose import snapshots

        await asyncio.to_thread(snapshots.sweep, self._snapshots_folder(), name, age_s)

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """Delete a snapshot; one that is not there is deleted already."""
        await self._with_snapshot(snapshot_id, lambda path: path.unlink(missing_ok=True))

    async def renew_snapshot(self, snapshot_id: str) -> None:
        """Have a snapshot count as new for :meth:`delete_old_snapshots`, if it is there."""
        await self._with_snapshot(snapshot_id, os.utime)

    async def _with_snapshot(self, snapshot_id: str, work: Callable[[Path], None]) -> None:
        from nemo_gym_prorl.sandbox.compose import snapshots

        with contextlib.suppress(CallerError, FileNotFoundError):
            path = await asyncio.to_thread(snapshots.find, self._snapshots_folder(), snapshot_id)
            await asyncio.to_thread(work, path)

    def snapshot_to_restore(self, snapshot_id: str | None, image: str | None) -> snapshots.Snapshot | None:
        """The snapshot that a specification names in place of an image.

        Raises:
            CallerError: there is none, or there is an image besides.
        """
        if snapshot_id is None:
            return None
        if image:
            raise CallerError("a snapshot stands in place of an image; give one of both", field=SNAPSHOT)
        from nemo_gym_prorl.sandbox.compose import snapshots

        return snapshots.read(snapshots.find(self._snapshots_folder(), snapshot_id))

    def _snapshots_folder(self) -> Path:
        from nemo_gym_prorl.sandbox.compose import snapshots

        return Path(self._kept) if self._kept else snapshots.default_folder()
