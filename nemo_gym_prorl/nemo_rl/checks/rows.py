# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The rows of a data set: whether they suffice for the steps, and whether what they need is there. NeMo RL reads them
when its engines are up."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_gym_prorl.nemo_rl.checks.finding import Finding, at, block_at, number_at


_ROWS = "data.train.data_path"
_PARSERS = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"


def check(config: Mapping[str, Any]) -> Iterator[Finding]:
    """All of it."""
    path = at(config, _ROWS)
    if not isinstance(path, str):
        return
    try:
        count, with_tools = _read(Path(path))
    except (OSError, ValueError) as error:
        yield Finding(_ROWS, str(error), "A file of rows, one JSON object in each line, as `prorl data` writes it")
        return
    if with_tools:
        yield from _parsers(config)
    paths = ("grpo.max_num_epochs", "grpo.max_num_steps", "grpo.num_prompts_per_step")
    epochs, steps, prompts = (int(number_at(config, path) or 0) for path in paths)
    if epochs and prompts and count * epochs // prompts < steps:
        yield Finding(
            "grpo.max_num_epochs",
            f"NeMo RL ends the training after {count * epochs // prompts} of {steps} steps: {count} rows {epochs} "
            f"times are all that its {prompts} prompts for each step are taken from",
            f"At least {-(-steps * prompts // count)}, or lower grpo.max_num_steps",
        )


def _parsers(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether NeMo RL's server takes apart what a model with tools writes: by itself it hands it all out as text, and
    each rollout would end with its first turn."""
    said = block_at(config, _PARSERS)
    if not said.get("tool_parser"):
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


def _read(path: Path) -> tuple[int, bool]:
    """How many rows there are, and whether one has tools. NeMo RL takes each line for a row, blank ones, too.

    Raises:
        OSError: it can't be read.
        ValueError: a line is no row, or there is none.
    """
    count, with_tools = 0, False
    with path.open(encoding="utf-8") as lines:
        for count, line in enumerate(lines, 1):
            try:
                with_tools = bool(json.loads(line)["responses_create_params"].get("tools")) or with_tools
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ValueError(f"line {count} of {path} is no row with responses_create_params: {error}") from error
    if not count:
        raise ValueError(f"{path} has no rows")
    return count, with_tools
