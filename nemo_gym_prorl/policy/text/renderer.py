# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Messages to tokens, one turn at a time, for any chat template.

The policy's own tokens are kept as sampled, so after the first prompt only *new* messages are tokenised. What stands
between a sampled turn and them is asked of the template itself (:mod:`.turn_boundary`). Templates get messages, tools
and the time of day as from vLLM, so that a first prompt is to the token what vLLM makes of the same conversation.

If what the template renders before the turn boundary changes once the new messages are there (thoughts dropped, tool
lists moved), it *rewrites history*. The caller is told, and keeps the history as sampled or starts a branch.

Control tokens in observations stay text (:class:`EscapedSpecials`). A tokenizer reads ``<|im_end|>`` in a web page as
the token that ends a turn: the page's author could end the policy's turn and speak as its user. So a control token in
an observation is hidden from the template behind a made-up word, found again in what the template wrote, and encoded
as ordinary characters. Observations are results of tools, and what others say after the policy's first answer, since
many agents report what they saw as a user. Rows of a data set are their author's own. Control tokens are the special
ones; in results of tools also added tokens that the template itself writes, since some models do not mark all of
theirs as special.

Invariant: the tokens made per turn depend on the new messages, not on the length of the conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
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


_RESULTS = ("tool", "function", "ipython")


class EscapedSpecials:
    """Control tokens in observations, each behind a word of its own.

    Attributes:
        messages: the messages with the words in place of the tokens.
    """

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        special: re.Pattern[str],
        control: re.Pattern[str],
        *,
        answered: bool,
    ) -> None:
        """
        Args:
            messages: the conversation or its new end, contents as text.
            special: matches what is hidden in what others say.
            control: matches what is hidden in results of tools.
            answered: the policy has answered before the first of the messages.
        """
        self._texts: list[str] = []
        self._word = ""
        self.messages: list[Mapping[str, Any]] = []
        for message in messages:
            pattern = control if message["role"] in _RESULTS else special
            answered = answered or message["role"] == "assistant"
            observed = message["role"] in _RESULTS or (answered and message["role"] != "assistant")
            if observed and pattern.search(message["content"]):
                self._word = self._word or _absent_from(messages)
                message = {**message, "content": pattern.sub(self._hide, message["content"])}
            self.messages.append(message)

    def reveal(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """The text with the tokens back in their places, and where those are."""
        if not self._texts:
            return text, []
        plain, places, end = [], [], 0
        length = 0
        for found in re.finditer(rf"{self._word}(\d+)x", text):
            token = self._texts[int(found[1])]
            before = text[end : found.start()]
            plain += [before, token]
            places.append((length + len(before), length + len(before) + len(token)))
            length, end = places[-1][1], found.end()
        return "".join(plain) + text[end:], places

    def _hide(self, token: re.Match[str]) -> str:
        self._texts.append(token[0])
        return f"{self._word}{len(self._texts) - 1}x"


def _absent_from(messages: Sequence[Mapping[str, Any]]) -> str:
    text, word = json.dumps(messages, ensure_ascii=False, default=str), "Control"
    while word in text:
        word += "Z"
    return word


_NAMED = "additional_chat_templates"
_TOKENIZER_FILES = [
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"),
    f"{_NAMED}/*.jinja",
]
PROBE_NAME = "rehearse"
PROBE: Tools = [
    {
        "type": "function",
        "function": {
            "name": PROBE_NAME,
            "description": "Play it.",
            "parameters": {"type": "object", "properties": {"part": {"type": "string"}}, "required": ["part"]},
        },
    }
]
"""A tool with which a template is tried out."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """What to append after a sampled turn, or a whole first prompt.

    Attributes:
        ids: the rendered new messages with everything around them, up to the opening of the next assistant turn.
        rewrites_history: the template would now render an earlier message differently from what was sampled or seen.
        differs: the template's rendering of the whole conversation had to correct what its stand-ins showed.
        neutralised: control tokens that observations spelled, encoded as ordinary characters.
        written: the conversation up to there as the template wrote it, for the next turn.
    """

    ids: list[int]
    written: RenderedPrompt
    rewrites_history: bool = False
    differs: bool = False
    neutralised: int = 0


class Renderer:
    """Turns messages into token ids with one tokenizer and one chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.thought_marker = "<think>"
        """Opens a thought, in this model's words."""
        self._controls = tokenizer.controls(template.source)

    @classmethod
    def load(cls, source: str, chat_template: str | None = None) -> Renderer:
        """From a folder with ``tokenizer.json``, or from a model name in the Hugging Face cache or hub.

        Args:
            source: folder or model name.
            chat_template: file of a Jinja template that replaces the model's own.

        Raises:
            CallerError: there is no tokenizer or no template, or they cannot be read.
        """
        folder = Path(source)
        if not folder.is_dir():
            folder = _download(source)
        if not (folder / "tokenizer.json").is_file():
            raise CallerError(f"no tokenizer.json in {folder}", field="tokenizer")
        config_file = folder / "tokenizer_config.json"
        config = json.loads(config_file.read_text()) if config_file.is_file() else {}
        if chat_template is None:
            templates = _templates(folder, config.get("chat_template"))
        elif Path(chat_template).is_file():
            templates = {"default": Path(chat_template).read_text()}
        else:
            raise CallerError(f"no file {chat_template}", field="chat_template")
        if "default" not in templates:
            named = f": it has only {', '.join(templates)}" if templates else ""
            raise CallerError(f"the tokenizer has no chat template{named}; give one", field="chat_template")
        tokens = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token")}
        fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
        template = ChatTemplate(templates["default"], templates.get("tool_use"), **tokens)
        return cls(Tokenizer(fast), template)

    @cached_property
    def shows_tools(self) -> bool:
        """Whether a prompt says which tools there are; a template that refuses the question says so itself."""
        try:
            return PROBE_NAME in self.template.render([{"role": "user", "content": "u"}], PROBE, prompt=True)
        except CallerError:
            return True

    @cached_property
    def example(self) -> str:
        """A prompt, or nothing where the template refuses one."""
        try:
            return self.template.render([{"role": "user", "content": "u"}], prompt=True)
        except CallerError:
            return ""

    @cached_property
    def one_call(self) -> bool:
        """Whether the template refuses a turn of several calls, as Llama 3's does: it has room for the first."""
        return self._takes_calls(1) and not self._takes_calls(2)

    def _takes_calls(self, count: int) -> bool:
        ids = [f"probe{number:04}" for number in range(count)]
        function = {"name": PROBE_NAME, "arguments": json.dumps({"part": "p"})}
        calls = [{"id": name, "type": "function", "function": function} for name in ids]
        results: list[Message] = [{"role": "tool", "tool_call_id": name, "content": "r"} for name in ids]
        asked: Message = {"role": "user", "content": "u"}
        try:
            self.template.render(
                [asked, {"role": "assistant", "content": "", "tool_calls": calls}, *results], PROBE, prompt=True
            )
        except CallerError:
            return False
        return True

    @property
    def wants_tools(self) -> bool:
        """Whether nothing can be asked without tools, as with a template that is for tools only."""
        try:
            self.template.render([{"role": "user", "content": "u"}], prompt=True)
        except CallerError:
            return self.shows_tools
        return False

    def first(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Continuation:
        """The prompt for a conversation that has no sampled turn yet, rendered in full."""
        plain = self._plain(messages)
        spelled = self._spelled(plain, answered=False)
        text, places = spelled.reveal(self.template.writer(tools, now, variables)(spelled.messages, True))
        ids, neutralised = self.tokenizer.encode_observed(text, places)
        return Continuation(ids, RenderedPrompt.of(text, plain, self.thought_marker), neutralised=neutralised)

    def next(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Tools = (),
        *,
        sampled: Sequence[int],
        finish: Finish,
        behind: int | None = None,
        before: RenderedPrompt | None = None,
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Continuation:
        """What follows a sampled turn.

        Args:
            history: the conversation up to and including the sampled assistant message.
            new: the messages after it.
            tools: the tools as given to :meth:`first`.
            sampled: the ids of that turn.
            finish: why sampling ended.
            behind: the last id of its prompt.
            before: the prompt of that turn, whose messages are the first of the history; without it the prompt is
                rendered again.
            now: the time as given to :meth:`first`.
            variables: the variables as given to :meth:`first`.

        Raises:
            CallerError: the template refuses the messages.
        """
        known = tuple(before.plain) if before is not None else ()
        past, coming = (*known, *self._plain(history[len(known) :])), self._plain(new)
        spelled = self._spelled(coming, answered=True)
        plain = not any(is_malformed(call["function"]) for call in history[-1].get("tool_calls") or ())
        end = self.tokenizer.special.get(sampled[-1], "") if sampled else ""
        said = SampledTurn(self.tokenizer.decode(sampled, behind), end, finish is Finish.STOP, plain)
        write = self.template.writer(tools, now, variables)
        boundary = find_turn_boundary(write, past, spelled.messages, said, self.tokenizer.special_pattern, before)
        last = sampled[-1] if sampled else behind
        ids, neutralised = self.tokenizer.encode_observed(*spelled.reveal(boundary.text), last)
        written = RenderedPrompt.of(spelled.reveal(boundary.full)[0], past + coming, self.thought_marker)
        return Continuation(ids, written, boundary.rewrites, boundary.differs, neutralised)

    def said(
        self,
        sampled: Sequence[int],
        finish: Finish,
        stop: Sequence[str] = (),
        variables: Mapping[str, Any] | None = None,
        behind: int | None = None,
    ) -> str:
        """The text of a sampled turn without what ended it: a token, a stop string, the template's own end. ``behind``
        is the last id of its prompt."""
        text = self.tokenizer.decode(sampled, behind)
        if finish is not Finish.STOP:
            return text
        if sampled and sampled[-1] in self.tokenizer.special:
            return self.tokenizer.without_end(sampled, text, behind)
        # Engines look for a stop string where the last token may have completed it (with min_tokens, not before).
        before = len(self.tokenizer.decode(sampled[:-1], behind))
        ends = (text.find(one, max(0, before - len(one) + 1)) for one in stop if one)
        cut = min((at for at in ends if at >= 0), default=len(text))
        end = end_of_turn(self.template.writer(variables=variables), self.tokenizer.special_pattern)
        shared = overlap(text, end)
        return text[: min(cut, len(text) - shared if end[:shared].strip() else cut)]

    def _plain(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        plain = map(for_template, messages)
        return tuple(plain if self.thought_marker == "<think>" else map(with_reasoning, plain))

    def _spelled(self, plain: Sequence[Message], *, answered: bool) -> EscapedSpecials:
        return EscapedSpecials(plain, self.tokenizer.special_pattern, self._controls, answered=answered)


def _templates(folder: Path, config: object) -> dict[str, str]:
    """A tokenizer's templates by their names: files, and what its config holds, one or a list of named ones."""
    templates = {"default": config} if isinstance(config, str) else {}
    if isinstance(config, list):
        templates = {entry["name"]: entry["template"] for entry in config}
    templates |= {file.stem: file.read_text() for file in sorted((folder / _NAMED).glob("*.jinja"))}
    if (file := folder / "chat_template.jinja").is_file():
        templates["default"] = file.read_text()
    return templates


def _token_text(token: object) -> str:
    """A special token of a tokenizer config: text, or an object with the text in it."""
    if isinstance(token, dict):
        return str(token["content"])
    return str(token or "")


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_TOKENIZER_FILES))
    except (OSError, ValueError) as error:
        raise CallerError(
            f"neither a folder nor a model that can be fetched: {name} ({error})", field="tokenizer"
        ) from error
