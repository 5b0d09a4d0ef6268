# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Log-probs that the ledger keeps, beside those of the sampled distribution, for each way to sample.

Each row is one way to sample: a few rollouts of two turns through a policy, over a stock vLLM. A recording proxy
in front of the engine notes each request. The kept log-probs are compared with :mod:`tests.policy.log_prob_truth`,
which computes them from the model's logits, the recorded request and the model's ``generation_config.json``.

A row shows the largest difference, or the field that an error names. ``FALSE`` means a difference above the tolerance,
or a setting that did not reach the engine. *Effect* is the largest difference between the true log-prob and the one
without any sampling parameter.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import json
import math
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from tokenizers import Tokenizer

from nemo_gym_prorl.failures import RolloutError
from nemo_gym_prorl.policy.config import PolicyConfig
from nemo_gym_prorl.policy.engines.engine import Sampling
from nemo_gym_prorl.policy.host import PolicyRuntime
from nemo_gym_prorl.policy.http.api import trajectory
from nemo_gym_prorl.policy.turns import TurnRequest
from tests.policy.engines import MODEL, tiny_model, vllm, vllm_python
from tests.policy.log_prob_truth import DEFAULTS, GREEDY_BELOW, generation_config
from tests.policy.sampling_ways import NEUTRAL, Way, ways


TURNS, TOKENS = 2, 24
TOLERANCE = 1e-4
MODES: Mapping[str, Sequence[str]] = {"raw": (), "processed": ("--logprobs-mode", "processed_logprobs")}
QUESTIONS = ("which file", "look at the tests", "what is there", "read it again")
GENERATION_CONFIG = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
THINKING = ("--reasoning-config", json.dumps({"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}))


@dataclass(slots=True)
class Result:
    """Outcome of one row: a difference and an effect, or a refusal."""

    difference: float = 0.0
    effect: float = 0.0
    tokens: int = 0
    scale: float = 1.0
    """Rounding errors of logits grow with the inverse of a temperature below 1."""
    refused: str | None = None
    unsent: set[str] = field(default_factory=set)

    @property
    def is_false(self) -> bool:
        is_equal = self.tokens > 0 and self.difference <= TOLERANCE * self.scale
        return self.refused is None and (not is_equal or bool(self.unsent))

    @property
    def shown(self) -> str:
        if self.refused is not None:
            return f"refused: {self.refused}"
        figure = f"{self.difference:.1e}" if self.difference < 0.1 else f"{self.difference:.2f}"
        unsent = f", not sent: {', '.join(sorted(self.unsent))}" if self.unsent else ""
        return f"FALSE {figure}{unsent}" if self.is_false else figure


@dataclass(frozen=True, slots=True)
class Sample:
    """A turn: the prompt, the sampled ids with the log-probs that were kept, and the request that the engine got."""

    way: Way
    prompt: tuple[int, ...]
    sampled: list[int]
    kept: list[float]
    request: dict[str, Any]


@contextlib.asynccontextmanager
async def recording(engine: str) -> AsyncIterator[tuple[str, dict[tuple[int, ...], dict[str, Any]]]]:
    """Forward to an engine; yields the proxy's URL and the last request for samples after each prompt."""
    seen: dict[tuple[int, ...], dict[str, Any]] = {}

    async def forward(request: web.Request) -> web.Response:
        body = await request.read()
        if request.path.endswith("/completions"):
            asked = json.loads(body)
            seen[tuple(asked.pop("prompt"))] = asked
        headers = {"Content-Type": request.content_type} if body else {}
        async with session.request(request.method, engine + request.path_qs, data=body, headers=headers) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)

    app = web.Application(client_max_size=1 << 28)
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app)
    async with aiohttp.ClientSession() as session:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}", seen
        finally:
            await runner.cleanup()


class Meter:
    """Plays rows through a policy and keeps their turns."""

    def __init__(self, host: PolicyRuntime, seen: Mapping[tuple[int, ...], dict[str, Any]]) -> None:
        self._host, self._seen, self._names = host, seen, itertools.count()

    async def play(self, way: Way) -> list[Sample] | RolloutError:
        """Sample one row's rollouts side by side; an error if the service refuses them."""
        rollouts = [self._rollout(way, question) for question in QUESTIONS]
        samples: list[Sample] = []
        for played in await asyncio.gather(*rollouts, return_exceptions=True):
            if isinstance(played, RolloutError):
                return played
            if isinstance(played, BaseException):
                raise played
            samples += played
        return samples

    async def _rollout(self, way: Way, question: str) -> list[Sample]:
        name = f"row-{next(self._names)}"
        named = {key: way.sampling[key] for key in ("temperature", "top_p", "seed") if key in way.sampling}
        extra = {key: value for key, value in way.sampling.items() if key not in (*named, "stop")}
        sampling = Sampling(max_tokens=TOKENS, stop=tuple(way.sampling.get("stop", ())), extra=extra, **named)
        messages: list[dict[str, Any]] = [{"role": "user", "content": question + " <think>" * way.thinks}]
        for _ in range(TURNS):
            answer = await self._host.service.turn(TurnRequest(name, tuple(messages), sampling=sampling))
            messages += [dict(answer.message), {"role": "user", "content": question}]
            for call in answer.message.get("tool_calls", ()):
                messages.insert(-1, {"role": "tool", "tool_call_id": call["id"], "content": "done"})
        kept = json.loads(json.dumps(trajectory(self._host.service, name)))
        self._host.service.finish(name)
        samples = []
        for answer in kept["answers"].values():
            sequence, start, end = kept["sequences"][answer["sequence"]], answer["start"], answer["end"]
            prompt = tuple(sequence["ids"][:start])
            turn = sequence["ids"][start:end], sequence["log_probs"][start:end]
            samples.append(Sample(way, prompt, *turn, self._seen[prompt]))
        return samples


def judge(samples: Sequence[Sample], truths: Sequence[Mapping[str, Sequence[float]]]) -> Result:
    """Compare the kept log-probs of one row with the truth."""
    result = Result()
    for sample, truth in zip(samples, truths, strict=True):
        asked, sent = sample.way.sampling, sample.request
        result.unsent |= {name for name, value in asked.items() if sent.get(name) != value}
        if GREEDY_BELOW <= (temperature := asked.get("temperature", 1.0)) < 1.0:
            result.scale = 1 / temperature
        for kept, true, raw in zip(sample.kept, truth["log_probs"], truth["raw"], strict=True):
            gap = abs(kept - true)
            result.difference = max(result.difference, math.inf if math.isnan(gap) else gap)
            result.effect = max(result.effect, abs(raw - true))
            result.tokens += 1
    return result


def compute_truth(python: str, folder: Path, samples: Sequence[Sample]) -> list[Any]:
    """Run the model over the samples in a process that has torch and transformers."""
    asked = [{"prompt": one.prompt, "sampled": one.sampled, "sampling": one.request} for one in samples]
    command = [python, "-m", "tests.policy.log_prob_truth", str(folder)]
    lines, root = "\n".join(map(json.dumps, asked)), Path(__file__).parents[2]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, cwd=root, check=False)
    if done.returncode:
        raise RuntimeError(f"the model could not be run by {python}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine and the folder of its model."""

    url: str
    folder: Path

    async def play(self, is_chosen: Callable[[Way], bool]) -> dict[Way, list[Sample] | RolloutError]:
        """Play the chosen rows, one after another."""
        reader = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        async with recording(self.url) as (proxy, seen):
            config = PolicyConfig(base_url=[proxy], model=MODEL, tokenizer=str(self.folder), unreachable_s=30.0)
            host = PolicyRuntime(config)
            async with host.lifespan():
                meter = Meter(host, seen)
                first = await meter.play(NEUTRAL)
                if isinstance(first, RolloutError):
                    return {NEUTRAL: first}
                counts = collections.Counter(itertools.chain.from_iterable(sample.sampled for sample in first))
                common = [token for token, _ in counts.most_common(40)]
                rows = [way for way in ways(common, lambda token: reader.decode([token])) if is_chosen(way)]
                return {way: first if way is NEUTRAL else await meter.play(way) for way in rows}

    def measure(self, python: str, is_chosen: Callable[[Way], bool]) -> dict[str, Result]:
        """Return the result of each chosen row, by the row's name."""
        is_neutral = not any(name in generation_config(self.folder) for name in DEFAULTS)
        played = asyncio.run(self.play(lambda way: is_chosen(way) and not (way.configured and is_neutral)))
        samples = [sample for each in played.values() if not isinstance(each, RolloutError) for sample in each]
        truths = iter(compute_truth(python, self.folder, samples))
        results = {}
        for way, each in played.items():
            if isinstance(each, RolloutError):
                results[way.name] = Result(refused=getattr(each, "field", None) or type(each).__name__)
                print(f"{way.name}: {each.reason[:300]}", file=sys.stderr)
            else:
                results[way.name] = judge(each, list(itertools.islice(truths, len(each))))
        return results


def measure(folder: Path) -> Iterator[tuple[str, dict[str, Result]]]:
    """Start an engine for each log-prob mode and model folder, one at a time."""
    python, plain = str(vllm_python()), tiny_model()
    configured = folder / "model"
    shutil.copytree(plain, configured)
    (configured / "generation_config.json").write_text(json.dumps(generation_config(plain) | GENERATION_CONFIG))
    log = folder / "engine.log"
    for mode, flags in MODES.items():
        with vllm(plain, log, *flags) as (url, _):
            found = Engine(url, plain).measure(python, lambda way: not way.thinks)
        with vllm(configured, log, *flags, *THINKING) as (url, _):
            found |= Engine(url, configured).measure(python, lambda way: way.configured or way.thinks)
        yield mode, found


def table(columns: Mapping[str, Mapping[str, Result]]) -> str:
    """Return the table: a row for each way to sample, a column for each log-prob mode."""
    rows = [["way to sample", *columns, "effect"]]
    for name in dict.fromkeys(name for results in columns.values() for name in results):
        results = [results.get(name) for results in columns.values()]
        effects = [result.effect for result in results if result is not None and result.refused is None]
        shown = ["-" if result is None else result.shown for result in results]
        rows.append([name, *shown, f"{max(effects):.2g}" if effects else "-"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
