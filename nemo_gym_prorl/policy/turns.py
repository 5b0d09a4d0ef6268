# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A turn as it is asked for and as it is answered, past any wire format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_gym_prorl.failures import CallerError, FailureKind
from nemo_gym_prorl.policy.engines.engine import Sampling
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.text.parsers import Parsed
from nemo_gym_prorl.policy.text.template import Message
from nemo_gym_prorl.policy.tokens.ledger import Turn


class RolloutGone(CallerError):
    """This process knows no such rollout, or not this answer of it: it was restarted, or has forgotten. The session is
    lost, and a rollout can only begin anew."""

    default_kind = FailureKind.SESSION_LOST
    http_status = 410
    problem = "rollout-gone"


class RolloutTaken(CallerError):
    """A rollout is to be restored under a name that another one has."""

    http_status = 409
    problem = "rollout-taken"


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What an agent asks for.

    Attributes:
        rollout: id of the rollout; one agent session.
        group: id that the rollouts of one prompt share; by default the first two messages say it.
        run: whose backends may sample it; the same in all turns of a rollout.
        messages: the conversation, or with ``after`` only what is new.
        instructions: a system message in front of the conversation.
        tools: tools in OpenAI's chat format.
        tool_choice: ``None`` where the policy decides, ``"none"``, ``"required"``, or one function as chat completions
            name it.
        parallel: whether a turn may hold more than one call; the first is taken otherwise, as vLLM does.
        effort: how much to think, in OpenAI's words.
        sampling: how to sample.
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
    """A sampled turn as the agent gets it.

    Attributes:
        id: names this answer in ``after`` of a later request.
        message: assistant message in OpenAI's chat format.
        parsed: the same, taken apart.
        turn: its tokens; ``None`` if nothing could be sampled for lack of context.
        finish: why sampling ended.
        prompt_tokens: length of the prompt.
        cached_tokens: how many of them the engine had in its prefix cache, as far as it says.
    """

    id: str
    message: Message
    parsed: Parsed
    turn: Turn | None
    finish: Finish
    prompt_tokens: int
    cached_tokens: int = 0


@dataclass(slots=True)
class Counts:
    """What did not go straight in a rollout."""

    rewrites: int = 0
    differences: int = 0
    ambiguous: int = 0
    retokenised: int = 0
    neutralised: int = 0
    unreadable: int = 0
