# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl scripted``: the scripted policy as a process of its own."""

from __future__ import annotations

import asyncio

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.scripted.policy import ScriptedConfig
from nemo_gym_prorl.scripted.server import serve


async def run(config: ScriptedConfig, host: str, port: int) -> None:
    """Serve until it is cancelled.

    Raises:
        InfrastructureError: the address can't be listened on.
    """
    try:
        async with serve(config, host=host, port=port) as url:
            print(f"Scripted policy {config.model} (no language model) at {url}", flush=True)
            await asyncio.Event().wait()
    except OSError as error:
        raise InfrastructureError(f"can't listen on {host}:{port}: {error.strerror}; try another --port") from error
