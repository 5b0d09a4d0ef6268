# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sessions of tasks without a sandbox, of failing tasks, of misbehaving ones, and of starts that fail."""

import asyncio
import json
import re
import time
from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import Field

from nemo_gym_prorl.failures import AgentError, CallerError, FailureKind, InfrastructureError, RolloutError, TaskError
from nemo_gym_prorl.servers.task_server import TaskServer, TaskServerConfig
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.sessions import Sessions
from nemo_gym_prorl.tasks.task import Grade, OpenSandbox, OpenTools, SandboxNeeds, UnreadableAnswer
from nemo_gym_prorl.tasks.workbench.observations import Arguments, BadArguments, parse_arguments, tool_schema
from tests.prorl_code.conftest import Client, saying, task_server
from tests.rollout.serving import serve


class AddArguments(Arguments):
    """Adds a number to the sum."""

    number: int = Field(description="The number.")


class Sum(OpenTools):
    def __init__(self) -> None:
        self.closed = False
        self.total = 0

    async def call(self, tool: str, arguments: object) -> str:
        try:
            parsed = parse_arguments(tool, AddArguments, arguments)
        except BadArguments as error:
            return str(error)
        self.total += parsed.number
        return f"The sum is {self.total}."

    async def close(self) -> None:
        self.closed = True


class Adding:
    def __init__(self) -> None:
        self.opened: list[Sum] = []

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool_schema("add", AddArguments)]

    async def open(self, sandbox: Sandbox | None, needs: SandboxNeeds | None) -> Sum:
        assert (sandbox, needs) == (None, None)
        self.opened.append(Sum())
        return self.opened[-1]


class Sums:
    """Task of adding numbers; an exception in the row's field of a step is raised there."""

    def __init__(self) -> None:
        self.tools = Adding()
        self.graded = 0

    def needs(self, row: Mapping[str, Any]) -> None:
        if "sum" not in row:
            raise CallerError("missing", field="sum")
        self._trouble(row, "needs")

    async def prepare(self, row: Mapping[str, Any], tools: Sum) -> None:
        self._trouble(row, "prepare")

    async def artefacts(self, row: Mapping[str, Any], tools: Sum) -> int:
        self._trouble(row, "artefacts")
        return tools.total

    async def grade(
        self, row: Mapping[str, Any], artefacts: int, response: Mapping[str, Any], open_sandbox: OpenSandbox
    ) -> Grade:
        self.graded += 1
        self._trouble(row, "grade")
        said = response["output"][0]["content"][0]["text"] if response["output"] else None
        return Grade(0.5 * (artefacts == row["sum"]) + 0.5 * (said == str(row["sum"])), "compared", f"said {said}")

    def _trouble(self, row: Mapping[str, Any], step: str) -> None:
        if step in row:
            raise row[step]() if callable(row[step]) else row[step]


def sessions_of(task: Sums) -> Sessions[Sum, int]:
    return Sessions(task, None)


class SumServer(TaskServer):
    def make_task(self) -> Sums:
        return Sums()


async def test_environment_without_sandboxes() -> None:
    config = {"host": "127.0.0.1", "port": 1, "name": "sums", "entrypoint": "app.py", "domain": "math"}
    server = task_server(SumServer, TaskServerConfig(**config, sandbox_provider=None))
    row = {"responses_create_params": {"input": []}, "sum": 7}
    async with serve(server.setup_webserver()) as url, Client(url) as client:
        status, problem, _ = await client.post("/seed_session", {})
        assert (status, problem["errors"]) == (422, [{"field": "sum", "message": "missing"}])
        assert await client.post("/seed_session", row) == (200, {"release_path": "/release_session"}, None)
        assert await client.tool("add", number=3) == "The sum is 3."
        assert await client.tool("add", number="x") == (
            "Error in the arguments of add: number: Input should be a valid integer, unable to parse string as an "
            "integer. add takes: number (integer, required)."
        )
        assert await client.tool("add", number=4) == "The sum is 7."
        assert (await client.post("/release_session"))[0] == 200
        assert (await client.post("/add", {"number": 1}))[2] == "session_lost"
        status, verdict, _ = await client.post("/verify", row | {"response": saying("7")})
        assert status == 200
        told = {key: verdict[key] for key in ("reward", "passed", "verdict", "verdict_detail", "sum")}
        assert told == {"reward": 1.0, "passed": True, "verdict": "compared", "verdict_detail": "said 7", "sum": 7}


async def test_session_is_graded_once() -> None:
    task = Sums()
    sessions = sessions_of(task)
    await sessions.seed("key", {"sum": 1})
    await sessions.call("key", "add", {"number": 1})
    grades = [await sessions.verify("key", saying(text)) for text in ("nothing", "1")]
    assert [grade.reward for grade in grades] == [0.5, 0.5]
    assert not grades[0].passed
    assert (task.graded, task.tools.opened[0].closed) == (1, True)


async def test_only_another_row_replaces_a_live_session() -> None:
    task = Sums()
    sessions = sessions_of(task)
    for total in (1, 1, 2):
        await sessions.seed("key", {"sum": total})
    assert len(task.tools.opened) == 2
    assert task.tools.opened[0].closed
    assert not task.tools.opened[1].closed


@pytest.mark.parametrize(
    ("step", "raised", "seen"),
    [
        ("needs", KeyError("odd"), FailureKind.ENVIRONMENT_ERROR),
        ("prepare", ValueError("odd"), FailureKind.ENVIRONMENT_ERROR),
        ("prepare", lambda: json.loads("odd"), FailureKind.ENVIRONMENT_ERROR),
        ("grade", lambda: Grade(0.0, "odd", fields={"reward": "odd"}), FailureKind.VERIFIER_ERROR),
        ("artefacts", ValueError("odd"), FailureKind.SESSION_LOST),
        ("artefacts", InfrastructureError("odd"), FailureKind.SESSION_LOST),
        ("artefacts", TaskError("odd"), FailureKind.VERIFIER_ERROR),
        ("artefacts", asyncio.CancelledError("odd"), FailureKind.SESSION_LOST),
        ("grade", asyncio.CancelledError("odd"), FailureKind.VERIFIER_ERROR),
        ("grade", TaskError("odd"), FailureKind.VERIFIER_ERROR),
    ],
)
async def test_failing_task_is_never_a_reward(step: str, raised: Any, seen: FailureKind) -> None:
    task = Sums()
    sessions = sessions_of(task)
    row = {"sum": 1, step: raised}
    if step in ("needs", "prepare"):
        with pytest.raises(RolloutError) as caught:
            await sessions.seed("key", row)
        assert caught.value.kind is seen
    else:
        await sessions.seed("key", row)
        await sessions.release("key")
        for _ in range(2):
            with pytest.raises(RolloutError) as caught:
                await sessions.verify("key", saying("1"))
            assert caught.value.kind is seen
            assert isinstance(caught.value, TaskError) == isinstance(raised, TaskError)
    assert isinstance(raised, RolloutError) or "(test_sessions_of_tasks.py:" in caught.value.reason
    assert all(tools.closed for tools in task.tools.opened)


@pytest.mark.parametrize(
    "odd",
    [
        {"reward": float("nan")},
        {"reward": 10**400},
        {"reward": "1.0"},
        {"verdict": ""},
        *({"fields": {name: 1}} for name in ("reward", "response", "_ng_rollout_index")),
        {"fields": {"a": object()}},
    ],
)
def test_invalid_grades_are_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(odd)).rstrip("s")):
        Grade(**{"reward": 1.0, "verdict": "right", **odd})


@pytest.mark.parametrize("step", ["artefacts", "grade"])
@pytest.mark.parametrize(("error", "verdict"), [(AgentError, "exhausted"), (UnreadableAnswer, "unreadable")])
async def test_a_fault_of_the_policy_scores_zero(step: str, error: type[AgentError], verdict: str) -> None:
    sessions = sessions_of(Sums())
    await sessions.seed("key", {"sum": 1, step: error("odd")})
    assert await sessions.verify("key", saying("1")) == Grade(0.0, verdict, "odd")


async def test_a_grader_that_blocks_its_server_is_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nemo_gym_prorl.servers.task_server.BLOCKED_S", 1.0)
    config = {"host": "127.0.0.1", "port": 1, "name": "sums", "entrypoint": "app.py", "domain": "math"}
    server = task_server(SumServer, TaskServerConfig(**config, sandbox_provider=None))
    async with serve(server.setup_webserver()):
        await asyncio.sleep(0.01)
        time.sleep(1.5)  # noqa: ASYNC251  # what a grader must not do
        await asyncio.sleep(0.5)
    assert re.search("event loop of sums was blocked for .*await asyncio.to_thread", caplog.text)


class Housed(Sums):
    def needs(self, row: Mapping[str, Any]) -> SandboxNeeds:  # type: ignore[override]
        return SandboxNeeds()


async def test_start_does_not_wait_for_another_image() -> None:
    asked, pulled = asyncio.Event(), asyncio.Event()

    class Boxes:
        async def fetch_image(self, needs: SandboxNeeds) -> None:
            if not asked.is_set():
                asked.set()
                await pulled.wait()

        async def start(self, needs: SandboxNeeds, snapshot: str | None) -> Sandbox:
            raise OSError("no sandbox today")

    sessions = Sessions(Housed(), Boxes(), max_starts=1)
    pulling = asyncio.create_task(sessions.seed("pulls", {}))
    await asked.wait()
    with pytest.raises(InfrastructureError, match="no sandbox today"):
        await sessions.seed("is there", {})
    assert not pulling.done()
    pulled.set()
    with pytest.raises(InfrastructureError, match="no sandbox today"):
        await pulling
