# SPDX-License-Identifier: Apache-2.0
"""Messages to tokens, one turn at a time, for any chat template.

The policy's own tokens are kept as sampled, so after the first prompt only *new* messages need rendering. A template
is an arbitrary program over the whole conversation, though. Instead of knowing models by name we ask the template:
render a small stand-in conversation whose assistant turn holds a sentinel, once alone and once with the new messages
after it. What follows the sentinel in the second rendering is exactly what the template puts after an assistant turn.

Two more questions are answered the same way. *Which end-of-turn token would the template write?* The last special
token after the sentinel; the policy has usually sampled it (or another one) already, and it must not be there twice.
*Does the template rewrite history?* If what it renders before the sentinel changes once the new messages are there
(thoughts dropped, tool lists moved), the caller is told, and either keeps the history as sampled or starts a branch.

Invariant: the work per turn depends on the new messages, not on the length of the conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer as FastTokenizer

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.parsers import read_json
from nemo_gym_prorl.policy.tokens import Finish


type Message = Mapping[str, Any]
"""A chat message as templates know it: ``role``, ``content``, and for an assistant perhaps ``tool_calls``."""

type Tools = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's chat format."""

_TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"]


class Tokenizer:
    """Ids to text and back, without any token added on the way."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        added = fast.get_added_tokens_decoder()
        self.special = {token_id: token.content for token_id, token in added.items() if token.special}
        names = sorted(self.special.values(), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    @property
    def size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._fast.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self._fast.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included."""
        return self._fast.decode(list(ids), skip_special_tokens=False)

    def sample_text(self) -> str:
        """A text that hardly any other tokenizer reads as the same ids: special tokens, many scripts, code."""
        return "".join(self.special.values()) + "The façade's 日本語, Ωmega\n\n\tdef f(x): return 1234567890 # 🙂"

    def without_special(self, text: str) -> str:
        """The text without what looks like a special token."""
        return self._special_pattern.sub("", text)

    def last_special(self, text: str) -> int | None:
        """Where the last special token of the text starts."""
        matches = list(self._special_pattern.finditer(text))
        return matches[-1].start() if matches else None


class _Generation(jinja2.ext.Extension):
    """Accepts ``{% generation %}`` blocks, with which some templates mark what a trainer may learn from."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled Jinja chat template, run in a sandbox with the helpers that published templates expect."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "", **variables: object) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise_exception, strftime_now=lambda f: datetime.now().strftime(f))
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CallerError(f"not a Jinja template: {error}", field="chat_template") from error
        self._variables = {"bos_token": bos_token, "eos_token": eos_token, **variables}

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        prompt: bool,
        **variables: object,
    ) -> str:
        """The text of the messages; with ``prompt``, followed by the opening of an assistant turn.

        Raises:
            CallerError: the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=[_for_template(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=prompt,
                **self._variables,
                **variables,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise CallerError(f"the chat template refuses these messages: {error}", field="messages") from error


@dataclass(frozen=True, slots=True)
class Continuation:
    """What to append after a sampled turn.

    Attributes:
        ids: the rendered new messages with everything around them, up to the opening of the next assistant turn.
        rewrites_history: the template would now render an earlier message differently from what was sampled or seen.
    """

    ids: list[int]
    rewrites_history: bool


class Renderer:
    """Turns messages into token ids with one tokenizer and one chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.template = template

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
        template_file = Path(chat_template) if chat_template else folder / "chat_template.jinja"
        if template_file.is_file():
            template = template_file.read_text()
        elif chat_template:
            raise CallerError(f"no file {chat_template}", field="chat_template")
        else:
            template = _default_template(config.get("chat_template"))
        tokens = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token")}
        fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
        return cls(Tokenizer(fast), ChatTemplate(template, **tokens))

    def first(self, messages: Sequence[Message], tools: Tools = (), **variables: object) -> list[int]:
        """The prompt for a conversation that has no sampled turn yet, rendered in full."""
        return self.tokenizer.encode(self.template.render(messages, tools, prompt=True, **variables))

    def next(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Tools = (),
        *,
        last_sampled: int | None,
        finish: Finish,
        thoughts: bool = False,
        **variables: object,
    ) -> Continuation:
        """What follows a sampled turn.

        Args:
            history: the conversation up to and including the sampled assistant message; only its shape is used.
            new: the messages after it.
            tools: the tools as given to :meth:`first`.
            last_sampled: the last sampled id, if any was sampled.
            finish: why sampling ended.
            thoughts: the policy thought aloud in that turn.
        """
        sentinel, thought = _absent_from(new, "Sentinel"), _absent_from(new, "Thought")
        stub = _stand_in(history, sentinel, thought if thoughts else None)
        prompt = self.template.render(stub[:-1], tools, prompt=True, **variables)
        alone = self.template.render(stub, tools, prompt=False, **variables)
        full = self.template.render([*stub, *new], tools, prompt=True, **variables)
        cut = full.rfind(sentinel)
        if cut < 0 or sentinel not in alone:
            raise CallerError("the chat template drops the assistant message that was just sampled", field="messages")
        ending, tail = alone.rpartition(sentinel)[2], full[cut + len(sentinel) :]
        closing = self._closing(ending, [*stub[:-1], {"role": "assistant", "content": sentinel}], tools, variables)
        rewrites = not full.startswith(prompt) or (thoughts and thought not in full[len(prompt) : cut])
        if tail.startswith(closing):
            tail = tail[len(closing) :]
        else:
            rewrites = True
        ids = self.tokenizer.encode(tail)
        ended = finish is Finish.STOP and last_sampled in self.tokenizer.special
        if ended and ids and ids[0] in self.tokenizer.special:
            # The turn has its end already, perhaps another one than the template would write.
            ids = ids[1:]
        return Continuation(ids, rewrites)

    def opens_thought(self, tools: Tools, marker: str, **variables: object) -> bool:
        """Whether the opening of an assistant turn already holds the marker that starts a thought."""
        opening = self.template.render([{"role": "user", "content": "u"}], tools, prompt=True, **variables)
        return opening.rstrip().endswith(marker)

    def _closing(self, ending: str, plain: Sequence[Message], tools: Tools, variables: Mapping[str, object]) -> str:
        """The part of what follows the sentinel that the policy writes itself: quotes and brackets of a tool call."""
        end_of_turn = self.tokenizer.last_special(ending)
        if end_of_turn is not None:
            return ending[:end_of_turn]
        text = self.template.render(plain, tools, prompt=False, **variables)
        return ending.removesuffix(text.rpartition(str(plain[-1]["content"]))[2])


def _absent_from(messages: Sequence[Message], word: str) -> str:
    """A made-up word that the messages do not contain."""
    text = json.dumps(messages, ensure_ascii=False, default=str)
    while word in text:
        word += "Z"
    return word


def _stand_in(history: Sequence[Message], sentinel: str, thought: str | None) -> list[Message]:
    """A conversation of the same shape but constant size, which ends with a sentinel in the assistant's place.

    It keeps the system message's presence, one user message and, where tools were used before, one earlier exchange
    with a tool, because templates look at exactly these; and the real ids and names of the last tool calls.
    """
    stub: list[Message] = []
    if history[0]["role"] in ("system", "developer"):
        stub.append({"role": history[0]["role"], "content": "s"})
    stub.append({"role": "user", "content": "u"})
    if any(message["role"] == "tool" for message in history):
        call = {"id": "sentinel0", "type": "function", "function": {"name": "t", "arguments": {"a": "b"}}}
        stub.append({"role": "assistant", "content": "", "tool_calls": [call]})
        stub.append({"role": "tool", "tool_call_id": "sentinel0", "name": "t", "content": "o"})
    last: dict[str, Any] = {"role": "assistant", "content": sentinel}
    if thought is not None:
        last["content"] = f"<think>\n{thought}\n</think>\n\n{sentinel}"
    if calls := history[-1].get("tool_calls"):
        last["tool_calls"] = [
            {**call, "function": {"name": call["function"]["name"], "arguments": {"a": sentinel}}} for call in calls
        ]
    return [*stub, last]


def text_of(content: object) -> str:
    """The text of a message, which may come in parts.

    Raises:
        CallerError: a part is no text.
    """
    if isinstance(content, list):
        for part in content:
            if part.get("type") not in ("text", "input_text", "output_text"):
                raise CallerError(f"only text is supported, not {part.get('type')!r}", field="messages.content")
        return "".join(part["text"] for part in content)
    return str(content or "")


def _for_template(message: Message) -> Message:
    """Templates want text where the wire may carry parts, and a tool call's arguments as an object, not as JSON."""
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    plain["content"] = text_of(message.get("content"))
    if not message.get("tool_calls"):
        return plain
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = _object(arguments)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**plain, "tool_calls": calls}


def _object(arguments: str) -> Mapping[str, Any]:
    """A call's arguments; templates go through the names of an object, which a malformed call may lack."""
    try:
        value = read_json(arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"malformed": arguments}


def _default_template(templates: object) -> str:
    """The template of a tokenizer config, which may hold one or a list of named ones."""
    if isinstance(templates, list):
        named = {entry["name"]: entry["template"] for entry in templates}
        templates = named.get("tool_use", named.get("default"))
    if not isinstance(templates, str):
        raise CallerError("the tokenizer has no chat template: give one", field="chat_template")
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


def _to_json(value: object, indent: int | None = None, **_: object) -> str:
    # Jinja's own filter escapes for HTML; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
