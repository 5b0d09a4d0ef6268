# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Render messages to tokens, one turn at a time, for any chat template.

The policy's own tokens are kept as sampled, so after the first prompt only *new* messages are tokenised. The text
between a sampled turn and new messages comes from the template itself (:mod:`.turn_boundary`). Templates receive
messages, tools and the time of day in vLLM's form, so a first prompt has exactly the tokens that vLLM renders for the
same conversation.

A template *rewrites history* if new messages change its rendering of earlier messages (the template drops reasoning,
or moves the list of tools). The caller learns of a rewrite, and keeps the history as sampled or starts a branch.

Control tokens in observations stay text (:class:`EscapedSpecials`). A tokenizer reads ``<|im_end|>`` in a web page as
the token that ends a turn, so the page's author could end the policy's turn and speak as its user. A control token in
an observation is therefore replaced by a placeholder word before rendering, restored in the rendered text, and encoded
as ordinary characters.

Observations are results of tools, and messages of other roles after the policy's first answer, because many agents
report results as a user. Rows of a data set are trusted. Control tokens are the special tokens; in results of tools
also added tokens that the template itself writes, since some models do not mark all of these as special.

Invariant: the number of tokens encoded per turn depends on the new messages, not on the length of the conversation.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.text.template import (
    ChatTemplate,
    Message,
    Tools,
    for_template,
    is_malformed,
    role_and_text,
    with_reasoning,
)
from nemo_gym_prorl.policy.text.tokenizer import Tokenizer
from nemo_gym_prorl.policy.text.turn_boundary import (
    RenderedPrompt,
    SampledTurn,
    end_of_turn,
    find_turn_boundary,
    overlap,
)


LONG_CHARS = 64 << 10
"""Characters of new messages from which rendering runs in a thread, to avoid blocking the event loop."""

_RESULT_ROLES = ("tool", "function", "ipython")


async def off_loop[**P, T](new: Sequence[Message], render: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call ``render``, in a thread if new messages have :data:`LONG_CHARS` or more. Tokenizers release the GIL."""
    if sum(len(role_and_text(message)[1]) for message in new) < LONG_CHARS:
        return render(*args, **options)
    return await asyncio.to_thread(render, *args, **options)


class EscapedSpecials:
    """Replacement of control tokens in observations by placeholder words.

    Args:
        messages: the conversation, or only its new messages, with contents as text.
        special: pattern of the tokens to escape in messages that are not results of tools.
        control: pattern of the tokens to escape in results of tools.
        answered: whether the policy has answered before the first of the messages.

    Attributes:
        messages: the messages with the placeholders.
    """

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        special: re.Pattern[str],
        control: re.Pattern[str],
        *,
        answered: bool,
    ) -> None:
        self._texts: list[str] = []
        self._word = ""
        self.messages: list[Mapping[str, Any]] = []
        for message in messages:
            pattern = control if message["role"] in _RESULT_ROLES else special
            answered = answered or message["role"] == "assistant"
            observed = message["role"] in _RESULT_ROLES or (answered and message["role"] != "assistant")
            if observed and pattern.search(message["content"]):
                self._word = self._word or _absent_from(messages)
                message = {**message, "content": pattern.sub(self._hide, message["content"])}
            self.messages.append(message)

    def reveal(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """Return a rendered text with its control tokens in place of the placeholders, and their character ranges."""
        if not self._texts:
            return text, []
        plain, ranges, end = [], [], 0
        length = 0
        for found in re.finditer(rf"{self._word}(\d+)x", text):
            token = self._texts[int(found[1])]
            before = text[end : found.start()]
            plain += [before, token]
            ranges.append((length + len(before), length + len(before) + len(token)))
            length, end = ranges[-1][1], found.end()
        return "".join(plain) + text[end:], ranges

    def _hide(self, token: re.Match[str]) -> str:
        self._texts.append(token[0])
        return f"{self._word}{len(self._texts) - 1}x"


def _absent_from(messages: Sequence[Mapping[str, Any]]) -> str:
    text, word = json.dumps(messages, ensure_ascii=False, default=str), "Control"
    while word in text:
        word += "Z"
    return word


_NAMED_TEMPLATES = "additional_chat_templates"
_TOKENIZER_FILES = [
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"),
    f"{_NAMED_TEMPLATES}/*.jinja",
]
PROBE_TOOL_NAME = "rehearse"
PROBE_TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": PROBE_TOOL_NAME,
            "description": "Play it.",
            "parameters": {"type": "object", "properties": {"part": {"type": "string"}}, "required": ["part"]},
        },
    }
]
"""Tool of the made-up conversations that validate a template."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens after a sampled turn, or a whole first prompt.

    Attributes:
        ids: the rendered new messages with all text around them, up to the opening of the next assistant turn.
        rendered_prompt: record of the whole rendered conversation, for the next turn.
        rewrites_history: whether the template now renders an earlier message differently from its tokens.
        corrected: whether the rendering of the whole conversation corrected the boundary located by placeholders.
        escaped_tokens: number of control tokens in observations that were encoded as ordinary characters.
    """

    ids: list[int]
    rendered_prompt: RenderedPrompt
    rewrites_history: bool = False
    corrected: bool = False
    escaped_tokens: int = 0


class Renderer:
    """Renderer of messages to token ids, with one tokenizer and one chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.reasoning_marker = "<think>"
        """Marker that opens reasoning in this model's format."""
        self._controls = tokenizer.control_tokens_pattern(template.source)

    @classmethod
    def load(cls, source: str, chat_template: str | None = None) -> Renderer:
        """Load a folder with ``tokenizer.json``, or a model name from the Hugging Face cache or hub.

        Args:
            source: folder or model name.
            chat_template: file of a Jinja template that replaces the model's own.

        Raises:
            CallerError: the tokenizer or the template is missing, or the template is not Jinja.
        """
        folder = Path(source)
        if not folder.is_dir():
            folder = _download(source)
        if not (folder / "tokenizer.json").is_file():
            raise CallerError(
                f"no tokenizer.json in {folder}: name a folder with one, or a Hugging Face model", field="tokenizer"
            )
        config_file = folder / "tokenizer_config.json"
        config = json.loads(config_file.read_text()) if config_file.is_file() else {}
        if chat_template is None:
            templates = _templates(folder, config.get("chat_template"))
        elif Path(chat_template).is_file():
            templates = {"default": Path(chat_template).read_text()}
        else:
            raise CallerError(f"no file {chat_template}: name a Jinja template", field="chat_template")
        if "default" not in templates:
            named = f": it has only {', '.join(templates)}" if templates else ""
            raise CallerError(
                f"the tokenizer has no chat template{named}: set policy.chat_template", field="chat_template"
            )
        tokens = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token")}
        fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
        template = ChatTemplate(templates["default"], templates.get("tool_use"), **tokens)
        return cls(Tokenizer(fast), template)

    @cached_property
    def shows_tools(self) -> bool:
        """Return whether a prompt lists the offered tools; true if the template refuses a made-up message."""
        try:
            return PROBE_TOOL_NAME in self.template.render(
                [{"role": "user", "content": "u"}], PROBE_TOOLS, prompt=True
            )
        except CallerError:
            return True  # rendering the real messages reports the error

    @cached_property
    def sample_prompt(self) -> str:
        """A prompt of one user message; empty if the template refuses the message."""
        try:
            return self.template.render([{"role": "user", "content": "u"}], prompt=True)
        except CallerError:
            return ""

    @cached_property
    def single_call_only(self) -> bool:
        """Return whether the template refuses a turn of several calls, as Llama 3's does."""
        return self._renders_calls(1) and not self._renders_calls(2)

    def _renders_calls(self, count: int) -> bool:
        ids = [f"probe{number:04}" for number in range(count)]
        function = {"name": PROBE_TOOL_NAME, "arguments": json.dumps({"part": "p"})}
        calls = [{"id": name, "type": "function", "function": function} for name in ids]
        results: list[Message] = [{"role": "tool", "tool_call_id": name, "content": "r"} for name in ids]
        asked: Message = {"role": "user", "content": "u"}
        try:
            self.template.render(
                [asked, {"role": "assistant", "content": "", "tool_calls": calls}, *results], PROBE_TOOLS, prompt=True
            )
        except CallerError:
            return False
        return True

    def render_prompt(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Continuation:
        """Render the prompt of a conversation without sampled turns; arguments as in :meth:`ChatTemplate.render`.

        Raises:
            CallerError: the template refuses the messages.
        """
        escaped = self._escape_observations(self._plain(messages), answered=False)
        text, ranges = escaped.reveal(self.template.writer(tools, now, variables)(escaped.messages, True))
        ids, escaped_tokens = self.tokenizer.encode_observed(text, ranges)
        return Continuation(ids, RenderedPrompt.of(text, self.reasoning_marker), escaped_tokens=escaped_tokens)

    def render_continuation(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Tools = (),
        *,
        sampled: Sequence[int],
        finish: Finish,
        previous_id: int | None = None,
        before: RenderedPrompt | None = None,
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Continuation:
        """Render the messages after a sampled turn, with the same tools, time and variables as its prompt.

        Args:
            history: the conversation up to and including the sampled assistant message.
            new: the messages after the turn.
            tools: as in :meth:`ChatTemplate.render`, as are ``now`` and ``variables``.
            sampled: token ids of the sampled turn.
            finish: why sampling ended.
            previous_id: the last id of the turn's prompt.
            before: the prompt of the turn; rendered again if ``None``.

        Raises:
            CallerError: the template refuses the messages.
        """
        escaped = self._escape_observations(self._plain(new), answered=True)
        plain = not any(is_malformed(call["function"]) for call in history[-1].get("tool_calls") or ())
        end = self.tokenizer.special.get(sampled[-1], "") if sampled else ""
        sampled_turn = SampledTurn(self.tokenizer.decode(sampled, previous_id), end, finish is Finish.STOP, plain)
        write = self.template.writer(tools, now, variables)
        boundary = find_turn_boundary(
            write, self._plain(history), escaped.messages, sampled_turn, self.tokenizer.special_pattern, before
        )
        last = sampled[-1] if sampled else previous_id
        ids, escaped_tokens = self.tokenizer.encode_observed(*escaped.reveal(boundary.text), last)
        rendered = RenderedPrompt.of(escaped.reveal(boundary.full)[0], self.reasoning_marker)
        return Continuation(ids, rendered, boundary.rewrites, boundary.corrected, escaped_tokens)

    def turn_text(
        self,
        sampled: Sequence[int],
        finish: Finish,
        stop: Sequence[str] = (),
        variables: Mapping[str, Any] | None = None,
        previous_id: int | None = None,
    ) -> str:
        """Return the text of a sampled turn without its end: a token, a stop string, or the template's own end of
        turn. A turn that a limit cut off is returned whole. ``previous_id`` is the last id of the turn's prompt.
        """
        text = self.tokenizer.decode(sampled, previous_id)
        if finish is not Finish.STOP:
            return text
        if sampled and sampled[-1] in self.tokenizer.special:
            return self.tokenizer.strip_end_token(sampled, text, previous_id)
        # With min_tokens an engine ignores early stop strings, so only a stop string at the last token ends the turn.
        before = len(self.tokenizer.decode(sampled[:-1], previous_id))
        ends = (text.find(one, max(0, before - len(one) + 1)) for one in stop if one)
        cut = min((at for at in ends if at >= 0), default=len(text))
        end = end_of_turn(self.template.writer(variables=variables), self.tokenizer.special_pattern)
        shared = overlap(text, end)
        return text[: min(cut, len(text) - shared if end[:shared].strip() else cut)]

    def _plain(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        plain = map(for_template, messages)
        return tuple(plain if self.reasoning_marker == "<think>" else map(with_reasoning, plain))

    def _escape_observations(self, plain: Sequence[Message], *, answered: bool) -> EscapedSpecials:
        return EscapedSpecials(plain, self.tokenizer.special_pattern, self._controls, answered=answered)


def _templates(folder: Path, config: object) -> dict[str, str]:
    """Return a tokenizer's templates by name, from files and from its config (one template, or a list)."""
    templates = {"default": config} if isinstance(config, str) else {}
    if isinstance(config, list):
        templates = {entry["name"]: entry["template"] for entry in config}
    templates |= {file.stem: file.read_text() for file in sorted((folder / _NAMED_TEMPLATES).glob("*.jinja"))}
    if (file := folder / "chat_template.jinja").is_file():
        templates["default"] = file.read_text()
    return templates


def _token_text(token: object) -> str:
    if isinstance(token, dict):
        return str(token["content"])
    return str(token or "")


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_TOKENIZER_FILES))
    except (OSError, ValueError) as error:
        raise CallerError(
            f"neither a folder nor a model that can be downloaded: {name} ({error})", field="tokenizer"
        ) from error
