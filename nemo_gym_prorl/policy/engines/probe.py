# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Probes of an engine: the mode of its log-probs, and whether it follows grammars.

Engines do not publish either. A probe consists of requests of a few tokens, which leave no state at the engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

import orjson

from nemo_gym_prorl.policy.engines.answers import ContextFull
from nemo_gym_prorl.policy.engines.engine import BackendErred, LogitsReturned, RequestRefused, SampleRequest
from nemo_gym_prorl.policy.engines.log_probs import (
    LogProbMode,
    are_logits,
    changes,
    field_of,
    judge,
    judge_biased,
)
from nemo_gym_prorl.policy.engines.sampling import Sampling
from nemo_gym_prorl.policy.generation import Generation


_PROMPTS = (((0,), "hi"), ((1, 2), "Name any word."), ((3, 1, 2), "Say a number."))
"""Prompts of the probe, as ids and as a message. A prompt with one likely continuation does not tell modes apart."""

_TOP = 5
"""How many most probable tokens a probe asks for: their probabilities add up to 1 at most."""
_COLD = 0.2
"""A temperature that makes the most probable token much more probable."""
_BIASED = (10, 11)
"""Token ids that the probe forces by a bias; every vocabulary has them."""

_CHOICE = "zqxj-"
"""What no model writes by itself."""
_CHOICES = [f"{_CHOICE}1", f"{_CHOICE}2"]
_GRAMMAR_PROBES: Mapping[str, tuple[str, object]] = {
    "structured_outputs": ("structured_outputs", {"choice": _CHOICES}),
    "json_schema": ("json_schema", orjson.dumps({"enum": _CHOICES}).decode()),
    "regex": ("regex", f"{_CHOICE}[12]"),
    "ebnf": ("ebnf", 'root ::= "{}" | "{}"'.format(*_CHOICES)),
    **{f"guided_{kind}": ("guided_choice", _CHOICES) for kind in ("json", "regex", "choice", "grammar")},
}
"""By the setting that asks for a grammar: the setting of its probe. Others are probed by ``response_format``."""
_CHOICE_FORMAT = {"type": "json_schema", "json_schema": {"name": "probe", "schema": {"enum": _CHOICES}}}


class _NoVerdict(Exception):
    """The engine refuses a probe, or its answer lacks what a probe needs."""


@dataclass(frozen=True, slots=True)
class EngineProbe:
    """Asks one engine about itself.

    Args:
        url: of the engine, for messages.
        ask: sends a request; raises what engines raise.
        takes_tokens: whether prompts are ids.
        biased_mode: the mode of an engine of which is known only that its log-probs include a bias.
        fixed_sampling: the engine refuses other settings than its own, which the first request has.
        fix: what makes the engine's log-probs include all settings.
    """

    url: str
    ask: Callable[[SampleRequest], Awaitable[Generation]]
    takes_tokens: bool
    biased_mode: LogProbMode
    fixed_sampling: bool
    fix: str

    async def mode(self, sampling: Sampling) -> tuple[LogProbMode, bool]:
        """Return which distribution the engine's log-probs belong to, and whether that is a verdict to remember.

        Args:
            sampling: of a request; the engine takes its temperature and ``top_p``.

        Raises:
            LogitsReturned: they are logits.
            BackendFailed: the engine cannot sample.
        """
        for prompt in () if self.fixed_sampling else range(len(_PROMPTS)):
            try:
                verdict = await self._compare(prompt)
            except (_NoVerdict, BackendErred):  # it may refuse these settings, and take a request's own
                break
            if verdict is not None:
                return verdict, True
        own = sampling.probe(1)
        try:
            return judge_biased([await self._bias(token, own) for token in _BIASED], self.biased_mode), True
        except _NoVerdict:
            return LogProbMode.UNKNOWN, True
        except BackendErred:
            if changes(sampling):
                raise
            return LogProbMode.UNKNOWN, False

    async def require_grammar(self, name: str, sampling: Sampling) -> None:
        """Refuse a grammar that the engine takes and does not follow.

        Args:
            name: the setting that asks for the grammar.
            sampling: of the request.

        Raises:
            RequestRefused: names the setting.
        """
        setting, choices = _GRAMMAR_PROBES.get(name, ("response_format", _CHOICE_FORMAT))
        probe = sampling.probe(4, **{setting: choices})
        try:
            text = (await self._sample(probe)).text.strip().lstrip('"')
        except _NoVerdict:
            return  # the engine says by itself what is wrong with the request
        except BackendErred:
            # vLLM with a reasoning parser ends some of these requests with an error.
            await self._sample(replace(probe, extra={}))
            text = ""
        if text and (text.startswith(_CHOICE) or _CHOICE.startswith(text)):
            return
        fix = "start vLLM without --reasoning-parser, which engine 'vllm' does not need"
        if self.takes_tokens:  # else the answer would be the thought
            fix += ", or with --structured-outputs-config '{\"enable_in_reasoning\": true}'"
        if name.startswith("guided_"):
            fix = "use structured_outputs"
        raise RequestRefused(f"{self.url} does not follow a grammar of this kind: {fix}", field=field_of(name))

    async def _compare(self, prompt: int) -> LogProbMode | None:
        """The verdict of one prompt, if it has one: its most probable token under three settings."""
        plain = await self._sample(Sampling(1), prompt, _TOP)
        cold = await self._sample(Sampling(1, temperature=_COLD), prompt, 1)
        only = await self._sample(Sampling(1, extra={"top_k": 1}), prompt, 1)
        return judge(max(plain.top), max(cold.top), only.log_probs[0])

    async def _bias(self, token: int, sampling: Sampling) -> float:
        """The log-prob of a token that a bias forces."""
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
