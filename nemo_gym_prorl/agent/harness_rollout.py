# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A rollout whose calls come from a program: its key, its limits and its tokens at the model server.

The program gets a key that opens this rollout's turns and nothing else. The model server records every call, so the
conversation is fetched there once the program has ended, and no log of the program is parsed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, PositiveInt, ValidationError

from nemo_gym_prorl.agent.conversation import rollout_path
from nemo_gym_prorl.agent.gym_http import CookieJar, GymServer, require_json, require_ok
from nemo_gym_prorl.agent.tool_loop import LoopLimits
from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError, RolloutError
from nemo_gym_prorl.http.client import HttpAnswer
from nemo_gym_prorl.http.problem_document import field_errors, in_words
from nemo_gym_prorl.rollout.job import Job


CONTEXT = 128 * 1024
"""Context window that a program is told if neither the engine nor the environment limits it."""

_OF_THE_PROGRAM = frozenset({"input", "instructions", "tools", "tool_choice", "parallel_tool_calls"})
"""Fields of a row that a program decides for its calls; the row decides the others, such as the temperature."""


@dataclass(frozen=True, slots=True)
class ProgramGrant:
    """What a program needs to call its rollout's policy.

    Attributes:
        key: key for this rollout's turns.
        context: tokens of one sequence: a program compacts its conversation before.
    """

    key: str
    context: int


class ProgramCalls(BaseModel):
    """Calls of a program so far, as the model server counts them.

    Attributes:
        turns: sampled turns.
        limit: limit that a call exceeded.
        refused: refused calls by HTTP status.
        dropped: request fields and tools that were dropped, by name.
        failed: whether the model server failed to answer the latest call.
    """

    turns: NonNegativeInt
    limit: Literal["max_turns", "max_total_sequence_length"] | None = None
    refused: dict[str, int] = {}
    dropped: dict[str, int] = {}
    failed: bool = False


class RolloutTraces(BaseModel):
    """Recorded turns of a rollout.

    Attributes:
        response: Responses object with the main conversation and its tokens.
        branches: all conversations, with their roles and sizes.
        training_traces: all conversations to train on, in Gym's form, if there are several.
        token_in_rate: share of later turns whose prompt continued recorded tokens; ``None`` without later turns.
        weight_versions, log_probs: see :class:`~nemo_gym_prorl.rollout.job.Progress`.
    """

    response: dict[str, Any]
    branches: list[dict[str, Any]]
    training_traces: Any = None
    token_in_rate: Annotated[FiniteFloat, Field(ge=0, le=1)] | None
    weight_versions: list[dict[str, Any]] = []
    log_probs: list[str] = []


class _Key(BaseModel):
    key: str
    context: PositiveInt | None = None


class HarnessRollout:
    """One attempt of a rollout at its model server.

    Args:
        model: the model server.
        rollout_id: id of the attempt.
        job: the rollout; :meth:`fetch_tokens` fills its trajectory.
        limits: limits of turns and tokens.
    """

    def __init__(self, model: GymServer, rollout_id: str, job: Job, limits: LoopLimits) -> None:
        self._model = model
        self._path = rollout_path(rollout_id)
        self._job = job
        self._limits = limits
        self._jar = CookieJar()
        self._opened = False
        self.traces: RolloutTraces | None = None
        """The recorded turns, after :meth:`fetch_tokens`."""

    async def open(self) -> ProgramGrant:
        """Let a program call the policy.

        Raises:
            CallerError: the model server issues no keys, or refuses a parameter of the row.
            InfrastructureError: the model server fails.
        """
        params = self._job.row["responses_create_params"]
        body = {
            "params": {name: value for name, value in params.items() if name not in _OF_THE_PROGRAM},
            "group": self._job.group,
            "run": self._job.run,
            "max_turns": self._limits.max_steps,
            "max_total_tokens": self._limits.max_total_sequence_length,
        }
        self._opened = True
        answer = await self._model.call("POST", f"{self._path}/key", body, self._jar)
        if answer.status in (404, 405):
            raise CallerError(f"{self._model.name} issues no keys for programs: use prorl_model", field="model_server")
        told = self._read(_Key, self._checked(answer, "key", CallerError))
        limits = (told.context, self._limits.max_total_sequence_length)
        return ProgramGrant(told.key, min((limit for limit in limits if limit is not None), default=CONTEXT))

    async def calls(self) -> ProgramCalls:
        """Return the calls so far.

        Raises:
            InfrastructureError: the model server fails, or has lost the rollout.
        """
        told = self._checked(await self._model.call("GET", f"{self._path}/calls", None, self._jar), "calls")
        return self._read(ProgramCalls, told)

    async def fetch_tokens(self) -> None:
        """Revoke the key, so that no turn can follow, and fill the job's trajectory with the recorded turns.

        Raises:
            InfrastructureError: the model server fails, or has lost the rollout.
        """
        if not self._opened:
            return
        answer = await self._model.call("DELETE", f"{self._path}/key", None, self._jar)
        require_ok(answer, f"revoking a key at {self._model.name}", FailureKind.AGENT_REQUEST_FAILED)
        told = self._checked(await self._model.call("GET", f"{self._path}/traces", None, self._jar), "traces")
        traces = self._read(RolloutTraces, told)
        assert self._job.trajectory is not None
        self._job.trajectory.response |= traces.response
        self.traces = traces

    async def forget(self) -> None:
        """Delete the rollout at the model server, with its key."""
        if self._opened:
            await self._model.call("DELETE", self._path, None, self._jar)

    def _checked(self, answer: HttpAnswer, what: str, refusal: type[RolloutError] = InfrastructureError) -> Any:
        what = f"{what} of the rollout at {self._model.name}"
        require_ok(answer, what, FailureKind.AGENT_REQUEST_FAILED, refusal)
        return require_json(answer, what, FailureKind.AGENT_REQUEST_FAILED)

    def _read[Told: BaseModel](self, model: type[Told], told: Any) -> Told:
        try:
            return model.model_validate(told)
        except ValidationError as error:
            reason = f"{self._model.name} answered with invalid turns: {in_words(field_errors(error.errors()))}"
            raise InfrastructureError(reason, kind=FailureKind.AGENT_REQUEST_FAILED) from error
