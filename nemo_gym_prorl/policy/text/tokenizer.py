# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Ids to text and back, by a model's own fast tokenizer, with nothing added on the way.

Many tokenizers put a space before the beginning of a text (SentencePiece's), or swallow white space behind some of
their added tokens. What continues a text is therefore encoded, and decoded, behind the token that it stands behind.

What an observation spells of a model's control tokens can be encoded as the ordinary characters that it consists of
(:mod:`.literal` says where that is due).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer as FastTokenizer


_ANCHORS = ("\n", "a", " ")
"""Ordinary text that stands for whatever is before another text."""
_MERGED = 64
"""Characters of a text that may become one token with what is before it."""

SAMPLE = "The façade's 日本語, Ωmega\n\n\tdef f(x): return 1234567890 # 🙂"
"""A text that other tokenizers read as other ids: many scripts, code."""


class Tokenizer:
    """Ids to text and back, without any token added on the way."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        known = frozenset(fast.get_vocab(with_added_tokens=True).values())
        self._end = max(known, default=-1) + 1
        self._holes = frozenset(range(self._end)) - known
        added = fast.get_added_tokens_decoder()
        self.special = {token_id: token.content for token_id, token in added.items() if token.special}
        self.special_pattern = _any_of(self.special.values())
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._literal: dict[tuple[int, str], list[int] | None] = {}
        self._apart: dict[int, bool] = {}
        head = self.encode(_ANCHORS[0])
        self._marks_beginnings = self.encode(_ANCHORS[0] + "a")[len(head) :] != self.encode("a")
        self._marks_sections: dict[int, bool] = {}

    def encode(self, text: str) -> list[int]:
        """The ids of a whole text."""
        # The one way without offsets, which are a third of the work.
        (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    def encode_observed(
        self, text: str, places: Sequence[tuple[int, int]], behind: int | None = None
    ) -> tuple[list[int], int]:
        """The ids of a text in which the control tokens at some places are ordinary characters, and how many were.

        All but those tokens gets the ids that it has in the whole text.

        Args:
            text: what is encoded.
            places: where control tokens are that are text.
            behind: the id that the text stands behind; ``None`` where it is a beginning.
        """
        anchor, head = self._anchor(text, behind)
        if not places:
            return self.encode(anchor + text)[head:], 0
        encoding = self._fast.encode(anchor + text, add_special_tokens=False)
        ids: list[int] = []
        neutralised, left = 0, [(start + len(anchor), end + len(anchor)) for start, end in reversed(places)]
        text = anchor + text
        for token_id, (start, end) in zip(encoding.ids[head:], encoding.offsets[head:], strict=True):
            while left and left[-1][1] <= start:
                left.pop()
            literal = None
            if left and start <= left[-1][0] < end and token_id in self._added:
                literal = self._as_text(token_id, text[start:end])
            neutralised += literal is not None
            ids += [token_id] if literal is None else literal
        return ids, neutralised

    def _anchor(self, text: str, behind: int | None) -> tuple[str, int]:
        """What to put before a text, so that it is encoded as what continues another one, and how many ids that is."""
        anchors: Sequence[str] = ()
        if behind in self._added:
            anchors = [self._added[behind]]
        elif behind is not None and self._marks_beginnings:
            anchors = _ANCHORS
        for anchor in anchors:
            head = self.encode(anchor)
            # What follows may become one token with an ordinary anchor, only in its first characters.
            if self.encode(anchor + text[:_MERGED])[: len(head)] == head:
                return anchor, len(head)
        return "", 0

    def decode(self, ids: Sequence[int], behind: int | None = None) -> str:
        """The text of the ids, special tokens included.

        Args:
            ids: what is decoded.
            behind: the id that they stand behind; ``None`` where they are a beginning.
        """
        if behind is None:
            return self._text(ids)
        anchor = [behind] if behind in self._added else self.encode("a")
        head, text = self.decode(anchor), self.decode([*anchor, *ids])
        if not text.startswith(head):
            return self.decode(ids)
        text = text[len(head) :]
        return text.removeprefix(" ") if self._marks_section(behind) else text

    def unreadable(self, ids: Sequence[int]) -> int:
        """How many ids have no text, as the padding of an embedding: :meth:`decode` gives U+FFFD for each."""
        if max(ids, default=0) < self._end and self._holes.isdisjoint(ids):
            return 0
        return sum(one >= self._end or one in self._holes for one in ids)

    def _text(self, ids: Sequence[int]) -> str:
        if not self.unreadable(ids):
            return self._fast.decode(list(ids), skip_special_tokens=False)
        runs: list[list[int]] = [[]]
        for one in ids:
            if self.unreadable([one]):
                runs.append([])
            else:
                runs[-1].append(one)
        return "\ufffd".join(self._fast.decode(run, skip_special_tokens=False) for run in runs)

    def _marks_section(self, behind: int) -> bool:
        """Whether a space is put before what follows this token, which stands for nothing then."""
        if behind not in self._added:
            return False
        if behind not in self._marks_sections:
            head = self._added[behind]
            self._marks_sections[behind] = self.decode(self.encode(f"{head}a")) == f"{head} a"
        return self._marks_sections[behind]

    def without_end(self, ids: Sequence[int], text: str, behind: int | None = None) -> str:
        """The text of ids without the special token that is their last.

        Args:
            ids: with that token.
            text: all that they decode to.
            behind: as in :meth:`decode`.
        """
        end = self.special[ids[-1]]
        if (apart := self._apart.get(ids[-1])) is None:
            # Some decoders put a space before each token but the first.
            before = self.encode(self.sample_text())
            apart = self._apart[ids[-1]] = self.decode([*before, ids[-1]]) == self.decode(before) + end
        return text.removesuffix(end) if apart else self.decode(ids[:-1], behind)

    def sample_text(self) -> str:
        """The same for this one: with its special tokens, hardly any other reads it as these ids."""
        return "".join(self.special.values()) + SAMPLE

    def without_special(self, text: str) -> str:
        """The text without what looks like a special token."""
        return self.special_pattern.sub("", text)

    def controls(self, template: str) -> re.Pattern[str]:
        """Matches special tokens and added ones that the template itself writes."""
        return _any_of({*self.special.values(), *(token for token in self._added.values() if token in template)})

    def _as_text(self, token_id: int, text: str) -> list[int] | None:
        """The ids of an added token's text as ordinary characters; ``None`` where the tokenizer cannot do that."""
        key = (token_id, text)
        if key not in self._literal:
            self._literal[key] = self._spelt_out(text)
        return self._literal[key]

    def _spelt_out(self, text: str) -> list[int] | None:
        self._fast.encode_special_tokens = True
        nearly = None
        try:
            # An added token that is not special is recognised all the same, but not in two parts.
            for parts in ([text], [text[:1], text[1:]]):
                # Behind something else: at the beginning of a text some tokenizers put a space in front.
                for anchor in _ANCHORS:
                    head, ids = self.encode(anchor), []
                    for part in parts:
                        after = self.encode(anchor + part)
                        ids += after[len(head) :] if after[: len(head)] == head else [-1]
                    if -1 in ids or any(one in self._added for one in ids):
                        continue
                    if self.decode([*head, *ids]) == self.decode(head) + text:
                        return ids
                    nearly = nearly or ids
        finally:
            self._fast.encode_special_tokens = False
        # A name with SentencePiece's mark for a space in it is never quite given back, and no token either.
        return nearly


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
