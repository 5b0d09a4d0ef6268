# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Whether the ledger keeps log-probs of the distribution that was sampled from, for each way to sample.

Each row is one way to sample: a few rollouts of two turns through ``PolicyHost``, over a stock vLLM. A recording proxy
in front of the engine notes what each request asked for. The kept log-probs are compared with
:mod:`benchmarks.log_prob_truth`, which computes them from the model's logits, the recorded request and the model's
``generation_config.json``.

A row shows the largest difference. ``refused: FIELD`` means that the request failed with an error that names the
field. ``FALSE`` means a difference above the tolerance, or a setting that did not reach the engine; the exit status
is 1 then. The column *effect* is the largest difference between the true log-prob and the one without any sampling
parameter: a row without effect proves nothing.

Run with ``python -m benchmarks.log_probs [--markdown]``: starts vLLM on the CPU with a tiny model, once for each
log-prob mode and model folder. ``--engine URL --model-folder F`` measures a running engine instead.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import importlib.util
import itertools
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from nemo_gym_prorl.failures import RolloutError
from nemo_gym_prorl.policy.config import PolicyConfig
from nemo_gym_prorl.policy.engines.sampling import Sampling
from nemo_gym_prorl.policy.host import PolicyHost
from nemo_gym_prorl.policy.http.api import trajectory
from nemo_gym_prorl.policy.turns import TurnRequest


ROLLOUTS, TURNS, TOKENS = 4, 2, 24
TOLERANCE = 1e-4
MODES: Mapping[str, Sequence[str]] = {"raw": (), "processed": ("--logprobs-mode", "processed_logprobs")}
QUESTIONS = ("which file", "look at the tests", "what is there", "read it again")
CHOICES = ("yes", "yesterday", "no", "not now")
GENERATION_CONFIG = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
THINKING = ("--reasoning-config", json.dumps({"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}))


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One way to sample.

    Attributes:
        name: in the table.
        sampling: fields of the request, as vLLM calls them.
        configured: needs the model folder whose generation settings are not neutral, and a thinking budget.
        thinks: the prompt opens a thought.
    """

    name: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    configured: bool = False
    thinks: bool = False


NEUTRAL = Way("no setting")


def ways(common: Sequence[int], text_of: Callable[[int], str]) -> list[Way]:
    """Return the rows of the table.

    Args:
        common: ids that the model samples often, so that a rule about them has an effect.
        text_of: a token's text.
    """
    words = [text for token in common if (text := text_of(token)).strip().isalpha()]
    enum = {"type": "string", "enum": list(CHOICES)}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": enum}}
    settings: list[Mapping[str, Any]] = [
        {"temperature": 1.0},
        *({"temperature": value} for value in (0.5, 1.3, 0.01, 0.0)),
        *({"top_p": 0.8}, {"top_k": 5}, {"top_k": 1}, {"min_p": 0.1}),
        *({"presence_penalty": 0.8}, {"frequency_penalty": 0.6}, {"repetition_penalty": 1.3}),
        *({"stop": words[:1]}, {"min_tokens": 20}, {"seed": 7}),
        {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
        {"temperature": 1.2, "top_k": 30, "min_p": 0.02, "presence_penalty": 0.3, "seed": 3},
        {"temperature": 0.0, "frequency_penalty": 1.0},
    ]
    return [
        NEUTRAL,
        *(Way(", ".join(f"{name} {value}" for name, value in each.items()), each) for each in settings),
        Way("logit_bias", {"logit_bias": {str(token): 2.5 * (-1) ** n for n, token in enumerate(common[:8])}}),
        Way("bad_words", {"bad_words": [word.strip() for word in words[:3]]}),
        Way("allowed_token_ids", {"allowed_token_ids": sorted(common)}),
        Way("structured_outputs choice", {"structured_outputs": {"choice": list(CHOICES)}}),
        Way("response_format json_schema, temperature 0.7", {"response_format": schema, "temperature": 0.7}),
        Way("choice, top_p 0.8", {"structured_outputs": {"choice": list(CHOICES)}, "top_p": 0.8}),
        Way("no setting, generation_config " + json.dumps(GENERATION_CONFIG), configured=True),
        Way("temperature 1.0 over that generation_config", {"temperature": 1.0}, configured=True),
        Way("thinking_token_budget 12", {"thinking_token_budget": 12, "temperature": 1.0}, configured=True, thinks=True),
    ]


@dataclass(slots=True)
class Result:
    """What one row shows: a difference and an effect, or a refusal."""

    difference: float = 0.0
    effect: float = 0.0
    tokens: int = 0
    refused: str | None = None
    unsent: tuple[str, ...] = ()

    def is_false(self, tolerance: float) -> bool:
        return self.refused is None and (not self.difference <= tolerance or bool(self.unsent) or not self.tokens)

    def shown(self, tolerance: float) -> str:
        if self.refused is not None:
            return f"refused: {self.refused}"
        figure = f"{self.difference:.1e}" if self.difference < 0.1 else f"{self.difference:.2f}"
        unsent = f", not sent: {', '.join(self.unsent)}" if self.unsent else ""
        return f"FALSE {figure}{unsent}" if self.is_false(tolerance) else figure


@dataclass(frozen=True, slots=True)
class Sample:
    """A turn: the prompt, the sampled ids with the log-probs that were kept, and the request that the engine got."""

    way: Way
    prompt: tuple[int, ...]
    sampled: list[int]
    kept: list[float]
    request: Mapping[str, Any]


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

    def __init__(self, host: PolicyHost, seen: Mapping[tuple[int, ...], dict[str, Any]]) -> None:
        self._host, self._seen, self._names = host, seen, itertools.count()

    async def play(self, way: Way) -> list[Sample] | RolloutError:
        """Sample one row's rollouts side by side; an error if the service refuses them."""
        try:
            rollouts = [self._rollout(way, question) for question in QUESTIONS[:ROLLOUTS]]
            return [sample for samples in await asyncio.gather(*rollouts) for sample in samples]
        except RolloutError as error:
            return error

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
        asked = sample.way.sampling.items()
        result.unsent += tuple(name for name, value in asked if name not in result.unsent and sample.request.get(name) != value)
        for kept, true, raw in zip(sample.kept, truth["log_probs"], truth["raw"], strict=True):
            result.difference = max(result.difference, abs(kept - true))
            result.effect = max(result.effect, abs(raw - true))
            result.tokens += 1
    return result


def compute_truth(python: str, folder: Path, device: str, samples: Sequence[Sample]) -> list[Any]:
    """Run the model over the samples in a process that has torch and transformers."""
    lines = [
        json.dumps({"prompt": sample.prompt, "sampled": sample.sampled, "sampling": {**sample.request}})
        for sample in samples
    ]
    command = [python, "-m", "benchmarks.log_prob_truth", str(folder), "--device", device]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, cwd=root, check=False)
    if done.returncode:
        raise SystemExit(f"the model could not be run by {python}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


async def play_all(url: str, name: str, tokenizer: Path, chosen: Callable[[Way], bool]) -> dict[Way, Any]:
    """Play the chosen rows over one engine, one after another."""
    from tokenizers import Tokenizer

    reader = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    async with recording(url) as (proxy, seen):
        host = PolicyHost(PolicyConfig(base_url=[proxy], model=name, tokenizer=str(tokenizer), unreachable_s=30))
        async with host.lifespan():
            meter = Meter(host, seen)
            first = await meter.play(NEUTRAL)
            if isinstance(first, RolloutError):
                return {NEUTRAL: first}
            counts = collections.Counter(token for sample in first for token in sample.sampled)
            common = [token for token, _ in counts.most_common(40)]
            rows = [way for way in ways(common, lambda token: reader.decode([token])) if chosen(way)]
            return {way: first if way is NEUTRAL else await meter.play(way) for way in rows}


def measure(
    url: str, name: str, folder: Path, tokenizer: Path, python: str, device: str, chosen: Callable[[Way], bool]
) -> dict[str, Result]:
    """Return what each chosen row shows over one engine, by the row's name."""
    played = asyncio.run(play_all(url, name, tokenizer, chosen))
    samples = [sample for each in played.values() if not isinstance(each, RolloutError) for sample in each]
    truths = iter(compute_truth(python, folder, device, samples))
    results = {}
    for way, each in played.items():
        if isinstance(each, RolloutError):
            results[way.name] = Result(refused=getattr(each, "field", None) or type(each).__name__)
            print(f"{way.name}: {each.reason[:300]}", file=sys.stderr)
        else:
            results[way.name] = judge(each, list(itertools.islice(truths, len(each))))
    return results


def measure_local(python: str) -> Iterator[tuple[str, dict[str, Result]]]:
    """Start an engine for each log-prob mode and model folder, one at a time."""
    from tests.policy.engines import MODEL, tiny_model, vllm

    plain = tiny_model()
    with tempfile.TemporaryDirectory() as name:
        configured = Path(name) / "model"
        shutil.copytree(plain, configured)
        path = configured / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | GENERATION_CONFIG))
        for mode, flags in MODES.items():
            found: dict[str, Result] = {}
            for folder, more in ((plain, ()), (configured, THINKING)):
                with vllm(folder, Path(name) / "engine.log", *flags, *more) as (url, _):
                    only = folder is configured
                    found |= measure(url, MODEL, folder, folder, python, "cpu", lambda way: way.configured is only)  # noqa: B023
            yield mode, found


def table(columns: Mapping[str, Mapping[str, Result]], tolerance: float, *, markdown: bool) -> str:
    """Return the table: a row for each way to sample, a column for each log-prob mode."""
    names = list(dict.fromkeys(name for results in columns.values() for name in results))
    rows = [["way to sample", *columns, "effect"]]
    for name in names:
        results = [results.get(name) for results in columns.values()]
        effects = [result.effect for result in results if result is not None and result.refused is None]
        shown = ["-" if result is None else result.shown(tolerance) for result in results]
        rows.append([name, *shown, f"{max(effects):.2g}" if effects else "-"])
    if markdown:
        rows.insert(1, ["---"] * len(rows[0]))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", help="URL of a running vLLM; by default each kind is started on the CPU")
    parser.add_argument("--mode", default="engine", help="name of its column")
    parser.add_argument("--model", default="tiny", help="name under which that engine serves the model")
    parser.add_argument("--model-folder", type=Path, help="its weights, for the truth")
    parser.add_argument("--tokenizer", type=Path, help="by default the model folder")
    parser.add_argument("--device", default="cpu", help="where the truth is computed")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="largest difference of a true row")
    parser.add_argument("--markdown", action="store_true", help="print the table for the docs")
    arguments = parser.parse_args()
    if arguments.engine and not arguments.model_folder:
        parser.error("--engine needs --model-folder")
    python = sys.executable
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        from tests.policy.engines import vllm_python

        python = str(vllm_python())
    if arguments.engine:
        folder = arguments.model_folder
        place = arguments.engine, arguments.model, folder, arguments.tokenizer or folder
        columns = {arguments.mode: measure(*place, python, arguments.device, lambda way: True)}
    else:
        columns = dict(measure_local(python))
    print(table(columns, arguments.tolerance, markdown=arguments.markdown))
    found = [result for results in columns.values() for result in results.values()]
    sys.exit(any(result.is_false(arguments.tolerance) for result in found))


if __name__ == "__main__":
    main()
