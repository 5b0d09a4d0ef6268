# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Handler ``harness``: a finished agent program runs in the row's sandbox, instead of the tool loop.

    INIT   POST /seed_session              with the harness's name, so that its bundle is mounted
    RUN    POST …/key                      on the model server: a key for this rollout's turns only
           POST <program path>             on the resources server, which answers when the program has ended
           GET …/calls                     on the model server, each second: turns, limits
           DELETE …/key, GET …/traces      on the model server: the conversation with its tokens
    EVAL   as every Gym environment

A program ends in one of these ways:

- With an exit code: the harness maps the code to a finish reason, and the rollout is scored as it stands.
- At a limit of turns or tokens: the model server refuses further calls, and the program is ended.
- At the end of the RUN budget, with the environment's policy ``on_timeout``.
- Without a call: an infrastructure failure, because nothing was sampled. So is an end after a call that the service
  could not answer: the program's failure may be the service's.

Afterwards the key is dead, and processes that the program left behind end with the sandbox, before EVAL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from nemo_gym_prorl.agent.gym_environment import GymContext, GymEnvironmentHandler, GymSession
from nemo_gym_prorl.agent.gym_http import HARNESS_HEADER, quote_header, require_json, require_ok
from nemo_gym_prorl.agent.harness_rollout import HarnessRollout, ProgramCalls
from nemo_gym_prorl.agent.run_rows import empty_response
from nemo_gym_prorl.background import start_eager_task
from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.harness.specification import HARNESS_EXIT, load_harness
from nemo_gym_prorl.rollout.job import Job, Trajectory, Verdict
from nemo_gym_prorl.rollout.turns import text_of


POLL_S = 1.0
"""Interval of reading a program's calls: a limit is seen within about one turn."""

OPEN_CONNECTION_S = 24 * 3600.0
"""Time limit of a program beyond its RUN budget, which waits for a backend extend, should its agent vanish unseen."""

_OUTPUT_CHARS = 1_000
_LIMITS = {"max_turns": "max_steps", "max_total_sequence_length": "max_total_sequence_length"}
_PROMPT_ROLES = ("system", "developer", "user")


class HarnessConfig(BaseModel):
    """Settings of the handler.

    Attributes:
        harness: name of a shipped harness, or path of a YAML file.
    """

    model_config = ConfigDict(extra="forbid")

    harness: str


class HarnessHandler(GymEnvironmentHandler):
    """Handler of an environment whose rows a program solves.

    Args:
        context: servers and limits, with a :class:`HarnessConfig`.

    Raises:
        CallerError: the environment has no resources server, or the harness does not exist.
    """

    name = "harness"
    Config = HarnessConfig

    def __init__(self, context: GymContext) -> None:
        super().__init__(context)
        named = context.config.harness
        try:
            self._harness = load_harness(named)
        except CallerError as error:
            raise CallerError(error.reason, field="handler_config.harness") from error
        self._bundle: str | None = None
        if self._harness.bundle is not None:
            # Servers have different working folders.
            self._bundle = str(Path(named).resolve()) if named.endswith((".yaml", ".yml")) else named
            self.seed_headers = {HARNESS_HEADER: quote_header(self._bundle)}

    async def run(self, job: Job, session: GymSession) -> Trajectory:
        """Run the program until it ends; ``job.trajectory`` is filled afterwards, also when cancelled."""
        params = job.row["responses_create_params"]
        job.trajectory = trajectory = Trajectory(empty_response(params), evidence=session)
        prompt = prompt_of(params)
        rollout = HarnessRollout(self.context.model_of(job), self._attempt_id(job), job, self.context.limits)
        try:
            end, calls = await self._run_program(job, session, rollout, prompt)
            await rollout.fetch_tokens()
        except BaseException:
            session.has_tokens = await self._fetch_tokens_in_time(job, rollout)
            raise
        finally:
            self._report(job, session, rollout)
            self.context.cleanup.start(f"job {job.id}: deleting its tokens", rollout.forget())
        self._conclude(job, end, calls)
        session.awaits_verdict = True
        return trajectory

    def timed_out(self, job: Job, session: GymSession) -> Trajectory | Verdict | None:
        """Apply the environment's policy; a verdict has the further traces, too."""
        result = super().timed_out(job, session)
        if isinstance(result, Verdict):
            result.result.update(session.row_fields)
        return result

    async def _seed(self, job: Job, path: str, body: dict[str, Any]) -> GymSession:
        prompt_of(job.row["responses_create_params"])  # refuses the row before its sandbox starts
        session = await super()._seed(job, path, body)
        if session.program_path is None:
            self._close_in_background(job, session)
            raise CallerError(
                f"{self._server.name} runs no programs for this row: handler 'harness' needs an environment of this "
                "project and a row with a sandbox of the provider 'singularity'",
                field=f"environments.{self.context.environment}.handler",
            )
        return session

    async def _run_program(
        self, job: Job, session: GymSession, rollout: HarnessRollout, prompt: str
    ) -> tuple[dict[str, Any] | None, ProgramCalls]:
        """Return the program's end, ``None`` at a limit, and its calls.

        Cancelling the request ends the program.
        """
        grant = await rollout.open()
        body = {
            "harness": self._harness.model_dump(mode="json", exclude_unset=True),
            "bundle": self._bundle,
            "prompt": prompt,
            "model": job.row["responses_create_params"].get("model") or "policy",
            "context": grant.context,
            "url": self.context.model_of(job).url,
            "key": grant.key,
            "timeout_s": job.budgets.run + OPEN_CONNECTION_S,
        }
        assert session.program_path is not None
        running = start_eager_task(self._server.post(session.program_path, body, session.cookies))
        try:
            while True:
                await asyncio.wait({running}, timeout=POLL_S)
                ended = running.done()
                calls = await rollout.calls()
                job.progress.turns = calls.turns
                if ended:
                    what = f"{self._server.name} {session.program_path}"
                    require_ok(running.result(), what, FailureKind.AGENT_RUN_ERROR)
                    end: dict[str, Any] = require_json(running.result(), what, FailureKind.AGENT_RUN_ERROR)
                    return end, calls
                if calls.limit is not None:
                    return None, calls
        finally:
            running.cancel()

    def _conclude(self, job: Job, end: dict[str, Any] | None, calls: ProgramCalls) -> None:
        """Set the finish reason.

        Raises:
            InfrastructureError: the program made no call, or the service could not answer its last one.
        """
        report = job.progress.harness
        report |= {"dropped": calls.dropped, "refused": calls.refused}
        if end is not None:
            report |= {"exit_code": end["exit_code"], "seconds": end["seconds"]}
        if calls.limit is not None:
            job.progress.finish_reason = _LIMITS[calls.limit]
            return
        assert end is not None
        if not calls.turns:
            raise InfrastructureError(
                f"{self._harness.name} ended with exit code {end['exit_code']} and called the policy never: "
                f"{end['output'][-_OUTPUT_CHARS:].strip() or 'no output'}",
                kind=FailureKind.AGENT_RUN_ERROR,
            )
        if calls.failed:
            raise InfrastructureError(
                f"{self._harness.name} ended after a call that {self.context.model_of(job).name} failed to answer: "
                f"refused calls by status: {calls.refused}",
                kind=FailureKind.AGENT_REQUEST_FAILED,
            )
        job.progress.finish_reason = self._harness.exit_codes.get(end["exit_code"], HARNESS_EXIT)
        if job.progress.finish_reason == HARNESS_EXIT:
            report["output"] = end["output"][-_OUTPUT_CHARS:]

    def _report(self, job: Job, session: GymSession, rollout: HarnessRollout) -> None:
        """Store what the row tells of the harness."""
        job.progress.harness = {"name": self._harness.name, "version": self._harness.version}
        if (traces := rollout.traces) is None:
            return
        job.progress.turns = max(job.progress.turns, len(traces.weight_versions))
        job.progress.weight_versions, job.progress.log_probs = traces.weight_versions, traces.log_probs
        job.progress.token_in_rate = traces.token_in_rate
        job.progress.harness |= {"branches": traces.branches, "token_in_rate": traces.token_in_rate}
        # At the top of the row, Gym averages numbers.
        told = {"training_traces": traces.training_traces, "token_in_rate": traces.token_in_rate}
        session.row_fields |= {name: value for name, value in told.items() if value is not None}


def prompt_of(params: Mapping[str, Any]) -> str:
    """Return a program's task: the instructions and the texts of a row's input.

    Raises:
        CallerError: the input has something else than text of system, developer or user.
    """
    given: str | Sequence[Mapping[str, Any]] = params["input"]
    texts = [params.get("instructions") or ""]
    for number, item in enumerate([{"role": "user", "content": given}] if isinstance(given, str) else given):
        content = item.get("content")
        parts: list[Any] = content if isinstance(content, list) else [content]
        is_text = all(isinstance(part, str) or (isinstance(part, dict) and "text" in part) for part in parts)
        if item.get("role") not in _PROMPT_ROLES or not is_text:
            raise CallerError(
                f"a harness takes messages of {', '.join(_PROMPT_ROLES)} with text, and nothing else",
                field=f"responses_create_params.input.{number}",
            )
        texts.append(text_of(content))
    return "\n\n".join(filter(None, texts))
