# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The rollout of a request, by header and URL, and cancellation on disconnect."""

import asyncio
import string
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote, unquote

import aiohttp
import pytest
from fastapi import FastAPI, Request, Response
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.agent.gym_http import quote_header
from nemo_gym_prorl.policy.http.callers import CancelOnDisconnect, RolloutUrlMiddleware
from tests.rollout.serving import serve


async def test_a_caller_that_hangs_up_is_no_defect_to_the_middleware_around() -> None:
    """Gym's middleware prints two tracebacks for each request that ends without an answer."""
    begun, cancelled, seen = asyncio.Event(), asyncio.Event(), asyncio.Queue[int | Exception]()
    app = FastAPI()
    app.add_middleware(CancelOnDisconnect)

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


IN_IDS = set(string.ascii_letters + string.digits + "._-")
IDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", fullmatch=True)


async def told(raw_path: str, *rollouts: str, whole: bool = False) -> tuple[dict[str, Any] | None, str]:
    """Return the request that is passed on for this path and these headers, or the body of the refusal."""
    passed: list[dict[str, Any]] = []
    sent: list[dict[str, Any]] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": unquote(raw_path),
        "raw_path": raw_path.encode(),
        "headers": [(b"content-type", b"json"), *((b"x-rollout-id", quote_header(one).encode()) for one in rollouts)],
    }
    await RolloutUrlMiddleware(behind, whole=whole)(scope, None, send)  # type: ignore[arg-type]
    if not sent:
        return passed[0], ""
    assert not passed
    assert sent[0]["status"] == 422
    return None, sent[1]["body"].decode()


@given(IDS, st.sampled_from(["", "/training-token-capture"]), st.sampled_from(["/v1/responses", "/v1/a%20b"]))
async def test_a_url_names_its_rollout(rollout: str, recorded: str, rest: str) -> None:
    path = f"/ng-rollout/{rollout}{recorded}{rest}"
    for headers in ((), (rollout,), ("",)):
        for whole, left in ((False, rest), (True, path)):
            scope, _ = await told(path, *headers, whole=whole)
            assert scope is not None
            assert scope["headers"] == [(b"content-type", b"json"), (b"x-rollout-id", rollout.encode())]
            assert (scope["path"], scope["raw_path"].decode()) == (unquote(left), left)


@given(st.text(st.characters(codec="utf-8"), max_size=220).map(lambda text: quote(text, safe="/%?#!:@+,;=~")))
async def test_what_is_no_id_is_refused(segment: str) -> None:
    scope, said = await told(f"/ng-rollout/{segment}/v1/responses")
    name = segment.partition("/")[0]
    is_id = name.isascii() and name[:1].isalnum() and len(name) <= 200 and not set(name) - IN_IDS
    assert (scope is not None) == (is_id and not segment.removeprefix(name).startswith("/ng-rollout/"))
    if scope is not None:
        assert dict(scope["headers"])[b"x-rollout-id"] == name.encode()
    else:
        assert '"field":"URL"' in said


@given(IDS, st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), min_size=1, max_size=30))
async def test_a_header_that_names_another_is_refused(rollout: str, other: str) -> None:
    scope, said = await told(f"/ng-rollout/{rollout}/v1/responses", other)
    assert (scope is None) == (other != rollout)
    assert (await told(f"/ng-rollout/{rollout}/v1/responses", rollout, other))[0] == scope
    assert scope is not None or '"field":"X-Rollout-Id"' in said
