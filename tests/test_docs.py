# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Every snippet of the documentation runs, against a real small service; what cannot run here is in one table.

The service is a real ``prorl_agent`` with a real ``prorl_model`` and one of Gym's own resources servers that needs no
sandbox, each as Gym makes them; only the policy is scripted.
"""

import ast
import asyncio
import dataclasses
import inspect
import json
import os
import re
import shlex
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import click
import pytest
import pytest_asyncio
import typer
import yaml

from nemo_gym_prorl.cli.app import app
from nemo_gym_prorl.cli.scripted.server import ScriptedConfig, ScriptedPolicy
from nemo_gym_prorl.cli.scripted.server import serve as serve_scripted
from nemo_gym_prorl.cli.scripted.text import MODEL_NAME, ScriptTurn, parse_script
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.images.builder import KERNEL, ensure_image
from nemo_gym_prorl.sandbox.images.entries import ignore_progress
from nemo_gym_prorl.sandbox.isolation.user_ids import multi_user_error
from scripts import make_reference
from tests.agent.gym_host import hosting, instance, url_of
from tests.agent.test_gym_environment import counting, gym_rows, scripted
from tests.cli.command_line import prorl


PRORL = typer.main.get_command(app)
ROOT = Path(__file__).parents[1]
ENVIRONMENT = "example_session_state_mgmt"

DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "docs/*/*.md", "benchmarks/README.md", "*/*/README.md")
    for path in ROOT.glob(pattern)
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)

NOT_RUN = {
    "make": "sets up a whole machine, or takes an hour",
    "gym": "starts Ray and every server in a process of its own; tests/deployment/test_journey.py runs these lines",
    "pip": "installs this package; tests/deployment/test_journey.py does it",
    "uv": "installs this package; tests/deployment/test_journey.py does it",
    "git": "clones NeMo RL",
    "export": "is of the shell",
    "umask": "is of the shell",
    "bash": "submits to Slurm; tests/nemo_rl/test_slurm.py runs it",
    "python": "needs NeMo RL; tests/nemo_rl/test_recipes.py runs it",
    "ray": "needs the nodes of a cluster; tests/deployment/test_fleet.py has two",
    "sbatch": "needs Slurm; the script was tried with one",
    "vllm": "needs an engine's environment; tests/policy/engines.py starts it with this flag",
    "prorl setup": "downloads a container runtime; tests/setup runs it",
    "prorl doctor": "its exit code depends on the machine; tests/setup runs it",
    "prorl image": "needs a registry; tests/sandbox/test_images_*.py run these commands",
    "prorl harness": "needs the npm registry; tests/harness builds packages of the disk",
    "prorl data": "needs a dataset's file; tests/tasks/test_conversion.py runs it",
    "prorl serve": "starts Ray and containers; its own tests run it",
    "prorl tail": "goes on until it is interrupted; tests/cli/test_commands.py runs it",
    "prorl scripted": "listens on a port that may be taken; its own tests run it",
}
"""Commands that are not run here, and why. They are parsed: each option must exist."""

NEW_ENVIRONMENTS = ("adder", "my_environment")
"""Made by ``prorl init``."""

WITH_SANDBOXES = ("resources_servers/prorl_", "code.jsonl")
"""Rows and results of environments that need sandboxes, which the small service does not serve."""

PYTHON_NOT_RUN = {
    "docs/train-nemo-rl.md": "needs NeMo RL's actor and Ray; the tests under a real actor do the same calls",
    "docs/train-your-own.md": "wants a trainer; tests/dapo/test_runner.py runs it against services of its own",
    "docs/your-own-environment.md": "serves what prorl init writes, and a handler in a package of its own",
}
"""Documents whose Python is compiled only, and why."""


@dataclass(frozen=True)
class Snippet:
    """A block of a document."""

    file: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def snippets(path: Path) -> Iterator[Snippet]:
    """Fenced blocks, and indented ones that are not part of a list."""
    file = str(path.relative_to(ROOT))
    lines = path.read_text().splitlines()
    number = 0
    while number < len(lines):
        begin = number
        if lines[number].startswith("```"):
            number += 1
            while not lines[number].startswith("```"):
                number += 1
            yield Snippet(file, begin + 1, lines[begin][3:], "\n".join(lines[begin + 1 : number]))
        elif lines[number].startswith("    ") and (number == 0 or not lines[number - 1].strip()):
            while number + 1 < len(lines) and (lines[number + 1].startswith("    ") or not lines[number + 1].strip()):
                number += 1
            yield Snippet(file, begin + 1, "", textwrap.dedent("\n".join(lines[begin : number + 1])).strip())
        number += 1


ALL = [snippet for path in DOCUMENTS for snippet in snippets(path)]


def commands(text: str) -> list[list[str]]:
    """The commands of a shell snippet as words, without comments and variables set in front of them."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words:
            found.append([words[0].removeprefix(".venv/bin/"), *words[1:]])
    return found


def reason_not_to_run(words: list[str]) -> str | None:
    """From the table: by program, or by program and subcommand."""
    if any(name in word for name in NEW_ENVIRONMENTS for word in words):
        return "is about a new environment, which tests/deployment/test_init.py makes and serves"
    if any(word.startswith(WITH_SANDBOXES) for word in words):
        return "needs sandboxes; tests/setup/test_readme.py and tests/deployment run such rows"
    return NOT_RUN.get(words[0]) or NOT_RUN.get(" ".join(words[:2]))


def is_shell(snippet: Snippet) -> bool:
    """Blocks without a language are commands; output and diagrams are ``text``."""
    return snippet.language in ("", "bash", "sh", "shell")


SHELL = [snippet for snippet in ALL if is_shell(snippet)]
PYTHON = [snippet for snippet in ALL if snippet.language == "python"]


# -- what cannot run is at least right ------------------------------------------------------------------------------


def parse(words: list[str]) -> None:
    """Have click parse a ``prorl`` command line, as it stands, without running it."""
    command: Any = PRORL
    context = click.Context(command, info_name="prorl")
    rest = words[1:]
    while rest and (isinstance(command, click.Group) or hasattr(command, "commands")):
        name, rest = rest[0], rest[1:]
        command = command.get_command(context, name)
        assert command is not None, f"there is no command {name}"
    command.make_context(words[1], list(rest), parent=context)


def test_every_prorl_command_in_a_block_parses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    for name in ("rows.jsonl", "corpus.jsonl", "notes.txt", "out/first.jsonl"):
        (tmp_path / name).touch()
    found = [(snippet, words) for snippet in SHELL for words in commands(snippet.text) if words[0] == "prorl"]
    assert len(found) > 15
    for snippet, words in found:
        try:
            parse(words)
        except Exception as error:
            pytest.fail(f"{snippet}: {shlex.join(words)}: {error}")


def test_every_path_that_is_named_exists() -> None:
    missing = []
    for path in DOCUMENTS:
        text = path.read_text()
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            if not (path.parent / link).exists():
                missing.append(f"{path.relative_to(ROOT)}: {link}")
        for code in re.findall(r"`((?:nemo_gym_prorl|tests|scripts|docs|resources_servers)/[\w/.-]+)`", text):
            if not (ROOT / code).exists() and not any(name in code for name in NEW_ENVIRONMENTS):
                missing.append(f"{path.relative_to(ROOT)}: {code}")
    assert missing == []


def test_the_reference_is_up_to_date() -> None:
    assert make_reference.PAGE.read_text() == make_reference.page(), "run: python -m scripts.make_reference"


# -- what can run does ----------------------------------------------------------------------------------------------

ENVIRON = os.environ | {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "COLUMNS": "80",
    "PYTHONUNBUFFERED": "1",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def urls() -> AsyncIterator[dict[str, str]]:
    async with serve_scripted(ScriptedConfig()) as policy_url:
        model = {
            "base_url": policy_url,
            "api_key": "none",
            "model": MODEL_NAME,
            "return_token_id_information": True,
            "uses_reasoning_parser": False,
            "policy": {"engine": "vllm_chat"},
        }
        agent = {
            "resources_server": {"type": "resources_servers", "name": "counter"},
            "model_server": {"type": "responses_api_models", "name": "policy_model"},
        }
        config = {
            "policy_model": instance("responses_api_models", "prorl_model", **model),
            "counter": instance("resources_servers", ENVIRONMENT, domain="other"),
            "agent": instance("responses_api_agents", "prorl_agent", **agent),
        }
        async with hosting(config):
            yield {name: url_of(block) for name, block in config.items()}


@pytest.fixture(scope="module")
def url(urls: dict[str, str]) -> str:
    return urls["agent"]


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    """Rows whose policy plays back a script, one that is right and one that is not, in a file of an empty folder."""
    [first, second, *_] = gym_rows(ENVIRONMENT)
    made = [
        scripted(first, *counting(first["expected_count"] - first["initial_count"] - 1)),
        scripted(second, *counting(0)),
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return made


@pytest.mark.parametrize("file", ["alerts.yaml", "grafana.json"])
@pytest.mark.asyncio(loop_scope="module")
async def test_every_metric_that_is_watched_is_told(
    file: str, urls: dict[str, str], rows: list[dict[str, Any]]
) -> None:
    told = set()
    async with aiohttp.ClientSession() as http:
        for server in ("agent", "policy_model"):
            async with http.get(f"{urls[server]}/metrics") as answer:
                for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", await answer.text(), re.MULTILINE):
                    told |= (
                        {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
                    )
    watched = yaml.safe_load((ROOT / "docs" / "monitoring" / file).read_text())
    expressions = [
        each["expr"]
        for group in (*watched.get("groups", ()), *watched.get("panels", ()))
        for each in (*group.get("rules", ()), *group.get("targets", ()))
    ]
    named = {name for text in expressions for name in re.findall(r"\bprorl_\w+", text)}
    assert len(named) >= 8
    assert named <= told
    variables = [each["query"] for each in watched.get("templating", {}).get("list", ())]
    assert {name for text in variables for name in re.findall(r"\bprorl_\w+", text)} <= told


@pytest.mark.parametrize("snippet", SHELL, ids=str)
@pytest.mark.asyncio(loop_scope="module")
async def test_shell(
    snippet: Snippet, url: str, rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = ENVIRON | {"PRORL_URL": url}
    monkeypatch.chdir(tmp_path)
    ran = 0
    for words in commands(snippet.text):
        if reason_not_to_run(words):
            continue
        ran += 1
        if words[0] == "prorl":
            code, said = await prorl(*words[1:], url=url, COLUMNS="80")
            assert code == 0, (shlex.join(words), said)
            continue
        process = await asyncio.create_subprocess_exec(
            *words, cwd=tmp_path, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 0, (shlex.join(words), output.decode())
    if not ran:
        pytest.skip("; ".join(sorted({f"{words[0]}: {reason_not_to_run(words)}" for words in commands(snippet.text)})))


JSON = [snippet for snippet in ALL if snippet.language == "json"]


@pytest.mark.parametrize("snippet", [snippet for snippet in JSON if '"turns"' in snippet.text], ids=str)
def test_json_is_a_script_that_is_played(snippet: Snippet) -> None:
    turns = parse_script(snippet.text).turns
    body = {"messages": [{"role": "user", "content": "go"}], "metadata": {"script": snippet.text}}
    answer, _latency_s = ScriptedPolicy(ScriptedConfig()).chat_completions(body)
    assert answer["choices"][0]["message"]["content"] == turns[0].content
    told = {key for turn in json.loads(snippet.text)["turns"] for key in turn}
    assert told == {field.name for field in dataclasses.fields(ScriptTurn)}, "all that a turn may say"


@pytest.mark.parametrize("snippet", [snippet for snippet in JSON if '"turns"' not in snippet.text], ids=str)
@pytest.mark.asyncio(loop_scope="module")
async def test_json_is_a_submission_that_is_taken(snippet: Snippet, url: str) -> None:
    body = json.loads(snippet.text)
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/rollouts", json=body) as response:
        assert response.status == 202, await response.text()


@pytest.mark.parametrize("snippet", [s for s in PYTHON if s.file in PYTHON_NOT_RUN], ids=str)
def test_python_that_cannot_run_compiles(snippet: Snippet) -> None:
    compile(snippet.text, str(snippet), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize(
    "snippet", [s for s in PYTHON if "RolloutClient" in s.text and s.file not in PYTHON_NOT_RUN], ids=str
)
@pytest.mark.asyncio(loop_scope="module")
async def test_python_of_the_client(
    snippet: Snippet, url: str, rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    await execute(re.sub(r"http://127\.0\.0\.1:\d+", url, snippet.text), row=rows[0])
    assert capsys.readouterr().out.split() == ["succeeded", "1.0", "None"]


@pytest.mark.sandbox
@pytest.mark.parametrize("snippet", [s for s in PYTHON if s.file == "docs/sandboxes.md"], ids=str)
async def test_python_of_sandboxes(snippet: Snippet, image: Path) -> None:
    if "users=True" in snippet.text and (trouble := multi_user_error()):
        pytest.skip(trouble)
    if 'image="kernel"' in snippet.text:
        await asyncio.to_thread(ensure_image, KERNEL, ignore_progress)
    spec = ContainerSpec(image=image)
    async with await Container.start(spec) as database, await Container.start(spec) as server:
        await execute(snippet.text, database=database, server=server)


async def execute(text: str, **names: Any) -> None:
    """Run Python that awaits at its top level."""
    code = compile(text, "snippet", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    done = eval(code, names)
    if inspect.isawaitable(done):
        await done
