# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A model's chat template: a Jinja program over the whole conversation, run in a sandbox with the helpers that
published templates expect, and with messages, tools and the time of day as vLLM gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.text.messages import Message, Tools, for_template, tool_for_template
from nemo_gym_prorl.policy.text.seam import Render


_REFUSALS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError),
    RecursionError,  # macros that descend a JSON schema without end
    *(MemoryError, RuntimeError),
)


class _Generation(jinja2.ext.Extension):
    """Accepts ``{% generation %}`` blocks, with which some templates mark what a trainer may learn from."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled Jinja chat template, run in a sandbox with the helpers that published templates expect.

    Args:
        source: the template.
        with_tools: the one that is taken instead where tools are offered, if the model has one.
        bos_token: variable of the template.
        eos_token: variable of the template.
        variables: further ones.
    """

    def __init__(
        self, source: str, with_tools: str | None = None, *, bos_token: str = "", eos_token: str = "", **variables: Any
    ) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise_exception)
        self.source = source + (with_tools or "")
        self.eos_token = eos_token
        try:
            self._template = environment.from_string(source)
            self._with_tools = self._template
            if with_tools is not None:
                self._with_tools = environment.from_string(with_tools)
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise CallerError(f"not a Jinja template: {error}", field="chat_template") from error
        self._variables = {"bos_token": bos_token, "eos_token": eos_token, **variables}

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        prompt: bool,
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of the messages; with ``prompt``, followed by the opening of an assistant turn.

        Args:
            messages: the conversation.
            tools: tools in OpenAI's chat format.
            prompt: whether an assistant turn is opened.
            now: the time of day that the template may ask for; by default the real one. A conversation needs one for
                all its turns, or it would be rewritten at midnight.
            variables: further variables of the template.

        Raises:
            CallerError: the template refuses the messages.
        """
        return self.writer(tools, now, variables)([for_template(message) for message in messages], prompt)

    def writer(
        self,
        tools: Tools = (),
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Render:
        """The same for several renderings of messages that are in the template's form already.

        Args:
            tools: as in :meth:`render`.
            now: as in :meth:`render`.
            variables: as in :meth:`render`.
        """
        plain = [tool_for_template(tool) for tool in tools] or None
        given = {**self._variables, **(variables or {}), "tools": plain}
        clock = (now or datetime.now()).strftime
        template = self._with_tools if plain else self._template

        def write(messages: Sequence[Message], prompt: bool) -> str:
            of_turn = {"messages": messages, "add_generation_prompt": prompt, "strftime_now": clock}
            try:
                return template.render({**given, **of_turn})
            except _REFUSALS as error:
                raise CallerError(f"the chat template refuses these messages: {error}", field="messages") from error

        return write


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
