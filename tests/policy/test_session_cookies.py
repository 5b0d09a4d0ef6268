# SPDX-License-Identifier: Apache-2.0
"""A turn's route believes a session's cookie where Starlette's middleware does, whatever stands beside it."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from typing import Any

import itsdangerous
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.middleware.sessions import SessionMiddleware

from nemo_gym_prorl.policy.http.callers import Sessions


NAME, FIELD = "policy_model", "session_id"
OURS = Sessions(NAME, FIELD)
SIGNED = itsdangerous.TimestampSigner(NAME).sign(b64encode(b'{"session_id": "s"}')).decode()
GOOD = f"{NAME}={SIGNED}"


def starlettes(cookies: str) -> Any:
    """The session id that Starlette's own middleware reads."""
    seen = {}

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope["session"])

    scope = {"type": "http", "headers": [(b"cookie", cookies.encode())]}
    asyncio.run(SessionMiddleware(application, NAME, NAME)(scope, None, None))  # type: ignore[arg-type]
    return seen.get(FIELD)


def test_a_session_alone_is_believed() -> None:
    assert OURS.read(GOOD) == starlettes(GOOD) == "s"


@given(
    st.lists(st.sampled_from([GOOD, NAME, "=", ";", ",", " ", '"', "a=b", "other", "\\", "x"]), max_size=6).map(
        "".join
    )
)
@example(f"{GOOD}, a=b")
@example(f"{GOOD},")
@example(f'{NAME}="{SIGNED}"')
@example(f"a=b; {GOOD}; {NAME}=x")
def test_both_ways_believe_the_same(cookies: str) -> None:
    assert OURS.read(cookies) == starlettes(cookies)
