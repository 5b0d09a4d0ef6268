# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym model server over ``nemo_gym_prorl.policy``: a drop-in replacement of ``vllm_model``.

The server converts Gym's message formats to turns of the policy service. Gym's session cookie, the URL or the header
``X-Rollout-Id`` identifies a request's rollout. With ``X-Rollout-Tokens: deferred`` the responses contain no token
ids, and the agent reads the ids once from ``GET /v1/rollouts/{id}/tokens``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar

import orjson
from fastapi import Body, FastAPI, Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.responses import StreamingResponse
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
from nemo_gym_prorl.http.applications import DirectRoutes, wrap_outermost
from nemo_gym_prorl.http.key_guard import KeyGuard, check_exposure
from nemo_gym_prorl.http.problems import KNOWN_ERRORS, Declared, invalid_body
from nemo_gym_prorl.http.server_process import raise_open_file_limit, tune_garbage_collection
from nemo_gym_prorl.policy.calls import KEY_PREFIX, LEFT_OUT
from nemo_gym_prorl.policy.engines.engine import Sampling
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.http.api import add_control_routes
from nemo_gym_prorl.policy.http.callers import (
    TOKENS_HEADER,
    CancelOnDisconnect,
    CapabilityKeyMiddleware,
    RolloutCaller,
    RolloutUrlMiddleware,
    caller_of,
    turn_route,
)
from nemo_gym_prorl.policy.http.chat_requests import completion, conversion_errors, turn_request
from nemo_gym_prorl.policy.http.fields import (
    chat_fields_of_messages,
    chat_fields_of_responses,
)
from nemo_gym_prorl.policy.http.program_calls import ProgramCalls
from nemo_gym_prorl.policy.http.programs import adapt_messages, chat_stream, program_error, responses_stream
from nemo_gym_prorl.policy.http.traces import traces_router
from nemo_gym_prorl.policy.http.turn_requests import (
    RequestTemplate,
    TurnRequests,
    answer_fields,
    messages_of,
    read_object,
)
from nemo_gym_prorl.policy.runtime import PolicyConfig, PolicyRuntime
from nemo_gym_prorl.policy.text.renderer import off_loop
from nemo_gym_prorl.policy.text.template import Message, parse_arguments
from nemo_gym_prorl.policy.text.turn_scanner import Parsed
from nemo_gym_prorl.policy.turns import PolicyAnswer, TurnRequest
from nemo_gym_prorl.servers.server_base import ServerBase, ServerConfig


_VLLM_MODEL_KEYS = frozenset(
    {"audio_root", "is_responses_native", "sequential_reasoning_allowed", "uses_interleaved_reasoning"}
)


class ProrlModelConfig(BaseResponsesAPIModelConfig, ServerConfig):
    """Settings of the model server: the keys of ``vllm_model``, and a section ``policy`` (see ``PolicyConfig``)."""

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
        """Return the validated configuration of the policy service.

        Raises:
            CallerError: a setting is invalid, or the server would listen beyond loopback without a key.
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
        if (policy.control_token or "").startswith(KEY_PREFIX):
            raise CallerError(f"must not begin with {KEY_PREFIX}, as capability keys do", field="policy.control_token")
        if (getattr(self, "num_workers", None) or 1) > 1:
            raise CallerError(
                "must be 1: a rollout's tokens live in one process; configure several model servers, and name them in "
                "the agent's further_model_servers (docs/model-server.md, Several servers)",
                field="num_workers",
            )
        Sampling(extra=self.extra_body or {})
        return policy

    # These keys of vllm_model have no effect here.
    ignored_keys: ClassVar[Iterable[str]] = frozenset({*ServerConfig.ignored_keys, *_VLLM_MODEL_KEYS})


class ChatRequest(NeMoGymChatCompletionCreateParamsNonStreaming):
    """Gym's chat request, but with unknown fields kept, so that the server can refuse them by name."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _with_reasoning(cls, body: Any) -> Any:
        """Accept vLLM's field ``reasoning`` of an assistant message, as a synonym of ``reasoning_content``."""
        messages = body.get("messages") if isinstance(body, dict) else None
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict) and (reasoning := message.pop("reasoning", None)) is not None:
                message.setdefault("reasoning_content", reasoning)
            if isinstance(message, dict) and not isinstance(message.get("reasoning_content"), str | None):
                raise ValueError("messages.reasoning_content must be a text")
        return body


_CALLER = "caller"
_MESSAGES_FIELDS = "of_messages"
"""Attribute of ``request.state`` that holds the fields of a Messages API request which Gym's converter drops."""


class ProrlModel(ServerBase, SimpleResponsesAPIModel):
    """Gym's model server class over :class:`~nemo_gym_prorl.policy.runtime.PolicyRuntime`."""

    config: ProrlModelConfig

    def setup_webserver(self) -> FastAPI:
        policy = self.config.checked_policy()
        recorded = self._captures_calls()
        raise_open_file_limit()
        app: FastAPI = super().setup_webserver()
        config = self.config
        self._runtime = PolicyRuntime(policy)
        self._converter = VLLMConverter(
            return_token_id_information=config.return_token_id_information,
            uses_reasoning_parser=config.uses_reasoning_parser,
        )
        self._turns = TurnRequests(
            self._runtime,
            self._request_template,
            self._items,
            tokens=config.return_token_id_information,
        )
        turns = {
            "/v1/responses": self._on_responses,
            "/v1/chat/completions": self._on_chat_completions,
            "/v1/messages": self._on_messages,
        }
        add_control_routes(app, self._runtime, dict.fromkeys(turns, Declared((400, 410, 500))))
        app.include_router(traces_router(self._runtime, self._items))
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{model:path}")(self.models)
        app.post("/v1/messages/count_tokens")(self.count_tokens)  # for the OpenAPI document
        app.add_middleware(CancelOnDisconnect)
        routes = {
            path: turn_route(ProgramCalls(self._runtime, answer), SESSION_ID_KEY) for path, answer in turns.items()
        }
        routes["/v1/messages/count_tokens"] = turn_route(self._on_count_tokens, SESSION_ID_KEY)
        session = self.get_session_middleware_key()

        def around(route: ASGIApp) -> ASGIApp:
            return SessionMiddleware(CancelOnDisconnect(route), secret_key=session, session_cookie=session)

        def in_front(rest: ASGIApp) -> ASGIApp:
            direct = RolloutUrlMiddleware(DirectRoutes(rest, routes, around), whole=recorded)
            guarded = KeyGuard(direct, key=policy.control_token)
            return CapabilityKeyMiddleware(guarded, direct, lambda key: self._runtime.service.keys.get(key))

        wrap_outermost(app, in_front)
        tune_garbage_collection()
        return app

    def _captures_calls(self) -> bool:
        """Return whether Gym's application records model calls, for which it needs each request's whole URL.

        Raises:
            CallerError: Gym expects the engines to stage token ids in external storage, which engines here do not.
        """
        if not hasattr(base_responses_api_model, "install_model_call_capture"):
            return False  # this version of Gym records no calls
        settings = self.server_client.global_config_dict
        capture = settings.get("token_id_capture") or {}
        if capture.get("enabled") and capture.get("external_staging"):
            raise CallerError(
                "must be false: engines here do not stage tokens; Gym's capture takes them from the answers",
                field="token_id_capture.external_staging",
            )
        return bool(settings.get("observability_enabled") or capture.get("enabled"))

    # Turn routes, called by DirectRoutes

    async def _on_responses(self, request: Request, caller: RolloutCaller, body: bytes) -> Response:
        answer = await self._turns.answer(caller, body)
        return responses_stream(orjson.loads(answer)) if caller.streams else _json(answer, caller)

    async def _on_chat_completions(self, request: Request, caller: RolloutCaller, body: bytes) -> Response:
        given = read_object(body)
        options = given.pop("stream_options", None) if caller.streams else None
        if caller.streams:
            del given["stream"]
        adapt_messages("chat/completions", given)
        try:
            requested = ChatRequest.model_validate(given)
        except ValidationError as error:
            raise invalid_body(error) from error
        completion = await self._complete(caller, requested)
        if caller.streams:
            usage = isinstance(options, dict) and bool(options.get("include_usage"))
            return chat_stream(completion.model_dump(mode="json"), usage=usage)
        return _json(completion.model_dump_json(by_alias=True).encode(), caller)

    async def _on_messages(self, request: Request, caller: RolloutCaller, body: bytes) -> Response:
        setattr(request.state, _CALLER, caller)
        answer = await self.messages(request, read_object(body))
        if isinstance(answer, StreamingResponse):
            # The whole response is stored, since a repeated request gets the same response.
            events = [str(event) async for event in answer.body_iterator]
            answer = Response("".join(events), media_type=answer.media_type)
        if isinstance(answer, Response):
            return _with_tokens_header(answer, caller)
        return _json(orjson.dumps(jsonable_encoder(answer)), caller)

    async def _on_count_tokens(self, request: Request, caller: RolloutCaller, body: bytes) -> Response:
        try:
            return _json(orjson.dumps(await self.count_tokens(request, read_object(body))), caller)
        except KNOWN_ERRORS as error:
            return program_error(error)

    # The same routes in Gym's application, for its OpenAPI document and for calls between Gym's own handlers

    async def responses(
        self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming = Body()
    ) -> NeMoGymResponse:
        params = body.model_dump(exclude_unset=True, exclude={"input"})
        items = body.input
        if not isinstance(items, str):
            items = [item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in items]
        answer = await self._turns.answer(
            _caller(request), orjson.dumps(params | {"input": items}), getattr(request.state, _MESSAGES_FIELDS, {})
        )
        return NeMoGymResponse.model_validate_json(answer)

    def _envelope(self, body: NeMoGymResponseCreateParamsNonStreaming) -> dict[str, Any]:
        echoed = (
            *("tools", "tool_choice", "parallel_tool_calls", "metadata", "instructions", "user", "temperature"),
            *("top_p", "max_output_tokens", "text", "reasoning", "service_tier", "truncation"),
        )
        return {name: getattr(body, name) for name in echoed} | {"model": self.config.model, "object": "response"}

    def _request_template(self, params: dict[str, Any], more: Mapping[str, Any]) -> RequestTemplate:
        """Validate a Responses API request without its input by Gym's own classes; return its template."""
        try:
            body = NeMoGymResponseCreateParamsNonStreaming.model_validate(params | {"input": []})
        except ValidationError as error:
            raise invalid_body(error) from error
        requested = self._turn_request({**self._chat_fields(body), **more}, (), body.instructions)
        empty = PolicyAnswer("", {}, Parsed(None, "", ()), None, Finish.STOP, 0)
        response = NeMoGymResponse.model_validate(self._envelope(body) | answer_fields(empty, None) | {"output": []})
        return RequestTemplate(requested, orjson.loads(response.model_dump_json(by_alias=True)))

    def _items(self, message: Message) -> list[dict[str, Any]]:
        return [item.model_dump(by_alias=True) for item in self._converter.postprocess_assistant_message_dict(message)]

    async def messages(self, request: Request, body: dict[str, Any] = Body()) -> Any:
        adapt_messages("messages", body)
        with conversion_errors():
            # Gym's handler converts again; converting here first separates conversion errors from later ones.
            AnthropicConverter().anthropic_request_to_responses(deepcopy(body))
            setattr(request.state, _MESSAGES_FIELDS, chat_fields_of_messages(body))
        return await super().messages(request, body)

    async def count_tokens(self, request: Request, body: dict[str, Any] = Body()) -> dict[str, int]:
        """Count the tokens of a prompt. If the engines render prompts, estimate one token per 4 bytes of JSON."""
        LEFT_OUT.set(set())
        adapt_messages("messages", body)
        with conversion_errors():
            params = AnthropicConverter().anthropic_request_to_responses(body).model_dump(exclude_unset=True)
        messages = messages_of([{"role": "system", "content": params.pop("instructions", "")}, *params.pop("input")])
        asked = self._request_template(params, {}).turn_request
        if (grant := caller_of(request, "").grant) is not None:
            grant.check_length(messages, asked.tools)
        renderer = self._runtime.service.renderer
        if renderer is None:
            return {"input_tokens": len(orjson.dumps([messages, asked.tools])) // 4}
        given = messages, asked.tools
        prompt = await off_loop(messages, renderer.render_prompt, *given, variables=asked.template_variables)
        return {"input_tokens": len(prompt.ids)}

    async def models(self, model: str | None = None) -> dict[str, Any]:
        """Describe a model, or list this server's only model. Any name denotes that model."""
        name = model or self.config.model
        of_openai = {"object": "model", "created": 0, "owned_by": "nemo-gym-prorl"}
        card = {"id": name, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z", **of_openai}
        listing = {"object": "list", "data": [card], "has_more": False, "first_id": name, "last_id": name}
        return card if model else listing

    async def _invoke_responses(
        self, request: Request, params: NeMoGymResponseCreateParamsNonStreaming
    ) -> NeMoGymResponse:
        response = await super()._invoke_responses(request, params)
        if hasattr(request.state, _MESSAGES_FIELDS):
            for item in response.output:
                if isinstance(item, NeMoGymResponseFunctionToolCall):
                    # In the Messages API a call's input is always an object.
                    item.arguments = json.dumps(parse_arguments(item.arguments))
        return response

    async def responses_dispatch(self, request: Request, body: dict[str, Any] = Body()) -> Any:
        """Drop hosted tools of an agent program, which Gym does not support; then dispatch to :meth:`responses`."""
        if LEFT_OUT.get() is not None and isinstance(tools := body.get("tools"), list):
            body["tools"] = [tool for tool in tools if tool.get("type") in ("function", "namespace")]
        return await super().responses_dispatch(request, body)

    async def chat_completions_dispatch(self, request: Request, body: dict[str, Any] = Body()) -> Any:
        """Drop litellm's ``provider_specific_fields``, which agents send back; then dispatch to
        :meth:`chat_completions`."""
        if isinstance(messages := body.get("messages"), list):
            for message in messages:
                if isinstance(message, dict):
                    message.pop("provider_specific_fields", None)
        return await super().chat_completions_dispatch(request, body)

    async def chat_completions(self, request: Request, body: ChatRequest = Body()) -> NeMoGymChatCompletion:
        return await self._complete(_caller(request), body)

    async def _complete(self, caller: RolloutCaller, body: ChatRequest) -> NeMoGymChatCompletion:
        chat = body.model_dump(exclude_unset=True)
        requested = self._turn_request(chat, chat["messages"], None)
        answer = await self._runtime.service.turn(caller.complete(requested))
        tokens = self.config.return_token_id_information and not caller.deferred
        response = completion(answer, self.config.model, tokens=tokens, logprobs=bool(chat.get("logprobs")))
        return NeMoGymChatCompletion.model_validate(response)

    def _turn_request(
        self, chat: Mapping[str, Any], messages: Sequence[Message], instructions: str | None
    ) -> TurnRequest:
        return turn_request(
            chat,
            messages,
            instructions,
            template_variables=self.config.chat_template_kwargs or {},
            extra_body=self.config.extra_body or {},
        )

    def _chat_fields(self, body: NeMoGymResponseCreateParamsNonStreaming) -> dict[str, Any]:
        chat = chat_fields_of_responses(body.model_dump(exclude_unset=True, exclude={"input"}))
        with conversion_errors():
            offered = self._chat_of(body.model_construct({"input", "tools"}, input=[], tools=body.tools))
        return {"tools": offered.get("tools"), **chat}

    def _chat_of(self, params: NeMoGymResponseCreateParamsNonStreaming) -> dict[str, Any]:
        converted = self._converter.responses_to_chat_completion_create_params(params)
        chat: dict[str, Any] = converted.model_dump(exclude_unset=True)
        return chat


def _caller(request: Request) -> RolloutCaller:
    known: RolloutCaller | None = getattr(request.state, _CALLER, None)
    return known or caller_of(request, str(request.session[SESSION_ID_KEY]))


def _json(body: bytes, caller: RolloutCaller) -> Response:
    return _with_tokens_header(Response(body, media_type="application/json"), caller)


def _with_tokens_header(answer: Response, caller: RolloutCaller) -> Response:
    """Confirm to a client that asked for deferred tokens that the server stores the tokens."""
    if caller.deferred:
        answer.headers[TOKENS_HEADER] = "deferred"
    return answer
