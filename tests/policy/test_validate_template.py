# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Templates are validated at the start, and unsupported ones are refused by name; loading of named templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.engines.engine import Sampling
from nemo_gym_prorl.policy.text.renderer import Renderer
from nemo_gym_prorl.policy.text.validate_template import UnsupportedTemplate, validate_template
from nemo_gym_prorl.policy.turns import TurnRequest
from tests.policy.families import FAMILIES, TOOLS
from tests.policy.runtimes import hosted
from tests.policy.scripted_engine import ScriptedEngine, saved
from tests.policy.test_templates import CHATML, USER, WITHOUT_TOOLS, renderer, source
from tests.policy.tokenizers import KINDS, tokenizer_of
from tests.rollout.serving import serve as serving


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_can_be_followed_with_every_kind_of_tokenizer(name: str, kind: str) -> None:
    family = FAMILIES[name]
    chat = renderer(source(name), family.stop, family.call_stop or "", kind=kind)
    validate_template(chat, family.tool_format)
    assert chat.single_call_only == (name == "headers")


@pytest.mark.parametrize(
    ("change", "tool_format", "why"),
    [
        (("", ""), "llama3_json", "tool_call_parser 'llama3_json' does not read the template's calls, 'hermes' does"),
        (("message.content or ''", "'' if message.role == 'tool' else message.content"), "hermes", "results of tools"),
        (("message.tool_calls or []", "[]"), "hermes", "the template drops the policy's calls"),
        (("message.content or ''", "message.content if message.role != 'assistant'"), "plain", "the policy's text"),
        (
            ("message.content or ''", "message.parts[0].text"),
            "plain",
            "the template refuses an answer and another question",
        ),
        (
            ("call.function.arguments}", "call.nothing.at.all}"),
            "hermes",
            "the template refuses a call and its result: messages: the chat template refuses",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(change: tuple[str, str], tool_format: str, why: str) -> None:
    text = CHATML.replace(*change) if change[0] else CHATML
    assert (text == CHATML) is not bool(change[0])
    with pytest.raises(UnsupportedTemplate, match=r"chat_template: .* turn by turn") as refused:
        validate_template(renderer(text, "<|channel|>"), tool_format)
    assert why in str(refused.value)


def test_a_template_that_is_for_tools_only_is_tried_out_with_tools() -> None:
    text = CHATML.replace(
        "{%- if tools %}", "{%- if not tools %}{{ raise_exception('tools!') }}{% endif %}{%- if tools %}"
    )
    validate_template(renderer(text), "hermes")
    with pytest.raises(UnsupportedTemplate, match=r"the template refuses an answer and another question: .*tools!"):
        validate_template(renderer(text), "plain")


def test_a_tokenizer_that_gives_another_text_back_is_refused() -> None:
    chat = renderer(CHATML)
    chat.tokenizer._fast.decoder = None
    with pytest.raises(UnsupportedTemplate, match="the tokenizer decodes"):
        validate_template(chat, "hermes")


def folder_of(tmp_path: Path, text: str) -> str:
    return saved(tmp_path, tokenizer_of("bytes", CHATML, WITHOUT_TOOLS), text)


async def test_the_server_does_not_start_with_a_template_that_cannot_be_followed_and_must_be(tmp_path: Path) -> None:
    settings = {"tokenizer": folder_of(tmp_path, CHATML), "tool_call_parser": "mistral"}
    with pytest.raises(UnsupportedTemplate, match="'hermes' does"):
        async with hosted("http://127.0.0.1:9", engine="vllm", **settings):
            pass
    async with hosted("http://127.0.0.1:9", engine="vllm_chat", **settings) as host:
        assert host.service.renderer is None


async def test_tools_that_the_template_shows_to_nobody_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, WITHOUT_TOOLS)
    engine = ScriptedEngine(tokenizer_of("bytes", CHATML, WITHOUT_TOOLS), iter(["a<|end|>"]))
    async with serving(engine.app()) as url, hosted(url, tokenizer=folder) as host:
        with pytest.raises(CallerError, match="tools: the chat template does not render tools"):
            await host.service.turn(TurnRequest("r", (USER,), tools=TOOLS, sampling=Sampling(max_tokens=9)))
        answer = await host.service.turn(TurnRequest("r", (USER,), sampling=Sampling(max_tokens=9)))
        assert answer.message["content"] == "a"


NAMED = {"default": "{{ 'plain ' + messages[0].content }}", "tool_use": "{{ 'tools ' + tools | tojson }}"}


@pytest.mark.parametrize("where", ["config", "files", "files and config"])
def test_named_templates_are_chosen_by_whether_tools_are_offered(where: str, tmp_path: Path) -> None:
    folder = Path(folder_of(tmp_path, NAMED["default"]))
    if "config" in where:
        (folder / "chat_template.jinja").unlink()
        listed = [{"name": name, "template": text} for name, text in NAMED.items()]
        config: Any = listed if where == "config" else NAMED["default"]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": config}))
    if "files" in where:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(NAMED["tool_use"])
    chat = Renderer.load(str(folder))
    assert chat.template.render([USER], prompt=True) == "plain q"
    assert chat.template.render([USER], TOOLS, prompt=True).startswith("tools [{")
    file = tmp_path / "mine.jinja"
    file.write_text("mine")
    assert Renderer.load(str(folder), str(file)).template.render([USER], TOOLS, prompt=True) == "mine"


def test_named_templates_without_a_default_one_are_refused(tmp_path: Path) -> None:
    folder = Path(folder_of(tmp_path, ""))
    (folder / "chat_template.jinja").rename(folder / "rag.jinja")
    (folder / "additional_chat_templates").mkdir()
    (folder / "rag.jinja").rename(folder / "additional_chat_templates" / "rag.jinja")
    with pytest.raises(CallerError, match="chat_template: the tokenizer has no chat template: it has only rag"):
        Renderer.load(str(folder))
