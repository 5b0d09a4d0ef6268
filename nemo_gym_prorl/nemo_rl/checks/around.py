# SPDX-License-Identifier: Apache-2.0
"""What a training finds around it: its rows, and services that run elsewhere. Looks, and starts nothing."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from nemo_gym_prorl.nemo_rl.checks.finding import MISSING, Finding, at, block_at, count_at, number_at
from nemo_gym_prorl.nemo_rl.settings import ProrlSettings, Rollouts, Runtime
from nemo_gym_prorl.serving.keys import authorization


ANSWER_S = 5.0
"""How long a service may take to say that it is there."""

_ROWS = "data.train.data_path"
_PARSERS = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"


def check(config: Mapping[str, Any], settings: ProrlSettings) -> list[Finding]:
    """Look at all of it."""
    findings = [*rows(config, settings), *key(settings)]
    return [*findings, *asyncio.run(services(settings))] if settings.rollouts is Rollouts.SERVICE else findings


def rows(config: Mapping[str, Any], settings: ProrlSettings) -> Iterator[Finding]:
    """Whether there are rows, and whether they suffice for the steps."""
    path = at(config, _ROWS)
    if not isinstance(path, str) or path == MISSING:
        return
    epochs, steps = number_at(config, "grpo.max_num_epochs"), number_at(config, "grpo.max_num_steps")
    if epochs is None and settings.runtime is Runtime.SINGLE_CONTROLLER:
        yield Finding("grpo.max_num_epochs", "SingleController multiplies with it", "A number, e.g. 1000")
    prompts = count_at(config, "grpo.num_prompts_per_step")
    try:
        count, with_tools = _read_rows(Path(path))
    except (OSError, ValueError) as error:
        yield Finding(_ROWS, str(error), "A file of rows, one JSON object in each line, as `prorl data` writes it")
        return
    if not count:
        yield Finding(_ROWS, f"{path} has no rows", "A file of rows, as `prorl data` writes it")
        return
    if with_tools:
        yield from parsers(config)
    if epochs is not None and steps is not None and count * epochs // prompts < steps:
        least = -(-int(steps) * prompts // count)
        yield Finding(
            "grpo.max_num_epochs",
            f"NeMo RL ends the training after {count * int(epochs) // prompts} of {int(steps)} steps: {count} rows "
            f"{int(epochs)} times are all that its {prompts} prompts for each step are taken from",
            f"At least {least}, or lower grpo.max_num_steps",
        )


def parsers(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether NeMo RL's server takes apart what a model with tools writes: by itself it hands it all out as text, and
    each rollout would end with its first turn."""
    said = block_at(config, _PARSERS)
    if not isinstance(said.get("tool_parser"), str) or not said["tool_parser"]:
        yield Finding(
            f"{_PARSERS}.tool_parser",
            "the rows offer tools, and NeMo RL's server would hand calls out as text: no tool would ever be called",
            "vLLM's name for how the model writes calls, e.g. hermes for Qwen3",
        )
    if "reasoning_parser" not in said:
        yield Finding(
            f"{_PARSERS}.reasoning_parser",
            "nobody says whether the model thinks: calls that it only considers would be carried out",
            "vLLM's name for how it writes thoughts, e.g. qwen3, or null for a model that does not think",
        )


def _read_rows(path: Path) -> tuple[int, bool]:
    """How many rows there are, and whether one has tools. Each line is looked at: NeMo RL takes each for a row, blank
    ones, too, and reads them when its engines are up.

    Raises:
        OSError: it can't be read.
        ValueError: a line is no row.
    """
    count, with_tools = 0, False
    with path.open(encoding="utf-8") as lines:
        for count, line in enumerate(lines, 1):
            try:
                with_tools = bool(_params_of(line).get("tools")) or with_tools
            except ValueError as error:
                raise ValueError(f"line {count} of {path} {error}") from error
    return count, with_tools


def _params_of(line: str) -> dict[str, Any]:
    if not line.strip():
        raise ValueError("is blank")
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from error
    params = row.get("responses_create_params") if isinstance(row, dict) else None
    if not isinstance(params, dict):
        raise ValueError("has no responses_create_params, as Gym's rows have")
    longest = params.get("max_output_tokens")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise ValueError(f"has a max_output_tokens that is no number of tokens: {longest!r}")
    return params


def key(settings: ProrlSettings) -> Iterator[Finding]:
    """Whether the variable with the services' key is set."""
    if settings.key_env is not None and not os.environ.get(settings.key_env):
        yield Finding(
            "prorl.key_env", f"the environment variable {settings.key_env} is not set", f"export {settings.key_env}=…"
        )


async def services(settings: ProrlSettings) -> list[Finding]:
    """Whether each answers, as what it is taken for, to this key."""
    headers = authorization(os.environ.get(settings.key_env) if settings.key_env else None)
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        asked = [
            *(
                _ask(session, f"prorl.services[{place}]", url, "/status", "stages", "prorl_agent")
                for place, url in enumerate(settings.services)
            ),
            *(
                _ask(session, f"prorl.models[{place}]", url, "/v1/backends", "backends", "prorl_model")
                for place, url in enumerate(settings.models)
            ),
        ]
        return [finding for finding in await asyncio.gather(*asked) if finding is not None]


async def _ask(
    session: aiohttp.ClientSession, field: str, url: str, path: str, part: str, what: str
) -> Finding | None:
    try:
        async with session.get(url + path) as response:
            if response.status in (401, 403):
                return Finding(field, f"{url} refuses the key", "Set prorl.key_env to the variable that has its token")
            body = await response.json(content_type=None) if response.status == 200 else None
    except TimeoutError:
        return Finding(field, f"{url} does not answer within {ANSWER_S:g} s", "Start the service, or correct the URL")
    except (aiohttp.ClientError, OSError) as error:
        return Finding(field, f"{url} can't be reached: {error}", "Start the service, or correct the URL")
    except ValueError:
        body = None
    if not isinstance(body, dict) or part not in body:
        return Finding(field, f"{url} answers, but is no {what}", "Correct the URL")
    return None
