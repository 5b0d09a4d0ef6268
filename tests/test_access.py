# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Who may call: the key, and where a server may listen without one."""

import aiohttp
import pytest
from fastapi import FastAPI

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.serving.access import KeyGuard, check_exposure
from nemo_gym_prorl.serving.keys import authorization
from tests.rollout.serving import serve


@pytest.mark.parametrize("host", [None, "localhost", "127.0.0.1", "127.8.9.10", "::1"])
def test_loopback_needs_no_key(host: str | None) -> None:
    check_exposure(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "node17", "127.0.0.1.example.org"])
def test_what_others_can_reach_needs_a_key(host: str) -> None:
    with pytest.raises(CallerError, match="control_token: the server would listen on"):
        check_exposure(host, None)
    check_exposure(host, "s3cret")


@pytest.mark.parametrize("key", ["", "schlüssel", "two words", "line\n"])
def test_a_key_that_no_header_carries_is_refused(key: str) -> None:
    with pytest.raises(CallerError, match="control_token"):
        check_exposure("127.0.0.1", key)


async def test_every_route_but_the_pulse_needs_the_key() -> None:
    app = FastAPI()
    app.add_middleware(KeyGuard, key="s3cret")
    for path in ("/healthz", "/run", "/deep/route"):
        app.get(path)(lambda: "ok")
    async with serve(app) as url, aiohttp.ClientSession() as http:
        wrong = [{}, authorization("other"), {"Authorization": "s3cret"}, {"Authorization": "Bearer s3cret\xfc"}]
        for headers in wrong:
            for path in ("/run", "/deep/route", "/openapi.json", "/no/route"):
                async with http.get(url + path, headers=headers) as response:
                    assert response.status == 401
                    assert response.content_type == "application/problem+json"
                    assert response.headers["WWW-Authenticate"] == "Bearer"
            async with http.get(url + "/healthz", headers=headers) as response:
                assert response.status == 200
        async with http.get(url + "/run", headers=authorization("s3cret")) as response:
            assert response.status == 200
