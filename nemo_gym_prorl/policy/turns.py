# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Request and answer of one turn, independent of any HTTP API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_gym_prorl.failures import CallerError, FailureKind
from nemo_gym_prorl.policy.engines.engine import Sampling
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.text.template import Message
from nemo_gym_prorl.policy.text.turn_scanner import Parsed
from nemo_gym_prorl.policy.tokens.ledger import LedgerTurn


class RolloutGone(CallerError):
    """The server does not know the rollout or answer to continue (restart, deletion, ``keep_s``): start it again."""

    default_kind = FailureKind.SESSION_LOST
    http_status = 410
    problem = "rollout-gone"


class RolloutTaken(CallerError):
    """The name of a rollout to restore is in use."""

    http_status = 409
    problem = "rollout-taken"


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn as an agent requests it.

    Attributes:
        rollout: id of the rollout; one agent session.
        group: id that the rollouts of one prompt share; default a digest of the first two messages.
        run: training run whose backends may sample the turn, the same in all turns of a rollout; ``None`` for none.
        messages: the conversation, or with ``after`` only the new messages.
        instructions: system message before the conversation.
        tools: tools in OpenAI's chat format.
        tool_choice: ``None`` to let the policy decide, ``"none"``, ``"required"``, or one function as in chat
            completions.
        parallel: whether a turn may hold several calls; otherwise only its first call is kept, as in vLLM.
        effort: reasoning effort, in OpenAI's terms.
        sampling: sampling parameters.
        after: id of the answer that the messages continue.
        template_variables: further variables for the chat template.
    """

    rollout: str
    messages: Sequence[Message]
    group: str | None = None
    run: str | None = None
    instructions: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel: bool = True
    effort: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    after: str | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PolicyAnswer:
    """A sampled turn as the agent receives it.

    Attributes:
        id: id of this answer, for ``after`` of a later request.
        message: assistant message in OpenAI's chat format.
        parsed: the parsed turn.
        turn: the turn's tokens; ``None`` if the context left no room to sample.
        finish: why sampling ended.
        prompt_tokens: length of the prompt.
        cached_tokens: number of prompt tokens in the engine's prefix cache; 0 if not reported.
    """

    id: str
    message: Message
    parsed: Parsed
    turn: LedgerTurn | None
    finish: Finish
    prompt_tokens: int
    cached_tokens: int = 0
