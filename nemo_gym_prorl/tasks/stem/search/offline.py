# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The offline search engine: an index on this machine, opened and searched off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.tasks.stem.search.engine import Passage
from nemo_gym_prorl.tasks.stem.search.index import Index


THREADS = 2
"""Searches at a time. They are short, and mostly Python's."""


class OfflineSearch:
    """A :class:`.SearchEngine` over an :class:`.Index`.

    Args:
        open_index: opens it, or makes it first; blocks. What it raises is raised by :meth:`prepare`, each time anew,
            so an index that was missing is found when it is there.
    """

    def __init__(self, open_index: Callable[[], Index]) -> None:
        self._open_index = open_index
        self._index: Index | None = None
        self._opening = asyncio.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="search")

    async def prepare(self) -> None:
        """Open the index, once."""
        async with self._opening:
            if self._index is None:
                self._index = await self._off_the_loop(self._open_index)

    async def search(self, query: str, limit: int) -> Sequence[Passage]:
        """See :meth:`.SearchEngine.search`."""
        if self._index is None:
            await self.prepare()
        index = self._index
        assert index is not None
        try:
            return await self._off_the_loop(lambda: index.search(query, limit))
        except (OSError, ValueError, IndexError) as error:
            reason = f"the index can't be read: {type(error).__name__}: {error}"
            raise InfrastructureError(reason, kind=FailureKind.PROVIDER_UNAVAILABLE, field="search.index") from error

    async def aclose(self) -> None:
        """Close the index when the searches in it have ended."""
        await asyncio.to_thread(self._threads.shutdown)
        if self._index is not None:
            self._index.close()

    async def _off_the_loop[T](self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
