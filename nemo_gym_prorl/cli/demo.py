# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl demo``: real rollouts of a real Gym deployment, submitted and reported as `prorl submit` does.

Gym's own command line starts ``--environment prorl_code``; tools and tests run in containers. Only the policy may be a
stand-in: without an endpoint in ``PRORL_MODEL_URL`` the answers are scripted, the output says so, and the
demonstration checks that every rollout earned what its script deserves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import orjson
from rich.console import Console

from nemo_gym_prorl.cli.demo_scripts import script_for
from nemo_gym_prorl.cli.environments import check_overrides
from nemo_gym_prorl.cli.files import read_rollouts
from nemo_gym_prorl.cli.scripted import server as scripted
from nemo_gym_prorl.cli.scripted.text import MODEL_NAME
from nemo_gym_prorl.cli.show import file_table
from nemo_gym_prorl.cli.submit import Order, submit
from nemo_gym_prorl.deployment.deployment import GymDeployment
from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.http.keys import authorization
from nemo_gym_prorl.sandbox.images.builder import KERNEL, ensure_image
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime
from nemo_gym_prorl.servers.task_sandboxes import PROGRESS
from nemo_gym_prorl.tasks.code.rows import humaneval_row, problems


AGENT = "prorl_code_agent"
ENVIRONMENT = "prorl_code"

SCRIPTS = ("repair", "reference", "repair", "reference", "stub", "repair", "text_only", "forge_tests")
"""The scripts of a scripted demonstration, in turn: honest ones, lazy ones, one that tampers with the tests."""

DESERVED = {"repair": 1.0, "reference": 1.0, "stub": 0.0, "text_only": 0.0, "forge_tests": 0.0}
"""The reward that each script deserves."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An inference endpoint.

    Attributes:
        url: base URL, ending in ``/v1``.
        model: the model's name there.
        api_key: its key.
        scripted: whether it is the scripted policy.
    """

    url: str
    model: str
    api_key: str
    scripted: bool


@dataclass(slots=True)
class Demo:
    """What to run and where to write.

    Attributes:
        rollouts: how many.
        output: JSONL file for the finished rollouts; the rows that they were made from are written beside it.
        overrides: further Hydra overrides for Gym.
        console: where to print.
    """

    rollouts: int = 16
    output: Path = Path("out/demo.jsonl")
    overrides: Sequence[str] = ()
    console: Console = field(default_factory=lambda: Console(highlight=False))

    async def run(self) -> bool:
        """Run it; ``True`` if every rollout was scored, and scripted ones as they deserve. Cancelled, it ends all
        that it has started.

        Raises:
            RolloutError: something that the demonstration needs is missing or fails.
        """
        begin = time.monotonic()
        check_overrides([ENVIRONMENT], "prorl_model", self.overrides)
        await asyncio.to_thread(self._provide_sandboxes)
        async with _endpoint() as endpoint:
            self._introduce(endpoint)
            scripts = [SCRIPTS[i % len(SCRIPTS)] if endpoint.scripted else "" for i in range(self.rollouts)]
            rows = self._write_rows(scripts)
            deployment = GymDeployment(
                environment=ENVIRONMENT,
                model_type="prorl_model",
                policy_base_url=endpoint.url,
                policy_model_name=endpoint.model,
                policy_api_key=endpoint.api_key,
                overrides=self.overrides,
            )
            self.console.print(f"Starting Gym servers (log: {deployment.log.path})", soft_wrap=True)
            telling = asyncio.create_task(deployment.report_start(self._say, PROGRESS))
            async with deployment:
                telling.cancel()
                self.console.print(f"{len(deployment.instances)} Gym servers up in {deployment.start_s:.1f} s")
                order = Order(rows, run="demo", client="demo", output=self.output)
                await deployment.guard(submit(order, deployment.url(AGENT), None))
        return self._report(scripts, time.monotonic() - begin)

    def _provide_sandboxes(self) -> None:
        runtime = ensure_runtime(self._say)
        # Gym's servers find it through the environment that they inherit.
        runtime.activate()
        image = ensure_image(KERNEL, self._say)
        self.console.print(f"Sandboxes: {runtime.flavor} {runtime.version_text}, image {image}", soft_wrap=True)

    def _say(self, message: str) -> None:
        self.console.print(f"  {message}", markup=False, soft_wrap=True)

    def _introduce(self, endpoint: Endpoint) -> None:
        if endpoint.scripted:
            self.console.print(
                f"[yellow]Policy: {MODEL_NAME}, no language model.[/] Its answers are written beforehand; everything "
                "else is real. Set PRORL_MODEL_URL to use a model.",
            )
        else:
            self.console.print(f"Policy: {endpoint.model} at {endpoint.url}", markup=False)

    def _write_rows(self, scripts: Sequence[str]) -> Path:
        """Write a row for each rollout, one problem each; problems start over when they run out."""
        every = list(problems().values())
        lines = []
        for i, script in enumerate(scripts):
            problem = every[i % len(every)]
            lines.append(orjson.dumps(humaneval_row(problem, script_for(problem, script) if script else None)) + b"\n")
        rows = self.output.with_suffix(".rows.jsonl")
        try:
            rows.parent.mkdir(parents=True, exist_ok=True)
            rows.write_bytes(b"".join(lines))
            self.output.unlink(missing_ok=True)  # of an earlier demonstration
        except OSError as error:
            raise CallerError(f"{error.filename} cannot be written: {error.strerror}", field="--output") from error
        return rows

    def _report(self, scripts: Sequence[str], seconds: float) -> bool:
        found = read_rollouts(self.output)
        self.console.print(file_table(found))
        scored = sum(row["rollout"]["reward"] is not None for row in found.values())
        self.console.print(
            f"{scored} of {len(scripts)} rollouts scored, {seconds:.1f} s in total. Trajectories: {self.output}, for "
            "prorl show",
            soft_wrap=True,
        )
        wrong = 0
        for row in found.values():
            script = scripts[row["rollout"]["source"]["line"] - 1]
            if script and row["rollout"]["reward"] != DESERVED[script]:
                self.console.print(f"{row['rollout']['id']}: the script {script!r} earned another reward", style="red")
                wrong += 1
        if any(scripts):
            self.console.print(
                f"[yellow]The policy was scripted ({MODEL_NAME}, no language model)[/]: these rewards show that the "
                "machinery works, and nothing about a model."
            )
        return scored == len(scripts) and not wrong


@contextlib.asynccontextmanager
async def _endpoint() -> AsyncIterator[Endpoint]:
    """The endpoint that the environment variables name, or a scripted policy for the time of the demonstration."""
    url = os.environ.get("PRORL_MODEL_URL")
    if not url:
        async with scripted.serve() as base_url:
            yield Endpoint(base_url, MODEL_NAME, "none", scripted=True)
        return
    url = url.rstrip("/")
    api_key = os.environ.get("PRORL_API_KEY", "none")
    model = os.environ.get("PRORL_MODEL_NAME") or await _only_model(url, api_key)
    yield Endpoint(url, model, api_key, scripted=False)


async def _only_model(url: str, api_key: str) -> str:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
            session.get(f"{url}/models", headers=authorization(api_key)) as response,
        ):
            response.raise_for_status()
            names = [str(card["id"]) for card in orjson.loads(await response.read())["data"]]
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        raise InfrastructureError(
            f"can't read the models of {url}: {type(error).__name__}: {error}; "
            "PRORL_MODEL_URL is the base URL, usually ending in /v1"
        ) from error
    if len(names) != 1:
        raise CallerError(f"{url} serves {', '.join(names) or 'no model'}: name one", field="PRORL_MODEL_NAME")
    return names[0]
