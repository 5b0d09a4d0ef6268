# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Conversion between token ids and text by a model's own fast tokenizer, without adding special tokens.

Many tokenizers (such as SentencePiece's) put a space before the beginning of a text, or drop white space after some
added tokens. Text that continues a sequence is therefore encoded and decoded together with the token before the text.

Control tokens in an observation can be encoded as the ordinary characters of their names (:mod:`.renderer` states
when).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache

from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer


_ANCHORS = ("\n", "a", " ")
"""Ordinary texts that can stand for the unknown text before a continuation while the continuation is encoded."""

SAMPLE = "The façade's 日本語, Ωmega\n\n\tdef f(x): return 1234567890 # 🙂"
"""Text of many scripts and code, which different tokenizers encode as different ids."""


class Tokenizer:
    """Fast tokenizer that never adds special tokens such as BOS."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        known = frozenset(fast.get_vocab(with_added_tokens=True).values())
        self._end = max(known, default=-1) + 1
        self._unused_ids = frozenset(range(self._end)) - known
        added = fast.get_added_tokens_decoder()
        self.special = {token_id: token.content for token_id, token in added.items() if token.special}
        self.special_pattern = _any_of(self.special.values())
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._ids_of_anchor = cache(self.encode)
        self._text_of_anchor = cache(lambda *anchor: self.decode(anchor))
        self._ids_of_text = cache(self._encode_as_text)
        self._keeps_spacing = cache(self._decodes_end_without_space)
        self._marks_section = cache(self._decodes_space_after)
        head = self.encode(_ANCHORS[0])
        self._marks_beginnings = self.encode(_ANCHORS[0] + "a")[len(head) :] != self.encode("a")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text that begins a sequence."""
        ids: list[int] = self._encoding(text, offsets=False).ids
        return ids

    def _encoding(self, text: str, *, offsets: bool) -> Encoding:
        if offsets:
            return self._fast.encode(text, add_special_tokens=False)
        # Of the library's methods, only this one does not compute offsets, which nothing uses here.
        return self._fast.encode_batch_fast([text], add_special_tokens=False)[0]

    def encode_observed(
        self, text: str, ranges: Sequence[tuple[int, int]], previous_id: int | None = None
    ) -> tuple[list[int], int]:
        """Encode a text with control tokens as ordinary characters; return the ids and the number of escaped tokens.

        All other tokens keep the ids that they have in the whole text, as does a control token that the tokenizer
        cannot encode as characters.

        Args:
            text: the text to encode.
            ranges: character ranges of the control tokens to escape.
            previous_id: id of the token before the text; ``None`` at the beginning of a sequence.
        """
        for anchor in (*self._anchors(previous_id), ""):
            encoding = self._encoding(anchor + text, offsets=bool(ranges))
            found, head = encoding.ids, self._ids_of_anchor(anchor)
            if found[: len(head)] == head:  # no token spans the end of the anchor
                break
        del found[: len(head)]
        if not ranges:
            return found, 0
        ids: list[int] = []
        escaped_tokens, pending = 0, [(start + len(anchor), end + len(anchor)) for start, end in reversed(ranges)]
        text = anchor + text
        for token_id, (start, end) in zip(found, encoding.offsets[len(head) :], strict=True):
            while pending and pending[-1][1] <= start:
                pending.pop()
            escaped = None
            if pending and start <= pending[-1][0] < end and token_id in self._added:
                escaped = self._ids_of_text(text[start:end])
            escaped_tokens += escaped is not None
            ids += [token_id] if escaped is None else escaped
        return ids, escaped_tokens

    def _anchors(self, previous_id: int | None) -> Sequence[str]:
        """Return candidate texts to encode in front of a continuation, so that the tokenizer sees no beginning."""
        if previous_id in self._added:
            return [self._added[previous_id]]
        return _ANCHORS if previous_id is not None and self._marks_beginnings else ()

    def decode(self, ids: Sequence[int], previous_id: int | None = None) -> str:
        """Return the text of ids, special tokens included, after the token ``previous_id`` (``None``: no token)."""
        if previous_id is None:
            return self._text(ids)
        anchor = [previous_id] if previous_id in self._added else self._ids_of_anchor("a")
        head, text = self._text_of_anchor(*anchor), self.decode([*anchor, *ids])
        if not text.startswith(head):
            return self.decode(ids)
        text = text[len(head) :]
        return text.removeprefix(" ") if previous_id in self._added and self._marks_section(previous_id) else text

    def count_unreadable(self, ids: Sequence[int]) -> int:
        """Return the number of ids outside the vocabulary (embedding padding), each of which decodes to U+FFFD."""
        if max(ids, default=0) < self._end and (not self._unused_ids or self._unused_ids.isdisjoint(ids)):
            return 0
        return sum(one >= self._end or one in self._unused_ids for one in ids)

    def _text(self, ids: Sequence[int]) -> str:
        if not self.count_unreadable(ids):
            return self._fast.decode(list(ids), skip_special_tokens=False)
        runs: list[list[int]] = [[]]
        for one in ids:
            if self.count_unreadable([one]):
                runs.append([])
            else:
                runs[-1].append(one)
        return "\ufffd".join(self._fast.decode(run, skip_special_tokens=False) for run in runs)

    def _decodes_space_after(self, token_id: int) -> bool:
        """Return whether the decoder writes a space after this added token that was not in the encoded text."""
        head = self._added[token_id]
        return self.decode(self.encode(f"{head}a")) == f"{head} a"

    def strip_end_token(self, ids: Sequence[int], text: str, previous_id: int | None = None) -> str:
        """Return ``text``, the text of the ids, without its end: the special token that is the last id."""
        if self._keeps_spacing(ids[-1]):
            return text.removesuffix(self.special[ids[-1]])
        return self.decode(ids[:-1], previous_id)

    def _decodes_end_without_space(self, token_id: int) -> bool:
        # Some decoders write a space before each token except the first: removing the name would leave the space.
        before = self.encode(self.sample_text())
        return self.decode([*before, token_id]) == self.decode(before) + self.special[token_id]

    def sample_text(self) -> str:
        """Return the names of all special tokens and :data:`SAMPLE`, which other tokenizers hardly encode alike."""
        return "".join(self.special.values()) + SAMPLE

    def strip_special_tokens(self, text: str) -> str:
        """Return the text without the names of special tokens."""
        return self.special_pattern.sub("", text)

    def control_tokens_pattern(self, template: str) -> re.Pattern[str]:
        """Return a pattern of special tokens, and of added tokens whose names are in the template's source."""
        return _any_of({*self.special.values(), *(token for token in self._added.values() if token in template)})

    def _encode_as_text(self, text: str) -> list[int] | None:
        """Return the ids of an added token's name as ordinary characters; ``None`` if no such ids exist."""
        self._fast.encode_special_tokens = True
        nearly = None
        try:
            # encode_special_tokens makes special tokens ordinary text; other added tokens need their text split.
            for parts in ([text], [text[:1], text[1:]]):
                # An anchor avoids the space that some tokenizers put at the beginning of a text.
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
        # A name with SentencePiece's space mark (U+2581) never decodes to itself, so an inexact encoding is accepted.
        return nearly


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
