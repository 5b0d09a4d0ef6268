# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Engines over HTTP: wrong answers, dropped connections, replaced engines, and protocols of GPU engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Response

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.http.client import HttpClient
from nemo_gym_prorl.policy.engines.engine import (
    BackendErred,
    BackendFailed,
    BackendLoad,
    Misconfigured,
    RequestRefused,
    SampleRequest,
    Sampling,
)
from nemo_gym_prorl.policy.engines.engine_control import post
from nemo_gym_prorl.policy.engines.protocols import NemoRl, SglangGenerate, VllmCompletions
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.http.api import trajectory
from nemo_gym_prorl.policy.service import PolicyService
from nemo_gym_prorl.policy.tokens.ledger import TokenMismatch
from nemo_gym_prorl.policy.turns import TurnRequest
from tests.policy.engines import MODEL, free_port
from tests.policy.families import TEMPLATES
from tests.policy.runtimes import hosted
from tests.policy.scripted_engine import (
    ScriptedEngine,
    completion,
    nemo_rl_server,
    own_experts,
    saved,
    says,
)
from tests.policy.tokenizers import tokenizer_of
from tests.rollout.serving import serve as serving


@pytest.mark.engine
async def test_a_prompt_that_fills_the_context_ends_typed(engine_url: str, connections: HttpClient) -> None:
    engine = VllmCompletions(connections, MODEL)
    room = (await connections.request("GET", f"{engine_url}/v1/models", {})).json()["data"][0]["max_model_len"]
    for length in (room, room + 1000):
        generation = await engine.generate(engine_url, SampleRequest([5] * length, Sampling(max_tokens=4)))
        assert generation.finish is Finish.CONTEXT


@pytest.mark.engine
async def test_an_engine_says_how_much_its_cache_holds(engine_url: str, connections: HttpClient) -> None:
    load = await VllmCompletions(connections, MODEL).load(engine_url)
    assert load is not None
    assert load.capacity is not None
    assert load.capacity > 16_384, "two contexts at least"


VLLM_LOAD = """# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a}b"} 1.0
vllm:num_requests_waiting{engine="1",model_name="a}b"} 2.0
vllm:num_requests_waiting_by_reason{engine="0"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 5e-01
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="100"} 1.0
"""
SGLANG_LOAD = """sglang:num_queue_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.5
sglang:max_total_num_tokens{model_name="m"} 161721.0
"""


@pytest.mark.parametrize(
    ("engine", "text", "load"),
    [
        (VllmCompletions, VLLM_LOAD, BackendLoad(3, 0.5, 1600)),
        (SglangGenerate, SGLANG_LOAD, BackendLoad(2, 0.5, 161721)),
        (VllmCompletions, SGLANG_LOAD, None),
        (VllmCompletions, VLLM_LOAD.replace("2.0", "two"), None),
        (VllmCompletions, VLLM_LOAD.replace("2.0", "NaN"), None),
        (VllmCompletions, VLLM_LOAD.replace('"100"', '"None"'), BackendLoad(3, 0.5, None)),
    ],
    ids=["vllm", "sglang", "another engine's", "no number", "not a number", "no number of blocks"],
)
async def test_a_load_is_read_from_published_metrics(
    connections: HttpClient, engine: type[VllmCompletions], text: str, load: BackendLoad | None
) -> None:
    app = FastAPI()
    app.add_api_route("/metrics", lambda: Response(text))
    async with serving(app) as url:
        assert await engine(connections, MODEL).load(url) == load


NO_IDS = [[1, -2], ["1", "2"]]
NO_LOG_PROBS = [{"token_logprobs": pair} for pair in ([-0.5, "x"], [-0.5, 3.0])]
WRONG = [
    (lambda _: Response("<html>", media_type="text/html"), Misconfigured, "not JSON"),
    (lambda _: completion(logprobs=None), Misconfigured, "'token_logprobs'"),
    (lambda _: completion(token_ids=None), Misconfigured, "'token_ids'"),
    (lambda _: completion(prompt_token_ids=[9]), Misconfigured, "other tokens than the request"),
    (lambda _: {"choices": completion()["choices"] * 2}, RequestRefused, "n: .* 2 choices"),
    (lambda _: {"choices": ["?"]}, Misconfigured, "in an unknown form"),
    (lambda _: Response("who are you?", status_code=401), Misconfigured, "policy_api_key: .* refused the key"),
    (lambda _: Response("where?", status_code=404), Misconfigured, "policy_model_name: .* does not serve"),
    (lambda _: Response("no", status_code=400), RequestRefused, r"refused the request \(400\)"),
    (lambda _: Response("Out of range float values are not JSON", status_code=400), BackendErred, "computed NaN"),
    (lambda _: Response("oh", status_code=500), BackendErred, "answered 500: oh"),
    (lambda _: Response("later", status_code=429), BackendFailed, "answered 429"),
    (lambda _: completion(finish_reason="abort"), BackendFailed, "aborted the request"),
    (lambda _: completion(finish_reason="error"), BackendErred, "reported an error"),
    (lambda _: {"choices": []}, Misconfigured, "no choice"),
    *((lambda _, ids=ids: completion(token_ids=ids), Misconfigured, "a token id") for ids in NO_IDS),
    *((lambda _, one=one: completion(logprobs=one), Misconfigured, "logarithm") for one in NO_LOG_PROBS),
]


@pytest.mark.parametrize(("answer", "error", "said"), WRONG, ids=[said for *_, said in WRONG])
async def test_an_answer_that_is_no_trajectory_is_an_error(
    connections: HttpClient, answer: Callable[[Any], Any], error: type[Exception], said: str
) -> None:
    async with serving(says("/v1/completions", answer)) as url:
        with pytest.raises(error, match=said):
            await VllmCompletions(connections, MODEL).generate(url, SampleRequest([7], Sampling(max_tokens=8)))


@pytest.mark.parametrize("log_probs", [[-0.5], [-0.5, None]])
async def test_missing_and_broken_log_probs_never_reach_the_ledger(words: str, log_probs: list[Any]) -> None:
    answer = completion(logprobs={"token_logprobs": log_probs})
    async with (
        serving(says("/v1/completions", lambda _: answer)) as url,
        hosted(url, engine="vllm", tokenizer=words) as host,
    ):
        hi = [{"role": "user", "content": "hi"}]
        with pytest.raises(TokenMismatch, match="log-prob"):
            await host.service.turn(TurnRequest("r", hi, sampling=Sampling(max_tokens=8)))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"max_tokens": 0}, "max_output_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"extra": {"min_p": float("inf")}}, "min_p"),
        ({"extra": {"prompt": [1, 2]}}, "extra_body"),
        ({"extra": {"return_token_ids": False}}, "extra_body"),
        ({"extra": {"max_tokens": 10**9}}, "extra_body"),
    ],
)
def test_what_a_row_must_not_ask_for(wrong: dict[str, Any], field: str) -> None:
    """Each of these would yield a valid-looking rollout without a turn, or with tokens of another distribution."""
    with pytest.raises(CallerError) as refused:
        Sampling(**wrong)
    assert refused.value.field == field


async def test_an_id_without_text_is_the_policys_act(words: str) -> None:
    """The policy can sample embedding padding; sampling again would select by content."""
    ids = [9_999, 7, 1]
    said = completion(token_ids=ids, logprobs={"token_logprobs": [-0.5] * len(ids)})
    seen: list[dict[str, Any]] = []
    async with (
        serving(says("/v1/completions", lambda _: said, seen)) as url,
        hosted(url, engine="vllm", tokenizer=words) as host,
    ):
        asked = TurnRequest("r", [{"role": "user", "content": "hi"}], sampling=Sampling(max_tokens=9))
        answer = await host.service.turn(asked)
        assert answer.turn is not None
        assert list(answer.turn.sampled) == ids
        assert answer.parsed.content.count("\ufffd") == host.service.rollout("r").counts["unreadable"] == 2
        assert sum(body["max_tokens"] == 9 for body in seen) == 1, "it was not sampled again"


# An engine that is another one by the next call


ONE, OTHER = (tokenizer_of(kind, "<|im_start|><|im_end|>") for kind in ("bytes", "first"))
HI = TurnRequest("r", [{"role": "user", "content": "hi"}])


@contextlib.asynccontextmanager
async def policy_at(url: str, folder: Path, **config: Any) -> AsyncIterator[PolicyService]:
    template = (TEMPLATES / "chatml.jinja").read_text()
    settings = {"engine": "vllm", "tokenizer": saved(folder, ONE, template), "unreachable_s": 20} | config
    async with hosted(url, **settings) as host:
        yield host.service


@pytest.mark.parametrize("protocol", ["vllm", "vllm_chat"])
async def test_an_engine_swapped_between_two_turns_is_noticed_before_its_ids_are_kept(
    tmp_path: Path, protocol: str
) -> None:
    """Another server takes the port between two turns; only a load report fails meanwhile."""
    old, new, port = ScriptedEngine(ONE), ScriptedEngine(OTHER), free_port()
    async with policy_at(f"http://127.0.0.1:{port}", tmp_path, engine=protocol) as service:
        url = service.dispatcher.pool.backends["backend0"].url
        async with serving(old.app(), port):
            first = await service.turn(HI)
        assert await service.engine.load(url) is None
        async with serving(new.app(), port):
            with pytest.raises(Misconfigured, match=r"tokenizer: .* tokenises text differently"):
                await service.turn(HI)
        assert service.ledger("r").turns == [first.turn]
    assert not new.seen


@pytest.mark.parametrize("left", [None, 0, 200])
async def test_an_engine_is_asked_for_no_more_than_its_context_whenever_it_is_met(
    tmp_path: Path, left: int | None
) -> None:
    """A router without engines reports no context length, and a length of 0 does not end a rollout."""
    engine = ScriptedEngine(ONE, context=left)
    async with serving(engine.app()) as url, policy_at(url, tmp_path) as service:
        if not left:
            with pytest.raises(Misconfigured, match=r"max_output_tokens: .* does not report max_model_len"):
                await service.turn(HI)
            engine.context = 200
        prompt = (await service.turn(HI)).prompt_tokens
        engine.context = 150
        await service.turn(HI)
        service.engine.forget(service.dispatcher.pool.backends["backend0"].url)
        await service.turn(HI)
    first, *_, last = (body["max_tokens"] + prompt for body in engine.seen)
    assert (first, last) == (200, 150)


# Connections


async def test_a_connection_closed_while_idle_is_not_a_dead_engine() -> None:
    """Each connection gives two answers and closes at the third request, as an engine's idle limit may."""
    requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        with contextlib.suppress(asyncio.IncompleteReadError):
            for answers in (True, True, False):
                await reader.readuntil(b"\r\n\r\n[7]")
                requests += 1
                if answers:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, HttpClient() as connections:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions"
        answers = [await post(connections, url, {}, [b"[7", b"]"]) for _ in range(4)]
    assert answers == [(200, b"{}")] * 4
    assert requests > 4, "the third request of a connection is sent again over another one"


# SGLang and NeMo RL


async def test_sglang_speaks_tokens(connections: HttpClient) -> None:
    seen: list[dict[str, Any]] = []
    about = {"output_token_logprobs": [[-0.5, 3, None], [-1.5, 4, None]], "finish_reason": {"type": "length"}}
    app = says("/generate", lambda _: {"text": "x", "meta_info": about | {"cached_tokens": 5}}, seen)
    async with serving(app) as url:
        sampling = Sampling(max_tokens=2, temperature=0.5, stop=("!",))
        generation = await SglangGenerate(connections, MODEL).generate(f"{url}/v1", SampleRequest([7, 8], sampling))
    assert (generation.ids, generation.log_probs) == ([3, 4], [-0.5, -1.5])
    assert (generation.finish, generation.cached_tokens) == (Finish.LENGTH, 5)
    assert seen[0]["input_ids"] == [7, 8]
    assert seen[0]["sampling_params"]["max_new_tokens"] == 2


async def test_nemo_rl_is_told_the_prefix_and_keeps_it() -> None:
    seen: list[dict[str, Any]] = []
    async with serving(nemo_rl_server(seen)) as url, hosted(f"{url}/v1", engine="nemo_rl") as host:
        service = host.service
        assert isinstance(service.engine, NemoRl)
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        for _ in range(3):
            request = TurnRequest("r", tuple(messages), sampling=Sampling(temperature=1.0))
            answer = await service.turn(request)
            messages += [dict(answer.message), {"role": "user", "content": "on"}]
        assert service.ledger("r").branches == 1
        assert seen[2]["required_prefix_token_ids"] == [101, 3, 4, 103, 3, 4]
        assert list(answer.turn.sampled) == [3, 4]


async def test_experts_of_a_mixture_are_kept_by_turn() -> None:
    """A turn's experts cover its new tokens and the token before them."""
    async with serving(nemo_rl_server([], mixture=True)) as url, hosted(f"{url}/v1", engine="nemo_rl") as host:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        for _ in range(2):
            answer = await host.service.turn(TurnRequest("r", tuple(messages), sampling=Sampling(temperature=1.0)))
            assert "routed_experts" not in answer.message
            messages += [dict(answer.message), {"role": "user", "content": "on"}]
        told = [place["routed_experts"] for place in trajectory(host.service, "r")["answers"].values()]
    assert told == [own_experts([101, 3, 0]), own_experts([4, 103, 3, 0])]


async def test_an_engine_that_rewrites_history_gives_a_branch_and_no_wrong_chain() -> None:
    def answer(body: dict[str, Any]) -> Any:
        logged = {"content": [{"token": "x", "logprob": -0.5}]}
        choice = {"message": {"role": "assistant", "content": "so"}, "logprobs": logged, "token_ids": [3]}
        return {"choices": [choice | {"finish_reason": "stop"}], "prompt_token_ids": [len(body["messages"])]}

    async with (
        serving(says("/v1/chat/completions", answer, published=False)) as url,
        hosted(url, engine="vllm_chat") as host,
    ):
        service = host.service
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        first = await service.turn(TurnRequest("r", tuple(messages)))
        messages += [dict(first.message), {"role": "user", "content": "on"}]
        await service.turn(TurnRequest("r", tuple(messages)))
        assert [list(sequence.ids) for sequence in service.ledger("r").sequences()] == [[1, 3], [3, 3]]
    assert b"prorl_policy_history_rewrites_total 1.0" in host.metrics.exposition()
