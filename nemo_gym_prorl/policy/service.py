# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""One call per turn: messages in, the policy's next message out, tokens kept.

An agent sends its conversation as every OpenAI-style agent does, whole or (cheaper) as what is new since an earlier
answer. It is matched to the turns of its rollout (:mod:`.tokens.history`): the longest known history is kept as it was
sampled, only what follows is rendered. An agent may sample a turn twice, or edit its past: each gives a branch, which
is counted, and none corrupts another.

Invariants: one engine request per turn and attempt, always with the ids of the ledger; a turn enters the ledger once
its tokens are complete, or not at all; rollouts are forgotten ``keep_s`` after their last use, and one that comes back
after that is refused rather than read from its text.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from nemo_gym_prorl.background import is_cancelled
from nemo_gym_prorl.failures import CallerError, RolloutError
from nemo_gym_prorl.http.tracing import SpanGroup, note, span
from nemo_gym_prorl.policy.engines.engine import BackendFailed, Misconfigured, SampleRequest
from nemo_gym_prorl.policy.generation import Finish, Generation
from nemo_gym_prorl.policy.metrics import PolicyMetrics
from nemo_gym_prorl.policy.pool.backend import Backend, blocks_of
from nemo_gym_prorl.policy.pool.dispatcher import Dispatcher, Wait
from nemo_gym_prorl.policy.text.formats import FORMATS
from nemo_gym_prorl.policy.text.parsers import Format, Parsed, parse, parsed_by_engine, unparsed_tool_call
from nemo_gym_prorl.policy.text.renderer import Renderer
from nemo_gym_prorl.policy.text.template import Message, as_message, head_of, without_developers
from nemo_gym_prorl.policy.text.turn_boundary import RenderedPrompt
from nemo_gym_prorl.policy.tokens.history import (
    ConversationIndex,
    ConversationNode,
    Match,
    SavedTurn,
    digest,
    restored,
)
from nemo_gym_prorl.policy.tokens.ledger import TokenLedger, Turn
from nemo_gym_prorl.policy.tokens.prompt import IdTexts, Prompt, strip_known_tokens
from nemo_gym_prorl.policy.turns import Counts, PolicyAnswer, RolloutGone, RolloutTaken, TurnRequest


_log = logging.getLogger(__name__)

_FORGOTTEN = 100_000
"""How many forgotten rollouts are known by name."""

type Rewriting = Literal["keep", "branch"]
"""What to do when the chat template would render the past differently from how it was sampled."""


@dataclass(slots=True)
class RolloutState:
    """All that is kept of a rollout."""

    run: str | None = None
    history: ConversationIndex = field(default_factory=ConversationIndex)
    texts: IdTexts = field(default_factory=IdTexts)
    answers: dict[str, ConversationNode] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    began: datetime = field(default_factory=datetime.now)
    wait: Wait = field(default_factory=Wait)
    turns: set[asyncio.Task[PolicyAnswer]] = field(default_factory=set)
    log_prob_modes: set[str] = field(default_factory=set)
    """Of the engines that sampled its turns here."""
    used_at: float = 0.0
    restored: bool = False
    """It has no place at a backend yet, though it has turns."""


_NOTHING = RolloutState()


class PolicyService:
    """The policy behind a model server.

    Args:
        dispatcher: where requests run, and how backends are asked.
        metrics: what is counted.
        renderer: tokenizer and chat template, for engines that take tokens.
        form: how the model writes thoughts and calls.
        thoughts: whether a leading thought is taken as one.
        developers: whether there is a role ``developer``, where the template has it; else that is the system's.
        history: see :data:`Rewriting`.
        keep_s: how long an unused rollout is remembered.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: PolicyMetrics,
        *,
        renderer: Renderer | None = None,
        form: Format = FORMATS["hermes"],
        thoughts: bool = True,
        developers: bool = True,
        history: Rewriting = "keep",
        keep_s: float = 3600.0,
    ) -> None:
        self.engine, self.dispatcher = dispatcher.engine, dispatcher
        if renderer is not None:
            # Special tokens and many scripts, read as we do.
            text = renderer.tokenizer.sample_text()
            self.engine.expect(text, renderer.tokenizer.encode(text))
        self.metrics = metrics
        self.renderer = renderer
        self.form = form
        self.thoughts = thoughts
        # As vLLM knows whether a template has the role, by this mark.
        source = renderer.template.source if renderer is not None else "'developer'"
        self._developers = developers and ("'developer'" in source or '"developer"' in source)
        self.history: Rewriting = history
        self._keep_s = keep_s
        self._rollouts: OrderedDict[str, RolloutState] = OrderedDict()
        self._calling: set[str] = set()
        """Backends that have taken a call out of a turn: what they leave in the text is the policy's mistake."""
        self._forgotten: OrderedDict[str, None] = OrderedDict()

    async def turn(self, request: TurnRequest) -> PolicyAnswer:
        """Sample the next turn.

        Raises:
            CallerError: the request cannot be carried out by anybody.
            RolloutGone: it continues what is not known here.
            BackendFailed: no backend could carry it out.
        """
        rollout = self._rollout(request)
        turn = asyncio.ensure_future(self._turn(rollout, request))
        rollout.turns.add(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise RolloutGone(f"{request.rollout!r} was deleted while this turn ran", field="rollout") from None
        except RolloutError as error:
            _log.warning("a turn of %s failed: %s: %s", request.rollout, type(error).__name__, error)
            raise
        finally:
            rollout.turns.discard(turn)
            self._use(request.rollout, rollout)  # it may have waited for long, which is no disuse
            del turn  # what it raised holds this frame, and all that it was about

    async def _turn(self, rollout: RolloutState, request: TurnRequest) -> PolicyAnswer:
        request = self._understood(request)
        if request.tools and self.renderer is not None and not self.renderer.shows_tools:
            raise CallerError(
                "the chat template shows tools to no policy: offer none, or give a template that does", field="tools"
            )
        match = self._continued(rollout, request)
        point, new, ledger = match.point, match.new, rollout.history.ledger
        messages = (*(point.messages if point else ()), *new)
        why = "edited" if match.foreign else "again"
        prompt, parent, written = self._render(rollout, match, messages, request)
        observed: Sequence[int] = prompt.new
        asked = SampleRequest(
            prompt,
            request.sampling,
            messages,
            tools=request.tools,
            template_variables=request.template_variables,
            tool_choice=request.tool_choice,
            effort=request.effort,
        )

        async def generate(backend: Backend) -> Generation:
            try:
                generation = await self.engine.generate(backend.url, asked)
            except BackendFailed:
                self._calling.discard(backend.url)
                raise
            self._check_calls(backend.url, generation, request)
            return generation

        started = time.monotonic()
        # Rollouts that start with the same messages are siblings, whether or not anybody says so.
        group = request.group or digest(b"", [head_of(message) for message in messages[:2]]).hex()
        blocks = blocks_of(prompt) if point is None or rollout.restored else b""
        rollout.restored = False
        with span(SpanGroup.MODEL_CALL, "prorl.sample", rollout=request.rollout, prompt_tokens=len(prompt)) as this:
            placed = await self.dispatcher.run(
                request.rollout, group, generate, len(prompt), blocks, request.run, rollout.wait
            )
            note(this, backend=placed.backend, weights=placed.weight_version, queued_s=placed.queued_s)
        generation = placed.result
        self.metrics.turn(placed, time.monotonic() - started, len(prompt), request.run)
        if generation.log_prob_mode is not None:
            rollout.log_prob_modes.add(generation.log_prob_mode)
        if generation.finish is Finish.CONTEXT:
            empty: Message = {"role": "assistant", "content": ""}
            return PolicyAnswer(_new_id(), empty, Parsed(None, "", ()), None, Finish.CONTEXT, len(prompt))
        opened = written.opened if written is not None and self.thoughts else None
        parsed = self._parse(rollout, generation, request, prompt, opened)
        if not request.parallel or (self.renderer is not None and self.renderer.one_call):
            parsed = replace(parsed, calls=parsed.calls[:1])
        if generation.prompt_ids is not None:
            parent, observed = ledger.place(generation.prompt_ids, point.turn if point else None)
        if point is not None and parent is None:
            why = "rewritten"
            self._count(rollout, "retokenised", sum(len(turn.sampled) for turn in point.turn.path()))
            if generation.prompt_ids is not None:
                self._count(rollout, "rewrites")
        if ledger.forks(parent):
            self.metrics.forks.labels(why).inc()
        turn = ledger.append(parent, observed, generation, placed.weight_version, placed.last_version)
        message, cached = as_message(parsed), generation.cached_tokens or 0
        answer = PolicyAnswer(_new_id(), message, parsed, turn, generation.finish, turn.start, cached)
        # Some templates write a thought as they get it: the white space that its prompt held is part of it.
        whole = {**message, "content": message["content"].replace("<think>", f"<think>{opened}", 1)}
        kept = whole if opened and parsed.thought is not None else message
        rollout.answers[answer.id] = rollout.history.record(point, new, kept, turn, request.tools, written)
        if not parsed.calls:
            # Most rollouts end like this. One that does not finds its backend again.
            self.dispatcher.apply(self.dispatcher.pool.finish(request.rollout))
        return answer

    def rollout(self, name: str) -> RolloutState:
        """What is kept of a rollout.

        Raises:
            RolloutGone: it is unknown, or has been forgotten.
        """
        try:
            return self._rollouts[name]
        except KeyError:
            raise RolloutGone(f"no rollout {name!r} here", field="rollout") from None

    def ledger(self, rollout: str) -> TokenLedger:
        """Its tokens."""
        return self.rollout(rollout).history.ledger

    def restore(self, name: str, run: str | None, began: datetime, turns: list[SavedTurn]) -> None:
        """Have a rollout here that goes on from turns that were sampled elsewhere, or in another rollout.

        Raises:
            CallerError: there is one of that name, or the turns are none.
        """
        if name in self._rollouts:
            raise RolloutTaken(f"there is a rollout {name!r} already", field="rollout")
        rollout = RolloutState(run, began=began, restored=True)
        rollout.answers.update(restored(rollout.history, turns))
        self._rollouts[name] = rollout
        self._use(name, rollout)

    def strip_known_tokens(self, rollout: str, body: bytes) -> tuple[bytes, list[Turn]] | None:
        """A request without the tokens of this rollout that it repeats; see :func:`.echo.strip_known_tokens`."""
        known = self._rollouts.get(rollout, _NOTHING)
        return strip_known_tokens(body, known.history.ledger, known.texts)

    def token_fields(self, rollout: str, turn: Turn) -> tuple[bytes, bytes]:
        """A turn's three token fields as JSON, but for the name of the first, in two parts: prompt, and the rest."""
        texts = self.rollout(rollout).texts
        return texts.before(turn), texts.sampled(turn)

    def finish(self, rollout: str) -> None:
        """Forget a rollout, if it is known; turns of it that wait or run are ended, and its slot is free."""
        gone = self._rollouts.pop(rollout, None)
        for turn in gone.turns if gone is not None else ():
            turn.cancel()
        self.dispatcher.apply(self.dispatcher.pool.drop(rollout, time.monotonic()))
        if gone is not None:
            self.metrics.finished(gone.history.ledger.branches)

    def _rollout(self, request: TurnRequest) -> RolloutState:
        self._forget()
        name = request.rollout
        if "/" in name or name in (".", ".."):
            raise CallerError(
                "cannot be part of a path, by which its tokens are asked for: no '/', nor '.' or '..' alone",
                field="X-Rollout-Id",
            )
        if name in self._forgotten and name not in self._rollouts:
            said = [message for message in request.messages if message["role"] == "assistant"]
            if request.after is not None or any(not message.get("generation_token_ids") for message in said):
                raise RolloutGone(
                    f"the tokens of {name!r} were forgotten after {self._keep_s:g} s without a turn: raise keep_s",
                    field="rollout",
                )
            del self._forgotten[name]
        rollout = self._rollouts.setdefault(name, RolloutState(request.run))
        if rollout.run != request.run:
            raise CallerError(f"{name!r} is a rollout of {rollout.run or 'no run'!r}", field="X-Rollout-Run")
        self._use(name, rollout)
        return rollout

    def _use(self, name: str, rollout: RolloutState) -> None:
        rollout.used_at = time.monotonic()
        if self._rollouts.get(name) is rollout:
            self._rollouts.move_to_end(name)

    def _forget(self) -> None:
        """Drop what nobody has used for long."""
        now = time.monotonic()
        old: list[str] = []
        for name, rollout in self._rollouts.items():
            if now - rollout.used_at < self._keep_s:
                break
            if not rollout.turns:
                old.append(name)
        for name in old:
            self.finish(name)
            self._forgotten[name] = None
        while len(self._forgotten) > _FORGOTTEN:
            self._forgotten.popitem(last=False)

    def _understood(self, request: TurnRequest) -> TurnRequest:
        """A request in the words of the template, if it is rendered here: what that does not know would be lost.

        Raises:
            CallerError: the template has no word for something, or the engine none.
        """
        if self.renderer is None:
            return request
        if request.tool_choice not in (None, "none"):
            raise CallerError(
                "'auto' and 'none' are supported by an engine that takes tokens: a call that is forced by a grammar"
                " is not written as the policy writes calls; leave it out, or set policy.engine to 'vllm_chat'",
                field="tool_choice",
            )
        if request.effort is None:
            return request
        # As vLLM tells a template.
        said = {"reasoning_effort": request.effort, "enable_thinking": request.effort != "none"}
        if not any(name in self.renderer.template.source for name in said):
            raise CallerError(
                "the chat template knows neither reasoning_effort nor enable_thinking: leave it out",
                field="reasoning_effort",
            )
        return replace(request, template_variables=said | dict(request.template_variables))

    def _continued(self, rollout: RolloutState, request: TurnRequest) -> Match:
        """The turn that the request continues, and the messages after it."""
        lead: tuple[Message, ...] = ()
        if request.instructions:
            lead = ({"role": "system", "content": request.instructions},)
        if request.after is None:
            return rollout.history.find(self._with_roles((*lead, *request.messages)), request.tools)
        point = rollout.answers.get(request.after)
        if point is None:
            raise RolloutGone(f"no answer {request.after!r} in this rollout", field="previous_response_id")
        if lead and not _begins(point.messages[0], lead[0]):
            raise CallerError("not those that the rollout began with", field="instructions")
        # Behind the turn that they continue: none of them begins anything.
        return Match(point, tuple(self._with_roles((point.messages[-1], *request.messages))[1:]))

    def _with_roles(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages if self._developers else without_developers(messages)

    def _render(
        self, rollout: RolloutState, match: Match, messages: Sequence[Message], request: TurnRequest
    ) -> tuple[Prompt, Turn | None, RenderedPrompt | None]:
        """The prompt, the turn that it continues, and what the template wrote, if that was done here."""
        if match.ambiguous:
            self._count(rollout, "ambiguous")
        if rollout.history.ledger.turns:
            self._count(rollout, "retokenised", rollout.history.retokenised(match.new))
        point, texts = match.point, rollout.texts
        if self.renderer is None:
            before = point.turn if point else None
            return texts.prompt(before, ()), before, None
        if point is not None:
            turn = point.turn
            continuation = self.renderer.next(
                point.messages,
                match.new,
                request.tools,
                sampled=turn.sampled,
                finish=turn.finish,
                behind=_last(turn.observed),
                before=point.written,
                now=rollout.began,
                variables=request.template_variables,
            )
            rewrites = continuation.rewrites_history or list(point.tools) != list(request.tools)
            if rewrites:
                self._count(rollout, "rewrites")
            if continuation.differs:
                self._count(rollout, "differences")
            if not rewrites or self.history == "keep":
                self._count(rollout, "neutralised", continuation.neutralised)
                return texts.prompt(turn, continuation.ids), turn, continuation.written
        first = self.renderer.first(
            messages,
            request.tools,
            now=rollout.began,
            variables=request.template_variables,
        )
        self._count(rollout, "neutralised", first.neutralised)
        return texts.prompt(None, first.ids), None, first.written

    def _count(self, rollout: RolloutState, what: str, number: int = 1) -> None:
        """Something did not go straight in a rollout."""
        setattr(rollout.counts, what, getattr(rollout.counts, what) + number)
        self.metrics.counts[what].inc(number)

    def _check_calls(self, url: str, generation: Generation, request: TurnRequest) -> None:
        """Whether an engine that takes turns apart itself does so with calls."""
        if generation.message is None or not (request.tools and request.tool_choice != "none") or url in self._calling:
            return
        parsed = parsed_by_engine(generation.message)
        tools = {tool["function"]["name"] for tool in request.tools}
        if parsed.calls:
            self._calling.add(url)
        elif generation.finish is Finish.STOP and (name := unparsed_tool_call(parsed.content, self.form, tools)):
            raise Misconfigured(
                f"{url} gave a call of {name} as the text of a final answer: it parses no calls. In NeMo RL set "
                "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.tool_parser, start vLLM with "
                "--enable-auto-tool-choice --tool-call-parser; if its model does not write such calls, correct "
                "policy.tool_call_parser",
                field="tool_parser",
            )

    def _parse(
        self, rollout: RolloutState, generation: Generation, request: TurnRequest, prompt: Prompt, opened: str | None
    ) -> Parsed:
        """A turn taken apart, whose prompt opened its thought with this white space, if it did."""
        if generation.message is not None:
            return parsed_by_engine(generation.message)
        assert self.renderer is not None
        tokenizer = self.renderer.tokenizer
        # The padding of an embedding can be sampled. That is the policy's act: it stays in the tokens.
        self._count(rollout, "unreadable", tokenizer.unreadable(generation.ids))
        text = self.renderer.said(
            generation.ids,
            generation.finish,
            request.sampling.stop,
            variables=request.template_variables,
            behind=_last(prompt.new),
        )
        parsed = parse(
            text,
            self.form,
            request.tools,
            thoughts=self.thoughts,
            in_thought=opened is not None,
            calls=bool(request.tools) and request.tool_choice != "none",
            cut=generation.finish is Finish.LENGTH,
        )
        thought = parsed.thought and tokenizer.without_special(parsed.thought)
        return Parsed(thought, tokenizer.without_special(parsed.content), parsed.calls)


def _begins(message: Message, lead: Message) -> bool:
    """Whether a message is the lead, perhaps with what else the system said."""
    (role, text), (wanted, beginning) = head_of(message), head_of(lead)
    return role == wanted and (text == beginning or text.startswith(f"{beginning}\n\n"))


def _last(ids: Sequence[int]) -> int | None:
    return ids[-1] if ids else None


def _new_id() -> str:
    return f"resp_{uuid.uuid4().hex}"
