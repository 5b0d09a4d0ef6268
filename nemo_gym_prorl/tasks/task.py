# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The :class:`Task` protocol: the interface that every environment implements.

A family of tasks (for example HumanEval) is one :class:`Task`. A task sees dataset rows, sandboxes and the policy's
response. The server owns HTTP, sandbox providers and scheduling. A rollout has four steps:

1. :meth:`Task.needs` validates the row and returns the sandbox that the row needs, if any.
2. :meth:`ToolSet.open` and :meth:`Task.prepare` set up that sandbox; then the policy calls tools.
3. :meth:`Task.artefacts` extracts the files to grade, and the sandbox is destroyed.
4. :meth:`Task.grade` scores artefacts and response, in fresh sandboxes if grading runs code.

Only artefacts and the response pass from the policy to grading.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_gym_prorl.failures import AgentError, CallerError, FailureKind, InfrastructureError, RolloutError
from nemo_gym_prorl.network_access import Network
from nemo_gym_prorl.tasks.sandbox import ExecResult, Sandbox


logger = logging.getLogger(__name__)

_MAX_REWARD = sys.float_info.max

TOOL_USE = "tool_use"
"""Field of a rollout's row: per-tool call counts, with the keys of :data:`TOOL_NUMBERS`."""

EGRESS = "egress"
"""Field of a rollout's row: connections by host, if the agent's sandbox reaches other hosts through a proxy."""

TOOL_NUMBERS = ("calls", "errors", "timeouts", "cut")
"""Counts per tool; their sums over all tools are the row's fields ``tool_<number>``, which Gym's metrics aggregate."""

_RESERVED_FIELDS = frozenset(
    {"reward", "passed", "verdict", "verdict_detail", "response", "responses_create_params", TOOL_USE, EGRESS}
    | {f"tool_{number}" for number in TOOL_NUMBERS}
)

EXHAUSTED = "exhausted"
"""Verdict on a policy that exceeded its sandbox's disk, memory or process limit."""

_BRANCH = re.compile(r"str|int|float|(?:dict|literal|tuple)\[.*", re.DOTALL)
"""Names of types, which pydantic adds to the path of an error in a union."""

_FOREIGN = (str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
"""Folders of Python, of installed packages and of this package; other code is the environment's own."""


@dataclass(frozen=True, slots=True)
class SandboxNeeds:
    """Sandbox requirements of a row. ``None`` means the server's configured value.

    Attributes:
        image: image name, in the sandbox provider's format.
        network: network access; see :func:`.network_access.parse_network`.
        cpu: number of cores.
        memory_mib: memory limit in MiB.
        disk_gib: disk limit in GiB.
        processes: limit on processes and threads.
        env: environment variables of all commands.
        binds: bind mounts, as ``HOST_PATH:SANDBOX_PATH`` or ``HOST_PATH:SANDBOX_PATH:ro``; never taken from a row.
        snapshot_paths: paths in the sandbox that are restored from a snapshot; ``None`` restores all.
    """

    image: str | None = None
    network: Network | None = None
    cpu: float | None = None
    memory_mib: int | None = None
    disk_gib: int | None = None
    processes: int | None = None
    env: Mapping[str, str] | None = None
    binds: Sequence[str] | None = None
    snapshot_paths: Sequence[str] | None = None


class ImageRow(BaseModel):
    """Fields of a row that names its image; other fields are ignored. The requirements are those of
    :class:`SandboxNeeds`.

    Attributes:
        instance_id: name of the task.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    instance_id: str = Field(min_length=1)
    image: str = Field(min_length=1)
    network: Network | None = None
    cpu: float | None = Field(default=None, gt=0)
    memory_mib: int | None = Field(default=None, gt=0)
    disk_gib: int | None = Field(default=None, gt=0)
    processes: int | None = Field(default=None, gt=0)

    @classmethod
    def parse(cls, row: Mapping[str, Any]) -> Self:
        """Validate a row.

        Raises:
            CallerError: the row is invalid; names the field, for example ``swe.FAIL_TO_PASS``.
        """
        try:
            return cls.model_validate(row)
        except ValidationError as error:
            raise validation_refusal(error) from error

    def needs(self, env: Mapping[str, str] | None = None) -> SandboxNeeds:
        names = ("image", "network", "cpu", "memory_mib", "disk_gib", "processes")
        return SandboxNeeds(**{name: getattr(self, name) for name in names}, env=env)


def validation_refusal(error: ValidationError) -> CallerError:
    """Convert the first error of a validation to a :class:`CallerError` that names the field."""
    fault = error.errors(include_url=False, include_context=False)[0]
    path = [str(part) for part in fault["loc"] if not _BRANCH.fullmatch(str(part))]
    message = fault["msg"].removeprefix("Value error, ")
    if named := re.fullmatch(r"(\w+): (.*)", message, re.DOTALL):
        path.append(named[1])
        message = named[2]
    given = "" if fault["type"] in ("missing", "value_error") else f" (given: {fault['input']!r:.100})"
    return CallerError(f"{message}{given}", field=".".join(path) or None)


class UnreadableAnswer(AgentError):
    """The policy's answer cannot be read: the reward is 0 and the verdict is ``unreadable``."""


@dataclass(frozen=True, slots=True)
class ExtractedFile:
    """Content of a file extracted from the sandbox; ``None``, with the reason as ``problem``, if it is unreadable."""

    content: bytes | None
    problem: str | None = None

    def text(self) -> str:
        """Decode the content as UTF-8; raises :class:`UnreadableAnswer` if this fails or there is no content."""
        if self.content is None:
            raise UnreadableAnswer(self.problem or "the file could not be read")
        try:
            return self.content.decode()
        except UnicodeDecodeError as error:
            raise UnreadableAnswer(f"the file is not UTF-8: {error}") from error

    def json(self) -> Any:
        """Parse the content as JSON.

        Raises:
            UnreadableAnswer: no content, no JSON, deep nesting, or a number beyond the largest float.
        """
        text = self.text()
        try:
            orjson.dumps(orjson.loads(text))
            return json.loads(text)  # exact for integers beyond 64 bits, which orjson makes floats
        except (ValueError, TypeError) as error:
            raise UnreadableAnswer(f"the file is not JSON: {error}") from error


@dataclass(frozen=True, slots=True)
class Grade:
    """Result of grading. Infrastructure failures are raised instead and never become a grade.

    Attributes:
        reward: a finite number.
        verdict: machine-readable reason, one of the task family's fixed set; safe as a metric label.
        detail: human-readable reason. The detail may quote hidden tests, so the policy must not see it.
        fields: extra JSON fields of the rollout's row, such as a patch or a test report. Fields that Gym or this class
            writes are refused. Integers beyond 64 bits become floats.

    Raises:
        ValueError: the reward is not finite, the verdict is empty, or a field is reserved or not JSON.
    """

    reward: float
    verdict: str
    detail: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # math.isfinite would fail for an int beyond the largest float.
        if not isinstance(self.reward, int | float) or not -_MAX_REWARD <= self.reward <= _MAX_REWARD:
            raise ValueError(f"the reward must be a finite number, not {self.reward!r:.100}")
        if not isinstance(self.verdict, str) or not self.verdict:
            raise ValueError(f"the verdict must be a non-empty string, not {self.verdict!r:.100}")
        if taken := [name for name in self.fields if name in _RESERVED_FIELDS or str(name).startswith("_ng_")]:
            raise ValueError(
                f"{taken[0]!r} is a reserved field of the row; choose another name for this grade's field"
            )
        try:
            orjson.dumps(self.fields)
        except TypeError as refused:
            try:
                object.__setattr__(self, "fields", orjson.loads(json.dumps(self.fields)))
                orjson.dumps(self.fields)
            except (TypeError, ValueError, RecursionError):
                raise ValueError(f"fields must be JSON: {refused}") from refused

    @property
    def passed(self) -> bool:
        return self.reward >= 1.0


class OpenTools:
    """Tools of one session, which the policy calls by name. A subclass defines :meth:`call`, and what else it has.

    Attributes:
        over: whether the policy has submitted; later calls have no effect.
    """

    over = False

    async def call(self, tool: str, arguments: object) -> str:
        """Execute a tool call and return the observation. Invalid arguments of any type produce an error observation.

        Raises:
            AgentError: the policy exceeded a limit of its sandbox, and the sandbox has ended.
            InfrastructureError: ``session_lost``: the sandbox has ended.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Release all resources. Called after the sandbox has ended, for any reason."""

    def tool_use(self) -> Mapping[str, Mapping[str, int]]:
        """Return counts by tool: ``{"bash": {"calls": 3, "errors": 1}}``. Available after :meth:`close`."""
        return {}

    async def start_sessions(self, offered: Collection[str]) -> None:
        """Start the shells or kernels of the offered tools, so that the policy does not wait. Called once, after
        :meth:`Task.prepare` or :meth:`resume`.

        Raises:
            InfrastructureError: ``session_lost``: the sandbox has ended.
        """

    async def run_script(self, script: str, *, timeout_s: float) -> ExecResult:
        """Run a script with the user, working folder and environment variables of the policy's commands.

        Raises:
            CallerError: the tools run no scripts.
        """
        raise CallerError("this row starts no sandbox in which programs run")

    async def save(self) -> tuple[dict[str, Any], list[str]]:
        """Return the tools' state as a JSON object, and names of parts that cannot be saved, such as ``kernel``.

        Called between two tool calls, while the sandbox lives.
        """
        return {}, []

    async def resume(self, saved: Mapping[str, Any], lost: Sequence[str]) -> None:
        """Restore a saved state, in a sandbox with the same files, before the first call. A tool named in ``lost``
        reports the loss to the policy.
        """


class ToolSet[Opened: OpenTools](Protocol):
    """Tools that a policy may call."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """Function schemas of the Responses API, in the format of a row's ``tools``."""
        ...

    async def open(self, sandbox: Sandbox | None, needs: SandboxNeeds | None) -> Opened:
        """Open the tools of one session.

        Args:
            sandbox: a fresh sandbox; ``None`` if the row needs none.
            needs: the requirements that the sandbox was started with.

        Raises:
            CallerError: the row's image lacks a program that a tool needs; names the row's field.
            InfrastructureError: the tools could not be started.
        """
        ...


class FurtherTool(Protocol):
    """Tool of a :class:`.Workbench` that needs no sandbox; all sessions share it."""

    schema: Mapping[str, Any]
    """Function schema of the Responses API."""

    async def prepare(self) -> None:
        """Prepare the tool for a session; raises :class:`InfrastructureError` if this fails."""
        ...

    async def call(self, arguments: object) -> str: ...


class OpenSandbox(Protocol):
    """Factory of context managers, which start a fresh sandbox and stop it at the end of the block."""

    def __call__(
        self, needs: SandboxNeeds | None = None, snapshot: str | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """Return a context manager, whose entry may raise the errors below.

        Args:
            needs: requirements of the sandbox; ``None`` for the row's. A snapshot's image replaces ``needs.image``.
            snapshot: name of the snapshot that the sandbox starts from; ``None`` to start from the image.

        Raises:
            CallerError: the provider cannot meet a requirement (names the row's field), or cannot restore the
                snapshot (field ``checkpoint.snapshot``).
            InfrastructureError: the sandbox could not be started.
        """
        ...


class Task[Opened: OpenTools, Artefacts](Protocol):
    """A family of tasks. All sessions share one instance, so a task keeps no state of a session.

    Optional attributes of a task:

    - ``resumes = True``: sessions can be restored in a new sandbox without :meth:`prepare`, since all their state is
      in sandbox and tools.
    - ``time_limit_s(row)``: the seconds that the agent may take, or ``None``.
    - ``aclose()``: see :class:`AsyncCloseable`.

    Tools and artefacts may own snapshots. The session deletes the names in their attribute ``snapshots``, which may
    grow while a task grades, after grading or on closing.
    """

    @property
    def tools(self) -> ToolSet[Opened]: ...

    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds | None:
        """Validate a row and return its sandbox requirements; ``None`` if the row needs no sandbox. Called first on
        the event loop, so the call must be quick.

        Raises:
            CallerError: the row is not valid for this family; names the field.
        """
        ...

    async def prepare(self, row: Mapping[str, Any], tools: Opened) -> None:
        """Write the policy's initial files.

        Raises:
            CallerError: the row's image cannot be set up; names the field.
            InfrastructureError: the sandbox failed.
        """
        ...

    async def artefacts(self, row: Mapping[str, Any], tools: Opened) -> Artefacts:
        """Extract the files to grade from the agent's sandbox. An unreadable file is part of the result, not an error.

        Raises:
            AgentError: the policy exceeded a limit of its sandbox.
            InfrastructureError: the sandbox has ended.
        """
        ...

    async def grade(
        self,
        row: Mapping[str, Any],
        artefacts: Artefacts,
        response: Mapping[str, Any],
        open_sandbox: OpenSandbox,
    ) -> Grade:
        """Score the policy's work from the seeded row, its artefacts and its last Responses object. The sandboxes of
        ``open_sandbox`` were never touched by the policy.

        Raises:
            AgentError: the reward is 0, with the verdict ``unreadable`` (:class:`UnreadableAnswer`) or ``exhausted``.
            TaskError: no policy could be graded on this row.
            InfrastructureError: ``verifier_error``, or an error of ``open_sandbox``.
        """
        ...


@runtime_checkable
class AsyncCloseable(Protocol):
    """A task with resources that all sessions share, released when the server ends."""

    async def aclose(self) -> None: ...


def offered_tools(row: Mapping[str, Any]) -> frozenset[str]:
    params = row.get("responses_create_params")
    tools = params.get("tools") if isinstance(params, dict) else None
    return frozenset(str(tool["name"]) for tool in tools or () if isinstance(tool, dict) and "name" in tool)


@contextmanager
def task_errors(trouble: str, kind: FailureKind) -> Iterator[None]:
    """Convert unexpected exceptions of a task to an :class:`InfrastructureError` of ``kind``.

    The message contains the exception, and the last traceback line in the environment's own code.
    """
    try:
        yield
    except RolloutError:
        raise
    except (Exception, BaseExceptionGroup, GeneratorExit, asyncio.CancelledError) as error:
        logger.exception("%s", trouble)
        frames = traceback.extract_tb(error.__traceback__)[::-1]
        own = (frame for frame in frames if not frame.filename.startswith(("<", *_FOREIGN)))
        where = next(own, frames[0])
        raised_at = f"{Path(where.filename).name}:{where.lineno}"
        raise InfrastructureError(f"{trouble}: {type(error).__name__}: {error} ({raised_at})", kind=kind) from error
