# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What an inference engine is to us: an address, how it is to sample, and whose fault its errors are.

:class:`BackendFailed` is the fault of this backend, another one may do better. Of that kind are :class:`BackendErred`,
an error that a running engine answers, which may turn out to be the request's fault, and :class:`Misconfigured`, a
key, name, tokenizer or protocol that is not the engine's. :class:`RequestRefused` is the request's fault, and every
backend would refuse it.

Every request names all sampling parameters. An engine fills a missing one from the model's ``generation_config.json``,
and then samples from another distribution than the request says.

An engine holds no state of a rollout. Cancelling the task that awaits a sample closes the connection, by which the
engines abort the request.
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
    """A backend's URL, put together from its parts, so that nobody reads another host in it.

    Raises:
        CallerError: it is none.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise CallerError(f"{url!r} is no URL: {error}", field=field) from error
    host = parts.hostname or ""
    plain = url.isascii() and url.isprintable() and not set(url) & set(" \\@?#")
    if parts.scheme not in ("http", "https") or not host or not plain:
        raise CallerError(f"{url!r} must be http(s)://host[:port][/path], and no more", field=field)
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}{f':{port}' if port else ''}{parts.path}"


def root_of(url: str) -> str:
    """The URL of a server, whose routes begin with ``/v1`` or not."""
    return url.rstrip("/").removesuffix("/v1")


def origin_of(url: str) -> str:
    """Scheme, host and port of a URL: what a key belongs to."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{parts.hostname}:{port}"


_OURS = frozenset(
    {
        *("model", "prompt", "messages", "input_ids", "text", "tools", "tool_choice", "stream", "echo", "n"),
        *("max_tokens", "max_completion_tokens", "max_new_tokens", "truncate_prompt_tokens", "prompt_embeds"),
        *("logprobs", "top_logprobs", "return_logprob", "return_token_ids", "return_tokens_as_token_ids"),
        *("skip_special_tokens", "detokenize", "required_prefix_token_ids", "use_beam_search"),
        *("suffix", "best_of"),
    }
)
"""Fields of a request that make an exact trajectory; a request for something else would not be noticed."""

NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Parameters that leave the model's distribution as it is, in the names of vLLM and SGLang."""

_GREEDY = 1e-5
"""vLLM takes the most probable token at temperatures below this."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample, in the names that OpenAI-style engines share. ``None`` is neutral.

    ``extra`` goes into the request as it is, for what only some engines know; what has a name here comes before it.

    Raises:
        CallerError: it asks for nothing, or for something else than one continuation of the prompt with its tokens.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            # Not to be taken for a context that has no room left, which is a rollout's end and scored.
            raise CallerError("must be at least 1", field="max_output_tokens")
        for name, value in self.settings.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise CallerError("is no number that JSON can carry", field=name)
        if taken := sorted(_OURS & self.extra.keys()):
            raise CallerError(
                f"must not set {', '.join(taken)}: what is sampled, and that tokens come back, is not a row's to say",
                field="extra_body",
            )

    @property
    def settings(self) -> dict[str, Any]:
        """All settings but ``max_tokens``, with neutral values for those that are not given."""
        named = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop": list(self.stop) or None,
            "seed": self.seed,
        }
        given = {name: value for name, value in self.extra.items() if value is not None}
        return {**NEUTRAL, **given, **{name: value for name, value in named.items() if value is not None}}

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, which then has probability 1."""
        temperature = self.settings["temperature"]
        return isinstance(temperature, int | float) and 0.0 <= temperature < _GREEDY

    def probe(self, max_tokens: int, **extra: object) -> Sampling:
        """Return short sampling with the same temperature and ``top_p``, which some engines prescribe."""
        settings = self.settings
        return Sampling(max_tokens, settings["temperature"], settings["top_p"], extra=extra)

    def as_openai(self) -> dict[str, Any]:
        """Return the fields of a request for an OpenAI-style engine."""
        # Engines differ in where greedy sampling begins, so each gets an exact 0.
        greedy = {"temperature": 0.0} if self.greedy else {}
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return self.settings | greedy | limit


class BackendFailed(InfrastructureError):
    """The backend is gone, broken or overloaded; the same request may succeed on another one."""


class BackendErred(BackendFailed):
    """The engine is there and answered 500: its own defect, or a request that it chokes on."""


class Misconfigured(BackendFailed):
    """Key, model name, tokenizer or protocol is not the engine's. No row is to blame, and it stays until it is mended.

    Args:
        reason: what does not fit.
        field: the setting to look at.
    """

    def __init__(self, reason: str, *, field: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field


class LogitsReturned(Misconfigured):
    """The engine returns logits in place of log-probs."""


class RequestRefused(CallerError):
    """The engine refused the request as such; every backend would."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a backend says about itself.

    Attributes:
        waiting: requests that it has queued.
        kv_use: share of its KV cache in use, 0 to 1.
        capacity: tokens that fit into its KV cache, if it says so.
    """

    waiting: int
    kv_use: float
    capacity: int | None = None


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What an engine is asked for.

    Attributes:
        prompt: ids after which it samples; where it renders the prompt itself, those with which that must begin.
        sampling: how.
        messages: what the prompt says; this and what follows is for engines that render it themselves.
        tools: that are offered.
        template_variables: further ones.
        tool_choice: as :class:`~nemo_gym_prorl.policy.turns.TurnRequest` has it.
        effort: likewise.
        top: how many of the most probable tokens' log-probs to return.
    """

    prompt: Sequence[int]
    sampling: Sampling
    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    tool_choice: str | Mapping[str, Any] | None = None
    effort: str | None = None
    top: int = 0
