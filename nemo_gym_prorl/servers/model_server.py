# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym's model routes over the policy side of ``nemo_gym_prorl``: a drop-in for ``vllm_model``.

HTTP and Gym's message formats in, one turn of the policy service out. A rollout is told by Gym's session cookie, by
its URL, or by the header ``X-Rollout-Id``. With ``X-Rollout-Tokens: deferred`` the answers carry no token ids; the
agent reads them once, at the end, from ``GET /v1/rollouts/{id}/tokens``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from time import time
from typing import Any, ClassVar

import orjson
from fastapi import Body, FastAPI, Request, Response
from fastapi.encoders import jsonable_encoder
from nemo_gym import base_responses_api_model
from nemo_gym.anthropic_converter import AnthropicConverter
from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseFunctionToolCall,
)
from nemo_gym.responses_converter import VLLMConverter
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import ConfigDict, Field, ValidationError, model_validator
from starlette.middleware.sessions import SessionMiddleware
from starlette.types import ASGIApp

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.http.access import KeyGuard, check_exposure
from nemo_gym_prorl.http.applications import DirectRoutes, put_in_front
from nemo_gym_prorl.http.problems import Declared, invalid_body
from nemo_gym_prorl.http.process import collect_rarely, end_with_starter, raise_open_file_limit
from nemo_gym_prorl.policy.engines.engine import Sampling
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.host import PolicyConfig, PolicyRuntime
from nemo_gym_prorl.policy.http.api import add_control_routes
from nemo_gym_prorl.policy.http.callers import (
    DEFERRAL,
    Caller,
    EndsWithCaller,
    RolloutUrls,
    caller_of,
    route_of_callers,
)
from nemo_gym_prorl.policy.http.fields import FOR_ENGINES, check, of_messages, of_responses
from nemo_gym_prorl.policy.http.turn_requests import RequestTemplate, TurnRequests, about, read_object
from nemo_gym_prorl.policy.text.parsers import Parsed
from nemo_gym_prorl.policy.text.template import Message, arguments_of
from nemo_gym_prorl.policy.turns import PolicyAnswer, TurnRequest
from nemo_gym_prorl.servers.server_config import ServerConfig


TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


_OF_VLLM_MODEL = frozenset(
    {"audio_root", "is_responses_native", "sequential_reasoning_allowed", "uses_interleaved_reasoning"}
)


class ProrlModelConfig(BaseResponsesAPIModelConfig, ServerConfig):
    """The keys of ``vllm_model`` under their names there, and under ``policy`` what is ours (see ``PolicyConfig``)."""

    base_url: str | list[str]
    api_key: str | list[str] = ""
    model: str
    return_token_id_information: bool = True
    uses_reasoning_parser: bool = True
    replace_developer_role_with_system: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    extra_body: dict[str, Any] | None = None
    default_headers: dict[str, str] = Field(default_factory=dict)
    policy: dict[str, Any] = Field(default_factory=dict)

    def checked_policy(self) -> PolicyConfig:
        """How the policy side is configured.

        Raises:
            CallerError: every turn would be refused, or strangers could reach it.
        """
        policy = PolicyConfig(
            base_url=[self.base_url] if isinstance(self.base_url, str) else self.base_url,
            api_key=self.api_key,
            model=self.model,
            thoughts=self.uses_reasoning_parser,
            replace_developer_role_with_system=self.replace_developer_role_with_system,
            headers=self.default_headers,
            **self.policy,
        )
        check_exposure(self.host, policy.control_token, field="policy.control_token")
        if (getattr(self, "num_workers", None) or 1) > 1:
            raise CallerError(
                "must be 1: a rollout's tokens live in one process; configure several model servers, and name them in "
                "the agent's further_model_servers (docs/model-server.md, Several servers)",
                field="num_workers",
            )
        Sampling(extra=self.extra_body or {})
        return policy

    # A block of Gym's vllm_model can be taken over: what says nothing here is left out.
    ignored_keys: ClassVar[Iterable[str]] = frozenset({*ServerConfig.ignored_keys, *_OF_VLLM_MODEL})


class ChatRequest(NeMoGymChatCompletionCreateParamsNonStreaming):
    """Gym's request, which some Gyms read without the fields that they do not know: here these are refused by name."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _with_reasoning(cls, body: Any) -> Any:
        """Read vLLM's name of an assistant message's thought as the one that Gym's classes know."""
        messages = body.get("messages") if isinstance(body, dict) else None
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict) and (thought := message.pop("reasoning", None)) is not None:
                message.setdefault("reasoning_content", thought)
        return body


_CALLER = "caller"
_OF_MESSAGES = "of_messages"
"""On a request: what it asks for as one of the Messages API, beyond what Gym reads of it."""


class ProrlModel(SimpleResponsesAPIModel):
    """The server; everything it does is in ``nemo_gym_prorl.policy``."""

    config: ProrlModelConfig

    @classmethod
    def run_webserver(cls) -> Any:
        """Gym's start of the server, which ends with that Gym from now on, also while it waits for Gym's Ray."""
        end_with_starter()
        return super().run_webserver()

    def setup_webserver(self) -> FastAPI:
        policy = self.config.checked_policy()
        recorded = self._recorded()
        raise_open_file_limit()
        app: FastAPI = super().setup_webserver()
        config = self.config
        self._host = PolicyRuntime(policy)
        self._converter = VLLMConverter(
            return_token_id_information=config.return_token_id_information,
            uses_reasoning_parser=config.uses_reasoning_parser,
        )
        self._turns = TurnRequests(
            self._host,
            self._terms,
            self._items,
            tokens=config.return_token_id_information,
        )
        turns = {
            "/v1/responses": self._on_responses,
            "/v1/chat/completions": self._on_chat_completions,
            "/v1/messages": self._on_messages,
        }
        add_control_routes(app, self._host, dict.fromkeys(turns, Declared((400, 410, 500))))
        app.add_middleware(EndsWithCaller)
        routes = {path: route_of_callers(answer, SESSION_ID_KEY) for path, answer in turns.items()}
        session = self.get_session_middleware_key()  # the cookie's name, and the key that signs it

        def around(route: ASGIApp) -> ASGIApp:
            return SessionMiddleware(EndsWithCaller(route), secret_key=session, session_cookie=session)

        def in_front(rest: ASGIApp) -> ASGIApp:
            direct = RolloutUrls(DirectRoutes(rest, routes, around), whole=recorded)
            return KeyGuard(direct, key=policy.control_token)

        put_in_front(app, in_front)
        collect_rarely()
        return app

    def _recorded(self) -> bool:
        """Whether Gym records its agents' calls, which it does inside its application and by their whole URL.

        Raises:
            CallerError: the engine would have to do it.
        """
        if not hasattr(base_responses_api_model, "install_model_call_capture"):
            return False  # older Gyms do not
        settings = self.server_client.global_config_dict
        capture = settings.get("token_id_capture") or {}
        if capture.get("enabled") and capture.get("external_staging"):
            raise CallerError(
                "must be false: no engine stages tokens here; Gym's capture without it gets them from the answers",
                field="token_id_capture.external_staging",
            )
        return bool(settings.get("observability_enabled") or capture.get("enabled"))

    # Turns, in front of the application

    async def _on_responses(self, request: Request, caller: Caller, body: bytes) -> Response:
        if (streamed := await self._streamed(request, caller, body, "responses")) is not None:
            return streamed
        return _json(await self._turns.answer(caller, body), caller)

    async def _on_chat_completions(self, request: Request, caller: Caller, body: bytes) -> Response:
        if (streamed := await self._streamed(request, caller, body, "chat_completions")) is not None:
            return streamed
        try:
            asked = ChatRequest.model_validate(read_object(body))
        except ValidationError as error:
            raise invalid_body(error) from error
        completion = await self._complete(caller, asked)
        return _json(completion.model_dump_json(by_alias=True).encode(), caller)

    async def _on_messages(self, request: Request, caller: Caller, body: bytes) -> Response:
        setattr(request.state, _CALLER, caller)
        answer = await self.messages(request, read_object(body))
        if isinstance(answer, Response):
            return _echoing(answer, caller)
        return _json(orjson.dumps(jsonable_encoder(answer)), caller)

    async def _streamed(self, request: Request, caller: Caller, body: bytes, api: str) -> Response | None:
        """Recent Gyms write a whole answer as a stream, where that is asked for; ``None`` where it is not, or by older
        ones, of which the field is refused."""
        dispatch = f"{api}_dispatch"
        if not hasattr(SimpleResponsesAPIModel, dispatch) or b'"stream"' not in body:
            return None
        if (asked := read_object(body)).get("stream") is not True:
            return None
        setattr(request.state, _CALLER, caller)
        answer: Response = await getattr(self, dispatch)(request, asked)
        return answer

    # The same as routes of Gym's application, which describes them and may call them from others of its own

    async def responses(
        self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming = Body()
    ) -> NeMoGymResponse:
        params = body.model_dump(exclude_unset=True, exclude={"input"})
        items = body.input
        if not isinstance(items, str):
            items = [item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in items]
        answer = await self._turns.answer(
            _caller(request), orjson.dumps(params | {"input": items}), getattr(request.state, _OF_MESSAGES, {})
        )
        return NeMoGymResponse.model_validate_json(answer)

    def _envelope(self, body: NeMoGymResponseCreateParamsNonStreaming) -> dict[str, Any]:
        """What an answer says of its request."""
        sampling = ("temperature", "top_p", "max_output_tokens")
        echoed: tuple[str, ...] = (
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "metadata",
            "instructions",
            "user",
            *sampling,
        )
        echoed = (*echoed, "text", "reasoning", "service_tier", "truncation")
        return {name: getattr(body, name) for name in echoed} | {"model": self.config.model, "object": "response"}

    def _terms(self, params: dict[str, Any], more: Mapping[str, Any]) -> RequestTemplate:
        """A request without its input, read and answered by Gym's own classes."""
        try:
            body = NeMoGymResponseCreateParamsNonStreaming.model_validate(params | {"input": []})
        except ValidationError as error:
            raise invalid_body(error) from error
        asked = self._turn_request({**self._asked(body), **more}, (), body.instructions)
        empty = PolicyAnswer("", {}, Parsed(None, "", ()), None, Finish.STOP, 0)
        response = NeMoGymResponse.model_validate(self._envelope(body) | about(empty, None) | {"output": []})
        return RequestTemplate(asked, orjson.loads(response.model_dump_json(by_alias=True)))

    def _items(self, message: Message) -> list[dict[str, Any]]:
        """A turn's items as this Gym writes them."""
        return [item.model_dump(by_alias=True) for item in self._converter.postprocess_assistant_message_dict(message)]

    async def messages(self, request: Request, body: dict[str, Any] = Body()) -> Any:
        with _readable():
            # Gym's handler converts it once more: what cannot be converted is to be known from what fails later.
            AnthropicConverter().anthropic_request_to_responses(deepcopy(body))
            setattr(request.state, _OF_MESSAGES, of_messages(body))
        return await super().messages(request, body)

    async def _invoke_responses(
        self, request: Request, params: NeMoGymResponseCreateParamsNonStreaming
    ) -> NeMoGymResponse:
        response = await super()._invoke_responses(request, params)
        if hasattr(request.state, _OF_MESSAGES):
            for item in response.output:
                if isinstance(item, NeMoGymResponseFunctionToolCall):
                    # There a call's input is an object, whatever the policy wrote.
                    item.arguments = json.dumps(arguments_of(item.arguments))
        return response

    async def chat_completions_dispatch(self, request: Request, body: dict[str, Any] = Body()) -> Any:
        """Recent Gyms' way to :meth:`chat_completions`, made to take what litellm notes on answers, which agents send
        back."""
        if isinstance(messages := body.get("messages"), list):
            for message in messages:
                if isinstance(message, dict):
                    message.pop("provider_specific_fields", None)
        return await super().chat_completions_dispatch(request, body)

    async def chat_completions(self, request: Request, body: ChatRequest = Body()) -> NeMoGymChatCompletion:
        return await self._complete(_caller(request), body)

    async def _complete(self, caller: Caller, body: ChatRequest) -> NeMoGymChatCompletion:
        chat = body.model_dump(exclude_unset=True)
        asked = self._turn_request(chat, chat["messages"], None)
        answer = await self._host.service.turn(caller.asking(asked))
        return NeMoGymChatCompletion.model_validate(self._completion(caller, answer, logprobs=chat.get("logprobs")))

    def _asked(self, body: NeMoGymResponseCreateParamsNonStreaming) -> dict[str, Any]:
        """A request of the Responses API, but for its conversation, in the fields of chat completions."""
        chat = of_responses(body.model_dump(exclude_unset=True, exclude={"input"}))
        with _readable():
            offered = self._chat_of(body.model_construct({"input", "tools"}, input=[], tools=body.tools))
        return {"tools": offered.get("tools"), **chat}

    def _chat_of(self, params: NeMoGymResponseCreateParamsNonStreaming) -> dict[str, Any]:
        converted = self._converter.responses_to_chat_completion_create_params(params)
        chat: dict[str, Any] = converted.model_dump(exclude_unset=True)
        return chat

    def _turn_request(
        self, chat: Mapping[str, Any], messages: Sequence[Message], instructions: str | None
    ) -> TurnRequest:
        """What is asked for, but by whom and after what.

        Raises:
            CallerError: a field is wrong.
        """
        check(chat)
        tools = list(_offered(chat))
        with _readable():
            # Halves of characters, and what is nested without end, would fail wherever they are met first.
            orjson.dumps((messages, tools, instructions))
        metadata = chat.get("metadata") or {}
        given = chat.get("chat_template_kwargs") or {}
        if not isinstance(given, dict):
            raise CallerError("must be an object", field="chat_template_kwargs")
        variables = deepcopy(self.config.chat_template_kwargs or {}) | given
        variables |= _settings(metadata, "chat_template_kwargs")
        extra = deepcopy(self.config.extra_body or {}) | _settings(metadata, "extra_body")
        extra |= {name: chat[name] for name in FOR_ENGINES if chat.get(name) is not None}
        if metadata:
            extra["metadata"] = metadata
        stop = chat.get("stop") or ()
        return TurnRequest(
            rollout="",
            messages=messages,
            instructions=instructions,
            tools=tools,
            tool_choice=_tool_choice(chat, tools),
            parallel=chat.get("parallel_tool_calls") is not False,
            effort=chat.get("reasoning_effort"),
            sampling=Sampling(
                max_tokens=_first(chat.get("max_completion_tokens"), chat.get("max_tokens")),
                temperature=chat.get("temperature"),
                top_p=chat.get("top_p"),
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                seed=chat.get("seed"),
                extra=extra,
            ),
            template_variables=variables,
        )

    def _completion(self, caller: Caller, answer: PolicyAnswer, *, logprobs: bool | None) -> dict[str, Any]:
        message = dict(answer.message)
        if not caller.deferred and self.config.return_token_id_information and answer.turn is not None:
            message |= {
                "prompt_token_ids": answer.turn.prompt(),
                "generation_token_ids": list(answer.turn.sampled),
                "generation_log_probs": list(answer.turn.log_probs),
            }
        finish = "length" if answer.finish is not Finish.STOP else "tool_calls" if answer.parsed.calls else "stop"
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "message": message}
        if logprobs and answer.turn is not None:
            # Tokens by their ids, as vLLM writes them on demand: their texts need not be whole characters.
            pairs = zip(answer.turn.sampled, answer.turn.log_probs, strict=True)
            tokens = [{"token": f"token_id:{one}", "logprob": value, "top_logprobs": []} for one, value in pairs]
            choice["logprobs"] = {"content": tokens, "refusal": None}
        return {
            "id": answer.id,
            "object": "chat.completion",
            "created": int(time()),
            "model": self.config.model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": _sampled(answer),
                "total_tokens": answer.prompt_tokens + _sampled(answer),
            },
        }


def _tool_choice(chat: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str | Mapping[str, Any] | None:
    choice: str | Mapping[str, Any] | None = chat.get("tool_choice")
    if choice in (None, "auto"):
        return None
    named = [{"type": "function", "function": {"name": tool["function"]["name"]}} for tool in tools]
    if choice == "none" or (tools and choice == "required") or choice in named:
        return choice
    raise CallerError("must be 'auto', 'none', 'required', or a function among the tools", field="tool_choice")


_UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@contextmanager
def _readable() -> Iterator[None]:
    """Gym's converters take a request apart without looking first; what they stumble over is wrong in the request."""
    try:
        yield
    except _UNREADABLE as error:
        raise CallerError(f"no conversation: {type(error).__name__}: {str(error)[:500]}", field="body") from error


def _settings(metadata: Mapping[str, str], name: str) -> dict[str, Any]:
    """The JSON object that Gym's agents pass on in a request's metadata."""
    try:
        settings = json.loads(metadata.get(name, "{}"))
    except ValueError as error:
        raise CallerError(f"not JSON: {error}", field=f"metadata.{name}") from error
    if not isinstance(settings, dict):
        raise CallerError("must be a JSON object", field=f"metadata.{name}")
    return settings


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _caller(request: Request) -> Caller:
    """Of a request that came through Gym's application."""
    known: Caller | None = getattr(request.state, _CALLER, None)
    return known or caller_of(request.headers, str(request.session[SESSION_ID_KEY]))


def _json(body: bytes, caller: Caller) -> Response:
    return _echoing(Response(body, media_type="application/json"), caller)


def _echoing(answer: Response, caller: Caller) -> Response:
    """An answer whose header tells an agent that the tokens are kept here, if it asked for that."""
    if caller.deferred:
        answer.headers[DEFERRAL] = "deferred"
    return answer


def _offered(chat: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The tools of a request, as engines are to see them.

    ``strict`` is for OpenAI's own servers. Templates would write it into the prompt, so Gym's ``vllm_model`` leaves it
    out, too: in its converter or, in recent Gyms, after that.
    """
    for index, tool in enumerate(chat.get("tools") or ()):
        function = tool.get("function") or {}
        if not function.get("name"):
            raise CallerError("a tool needs a name", field=f"tools.{index}.name")
        yield {**tool, "function": {name: value for name, value in function.items() if name != "strict"}}


def _sampled(answer: PolicyAnswer) -> int:
    return len(answer.turn.sampled) if answer.turn else 0
