# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Policies for tests, bare or as a model server, and a minimal tokenizer."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import DictConfig
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel

from nemo_gym_prorl.policy.runtime import PolicyConfig, PolicyRuntime
from nemo_gym_prorl.servers.model_server import ProrlModel, ProrlModelConfig
from tests.policy.engines import MODEL


@contextlib.asynccontextmanager
async def hosted(*urls: str, **config: Any) -> AsyncIterator[PolicyRuntime]:
    """Run a policy over these engines."""
    host = PolicyRuntime(PolicyConfig(base_url=list(urls), **({"model": MODEL} | config)))
    async with host.lifespan():
        yield host


def server(
    base_url: str | list[str], model_folder: Path, deployment: dict[str, object] | None = None, **config: object
) -> ProrlModel:
    """Return a model server as Gym creates it in a deployment with these settings, not started."""
    settings = {
        "host": "127.0.0.1",
        "port": 0,
        "name": "policy_model",
        "entrypoint": "app.py",
        "base_url": base_url,
        "model": "tiny",
        "policy": {"tokenizer": str(model_folder)},
    }
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=DictConfig(deployment or {})
    )
    return ProrlModel(config=ProrlModelConfig.model_validate(settings | config), server_client=client)


def words_in(folder: Path, *words: str, template: str = "{{ messages[0].content }}") -> str:
    """Write a tokenizer of these words, which must include a question mark; too few for template validation."""
    numbered = {word: number for number, word in enumerate(words)}
    FastTokenizer(WordLevel(numbered, unk_token="?")).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)
