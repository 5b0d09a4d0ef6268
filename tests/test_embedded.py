# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a server inside a command prints, which is read by whoever called the command."""

import asyncio

import aiohttp
import pytest
from fastapi import FastAPI

from nemo_gym_prorl.serving.applications import served


@pytest.mark.parametrize(("path", "printed"), [("/waits", ""), ("/fails", "ZeroDivisionError")])
async def test_the_end_cancels_what_waits_without_a_word(
    path: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app, begun = FastAPI(), asyncio.Event()

    @app.get("/waits")
    async def waits() -> None:
        begun.set()
        await asyncio.sleep(600)

    @app.get("/fails")
    async def fails() -> None:
        begun.set()
        raise ZeroDivisionError

    async with aiohttp.ClientSession() as http:
        async with served(app) as url:
            request = asyncio.create_task(http.get(url + path))
            await begun.wait()
        await asyncio.gather(request, return_exceptions=True)
    said = capsys.readouterr().err
    assert printed in said if printed else said == "", said
