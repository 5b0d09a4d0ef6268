# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Conformance suite for NeMo Gym sandbox providers: guarantees that rollouts rely on.

Each check uses only Gym's common contract and runs on a fresh, real sandbox. A failed check reports what it found.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_gym.sandbox.providers.base import SandboxCreateError, SandboxProvider, SandboxSpec, SandboxStatus


CHECK_TIMEOUT_S = 120.0

SECRET_VARIABLE = "PRORL_CONFORMANCE_SECRET"


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """What became of one check: ``reason`` is empty if it passed."""

    name: str
    reason: str
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.reason


Check = Callable[[SandboxProvider, Any], Awaitable[None]]

CHECKS: list[Check] = []


def _check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def _expect(found: object, wanted: object) -> None:
    if found != wanted:
        raise AssertionError(f"expected {wanted!r}, got {found!r}")


@_check
async def output_errors_and_exit_code(provider: SandboxProvider, box: Any) -> None:
    done = await provider.exec(box, "printf out; printf err >&2; exit 3")
    _expect((done.stdout, done.stderr, done.return_code, done.error_type), ("out", "err", 3, None))


@_check
async def variables_and_folder(provider: SandboxProvider, box: Any) -> None:
    done = await provider.exec(box, 'printf %s "$A"; pwd', cwd="/usr", env={"A": "a b'\"$X\n"})
    _expect(done.stdout, "a b'\"$X\n/usr\n")


@_check
async def a_command_of_a_mebibyte(provider: SandboxProvider, box: Any) -> None:
    _expect((await provider.exec(box, f": {'x' * (1 << 20)}; echo done")).stdout, "done\n")


@_check
async def words_of_the_runtime_in_the_output_are_output(provider: SandboxProvider, box: Any) -> None:
    done = await provider.exec(box, "echo 'FATAL: no instance found' >&2; exit 5")
    _expect((done.return_code, done.error_type), (5, None))


@_check
async def a_time_limit_is_kept_and_named(provider: SandboxProvider, box: Any) -> None:
    begin = time.monotonic()
    done = await provider.exec(box, "sleep 30", timeout_s=1)
    _expect(done.error_type, "timeout")
    _expect(time.monotonic() - begin < 10, True)


@_check
async def a_time_limit_keeps_the_output_so_far(provider: SandboxProvider, box: Any) -> None:
    _expect((await provider.exec(box, "echo begun; sleep 30", timeout_s=1)).stdout, "begun\n")


@_check
async def a_time_limit_leaves_no_process(provider: SandboxProvider, box: Any) -> None:
    await provider.exec(box, "sleep 4242", timeout_s=1)
    await asyncio.sleep(0.2)
    _expect((await provider.exec(box, "cat /proc/[0-9]*/cmdline | tr -d '\\0' | grep -c '[s]leep4242'")).stdout, "0\n")


@_check
async def a_background_process_holds_up_nobody(provider: SandboxProvider, box: Any) -> None:
    begin = time.monotonic()
    await provider.exec(box, "sleep 20 & echo started", timeout_s=30)
    _expect(time.monotonic() - begin < 10, True)


@_check
async def files_come_back_unchanged(provider: SandboxProvider, box: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, back = Path(folder, "source"), Path(folder, "back")
        data = random.Random(1).randbytes(1 << 20)
        await asyncio.to_thread(source.write_bytes, data)
        await provider.upload_file(box, source, "/tmp/new folder/file")
        await provider.download_file(box, "/tmp/new folder/file", back)
        _expect(await asyncio.to_thread(back.read_bytes) == data, True)


@_check
async def an_upload_onto_a_folder_is_refused(provider: SandboxProvider, box: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        await asyncio.to_thread(source.write_bytes, b"x")
        await provider.exec(box, "mkdir -p /tmp/target")
        try:
            await provider.upload_file(box, source, "/tmp/target")
        except Exception:
            return
        raise AssertionError("it was accepted: " + ((await provider.exec(box, "ls /tmp/target")).stdout or ""))


@_check
async def a_missing_download_is_an_error(provider: SandboxProvider, box: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            await provider.download_file(box, "/tmp/missing", Path(folder, "back"))
        except Exception:
            return
        raise AssertionError("no error was raised")


@_check
async def files_live_from_one_command_to_the_next(provider: SandboxProvider, box: Any) -> None:
    await provider.exec(box, "echo kept > /tmp/kept")
    _expect((await provider.exec(box, "cat /tmp/kept")).stdout, "kept\n")


@_check
async def many_commands_run_at_once(provider: SandboxProvider, box: Any) -> None:
    begin = time.monotonic()
    done = await asyncio.gather(*(provider.exec(box, f"sleep 1; echo {number}") for number in range(16)))
    _expect([result.stdout for result in done], [f"{number}\n" for number in range(16)])
    _expect(time.monotonic() - begin < 8, True)


@_check
async def no_network(provider: SandboxProvider, box: Any) -> None:
    routes = await provider.exec(box, "tail -n +2 /proc/net/route | wc -l")
    _expect(routes.stdout, "0\n")


@_check
async def no_process_of_the_host(provider: SandboxProvider, box: Any) -> None:
    """A process of this machine with a name that can't be missed is looked for inside."""
    name = f"conformance-{os.getpid()}"
    host = await asyncio.create_subprocess_exec("sh", "-c", f": {name}; sleep 60 & wait")
    try:
        seen = await provider.exec(box, f"cat /proc/[0-9]*/cmdline | tr -d '\\0' | grep -c '[c]{name[1:]}'")
        _expect(seen.stdout, "0\n")
    finally:
        host.kill()
        await host.wait()


@_check
async def no_variable_of_the_host(provider: SandboxProvider, box: Any) -> None:
    _expect((await provider.exec(box, f'printf %s "${SECRET_VARIABLE}"')).stdout, "")


@_check
async def the_kernels_settings_are_closed(provider: SandboxProvider, box: Any) -> None:
    done = await provider.exec(box, "(: >> /proc/sys/kernel/core_pattern) 2>/dev/null && echo open || echo closed")
    _expect(done.stdout, "closed\n")


@_check
async def the_state_is_told(provider: SandboxProvider, box: Any) -> None:
    _expect(await provider.status(box), SandboxStatus.RUNNING)
    await provider.close(box)
    _expect(await provider.status(box), SandboxStatus.STOPPED)


@_check
async def closing_twice_is_harmless(provider: SandboxProvider, box: Any) -> None:
    await provider.close(box)
    await provider.close(box)


async def run(provider: SandboxProvider, image: str | None) -> list[CheckOutcome]:
    """Put a provider through every check; one sandbox is made for each.

    Args:
        provider: any of Gym's.
        image: for its sandboxes, in its own terms.
    """
    os.environ[SECRET_VARIABLE] = "told"
    try:
        outcomes = [await _run_one(check, provider, image) for check in CHECKS]
        outcomes.append(await _missing_image(provider))
    finally:
        del os.environ[SECRET_VARIABLE]
    return outcomes


async def _run_one(check: Check, provider: SandboxProvider, image: str | None) -> CheckOutcome:
    begin = time.monotonic()
    reason = ""
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            box = await provider.create(SandboxSpec(image=image))
            try:
                await check(provider, box)
            finally:
                if await provider.status(box) != SandboxStatus.STOPPED:
                    await provider.close(box)
    except Exception as error:
        # Whatever a stranger's provider raises is the check's result.
        reason = f"{type(error).__name__}: {error}"[:300]
    return CheckOutcome(getattr(check, "__name__", "check").replace("_", " "), reason, time.monotonic() - begin)


async def _missing_image(provider: SandboxProvider) -> CheckOutcome:
    begin = time.monotonic()
    reason = "a sandbox of a missing image was made"
    try:
        box = await provider.create(SandboxSpec(image="/no/such/image"))
        await provider.close(box)
    except SandboxCreateError:
        reason = ""
    except Exception as error:
        reason = f"{type(error).__name__}, which is no SandboxCreateError: {error}"[:300]
    return CheckOutcome("a missing image is a create error", reason, time.monotonic() - begin)
