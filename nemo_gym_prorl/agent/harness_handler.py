# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Handler ``harness``: an existing agent program (a harness) runs in the row's sandbox, instead of the tool loop.

    INIT   POST /seed_session              with the harness's name, so that its bundle is mounted
    RUN    POST …/key                      on the model server: a key for this rollout's turns only
           POST <program path>             on the resources server, which answers when the program has ended
           GET …/calls                     on the model server, each second: turns and limits
           DELETE …/key, GET …/traces      on the model server: the conversation with its tokens
    EVAL   as every Gym environment

No log of the program is parsed, because the model server records every call. How a program ends decides what follows:

- An exit code: the harness maps it to a finish reason, and the rollout is scored as it stands.
- A limit of turns or tokens: the model server refuses further calls, and the rollout is scored as it stands.
- The end of the RUN budget: the environment's policy ``on_timeout`` applies.
- A call whose prompt is longer than the context (``context_overflow``): the rollout is scored as it stands.
- No turn, or an unanswered request (failed, dropped, or in flight at the end): an infrastructure failure, since the
  service may have caused it. An unanswered request does not count once its retry was answered.

Then the key is revoked. Processes that the program left behind end with the sandbox, before EVAL. Their calls in
flight at the revocation do not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict

from nemo_gym_prorl.agent.conversation import rollout_path
from nemo_gym_prorl.agent.gym_environment import GymContext, GymEnvironmentHandler, GymSession
from nemo_gym_prorl.agent.gym_http import (
    HARNESS_HEADER,
    LEASE_HEADER,
    CookieJar,
    quote_header,
    require_json,
    require_ok,
)
from nemo_gym_prorl.agent.run_rows import empty_response
from nemo_gym_prorl.async_tasks import start_eager_task
from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError, RolloutError
from nemo_gym_prorl.harness.bundles import find_bundles
from nemo_gym_prorl.harness.specification import HARNESS_EXIT, load_harness
from nemo_gym_prorl.http.key_guard import is_loopback
from nemo_gym_prorl.rollout.job import Job, Trajectory, Verdict
from nemo_gym_prorl.rollout.turn_records import text_of


POLL_S = 1.0
"""Seconds between two requests for a program's calls: a limit is detected within about one turn."""

OPEN_CONNECTION_S = 24 * 3600.0
"""Seconds beyond the RUN budget after which the resources server ends a program whose agent server has vanished. The
limit is long, because waiting for a backend extends the budget."""

CONTEXT = 128 * 1024
"""Context window of a program's model, in tokens, if neither the engine nor the environment limits it."""

_OUTPUT_CHARS = 1_000
_FINISH_REASONS = {"max_turns": "max_steps"}
_WITHOUT_SUBMIT = "There is no tool `submit` here: when the work is done, end with an answer."
"""Appended to the prompt of a row that offers the tool ``submit``, which programs do not have."""
_PROMPT_ROLES = ("system", "developer", "user")
_PROGRAM_FIELDS = frozenset({"input", "instructions", "tools", "tool_choice", "parallel_tool_calls"})
"""Request fields that the program sets for its calls; the row sets all others, such as the temperature."""


class HarnessConfig(BaseModel):
    """Settings of the handler: name of a shipped harness, or path of a YAML file."""

    model_config = ConfigDict(extra="forbid")

    harness: str


class HarnessHandler(GymEnvironmentHandler):
    """Handler of an environment whose rows an agent program (a harness) solves.

    Raises:
        CallerError: the environment has no resources server, or the harness does not exist. For a resources server on
            this machine also: the bundle of the harness is not built.
    """

    name = "harness"
    Config = HarnessConfig

    def __init__(self, context: GymContext) -> None:
        super().__init__(context)
        named = context.config.harness
        # Absolute, because the resources server resolves relative paths in a working folder of its own.
        source = str(Path(named).resolve()) if named.endswith((".yaml", ".yml")) else named
        try:
            self._harness = load_harness(named)
            if is_loopback(urlsplit(self._server.url).hostname):  # its sandboxes use the bundles of this machine
                find_bundles(self._harness, source)
        except (CallerError, InfrastructureError) as error:
            raise CallerError(error.reason, field="handler_config.harness") from error
        self.seed_headers = {HARNESS_HEADER: quote_header(source) if self._harness.bundle is not None else ""}

    async def run(self, job: Job, session: GymSession) -> Trajectory:
        """Run the program until it ends or reaches a limit, then fill ``job.trajectory``; when cancelled, fill it if
        the model server returns the turns within ``settle_s``."""
        job.trajectory = trajectory = Trajectory(empty_response(job.row["responses_create_params"]), evidence=session)
        job.progress.harness = {"name": self._harness.name, "version": self._harness.version}
        record = _RolloutRecord(self, job, session)
        try:
            end = await self._run_program(job, session, record)
            await record.fetch_tokens()
        except BaseException:
            session.has_tokens = await self._fetch_tokens_in_time(job, record.fetch_tokens)
            raise
        finally:
            self.context.cleanup.start(f"job {job.id}: deleting its tokens", record.forget())
        self._conclude(job, end, record.calls)
        session.awaits_verdict = True
        return trajectory

    def timed_out(self, job: Job, session: GymSession) -> Trajectory | Verdict | None:
        """Apply the environment's policy ``on_timeout``; add ``session.row_fields`` to the row of a verdict."""
        result = super().timed_out(job, session)
        if isinstance(result, Verdict):
            result.result.update(session.row_fields)
        return result

    async def _seed(self, job: Job, path: str, body: dict[str, Any]) -> GymSession:
        params = job.row["responses_create_params"]
        task = {"prompt": prompt_of(params), "model": str(params.get("model"))}
        try:  # refuses the row before its sandbox starts
            self._harness.launch(**task, origin="", home="", context=CONTEXT, libc="glibc")
        except CallerError as error:
            field = "model" if error.field == "model" else "input"
            raise CallerError(error.complaint, field=f"responses_create_params.{field}") from error
        session = await super()._seed(job, path, body)
        if session.program_path is None:
            self._close_in_background(job, session)
            raise CallerError(
                f"{self._server.name} runs no programs: handler 'harness' needs an environment of this project with "
                "the sandbox provider 'singularity'",
                field=f"environments.{self.context.environment}.handler",
            )
        return session

    async def _run_program(self, job: Job, session: GymSession, record: _RolloutRecord) -> dict[str, Any] | None:
        """Run the program and return the resources server's report of its end; ``None`` if a limit was reached.
        Cancelling the request, here in ``finally``, ends the program."""
        params, path = job.row["responses_create_params"], session.program_path
        assert path is not None
        grant = await record.open()
        longest = self.context.limits.max_total_sequence_length
        body = {
            "harness": self._harness.model_dump(mode="json", exclude_unset=True),
            "prompt": prompt_of(params),
            "model": params.get("model") or "policy",
            "context": min(filter(None, (grant["context"], longest)), default=CONTEXT),
            "url": self.context.model_of(job).url,
            "key": grant["key"],
            "timeout_s": job.budgets.run + OPEN_CONNECTION_S,
        }
        lease = {LEASE_HEADER: session.lease}
        running = start_eager_task(self._server.call("POST", path, body, session.cookies, lease))
        try:
            while True:
                await asyncio.wait({running}, timeout=POLL_S)
                ended, calls = running.done(), await record.ask("GET", "/calls")
                job.progress.turns = calls["turns"]
                if ended:
                    what = f"{self._server.name} {path}"
                    require_ok(running.result(), what, FailureKind.AGENT_RUN_ERROR)
                    end: dict[str, Any] = require_json(running.result(), what, FailureKind.AGENT_RUN_ERROR)
                    return end
                if calls["limit"] is not None:
                    return None
        finally:
            running.cancel()

    def _conclude(self, job: Job, end: dict[str, Any] | None, calls: dict[str, Any]) -> None:
        """Set the finish reason and the report of the program. Raise an ``InfrastructureError`` if the program ended
        without a turn, or the model server left a call unanswered."""
        name, report = self._harness.name, job.progress.harness
        report |= {part: calls[part] for part in ("dropped", "refused")}
        report |= {part: end[part] for part in ("exit_code", "seconds", "killed") if part in end} if end else {}
        if end is None or calls["limit"] is not None:
            job.progress.finish_reason = _FINISH_REASONS.get(calls["limit"], calls["limit"])
            return
        output = end["output"][-_OUTPUT_CHARS:].strip() or "no output"
        reason, refused = f"{name} ended with exit code {end['exit_code']}", f"refused: {calls['refused']}"
        if lost := calls["unanswered"]:
            reason += f", but the model server failed to answer {lost} of its calls ({refused}): {output}"
            raise InfrastructureError(reason, kind=FailureKind.AGENT_REQUEST_FAILED)
        if calls["context_full"]:
            job.progress.finish_reason = "context_overflow"
            return
        if not calls["turns"]:
            called = f"got no turn from the policy ({refused})" if calls["refused"] else "never called the policy"
            raise InfrastructureError(f"{reason} and {called}: {output}", kind=FailureKind.AGENT_RUN_ERROR)
        job.progress.finish_reason = self._harness.exit_codes.get(end["exit_code"], HARNESS_EXIT)
        if job.progress.finish_reason == HARNESS_EXIT:
            report["output"] = output


class _RolloutRecord:
    """Client of the model server's record of one attempt: its key, its calls and its turns."""

    def __init__(self, handler: HarnessHandler, job: Job, session: GymSession) -> None:
        self._model, self._limits = handler.context.model_of(job), handler.context.limits
        self._path = rollout_path(handler._attempt_id(job))
        self._job, self._session, self._opened = job, session, False
        self.calls: dict[str, Any] = {}
        """Counts of the program's calls until the key was revoked; empty before the revocation."""

    async def open(self) -> dict[str, Any]:
        """Create a key for the program; return the key, and the context length of the engines in tokens."""
        params = self._job.row["responses_create_params"]
        body = {
            "params": {name: value for name, value in params.items() if name not in _PROGRAM_FIELDS},
            "group": self._job.group,
            "run": self._job.run,
            "max_turns": self._limits.max_steps,
            "max_total_tokens": self._limits.max_total_sequence_length,
        }
        self._opened = True
        grant: dict[str, Any] = await self.ask("POST", "/key", body, CallerError)
        return grant

    async def fetch_tokens(self) -> None:
        """Revoke the key, so that no turn can follow, and copy the turns into the trajectory, the progress and the
        row's fields. No-op if no key was requested."""
        if not self._opened:
            return
        self.calls = await self.ask("DELETE", "/key")
        traces, progress, trajectory = await self.ask("GET", "/traces"), self._job.progress, self._job.trajectory
        assert trajectory is not None
        trajectory.response |= traces["response"]
        progress.weight_versions, progress.log_probs = traces["weight_versions"], traces["log_probs"]
        progress.turns = max(progress.turns, len(progress.weight_versions))
        progress.token_in_rate, progress.harness["branches"] = traces["token_in_rate"], traces["branches"]
        progress.steps, progress.tool_calls = traces["steps"], traces["tool_calls"]
        if traces["training_traces"] is not None:
            self._session.row_fields["training_traces"] = traces["training_traces"]

    async def forget(self) -> None:
        """Delete the rollout at the model server, with its key."""
        if self._opened:
            await self.ask("DELETE", "")

    async def ask(
        self, method: str, part: str, body: Any = None, refusal: type[RolloutError] = InfrastructureError
    ) -> Any:
        """Send a request to ``part``, a path below the rollout's path at the model server, and return the JSON of the
        answer. Raise the errors of :func:`.require_ok`, and a ``CallerError`` if the server serves no programs."""
        answer = await self._model.call(method, f"{self._path}{part}", body, CookieJar())
        what = f"{self._model.name} {method} {part or 'rollout'}"
        if answer.status in (404, 405):
            raise CallerError(f"{self._model.name} does not serve programs: use prorl_model", field="model_server")
        if answer.status == 422 and part == "/key":
            field, _, complaint = answer.error_text(2000).partition(": ")
            raise CallerError(complaint, field=f"responses_create_params.{field}")
        require_ok(answer, what, FailureKind.AGENT_REQUEST_FAILED, refusal)
        return require_json(answer, what, FailureKind.AGENT_REQUEST_FAILED)


def prompt_of(params: Mapping[str, Any]) -> str:
    """Return a program's prompt: instructions and texts of a row's input, and a hint if the row offers ``submit``.

    Raises:
        CallerError: an input item is not a text message of system, developer or user, or the instructions are not a
            string.
    """
    given: str | Sequence[Mapping[str, Any]] = params["input"]
    texts = [params.get("instructions") or ""]
    if not isinstance(texts[0], str):
        raise CallerError("must be a text", field="responses_create_params.instructions")
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
    if any(isinstance(tool, dict) and tool.get("name") == "submit" for tool in params.get("tools") or ()):
        texts.append(_WITHOUT_SUBMIT)
    return "\n\n".join(filter(None, texts))
