# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that ends the process of a hung test, with the stacks of its threads and of its asyncio tasks.

pytest-timeout raises an exception where the main thread happens to be. An event loop, or an ``except``, may swallow
that exception, which is raised once. Nor does it guard the teardown of a failed test. This is the second bound.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest


GRACE_S = float(os.environ.get("PRORL_TEST_GRACE_S", "30"))
"""How long a test may take to end after its time limit."""

_stderr = 2
_timer: threading.Timer | None = None


def pytest_configure() -> None:
    global _stderr
    _stderr = os.dup(2)  # before pytest captures what tests write there


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """pytest-timeout sets its own one after this."""
    global _timer
    limit_s = settings.timeout + GRACE_S
    _timer = threading.Timer(limit_s, _end, (item.nodeid, limit_s))
    _timer.daemon = True
    _timer.start()
    # Where C code holds the interpreter's lock, only this gets to run; pytest cancels it when a test fails.
    faulthandler.dump_traceback_later(limit_s + 5, exit=True, file=_stderr)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Iterator[None]:
    try:
        return (yield)
    finally:
        _disarm()


def pytest_enter_pdb() -> None:
    _disarm()


def _disarm() -> None:
    faulthandler.cancel_dump_traceback_later()
    if _timer is not None:
        _timer.cancel()


def _end(test: str, limit_s: float) -> None:
    lines = [f"\n{test} did not end in {limit_s:g} s; its asyncio tasks:"]
    for task in (found for found in gc.get_objects() if isinstance(found, asyncio.Task) and not found.done()):
        lines.append(f"Task {task.get_name()}")
        awaited: Any = task.get_coro()
        while awaited is not None:
            if (frame := _first_of(awaited, "cr_frame", "gi_frame", "ag_frame")) is not None:
                lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}')
            elif (generator := _generator_of(awaited)) is not None:
                awaited = generator
                continue
            awaited = _first_of(awaited, "cr_await", "gi_yieldfrom", "ag_await")
    os.write(_stderr, "\n".join([*lines, ""]).encode())
    faulthandler.dump_traceback(_stderr)
    os._exit(1)


def _first_of(it: object, *names: str) -> Any:
    return next((value for name in names if (value := getattr(it, name, None)) is not None), None)


def _generator_of(awaited: object) -> object | None:
    """The asynchronous generator that a step belongs to, which has no attribute for it."""
    return next((found for found in gc.get_referents(awaited) if isinstance(found, AsyncGenerator)), None)
