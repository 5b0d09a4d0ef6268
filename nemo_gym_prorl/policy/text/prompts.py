# SPDX-License-Identifier: Apache-2.0
"""A rollout's prompts as the template wrote them, to know them again when their turns are continued.

Their texts are kept once for each branch (:mod:`nemo_gym_prorl.policy.beginnings`). Of prompts whose text had to go,
length and hash are left, which are enough to tell whether another text begins with it: a prompt that is written again
to find out would be written with the tools and variables of today.

Pure: no task, socket, clock or thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_gym_prorl.policy.beginnings import Beginnings


type Conversation = Sequence[Mapping[str, Any]]

ROOM = 1 << 20
"""Characters of texts that a rollout keeps, besides the one that was written last."""

_CONVERSATIONS = 4
"""Of so many prompts it is known what they were written of."""


@dataclass(frozen=True, slots=True)
class Written:
    """What the template wrote once.

    Attributes:
        text: all of it; ``None`` where it is known by its hash alone.
        length: of the text.
        digest: the hash of a text that is not there.
        messages: what it was written of, where that is known.
        plain: the same in the form in which templates get them.
    """

    text: str | None
    length: int
    digest: int = 0
    messages: Conversation = field(default=(), compare=False)
    plain: Conversation = field(default=(), compare=False)

    @classmethod
    def of(cls, text: str, messages: Conversation = (), plain: Conversation = ()) -> Written:
        """A whole text."""
        return cls(text, len(text), messages=messages, plain=plain)

    def begins(self, text: str) -> bool:
        """Whether a text begins with what was written then."""
        if self.text is not None:
            return text.startswith(self.text)
        return len(text) >= self.length and hash(text[: self.length]) == self.digest


class Prompts:
    """The prompts of one rollout by their names."""

    def __init__(self) -> None:
        self._digests: dict[Hashable, tuple[int, int]] = {}
        self._texts = Beginnings[str](ROOM)
        self._conversations: OrderedDict[Hashable, tuple[Conversation, Conversation]] = OrderedDict()

    def get(self, name: Hashable) -> Written | None:
        """A prompt as it was written; ``None`` if it never was."""
        if (text := self._texts.get(name)) is not None:
            return Written.of(text, *self._conversations.get(name, ()))
        if (known := self._digests.get(name)) is not None:
            return Written(None, *known)
        return None

    def add(self, name: Hashable, written: Written, before: Hashable = None) -> None:
        """A prompt was written that goes on from that of another name."""
        assert written.text is not None
        self._digests.pop(name, None)
        for gone, text in self._texts.add(name, written.text, before):
            self._digests[gone] = len(text), hash(text)
        self._conversations[name] = written.messages, written.plain
        self._conversations.move_to_end(name)
        if len(self._conversations) > _CONVERSATIONS:
            self._conversations.popitem(last=False)
