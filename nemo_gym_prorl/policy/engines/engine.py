# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Engine addresses, sampling parameters, and the classification of engine errors.

- :class:`BackendFailed`: this backend failed, and another backend may succeed.
- :class:`BackendErred`: a running engine answered an error, which the request may have caused.
- :class:`Misconfigured`: a key, name, tokenizer or protocol does not match the engine.
- :class:`RequestRefused`: the request is invalid, and every backend would refuse it.

Every request names all sampling parameters. Otherwise an engine fills missing parameters from the model's
``generation_config.json``, and samples from another distribution than the request says.

Engines hold no state of a rollout. Cancelling the task that awaits a sample closes the connection, on which engines
abort the request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.policy.text.template import Message


def checked_url(url: str, field: str = "url") -> str:
    """Return a backend's URL rebuilt from its parts, so that every parser reads the same host.

    Raises:
        CallerError: the URL is invalid.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise CallerError(f"{url!r} is not a URL: {error}", field=field) from error
    host = parts.hostname or ""
    plain = url.isascii() and url.isprintable() and not set(url) & set(" \\@?#")
    if parts.scheme not in ("http", "https") or not host or not plain:
        raise CallerError(
            f"{url!r} must be http(s)://host[:port][/path], without user, query or fragment", field=field
        )
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}{f':{port}' if port else ''}{parts.path}"


def root_of(url: str) -> str:
    """Return a server's URL without ``/v1``."""
    return url.rstrip("/").removesuffix("/v1")


def origin_of(url: str) -> str:
    """Return scheme, host and port of a URL, the scope of a key."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{parts.hostname}:{port}"


_RESERVED_FIELDS = frozenset(
    {
        *("model", "prompt", "messages", "input_ids", "text", "tools", "tool_choice", "stream", "echo", "n"),
        *("max_tokens", "max_completion_tokens", "max_new_tokens", "truncate_prompt_tokens", "prompt_embeds"),
        *("logprobs", "top_logprobs", "return_logprob", "return_token_ids", "return_tokens_as_token_ids"),
        *("skip_special_tokens", "detokenize", "required_prefix_token_ids", "use_beam_search"),
        *("suffix", "best_of"),
    }
)
"""Request fields that the service sets itself to get an exact trajectory."""

NEUTRAL_SETTINGS: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Parameters that leave the model's distribution unchanged, under the names of vLLM and SGLang."""

_MAX_VALUES = {"temperature": math.inf, "top_p": 1.0}
"""Largest valid values. If only engines refused larger values, a program's rollout without answers would be scored."""

_GREEDY_BELOW = 1e-5
"""Temperature below which vLLM takes the most probable token."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters under the names that OpenAI-style engines share. ``None`` is neutral.

    Attributes:
        extra: further fields of the request, for parameters of single engines; the named parameters override these.
        settings: all parameters except ``max_tokens``, with neutral values for missing parameters.

    Raises:
        CallerError: a parameter is invalid, or ``extra`` has a field that the service sets itself.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        named = {"temperature": self.temperature, "top_p": self.top_p, "stop": list(self.stop) or None}
        every = (*self.extra.items(), *named.items(), ("seed", self.seed))
        given = {name: value for name, value in every if value is not None}
        object.__setattr__(self, "settings", {**NEUTRAL_SETTINGS, **given})
        if self.max_tokens is not None and not (isinstance(self.max_tokens, int) and self.max_tokens >= 1):
            # Engines would answer as if the context were full, which ends a rollout and is scored.
            raise CallerError("must be a whole number of at least 1", field="max_output_tokens")
        for name, value in self.settings.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise CallerError("must be a finite number", field=name)
        for name, most in _MAX_VALUES.items():
            if not (isinstance(value := self.settings[name], int | float) and 0 <= value <= most):
                raise CallerError(f"must be a number from 0 to {most:g}", field=name)
        if taken := sorted(_RESERVED_FIELDS & self.extra.keys()):
            raise CallerError(
                f"must not set {', '.join(taken)}: the service sets these fields itself; leave them out",
                field="extra_body",
            )

    def overridden(self, by: Sampling) -> Sampling:
        """Return these parameters, overridden by those that ``by`` sets, except ``stop`` and ``seed``, which stay.
        The smaller ``max_tokens`` counts.
        """
        limits = [limit for limit in (self.max_tokens, by.max_tokens) if limit is not None]
        return Sampling(
            max_tokens=min(limits, default=None),
            temperature=self.temperature if by.temperature is None else by.temperature,
            top_p=self.top_p if by.top_p is None else by.top_p,
            stop=self.stop,
            seed=self.seed,
            extra={**self.extra, **by.extra},
        )

    @property
    def greedy(self) -> bool:
        """Return whether sampling takes the most probable token, which then has probability 1."""
        temperature = self.settings["temperature"]
        return isinstance(temperature, int | float) and 0.0 <= temperature < _GREEDY_BELOW

    def probe(self, max_tokens: int, **extra: object) -> Sampling:
        """Return parameters of a short sample with this temperature and ``top_p``, which some engines prescribe."""
        settings = self.settings
        return Sampling(max_tokens, settings["temperature"], settings["top_p"], extra=extra)

    def as_openai(self, max_tokens: int | None) -> dict[str, Any]:
        """Return the fields of a request to an OpenAI-style engine; ``None`` sets no limit of sampled tokens."""
        # Engines differ in the threshold of greedy sampling, so every engine gets an exact 0.
        greedy = {"temperature": 0.0} if self.greedy else {}
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        return {**self.settings, **greedy, **limit}


class BackendFailed(InfrastructureError):
    """The backend is unreachable, broken or overloaded; the same request may succeed on another backend."""


class BackendErred(BackendFailed):
    """The engine answered 500, reported an error or computed NaN: its own defect, or a request it cannot process."""


class Misconfigured(BackendFailed):
    """Key, model name, tokenizer or protocol does not match the engine. The error persists until the setting changes.

    Args:
        reason: description of the mismatch.
        field: name of the setting to check.
    """

    def __init__(self, reason: str, *, field: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field


class LogitsReturned(Misconfigured):
    """The engine returns logits in place of log-probs."""


class RequestRefused(CallerError):
    """The engine refused the request, as every backend would."""


class ContextFull(Exception):
    """The prompt leaves no room in the engine's context."""


@dataclass(frozen=True, slots=True)
class BackendLoad:
    """Load that a backend reports.

    Attributes:
        waiting: number of requests in the backend's queue.
        kv_use: share of the KV cache in use, 0 to 1.
        capacity: tokens that fit into the KV cache; ``None`` if not reported.
    """

    waiting: int
    kv_use: float
    capacity: int | None = None


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Request for one sample.

    Attributes:
        prompt: token ids to continue; for an engine that renders prompts, ids with which the prompt should begin.
        sampling: sampling parameters.
        messages: the conversation; this and all following fields are for engines that render prompts.
        tools: the offered tools.
        template_variables: further variables of the chat template.
        tool_choice: as in :class:`~nemo_gym_prorl.policy.turns.TurnRequest`.
        effort: as in :class:`~nemo_gym_prorl.policy.turns.TurnRequest`.
        top: number of most probable tokens whose log-probs are returned for the first position.
    """

    prompt: Sequence[int]
    sampling: Sampling
    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    tool_choice: str | Mapping[str, Any] | None = None
    effort: str | None = None
    top: int = 0
