# SPDX-License-Identifier: Apache-2.0
"""Texts most of which are the beginnings of others, as the prompts of a rollout are.

A prompt of 64k tokens is 400 KB of ids in JSON and 250,000 characters, and a rollout has as many prompts as turns. But
each begins with the one before, unless history was sampled twice or rewritten. So one text stands for all of a branch,
each of which is so much of it. Texts of other branches are kept as long as there is room.

Pure: no task, socket, clock or thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator


class _Branch[Text: (str, bytes)]:
    """The longest text of a branch, and the names of those that are its beginnings."""

    def __init__(self, text: Text) -> None:
        self.text: Text = text
        self.names: list[Hashable] = []


class Beginnings[Text: (str, bytes)]:
    """Texts by their names.

    Args:
        room: characters or bytes that are kept, besides the text that was added last.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._places: dict[Hashable, tuple[_Branch[Text], int]] = {}
        self._branches: OrderedDict[_Branch[Text], None] = OrderedDict()
        self._held = 0

    def get(self, name: Hashable) -> Text | None:
        """The text of a name, if it is kept."""
        if (place := self._places.get(name)) is None:
            return None
        branch, length = place
        self._branches.move_to_end(branch)
        text: Text = branch.text if length == len(branch.text) else branch.text[:length]
        return text

    def add(self, name: Hashable, text: Text, before: Hashable = None) -> list[tuple[Hashable, Text]]:
        """A text, which goes on from that of another name, as far as that is kept and it does begin with it.

        Returns:
            Names and texts that are kept no longer.
        """
        if self.get(name) == text:
            return []
        branch, length = self._places.get(before, (None, 0))
        if branch is None or length != len(branch.text) or not text.startswith(branch.text):
            branch = _Branch(text)
        else:
            self._held -= length
        branch.text = text
        branch.names.append(name)
        self._places[name] = branch, len(text)
        self._held += len(text)
        self._branches[branch] = None
        self._branches.move_to_end(branch)
        gone: list[tuple[Hashable, Text]] = []
        while self._held - len(text) > self._room:
            gone += self._drop(next(iter(self._branches)))
        return gone

    def _drop(self, branch: _Branch[Text]) -> Iterator[tuple[Hashable, Text]]:
        del self._branches[branch]
        self._held -= len(branch.text)
        for name in branch.names:
            held_by, length = self._places.get(name, (None, 0))
            if held_by is branch:
                del self._places[name]
                yield name, branch.text[:length]
