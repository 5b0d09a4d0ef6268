# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The distribution that an engine's log-probs belong to, and the settings that a request may have.

A trainer needs the log-probs of the distribution that a token was sampled from. Engines differ in which sampling
settings their log-probs include, and publish neither these settings nor whether they follow grammars. The service
therefore probes each engine (:class:`EngineProbe`) with stateless requests of a few tokens. The service refuses
settings that the engine's log-probs do not include (:func:`unsupported_setting`). The check uses an allow list, so an
unknown setting counts as one that changes the distribution.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import orjson

from nemo_gym_prorl.policy.engines.engine import (
    NEUTRAL_SETTINGS,
    BackendErred,
    ContextFull,
    LogitsReturned,
    RequestRefused,
    SampleRequest,
    Sampling,
)
from nemo_gym_prorl.policy.generation import Generation


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
"""Thresholds for the difference of two log-probs. Up to ``_SAME`` the log-probs are equal up to the rounding of
bfloat16, from ``_DIFFERENT`` on they differ, and in between the probe has no verdict.
"""

_PEAKED = -0.3
"""Log-prob of the most probable token above which a temperature changes too little to measure."""

_MIN_TOP = -13.0
"""Lowest possible log-prob of the most probable of 400,000 tokens; a lower value is a logit."""

DISTRIBUTION_NEUTRAL = frozenset(
    {
        *("stop", "stop_token_ids", "stop_regex", "ignore_eos", "include_stop_str_in_output", "no_stop_trim"),
        *("seed", "sampling_seed", "user", "metadata", "priority", "request_id", "session_id", "cache_salt", "rid"),
        *("spaces_between_special_tokens", "add_special_tokens", "repetition_detection", "prompt_logprobs"),
        # options that change only the prompt, whose ids the engine returns
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
    LogProbMode.SCALED: DISTRIBUTION_NEUTRAL | GRAMMARS | _SCALING,
    LogProbMode.RAW: DISTRIBUTION_NEUTRAL | GRAMMARS,
    LogProbMode.UNKNOWN: DISTRIBUTION_NEUTRAL,
}
"""Settings that may differ from their neutral values, by mode; ``PROCESSED`` allows all."""

_NEUTRAL_VALUES: Mapping[str, Sequence[object]] = {name: (value,) for name, value in NEUTRAL_SETTINGS.items()} | {
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
"""Settings that are fields of a request; all others are in its ``extra_body``."""

_REASONS: Mapping[LogProbMode, str] = {
    LogProbMode.RAW: "the engine returns log-probs before sampling settings",
    LogProbMode.SCALED: "the engine returns log-probs that do not include this setting",
    LogProbMode.UNKNOWN: "the service cannot find out which settings the engine's log-probs include",
}


def changed_settings(sampling: Sampling) -> list[str]:
    """Return the settings of a request that change the distribution, or may change it."""
    if sampling.greedy:
        return []
    return [
        name
        for name, value in sampling.settings.items()
        if name not in DISTRIBUTION_NEUTRAL and not _is_neutral(name, value)
    ]


def grammar_of(sampling: Sampling) -> str | None:
    """Return the setting that asks for a grammar, if there is one."""
    settings = sampling.settings
    return next((name for name in settings if name in GRAMMARS and not _is_neutral(name, settings[name])), None)


def unsupported_setting(
    sampling: Sampling, mode: LogProbMode, *, forced_call: bool, fix: str
) -> tuple[str, str] | None:
    """Return field and reason of the first setting that the engine's log-probs do not include, if any.

    With ``forced_call``, ``tool_choice`` forces a call, which engines implement by a grammar.
    """
    if mode is LogProbMode.PROCESSED:
        return None
    false = [field_of(name) for name in changed_settings(sampling) if name not in _ALLOWED[mode]]
    if forced_call and mode is LogProbMode.UNKNOWN and not sampling.greedy:
        false.append("tool_choice")
    return (false[0], f"{_REASONS[mode]}, so the log-probs would be false; leave it out, or {fix}") if false else None


def field_of(setting: str) -> str:
    """Return the path of a setting in a request: its name, possibly below ``extra_body``."""
    return setting if setting in _OWN_FIELDS else f"extra_body.{setting}"


def _is_neutral(name: str, value: object) -> bool:
    return value is None or value is False or value in ([], {}) or value in _NEUTRAL_VALUES.get(name, ())


def are_logits(log_probs: Sequence[float], top: Sequence[float]) -> bool:
    """Return whether numbers of sampled tokens, or of the ``top`` tokens of one position, must be logits.

    Raises:
        ValueError: a value is not a number.
    """
    if any(not isinstance(one, int | float) or math.isnan(one) for one in (*log_probs, *top)):
        raise ValueError("a log-prob is not a number")
    positive = max((*log_probs, *top), default=0.0) > 1e-3
    return positive or sum(map(math.exp, top)) > 1.0 + 1e-3 or max(top, default=0.0) < _MIN_TOP


def classify_mode(plain: float, cold: float, only: float) -> LogProbMode | None:
    """Return the mode that explains three log-probs of one prompt's most probable token: under neutral settings, at
    a temperature far below 1, and under ``top_k`` 1. ``None`` if the prompt's distribution separates no modes.
    """
    if plain > _PEAKED or _SAME < abs(cold - plain) < _DIFFERENT:
        return None
    if abs(cold - plain) <= _SAME:
        # Tied tokens have equal log-probs at every temperature. Only processed log-probs become 0 under top_k 1.
        return LogProbMode.RAW if abs(only - plain) <= _SAME else None
    if only >= -_SAME:
        return LogProbMode.PROCESSED
    return LogProbMode.SCALED if only <= -_DIFFERENT else None


def classify_biased_mode(log_probs: Sequence[float], biased: LogProbMode) -> LogProbMode:
    """Return the mode that explains the log-probs of two tokens, each forced by a bias in a request of its own.

    Both cannot have probability 1 without the bias. ``biased`` is the mode of log-probs that include the bias.
    """
    if min(log_probs) >= -_SAME:
        return biased
    return LogProbMode.RAW if min(log_probs) <= -_DIFFERENT else LogProbMode.UNKNOWN


_PROMPTS = (((0,), "hi"), ((1, 2), "Name any word."), ((3, 1, 2), "Say a number."))
"""Prompts of the probe, as ids and as messages. If the distribution after one prompt is peaked, the next is tried."""

_TOP = 5
"""Number of most probable tokens that a probe asks for; the sum of their probabilities exposes logits."""
_COLD = 0.2
"""Temperature far enough below 1 to change the log-prob of the most probable token measurably."""
_BIASED = (10, 11)
"""Token ids that the probe forces by a bias; every vocabulary contains them."""

_CHOICE = "zqxj-"
"""Text that no model writes unless a grammar forces the text."""
_CHOICES = [f"{_CHOICE}1", f"{_CHOICE}2"]
_GRAMMAR_PROBES: Mapping[str, tuple[str, object]] = {
    "structured_outputs": ("structured_outputs", {"choice": _CHOICES}),
    "json_schema": ("json_schema", orjson.dumps({"enum": _CHOICES}).decode()),
    "regex": ("regex", f"{_CHOICE}[12]"),
    "ebnf": ("ebnf", 'root ::= "{}" | "{}"'.format(*_CHOICES)),
    **{f"guided_{kind}": ("guided_choice", _CHOICES) for kind in ("json", "regex", "choice", "grammar")},
}
"""Setting and value that a probe sends, by the setting of the request. Other settings use ``response_format``."""
_CHOICE_FORMAT = {"type": "json_schema", "json_schema": {"name": "probe", "schema": {"enum": _CHOICES}}}


class _NoVerdict(Exception):
    """The engine refuses a probe, or its answer lacks a field that a probe needs."""


@dataclass(frozen=True, slots=True)
class EngineProbe:
    """Probes of one engine, to which ``ask`` sends requests. Other fields are those of :class:`.HttpEngine`."""

    url: str
    ask: Callable[[SampleRequest], Awaitable[Generation]]
    takes_tokens: bool
    biased_mode: LogProbMode
    fixed_sampling: bool
    fix: str

    async def mode(self, sampling: Sampling) -> tuple[LogProbMode, bool]:
        """Return the distribution of the engine's log-probs, and whether the verdict may be cached.

        The probe may use temperature and ``top_p`` of ``sampling``, which a request has.

        Raises:
            LogitsReturned: the engine returns logits.
            BackendFailed: the engine cannot sample.
        """
        for prompt in () if self.fixed_sampling else range(len(_PROMPTS)):
            try:
                verdict = await self._compare(prompt)
            except (_NoVerdict, BackendErred):  # the engine may still accept the settings of ``sampling``
                break
            if verdict is not None:
                return verdict, True
        own = sampling.probe(1)
        try:
            return classify_biased_mode([await self._bias(token, own) for token in _BIASED], self.biased_mode), True
        except _NoVerdict:
            return LogProbMode.UNKNOWN, True
        except BackendErred:
            if changed_settings(sampling):
                raise
            return LogProbMode.UNKNOWN, False

    async def require_grammar(self, name: str, sampling: Sampling) -> None:
        """Refuse a grammar that the engine accepts but does not follow; ``name`` is the setting that asks for it.

        Raises:
            RequestRefused: the engine does not follow the grammar.
            BackendErred: the engine errs even without a grammar.
        """
        setting, choices = _GRAMMAR_PROBES.get(name, ("response_format", _CHOICE_FORMAT))
        probe = sampling.probe(4, **{setting: choices})
        try:
            text = (await self._sample(probe)).text.strip().lstrip('"')
        except _NoVerdict:
            return  # the engine will refuse the real request with a reason
        except BackendErred:
            # vLLM with a reasoning parser fails on some grammars. If it also fails without a grammar, raise its error.
            await self._sample(replace(probe, extra={}))
            text = ""
        if text and (text.startswith(_CHOICE) or _CHOICE.startswith(text)):
            return
        fix = "start vLLM without --reasoning-parser, which engine 'vllm' does not need"
        if self.takes_tokens:  # in chat completions the option would turn the answer into reasoning
            fix += ", or with --structured-outputs-config '{\"enable_in_reasoning\": true}'"
        if name.startswith("guided_"):
            fix = "use structured_outputs"
        raise RequestRefused(f"{self.url} does not follow a grammar of this kind: {fix}", field=field_of(name))

    async def _compare(self, prompt: int) -> LogProbMode | None:
        """Return the verdict of one prompt, from its most probable token's log-probs under three settings."""
        plain = await self._sample(Sampling(1), prompt, _TOP)
        cold = await self._sample(Sampling(1, temperature=_COLD), prompt, 1)
        only = await self._sample(Sampling(1, extra={"top_k": 1}), prompt, 1)
        return classify_mode(max(plain.top), max(cold.top), only.log_probs[0])

    async def _bias(self, token: int, sampling: Sampling) -> float:
        biased = await self._sample(replace(sampling, extra={"logit_bias": {str(token): 100}}))
        if list(biased.ids) != [token]:
            raise _NoVerdict
        return biased.log_probs[0]

    async def _sample(self, sampling: Sampling, prompt: int = 0, top: int = 0) -> Generation:
        ids, text = _PROMPTS[prompt]
        messages = [{"role": "user", "content": text}]
        request = SampleRequest(ids if self.takes_tokens else (), sampling, messages, top=top)
        try:
            generation = await self.ask(request)
            logits = are_logits(generation.log_probs, generation.top)
        except (RequestRefused, ContextFull, AttributeError, LookupError, TypeError, ValueError) as error:
            raise _NoVerdict from error
        if logits:
            raise LogitsReturned(f"{self.url} returns logits in place of log-probs: {self.fix}", field="logprobs_mode")
        if not generation.log_probs or (top and not generation.top):
            raise _NoVerdict
        return generation
