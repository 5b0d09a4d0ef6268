# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The policy service: one call per turn, with messages in, the policy's next message out, and tokens kept.

An agent sends its whole conversation, as every OpenAI-style agent does, or only the messages since an earlier answer.
The service matches the conversation to the turns of its rollout (:mod:`.tokens.conversations`). The longest known
history stays as sampled, and only later messages are rendered. An agent may sample a turn twice, or edit its history.
Each such call starts a branch, which is counted and leaves other branches unchanged.

Invariants:

- each attempt at a turn is one engine request, always with the ids of the ledger;
- a turn enters the ledger only with complete tokens;
- a rollout is forgotten ``keep_s`` after its last use; a later turn whose history lacks tokens is then refused, and
  never rebuilt from text.
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

from nemo_gym_prorl.async_tasks import is_cancelled, start_eager_task
from nemo_gym_prorl.failures import CallerError, RolloutError
from nemo_gym_prorl.http.tracing import SpanGroup, note, span
from nemo_gym_prorl.policy.calls import CallGrant, RolloutCalls, refuse
from nemo_gym_prorl.policy.engines.engine import BackendFailed, Misconfigured, SampleRequest
from nemo_gym_prorl.policy.generation import Finish, Generation
from nemo_gym_prorl.policy.metrics import ROLLOUT_COUNTERS, PolicyMetrics
from nemo_gym_prorl.policy.pool.backend import Backend, blocks_of
from nemo_gym_prorl.policy.pool.dispatcher import BackendDispatcher, WaitClock
from nemo_gym_prorl.policy.text.formats import FORMATS
from nemo_gym_prorl.policy.text.renderer import Renderer, off_loop
from nemo_gym_prorl.policy.text.template import Message, as_message, merge_developer_messages, role_and_text
from nemo_gym_prorl.policy.text.turn_boundary import RenderedPrompt
from nemo_gym_prorl.policy.text.turn_scanner import Parsed, TurnFormat, parse, parsed_by_engine, unparsed_tool_call
from nemo_gym_prorl.policy.tokens.conversations import (
    ConversationIndex,
    ConversationMatch,
    ConversationNode,
    SavedTurn,
    digest,
    restore_turns,
)
from nemo_gym_prorl.policy.tokens.ledger import LedgerTurn, TokenLedger
from nemo_gym_prorl.policy.tokens.prompt import Prompt, TokenTextCache, strip_known_tokens
from nemo_gym_prorl.policy.turns import PolicyAnswer, RolloutGone, RolloutTaken, TurnRequest


_log = logging.getLogger(__name__)

_MAX_FORGOTTEN = 100_000
"""Maximum of remembered names of forgotten rollouts, whose late turns get a clear error."""

type HistoryPolicy = Literal["keep", "branch"]
"""Policy for a chat template that renders sampled history differently: ``keep`` the tokens, or start a ``branch``."""


@dataclass(slots=True)
class RolloutState:
    """Tokens, conversation and counters of one rollout on this server."""

    run: str | None = None
    history: ConversationIndex = field(default_factory=ConversationIndex)
    texts: TokenTextCache = field(default_factory=TokenTextCache)
    answers: dict[str, ConversationNode] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ROLLOUT_COUNTERS, 0))
    began: datetime = field(default_factory=datetime.now)
    wait: WaitClock = field(default_factory=WaitClock)
    turns: set[asyncio.Task[PolicyAnswer]] = field(default_factory=set)
    log_prob_modes: set[str] = field(default_factory=set)
    """Log-prob modes of the engines that sampled the rollout's turns for this server."""
    calls: RolloutCalls = field(default_factory=RolloutCalls)
    timings: dict[LedgerTurn, tuple[float, float]] = field(default_factory=dict)
    """Start (seconds since the epoch) and duration in seconds of the turns that this server sampled."""
    used_at: float = 0.0
    restored: bool = False
    """Whether the rollout was restored with turns, and the pool does not know its blocks yet."""


_EMPTY_ROLLOUT = RolloutState()


class PolicyService:
    """The policy behind a model server.

    Args:
        dispatcher: runs requests on backends.
        metrics: the counters to update.
        renderer: tokenizer and chat template, for engines that take tokens.
        form: the model's turn format.
        reads_reasoning: whether leading reasoning is separated from the content.
        developers: whether a template's role ``developer`` is used; otherwise the messages become system messages.
        history: see :data:`HistoryPolicy`.
        keep_s: seconds after which an unused rollout is forgotten.
    """

    def __init__(
        self,
        dispatcher: BackendDispatcher,
        metrics: PolicyMetrics,
        *,
        renderer: Renderer | None = None,
        form: TurnFormat = FORMATS["hermes"],
        reads_reasoning: bool = True,
        developers: bool = True,
        history: HistoryPolicy = "keep",
        keep_s: float = 3600.0,
    ) -> None:
        self.engine, self.dispatcher = dispatcher.engine, dispatcher
        if renderer is not None:
            # The handshake requires that the engine's tokenizer encodes this text as the same ids.
            text = renderer.tokenizer.sample_text()
            self.engine.expect_tokenization(text, renderer.tokenizer.encode(text))
        self.metrics = metrics
        self.keys: dict[str, CallGrant] = {}
        """Permissions by capability key, of keys that are not revoked."""
        self.renderer = renderer
        self.form = form
        self.reads_reasoning = reads_reasoning
        # vLLM searches for the same literal to detect whether a template has the role.
        source = renderer.template.source if renderer is not None else "'developer'"
        self._developers = developers and ("'developer'" in source or '"developer"' in source)
        self.history: HistoryPolicy = history
        self._keep_s = keep_s
        self._rollouts: OrderedDict[str, RolloutState] = OrderedDict()
        self._parses_calls: set[str] = set()
        """URLs of backends that have parsed a call, so that calls in their texts are the policy's mistakes."""
        self._forgotten: OrderedDict[str, None] = OrderedDict()

    async def turn(self, request: TurnRequest) -> PolicyAnswer:
        """Sample the next turn.

        Raises:
            CallerError: the request is invalid, or every engine would refuse it.
            RolloutGone: the request continues an unknown rollout or answer, or the rollout was deleted meanwhile.
            BackendFailed: no backend carried out the request.
            TokenMismatch: token ids or log-probs in the engine's answer are missing or invalid.
        """
        rollout = self._rollout(request)
        turn = start_eager_task(self._turn(rollout, request))
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
            self._use(request.rollout, rollout)  # keep_s counts from the turn's end
            del turn  # the task's exception references this frame: break the cycle

    async def _turn(self, rollout: RolloutState, request: TurnRequest) -> PolicyAnswer:
        request = self._with_template_effort(request)
        if request.tools and self.renderer is not None and not self.renderer.shows_tools:
            raise CallerError(
                "the chat template does not render tools: offer none, or set policy.chat_template to one that does",
                field="tools",
            )
        match = self._find_continued_turn(rollout, request)
        node, new, ledger = match.node, match.new, rollout.history.ledger
        messages = (*(node.messages if node else ()), *new)
        why = "edited" if match.unsampled else "again"
        prompt, parent, rendered = await self._render(rollout, match, messages, request)
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
                self._parses_calls.discard(backend.url)
                raise
            self._check_calls(backend.url, generation, request)
            return generation

        started_at, started = time.time(), time.monotonic()
        # Rollouts that start with the same messages are siblings, even without a group id.
        group = request.group or digest(b"", [role_and_text(message) for message in messages[:2]]).hex()
        blocks = blocks_of(prompt) if node is None or rollout.restored else b""
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
        rollout.calls.context_full = generation.finish is Finish.CONTEXT
        if rollout.calls.context_full:
            empty: Message = {"role": "assistant", "content": ""}
            return PolicyAnswer(_new_id(), empty, Parsed(None, "", ()), None, Finish.CONTEXT, len(prompt))
        opened = rendered.opened if rendered is not None and self.reads_reasoning else None
        parsed = self._parse(rollout, generation, request, prompt, opened)
        if not request.parallel or (self.renderer is not None and self.renderer.single_call_only):
            parsed = replace(parsed, calls=parsed.calls[:1])
        if generation.prompt_ids is not None:
            parent, observed = ledger.split_prompt(generation.prompt_ids, node.turn if node else None)
        if node is not None and parent is None:
            why = "rewritten"
            self._count(rollout, "retokenised", sum(len(turn.sampled) for turn in node.turn.path()))
            if generation.prompt_ids is not None:
                self._count(rollout, "rewrites")
        if ledger.would_branch(parent):
            self.metrics.forks.labels(why).inc()
        turn = ledger.append(parent, observed, generation, placed.weight_version, placed.last_version)
        rollout.timings[turn] = started_at, time.monotonic() - started
        message, cached = as_message(parsed), generation.cached_tokens or 0
        answer = PolicyAnswer(_new_id(), message, parsed, turn, generation.finish, turn.start, cached)
        # Some templates print reasoning verbatim, so the recorded message includes the white space that the prompt
        # wrote after the reasoning marker.
        whole = {**message, "content": message["content"].replace("<think>", f"<think>{opened}", 1)}
        kept = whole if opened and parsed.reasoning is not None else message
        rollout.answers[answer.id] = rollout.history.record(node, new, kept, turn, request.tools, rendered)
        self.metrics.token_in(rollout.history.continues_tokens(turn))
        if not parsed.calls:
            # A turn without calls usually ends the rollout. The pool remembers the backend for a later turn.
            self.dispatcher.apply(self.dispatcher.pool.finish(request.rollout))
        return answer

    def rollout(self, name: str) -> RolloutState:
        """Return a rollout's state.

        Raises:
            RolloutGone: the rollout is unknown or forgotten.
        """
        try:
            return self._rollouts[name]
        except KeyError:
            raise RolloutGone(
                f"unknown rollout {name!r}: it was never sampled here, or has been deleted or forgotten",
                field="rollout",
            ) from None

    def ledger(self, rollout: str) -> TokenLedger:
        return self.rollout(rollout).history.ledger

    def restore(self, name: str, run: str | None, began: datetime, turns: list[SavedTurn]) -> None:
        """Create a rollout from turns that were sampled elsewhere, or in another rollout.

        Raises:
            RolloutTaken: the name is in use.
            CallerError: a turn is invalid.
        """
        if name in self._rollouts:
            raise RolloutTaken(f"a rollout {name!r} exists already: choose another name", field="rollout")
        rollout = RolloutState(run, began=began, restored=True)
        rollout.answers.update(restore_turns(rollout.history, turns))
        self._rollouts[name] = rollout
        self._use(name, rollout)

    def strip_known_tokens(self, rollout: str, body: bytes) -> tuple[bytes, list[LedgerTurn]] | None:
        """Strip the rollout's known tokens from a request; see :func:`.prompt.strip_known_tokens`."""
        known = self._rollouts.get(rollout, _EMPTY_ROLLOUT)
        return strip_known_tokens(body, known.history.ledger, known.texts)

    def token_fields(self, rollout: str, turn: LedgerTurn) -> tuple[bytes, bytes]:
        """Return two parts of JSON, which together add all three token fields as the value of ``prompt_token_ids``.

        The first part is the prompt's ids without the closing bracket. The second part is the bracket and the two
        other fields with their names.
        """
        texts = self.rollout(rollout).texts
        return texts.before(turn), texts.sampled(turn)

    def calls(self, rollout: str, run: str | None) -> RolloutCalls:
        """Return the record of a rollout's calls, an empty one for a forgotten rollout. Creates an unknown rollout."""
        if rollout in self._forgotten and rollout not in self._rollouts:
            return RolloutCalls()
        return self._rollout(TurnRequest(rollout, (), run=run)).calls

    def revoke(self, rollout: str) -> None:
        """Revoke a rollout's capability key, if any, and cancel its turns, whose calls do not count as unanswered."""
        self.keys = {key: grant for key, grant in self.keys.items() if grant.rollout != rollout}
        if (known := self._rollouts.get(rollout)) is not None:
            known.calls.close()
            for turn in known.turns:
                turn.cancel()

    def finish(self, rollout: str) -> None:
        """Forget a rollout, if known: revoke its key, cancel its turns and free its slot."""
        self.revoke(rollout)
        gone = self._rollouts.pop(rollout, None)
        self.dispatcher.apply(self.dispatcher.pool.drop(rollout, time.monotonic()))
        if gone is not None:
            self.metrics.finished(gone.history.ledger.branches)

    def _rollout(self, request: TurnRequest) -> RolloutState:
        self._forget()
        name = request.rollout
        if "/" in name or name in (".", ".."):
            raise CallerError(
                "must not contain '/', nor be '.' or '..', because it is part of the URL of the rollout's tokens",
                field="X-Rollout-Id",
            )
        if name in self._forgotten and name not in self._rollouts:
            own = [message for message in request.messages if message["role"] == "assistant"]
            if request.after is not None or any(not message.get("generation_token_ids") for message in own):
                raise RolloutGone(
                    f"the tokens of {name!r} were forgotten after {self._keep_s:g} s without a turn: raise keep_s",
                    field="rollout",
                )
            del self._forgotten[name]
        rollout = self._rollouts.get(name)
        if rollout is None:
            rollout = self._rollouts[name] = RolloutState(request.run)
        if rollout.run != request.run:
            raise CallerError(f"rollout {name!r} belongs to training {rollout.run or 'none'!r}", field="X-Rollout-Run")
        self._use(name, rollout)
        return rollout

    def _use(self, name: str, rollout: RolloutState) -> None:
        rollout.used_at = time.monotonic()
        if self._rollouts.get(name) is rollout:
            self._rollouts.move_to_end(name)

    def _forget(self) -> None:
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
        while len(self._forgotten) > _MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)

    def _with_template_effort(self, request: TurnRequest) -> TurnRequest:
        """Translate the reasoning effort into template variables; refuse an unsupported ``tool_choice`` or effort."""
        if self.renderer is None:
            return request
        if request.tool_choice not in (None, "none"):
            refuse(
                "tool_choice",
                "'auto' and 'none' are supported by an engine that takes tokens: a call that is forced by a grammar"
                " is not written in the policy's format; leave it out, or set policy.engine to 'vllm_chat'",
            )
            request = replace(request, tool_choice=None)
        if request.effort is None:
            return request
        # vLLM passes the same variables to templates.
        effort = {"reasoning_effort": request.effort, "enable_thinking": request.effort != "none"}
        if not any(name in self.renderer.template.source for name in effort):
            why = "the chat template uses neither reasoning_effort nor enable_thinking: leave it out"
            refuse("reasoning_effort", why)
        return replace(request, template_variables=effort | dict(request.template_variables))

    def _find_continued_turn(self, rollout: RolloutState, request: TurnRequest) -> ConversationMatch:
        """Return the turn that the request continues, and the messages after it."""
        lead: tuple[Message, ...] = ()
        if request.instructions:
            lead = ({"role": "system", "content": request.instructions},)
        if request.after is None:
            return rollout.history.find(self._with_roles((*lead, *request.messages)), request.tools)
        node = rollout.answers.get(request.after)
        if node is None:
            raise RolloutGone(f"the rollout has no answer {request.after!r}", field="previous_response_id")
        first, *given = ("\n\n".join([*role_and_text(one), ""]) for one in (node.messages[0], *lead))
        if not all(map(first.startswith, given)):  # system messages of the conversation may follow the instructions
            raise CallerError(
                "differ from those that the rollout began with: send the same or none", field="instructions"
            )
        # Without the continued turn in front, new system messages would be merged as if no turn had been sampled.
        return ConversationMatch(node, tuple(self._with_roles((node.messages[-1], *request.messages))[1:]))

    def _with_roles(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages if self._developers else merge_developer_messages(messages)

    async def _render(
        self, rollout: RolloutState, match: ConversationMatch, messages: Sequence[Message], request: TurnRequest
    ) -> tuple[Prompt, LedgerTurn | None, RenderedPrompt | None]:
        """Return the prompt, the turn that the prompt continues (``None`` at a beginning), and the record of the
        rendered text (``None`` if the engine renders the prompt).
        """
        if match.ambiguous:
            self._count(rollout, "ambiguous")
        if rollout.history.ledger.turns:
            self._count(rollout, "retokenised", rollout.history.retokenised(match.new))
        node, texts, variables = match.node, rollout.texts, request.template_variables
        if self.renderer is None:
            before = node.turn if node else None
            return texts.prompt(before, ()), before, None
        if node is not None:
            turn = node.turn
            continuation = await off_loop(
                match.new,
                self.renderer.render_continuation,
                node.messages,
                match.new,
                request.tools,
                sampled=turn.sampled,
                finish=turn.finish,
                previous_id=turn.observed[-1] if turn.observed else None,
                before=node.rendered_prompt,
                now=rollout.began,
                variables=variables,
            )
            rewrites = continuation.rewrites_history or list(node.tools) != list(request.tools)
            if rewrites:
                self._count(rollout, "rewrites")
            if continuation.corrected:
                self._count(rollout, "differences")
            if not rewrites or self.history == "keep":
                self._count(rollout, "neutralised", continuation.escaped_tokens)
                return texts.prompt(turn, continuation.ids), turn, continuation.rendered_prompt
        first = await off_loop(
            messages, self.renderer.render_prompt, messages, request.tools, now=rollout.began, variables=variables
        )
        self._count(rollout, "neutralised", first.escaped_tokens)
        return texts.prompt(None, first.ids), None, first.rendered_prompt

    def _count(self, rollout: RolloutState, what: str, number: int = 1) -> None:
        rollout.counts[what] += number
        self.metrics.counts[what].inc(number)

    def _check_calls(self, url: str, generation: Generation, request: TurnRequest) -> None:
        """Refuse an engine that should parse calls but leaves a call in the text of a final answer."""
        if (
            generation.message is None
            or not (request.tools and request.tool_choice != "none")
            or url in self._parses_calls
        ):
            return
        parsed = parsed_by_engine(generation.message)
        tools = {tool["function"]["name"] for tool in request.tools}
        if parsed.calls:
            self._parses_calls.add(url)
        elif generation.finish is Finish.STOP and (name := unparsed_tool_call(parsed.content, self.form, tools)):
            raise Misconfigured(
                f"{url} returned a call of {name} as the text of a final answer, so its tool parser is off. "
                "In NeMo RL set policy.generation.vllm_cfg.http_server_serving_chat_kwargs.tool_parser, "
                "start vLLM with --enable-auto-tool-choice --tool-call-parser; if the model writes calls otherwise, "
                "correct policy.tool_call_parser",
                field="tool_parser",
            )

    def _parse(
        self, rollout: RolloutState, generation: Generation, request: TurnRequest, prompt: Prompt, opened: str | None
    ) -> Parsed:
        """Return the parsed turn; for ``opened`` see :attr:`.RenderedPrompt.opened`."""
        if generation.message is not None:
            return parsed_by_engine(generation.message)
        assert self.renderer is not None
        tokenizer = self.renderer.tokenizer
        # The policy can sample ids of embedding padding, which have no text; the ids stay in the trained tokens.
        self._count(rollout, "unreadable", tokenizer.count_unreadable(generation.ids))
        text = self.renderer.turn_text(
            generation.ids,
            generation.finish,
            request.sampling.stop,
            variables=request.template_variables,
            previous_id=prompt.new[-1] if prompt.new else None,
        )
        parsed = parse(
            text,
            self.form,
            request.tools,
            reads_reasoning=self.reads_reasoning,
            in_reasoning=opened is not None,
            calls=bool(request.tools) and request.tool_choice != "none",
            cut=generation.finish is Finish.LENGTH,
        )
        reasoning = parsed.reasoning and tokenizer.strip_special_tokens(parsed.reasoning)
        return Parsed(reasoning, tokenizer.strip_special_tokens(parsed.content), parsed.calls)


def _new_id() -> str:
    return f"resp_{uuid.uuid4().hex}"
