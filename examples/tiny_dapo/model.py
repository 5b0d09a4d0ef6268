# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The policy: a decoder of 370,000 parameters, for training on whole sequences and for decoding with a cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


CONTEXT = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model."""

    vocabulary: int
    width: int = 96
    heads: int = 4
    layers: int = 3


class KeyValues:
    """Keys and values of several sequences: ``[layers, slots, heads, CONTEXT, width of a head]``, float32."""

    def __init__(self, shape: Shape, slots: int) -> None:
        size = (shape.layers, slots, shape.heads, CONTEXT, shape.width // shape.heads)
        self.keys, self.values = torch.zeros(size), torch.zeros(size)


class Block(nn.Module):
    """Attention with rotary positions, and a feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def queries_keys_values(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each ``[batch, heads, tokens, width of a head]``."""
        batch, tokens, width = x.shape
        shape = (batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm_attention(x)).view(shape).permute(2, 0, 3, 1, 4)
        return _rotated(q, angles), _rotated(k, angles), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """From what each head saw to the block's result."""
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class TinyModel(nn.Module):
    """The decoder; input and output share their embedding."""

    angles: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        half = shape.width // shape.heads // 2
        frequencies = 1.0 / 1000 ** (torch.arange(half) / half)
        self.register_buffer("angles", torch.arange(CONTEXT)[:, None] * frequencies, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``[batch, tokens, vocabulary]`` of what follows each of the ids ``[batch, tokens]`` (int64)."""
        x = self.embedding(ids)
        angles = self.angles[: ids.shape[1]]
        for block in self.blocks:
            q, k, v = block.queries_keys_values(x, angles)
            x = block.finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self._logits(x)

    def read(self, ids: Tensor, cache: KeyValues, slot: int) -> Tensor:
        """Put a prompt ``[tokens]`` into a slot of the cache; logits ``[vocabulary]`` of what follows it."""
        x = self.embedding(ids)[None]
        tokens = len(ids)
        for layer, block in enumerate(self.blocks):
            q, k, v = block.queries_keys_values(x, self.angles[:tokens])
            cache.keys[layer, slot, :, :tokens], cache.values[layer, slot, :, :tokens] = k[0], v[0]
            x = block.finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self._logits(x[0, -1])

    def step(self, ids: Tensor, places: Tensor, cache: KeyValues) -> Tensor:
        """One token more in every slot.

        Args:
            ids: ``[slots]``, int64.
            places: where each stands in its sequence, ``[slots]``, int64.
            cache: of all slots.

        Returns:
            Logits ``[slots, vocabulary]``.
        """
        x = self.embedding(ids)[:, None]
        slots = torch.arange(len(ids))
        length = int(places.max()) + 1
        seen = (torch.arange(length) <= places[:, None])[:, None, None]
        for layer, block in enumerate(self.blocks):
            q, k, v = block.queries_keys_values(x, self.angles[places][:, None, None])
            keys, values = cache.keys[layer], cache.values[layer]
            keys[slots, :, places], values[slots, :, places] = k[:, :, 0], v[:, :, 0]
            attended = F.scaled_dot_product_attention(q, keys[:, :, :length], values[:, :, :length], attn_mask=seen)
            x = block.finish(x, attended)
        return self._logits(x[:, 0])

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.embedding.weight)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions; ``angles`` ends in ``[tokens, half the width of a head]``."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def log_probs_of(model: TinyModel, ids: Tensor) -> Tensor:
    """Log-probabilities ``[batch, tokens - 1]`` of each token after those before it."""
    logits = model(ids[:, :-1])
    return -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
