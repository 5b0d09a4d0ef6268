# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Roles of a rollout's branches, and choice of the branches that are trained on. Pure.

A finished agent program samples more than one conversation. The program compacts its context, asks for a title, starts
sub-agents, or repeats a request whose answer it lost. Each branch of the ledger gets one role, in this order:

1. ``main``: the branch with the last sampled answer. A ``side`` branch is main only if all branches are.
2. ``earlier``: a predecessor of the main branch, or of another earlier branch: parts of a compacted conversation. A
   branch's predecessor is the latest branch with the same system prompt and tools that ended before the branch began.
3. ``retry``: a branch whose last turn was sampled again from the same prompt; the agent dropped this answer.
4. ``side``: a single turn without tools, such as a title or a summary.
5. ``subagent``: any other branch.

Main and earlier branches are trained on. Invariant: each turn has exactly one owner. The main branch owns all its
turns, and every other branch the turns that no previous branch owns, so no sampled token is trained on twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal

from nemo_gym_prorl.policy.text.template import role_and_text
from nemo_gym_prorl.policy.tokens.conversations import ConversationIndex, ConversationNode
from nemo_gym_prorl.policy.tokens.ledger import LedgerTurn


type BranchRole = Literal["main", "earlier", "retry", "side", "subagent"]


@dataclass(frozen=True, slots=True)
class Branch:
    """Path of turns from the first turn of a conversation to a turn without a successor.

    Attributes:
        nodes: the branch's turns, from first to last.
        times: positions of the turns in the rollout's order of sampling.
        role: role of the branch; see the module.
        owned: the turns that this branch owns.
    """

    nodes: tuple[ConversationNode, ...]
    times: tuple[int, ...]
    role: BranchRole = "subagent"
    owned: frozenset[LedgerTurn] = frozenset()

    @property
    def trained(self) -> bool:
        return self.role in ("main", "earlier")

    @property
    def is_side(self) -> bool:
        """Whether the branch is a single turn without tools."""
        return len(self.nodes) == 1 and not self.nodes[0].tools

    @property
    def identity(self) -> tuple[Sequence[str], ...]:
        """Texts of the leading system messages, and names of the tools; equal for branches of the same agent."""
        first = self.nodes[0]
        system = takewhile(lambda message: message["role"] in ("system", "developer"), first.messages)
        texts = tuple(role_and_text(message)[1] for message in system)
        return texts, tuple(str(tool["function"]["name"]) for tool in first.tools)

    def fork_from(self, other: Branch) -> int:
        """Return the number of first turns that both branches share, which is less than the turns of either."""
        return sum(one == two for one, two in zip(self.times, other.times, strict=False))

    def is_retry_of(self, other: Branch) -> bool:
        """Return whether this branch's last turn was sampled again in the other branch, from the same prompt."""
        last = self.fork_from(other)
        return last == len(self.nodes) - 1 and self.nodes[last].turn.observed == other.nodes[last].turn.observed

    def precedes(self, other: Branch) -> bool:
        """Return whether the other branch, of the same agent, began after this branch ended, and is no retry of it."""
        ended_before = self.times[-1] < other.times[self.fork_from(other)]
        return ended_before and self.identity == other.identity and not self.is_retry_of(other)

    def summary(self) -> dict[str, Any]:
        """Return the branch as an entry of a row's list of branches; ``sampled_tokens`` counts only owned turns."""
        return {
            "role": self.role,
            "turns": len(self.nodes),
            "prompt_tokens": self.nodes[0].turn.start,
            "sampled_tokens": sum(len(turn.sampled) for turn in self.owned),
            "trained": self.trained,
            "tools": len(self.nodes[0].tools),
        }


def branches_of(history: ConversationIndex) -> list[Branch]:
    """Return the branches of a rollout: the main branch, earlier branches from the latest on, then all others."""
    time_of = {turn: time for time, turn in enumerate(history.ledger.turns)}
    paths = [leaf.path() for leaf in history.ledger.leaves()]
    rest = [Branch(tuple(map(history.node_of, path)), tuple(time_of[turn] for turn in path)) for path in paths]
    trained: list[Branch] = []
    candidates = [branch for branch in rest if not branch.is_side] or rest
    while candidates:
        trained.append(max(candidates, key=lambda branch: branch.times[-1]))
        rest.remove(trained[-1])
        candidates = [branch for branch in rest if branch.precedes(trained[-1])]
    owned: set[LedgerTurn] = set()
    found = []
    for branch in (*trained, *rest):
        role: BranchRole
        if branch in trained:
            role = "earlier" if owned else "main"
        elif any(branch.is_retry_of(other) for other in trained):
            role = "retry"
        else:
            role = "side" if branch.is_side else "subagent"
        own = frozenset(node.turn for node in branch.nodes) - owned
        owned |= own
        found.append(replace(branch, role=role, owned=own))
    return found


def training_traces(
    rollout: str, branches: Sequence[Branch], call_ids: Mapping[LedgerTurn, str]
) -> dict[str, Any] | None:
    """Return the trained branches as Gym's ``training_traces``, version 1, the oldest first. ``call_ids`` are the ids
    of the turns' model calls.

    ``None`` if only the main branch is trained, or if a turn has routed experts, which version 1 lacks.
    """
    trained = [branch for branch in branches if branch.trained and any(turn.sampled for turn in branch.owned)]
    turns = [node.turn for branch in trained for node in branch.nodes]
    if len(trained) < 2 or any(turn.routed_experts is not None for turn in turns):
        return None
    traces = [_trace(rollout, branch, call_ids) for branch in reversed(trained)]
    return {"schema_version": 1, "rollout_id": rollout, "builder": "prefix_merging", "traces": traces}


def _trace(rollout: str, branch: Branch, call_ids: Mapping[LedgerTurn, str]) -> dict[str, Any]:
    turns = [node.turn for node in branch.nodes]
    log_probs: list[float] = []
    mask: list[int] = []
    for turn in turns:
        owns = turn in branch.owned
        log_probs += [0.0] * len(turn.observed) + (turn.log_probs.tolist() if owns else [0.0] * len(turn.sampled))
        mask += [0] * len(turn.observed) + [int(owns)] * len(turn.sampled)
    sampled = [turn for turn in turns if turn.sampled]
    return {
        "trace_id": f"{rollout}:{call_ids[turns[-1]]}",
        "model_call_ids": [call_ids[turn] for turn in sampled],
        "token_ids": turns[-1].sequence(),
        "generation_logprobs": log_probs,
        "loss_mask": mask,
        "sampled_spans": [
            {"model_call_id": call_ids[turn], "start": turn.start, "end": turn.end}
            for turn in sampled
            if turn in branch.owned
        ],
    }


def token_in_rate(history: ConversationIndex) -> float | None:
    """Return the share of later turns whose prompt continued the ledger's tokens; ``None`` without later turns."""
    continued = [history.continues_tokens(turn) for turn in history.ledger.turns]
    later = [one for one in continued if one is not None]
    return sum(later) / len(later) if later else None
