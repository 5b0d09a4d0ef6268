# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of many nodes on one machine: each node is a raylet.

As a program this is the cluster: it prints its address, and then takes ``kill NODE`` and ``add [NAME=VALUE ...]`` on
standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO, Any

from nemo_gym_prorl.deployment.gym_cli import RAY_START_S
from nemo_gym_prorl.processes import ProcessMark, reaper_command


ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_raylet_start_wait_time_s": str(RAY_START_S),
}
_HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""A node that does not answer is dead after 3 to 5 seconds; with Ray's defaults after 13."""
_STORE_BYTES = 80 * 2**20


class Raylets:
    """A running cluster; made by :func:`raylets`."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._process, self._errors = process, errors
        self.address = ""
        self.nodes: list[str] = []
        """First 12 letters of the nodes' ids."""

    async def kill(self, node: str) -> None:
        """Kill a raylet with SIGKILL."""
        await self._say(f"kill {node}")
        self.nodes.remove(node)

    async def add(self, **variables: str) -> str:
        """Add a node with these variables in its environment; return its id.

        ``ADDRESS`` is the node's address, by default the next one of the loopback device.
        """
        node = await self._say(" ".join(["add", *(f"{name}={value}" for name, value in variables.items())]))
        self.nodes.append(node)
        return node

    async def _say(self, what: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n".encode())
        return await self.heard()

    async def heard(self) -> str:
        """Return the next answer, without Ray's own output."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.startswith(b"cluster: "):
                return line.decode().removeprefix("cluster: ").strip()
        self._errors.seek(0)
        raise RuntimeError(f"the cluster has ended: {self._errors.read()[-2000:].decode(errors='replace')}")


@contextlib.asynccontextmanager
async def raylets(count: int) -> AsyncIterator[Raylets]:
    """Run a cluster of so many nodes for sandboxes, and a head without sandboxes."""
    mark = ProcessMark("PRORL_RAYLETS", os.urandom(8).hex())
    # The path of a Unix socket must be short.
    folder = Path(tempfile.mkdtemp(prefix="prorl-ray-", dir="/tmp"))
    command = [sys.executable, "-m", "tests.deployment.raylets", str(count)]
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # the process has it as long as it lives
    process = await asyncio.create_subprocess_exec(
        *reaper_command(mark, command, sys.executable, folder),
        env=os.environ | ENVIRONMENT | {"RAY_TMPDIR": str(folder), mark.name: mark.value},
        cwd=Path(__file__).parents[2],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    )
    try:
        cluster = Raylets(process, errors)
        cluster.address, *cluster.nodes = (await cluster.heard()).split()
        yield cluster
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        await mark.kill(settle_s=0)
        errors.close()


def _tried[T](start: Callable[[], T]) -> T:
    """Try again: Ray gives its processes a fixed time, which a busy machine may exceed."""
    for pause_s in (0.0, 1.0, 5.0, 20.0):
        with contextlib.suppress(Exception):
            return start()
        time.sleep(pause_s)
    return start()


def _main(count: int) -> None:
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": _STORE_BYTES, "include_dashboard": False, "_system_config": _HEALTH}
    cluster = _tried(lambda: Cluster(initialize_head=True, head_node_args=head))

    def add(*pairs: str) -> str:
        variables = dict(pair.split("=", 1) for pair in pairs)
        address = variables.pop("ADDRESS", f"127.0.0.{next(numbers)}")
        node: dict[str, Any] = {"num_cpus": 1, "resources": {"prorl_node": 1}, "object_store_memory": _STORE_BYTES}
        raylet = _tried(lambda: cluster.add_node(**node, node_ip_address=address, env_vars=variables))
        by_id[raylet.node_id[:12]] = raylet
        return str(raylet.node_id[:12])

    by_id: dict[str, object] = {}
    numbers = itertools.count(2)
    print("cluster:", cluster.address, *(add() for _ in range(count)), flush=True)
    for line in sys.stdin:
        match line.split():
            case ["kill", node]:
                cluster.remove_node(by_id.pop(node), allow_graceful=False)
                print("cluster:", node, flush=True)
            case ["add", *pairs]:
                print("cluster:", add(*pairs), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    _main(int(sys.argv[1]))
