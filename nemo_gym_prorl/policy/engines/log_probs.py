# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which distribution an engine's log-probs belong to, and which settings a request may then have.

A trainer needs the log-probs of the distribution that a token was sampled from. Engines differ in which sampling
settings their log-probs include, so the service probes each engine (:func:`judge`) and refuses settings that the
engine's log-probs leave out (:func:`check`). The check uses an allow list: an unknown setting counts as one that
changes the distribution. Pure: no task, socket, clock or thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

from nemo_gym_prorl.policy.engines.sampling import NEUTRAL, Sampling


class LogProbMode(StrEnum):
    """The distribution that an engine's log-probs belong to."""

    PROCESSED = "processed"
    """The sampled distribution, with all settings."""
    SCALED = "scaled"
    """The distribution after temperature, bias, penalties and grammar, before truncation."""
    RAW = "raw"
    """The model's own distribution; only a grammar is included."""
    UNKNOWN = "unknown"
    """The probe got no verdict."""


_SAME, _DIFFERENT = 0.05, 0.1
"""Log-probs closer than the first are equal up to the rounding of bfloat16; those further apart than the second are
not. Between the two the probe has no verdict."""

_PEAKED = -0.3
"""A most probable token above this log-prob leaves too little for a temperature to change."""

_MIN_TOP = -13.0
"""The most probable token of 400,000 has at least this log-prob, so a lower one is a logit."""

HARMLESS = frozenset(
    {
        *("stop", "stop_token_ids", "stop_regex", "ignore_eos", "include_stop_str_in_output", "no_stop_trim"),
        *("seed", "sampling_seed", "user", "metadata", "priority", "request_id", "session_id", "cache_salt", "rid"),
        *("spaces_between_special_tokens", "add_special_tokens", "repetition_detection", "prompt_logprobs"),
        # These change the prompt, whose ids come back.
        *("chat_template", "documents", "add_generation_prompt", "continue_final_message", "include_reasoning"),
        *("mm_processor_kwargs", "media_io_kwargs"),
    }
)
"""Settings that do not change the distribution of the next token."""

GRAMMARS = frozenset(
    {
        *("response_format", "structured_outputs", "structural_tag", "json_schema", "regex", "ebnf"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    }
)
"""Settings that mask logits. vLLM and SGLang mask before they compute log-probs, in every mode."""

_SCALING = frozenset(
    {
        *("temperature", "logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("min_tokens", "min_new_tokens"),
    }
)

_ALLOWED: Mapping[LogProbMode, frozenset[str]] = {
    LogProbMode.SCALED: HARMLESS | GRAMMARS | _SCALING,
    LogProbMode.RAW: HARMLESS | GRAMMARS,
    LogProbMode.UNKNOWN: HARMLESS,
}
"""Settings that may differ from neutral; ``PROCESSED`` allows all."""

_NEUTRAL: Mapping[str, Sequence[object]] = {name: (value,) for name, value in NEUTRAL.items()} | {
    "top_k": (-1, 0),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "thinking_token_budget": (-1,),
    "response_format": ({"type": "text"},),
    "length_penalty": (1.0,),
}

_OWN_FIELDS = frozenset(
    {
        *("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "logit_bias", "response_format"),
        "thinking_token_budget",
    }
)
"""Settings that are fields of a request; all others come in its ``extra_body``."""

_REASONS: Mapping[LogProbMode, str] = {
    LogProbMode.RAW: "the engine returns log-probs before sampling settings",
    LogProbMode.SCALED: "the engine returns log-probs that do not include this setting",
    LogProbMode.UNKNOWN: "the service cannot find out which settings the engine's log-probs include",
}


def changes(sampling: Sampling) -> list[str]:
    """Return the settings of a request that change the distribution, or may change it."""
    if sampling.greedy:
        return []
    return [name for name, value in sampling.settings.items() if name not in HARMLESS and not _neutral(name, value)]


def grammar_of(sampling: Sampling) -> str | None:
    """Return the name of the setting by which a request asks for a grammar, if it does."""
    settings = sampling.settings
    return next((name for name in settings if name in GRAMMARS and not _neutral(name, settings[name])), None)


def check(sampling: Sampling, mode: LogProbMode, *, forced_call: bool, fix: str) -> tuple[str, str] | None:
    """Return field and reason of the first setting that the engine's log-probs do not include; ``None`` if all are.

    Args:
        sampling: the settings of the request.
        mode: which distribution the engine's log-probs belong to.
        forced_call: whether ``tool_choice`` forces a call, which engines do by a grammar.
        fix: what to change at the engine.
    """
    if mode is LogProbMode.PROCESSED:
        return None
    false = [field_of(name) for name in changes(sampling) if name not in _ALLOWED[mode]]
    if forced_call and mode is LogProbMode.UNKNOWN and not sampling.greedy:
        false.append("tool_choice")
    return (false[0], f"{_REASONS[mode]}, so the log-probs would be false; leave it out, or {fix}") if false else None


def field_of(setting: str) -> str:
    """Return the name of a setting in a request."""
    return setting if setting in _OWN_FIELDS else f"extra_body.{setting}"


def _neutral(name: str, value: object) -> bool:
    return value is None or value is False or value in ([], {}) or value in _NEUTRAL.get(name, ())


def are_logits(log_probs: Sequence[float], top: Sequence[float]) -> bool:
    """Return whether these numbers cannot be logarithms of probabilities.

    Args:
        log_probs: of the sampled token.
        top: of the most probable tokens of one position.
    """
    if any(not isinstance(one, int | float) or math.isnan(one) for one in (*log_probs, *top)):
        raise ValueError("a log-prob that is no number")
    positive = max((*log_probs, *top), default=0.0) > 1e-3
    return positive or sum(map(math.exp, top)) > 1.0 + 1e-3 or max(top, default=0.0) < _MIN_TOP


def judge(plain: float, cold: float, only: float) -> LogProbMode | None:
    """Return the mode that explains three log-probs of one prompt's most probable token.

    Args:
        plain: under neutral settings.
        cold: at a temperature far below 1.
        only: under ``top_k`` 1.

    Returns:
        ``None`` where the prompt's distribution does not tell modes apart.
    """
    if plain > _PEAKED or _SAME < abs(cold - plain) < _DIFFERENT:
        return None
    if abs(cold - plain) <= _SAME:
        # A tie looks the same at every temperature, but only a processed log-prob is 0 then.
        return LogProbMode.RAW if abs(only - plain) <= _SAME else None
    if only >= -_SAME:
        return LogProbMode.PROCESSED
    return LogProbMode.SCALED if only <= -_DIFFERENT else None


def judge_biased(log_probs: Sequence[float], biased: LogProbMode) -> LogProbMode:
    """Return the mode that explains the log-probs of two tokens, each forced by a bias in a request of its own.

    Args:
        log_probs: of both; two tokens cannot both have probability 1 without the bias.
        biased: the mode of an engine whose log-probs include a bias.
    """
    if min(log_probs) >= -_SAME:
        return biased
    return LogProbMode.RAW if min(log_probs) <= -_DIFFERENT else LogProbMode.UNKNOWN
