# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers of the kinds that models have, with the special tokens of given texts."""

from __future__ import annotations

import re

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from nemo_gym_prorl.policy.text.tokenizer import Tokenizer


KINDS = ["bytes", "first", "always", "prepend", "never", "unigram"]
"""Byte-level (GPT, Qwen), and SentencePiece with a space before the first text only (Mistral), before each (older
models), by a normalizer (Llama 2, Phi-3) or never (Gemma); ``unigram`` selects pieces by likelihood instead of merges.
"""
_SPECIAL = re.compile(
    r"<\|[^|<>\s]+\|>|<｜[^｜<>]+｜>|\[/?[A-Z_]{3,}\]|<(?:start|end)_of_turn>|</?s>|<\|[a-z_\"]+>|<[a-z_]+\|>"
)
_LETTERS = sorted(set(map(chr, range(33, 127))) | set("üéñ日本語"))
_MERGED = ["re", "su", "lt", "resu", "result", "qu", "que"]
"""Pieces of several letters, each merged from the two pieces before it or from letters."""


def tokenizer_of(kind: str, *texts: str, strips: bool = False) -> Tokenizer:
    """Return a tokenizer with all special tokens found in the texts.

    Args:
        kind: one of :data:`KINDS`.
        texts: templates and tokens.
        strips: whether special tokens drop the white space after them (Phi-3).
    """
    fast = _byte_level() if kind == "bytes" else _sentence_piece(kind)
    found = sorted({name for text in texts for name in _SPECIAL.findall(text)})
    fast.add_special_tokens([AddedToken(name, special=True, normalized=False, rstrip=strips) for name in found])
    return Tokenizer(fast)


def _byte_level() -> FastTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    return fast


def _sentence_piece(kind: str) -> FastTokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *_LETTERS, *_MERGED, "▁re", "▁result"]
    if kind == "unigram":
        scores = [(piece, -20.0 if piece.startswith("<") else -10.0 / len(piece)) for piece in pieces]
        fast = FastTokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    else:
        vocab = {piece: index for index, piece in enumerate(pieces)}
        merges = [("r", "e"), ("s", "u"), ("l", "t"), ("re", "su"), ("resu", "lt"), ("q", "u"), ("qu", "e")]
        merges += [("▁", "re"), ("▁", "result")]
        fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    back: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    spaces = [normalizers.Prepend("▁")] if kind == "prepend" else []
    if kind in ("prepend", "never"):
        fast.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    else:
        scheme = kind if kind == "always" else "first"
        fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    if kind != "never":
        back.append(decoders.Strip(" ", 1, 0))
    fast.decoder = decoders.Sequence(back)
    return fast
