# SPDX-License-Identifier: Apache-2.0
"""Ids to text and back, by a model's own fast tokenizer, with nothing added on the way.

What an observation spells of a model's control tokens can be encoded as the ordinary characters that it consists of
(:mod:`.literal` says where that is due).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer as FastTokenizer


_ANCHORS = ("\n", "a", " ")


class Tokenizer:
    """Ids to text and back, without any token added on the way."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        self.size = fast.get_vocab_size()
        """Number of token ids, added tokens included."""
        added = fast.get_added_tokens_decoder()
        self.special = {token_id: token.content for token_id, token in added.items() if token.special}
        self.special_pattern = _any_of(self.special.values())
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._literal: dict[tuple[int, str], list[int] | None] = {}
        self._apart: dict[int, bool] = {}

    def encode(self, text: str) -> list[int]:
        # The one way without offsets, which are a third of the work.
        (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    def encode_observed(self, text: str, places: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
        """The ids of a text in which the control tokens at some places are ordinary characters, and how many were.

        All but those tokens gets the ids that it has in :meth:`encode`.
        """
        if not places:
            return self.encode(text), 0
        encoding = self._fast.encode(text, add_special_tokens=False)
        ids: list[int] = []
        neutralised, left = 0, list(reversed(places))
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            while left and left[-1][1] <= start:
                left.pop()
            literal = None
            if left and start <= left[-1][0] < end and token_id in self._added:
                literal = self._as_text(token_id, text[start:end])
            neutralised += literal is not None
            ids += [token_id] if literal is None else literal
        return ids, neutralised

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included."""
        return self._fast.decode(list(ids), skip_special_tokens=False)

    def without_end(self, ids: Sequence[int], text: str) -> str:
        """The text of ids without the special token that is their last.

        Args:
            ids: with that token.
            text: all that they decode to.
        """
        end = self.special[ids[-1]]
        if (apart := self._apart.get(ids[-1])) is None:
            # Some decoders put a space before each token but the first.
            before = self.encode(self.sample_text())
            apart = self._apart[ids[-1]] = self.decode([*before, ids[-1]]) == self.decode(before) + end
        return text.removesuffix(end) if apart else self.decode(ids[:-1])

    def sample_text(self) -> str:
        """A text that hardly any other tokenizer reads as the same ids: special tokens, many scripts, code."""
        return "".join(self.special.values()) + "The façade's 日本語, Ωmega\n\n\tdef f(x): return 1234567890 # 🙂"

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
        finally:
            self._fast.encode_special_tokens = False
        return None


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
