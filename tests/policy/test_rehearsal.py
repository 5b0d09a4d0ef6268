# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Templates that cannot be followed are refused by name at the start; named ones are chosen as vLLM chooses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.engines.engine import Sampling
from nemo_gym_prorl.policy.text.renderer import Renderer
from nemo_gym_prorl.policy.text.template import ChatTemplate
from nemo_gym_prorl.policy.text.validate_template import CannotFollow, validate_template
from nemo_gym_prorl.policy.turns import TurnRequest
from tests.policy.families import FAMILIES, TEMPLATES, TOOLS
from tests.policy.hosts import hosted
from tests.policy.test_engines import completion, says
from tests.policy.tokenizers import KINDS, tokenizer_of
from tests.rollout.serving import serve as serving


USER = {"role": "user", "content": "q"}
CHATML = (TEMPLATES / "chatml.jinja").read_text()
WITHOUT_TOOLS = (TEMPLATES / "appended.jinja").read_text()


def renderer(text: str, *names: str, kind: str = "bytes") -> Renderer:
    tokenizer = tokenizer_of(kind, text, "<|im_end|>", "</s>", "<|eot_id|><|eom_id|>", *names)
    return Renderer(tokenizer, ChatTemplate(text, bos_token="<s>", eos_token="</s>"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_can_be_followed_with_every_kind_of_tokenizer(name: str, kind: str) -> None:
    family = FAMILIES[name]
    validate_template(renderer((TEMPLATES / f"{name}.jinja").read_text(), kind=kind), family.tool_format)


@pytest.mark.parametrize(
    ("change", "tool_format", "why"),
    [
        (("", ""), "llama3_json", "tool_call_parser 'llama3_json' does not read its calls, 'hermes' does"),
        (("message.content or ''", "'' if message.role == 'tool' else message.content"), "hermes", "results of tools"),
        (("message.tool_calls or []", "[]"), "hermes", "it drops the policy's calls"),
        (("message.content or ''", "message.content if message.role != 'assistant'"), "plain", "what the policy said"),
        (
            ("message.content or ''", "message.parts[0].text"),
            "plain",
            "it does not take an answer and another question",
        ),
        (
            ("call.function.arguments}", "call.nothing.at.all}"),
            "hermes",
            "it does not take a call and its result: messages: the chat template refuses",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(change: tuple[str, str], tool_format: str, why: str) -> None:
    text = CHATML.replace(*change) if change[0] else CHATML
    assert (text == CHATML) is not bool(change[0])
    with pytest.raises(CannotFollow, match=r"chat_template: .* turn by turn") as refused:
        validate_template(renderer(text, "<|channel|>"), tool_format)
    assert why in str(refused.value)


def test_a_template_that_is_for_tools_only_is_tried_out_with_tools() -> None:
    text = CHATML.replace(
        "{%- if tools %}", "{%- if not tools %}{{ raise_exception('tools!') }}{% endif %}{%- if tools %}"
    )
    validate_template(renderer(text), "hermes")
    with pytest.raises(CannotFollow, match=r"it does not take an answer and another question: .*tools!"):
        validate_template(renderer(text), "plain")


def test_a_tokenizer_that_gives_another_text_back_is_refused() -> None:
    chat = renderer(CHATML)
    chat.tokenizer._fast.decoder = None
    with pytest.raises(CannotFollow, match="the tokenizer gives"):
        validate_template(chat, "hermes")


def folder_of(tmp_path: Path, text: str | None = None) -> Path:
    tokenizer_of("bytes", CHATML, WITHOUT_TOOLS)._fast.save(str(tmp_path / "tokenizer.json"))
    if text is not None:
        (tmp_path / "chat_template.jinja").write_text(text)
    return tmp_path


async def test_the_server_does_not_start_with_a_template_that_cannot_be_followed(tmp_path: Path) -> None:
    folder = str(folder_of(tmp_path, CHATML))
    with pytest.raises(CannotFollow, match="'hermes' does"):
        async with hosted("http://127.0.0.1:9", engine="vllm", tokenizer=folder, tool_call_parser="mistral"):
            pass


async def test_an_engine_that_renders_itself_needs_no_template_that_can_be_followed(tmp_path: Path) -> None:
    folder = str(folder_of(tmp_path, CHATML))
    async with hosted("http://127.0.0.1:9", engine="vllm_chat", tokenizer=folder, tool_call_parser="mistral") as host:
        assert host.service.renderer is None


async def test_tools_that_the_template_shows_to_nobody_are_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("bytes", CHATML, WITHOUT_TOOLS)
    ids = tokenizer.encode("a<|end|>")
    answer = completion(token_ids=ids, logprobs={"token_logprobs": [-0.5] * len(ids)})
    folder = str(folder_of(tmp_path, WITHOUT_TOOLS))
    async with (
        serving(says("/v1/completions", lambda _: answer)) as url,
        hosted(url, engine="vllm", tokenizer=folder) as host,
    ):
        service = host.service
        with pytest.raises(CallerError, match="tools: the chat template shows tools to no policy"):
            await service.turn(TurnRequest("r", (USER,), tools=TOOLS, sampling=Sampling(max_tokens=9)))
        assert (await service.turn(TurnRequest("r", (USER,), sampling=Sampling(max_tokens=9)))).message[
            "content"
        ] == "a"


NAMED = {"default": "{{ 'plain ' + messages[0].content }}", "tool_use": "{{ 'tools ' + tools | tojson }}"}


@pytest.mark.parametrize("where", ["config", "files", "files and config"])
def test_named_templates_are_chosen_by_whether_tools_are_offered(where: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    more = NAMED | {"rag": "{{ 1 / 0 }}"}
    listed = [{"name": name, "template": text} for name, text in more.items()]
    if "config" in where:
        config: Any = listed if where == "config" else NAMED["default"]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": config}))
    if "files" in where:
        (folder / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(more[name])
        if where == "files":
            (folder / "chat_template.jinja").write_text(more["default"])
    chat = Renderer.load(str(folder))
    assert chat.template.render([USER], prompt=True) == "plain q"
    assert chat.template.render([USER], TOOLS, prompt=True).startswith("tools [{")
    file = tmp_path / "mine.jinja"
    file.write_text("mine")
    assert Renderer.load(str(folder), str(file)).template.render([USER], TOOLS, prompt=True) == "mine"


def test_named_templates_without_a_default_one_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("x")
    with pytest.raises(CallerError, match="chat_template: the tokenizer has no chat template: it has only rag"):
        Renderer.load(str(folder))
