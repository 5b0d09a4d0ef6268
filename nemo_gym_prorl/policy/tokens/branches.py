# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The branches of a rollout by their role, and the ones that are trained.

A finished agent program samples more than one conversation. It compacts its context, asks for a title, starts
sub-agents, or repeats a request whose answer it lost. Each branch of the ledger gets one role, in this order:

1. ``main``: the branch with the last sampled answer. A single turn without tools counts only if there is no other.
2. ``earlier``: a branch with the system prompt and tools of its successor that ended before its successor began. Of
   several the latest counts. The main branch has one predecessor at most, which may have one in turn: these are the
   parts of a compacted conversation.
3. ``retry``: a last turn that was sampled again from the same prompt; the agent dropped this answer.
4. ``side``: one turn without tools, such as a title or a summary.
5. ``subagent``: any other.

Main and earlier branches are trained. Invariant: each turn has exactly one owner. The main branch owns all its turns,
and every other branch the turns that no branch before it owns, so no sampled token is trained on twice.

Trained branches are written as Gym's ``training_traces``, version 1. Pure: no task, socket, clock or thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import Any

from nemo_gym_prorl.policy.text.template import role_and_text
from nemo_gym_prorl.policy.tokens.conversations import ConversationIndex, ConversationNode
from nemo_gym_prorl.policy.tokens.ledger import LedgerTurn


TRACES_VERSION = 1


class BranchRole(StrEnum):
    """Role of a branch; see the module."""

    MAIN = "main"
    EARLIER = "earlier"
    RETRY = "retry"
    SIDE = "side"
    SUBAGENT = "subagent"

    @property
    def trained(self) -> bool:
        """Whether branches of this role are trained."""
        return self in (BranchRole.MAIN, BranchRole.EARLIER)


@dataclass(frozen=True, slots=True)
class Branch:
    """One branch of a rollout.

    Attributes:
        role: role of the branch.
        nodes: the turns from the branch's first one to its last.
        owned: the turns that belong to this branch and to no other.
    """

    role: BranchRole
    nodes: tuple[ConversationNode, ...]
    owned: frozenset[LedgerTurn]

    def summary(self) -> dict[str, Any]:
        """Return the branch as its row shows it; the sampled tokens are those of owned turns."""
        return {
            "role": self.role.value,
            "turns": len(self.nodes),
            "prompt_tokens": self.nodes[0].turn.start,
            "sampled_tokens": sum(len(turn.sampled) for turn in self.owned),
            "trained": self.role.trained,
            "tools": len(self.nodes[0].tools),
        }


@dataclass(frozen=True, slots=True)
class _Chain:
    """A branch without its role; ``times`` are the places of its turns in the order of sampling."""

    nodes: tuple[ConversationNode, ...]
    times: tuple[int, ...]

    @property
    def is_side(self) -> bool:
        return len(self.nodes) == 1 and not self.nodes[0].tools

    @property
    def identity(self) -> tuple[Sequence[str], ...]:
        """Leading system messages, and names of the tools."""
        first = self.nodes[0]
        system = takewhile(lambda message: message["role"] in ("system", "developer"), first.messages)
        texts = tuple(role_and_text(message)[1] for message in system)
        return texts, tuple(str(tool["function"]["name"]) for tool in first.tools)

    def shared_with(self, other: _Chain) -> int:
        """Return the number of first turns that both chains share; no chain is the beginning of another one."""
        return sum(one == two for one, two in zip(self.times, other.times, strict=False))

    def is_retry_of(self, other: _Chain) -> bool:
        """Return whether the last turn was sampled again in the other chain, from the same prompt."""
        last = self.shared_with(other)
        return last == len(self.nodes) - 1 and self.nodes[last].turn.observed == other.nodes[last].turn.observed

    def precedes(self, other: _Chain) -> bool:
        """Return whether the other chain continues this one's conversation after this one ended."""
        return (
            self.identity == other.identity
            and self.times[-1] < other.times[self.shared_with(other)]
            and not self.is_retry_of(other)
        )


def branches_of(history: ConversationIndex) -> list[Branch]:
    """Return the branches of a rollout: the main one first, then earlier ones from the latest, then the others."""
    time_of = {turn: place for place, turn in enumerate(history.ledger.turns)}
    others = [
        _Chain(tuple(map(history.node_of, path)), tuple(time_of[turn] for turn in path))
        for path in (leaf.path() for leaf in history.ledger.leaves())
    ]
    if not others:
        return []
    main = max([chain for chain in others if not chain.is_side] or others, key=lambda chain: chain.times[-1])
    trained, candidates = [main], [main]
    while candidates:
        others.remove(trained[-1])
        candidates = [chain for chain in others if chain.precedes(trained[-1])]
        if candidates:
            trained.append(max(candidates, key=lambda chain: chain.times[-1]))
    owned: set[LedgerTurn] = set()
    found = []
    for chain in (*trained, *others):
        if chain is main:
            role = BranchRole.MAIN
        elif chain in trained:
            role = BranchRole.EARLIER
        elif any(chain.is_retry_of(other) for other in trained):
            role = BranchRole.RETRY
        else:
            role = BranchRole.SIDE if chain.is_side else BranchRole.SUBAGENT
        own = frozenset(node.turn for node in chain.nodes) - owned
        owned |= own
        found.append(Branch(role, chain.nodes, own))
    return found


def training_traces(
    rollout: str, branches: Sequence[Branch], call_ids: Mapping[LedgerTurn, str]
) -> dict[str, Any] | None:
    """Return the trained branches as Gym's ``training_traces``, the oldest first.

    Returns:
        ``None`` if the main branch is the only one that is trained, or if a turn has routed experts, which version 1
        has no field for.
    """
    trained = [branch for branch in branches if branch.role.trained and any(turn.sampled for turn in branch.owned)]
    turns = [node.turn for branch in trained for node in branch.nodes]
    if len(trained) < 2 or any(turn.routed_experts is not None for turn in turns):
        return None
    traces = [_trace(rollout, branch, call_ids) for branch in reversed(trained)]
    return {"schema_version": TRACES_VERSION, "rollout_id": rollout, "builder": "prefix_merging", "traces": traces}


def _trace(rollout: str, branch: Branch, call_ids: Mapping[LedgerTurn, str]) -> dict[str, Any]:
    ids: list[int] = []
    log_probs: list[float] = []
    mask: list[int] = []
    spans, calls = [], []
    for node in branch.nodes:
        turn, owns = node.turn, node.turn in branch.owned
        ids += turn.observed.tolist() + turn.sampled.tolist()
        log_probs += [0.0] * len(turn.observed) + (turn.log_probs.tolist() if owns else [0.0] * len(turn.sampled))
        mask += [0] * len(turn.observed) + [int(owns)] * len(turn.sampled)
        if turn.sampled:
            calls.append(call_ids[turn])
            if owns:
                spans.append({"model_call_id": calls[-1], "start": turn.start, "end": turn.end})
    return {
        "trace_id": f"{rollout}:{calls[-1]}",
        "model_call_ids": calls,
        "token_ids": ids,
        "generation_logprobs": log_probs,
        "loss_mask": mask,
        "sampled_spans": spans,
    }


def token_in_rate(history: ConversationIndex) -> float | None:
    """Return the share of turns whose prompt continued the ledger's tokens, first turns of a conversation aside.

    Returns:
        ``None`` if there are only first turns.
    """
    told = [history.continues_tokens(turn) for turn in history.ledger.turns]
    later = [one for one in told if one is not None]
    return sum(later) / len(later) if later else None
