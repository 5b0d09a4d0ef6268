# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What every inference engine is to us: one question, what do you sample after these tokens?

Errors tell apart whose fault it is. :class:`BackendFailed`: this backend's, another one may do better; of that kind
are :class:`BackendErred`, an error that a running engine answers, which may turn out to be the request's fault, and
:class:`Misconfigured`, a key, name, tokenizer or protocol that is not the engine's. :class:`RequestRefused`: the
request's, and every backend would refuse it.

An engine holds no state of a rollout. Cancelling the task that awaits a sample closes the connection,
by which the engines here abort the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.policy.engines.sampling import Sampling
from nemo_gym_prorl.policy.text.messages import Message


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
