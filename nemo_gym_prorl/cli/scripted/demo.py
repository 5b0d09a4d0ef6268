# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Implementation of ``prorl demo``: HumanEval rollouts in a Gym deployment, submitted like ``prorl submit``.

Gym's command line starts the environment ``prorl_code``; tools and tests run in sandboxes. Without an endpoint in
``PRORL_MODEL_URL`` the policy is scripted; the demo then checks each rollout's reward against its script.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from rich.console import Console

from nemo_gym_prorl.cli.environments import check_overrides
from nemo_gym_prorl.cli.json_lines import read_rollouts
from nemo_gym_prorl.cli.scripted import server as scripted
from nemo_gym_prorl.cli.scripted.text import MODEL_NAME, Turn, call, script_of, turn
from nemo_gym_prorl.cli.show import file_table
from nemo_gym_prorl.cli.submit import SubmitOptions, submit
from nemo_gym_prorl.deployment.deployment import GymDeployment
from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.http.keys import authorization
from nemo_gym_prorl.sandbox.images.builder import KERNEL, ensure_image
from nemo_gym_prorl.sandbox.runtime.install import ensure_runtime
from nemo_gym_prorl.servers.task_sandboxes import PROGRESS
from nemo_gym_prorl.tasks.code.code_rows import SOLUTION_FILE, HumanEvalProblem, humaneval_row, problems


AGENT = "prorl_code_agent"
ENVIRONMENT = "prorl_code"

SCRIPTS = ("repair", "reference", "repair", "reference", "stub", "repair", "text_only", "forge_tests")
"""Scripts of consecutive rollouts, repeated: correct solutions, missing solutions, and forged tests."""

EXPECTED_REWARDS = {"repair": 1.0, "reference": 1.0, "stub": 0.0, "text_only": 0.0, "forge_tests": 0.0}
"""Expected reward by script."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Inference endpoint of the demo's policy; ``url`` is a base URL, usually ending in ``/v1``."""

    url: str
    model: str
    api_key: str
    scripted: bool


@dataclass(slots=True)
class Demo:
    """One run of the demo.

    Attributes:
        rollouts: number of rollouts.
        output: JSONL file for the results; the rows are written to ``<name>.rows.jsonl`` in the same folder.
        overrides: Hydra overrides for Gym's servers.
    """

    rollouts: int = 16
    output: Path = Path("out/demo.jsonl")
    overrides: Sequence[str] = ()
    console: Console = field(default_factory=lambda: Console(highlight=False))

    async def run(self) -> bool:
        """Run the demo; return whether every rollout was scored, and every scripted rollout as expected.

        Raises:
            RolloutError: the container runtime, an image, the endpoint or a server is missing or fails.
        """
        start = time.monotonic()
        check_overrides([ENVIRONMENT], "prorl_model", self.overrides)
        await asyncio.to_thread(self._provide_sandboxes)
        async with _endpoint() as endpoint:
            self._print_policy(endpoint)
            scripts = [SCRIPTS[i % len(SCRIPTS)] if endpoint.scripted else "" for i in range(self.rollouts)]
            rows = self._write_rows(scripts)
            deployment = GymDeployment(
                config_paths=[f"environments/{ENVIRONMENT}/config.yaml"],
                model_type="prorl_model",
                policy_base_url=endpoint.url,
                policy_model_name=endpoint.model,
                policy_api_key=endpoint.api_key,
                overrides=self.overrides,
            )
            self.console.print(f"Starting Gym servers (log: {deployment.log.path})", soft_wrap=True)
            reporting = asyncio.create_task(deployment.report_start(self._say, PROGRESS))
            async with deployment:
                reporting.cancel()
                self.console.print(f"{len(deployment.instances)} Gym servers ready in {deployment.start_s:.1f} s")
                options = SubmitOptions(rows, run="demo", output=self.output)
                await deployment.guard(submit(options, deployment.url(AGENT), None))
        return self._report(scripts, time.monotonic() - start)

    def _provide_sandboxes(self) -> None:
        runtime = ensure_runtime(self._say)
        runtime.activate()  # sets environment variables, which Gym's servers inherit
        image = ensure_image(KERNEL, self._say)
        self.console.print(f"Sandboxes: apptainer {runtime.version_text}, image {image}", soft_wrap=True)

    def _say(self, message: str) -> None:
        self.console.print(f"  {message}", markup=False, soft_wrap=True)

    def _print_policy(self, endpoint: Endpoint) -> None:
        if endpoint.scripted:
            self.console.print(
                f"[yellow]Policy: {MODEL_NAME}, no language model.[/] Answers are scripted; servers, sandboxes and "
                "rewards are real. Set PRORL_MODEL_URL to use a model.",
            )
        else:
            self.console.print(f"Policy: {endpoint.model} at {endpoint.url}", markup=False)

    def _write_rows(self, scripts: Sequence[str]) -> Path:
        """Write one row per rollout with a problem of its own; problems repeat if there are more rollouts."""
        all_problems = list(problems().values())
        lines = []
        for i, script in enumerate(scripts):
            problem = all_problems[i % len(all_problems)]
            lines.append(orjson.dumps(humaneval_row(problem, script_for(problem, script) if script else None)) + b"\n")
        rows = self.output.with_suffix(".rows.jsonl")
        try:
            rows.parent.mkdir(parents=True, exist_ok=True)
            rows.write_bytes(b"".join(lines))
            self.output.unlink(missing_ok=True)  # results of an earlier demo
        except OSError as error:
            raise CallerError(f"cannot write {error.filename}: {error.strerror}", field="--output") from error
        return rows

    def _report(self, scripts: Sequence[str], seconds: float) -> bool:
        found = read_rollouts(self.output)
        self.console.print(file_table(found))
        scored = sum(row["rollout"]["reward"] is not None for row in found.values())
        self.console.print(
            f"{scored} of {len(scripts)} rollouts scored in {seconds:.1f} s. To see a trajectory: prorl show "
            f"{self.output}:1",
            soft_wrap=True,
        )
        wrong = 0
        for row in found.values():
            script, reward = scripts[row["rollout"]["source"]["line"] - 1], row["rollout"]["reward"]
            if script and reward != EXPECTED_REWARDS[script]:
                expected = f"expected {EXPECTED_REWARDS[script]:g} for the script {script!r}"
                self.console.print(f"{row['rollout']['id']}: reward {reward}, {expected}", style="red")
                wrong += 1
        if any(scripts):
            self.console.print(
                f"[yellow]The policy was scripted ({MODEL_NAME}, no language model)[/]: these rewards show that the "
                "installation works, and nothing about a model."
            )
        return scored == len(scripts) and not wrong


@contextlib.asynccontextmanager
async def _endpoint() -> AsyncIterator[Endpoint]:
    """Yield the endpoint of ``PRORL_MODEL_URL``, or of a scripted policy that runs until the block ends."""
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
            f"cannot list the models of {url}: {type(error).__name__}: {error}; "
            "PRORL_MODEL_URL must be the base URL, usually ending in /v1"
        ) from error
    if len(names) != 1:
        raise CallerError(f"is required: {url} serves {', '.join(names) or 'no model'}", field="PRORL_MODEL_NAME")
    return names[0]


def script_for(problem: HumanEvalProblem, variant: str) -> dict[str, list[Turn]]:
    """Return a script of one of :data:`VARIANTS`.

    Raises:
        CallerError: unknown variant.
    """
    return script_of(VARIANTS, problem, variant)


def seeded_mistake(problem: HumanEvalProblem) -> tuple[str, str, str]:
    """Return a solution without the colon after the signature: source, wrong line and corrected line."""
    start = problem.prompt.index(f"def {problem.entry_point}(")
    line = problem.prompt[start:].split("\n", 1)[0].rstrip()
    wrong = line.removesuffix(":")
    return problem.reference_source.replace(line, wrong, 1), wrong, line


def _reference(problem: HumanEvalProblem) -> list[Turn]:
    return [
        turn("I write the whole function at once.", create(problem.reference_source)),
        turn("Does it load?", call("python", code=f"import solution\nprint(solution.{problem.entry_point})")),
        turn("It does.", call("submit")),
        turn("The solution is submitted."),
    ]


def _repair(problem: HumanEvalProblem) -> list[Turn]:
    """Repair a syntax error, using a shell function and a Python variable that persist over turns."""
    source, wrong, right = seeded_mistake(problem)
    check = f"check() {{ python3 -c 'import solution; print(solution.{problem.entry_point})'; }}"
    repair = call(
        "str_replace_editor", command="str_replace", path=SOLUTION_FILE, old_str=f"{wrong}\n", new_str=f"{right}\n"
    )
    return [
        turn("I write the function, and a check for later.", create(source), call("bash", command=check)),
        turn("Does it load?", call("bash", command="check")),
        turn(
            "A syntax error. I look at the file, and remember the line.",
            call("str_replace_editor", command="view", path=SOLUTION_FILE),
            call("python", code=f"line = {wrong!r}\nline"),
        ),
        turn("The colon is missing after the signature.", repair),
        turn(
            "Once more.",
            call("bash", command="check"),
            call("python", code=f"line + ':' in open({SOLUTION_FILE!r}).read()"),
        ),
        turn("Now it loads.", call("submit")),
        turn("The solution is submitted after one repair."),
    ]


def _stub(problem: HumanEvalProblem) -> list[Turn]:
    return [turn("I submit it as it is.", call("submit")), turn("Submitted.")]


def _text_only(problem: HumanEvalProblem) -> list[Turn]:
    return [turn(f"```python\n{problem.reference_source}```")]


def _forge_tests(problem: HumanEvalProblem) -> list[Turn]:
    """Submit no solution, and forge tests, verdict files and the standard library."""
    forgery = (
        "mkdir -p tests && echo 'def check(candidate): pass' > tests/test_solution.py && cp -r tests / 2>/dev/null; "
        'echo \'{"reason": "passed", "reward": 1}\' | tee verdict.json result.json; '
        "python3 - <<'EOF'\n"
        "import pathlib, random\n"
        "pathlib.Path(random.__file__).write_text('raise SystemExit(0)')\n"
        "EOF\n"
        "echo All tests passed."
    )
    return [
        turn("The tests should pass.", call("bash", command=forgery)),
        turn("All tests passed.", call("submit")),
        turn("All tests passed. Reward: 1.0"),
    ]


VARIANTS: Mapping[str, Callable[[HumanEvalProblem], list[Turn]]] = {
    "reference": _reference,
    "repair": _repair,
    "stub": _stub,
    "text_only": _text_only,
    "forge_tests": _forge_tests,
}
"""Turns by name of the variant: ``reference`` and ``repair`` solve the problem; other variants must earn nothing."""


def create(source: str) -> dict[str, Any]:
    """Return the tool call that writes a solution."""
    return call("str_replace_editor", command="create", path=SOLUTION_FILE, file_text=source)
