# SPDX-License-Identifier: Apache-2.0
"""One call per turn: messages in, the policy's next message out, tokens kept.

An agent sends its conversation as every OpenAI-style agent does, whole or (cheaper) as what is new since an earlier
answer. Here it is matched to the turns of its rollout: the longest known history is kept as it was sampled, only what
follows is rendered. An agent may sample a turn twice, or edit its past: each gives a branch, none corrupts another.

Invariants: one engine request per turn and attempt, always with the ids of the ledger; a turn enters the ledger once
its tokens are complete, or not at all; rollouts are forgotten ``keep_s`` after their last use.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

import orjson

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.backend import Backend
from nemo_gym_prorl.policy.chat import Message, Renderer, text_of
from nemo_gym_prorl.policy.engines import Conversation, Engine, RequestRefused, Sampling
from nemo_gym_prorl.policy.metrics import PolicyMetrics
from nemo_gym_prorl.policy.parsers import Parsed, parse, parsed_by_engine, strip_thought
from nemo_gym_prorl.policy.placement import Placement
from nemo_gym_prorl.policy.tokens import Finish, Generation, TokenLedger, Turn


type History = Literal["keep", "branch"]
"""What to do when the chat template would render the past differently from how it was sampled."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What an agent asks for.

    Attributes:
        rollout: id of the rollout; one agent session.
        group: id that the rollouts of one prompt share; by default the first two messages say it.
        messages: the conversation, or with ``after`` only what is new.
        tools: tools in OpenAI's chat format.
        sampling: how to sample.
        after: id of the answer that the messages continue.
        template_variables: further variables for the chat template.
    """

    rollout: str
    messages: Sequence[Message]
    group: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    sampling: Sampling = field(default_factory=Sampling)
    after: str | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """A sampled turn as the agent gets it.

    Attributes:
        id: names this answer in ``after`` of a later request.
        message: assistant message in OpenAI's chat format.
        parsed: the same, taken apart.
        turn: its tokens; ``None`` if nothing could be sampled for lack of context.
        finish: why sampling ended.
        prompt_tokens: length of the prompt.
    """

    id: str
    message: Message
    parsed: Parsed
    turn: Turn | None
    finish: Finish
    prompt_tokens: int


@dataclass(slots=True)
class _Point:
    """A place in a rollout from which it can go on: an answer and the conversation up to it."""

    turn: Turn
    messages: tuple[Message, ...]
    digest: bytes
    thoughts: bool


@dataclass(slots=True)
class _Rollout:
    ledger: TokenLedger = field(default_factory=TokenLedger)
    points: dict[bytes, _Point] = field(default_factory=dict)
    answers: dict[str, _Point] = field(default_factory=dict)
    rewrites: int = 0
    used_at: float = 0.0


class PolicyService:
    """The policy behind a model server.

    Args:
        engine: the wire protocol of the backends.
        placement: where requests run.
        metrics: what is counted.
        renderer: tokenizer and chat template; needed by engines that take tokens.
        tool_format: name in :data:`~nemo_gym_prorl.policy.parsers.FORMATS`.
        thoughts: look for ``<think>`` blocks.
        history: see :data:`History`.
        keep_s: how long an unused rollout is remembered.
    """

    def __init__(
        self,
        engine: Engine,
        placement: Placement,
        metrics: PolicyMetrics,
        *,
        renderer: Renderer | None = None,
        tool_format: str = "hermes",
        thoughts: bool = True,
        history: History = "keep",
        keep_s: float = 3600.0,
    ) -> None:
        if engine.takes_tokens and renderer is None:
            raise CallerError("an engine that takes tokens needs a tokenizer and a chat template", field="tokenizer")
        self.engine = engine
        self.placement = placement
        self.metrics = metrics
        self.renderer = renderer
        self.tool_format = tool_format
        self.thoughts = thoughts
        self.history: History = history
        self._keep_s = keep_s
        self._rollouts: OrderedDict[str, _Rollout] = OrderedDict()

    async def turn(self, request: TurnRequest) -> Answer:
        """Sample the next turn.

        Raises:
            CallerError: the request cannot be carried out by anybody.
            BackendFailed: no backend could carry it out.
        """
        rollout = self._rollout(request.rollout)
        point, new = self._continue(rollout, request)
        messages = (*(point.messages if point else ()), *new)
        prompt, observed, parent = self._render(rollout, point, messages, new, request)
        conversation = Conversation(messages, request.tools, request.template_variables, tuple(prompt))

        async def generate(backend: Backend) -> Generation:
            return await self.engine.generate(backend.url, prompt, conversation, request.sampling)

        started = time.monotonic()
        # Rollouts that start with the same messages are siblings, whether or not anybody says so.
        group = request.group or _digest(b"", messages[:2]).hex()
        placed = await self.placement.run(request.rollout, group, generate)
        generation = placed.result
        self.metrics.turn(placed, time.monotonic() - started, len(prompt))
        if generation.finish is Finish.CONTEXT:
            empty: Message = {"role": "assistant", "content": ""}
            return Answer(_new_id(), empty, Parsed(None, "", ()), None, Finish.CONTEXT, len(prompt))
        if generation.prompt_ids is not None:
            parent, observed = rollout.ledger.place(generation.prompt_ids, point.turn if point else None)
            if point is not None and parent is None:
                self._rewritten(rollout)
        turn = rollout.ledger.append(parent, observed, generation, placed.weight_version)
        parsed = self._parse(generation, request)
        answer = Answer(_new_id(), _as_message(parsed), parsed, turn, generation.finish, turn.start)
        *_, (_, digest) = _chain((*new, answer.message), point.digest if point else b"")
        thoughts = bool(parsed.thought) or (point is not None and point.thoughts)
        rollout.points[digest] = _Point(turn, (*messages, answer.message), digest, thoughts)
        rollout.answers[answer.id] = rollout.points[digest]
        if not parsed.calls:
            # Most rollouts end like this. One that does not finds its backend again.
            self.placement.apply(self.placement.pool.finish(request.rollout))
        return answer

    def ledger(self, rollout: str) -> TokenLedger:
        """The tokens of a rollout.

        Raises:
            CallerError: it is unknown, or has been forgotten.
        """
        try:
            return self._rollouts[rollout].ledger
        except KeyError:
            raise CallerError(f"no rollout {rollout!r} here", field="rollout") from None

    def answers(self, rollout: str) -> dict[str, Turn]:
        """The turns of a rollout by the ids of its answers."""
        self.ledger(rollout)
        return {answer_id: point.turn for answer_id, point in self._rollouts[rollout].answers.items()}

    def finish(self, rollout: str) -> None:
        """Forget a rollout; its slot is free."""
        self.placement.apply(self.placement.pool.finish(rollout))
        gone = self._rollouts.pop(rollout, None)
        if gone is not None:
            self.metrics.finished(gone.ledger.branches)

    def _rollout(self, name: str) -> _Rollout:
        now = time.monotonic()
        while self._rollouts:
            oldest, known = next(iter(self._rollouts.items()))
            if now - known.used_at < self._keep_s:
                break
            self.finish(oldest)
        rollout = self._rollouts.setdefault(name, _Rollout())
        rollout.used_at = now
        self._rollouts.move_to_end(name)
        return rollout

    def _continue(self, rollout: _Rollout, request: TurnRequest) -> tuple[_Point | None, tuple[Message, ...]]:
        """The latest known place in the conversation, and the messages after it."""
        messages = tuple(request.messages)
        if request.after is not None:
            point = rollout.answers.get(request.after)
            if point is None:
                raise CallerError(f"no answer {request.after!r} in this rollout", field="previous_response_id")
            return point, messages
        found, length = None, 0
        for index, digest in _chain(messages):
            point = rollout.points.get(digest)
            if point is not None:
                found, length = point, index + 1
        if found is None:
            found = self._adopt(rollout, messages)
            length = len(found.messages) if found else 0
        return found, messages[length:]

    def _adopt(self, rollout: _Rollout, messages: tuple[Message, ...]) -> _Point | None:
        """Take over a history that this process did not sample, from the token ids that Gym's agents send along."""
        for index, digest in reversed(list(_chain(messages))):
            message = messages[index]
            if ids := message.get("generation_token_ids"):
                generation = Generation(ids, message["generation_log_probs"], Finish.STOP)
                turn = rollout.ledger.append(None, message["prompt_token_ids"], generation)
                point = rollout.points[digest] = _Point(turn, messages[: index + 1], digest, False)
                return point
        return None

    def _render(
        self,
        rollout: _Rollout,
        point: _Point | None,
        messages: Sequence[Message],
        new: Sequence[Message],
        request: TurnRequest,
    ) -> tuple[list[int], list[int], Turn | None]:
        """The prompt, the part of it that is new, and the turn before that."""
        if self.renderer is None or not self.engine.takes_tokens:
            return (point.turn.sequence() if point else []), [], point.turn if point else None
        if point is not None:
            turn = point.turn
            continuation = self.renderer.next(
                point.messages,
                new,
                request.tools,
                last_sampled=turn.sampled[-1] if turn.sampled else None,
                finish=turn.finish,
                thoughts=point.thoughts,
                **request.template_variables,
            )
            if continuation.rewrites_history:
                self._rewritten(rollout)
            if not continuation.rewrites_history or self.history == "keep":
                return turn.sequence() + continuation.ids, continuation.ids, turn
            self.metrics.retokenised.inc(sum(len(t.sampled) for t in turn.path()))
        prompt = self.renderer.first(messages, request.tools, **request.template_variables)
        return prompt, prompt, None

    def _rewritten(self, rollout: _Rollout) -> None:
        rollout.rewrites += 1
        self.metrics.rewrites.inc()

    def _parse(self, generation: Generation, request: TurnRequest) -> Parsed:
        if generation.message is not None:
            return parsed_by_engine(generation.message)
        assert self.renderer is not None
        tokenizer = self.renderer.tokenizer
        if any(token_id >= tokenizer.size for token_id in generation.ids):
            raise RequestRefused(
                f"the engine sampled id {max(generation.ids)}, the tokenizer knows {tokenizer.size}: no match",
                field="tokenizer",
            )
        ids = list(generation.ids)
        if generation.finish is Finish.STOP and ids and ids[-1] in tokenizer.special:
            ids.pop()
        opened = self.thoughts and self.renderer.opens_thought(request.tools, "<think>", **request.template_variables)
        tool_format = self.tool_format if request.tools else "plain"
        parsed = parse(tokenizer.decode(ids), tool_format, thoughts=self.thoughts, in_thought=opened)
        return Parsed(parsed.thought, tokenizer.without_special(parsed.content), parsed.calls)


def _as_message(parsed: Parsed) -> dict[str, Any]:
    """OpenAI's form of a turn, its thought in ``<think>`` tags as Gym's converters expect it."""
    content = parsed.content
    if parsed.thought is not None:
        content = f"<think>{parsed.thought}</think>{content}"
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if parsed.calls:
        message["tool_calls"] = [
            {
                "id": call.id or _call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parsed.calls
        ]
    return message


def _chain(messages: Sequence[Message], digest: bytes = b"") -> Iterator[tuple[int, bytes]]:
    """The identity of the conversation up to each assistant message, with its index."""
    start = 0
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            digest = _digest(digest, messages[start : index + 1])
            start = index + 1
            yield index, digest


def _digest(before: bytes, messages: Sequence[Message]) -> bytes:
    """Identity of messages after others, tolerant of what agents change on the way.

    Agents drop thoughts, trim white space and write JSON anew; none of that makes it another conversation.
    """
    state = blake2b(before, digest_size=16)
    for message in messages:
        content = text_of(message.get("content"))
        if message["role"] == "assistant":
            content = strip_thought(content)
        calls = [
            [call["function"]["name"], _canonical(call["function"]["arguments"])]
            for call in message.get("tool_calls") or ()
        ]
        state.update(orjson.dumps([message["role"], content.strip(), calls]))
    return state.digest()


def _canonical(arguments: object) -> object:
    if isinstance(arguments, str):
        try:
            return orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS).decode()
        except orjson.JSONDecodeError:
            return arguments
    return orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS).decode()


def _new_id() -> str:
    return f"resp_{uuid.uuid4().hex}"


def _call_id() -> str:
    # Nine letters and digits: Mistral's templates refuse anything else.
    return uuid.uuid4().hex[:9]
