# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which sampled turn does a conversation continue, when all that is there of it is what an agent sends back?

What an agent sends is a weak echo of what was sampled. It drops thoughts, trims white space and writes JSON anew.
Converters on the way merge neighbouring assistant messages, or drop those in which there is nothing to see. None of
that makes it another conversation. So a conversation is known by what is *visible* of it: the messages of others, and
between two of them all that the policy said and called, however many turns that took.

Visible text alone is not enough, since two different turns may look the same. What tells them apart, strongest first:

1. token ids that the agent carries along (as Gym's agents do): only the turn with exactly these ids is continued;
2. ids of tool calls, and thoughts, where the agent kept them;
3. the latest of those that remain; :attr:`Match.ambiguous` says that it was a choice.

Invariant: what is taken for known is the visible history of a turn in the ledger, from the first message on. Where an
agent edits its past, all that follows the edit is new, so the turns after it start a branch of their own.

A rollout's turns can be saved as JSON (:class:`SavedTurn`), each as what it adds to the turn before, so that another
model server, or another rollout, goes on from them without tokenising what was sampled. Pure: no task, socket, clock
or thread.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.generation import Finish, Generation
from nemo_gym_prorl.policy.text.template import THOUGHT, Message, Tools, arguments_of, text_of
from nemo_gym_prorl.policy.text.turn_boundary import RenderedPrompt
from nemo_gym_prorl.policy.tokens.ledger import TokenLedger, TokenMismatch, Turn, packed_ids


_TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")

CARRIED = "nemo_gym_prorl.turn"
"""In the place of the token fields, a turn of this very rollout that was known by them already."""


@dataclass(frozen=True, slots=True)
class ConversationFingerprint:
    """What can be seen of a conversation: all up to the last message of others, and what the policy said since."""

    before: bytes = b""
    said: str = ""
    calls: tuple[str, ...] = ()

    def then(self, message: Message) -> ConversationFingerprint:
        """With one message more."""
        if message["role"] == "assistant":
            return self.saying(ConversationFingerprint.of(message))
        return ConversationFingerprint(digest(self.key, [message["role"], text_of(message.get("content")).strip()]))

    @classmethod
    def of(cls, message: Message) -> ConversationFingerprint:
        """What can be seen of an assistant message alone."""
        return cls(said=_squeezed(THOUGHT.sub("", text_of(message.get("content")))), calls=_calls(message))

    def saying(self, own: ConversationFingerprint) -> ConversationFingerprint:
        """With an assistant message more, of which that can be seen."""
        return ConversationFingerprint(self.before, self.said + own.said, self.calls + own.calls)

    @property
    def key(self) -> bytes:
        """Equal for conversations that look the same."""
        return digest(self.before, [self.said, self.calls])


_BEGINNING = ConversationFingerprint()


@dataclass(frozen=True, slots=True, eq=False)
class ConversationNode:
    """A place from which a rollout can go on: a sampled turn and the conversation up to it.

    Attributes:
        turn: its tokens.
        messages: the conversation, as its turns were sampled, with the turn's own message.
        visible: the same as an agent sees it.
        tools: what the turn was offered.
        marks: what tells the turn from others that look alike: ids of its calls, its thoughts.
        written: its prompt as the template wrote it, if that was done here.
    """

    turn: Turn
    messages: tuple[Message, ...]
    visible: ConversationFingerprint
    tools: Tools
    marks: tuple[str, ...]
    written: RenderedPrompt | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """Where a conversation goes on.

    Attributes:
        point: the turn that it continues; ``None`` if it continues none.
        new: the messages after that.
        ambiguous: other turns with other tokens would have fitted as well, or the turn is not among the messages, as
            nothing is to be seen in it.
    """

    point: ConversationNode | None
    new: tuple[Message, ...]
    ambiguous: bool = False

    @property
    def foreign(self) -> tuple[Message, ...]:
        """Assistant messages among the new ones: an agent's own words, or turns whose past it edited."""
        return tuple(message for message in self.new if message["role"] == "assistant")


@dataclass(slots=True)
class ConversationIndex:
    """The turns of one rollout and what their conversations look like."""

    ledger: TokenLedger = field(default_factory=TokenLedger)
    _points: dict[bytes, list[ConversationNode]] = field(default_factory=dict)
    _of_turn: dict[Turn, ConversationNode] = field(default_factory=dict)
    _said: dict[bytes, int] = field(default_factory=dict)
    _steps: dict[tuple[bytes, int], tuple[ConversationFingerprint, bytes]] = field(default_factory=dict)
    """What the conversation that was sent whole last looks like: by the key before, and a message's hash."""

    def record(
        self,
        before: ConversationNode | None,
        new: Sequence[Message],
        message: Message,
        turn: Turn,
        tools: Tools = (),
        written: RenderedPrompt | None = None,
    ) -> ConversationNode:
        """A turn was sampled after ``before`` and the new messages."""
        visible, own = before.visible if before else _BEGINNING, ConversationFingerprint.of(message)
        for one in new:
            visible = visible.then(one)
        visible = visible.saying(own)
        if before is None:
            return self._add(turn, (*new, message), visible, own, tools, written)
        tools = before.tools if before.tools == tools else tools
        return self._add(turn, (*before.messages, *new, message), visible, own, tools, written)

    def find(self, messages: Sequence[Message], tools: Tools = ()) -> Match:
        """The latest turn that the conversation continues, and what is new after it.

        Raises:
            CallerError: a message has some of the token fields but not all, or they contradict each other.
        """
        for index, key, carried, own in reversed(list(self._places(messages, tools))):
            alike = self._points.get(key, [])
            sent = messages[index]["role"] == "assistant"
            if carried is not None:
                alike = [point for point in alike if _continues(point.turn, carried, by_none=own)]
            if alike:
                chosen, ambiguous = self._choose(alike, messages)
                return Match(chosen, tuple(map(_plain, messages[index + 1 :])), ambiguous or not sent)
        return Match(None, tuple(map(_plain, messages)))

    def retokenised(self, messages: Sequence[Message]) -> int:
        """How many sampled tokens there are in turns that look like the assistant messages among these."""
        own = (message for message in messages if message["role"] == "assistant")
        return sum(self._said.get(ConversationFingerprint.of(message).key, 0) for message in own)

    def _places(self, messages: Sequence[Message], tools: Tools) -> Iterator[tuple[int, bytes, Turn | None, bool]]:
        """The index of each place where a turn may have ended, the key up to it, the last turn up to it that came with
        its tokens, and whether they came with this very message.

        A turn that is not in the ledger was sampled elsewhere, and is taken over as its tokens say.
        """
        visible, key, carried, latest = _BEGINNING, _BEGINNING.key, None, None
        known, self._steps = self._steps, {}
        drops = not any(message["role"] == "assistant" and _nothing_to_see(message) for message in messages)
        for index, message in enumerate(messages):
            visible, key = self._step(known, visible, key, message)
            if message["role"] != "assistant":
                if drops and index + 1 < len(messages) and messages[index + 1]["role"] != "assistant":
                    # A turn in which there is nothing to see may have been here, and was dropped on the way.
                    yield index, key, carried, False
                continue
            if (turn_of_ours := message.get(CARRIED)) is not None:
                carried, latest = turn_of_ours, None
                yield index, key, carried, True
                continue
            fields = _carried(message)
            # Gym's converters repeat the last ids they saw on messages that have none of their own.
            own = fields is not None and fields != latest
            if fields is not None and own:
                latest, (prompt, sampled, log_probs) = fields, fields
                turn = self.ledger.find(prompt, sampled)
                if turn is None:
                    parent, observed = self.ledger.place(prompt, carried)
                    turn = self.ledger.append(parent, observed, Generation(sampled, log_probs, Finish.STOP))
                    self._add(turn, tuple(messages[: index + 1]), visible, ConversationFingerprint.of(message), tools)
                carried = turn
            yield index, key, carried, own

    def _step(
        self,
        known: Mapping[tuple[bytes, int], tuple[ConversationFingerprint, bytes]],
        visible: ConversationFingerprint,
        key: bytes,
        message: Message,
    ) -> tuple[ConversationFingerprint, bytes]:
        """What can be seen with one message more, and its key: worked out once for agents that send all each turn."""
        step = key, hash(orjson.dumps([message.get(name) for name in ("role", "content", "tool_calls")]))
        if (found := known.get(step)) is None:
            then = visible.then(message)
            found = then, then.key
        self._steps[step] = found
        return found

    def _add(
        self,
        turn: Turn,
        messages: tuple[Message, ...],
        visible: ConversationFingerprint,
        own: ConversationFingerprint,
        tools: Tools,
        written: RenderedPrompt | None = None,
    ) -> ConversationNode:
        point = ConversationNode(turn, messages, visible, tools, tuple(_marks(messages[-1])), written)
        self._points.setdefault(visible.key, []).append(point)
        self._of_turn[turn] = point
        self._said[own.key] = len(turn.sampled)
        return point

    def _choose(self, alike: Sequence[ConversationNode], messages: Sequence[Message]) -> tuple[ConversationNode, bool]:
        """The one of several points that the messages tell most of, and whether another one may be meant as well."""
        if len(alike) == 1:
            return alike[0], False
        sent = Counter(mark for message in messages if message["role"] == "assistant" for mark in _marks(message))
        marks = [Counter(m for turn in point.turn.path() for m in self._of_turn[turn].marks) for point in alike]
        told = [(own & sent).total() for own in marks]
        best = [(own == sent, index) for index, own in enumerate(marks) if told[index] == max(told)]
        chosen = alike[max(best)[1]]
        tokens = chosen.turn.sequence()
        return chosen, any(alike[index].turn.sequence() != tokens for _, index in best)


def digest(before: bytes, what: object) -> bytes:
    """Identity of something after something else."""
    return blake2b(orjson.dumps(what), key=before, digest_size=16).digest()


def _continues(turn: Turn | None, earlier: Turn, *, by_none: bool) -> bool:
    """Whether a turn's sequence goes on from the earlier one's, turn by turn; ``by_none``: whether it is the same."""
    while turn is not None and turn.end > earlier.end and not by_none:
        turn = turn.parent
    return turn is not None and (turn is earlier or turn.sequence() == earlier.sequence())


def _nothing_to_see(message: Message) -> bool:
    return not message.get("tool_calls") and not text_of(message.get("content")).strip()


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _calls(message: Message) -> tuple[str, ...]:
    return tuple(
        f"{call['function']['name']} {_canonical(call['function']['arguments'])}"
        for call in message.get("tool_calls") or ()
    )


def _marks(message: Message) -> Iterator[str]:
    """What an assistant message says of the turn that it echoes, beyond what is visible."""
    for call in message.get("tool_calls") or ():
        yield f"call {call.get('id')}"
    for thought in (*THOUGHT.findall(text_of(message.get("content"))), message.get("reasoning_content") or ""):
        if not thought:
            continue
        yield f"thought {digest(b'', _squeezed(thought)).hex()}"


def _carried(message: Message) -> tuple[Sequence[int], Sequence[int], Sequence[float]] | None:
    """Gym's token fields of a message."""
    given = [name for name in _TOKEN_FIELDS if message.get(name)]
    if not given:
        return None
    if len(given) < len(_TOKEN_FIELDS):
        missing = next(name for name in _TOKEN_FIELDS if name not in given)
        raise CallerError(f"missing, though {given[0]} is there", field=f"messages.{missing}")
    prompt, sampled, log_probs = (message[name] for name in _TOKEN_FIELDS)
    for name, ids in (("prompt_token_ids", prompt), ("generation_token_ids", sampled)):
        try:
            packed_ids(ids)
        except TokenMismatch as error:
            raise CallerError(str(error), field=f"messages.{name}") from error
    if len(sampled) != len(log_probs):
        raise CallerError(f"{len(log_probs)} of them for {len(sampled)} tokens", field="messages.generation_log_probs")
    return prompt, sampled, log_probs


def _plain(message: Message) -> Message:
    """A message with its turn's tokens in the fields that others know."""
    turn: Turn | None = message.get(CARRIED)
    if turn is None:
        return message
    rest = {name: value for name, value in message.items() if name != CARRIED}
    tokens = (turn.prompt(), list(turn.sampled), list(turn.log_probs))
    return rest | dict(zip(_TOKEN_FIELDS, tokens, strict=True))


def _canonical(arguments: Any) -> str:
    """JSON arguments, however they were written, or shown where they are none."""
    if isinstance(arguments, str):
        arguments = arguments_of(arguments)
    return json.dumps(arguments, sort_keys=True)


class SavedTurn(BaseModel):
    """One turn. ``continues``: its prompt begins with the whole sequence of the turn before."""

    model_config = ConfigDict(extra="forbid")

    id: Annotated[str, Field(max_length=200, pattern=r"^[!-~]+$")]
    continues: bool
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]]
    observed: list[int]
    sampled: list[int]
    log_probs: list[float]
    weight_versions: tuple[str | None, str | None]
    finish: Finish
    routed_experts: str | None = None


def saved_turns(answers: Mapping[str, ConversationNode], after: str | None) -> Iterator[dict[str, Any]]:
    """The turns that follow an answer, or all of them, for orjson; each continues the one before.

    Raises:
        CallerError: they do not: the agent has sampled twice, or edited its past.
    """
    before: ConversationNode | None = None
    behind = after is None
    for name, point in answers.items():
        if behind:
            length = len(before.messages) if before else 0
            if before is not None and (point.messages[:length] != before.messages or len(point.messages) == length):
                raise CallerError(f"answer {name!r} does not continue the one before: only one line can be saved")
            turn = point.turn
            yield {
                "id": name,
                "continues": before is not None and turn.parent is before.turn,
                "messages": point.messages[length:],
                "tools": point.tools,
                "observed": turn.observed.tolist(),
                "sampled": turn.sampled.tolist(),
                "log_probs": turn.log_probs.tolist(),
                "weight_versions": (turn.weight_version, turn.last_version),
                "finish": turn.finish,
                "routed_experts": turn.routed_experts,
            }
        before, behind = point, behind or name == after


def restored(history: ConversationIndex, turns: list[SavedTurn]) -> dict[str, ConversationNode]:
    """Have an empty history go on from these turns; the answers by their ids.

    Raises:
        CallerError: what should be their tokens or messages is none.
    """
    answers: dict[str, ConversationNode] = {}
    point: ConversationNode | None = None
    for saved in turns:
        experts = saved.routed_experts
        generation = Generation(saved.sampled, saved.log_probs, saved.finish, routed_experts=experts)
        parent = point.turn if point is not None and saved.continues else None
        *new, message = saved.messages
        try:
            if message["role"] != "assistant":
                raise ValueError(f"{message['role']!r} is not the policy")
            turn = history.ledger.append(parent, saved.observed, generation, *saved.weight_versions)
            point = answers[saved.id] = history.record(point, new, message, turn, saved.tools)
        except TokenMismatch as error:
            raise CallerError(f"{saved.id!r}: {error.reason}", field="turns") from error
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise CallerError(f"{saved.id!r} has what is no message: {error!r:.200}", field="turns") from error
    return answers
