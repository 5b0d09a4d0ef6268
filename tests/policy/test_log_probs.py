# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probs belong to the sampled distribution, or the request is refused by field."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.http.client import HttpClient
from nemo_gym_prorl.policy.engines.engine import (
    NEUTRAL_SETTINGS,
    BackendErred,
    LogitsReturned,
    RequestRefused,
    SampleRequest,
    Sampling,
)
from nemo_gym_prorl.policy.engines.http_engine import HttpEngine
from nemo_gym_prorl.policy.engines.log_probs import (
    LogProbMode,
    changed_settings,
    unsupported_setting,
)
from nemo_gym_prorl.policy.engines.protocols import ENGINES
from nemo_gym_prorl.policy.generation import Generation
from nemo_gym_prorl.policy.http.api import _listing, trajectory
from nemo_gym_prorl.policy.turns import TurnRequest
from tests.policy.engines import MODEL, vllm
from tests.policy.runtimes import hosted
from tests.policy.scripted_engine import LOGITS, answer_of, is_probe, settings_of
from tests.rollout.serving import serve as serving


PROCESSED_MODE, SCALED, RAW, UNKNOWN = LogProbMode
ROUTES = {"vllm": "/v1/completions", "sglang": "/generate"}
HI = [{"role": "user", "content": "hi"}]


class Engine:
    """Engine with log-probs of one mode.

    Attributes:
        mode: mode of its log-probs.
        logits: logits after every prompt.
        own_temperature: the only accepted temperature, as in NeMo RL's server.
        status: status of its answers.
        follows: whether it follows grammars.
        turns: settings of requests that are not probes.
        probes: number of probes.
    """

    def __init__(self, mode: str, logits: dict[int, float] | None = None) -> None:
        self.mode, self.logits, self.follows = mode, logits or LOGITS, True
        self.own_temperature: float | None = None
        self.status = 200
        self.turns: list[dict[str, Any]] = []
        self.probes = 0

    def app(self, protocol: str) -> FastAPI:
        app = FastAPI()
        app.add_api_route(ROUTES.get(protocol, "/v1/chat/completions"), self.answer, methods=["POST"])
        if protocol == "vllm_chat":
            app.add_api_route("/v1/completions", self.answer, methods=["POST"])
        app.add_api_route("/v1/models", lambda: {"data": [{"id": MODEL, "max_model_len": 100}]})
        return app

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        settings = settings_of(body)
        self.probes += is_probe(body)
        if not is_probe(body):
            self.turns.append(dict(settings))
        if self.status != 200:
            return Response("no", status_code=self.status)
        if self.own_temperature is not None and (
            settings["temperature"] != self.own_temperature or settings["top_k"] != -1
        ):
            return Response("matches neither profile", status_code=500)
        said = json.dumps(answer_of(body, self.mode, self.logits))
        if "zqxj" in json.dumps(body) and not self.follows:
            said = said.replace('"zqxj"', '"well"')
        return Response(said, media_type="application/json")


async def sample(engine: HttpEngine, url: str, sampling: Sampling, **request: Any) -> Generation:
    prompt = (7, 8) if engine.takes_tokens else ()
    return await engine.generate(url, SampleRequest(prompt, sampling, HI, **request))


# Decisions


TRUNCATIONS = {"top_p": 0.9, "top_k": 5, "min_p": 0.1}
SCALINGS = {
    "temperature": 0.5,
    "logit_bias": {"5": 1},
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "min_tokens": 3,
}
GRAMMARS = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["a"]},
    "regex": "a",
}
OTHERS = {
    "thinking_token_budget": 9,
    "bad_words": ["a"],
    "allowed_token_ids": [1],
    "vllm_xargs": {"a": 1},
    "watermarking": True,
    "never_heard_of": 1,
}
NO_CHANGES = {
    **NEUTRAL_SETTINGS,
    "stop": ["a"],
    "stop_token_ids": [1],
    "seed": 5,
    "user": "me",
    "metadata": {"a": "b"},
    "ignore_eos": True,
    "priority": 1,
    "top_k": 0,
    "min_tokens": 0,
    "logit_bias": {},
    "bad_words": [],
    "thinking_token_budget": -1,
    "response_format": {"type": "text"},
    "never_heard_of": None,
    "watermarking": False,
}
ALL = [*TRUNCATIONS.items(), *SCALINGS.items(), *GRAMMARS.items(), *OTHERS.items()]


@pytest.mark.parametrize(("name", "value"), ALL)
def test_settings_by_mode(name: str, value: Any) -> None:
    included = {
        PROCESSED_MODE: True,
        SCALED: name in SCALINGS or name in GRAMMARS,
        RAW: name in GRAMMARS,
        UNKNOWN: False,
    }
    for mode, serves in included.items():
        refused = unsupported_setting(Sampling(extra={name: value}), mode, forced_call=False, fix="mend it")
        assert (refused is None) == serves, mode
        assert serves or (refused[0].removeprefix("extra_body.") == name and "mend it" in refused[1])
        assert (
            unsupported_setting(Sampling(temperature=0.0, extra={name: value}), mode, forced_call=True, fix="") is None
        ), "greedy"


def test_settings_that_change_nothing() -> None:
    assert [name for name, value in NO_CHANGES.items() if changed_settings(Sampling(extra={name: value}))] == []
    assert unsupported_setting(Sampling(), UNKNOWN, forced_call=True, fix="")[0] == "tool_choice"
    assert unsupported_setting(Sampling(), RAW, forced_call=True, fix="") is None


# On the wire


@pytest.mark.parametrize("protocol", list(ENGINES))
async def test_every_parameter_is_sent(connections: HttpClient, protocol: str) -> None:
    engine, scripted = ENGINES[protocol](connections, MODEL), Engine(PROCESSED_MODE)
    async with serving(scripted.app(protocol)) as url:
        await sample(engine, url, Sampling(4))
        await sample(engine, url, Sampling(4, temperature=1e-6, extra={"top_k": None, "min_p": 0.2}))
    assert NEUTRAL_SETTINGS.items() <= scripted.turns[0].items()
    assert (NEUTRAL_SETTINGS | {"temperature": 0.0, "min_p": 0.2}).items() <= scripted.turns[1].items()


CASES = [(protocol, mode) for protocol in ENGINES for mode in (PROCESSED_MODE, SCALED, RAW)]
CASES.remove(("nemo_rl", SCALED))  # which is vLLM


@pytest.mark.parametrize(("protocol", "mode"), CASES)
async def test_an_engines_mode_is_found_out(connections: HttpClient, protocol: str, mode: LogProbMode) -> None:
    engine, scripted = ENGINES[protocol](connections, MODEL), Engine(mode)
    async with serving(scripted.app(protocol)) as url:
        assert (await sample(engine, url, Sampling(4))).log_prob_mode == mode
        probes = scripted.probes
        await sample(engine, url, Sampling(4))
        assert scripted.probes == probes, "it is remembered"
        greedy = await sample(engine, url, Sampling(4, temperature=0.0))
        assert list(greedy.log_probs) == [0.0]
        for name, value in TRUNCATIONS.items():
            asked = sample(engine, url, Sampling(4, extra={name: value}))
            if mode is PROCESSED_MODE:
                await asked
            else:
                with pytest.raises(RequestRefused, match="log-probs") as refused:
                    await asked
                assert refused.value.field.removeprefix("extra_body.") == name
                assert engine.log_probs_fix in refused.value.reason


@pytest.mark.parametrize("mode", [PROCESSED_MODE, RAW])
async def test_nemo_rl_is_probed_under_its_own_sampling(connections: HttpClient, mode: LogProbMode) -> None:
    engine, scripted = ENGINES["nemo_rl"](connections, MODEL), Engine(mode)
    scripted.own_temperature = 0.6
    async with serving(scripted.app("nemo_rl")) as url:
        await engine.probe_log_prob_mode(url)
        assert not scripted.probes
        if mode is RAW:
            with pytest.raises(RequestRefused, match=r"temperature: .* policy.generation.vllm_cfg.logprobs_mode"):
                await sample(engine, url, Sampling(4, temperature=0.6))
        else:
            assert (await sample(engine, url, Sampling(4, temperature=0.6))).log_prob_mode is mode
        with pytest.raises(BackendErred, match="neither profile"):
            await ENGINES["nemo_rl"](connections, MODEL).generate(url, SampleRequest((), Sampling(4), HI))


@pytest.mark.parametrize(
    ("logits", "mode"),
    [({10: 9.0, 11: 0.0}, {"vllm_chat": PROCESSED_MODE, "vllm": SCALED}), ({10: 0.0, 11: 0.0, 12: -9.0}, None)],
)
async def test_a_prompt_without_a_verdict(
    connections: HttpClient, logits: dict[int, float], mode: dict[str, LogProbMode] | None
) -> None:
    """A model with one likely beginning, as of reasoning, is probed by a bias."""
    for protocol in ("vllm", "vllm_chat"):
        engine, scripted = ENGINES[protocol](connections, MODEL), Engine(PROCESSED_MODE, logits)
        async with serving(scripted.app(protocol)) as url:
            told = (await sample(engine, url, Sampling(4))).log_prob_mode
        assert told == (mode or {"vllm_chat": PROCESSED_MODE, "vllm": SCALED})[protocol]
        engine, scripted = ENGINES[protocol](connections, MODEL), Engine(RAW, logits)
        async with serving(scripted.app(protocol)) as url:
            assert (await sample(engine, url, Sampling(4))).log_prob_mode == RAW


@pytest.mark.parametrize("status", [400, 500])
async def test_an_engine_that_refuses_probes_is_unknown_or_at_fault(connections: HttpClient, status: int) -> None:
    engine, scripted = ENGINES["vllm"](connections, MODEL), Engine(RAW)
    app = scripted.app("vllm")

    @app.middleware("http")
    async def refuse(request: Request, rest: Any) -> Any:
        body = await request.body() if request.url.path == "/v1/completions" else b""
        if body and (b'"temperature":1.0' not in body or (b"logit_bias" in body and status != 500)):
            return Response("no", status_code=status)
        return await rest(request)

    async with serving(app) as url:
        assert (await sample(engine, url, Sampling(4))).log_prob_mode == (RAW if status == 500 else UNKNOWN)


async def test_a_grammar_that_ends_the_request_is_refused_by_name(connections: HttpClient) -> None:
    app = Engine(RAW).app("vllm")

    @app.middleware("http")
    async def choke(request: Request, rest: Any) -> Any:
        return Response("no", status_code=500) if b"zqxj" in await request.body() else await rest(request)

    async with serving(app) as url:
        asked = Sampling(4, extra={"response_format": {"type": "json_object"}})
        with pytest.raises(RequestRefused, match="response_format"):
            await sample(ENGINES["vllm"](connections, MODEL), url, asked)


async def test_a_verdict_ends_with_a_failure_of_the_engine(connections: HttpClient) -> None:
    engine, scripted = ENGINES["vllm"](connections, MODEL), Engine(PROCESSED_MODE)
    half = Sampling(4, temperature=0.5, extra={"response_format": {"type": "json_object"}})
    async with serving(scripted.app("vllm")) as url:
        await sample(engine, url, half)
        scripted.status = 500
        with pytest.raises(BackendErred):
            await sample(engine, url, half)
        assert url not in engine.log_prob_modes
        scripted.status, scripted.follows = 200, False
        with pytest.raises(RequestRefused, match="response_format"):
            await sample(engine, url, half)
        scripted.status = 500
        with pytest.raises(BackendErred):
            await sample(engine, url, Sampling(4))
        scripted.status, scripted.mode = 200, RAW
        with pytest.raises(RequestRefused, match="temperature"):
            await sample(engine, url, half)


@pytest.mark.parametrize("protocol", ["vllm", "vllm_chat", "sglang"])
@pytest.mark.parametrize("shift", [8.0, -40.0])
async def test_logits_in_place_of_log_probs_are_refused(
    connections: HttpClient, protocol: str, shift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.policy.scripted_engine.sampled", lambda *_: (10, {10: shift, 11: shift - 1}))
    engine = ENGINES[protocol](connections, MODEL)
    async with serving(Engine(RAW).app(protocol)) as url:
        with pytest.raises(LogitsReturned, match="logits in place of log-probs"):
            await sample(engine, url, Sampling(4))
        if protocol == "vllm_chat":
            async with hosted(engine="vllm_chat") as host:
                with pytest.raises(CallerError, match="logits"):
                    await host.add(url)
                assert not host.pool.backends


FIELDS: list[tuple[str, Any]] = [
    ("response_format", {"type": "json_object"}),
    ("structured_outputs", {"choice": ["ab", "cd"]}),
    ("guided_choice", ["ab", "cd"]),
    ("regex", "a"),
]


@pytest.mark.parametrize("protocol", list(ENGINES))
async def test_a_grammar_that_is_not_followed_is_refused(connections: HttpClient, protocol: str) -> None:
    for follows in (True, False):
        engine, scripted = ENGINES[protocol](connections, MODEL), Engine(RAW)
        scripted.follows = follows
        async with serving(scripted.app(protocol)) as url:
            for name, value in FIELDS:
                if follows:
                    await sample(engine, url, Sampling(4, extra={name: value}))
                    continue
                with pytest.raises(RequestRefused, match="does not follow a grammar") as refused:
                    await sample(engine, url, Sampling(4, extra={name: value}))
                assert refused.value.field.removeprefix("extra_body.") == name
            probes = scripted.probes
            await sample(engine, url, Sampling(4, extra={"response_format": {"type": "text"}}))
            assert scripted.probes == probes


async def test_the_mode_is_told() -> None:
    scripted = Engine(RAW)
    async with serving(scripted.app("vllm_chat")) as url, hosted(url, engine="vllm_chat") as host:
        async with asyncio.timeout(30):
            while _listing(host, None)["backends"][0]["log_probs"] != "raw":
                await asyncio.sleep(0.01)
        await host.service.turn(TurnRequest("r", HI))
        assert trajectory(host.service, "r")["log_probs"] == ["raw"]
        assert scripted.turns
        async with serving(Engine(PROCESSED_MODE).app("vllm_chat")) as other:
            known = await host.add(other)
            assert host.engine.log_prob_modes[known.url] == "processed"


# Real engines


@pytest.fixture(scope="module")
def raw_url(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with vllm(model_folder, tmp_path_factory.mktemp("raw") / "log") as (url, _):
        yield url


PROTOCOLS = pytest.mark.parametrize("protocol", ["vllm", "vllm_chat"])


@PROTOCOLS
async def test_a_real_engine_with_raw_log_probs(raw_url: str, connections: HttpClient, protocol: str) -> None:
    engine = ENGINES[protocol](connections, MODEL)
    assert (await sample(engine, raw_url, Sampling(4))).log_prob_mode == RAW
    assert set((await sample(engine, raw_url, Sampling(4, temperature=0.0))).log_probs) == {0.0}
    for name, value in [*TRUNCATIONS.items(), *SCALINGS.items(), *OTHERS.items()]:
        with pytest.raises(RequestRefused, match="processed_logprobs") as refused:
            await sample(engine, raw_url, Sampling(4, extra={name: value}))
        assert refused.value.field.removeprefix("extra_body.") == name


async def _next(engine: HttpEngine, url: str, *allowed: int, **settings: Any) -> tuple[int, float]:
    extra = {"allowed_token_ids": list(allowed), **settings}
    [token], [log_prob] = (lambda one: (one.ids, one.log_probs))(await sample(engine, url, Sampling(1, extra=extra)))
    return token, log_prob


@pytest.mark.engine
async def test_a_real_engine_with_processed_log_probs(engine_url: str, connections: HttpClient) -> None:
    engine = ENGINES["vllm"](connections, MODEL)
    logits = {}
    for token in (20, 21):
        seen, log_prob = await _next(engine, engine_url, token, 30)
        odds = log_prob - math.log1p(-math.exp(log_prob))
        logits[token] = odds if seen == token else -odds
    apart = logits[20] - logits[21]

    def log_sigmoid(x: float) -> float:
        return -math.log1p(math.exp(-x))

    for settings, factor, shift in (
        ({"temperature": 1.0}, 1.0, 0.0),
        ({"temperature": 0.5}, 2.0, 0.0),
        ({"temperature": 2.0}, 0.5, 0.0),
        ({"logit_bias": {"20": 1.5}}, 1.0, 1.5),
        ({"temperature": 0.5, "logit_bias": {"20": 1.5}}, 2.0, 1.5),
    ):
        token, log_prob = await _next(engine, engine_url, 20, 21, **settings)
        gap = (apart + shift) * factor
        assert log_prob == pytest.approx(log_sigmoid(gap if token == 20 else -gap), abs=1e-4), settings
    for settings in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}, {"temperature": 0.0}):
        assert (await _next(engine, engine_url, 20, 21, **settings))[1] == 0.0
