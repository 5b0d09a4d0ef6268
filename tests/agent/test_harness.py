# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Programs in place of the tool loop: real sandboxes and real servers, and an engine that answers scripted commands.

The program is a loop of 30 lines: it asks the policy for a command, runs it, and reports its output to the policy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from fastapi import Request, Response

from nemo_gym_prorl.agent.harness_handler import prompt_of
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.turn_records import read_turns
from nemo_gym_prorl.tasks.code.code_rows import humaneval_row, problems
from tests.agent.peers import Environment, address, deployment, reference, until
from tests.policy.runtimes import server
from tests.policy.scripted_engine import ScriptedEngine, saved
from tests.policy.test_prorl_model import BYTES, CHATML, assert_chain
from tests.prorl_code.conftest import Client, serving
from tests.rollout.serving import serve
from tests.tasks import containers


pytestmark = pytest.mark.sandbox

AGENT = """\
import json, os, socket, subprocess, sys, threading, time, urllib.request
URL, PROMPT = sys.argv[1:3]
MESSAGES, EXTRA = [{"role": "user", "content": PROMPT}], {}

def ask():
    body = json.dumps({"model": "any", "messages": MESSAGES, **EXTRA}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer dummy"}
    with urllib.request.urlopen(urllib.request.Request(URL + "/chat/completions", body, headers)) as answer:
        message = json.load(answer)["choices"][0]["message"]
    MESSAGES.append({"role": "assistant", "content": message["content"]})
    return message["content"]

def work():
    done = subprocess.run(ask(), shell=True, capture_output=True, text=True)
    MESSAGES.append({"role": "user", "content": "exit code %d: %s" % (done.returncode, done.stdout)})

"""
"""Beginning of all programs."""

PLAIN = "work()\nprint(ask())\n"
"""Two calls, and the command of the first one between them."""

SOLUTION = "def truncate_number(number):\n    return number % 1\n"
SOLVE = f"cat > solution.py << 'END'\n{SOLUTION}END\npwd; id -u; echo $TERM; ls ~; cat /proc/[0-9]*/comm | sort -u"


class CommandEngine(ScriptedEngine):
    """Engine whose first answer is a command, and whose further answers are ``done``.

    Attributes:
        command: the command.
        turns: number of turns after which the engine fails.
        answers: prompts and sampled ids of the turns.
    """

    def __init__(self, command: str, turns: int | None = None) -> None:
        super().__init__(BYTES, context=32_768)
        self.command = command
        self.turns = turns
        self.answers: list[tuple[list[int], list[int]]] = []

    async def _completions(self, request: Request) -> Any:
        """Break on a prompt that ends with ``POISON``, and sleep over one that ends with ``SLOW``."""
        last = BYTES.decode((await request.json())["prompt"]).rpartition("<|im_start|>user")[2]
        if "POISON" in last:
            return Response("oh", 500)
        if "SLOW" in last:
            await asyncio.sleep(60)
        return await super()._completions(request)

    def say(self, body: dict[str, Any]) -> str:
        first = "exit code" not in BYTES.decode(body["prompt"])
        said = f"{self.command if first else 'done'}<|im_end|>"
        self.answers.append((body["prompt"], BYTES.encode(said)))
        if len(self.answers) == self.turns:
            self.status = 500
        return said


@dataclass
class Service:
    """A deployment with real environment and model servers, and its engine."""

    engine: CommandEngine
    url: str
    model_url: str
    http: aiohttp.ClientSession

    async def run(self, row: dict[str, Any], status: int = 200) -> dict[str, Any]:
        async with self.http.post(f"{self.url}/run", json=row) as answer:
            body = await answer.json(content_type=None)
        assert answer.status == status, body
        return dict(body)


def harness(folder: Path, program: str, **changes: Any) -> str:
    """Write a harness and return its path. The image has its Python."""
    described = {
        "name": "tiny",
        "version": "1.0",
        "api": "chat",
        "command": ["python3", "{home}/agent.py", "{base_url}", "{prompt}"],
        "files": {"~/agent.py": AGENT + program},
        "exit_codes": {0: "stop", 7: "gave_up"},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(described | changes))
    return str(path)


@asynccontextmanager
async def service(
    folder: Path,
    program: str = PLAIN,
    command: str = SOLVE,
    turns: int | None = None,
    memory_mib: int | None = None,
    **settings: Any,
) -> AsyncIterator[Service]:
    """Serve a tiny harness over ``prorl_code``, ``prorl_model`` and the agent; one try unless told otherwise."""
    engine = CommandEngine(command, turns)
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(serve(engine.app()))
        policy = {"engine": "vllm", "tokenizer": saved(folder, BYTES, CHATML), "unreachable_s": 0.5}
        model = server(upstream, folder, policy=policy)
        model_url = await stack.enter_async_context(serve(model.setup_webserver()))
        provider = {"singularity": containers.shipped_config()["sandbox"]["singularity"] | {"memory_mib": memory_mib}}
        limited = {"sandbox_provider": provider} if memory_mib else {}
        environment_url = await stack.enter_async_context(serving(**limited))
        at = await stack.enter_async_context(
            deployment(
                elsewhere={"code": address(environment_url), "policy_model": address(model_url)},
                resources_server=reference("code"),
                handler="harness",
                handler_config={"harness": harness(folder, program)},
                **settings,
            )
        )
        yield Service(engine, at.url, model_url, at.http)


def row(task: str = "HumanEval/2") -> dict[str, Any]:
    return humaneval_row(problems()[task])


def sampled(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for item in answer["response"]["output"] if "generation_token_ids" in item]


@pytest.mark.parametrize(
    ("command", "reward", "offers_tools"),
    [(SOLVE, 1.0, True), ("echo nothing", 0.0, True), (SOLVE, 1.0, False), ("echo nothing", 0.0, False)],
)
async def test_a_program_is_scored_and_its_tokens_are_the_engines(
    command: str, reward: float, offers_tools: bool, tmp_path: Path
) -> None:
    given = row()
    if not offers_tools:
        del given["responses_create_params"]["tools"]
    async with service(tmp_path, command=command) as at:
        answer = await at.run(given)
    assert answer["reward"] == reward, answer
    about = answer["rollout"]
    assert (about["finish_reason"], about["turns"], about["token_in_rate"]) == ("stop", 2, 1.0)
    assert [(item["prompt_token_ids"], item["generation_token_ids"]) for item in sampled(answer)] == at.engine.answers
    assert_chain(sampled(answer))
    report = about["harness"]
    assert (report["name"], report["version"], report["exit_code"]) == ("tiny", "1.0", 0)
    assert "token_in_rate" not in report.keys() | answer.keys(), "it stands in the rollout's report"
    turns = read_turns(answer)
    assert [turn.said for turn in turns] == [command, "done"]
    timed = [turn.step for turn in turns if turn.step]
    assert [step["output_tokens"] for step in timed] == [len(ids) for _, ids in at.engine.answers]
    assert all(step["seconds"] > 0 for step in timed)
    assert [(branch["role"], branch["turns"], branch["trained"]) for branch in report["branches"]] == [
        ("main", 2, True)
    ]
    if command == SOLVE:  # as the tools of the policy would run
        told = BYTES.decode(at.engine.answers[1][0])
        assert "exit code 0: /sandbox/workspace\n0\ndumb\nagent.py\n" in told
        assert "\npython3\n" in told
        assert "\nbash\n" not in told, "a program needs none of the policy's shell"


@dataclass(frozen=True)
class End:
    """How a program ends: what it does, settings, and the row's finish reason, reward and failure."""

    program: str
    finish: str | None
    reward: float = 1.0
    failure: str | None = None
    told: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    command: str = SOLVE
    killed: str | None = None


LOSE = """
def lose(word):
    MESSAGES.append({"role": "user", "content": word})
    try: socket.setdefaulttimeout(3); ask()
    except OSError as error: print(error); MESSAGES[:] = [{"role": "user", "content": "exit code: title"}]
    socket.setdefaulttimeout(None)

"""
"""A call that the program gives up, and later calls of another conversation."""
SAY = "MESSAGES.append({'role': 'user', 'content': 'exit code ' + 'x' * %d})\nask()\n"
BUSY = "work()\nwhile True: time.sleep(1)\n"
STUBBORN = "work()\nwhile True:\n    try: ask()\n    except OSError: time.sleep(0.05)\n"
SOON = {"budgets": {"run": 6.0}}
ENDS = {
    "fails after calls": End("work()\nsys.exit(3)\n", "harness_exit"),
    "ends with a known code": End("work()\nsys.exit(7)\n", "gave_up"),
    "is killed": End("work()\nos.kill(os.getpid(), 9)\n", "harness_exit", killed="SIGKILL"),
    "uses up its memory": End(
        "work()\nx = b'x' * (600 << 20)\ntime.sleep(60)\n",
        "harness_exit",
        1.0,
        killed="SIGKILL; memory: ",
        settings={"memory_mib": 300},
    ),
    "fills its context": End(f"work()\n{SAY % 40_000}", "context_overflow"),
    "has a task that fills its context": End(SAY % 40_000, "context_overflow", 0.0),
    "compacts a full context": End(f"work()\n{SAY % 40_000}MESSAGES.pop()\nMESSAGES.pop()\nask()\n", "stop"),
    "never calls": End("print('no key')\nsys.exit(1)\n", None, 0.0, "agent_run_error", "no key"),
    "does not exist": End("os.execv('/gone', ['gone'])\n", None, 0.0, "agent_run_error", "FileNotFoundError"),
    "calls for ever": End("work()\nwhile True: ask()\n", "max_steps", settings={"max_steps": 3}),
    "retries for ever": End(STUBBORN, "max_steps", settings={"max_steps": 3}),
    "has too many tokens": End(STUBBORN, "max_total_sequence_length", settings={"max_total_sequence_length": 600}),
    "hangs": End(BUSY, None, 0.0, "agent_timeout", settings=SOON),
    "hangs, and is scored": End(BUSY, "timeout", settings={**SOON, "on_timeout": "score"}),
    "gives up a slow call": End(f"{LOSE}work()\nlose('SLOW')\n", None, 0.0, "agent_request_failed", "1 of its calls"),
    "has a prompt that breaks the engine": End(
        f"{LOSE}work()\nlose('POISON')\nsys.exit(7)\n", None, 0.0, "agent_request_failed", "{'500': 1}"
    ),
    "does not wait for a call": End(
        f"{LOSE}work()\nthreading.Thread(target=lose, args=['SLOW'], daemon=True).start()\ntime.sleep(1)\n",
        *(None, 0.0, "agent_request_failed", "1 of its calls"),
    ),
    "is refused every call": End(
        "MESSAGES[:] = [1]\nask()\n", None, 0.0, "agent_run_error", "got no turn from the policy (refused: {'422': 1})"
    ),
    "fills its disk": End(PLAIN, "harness_exit", 0.0, command="head -c 3G /dev/zero > big; sleep 60"),
}


@pytest.mark.parametrize("name", ENDS)
async def test_ends_of_programs_are_typed(name: str, tmp_path: Path) -> None:
    end = ENDS[name]
    collected = {"_ng_task_index": 0, "_ng_rollout_index": 0}
    before = containers.instances()
    async with service(tmp_path, end.program, end.command, **end.settings) as at:
        answer = await at.run({**row(), **collected})
        assert containers.instances() <= before
    about = answer["rollout"]
    assert (about["finish_reason"], answer["reward"], answer.get("failure_kind")) == (
        end.finish,
        end.reward,
        end.failure,
    )
    assert end.told in answer.get("failure_reason", "")
    assert about["harness"].get("killed", "").startswith(end.killed or "")
    assert ("killed" in about["harness"]) == (end.killed is not None)
    if end.failure in (None, "agent_timeout"):
        assert [(item["prompt_token_ids"], item["generation_token_ids"]) for item in sampled(answer)] == (
            at.engine.answers[: len(sampled(answer))]
        )
        assert sampled(answer) or not at.engine.answers


async def test_a_compacted_conversation_becomes_traces_of_the_row(tmp_path: Path) -> None:
    compact = "MESSAGES[:] = [{'role': 'user', 'content': PROMPT + ' So far: exit code 0'}]\n"
    async with service(tmp_path, PLAIN + compact + PLAIN) as at:
        answer = await at.run(row())
    assert (answer["reward"], answer["rollout"]["turns"]) == (1.0, 4)
    assert [branch["role"] for branch in answer["rollout"]["harness"]["branches"]] == ["main", "earlier"]
    trained = [
        token
        for trace in answer["training_traces"]["traces"]
        for token, is_trained in zip(trace["token_ids"], trace["loss_mask"], strict=True)
        if is_trained
    ]
    assert trained == [token for _, ids in at.engine.answers for token in ids]


async def test_the_row_decides_sampling(tmp_path: Path) -> None:
    """Programs ask for greedy sampling, and training samples as the trainer says."""
    asked = row()
    asked["responses_create_params"] |= {"temperature": 0.7, "top_p": 0.9, "max_output_tokens": 300}
    asked["responses_create_params"]["metadata"] = {"extra_body": '{"top_k": 5}'}
    async with service(tmp_path, f"EXTRA.update(temperature=0, max_tokens=400)\n{PLAIN}") as at:
        await at.run(asked)
    for seen in at.engine.seen:
        assert (seen["temperature"], seen["top_p"], seen["max_tokens"], seen["top_k"]) == (0.7, 0.9, 300, 5)
    assert len(at.engine.seen) == 2


async def test_a_failure_of_the_service_is_not_the_programs(tmp_path: Path) -> None:
    async with service(tmp_path, turns=1) as at:
        answer = await at.run(row(), status=503)
    assert "failed to answer" in answer["detail"], answer


LEAVE = "if os.fork() == 0:\n    os.setsid()\n    while True:\n        try: %s\n        except OSError: pass\n"


@pytest.mark.parametrize("calls", ["ask()", "MESSAGES.append({'role': 'user', 'content': 'SLOW'}); ask()"])
async def test_nothing_of_a_program_outlives_its_run(calls: str, tmp_path: Path) -> None:
    """A process that leaves the program's group calls on until the sandbox ends; no call after the end counts."""
    async with service(tmp_path, f"work()\n{LEAVE % calls}time.sleep(0.5)\n") as at:
        answer = await at.run({**row(), "_ng_task_index": 0, "_ng_rollout_index": 0})
        # The end of the program may cancel one more turn.
        assert answer["rollout"]["turns"] <= len(at.engine.answers) <= answer["rollout"]["turns"] + 1
    assert (answer["rollout"]["finish_reason"], answer["reward"], answer.get("failure_kind")) == ("stop", 1.0, None)


async def test_a_cancelled_rollout_ends_its_program(tmp_path: Path) -> None:
    async with service(tmp_path, BUSY) as at:
        submitted = {"row": row(), "id": "one"}
        async with at.http.post(f"{at.url}/v1/rollouts", json=submitted) as answer:
            assert answer.status < 300, await answer.text()
        await until(lambda: bool(at.engine.answers))
        assert len(containers.instances()) == 1
        begin = time.monotonic()
        async with at.http.post(f"{at.url}/v1/rollouts/cancel", json={"ids": ["one"]}) as answer:
            assert answer.status < 300, await answer.text()
        await until(lambda: not containers.instances())
        assert time.monotonic() - begin < 10.0


@pytest.mark.parametrize("lease", [None, "guessed"])
async def test_a_policys_tool_call_runs_no_program(lease: str | None) -> None:
    """Gym's own agents post to any route that a policy names: a program's policy URL would lead out of the sandbox."""
    described = {"name": "tiny", "version": "1", "api": "chat", "command": ["true", "{prompt}"]}
    body = {
        "harness": described,
        "prompt": "",
        "model": "m",
        "context": 9,
        "key": "k",
        "timeout_s": 9,
    }
    async with serving() as url, Client(url) as client:
        client.headers = {} if lease is None else {"X-ProRL-Lease": "own"}
        assert (await client.post("/seed_session", row()))[0] == 200
        client.headers = {} if lease is None else {"X-ProRL-Lease": lease}
        status, answer, _ = await client.post("/run_program", {**body, "url": url})
        await client.post("/close_session")
    assert (status, "lease" in answer["detail"]) == (422, True), answer


# Rows and settings that are refused


def parts(*content: dict[str, Any], role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(content)}]


TEXT = {"type": "input_text", "text": "b"}
PROMPTS: dict[str, tuple[dict[str, Any], str]] = {
    "a text": ({"input": "a"}, "a"),
    "messages": ({"input": [{"role": "system", "content": "a"}, *parts(TEXT)]}, "a\n\nb"),
    "a tool that programs lack": (
        {"input": "a", "tools": [{"type": "function", "name": "submit"}]},
        "a\n\nThere is no tool `submit` here: when the work is done, end with an answer.",
    ),
    "instructions": ({"instructions": "c", "input": parts(TEXT, TEXT, role="developer")}, "c\n\nb\nb"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_the_prompt_of_a_program_is_the_text_of_the_row(name: str) -> None:
    params, prompt = PROMPTS[name]
    assert prompt_of(params) == prompt


OF_ROWS: dict[str, tuple[Any, str]] = {
    "an image": ({"input": parts(TEXT, {"type": "input_image", "image_url": "x"})}, "input.0: "),
    "an answer": ({"input": [*parts(TEXT), {"role": "assistant", "content": "a"}]}, "input.1: "),
    "a call": (
        {"input": [{"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}]},
        "input.0: ",
    ),
    "NUL": ({"input": "a\0b"}, "input: has the character NUL"),
    "NUL in the model": ({"model": "a\0b"}, "model: has the character NUL"),
    "too long": ({"input": "x" * (128 << 10)}, "input: has 131148 bytes, more than the 131071"),
    "instructions": ({"instructions": 5}, "instructions: "),
    "a word for a temperature": ({"temperature": "hot"}, "temperature: "),
    "no tokens": ({"max_output_tokens": 0}, "max_output_tokens: "),
    "a field that is not served": ({"truncation": "auto"}, "truncation: "),
}


async def test_a_row_is_refused_by_its_field(tmp_path: Path) -> None:
    begun = containers.instances()
    async with service(tmp_path) as at:
        for name, (given, says) in OF_ROWS.items():
            refused = row()
            refused["responses_create_params"] |= given
            answer = await at.run(refused, status=422)
            assert f"responses_create_params.{says}" in answer["detail"], (name, answer)
            assert "input" not in given or containers.instances() <= begun
    assert not at.engine.answers


async def test_a_foreign_server_is_refused_by_the_settings_name(tmp_path: Path) -> None:
    environment = Environment()
    settings: dict[str, Any] = {"handler": "harness", "handler_config": {"harness": harness(tmp_path, PLAIN)}}
    async with deployment(environment, **settings) as at:
        code, body, _ = await at.post("/run", {"responses_create_params": {"input": "count"}})
        await until(lambda: environment.closed == 1)
    assert (code, "environments.environment.handler" in body["detail"]) == (422, True), body


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, ""),
        ({"harness": "gone"}, "no harness 'gone'"),
        ({"harness": "/gone.yaml"}, "no harness '/gone.yaml'"),
        ({"harnes": "codex"}, ""),
        ({"harness": "codex"}, "run prorl harness build codex"),
    ],
)
async def test_wrong_settings_are_named(
    given: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_CACHE", str(tmp_path))
    with pytest.raises(CallerError, match=rf"handler_config\.harnes.*{says}"):
        async with deployment(handler="harness", handler_config=given):
            pass
