# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What the engines answer when something is wrong, and the wire formats of those that cannot run here."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import weakref
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI, Request, Response

from nemo_gym_prorl.failures import CallerError, RolloutError
from nemo_gym_prorl.policy.config import PolicyConfig
from nemo_gym_prorl.policy.engines.connections import Connections
from nemo_gym_prorl.policy.engines.engine import (
    BackendErred,
    BackendFailed,
    Load,
    Misconfigured,
    RequestRefused,
    SampleRequest,
    Sampling,
)
from nemo_gym_prorl.policy.engines.protocols import NemoRl, SglangGenerate, VllmCompletions
from nemo_gym_prorl.policy.generation import Finish, Generation
from nemo_gym_prorl.policy.host import PolicyRuntime
from nemo_gym_prorl.policy.http.api import add_control_routes, trajectory
from nemo_gym_prorl.policy.service import PolicyService
from nemo_gym_prorl.policy.text.formats import FORMATS
from nemo_gym_prorl.policy.tokens.ledger import TokenMismatch
from nemo_gym_prorl.policy.turns import TurnRequest
from tests.policy.engines import MODEL, free_port
from tests.policy.hosts import hosted, words_in
from tests.policy.probes import answer_of, is_probe
from tests.rollout.serving import serve as serving


@pytest.fixture(autouse=True)
def unrehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers of a few words have too few for a rehearsal."""
    monkeypatch.setattr("nemo_gym_prorl.policy.host.validate_template", lambda *_, **__: FORMATS["hermes"])


@pytest.fixture
async def connections() -> AsyncIterator[Connections]:
    async with Connections() as connections:
        yield connections


def says(
    path: str,
    answer: Callable[[dict[str, Any]], Any],
    seen: list[dict[str, Any]] | None = None,
    *,
    published: bool = True,
) -> FastAPI:
    """An endpoint whose answers we choose: what a misconfigured or foreign server might send. It answers probes as a
    vLLM with processed log-probs does, and does not count them among the requests seen."""
    app = FastAPI(openapi_url="/openapi.json" if published else None)

    @app.post(path)
    async def respond(request: Request) -> Response:
        body = await request.json()
        said = answer(body)
        if is_probe(body):
            said = said if isinstance(said, Response) else answer_of(body)
        elif seen is not None:
            seen.append(body)
        return said if isinstance(said, Response) else Response(json.dumps(said), media_type="application/json")

    return app


async def first_call(engine_url: str, **config: Any) -> Generation:
    """The first turn of a freshly configured policy."""
    async with hosted(engine_url, **config) as host:
        request = TurnRequest("r", [{"role": "user", "content": "hi"}], sampling=Sampling(max_tokens=8))
        return (await host.service.turn(request)).turn


@pytest.mark.engine
async def test_a_prompt_with_ids_that_the_engine_does_not_know(engine_url: str, connections: Connections) -> None:
    engine = VllmCompletions(connections, MODEL)
    with pytest.raises(RequestRefused, match="out of vocabulary"):
        await engine.generate(engine_url, SampleRequest([4_000_000], Sampling(max_tokens=1)))


@pytest.mark.engine
async def test_a_tokenizer_of_the_engines_size_with_two_ids_swapped(
    engine_url: str, model_folder: Path, tmp_path: Path
) -> None:
    tokenizer = json.loads((model_folder / "tokenizer.json").read_text())
    one, other = (token for token in tokenizer["added_tokens"] if token["content"] in ("<|im_start|>", "<|im_end|>"))
    one["content"], other["content"] = other["content"], one["content"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(Misconfigured, match=r"tokenizer: .* reads text as other ids"):
        await first_call(engine_url, tokenizer=str(tmp_path))


@pytest.mark.parametrize("ids", [[1, 7], [7], [9_999, 7, 1]])
async def test_an_id_without_text_is_the_policys_act(tmp_path: Path, ids: list[int]) -> None:
    """The padding of an embedding can be sampled; sampling again until it is not would be a selection."""
    said = completion(token_ids=ids, logprobs={"token_logprobs": [-0.5] * len(ids)})
    seen: list[dict[str, Any]] = []
    async with (
        serving(says("/v1/completions", lambda _: said, seen)) as url,
        hosted(url, engine="vllm", tokenizer=words_in(tmp_path, "hi", "?")) as host,
    ):
        asked = TurnRequest("r", [{"role": "user", "content": "hi"}], sampling=Sampling(max_tokens=9))
        answer = await host.service.turn(asked)
        assert answer.turn is not None
        assert list(answer.turn.sampled) == ids
        assert answer.parsed.content.count("\ufffd") == len([one for one in ids if one > 1])
        assert host.service.rollout("r").counts.unreadable == len([one for one in ids if one > 1])
        assert sum(body["max_tokens"] == 9 for body in seen) == 1, "it was not sampled again"


@pytest.mark.engine
async def test_a_prompt_that_fills_the_context_ends_typed(engine_url: str, connections: Connections) -> None:
    engine = VllmCompletions(connections, MODEL)
    async with connections.control.get(f"{engine_url}/v1/models") as response:
        room = (await response.json())["data"][0]["max_model_len"]
    for length in (room, room + 1000):
        generation = await engine.generate(engine_url, SampleRequest([5] * length, Sampling(max_tokens=4)))
        assert generation.finish is Finish.CONTEXT


def completion(**changes: Any) -> dict[str, Any]:
    choice = {"token_ids": [1, 2], "logprobs": {"token_logprobs": [-0.5, -0.25]}, "finish_reason": "stop"}
    return {"choices": [choice | changes]}


class Told(dict[str, Any]):
    """A message that says when it is gone."""


@pytest.mark.parametrize("status", [200, 400, 500, 503])
async def test_a_rollout_that_is_over_holds_nothing_until_the_collector_comes(
    tmp_path: Path, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Which comes rarely: an engine that is away for minutes would fill the memory with prompts."""
    caplog.set_level(logging.CRITICAL)  # what is captured is kept
    words_in(tmp_path, "hi", "?", "x")
    said = completion() if status == 200 else Response("no", status_code=status)
    async with (
        serving(says("/v1/completions", lambda _: said)) as url,
        hosted(url, tokenizer=str(tmp_path), engine="vllm", unreachable_s=0.2) as host,
    ):
        service, message = host.service, Told(role="user", content="hi")
        gone = weakref.ref(message)
        gc.collect()
        gc.disable()
        try:
            with contextlib.suppress(RolloutError) if status != 200 else contextlib.nullcontext():
                await service.turn(TurnRequest("r", [message], sampling=Sampling(max_tokens=8)))
            message = Told()
            service.finish("r")
            await asyncio.sleep(0.05)
            assert gone() is None
            held = [one for one in gc.get_objects() if isinstance(one, aiohttp.ClientRequest | aiohttp.ClientResponse)]
            assert not held
        finally:
            gc.enable()


NO_IDS = [[1, -2], [1.0, 2.0], [True, False], ["1", "2"], [None, 2], "ab", [1, 2**70]]
NO_LOG_PROBS = [{"token_logprobs": pair} for pair in ([-0.5, "x"], [-0.5, 3.0], [-0.5, True], [{}, []])]
WRONG = [
    (lambda _: Response("<html>", media_type="text/html"), Misconfigured, "not JSON"),
    (lambda _: [1], Misconfigured, "not an object"),
    (lambda _: completion(logprobs=None), Misconfigured, "'token_logprobs'"),
    (lambda _: completion(token_ids=None), Misconfigured, "'token_ids'"),
    (lambda _: completion(prompt_token_ids=[9]), Misconfigured, "other tokens than it was given"),
    (lambda _: {"choices": completion()["choices"] * 2}, RequestRefused, "n: .* 2 choices"),
    (lambda _: {"hello": "world"}, Misconfigured, "'choices'"),
    (lambda _: {"choices": ["?"]}, Misconfigured, "in no form of this protocol"),
    (lambda _: Response("who are you?", status_code=401), Misconfigured, "policy_api_key: .* refused the key"),
    (lambda _: Response("where?", status_code=404), Misconfigured, "policy_model_name: .* does not serve"),
    (lambda _: Response(status_code=307, headers={"location": "/x"}), Misconfigured, "answered 307"),
    (lambda _: Response("no", status_code=400), RequestRefused, r"refused the request \(400\)"),
    (lambda _: Response("no", status_code=422), RequestRefused, r"refused the request \(422\)"),
    (lambda _: Response("oh", status_code=500), BackendErred, "answered 500: oh"),
    (lambda _: Response("later", status_code=429), BackendFailed, "answered 429"),
    (lambda _: Response("busy", status_code=503), BackendFailed, "answered 503"),
    (lambda _: completion(finish_reason="abort"), BackendFailed, "dropped the request"),
    (lambda _: completion(finish_reason="error"), BackendErred, "met an error"),
    (lambda _: completion(finish_reason=5), Misconfigured, "finish reason 5"),
    (lambda _: {"choices": []}, Misconfigured, "no choice"),
    *((lambda _, ids=ids: completion(token_ids=ids), Misconfigured, "a token id") for ids in NO_IDS),
    *((lambda _, one=one: completion(logprobs=one), Misconfigured, "logarithm") for one in NO_LOG_PROBS),
]


@pytest.mark.parametrize(("answer", "error", "said"), WRONG)
async def test_an_answer_that_is_no_trajectory_is_an_error(
    connections: Connections, answer: Callable[[Any], Any], error: type[Exception], said: str
) -> None:
    async with serving(says("/v1/completions", answer)) as url:
        with pytest.raises(error, match=said):
            await VllmCompletions(connections, MODEL).generate(url, SampleRequest([7], Sampling(max_tokens=8)))


async def test_missing_and_broken_log_probs_never_reach_the_ledger(model_folder: Path) -> None:
    for log_probs in ([-0.5], [-0.5, None]):
        answer = completion(logprobs={"token_logprobs": log_probs})
        async with serving(says("/v1/completions", lambda _, a=answer: a)) as url:
            with pytest.raises(TokenMismatch, match="log-prob"):
                await first_call(url, engine="vllm", tokenizer=str(model_folder))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"max_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": -5}, "max_output_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": float("inf")}, "top_p"),
        ({"extra": {"prompt": [1, 2]}}, "extra_body"),
        ({"extra": {"echo": True, "top_k": 5}}, "extra_body"),
        ({"extra": {"return_token_ids": False}}, "extra_body"),
        ({"extra": {"max_tokens": 10**9}}, "extra_body"),
    ],
)
def test_what_a_row_must_not_ask_for(wrong: dict[str, Any], field: str) -> None:
    """Each would end as a rollout that looks well: without a turn, or with tokens that were sampled otherwise."""
    with pytest.raises(CallerError) as refused:
        Sampling(**wrong)
    assert refused.value.field == field


async def test_cached_tokens_below_none_are_none(connections: Connections) -> None:
    answer = completion() | {"usage": {"prompt_tokens_details": {"cached_tokens": -7}}}
    async with serving(says("/v1/completions", lambda _: answer)) as url:
        generation = await VllmCompletions(connections, MODEL).generate(
            url, SampleRequest([7], Sampling(max_tokens=8))
        )
    assert generation.cached_tokens == 0


@pytest.mark.parametrize("number", ["1e999", "e", "--", "1.2.3"])
async def test_gauges_that_are_no_numbers_are_no_load(connections: Connections, number: str) -> None:
    """One that raised would end the reports of all backends."""
    app = FastAPI()
    gauges = f"vllm:num_requests_waiting {number}\nvllm:kv_cache_usage_perc 1\n"
    app.add_api_route("/metrics", lambda: Response(b"\xff\n" + gauges.encode()))
    async with serving(app) as url:
        assert await VllmCompletions(connections, MODEL).load(url) is None


class Replaced:
    """An engine that may be another one by the next call."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {"hi": 0, "?": 1, "yes": 2}
        self.context: int | None = 100
        self.status = 200
        self.seen: list[dict[str, Any]] = []
        self._refusals = 0

    async def refused(self) -> None:
        """Return when a call was."""
        async with asyncio.timeout(60):
            while not self._refusals:
                await asyncio.sleep(0.01)

    def app(self) -> FastAPI:
        def sample(_: dict[str, Any]) -> Any:
            if self.status == 200:
                return completion()
            self._refusals += 1
            return Response("not now", status_code=self.status)

        app = says("/v1/completions", sample, self.seen)

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Any:
            body = await request.json()
            if is_probe(body):
                return answer_of(body)
            self.seen.append(body)
            logged = {"content": [{"token": "token_id:1", "logprob": -0.5}]}
            message = {"role": "assistant", "content": "?", "prompt_token_ids": [0]}
            return {"choices": [{"message": message, "logprobs": logged, "finish_reason": "stop"}]}

        @app.get("/v1/models")
        async def models() -> Any:
            return {"data": [] if self.context is None else [{"id": MODEL, "max_model_len": self.context}]}

        @app.post("/tokenize")
        async def tokenize(request: Request) -> Any:
            return {"tokens": [self.tokens.get((await request.json())["prompt"], self.tokens["?"])]}

        return app


@contextlib.asynccontextmanager
async def policy_at(url: str, folder: Path, **config: Any) -> AsyncIterator[PolicyService]:
    settings = {"engine": "vllm", "tokenizer": words_in(folder, "hi", "?", "yes"), "unreachable_s": 20} | config
    async with hosted(url, **settings) as host:
        yield host.service


@contextlib.asynccontextmanager
async def policy_before(engine: Replaced, folder: Path) -> AsyncIterator[PolicyService]:
    async with serving(engine.app()) as url, policy_at(url, folder) as service:
        yield service


HI = TurnRequest("r", [{"role": "user", "content": "hi"}])


async def test_an_engine_that_comes_back_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    engine = Replaced()
    async with policy_before(engine, tmp_path) as service:
        await service.turn(HI)
        engine.tokens, engine.status = {"hi": 1, "?": 0, "yes": 2}, 503
        asked = asyncio.ensure_future(service.turn(HI))
        await engine.refused()
        engine.status = 200
        with pytest.raises(Misconfigured, match="reads text as other ids"):
            await asked


@pytest.mark.parametrize("protocol", ["vllm", "vllm_chat"])
async def test_an_engine_swapped_between_two_turns_is_noticed_before_its_ids_are_kept(
    tmp_path: Path, protocol: str
) -> None:
    """Another server at the same port, without a turn that fails in between, but with a load report."""
    old, new, port = Replaced(), Replaced(), free_port()
    new.tokens = {"hi": 1, "?": 0, "yes": 2}
    url = f"http://127.0.0.1:{port}"
    async with policy_at(url, tmp_path, engine=protocol) as service:
        async with serving(old.app(), port):
            first = await service.turn(HI)
        assert await service.engine.load(url) is None
        async with serving(new.app(), port):
            with pytest.raises(Misconfigured, match=r"tokenizer: .* reads text as other ids"):
                await service.turn(HI)
        assert service.ledger("r").turns == [first.turn]
        async with serving(old.app(), port):
            await service.turn(HI)
    assert not new.seen


async def test_an_engine_with_a_smaller_context_is_asked_for_no_more_than_that(tmp_path: Path) -> None:
    old, new, port = Replaced(), Replaced(), free_port()
    new.context = 50
    url = f"http://127.0.0.1:{port}"
    async with policy_at(url, tmp_path) as service:
        for engine, left in ((old, 99), (new, 49), (old, 99)):
            async with serving(engine.app(), port):
                assert (await service.turn(HI)).turn is not None
            assert engine.seen[-1]["max_tokens"] == left
            assert await service.engine.load(url) is None


async def test_a_forgotten_engine_is_met_again(tmp_path: Path) -> None:
    engine = Replaced()
    async with policy_before(engine, tmp_path) as service:
        await service.turn(HI)
        engine.context = 50
        await service.turn(HI)
        for backend in service.dispatcher.pool.backends.values():
            service.engine.forget(backend.url)
        await service.turn(HI)
    assert [body["max_tokens"] for body in engine.seen] == [99, 99, 49]


@pytest.mark.parametrize("nothing", [None, 0, -1])
async def test_a_context_that_nobody_knows_yet_is_asked_for_again(tmp_path: Path, nothing: int | None) -> None:
    """As a router answers that has no engine yet; and a context of nothing is no rollout's end."""
    engine = Replaced()
    engine.context = nothing
    async with policy_before(engine, tmp_path) as service:
        with pytest.raises(Misconfigured, match="how long its context is"):
            await service.turn(HI)
        engine.context = 100
        assert (await service.turn(HI)).finish is Finish.STOP


async def test_two_who_pause_are_both_told_when_nothing_runs(tmp_path: Path) -> None:
    engine = Replaced()
    async with policy_before(engine, tmp_path) as service:
        dispatcher, begun, release = service.dispatcher, asyncio.Event(), asyncio.Event()

        async def call(_: Any) -> None:
            begun.set()
            await release.wait()

        running = asyncio.ensure_future(dispatcher.run("r", None, call))
        await asyncio.wait_for(begun.wait(), 60)
        pauses = [asyncio.ensure_future(dispatcher.pause(timeout_s=120)) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert not any(pause.done() for pause in pauses)
        release.set()
        await running
        assert await asyncio.wait_for(asyncio.gather(*pauses), 60) == [True, True]


async def test_nobody_there(connections: Connections) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(BackendFailed, match="Cannot connect"):
        await VllmCompletions(connections, MODEL).generate(url, SampleRequest([7], Sampling()))
    assert not await VllmCompletions(connections, MODEL).healthy(url)
    assert await VllmCompletions(connections, MODEL).load(url) is None


async def test_a_connection_closed_while_idle_is_not_a_dead_engine() -> None:
    """Each connection gives two answers and is closed when it is used again, as an engine's idle limit may have it."""
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            for answers in (True, True, False):
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    break
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
                body = json.loads(await reader.readexactly(int(length.partition(b":")[2])))
                said = {"tokens": [1], "max_model_len": 100} if b"/tokenize" in head else completion()
                if is_probe(body):
                    said = answer_of(body)
                else:
                    asked.append(head.split()[1].decode())
                if answers:
                    content = json.dumps(said).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))
                    await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, Connections() as connections:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        engine = VllmCompletions(connections, MODEL)
        turns = [await engine.generate(url, SampleRequest([7], Sampling())) for _ in range(4)]
    assert turns == turns[:1] * 4
    assert asked.count("/tokenize") == 1
    # The third request of a connection is dropped, and sent again over another one.
    assert asked.count("/v1/completions") > 4


@pytest.mark.engine
async def test_an_engine_says_how_much_its_cache_holds(engine_url: str, connections: Connections) -> None:
    load = await VllmCompletions(connections, MODEL).load(engine_url)
    assert load is not None
    assert load.capacity is not None
    assert load.capacity > 16_384, "two contexts at least"
    app = FastAPI()
    gauges = {"num_queue_reqs": 2, "token_usage": 0.5, "max_total_num_tokens": 161721}
    text = "".join(f'sglang:{name}{{model_name="m"}} {float(value)}\n' for name, value in gauges.items())
    app.add_api_route("/metrics", lambda: Response(text))
    async with serving(app) as url:
        assert await SglangGenerate(connections, MODEL).load(url) == Load(2, 0.5, 161721)


async def test_sglang_speaks_tokens(connections: Connections) -> None:
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


def nemo_rl_server(seen: list[dict[str, Any]], mixture: bool = False) -> FastAPI:
    """NeMo RL's rules: the prompt continues the required prefix; sampling is asserted; ids come as ``token_id:``. Of a
    mixture each token has its own id as its only expert, but the last."""

    def answer(body: dict[str, Any]) -> Any:
        if body.get("top_p") != 1.0 or body.get("temperature") != 1.0:
            return Response("sampling parameters differ from the training profile", status_code=500)
        prompt = [*body.get("required_prefix_token_ids", []), 100 + len(body["messages"])]
        logged = {"content": [{"token": "token_id:3", "logprob": -0.5}, {"token": "token_id:4", "logprob": -0.25}]}
        message = {"role": "assistant", "content": "so", "prompt_token_ids": prompt}
        if mixture:
            message["routed_experts"] = own_experts([*prompt, 3, 0])
        return {"choices": [{"message": message, "logprobs": logged, "finish_reason": "stop"}]}

    return says("/v1/chat/completions", answer, seen)


def own_experts(ids: list[int]) -> str:
    return f"nrlre1:int8:{len(ids)}x1x1:{b64encode(bytes(ids)).decode()}"


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
    """Of what is new, and of the token before, which the engine has read by then."""
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


async def test_the_control_routes(connections: Connections) -> None:
    host = PolicyRuntime(PolicyConfig(base_url=[], model=MODEL, engine="vllm_chat", control_token="secret"))
    app = FastAPI()
    add_control_routes(app, host)
    async with serving(app) as url:

        async def call(method: str, path: str, body: Any = None, token: str = "secret") -> tuple[int, Any]:
            headers = {"Authorization": f"Bearer {token}"}
            async with connections.control.request(method, f"{url}{path}", json=body, headers=headers) as response:
                return response.status, await response.json()

        status, said = await call(
            "POST", "/v1/backends", {"url": "http://127.0.0.1:1", "id": "a", "weight_version": "1"}
        )
        assert (status, said["weight_version"]) == (201, "1")
        status, said = await call("POST", "/v1/backends", {"url": "http://127.0.0.1:2", "id": "a"})
        assert (status, said["detail"]) == (409, "id: there is a backend 'a' already")
        assert await call("POST", "/v1/backends/pause", {}) == (200, {"drained": True})
        _, said = await call("POST", "/v1/backends/resume", {"weight_version": "2"})
        assert said["backends"][0]["weight_version"] == "2"
        assert (await call("DELETE", "/v1/backends/a?drain=true"))[1] == {"id": "a", "draining": True}
        assert (await call("GET", "/v1/backends"))[1]["backends"][0]["draining"]
        assert (await call("DELETE", "/v1/backends/b"))[0] == 404
        assert (await call("GET", "/v1/rollouts/r/tokens"))[0] == 410
        assert await call("DELETE", "/v1/rollouts/r") == (200, {"rollout": "r"})
        assert await call("DELETE", "/v1/backends") == (200, {"backends": []})
        async with connections.control.get(f"{url}/metrics") as response:
            told = await response.text()
        assert 'prorl_policy_waiting{run=""} 0.0' in told
        assert "# TYPE prorl_policy_migrations_total counter" in told
        assert "# TYPE prorl_policy_failovers_total counter" in told
