# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym's conformance check of resources server sessions (Gym 0.7 and later)."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.prorl_code.conftest import build, row
from tests.tasks import containers


conformance = pytest.importorskip("nemo_gym.testing.session_conformance")


@contextmanager
def on_one_loop(app: Any) -> Iterator[Any]:
    """Run the app on one event loop, since Gym's check creates a loop per request."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def bridged(scope: Any, receive: Any, send: Any) -> None:
        theirs = asyncio.get_running_loop()

        async def over(work: Any) -> Any:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, theirs))

        served = app(scope, lambda: over(receive()), lambda message: over(send(message)))
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(served, loop))

    try:
        yield bridged
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.sandbox
def test_sessions_pass_gyms_conformance_check() -> None:
    from nemo_gym.base_resources_server import ResourcesSeedSessionRequest

    seed = ResourcesSeedSessionRequest(
        resources_session_id="conformance",
        episode_id={"rollout_id": "conformance"},
        task_id={"taskset": "humaneval", "task_id": "HumanEval/2"},
        task_data=row("HumanEval/2"),
    )
    with on_one_loop(build().setup_webserver()) as app:
        conformance.check_resources_session_contract(app, seed, keeps_state=True)
    assert containers.instances() == set()
