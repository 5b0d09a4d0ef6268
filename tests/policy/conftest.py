# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the policy tests.

``PRORL_TEST_ENGINES=URL,URL`` uses engines that run already (a vLLM with ``--trust-request-chat-template`` and
``--logprobs-mode processed_logprobs``).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from nemo_gym_prorl.http.client import HttpClient
from nemo_gym_prorl.policy.text.formats import FORMATS
from tests.policy.engines import PROCESSED, tiny_model, vllm
from tests.policy.runtimes import words_in


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return tiny_model()


@pytest.fixture(scope="package")
def engine_url(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start one real vLLM for the package; it renders with the template of each request."""
    if running := os.environ.get("PRORL_TEST_ENGINES"):
        yield running.split(",")[0]
        return
    log = tmp_path_factory.mktemp("vllm") / "engine.log"
    with vllm(model_folder, log, "--trust-request-chat-template", *PROCESSED) as (url, _):
        yield url


@pytest.fixture
async def connections() -> AsyncIterator[HttpClient]:
    async with HttpClient() as connections:
        yield connections


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a folder with a tokenizer of three words, and skip template validation, which needs more."""
    monkeypatch.setattr("nemo_gym_prorl.policy.runtime.validate_template", lambda *_, **__: FORMATS["hermes"])
    folder = tmp_path / "words"
    folder.mkdir()
    return words_in(folder, "hi", "ho", "?")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark engine tests, with a timeout that covers building the engine's environment and training the model once."""
    for item in items:
        if {"engine_url", "model_folder"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.engine)
        if Path(item.path).parent == Path(__file__).parent and item.get_closest_marker("engine"):
            item.add_marker(pytest.mark.timeout(900))
            item.add_marker(pytest.mark.long("starts a real vLLM"))
