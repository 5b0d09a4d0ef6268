# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Error messages of commands before a server starts: one line with the field and the fix."""

import asyncio
import re
import socket
from importlib import metadata
from pathlib import Path

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from typer.testing import CliRunner

from nemo_gym_prorl.cli.app import app
from nemo_gym_prorl.cli.environments import check_overrides
from nemo_gym_prorl.cli.serve import policy_warning, restart_report
from nemo_gym_prorl.deployment import deployment as deployments
from nemo_gym_prorl.deployment.deployment import GymDeployment, Instance, ServerDeath
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.servers.task_sandboxes import PROGRESS
from tests.cli.command_line import prorl
from tests.rollout.serving import serve


AGENT = "prorl_code_agent.responses_api_agents.prorl_agent"
CODE = "prorl_code.resources_servers.prorl_code"
NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["++a=b"], "give at least one environment"),
        (["no_such_environment"], "no_such_environment"),
        (["prorl_code", "--model-type", "vllm_model"], "--policy-url: is required: vllm_model cannot add engines"),
        (["prorl_code", "--journal", "folder"], "--journal: is an option of the gateway and requires --ray"),
        (["prorl_code", "--policy-url", "127.0.0.1:8000/v1"], "--policy-url: '127.0.0.1:8000/v1' must be http(s)://"),
        (["prorl_code", "--head-port", "{taken}"], "port {taken} is in use"),
        (
            ["prorl_code", "--tokenizer", "t", "--model-type", "vllm_model", "--policy-url", NOWHERE],
            "--tokenizer: is a setting of prorl_model; vllm_model has none",
        ),
        (["prorl_code", "++prorl_cod_agent.responses_api_agents.prorl_agent.x=1"], "the nearest: prorl_code_agent"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_serve_says_what_it_cannot_do(words: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(
            app, ["serve", *(word.replace("{taken}", port) for word in words), "--policy-model", "m"]
        )
    assert done.exit_code != 0
    assert says.replace("{taken}", port) in f"{done.output}{done.exception}"


def misspelled(wrong: str, nearest: str) -> str:
    return f"no setting or server '{wrong}'; the nearest: {nearest};"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (f"++{AGENT}.stages.run=4", None),
        ("++policy_model.responses_api_models.prorl_model.policy={}", None),
        ("head_server.port=3", None),
        ("++checkpoint_folder=/shared", None),
        ("+mine.resources_servers.mine.entrypoint=app.py", None),
        (f"++{AGENT.replace('code', 'cod')}.x=1", misspelled("prorl_cod_agent", "prorl_code_agent")),
        (f"++{AGENT.removesuffix('agent')}agnt.x=1", misspelled("prorl_agnt", "prorl_agent")),
        ("+prorl_code_agent.x", "override: Hydra cannot read it: "),
        (f"{AGENT}.budgets.run=9", f"{AGENT}.budgets.run: must begin with ++"),
        ("++sandbox.singularity.memory_mb=1", "sandbox.singularity.memory_mb: there is no such option (did you mean"),
        ("++sandbox.singularity.memory_mib=a", "sandbox.singularity.memory_mib: must be a valid integer"),
        (f"++{AGENT}.budgets.run=abc", f"{AGENT}: budgets.run: Input should be a valid number"),
        (f"++{AGENT}.further_model_servers=a,b", "further_model_servers: has several values; write a list"),
        (f"++{AGENT}.max_step=3", "max_step: there is no such setting; the nearest: max_steps;"),
        (f"++{AGENT}.max_steps=${{oc.env:STEPS}}", None),
        (f"++{AGENT}.environments.mine={{share: 2, resources_server: {{name: prorl_code}}}}", None),
        (f"++{CODE}.tool_silence_s=0", f"{CODE}: tool_silence_s: Input should be greater than 0"),
        (f"++{CODE}.reward=fraction", None),
        (
            f"++{CODE}.sandbox_provider=sandbx",
            f"{CODE}.sandbox_provider: no sandbox block 'sandbx'; the nearest: sandbox;",
        ),
        (f"++{CODE}.sandbox_provider=sandbox", None),
        ("++policy_model.responses_api_models.prorl_model.policy.engine=vlm", "engine: Input should be 'vllm'"),
    ],
)
def test_an_override_that_no_server_takes_is_refused_before_a_start(override: str, says: str | None) -> None:
    if says is None:
        check_overrides(["prorl_code"], "prorl_model", [override])
        return
    with pytest.raises(CallerError, match=re.escape(says)):
        check_overrides(["prorl_code"], "prorl_model", [override])


async def test_a_start_says_what_is_built_and_what_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployments, "WAITING_S", 1.0)
    deployment = GymDeployment(work_dir=tmp_path / "gym")
    said: list[str] = []
    telling = asyncio.create_task(deployment.report_start(said.append, PROGRESS))
    while not said:
        await asyncio.sleep(0.05)
    stage = r"Gym to start Ray \(at most 300 s\) and to launch its servers"
    assert re.fullmatch(rf"1 s, waiting for {stage}; load [\d.]+ on \d+ cores", said[-1])
    (tmp_path / "gym").mkdir()
    deployment.log.path.write_text("(prorl_math) prorl: sandbox image math: building math\nsomething else\n")
    deployment.waiting = ["prorl_math"]
    while len(said) < 3:
        await asyncio.sleep(0.05)
    telling.cancel()
    assert said[1] == "sandbox image math: building math"
    assert re.search(r" s, waiting for prorl_math; load .* cores; its log: something else$", said[2])


async def test_the_program_says_its_version() -> None:
    assert await prorl("--version") == (0, f"prorl {metadata.version('nemo-gym-prorl')}\n")


# An endpoint without which no rollout could sample


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        (JSONResponse({"data": [{"id": "qwen"}]}), None),
        (JSONResponse({"data": [{"id": "another"}]}), "/v1 serves another, not qwen"),
        (PlainTextResponse("no list"), None),
        (JSONResponse([1]), None),
        (Response(status_code=404), None),
        (Response(status_code=401), "refuses the key"),
    ],
)
async def test_only_what_is_certain_is_told(answer: Response, trouble: str | None) -> None:
    app = FastAPI()

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        assert request.headers["authorization"] == "Bearer key"
        return answer

    async with serve(app) as url:
        told = await policy_warning(f"{url}/v1", "qwen", "key")
        assert (told is None) if trouble is None else (told is not None and trouble in told)


async def test_nobody_at_the_address() -> None:
    warning = await policy_warning("http://127.0.0.1:9/v1", "qwen", "key")
    assert "http://127.0.0.1:9/v1/models does not answer" in str(warning)


@pytest.mark.parametrize(
    ("server", "warns"),
    [("responses_api_models/prorl_model", True), ("responses_api_models/vllm_model", False)],
)
def test_a_restarted_model_server_is_reported_with_what_it_has_lost(server: str, warns: bool) -> None:
    instances = [Instance("policy_model", server, "", 1), Instance("other", "responses_api_models/prorl_model", "", 2)]
    said = restart_report(ServerDeath("policy_model", "killed by signal 9", lived_s=70.2, pause_s=0.5), instances)
    line, _, warning = said.partition(". Warning: ")
    assert line == "policy_model ended (killed by signal 9) after 70 s; restarting in 0.5 s"
    assert all(part in warning for part in ("pauses", "weight labels", "engines that were added", "trainer")) == warns
