# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Check whether an engine and a tokenizer support training, before any rollout runs (``prorl doctor``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from nemo_gym_prorl.failures import CallerError, RolloutError
from nemo_gym_prorl.http.client import HttpClient
from nemo_gym_prorl.http.keys import authorization
from nemo_gym_prorl.policy.engines.engine import (
    BackendFailed,
    Misconfigured,
    SampleRequest,
    Sampling,
    checked_url,
    origin_of,
)
from nemo_gym_prorl.policy.engines.engine_control import CONNECT_S, samples
from nemo_gym_prorl.policy.engines.http_engine import HttpEngine
from nemo_gym_prorl.policy.engines.log_probs import LogProbMode
from nemo_gym_prorl.policy.engines.protocols import ENGINES
from nemo_gym_prorl.policy.runtime import PolicyConfig
from nemo_gym_prorl.policy.text.formats import FORMATS, format_named
from nemo_gym_prorl.policy.text.renderer import Renderer
from nemo_gym_prorl.policy.text.validate_template import validate_template


_CHECK_S = 45.0
"""Time limit of one check in seconds; an engine on a CPU needs several seconds for its first sample."""

_FIXES = {
    "--policy-url": "pass the URL of the inference endpoint, which ends in /v1",
    "--policy-model": "pass --policy-model with the name of a model that is served",
    "policy.engine": "pass another --engine",
    "policy_api_key": "pass --policy-key",
}
"""Suggested fixes, by the field that an error names."""


@dataclass(frozen=True, slots=True)
class EngineFinding:
    """Result of one check of the engine or the tokenizer.

    Attributes:
        name: name of the checked property, as ``prorl doctor`` prints it.
        level: ``warn`` if training works with restrictions, ``missing`` if it does not work.
        found: description of the property, or the error.
        fix: change that fixes the problem; empty if the check passed.
    """

    name: str
    level: Literal["ok", "warn", "missing"]
    found: str
    fix: str = ""


async def check_engine(config: PolicyConfig) -> AsyncIterator[EngineFinding]:
    """Check the first backend of a configuration and its tokenizer; the checks end at the first ``missing`` finding.

    Raises:
        CallerError: the backend's URL is invalid, or the number of keys does not match the number of backends.
    """
    url = checked_url(config.base_url[0], "--policy-url") if config.base_url else ""
    headers = config.headers | authorization(config.keys()[0] if config.base_url else "")
    async with HttpClient(CONNECT_S) as client:
        engine = ENGINES[config.protocol](client, config.model, {origin_of(url): headers})
        if engine.takes_tokens and config.tokenizer_folder is not None:
            templates = await asyncio.to_thread(_templates, config, engine)
            yield templates
            if templates.level == "missing":
                return  # the handshake of all later checks compares the engine with this tokenizer
        reached = await _run_check("Engine", lambda: _check_reachable(engine, url, config.model))
        yield reached
        if config.tokenizer_folder is None and reached.level != "missing":
            yield EngineFinding(
                "Template",
                "warn",
                "the engine renders prompts and parses calls",
                "pass --tokenizer, so that no sampled token is tokenised again",
            )
        if reached.level != "missing":
            for name, check in (
                ("Tokenizer", _tokenizer),
                ("Log-probs", _log_probs),
                ("Context", _context),
                ("Token ids", _token_ids),
                ("Prefix cache", _prefix_cache),
                ("Grammars", _grammars),
            ):
                found = await _run_check(name, lambda check=check: check(engine, url))  # type: ignore[misc]
                yield found
                if found.level == "missing":
                    return


async def _run_check(name: str, check: Callable[[], Awaitable[tuple[str, str]]]) -> EngineFinding:
    """Run one check: a returned fix makes the finding ``warn``, a timeout or :class:`RolloutError` ``missing``."""
    try:
        async with asyncio.timeout(_CHECK_S):
            found, fix = await check()
    except TimeoutError:
        return EngineFinding(name, "missing", f"no answer within {_CHECK_S:g} s", "see the engine's log")
    except RolloutError as error:
        fix = _FIXES.get(
            getattr(error, "field", ""), "check that the engine runs and that --policy-url is its address"
        )
        if error.reason.startswith("tokenizer:"):
            fix = "pass the --tokenizer of the model that the engine serves"
        return EngineFinding(name, "missing", error.reason, fix)
    return EngineFinding(name, "warn" if fix else "ok", found, fix)


def _templates(config: PolicyConfig, engine: HttpEngine) -> EngineFinding:
    try:
        if config.tool_call_parser is not None and format_named(config.tool_call_parser) is None:
            raise CallerError(f"{config.tool_call_parser!r} is none of {', '.join(FORMATS)}", field="tool_call_parser")
        renderer = Renderer.load(str(config.tokenizer_folder), config.chat_template)
        form = validate_template(renderer, config.tool_call_parser, reads_reasoning=config.thoughts)
    except CallerError as error:
        return EngineFinding("Template", "missing", error.reason, "correct --tokenizer, --chat-template or its parser")
    text = renderer.tokenizer.sample_text()
    engine.expect_tokenization(text, renderer.tokenizer.encode(text))
    name = next((name for name, known in FORMATS.items() if known.opens is form.opens), config.tool_call_parser)
    if not renderer.shows_tools:
        return EngineFinding(
            "Template",
            "warn",
            "supported, but it renders no tools",
            "offer none, or give a template that renders tools",
        )
    return EngineFinding(
        "Template", "ok", f"supported; calls are read by {name}, reasoning begins with {form.think[0]!r}"
    )


async def _check_reachable(engine: HttpEngine, url: str, model: str) -> tuple[str, str]:
    await engine.check_protocol(url)
    served = [str(card.get("id")) for card in await engine.models(url)]
    if not served and await engine.routes(url) is None:
        return f"{url} answers, and publishes neither models nor routes", _FIXES["--policy-url"]
    if served and model not in served:
        raise Misconfigured(f"{url} serves {', '.join(served)}, not {model!r}", field="--policy-model")
    return f"{url} serves {model}", ""


async def _tokenizer(engine: HttpEngine, url: str) -> tuple[str, str]:
    await engine.probe_log_prob_mode(url)  # the probe begins with a handshake, which compares the tokenizers
    return "reads texts as the engine does" if engine.takes_tokens else "the engine's own", ""


async def _log_probs(engine: HttpEngine, url: str) -> tuple[str, str]:
    await engine.probe_log_prob_mode(url)
    mode = engine.log_prob_modes.get(url, LogProbMode.UNKNOWN)
    if mode is LogProbMode.PROCESSED:
        return "of the sampled distribution, with all settings", ""
    return f"{mode}: rows with a temperature, top_p, top_k and the like are refused (422)", engine.log_probs_fix


async def _context(engine: HttpEngine, url: str) -> tuple[str, str]:
    length = engine.contexts.get(url)
    if length is None:
        return "its length is not published", "every row needs max_output_tokens"
    return f"{length} tokens", ""


async def _token_ids(engine: HttpEngine, url: str) -> tuple[str, str]:
    prompt = (0,) if engine.takes_tokens else ()
    sampled = await engine.generate(url, SampleRequest(prompt, Sampling(1), [{"role": "user", "content": "hi"}]))
    if not sampled.ids or None in sampled.log_probs:
        raise BackendFailed(f"{url} returned a sample without token ids or log-probs")
    return f"returned with the sample ({len(sampled.ids)} id, {len(sampled.log_probs)} log-prob)", ""


async def _prefix_cache(engine: HttpEngine, url: str) -> tuple[str, str]:
    text = await engine.published_metrics(url)
    stated = {one.labels.get("enable_prefix_caching") for one in samples(text, "vllm:cache_config_info")} - {None}
    if stated and stated != {"True"}:
        return "off: each turn computes its whole prompt", "start vLLM with --enable-prefix-caching"
    if not stated:
        return "not published whether it is on", "check that the engine caches prefixes"
    if engine.reset_route is None or engine.reset_route not in (await engine.routes(url) or ()):
        return "on, and it cannot be reset after a weight update", engine.reset_hint
    return "on, and it can be reset after a weight update", ""


async def _grammars(engine: HttpEngine, url: str) -> tuple[str, str]:
    try:
        choice = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["a", "b"]}}}
        sampling = Sampling(8, extra={"response_format": choice})
        await engine.generate(url, SampleRequest((0,) if engine.takes_tokens else (), sampling, _HI))
    except CallerError as error:
        return "response_format is refused", error.reason
    return "response_format is followed", ""


_HI = [{"role": "user", "content": "hi"}]
