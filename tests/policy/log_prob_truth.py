# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probs of sampled tokens, computed from a model's logits without an inference engine.

:func:`log_distribution` is double-precision NumPy and holds every rule of sampling. :class:`Model` supplies the
logits: a forward pass by transformers in float32.

Run with ``python -m tests.policy.log_prob_truth MODEL_FOLDER`` where torch, transformers and NumPy are installed.
Standard input has one JSON object a line: ``prompt`` and ``sampled`` (token ids) and ``sampling`` (the fields of the
request to the engine). Standard output has one JSON object for each of them: ``log_probs`` and ``raw`` (the log-probs
without any sampling parameter). A token that cannot be sampled has ``-Infinity``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer


Scores = NDArray[np.float64]

GREEDY_BELOW = 1e-5
"""Temperature below which vLLM takes the most probable token."""
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that vLLM takes from ``generation_config.json`` where a request leaves them out."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokenizer data for the rules of sampling.

    Attributes:
        texts: bytes of each ordinary token; ``None`` for special tokens.
        ends: ids that end a turn, any of which may follow a complete text of a grammar.
        thinking: ids of ``<think>`` and ``</think>``.
        encode: token ids of a text.
    """

    texts: Sequence[bytes | None]
    ends: Collection[int]
    thinking: tuple[int | None, int | None]
    encode: Any

    @classmethod
    def load(cls, folder: Path) -> Vocabulary:
        """Read a byte-level BPE tokenizer."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        added = tokenizer.get_added_tokens_decoder()
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        alphabet = {chr(byte): byte for byte in shown}
        alphabet |= {chr(256 + n): byte for n, byte in enumerate(sorted(set(range(256)) - set(shown)))}
        texts: list[bytes | None] = [None] * tokenizer.get_vocab_size()
        for token, index in tokenizer.get_vocab().items():
            texts[index] = None if index in added else bytes(alphabet[character] for character in token)
        end = tokenizer.token_to_id(json.loads((folder / "tokenizer_config.json").read_text())["eos_token"])
        named = generation_config(folder).get("eos_token_id") or []
        thinking = (tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>"))
        ends = {end, *([named] if isinstance(named, int) else named)}
        return cls(texts, ends, thinking, lambda text: tokenizer.encode(text, add_special_tokens=False).ids)


def generation_config(folder: Path) -> dict[str, Any]:
    """Return the model's own generation settings."""
    path = folder / "generation_config.json"
    settings: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return settings


def choices_of(sampling: Mapping[str, Any]) -> list[bytes] | None:
    """Return the texts that a grammar of alternatives permits; ``None`` without a grammar."""
    if (choices := (sampling.get("structured_outputs") or {}).get("choice")) is not None:
        return [choice.encode() for choice in choices]
    form = sampling.get("response_format") or {"type": "text"}
    if form["type"] == "json_schema":
        return [json.dumps(value).encode() for value in form["json_schema"]["schema"]["enum"]]
    return None


def permitted(sampling: Mapping[str, Any], output: Sequence[int], vocabulary: Vocabulary) -> set[int] | None:
    """Return the ids that a grammar and ``allowed_token_ids`` leave; ``None`` for all."""
    sets: list[set[int]] = []
    if sampling.get("allowed_token_ids") is not None:
        sets.append(set(sampling["allowed_token_ids"]))
    if (choices := choices_of(sampling)) is not None:
        written = b"".join(vocabulary.texts[token] or b"" for token in output)
        sets.append({i for i, text in enumerate(vocabulary.texts) if text and _opens(choices, written + text)})
        if written in choices:
            sets[-1] |= set(vocabulary.ends)
    return set.intersection(*sets) if sets else None


def _opens(choices: Sequence[bytes], text: bytes) -> bool:
    return any(choice.startswith(text) for choice in choices)


def forbidden(sampling: Mapping[str, Any], output: Sequence[int], vocabulary: Vocabulary) -> set[int]:
    """Return the ids that ``min_tokens`` and ``bad_words`` exclude."""
    banned = set(vocabulary.ends) if len(output) < (sampling.get("min_tokens") or 0) else set()
    for word in sampling.get("bad_words") or ():
        plain, spaced = (vocabulary.encode(text) for text in (word.lstrip(), f" {word.lstrip()}"))
        for *before, last in [plain, spaced] if len(plain) == len(spaced) else [plain]:
            if list(output[len(output) - len(before) :]) == before:
                banned.add(last)
    return banned


def is_thinking_over(sampling: Mapping[str, Any], ids: Sequence[int], vocabulary: Vocabulary) -> bool:
    """Return whether the thinking budget is spent, so that the end of the thought is the only next token."""
    budget, (start, end) = sampling.get("thinking_token_budget"), vocabulary.thinking
    if budget is None or start not in ids:
        return False
    thought = ids[len(ids) - 1 - ids[::-1].index(start) + 1 :]
    return end not in thought and len(thought) >= budget


def log_distribution(
    logits: Scores,
    sampling: Mapping[str, Any],
    prompt: Sequence[int],
    output: Sequence[int],
    vocabulary: Vocabulary,
) -> Scores:
    """Return the log-prob of every token as the next one.

    Args:
        logits: of the model, one for each token.
        sampling: fields of the request, completed by the model's generation settings.
        prompt: ids before the turn.
        output: ids of the turn so far.
        vocabulary: of the model.
    """
    scores = np.asarray(logits, dtype=np.float64).copy()
    none = np.full_like(scores, -np.inf)
    if is_thinking_over(sampling, [*prompt, *output], vocabulary):
        none[vocabulary.thinking[1]] = 0.0
        return none
    if (left := permitted(sampling, output, vocabulary)) is not None:
        scores[[i for i in range(len(scores)) if i not in left]] = -np.inf
    scores[list(forbidden(sampling, output, vocabulary))] = -np.inf
    for token, bias in (sampling.get("logit_bias") or {}).items():
        scores[int(token)] += bias
    penalty = sampling.get("repetition_penalty") or 1.0
    for token in {*prompt, *output}:
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(output):
        scores[token] -= (sampling.get("frequency_penalty") or 0.0) * list(output).count(token)
        scores[token] -= sampling.get("presence_penalty") or 0.0
    temperature = 1.0 if sampling.get("temperature") is None else sampling["temperature"]
    if temperature < GREEDY_BELOW:
        none[int(np.argmax(scores))] = 0.0
        return none
    scores /= temperature
    scores[scores < scores.max() + np.log(max(sampling.get("min_p") or 0.0, 1e-300))] = -np.inf
    top_k = sampling.get("top_k") or 0
    if 0 < top_k < len(scores):
        scores[scores < np.sort(scores)[-top_k]] = -np.inf
    top_p = 1.0 if sampling.get("top_p") is None else sampling["top_p"]
    if top_p < 1.0:
        order = np.argsort(-scores, kind="stable")
        probabilities = np.exp(log_softmax(scores))[order]
        scores[order[np.cumsum(probabilities) - probabilities >= top_p]] = -np.inf
    return log_softmax(scores)


def log_softmax(scores: Scores) -> Scores:
    """Normalise scores to log-probs."""
    shifted: Scores = scores - scores.max()
    normalised: Scores = shifted - np.log(np.exp(shifted).sum())
    return normalised


class Model:
    """A causal language model in float32, with the sampling defaults of its folder."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._torch = torch
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._model = model.eval()
        self._vocabulary = Vocabulary.load(folder)
        config = generation_config(folder)
        self._defaults = {name: config[name] for name in DEFAULTS if config.get(name) is not None}

    def log_probs(self, prompt: list[int], sampled: list[int], sampling: Mapping[str, Any]) -> dict[str, list[float]]:
        """Return the log-prob of each sampled token, with and without the sampling parameters."""
        with self._torch.no_grad():
            ids = self._torch.tensor([prompt + sampled])
            logits = self._model(input_ids=ids).logits[0, len(prompt) - 1 : -1].numpy()
        asked = self._defaults | {name: value for name, value in sampling.items() if value is not None}
        found: dict[str, list[float]] = {"log_probs": [], "raw": []}
        for at, token in enumerate(sampled):
            after = log_distribution(logits[at], asked, prompt, sampled[:at], self._vocabulary)
            found["log_probs"].append(float(after[token]))
            found["raw"].append(float(log_softmax(logits[at].astype(np.float64))[token]))
        return found


if __name__ == "__main__":
    played = Model(Path(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(played.log_probs(**json.loads(line))), flush=True)
