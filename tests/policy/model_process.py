# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Run ``prorl_model`` as a process, without Gym's command line and Ray, which take half a minute to start.

    python -m tests.policy.model_process PORT BASE_URL [POLICY AS JSON]

An empty URL means no backend.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn

from tests.policy.engines import answers, free_port
from tests.policy.runtimes import server


START_S = 400


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    async def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as http,
            http.request(method, f"{self.url}{path}", json=body, headers=headers) as said,
        ):
            return said.status, await said.json(content_type=None)

    async def text(self, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}{path}") as said:
            return said.status, await said.text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def started(engine: str | None, folder: Path, port: int | None = None, **policy: Any) -> Server:
    """Start a server and wait until it answers.

    Args:
        engine: URL of its backend; ``None`` for none.
        folder: folder of the tokenizer and of the log.
        port: port to listen on; ``None`` for a free one.
        policy: settings of its policy.
    """
    port = port or free_port()
    settings = {"tokenizer": str(folder), "engine": "vllm", **policy}
    program = [sys.executable, "-m", "tests.policy.model_process", str(port), f"{engine}/v1" if engine else ""]
    log = folder / f"server-{port}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*program, json.dumps(settings)], stdout=out, stderr=out, cwd=Path(__file__).parents[2]
        )
    there = Server(process, f"http://127.0.0.1:{port}", log)
    deadline = time.monotonic() + START_S
    while not answers(f"{there.url}/v1/backends"):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    return there


def main(port: int, base_url: str, policy: str = "{}") -> None:
    logging.basicConfig(level=logging.INFO)
    settings = json.loads(policy)
    model = settings.pop("model", "tiny")
    app = server(base_url or [], Path(), model=model, port=port, policy=settings).setup_webserver()
    uvicorn.run(app, host="127.0.0.1", port=port, timeout_graceful_shutdown=1, timeout_keep_alive=30)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
