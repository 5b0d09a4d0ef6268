# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""No field of a request is dropped in silence, on any route and with any kind of engine."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from tests.policy.fields import CASES, Engine, ask, before, tokenizer_folder
from tests.policy.hosts import server
from tests.rollout.serving import serve as serving


@pytest.mark.parametrize("protocol", ["vllm", "vllm_chat"])
async def test_every_field_is_served_or_refused_by_its_name(protocol: str, tmp_path: Path) -> None:
    folder, engine, wrong = tokenizer_folder(tmp_path), Engine(), {}
    async with before(engine) as upstream, aiohttp.ClientSession() as session:
        model = server(upstream, folder, policy={"engine": protocol, "tokenizer": str(folder)})
        async with serving(model.setup_webserver()) as url:
            for case in CASES:
                outcome, said = await ask(session, url, engine, case)
                if outcome not in ("served", "refused") and (outcome, case.name) != ("changed", "model"):
                    wrong[str(case)] = outcome, said
    assert not wrong, "\n".join(f"{case}: {outcome}: {said}" for case, (outcome, said) in wrong.items())
