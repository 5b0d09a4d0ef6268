# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Gym's own servers, unmodified, several in one process and without Gym's command line.

    python -m tests.agent.gym_host NAME …

reads the merged configuration from the environment, where Gym's launcher puts it, and serves each named instance on
its address. Starting them through ``gym env start`` costs half a minute and a Ray cluster; the tests in
``tests/deployment`` do that. Here the servers matter, not how they are started.
"""

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI
from omegaconf import OmegaConf


ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def instance(server_type: str, implementation: str, **settings: Any) -> dict[str, Any]:
    """The configuration block of one server instance, with an address."""
    block = {"entrypoint": "app.py", "host": "127.0.0.1", "port": free_port(), **settings}
    return {server_type: {implementation: block}}


def url_of(block: dict[str, Any]) -> str:
    [implementations] = block.values()
    [server] = implementations.values()
    return f"http://{server['host']}:{server['port']}"


@contextlib.asynccontextmanager
async def hosting(config: dict[str, Any], *names: str, cwd: Path = ROOT) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a process in ``cwd`` that serves the named instances of ``config`` (default: all), killed on leaving."""
    merged = {**config, "head_server": {"host": "127.0.0.1", "port": 1}, "dry_run": False}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"NEMO_GYM_CONFIG_DICT": json.dumps(merged), "PYTHONPATH": paths}
    served = names or tuple(config)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.agent.gym_host", *served, env=env, cwd=cwd
    )
    try:
        async with asyncio.timeout(180), aiohttp.ClientSession() as http:
            for block in (config[name] for name in served):
                while not await _answers(http, url_of(block)):
                    assert process.returncode is None, "the host ended"
                    await asyncio.sleep(0.05)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url):
            return True
    except aiohttp.ClientError:
        return False


def applications(config: Any, names: Sequence[str]) -> Iterator[tuple[FastAPI, Any]]:
    """Instances of a merged configuration as applications, each with its settings."""
    from nemo_gym.server_utils import BaseServerConfig, ServerClient, SimpleServer

    client = ServerClient(head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=config)
    for name in names:
        [(server_type, implementations)] = config[name].items()
        [(implementation, settings)] = implementations.items()
        module = importlib.import_module(f"{server_type}.{implementation}.app")
        classes = {
            value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, SimpleServer)
        }
        [server_class] = [one for one in classes if not any(one in other.__mro__[1:] for other in classes)]
        config_class = server_class.model_fields["config"].annotation
        server_config = config_class.model_validate(OmegaConf.to_container(settings, resolve=True) | {"name": name})
        server = server_class(config=server_config, server_client=client)
        app = server.setup_webserver()
        server.setup_exception_middleware(app)
        yield app, settings


async def serve(names: list[str]) -> None:
    from nemo_gym.global_config import get_global_config_dict

    running = []
    for app, settings in applications(get_global_config_dict(), names):
        options = uvicorn.Config(
            app, host=settings.host, port=settings.port, log_level="warning", timeout_keep_alive=30
        )
        running.append(uvicorn.Server(options).serve())
    await asyncio.gather(*running)


if __name__ == "__main__":
    # The event loop that uvicorn takes under Gym.
    asyncio.run(serve(sys.argv[1:]), loop_factory=uvicorn.Config("app").get_loop_factory())
