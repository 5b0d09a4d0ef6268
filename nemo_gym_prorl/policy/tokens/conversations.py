# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Find the sampled turn that a conversation continues, from the messages that an agent sends back.

An agent's messages are a lossy copy of the sampled turns. Agents drop reasoning, trim white space and reformat JSON.
Converters merge neighbouring assistant messages, or drop empty messages. No such change makes a new conversation. A
conversation is therefore identified by its *visible* content: the messages of other roles, and between two of them the
concatenated text and calls of the policy.

Two different turns can have the same visible content. The index then uses, strongest first:

1. token ids that the agent sends along (as Gym's agents do): only the turn with exactly these ids is continued;
2. ids of tool calls, and reasoning, where the agent kept them;
3. the latest of the remaining turns; :attr:`ConversationMatch.ambiguous` records that several turns matched.

Invariant: a match covers the visible history of one turn in the ledger, from the first message on. An agent that edits
its history therefore starts a branch at the edit.

A rollout's turns can be saved as JSON (:class:`SavedTurn`), each as the difference to the previous turn. Another model
server, or another rollout, continues from saved turns without tokenising sampled text. Pure: no task, socket, clock or
thread.
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
from nemo_gym_prorl.policy.text.template import REASONING_BLOCK, Message, Tools, parse_arguments, text_of
from nemo_gym_prorl.policy.text.turn_boundary import RenderedPrompt
from nemo_gym_prorl.policy.tokens.ledger import LedgerTurn, TokenLedger, TokenMismatch, pack_ids


TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""Gym's fields for the tokens of a turn, on the last message or item of the turn."""

KNOWN_TURN = "nemo_gym_prorl.turn"
"""Message field that refers to a turn of this rollout, in place of the turn's token fields."""


@dataclass(frozen=True, slots=True)
class ConversationFingerprint:
    """Visible content of a conversation: a digest of all messages up to the last message of a role other than
    ``assistant``, and the policy's text and calls since.
    """

    prefix_digest: bytes = b""
    assistant_text: str = ""
    calls: tuple[str, ...] = ()

    def with_message(self, message: Message) -> ConversationFingerprint:
        """Return the fingerprint after one more message."""
        if message["role"] == "assistant":
            return self.with_assistant(ConversationFingerprint.of(message))
        return ConversationFingerprint(digest(self.key, [message["role"], text_of(message.get("content")).strip()]))

    @classmethod
    def of(cls, message: Message) -> ConversationFingerprint:
        """Return the fingerprint of an assistant message alone."""
        return cls(
            assistant_text=_without_whitespace(REASONING_BLOCK.sub("", text_of(message.get("content")))),
            calls=_calls(message),
        )

    def with_assistant(self, own: ConversationFingerprint) -> ConversationFingerprint:
        """Return the fingerprint after an assistant message with the fingerprint ``own``."""
        return ConversationFingerprint(
            self.prefix_digest, self.assistant_text + own.assistant_text, self.calls + own.calls
        )

    @property
    def key(self) -> bytes:
        """Digest; equal for conversations with the same visible content."""
        return digest(self.prefix_digest, [self.assistant_text, self.calls])


_BEGINNING = ConversationFingerprint()


@dataclass(frozen=True, slots=True, eq=False)
class ConversationNode:
    """A sampled turn and the conversation up to the turn, from which the rollout can continue.

    Attributes:
        turn: the turn's tokens.
        messages: the conversation as sampled, with the turn's own message as the last.
        visible: fingerprint of the conversation as an agent sees it.
        tools: tools that the turn was offered.
        identity_marks: ids of the turn's calls and digests of its reasoning, which distinguish turns with the same
            visible content.
        rendered_prompt: the turn's prompt as text, if this server rendered the prompt.
    """

    turn: LedgerTurn
    messages: tuple[Message, ...]
    visible: ConversationFingerprint
    tools: Tools
    identity_marks: tuple[str, ...]
    rendered_prompt: RenderedPrompt | None = None


@dataclass(frozen=True, slots=True)
class ConversationMatch:
    """Turn that a conversation continues, and the messages after the turn.

    Attributes:
        node: the continued turn; ``None`` for a new conversation.
        new: the messages after that turn.
        ambiguous: whether turns with other tokens also match, or the matched turn has no visible content.
    """

    node: ConversationNode | None
    new: tuple[Message, ...]
    ambiguous: bool = False

    @property
    def unsampled(self) -> tuple[Message, ...]:
        """New assistant messages: text that the agent wrote, or turns whose history the agent edited."""
        return tuple(message for message in self.new if message["role"] == "assistant")


@dataclass(slots=True)
class ConversationIndex:
    """Turns of one rollout, by the fingerprint of their conversation."""

    ledger: TokenLedger = field(default_factory=TokenLedger)
    _nodes: dict[bytes, list[ConversationNode]] = field(default_factory=dict)
    _node_of_turn: dict[LedgerTurn, ConversationNode] = field(default_factory=dict)
    _sampled_lengths: dict[bytes, int] = field(default_factory=dict)
    _fingerprint_cache: dict[tuple[bytes, int], tuple[ConversationFingerprint, bytes]] = field(default_factory=dict)
    """Fingerprint and key after each message of the latest conversation, by previous key and hash of the message."""

    def record(
        self,
        before: ConversationNode | None,
        new: Sequence[Message],
        message: Message,
        turn: LedgerTurn,
        tools: Tools = (),
        rendered: RenderedPrompt | None = None,
    ) -> ConversationNode:
        """Add a turn and its conversation: the turn ``before`` (if any), then the messages ``new`` and ``message``."""
        visible, own = before.visible if before else _BEGINNING, ConversationFingerprint.of(message)
        for one in new:
            visible = visible.with_message(one)
        visible = visible.with_assistant(own)
        if before is None:
            return self._add(turn, (*new, message), visible, own, tools, rendered)
        tools = before.tools if before.tools == tools else tools
        return self._add(turn, (*before.messages, *new, message), visible, own, tools, rendered)

    def find(self, messages: Sequence[Message], tools: Tools = ()) -> ConversationMatch:
        """Return the latest turn that the conversation continues, and the messages after the turn.

        Raises:
            CallerError: a message has some of the token fields but not all, or the fields contradict each other.
        """
        for index, key, carried, own in reversed(list(self._possible_ends(messages, tools))):
            candidates = self._nodes.get(key, [])
            sent = messages[index]["role"] == "assistant"
            if carried is not None:
                candidates = [node for node in candidates if _is_continuation(node.turn, carried, by_none=own)]
            if candidates:
                chosen, ambiguous = self._choose(candidates, messages)
                return ConversationMatch(
                    chosen, tuple(map(_with_token_fields, messages[index + 1 :])), ambiguous or not sent
                )
        return ConversationMatch(None, tuple(map(_with_token_fields, messages)))

    def retokenised(self, messages: Sequence[Message]) -> int:
        """Return the number of sampled tokens in turns with the visible content of the given assistant messages."""
        own = (message for message in messages if message["role"] == "assistant")
        return sum(self._sampled_lengths.get(ConversationFingerprint.of(message).key, 0) for message in own)

    def node_of(self, turn: LedgerTurn) -> ConversationNode:
        return self._node_of_turn[turn]

    def continues_tokens(self, turn: LedgerTurn) -> bool | None:
        """Return whether a turn's prompt continued the ledger's tokens; ``None`` for the first turn of a conversation.

        A prompt with assistant messages after the continued tokens does not count. Nor does a first turn whose prompt
        has text that was sampled in this rollout.
        """
        before = self._node_of_turn.get(turn.parent) if turn.parent is not None else None
        new = self._node_of_turn[turn].messages[len(before.messages) if before else 0 : -1]
        if before is None:
            return False if self.retokenised(new) else None
        return all(message["role"] != "assistant" for message in new)

    def _possible_ends(
        self, messages: Sequence[Message], tools: Tools
    ) -> Iterator[tuple[int, bytes, LedgerTurn | None, bool]]:
        """Yield each message after which a turn may have ended, as four values: index, fingerprint key up to the
        message, latest turn whose tokens were sent, and whether the message itself has tokens.

        Sent tokens that are not in the ledger were sampled elsewhere, and are added to the ledger as they were sent.
        """
        visible, key, carried, latest = _BEGINNING, _BEGINNING.key, None, None
        known, self._fingerprint_cache = self._fingerprint_cache, {}
        drops = not any(message["role"] == "assistant" and _is_empty(message) for message in messages)
        for index, message in enumerate(messages):
            visible, key = self._fingerprint_with(known, visible, key, message)
            if message["role"] != "assistant":
                if drops and index + 1 < len(messages) and messages[index + 1]["role"] != "assistant":
                    # A converter may have dropped a turn without visible content between these two messages.
                    yield index, key, carried, False
                continue
            if (known_turn := message.get(KNOWN_TURN)) is not None:
                carried, latest = known_turn, None
                yield index, key, carried, True
                continue
            fields = _sent_token_fields(message)
            # Gym's converters copy the previous message's token fields to a message without such fields.
            own = fields is not None and fields != latest
            if fields is not None and own:
                latest, (prompt, sampled, log_probs) = fields, fields
                turn = self.ledger.find(prompt, sampled)
                if turn is None:
                    parent, observed = self.ledger.split_prompt(prompt, carried)
                    turn = self.ledger.append(parent, observed, Generation(sampled, log_probs, Finish.STOP))
                    self._add(turn, tuple(messages[: index + 1]), visible, ConversationFingerprint.of(message), tools)
                carried = turn
            yield index, key, carried, own

    def _fingerprint_with(
        self,
        known: Mapping[tuple[bytes, int], tuple[ConversationFingerprint, bytes]],
        visible: ConversationFingerprint,
        key: bytes,
        message: Message,
    ) -> tuple[ConversationFingerprint, bytes]:
        """Return the fingerprint after a message, and its key; cached, since agents send the whole conversation."""
        step = key, hash(orjson.dumps([message.get(name) for name in ("role", "content", "tool_calls")]))
        if (found := known.get(step)) is None:
            then = visible.with_message(message)
            found = then, then.key
        self._fingerprint_cache[step] = found
        return found

    def _add(
        self,
        turn: LedgerTurn,
        messages: tuple[Message, ...],
        visible: ConversationFingerprint,
        own: ConversationFingerprint,
        tools: Tools,
        rendered: RenderedPrompt | None = None,
    ) -> ConversationNode:
        node = ConversationNode(turn, messages, visible, tools, tuple(_identity_marks(messages[-1])), rendered)
        self._nodes.setdefault(visible.key, []).append(node)
        self._node_of_turn[turn] = node
        self._sampled_lengths[own.key] = len(turn.sampled)
        return node

    def _choose(
        self, candidates: Sequence[ConversationNode], messages: Sequence[Message]
    ) -> tuple[ConversationNode, bool]:
        """Return the candidate that shares most identity marks with the messages, and whether the choice is ambiguous.

        Among equal candidates, one with exactly the messages' marks precedes, then the latest. The choice is ambiguous
        if equal candidates have different tokens.
        """
        if len(candidates) == 1:
            return candidates[0], False
        sent = Counter(
            mark for message in messages if message["role"] == "assistant" for mark in _identity_marks(message)
        )
        identity_marks = [
            Counter(m for turn in node.turn.path() for m in self._node_of_turn[turn].identity_marks)
            for node in candidates
        ]
        shared = [(own & sent).total() for own in identity_marks]
        best = [(own == sent, index) for index, own in enumerate(identity_marks) if shared[index] == max(shared)]
        chosen = candidates[max(best)[1]]
        tokens = chosen.turn.sequence()
        return chosen, any(candidates[index].turn.sequence() != tokens for _, index in best)


def digest(before: bytes, what: object) -> bytes:
    return blake2b(orjson.dumps(what), key=before, digest_size=16).digest()


def _is_continuation(turn: LedgerTurn | None, earlier: LedgerTurn, *, by_none: bool) -> bool:
    """Return whether a turn's sequence begins with the earlier turn's; with ``by_none``, whether both are equal."""
    while turn is not None and turn.end > earlier.end and not by_none:
        turn = turn.parent
    return turn is not None and (turn is earlier or turn.sequence() == earlier.sequence())


def _is_empty(message: Message) -> bool:
    return not message.get("tool_calls") and not text_of(message.get("content")).strip()


def _without_whitespace(text: str) -> str:
    return "".join(text.split())


def _calls(message: Message) -> tuple[str, ...]:
    return tuple(
        f"{call['function']['name']} {_canonical(call['function']['arguments'])}"
        for call in message.get("tool_calls") or ()
    )


def _identity_marks(message: Message) -> Iterator[str]:
    for call in message.get("tool_calls") or ():
        yield f"call {call.get('id')}"
    for reasoning in (
        *REASONING_BLOCK.findall(text_of(message.get("content"))),
        message.get("reasoning_content") or "",
    ):
        if not reasoning:
            continue
        yield f"thought {digest(b'', _without_whitespace(reasoning)).hex()}"


def _sent_token_fields(message: Message) -> tuple[Sequence[int], Sequence[int], Sequence[float]] | None:
    """Return a message's prompt ids, sampled ids and log-probs in Gym's token fields; ``None`` without the fields."""
    given = [name for name in TOKEN_FIELDS if message.get(name)]
    if not given:
        return None
    if len(given) < len(TOKEN_FIELDS):
        missing = next(name for name in TOKEN_FIELDS if name not in given)
        raise CallerError(
            f"missing, but {given[0]} is present: send all token fields or none", field=f"messages.{missing}"
        )
    prompt, sampled, log_probs = (message[name] for name in TOKEN_FIELDS)
    for name, ids in (("prompt_token_ids", prompt), ("generation_token_ids", sampled)):
        try:
            pack_ids(ids)
        except TokenMismatch as error:
            raise CallerError(str(error), field=f"messages.{name}") from error
    if len(sampled) != len(log_probs):
        raise CallerError(
            f"{len(log_probs)} log-probs for {len(sampled)} tokens", field="messages.generation_log_probs"
        )
    return prompt, sampled, log_probs


def _with_token_fields(message: Message) -> Message:
    turn: LedgerTurn | None = message.get(KNOWN_TURN)
    if turn is None:
        return message
    rest = {name: value for name, value in message.items() if name != KNOWN_TURN}
    tokens = (turn.prompt(), list(turn.sampled), list(turn.log_probs))
    return rest | dict(zip(TOKEN_FIELDS, tokens, strict=True))


def _canonical(arguments: Any) -> str:
    """Return a call's arguments as JSON with sorted keys, so that the agent's formatting does not matter."""
    if isinstance(arguments, str):
        arguments = parse_arguments(arguments)
    return json.dumps(arguments, sort_keys=True)


class SavedTurn(BaseModel):
    """One turn as JSON, with the messages since the previous turn, its own message last. ``continues``: the prompt
    begins with the whole sequence of the previous turn, and ``observed`` holds the ids after that sequence.
    """

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
    """Yield the turns after the answer ``after`` (``None``: all) in the form of :class:`SavedTurn`, for orjson.

    Raises:
        CallerError: the turns branch: the agent sampled a turn twice, or edited its past.
    """
    before: ConversationNode | None = None
    past_start = after is None
    for name, node in answers.items():
        if past_start:
            length = len(before.messages) if before else 0
            if before is not None and (node.messages[:length] != before.messages or len(node.messages) == length):
                raise CallerError(
                    f"answer {name!r} does not continue the previous one: a rollout with branches cannot be saved"
                )
            turn = node.turn
            yield {
                "id": name,
                "continues": before is not None and turn.parent is before.turn,
                "messages": node.messages[length:],
                "tools": node.tools,
                "observed": turn.observed.tolist(),
                "sampled": turn.sampled.tolist(),
                "log_probs": turn.log_probs.tolist(),
                "weight_versions": (turn.weight_version, turn.last_version),
                "finish": turn.finish,
                "routed_experts": turn.routed_experts,
            }
        before, past_start = node, past_start or name == after


def restore_turns(history: ConversationIndex, turns: list[SavedTurn]) -> dict[str, ConversationNode]:
    """Fill an empty index with saved turns and return its nodes by answer id.

    Raises:
        CallerError: a turn's tokens or messages are invalid.
    """
    answers: dict[str, ConversationNode] = {}
    node: ConversationNode | None = None
    for saved in turns:
        experts = saved.routed_experts
        generation = Generation(saved.sampled, saved.log_probs, saved.finish, routed_experts=experts)
        parent = node.turn if node is not None and saved.continues else None
        *new, message = saved.messages
        try:
            if message["role"] != "assistant":
                raise ValueError(f"the role must be assistant, not {message['role']!r}")
            turn = history.ledger.append(parent, saved.observed, generation, *saved.weight_versions)
            node = answers[saved.id] = history.record(node, new, message, turn, saved.tools)
        except TokenMismatch as error:
            raise CallerError(f"{saved.id!r}: {error.reason}", field="turns") from error
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise CallerError(f"{saved.id!r} has an invalid message: {error!r:.200}", field="turns") from error
    return answers
