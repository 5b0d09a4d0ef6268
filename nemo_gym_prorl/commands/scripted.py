# SPDX-License-Identifier: Apache-2.0
"""``prorl scripted``: the scripted policy as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.scripted.policy import ScriptedConfig
from nemo_gym_prorl.scripted.server import serve


def run(config: ScriptedConfig, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        InfrastructureError: the address can't be listened on.
    """
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(_run(config, host, port))


async def _run(config: ScriptedConfig, host: str, port: int) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        async with serve(config, host=host, port=port) as url:
            print(f"Scripted policy {config.model} (no language model) at {url}", flush=True)
            await ended.wait()
    except OSError as error:
        raise InfrastructureError(f"can't listen on {host}:{port}: {error.strerror}; try another --port") from error
