# SPDX-License-Identifier: Apache-2.0
"""Who asks for a turn: names of rollouts as headers carry them, and callers that hang up."""

import asyncio
from collections.abc import Awaitable, Callable
from urllib.parse import unquote

import aiohttp
import pytest
from fastapi import FastAPI, Request, Response
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.handlers.gym_http import in_header
from nemo_gym_prorl.policy.http.callers import EndsWithCaller, header_text
from tests.rollout.serving import serve


async def test_a_caller_that_hangs_up_is_no_defect_to_the_middleware_around() -> None:
    """Gym's middleware prints two tracebacks for each request that ends without an answer."""
    begun, cancelled, seen = asyncio.Event(), asyncio.Event(), asyncio.Queue[int | Exception]()
    app = FastAPI()
    app.add_middleware(EndsWithCaller)

    @app.middleware("http")
    async def around(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        try:
            response = await call_next(request)
        except Exception as error:
            seen.put_nowait(error)
            raise
        seen.put_nowait(response.status_code)
        return response

    @app.post("/sample")
    async def sample() -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            cancelled.set()

    async with serve(app) as url, aiohttp.ClientSession() as http:
        asking = asyncio.create_task(http.post(f"{url}/sample", json={}))
        async with asyncio.timeout(60):
            await begun.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await cancelled.wait()
            assert await seen.get() == 499


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), min_size=1, max_size=30))
def test_a_header_says_what_our_agent_wrote(name: str) -> None:
    assert header_text(in_header(name)) == name


@given(st.binary(max_size=40))
def test_a_header_of_any_bytes_is_read(value: bytes) -> None:
    text = value.decode("latin-1")
    try:
        expected = unquote(value.decode())
    except UnicodeDecodeError:
        expected = unquote(text)
    assert header_text(text) == expected
