# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The ``prorl`` command against a real service. Signals that its process gets: test_submit.py."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse

from nemo_gym_prorl.cli import submit
from nemo_gym_prorl.cli.service import find_service
from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.rollout.api.client import RolloutClient
from tests.cli.command_line import DEFECT, GOOD, LONG, TOKEN, begin, prorl, service, write
from tests.fleet.fleets import fleet
from tests.rollout.serving import serve


async def test_rollouts_can_be_seen_and_cancelled() -> None:
    first, second, group = "r-1-0", "r-2-0", "r-2"
    async with service() as (url, _), RolloutClient(url, TOKEN) as client:
        await client.submit(LONG, id=first, group="r-1")
        await client.submit(LONG, id=second, group=group)
        async with asyncio.timeout(30):
            while (await client.status()).states["running"] < 2:
                await asyncio.sleep(0.02)
        code, output = await prorl("status", url=url)
        assert "2 running; 2 sandboxes in use" in output
        code, output = await prorl("status", first, url=url)
        assert json.loads(output)["group"] == "r-1"
        code, output = await prorl("cancel", first, "nobody", url=url)
        assert code == 1
        assert f"{first} cancelled" in output
        assert "nobody unknown" in output
        code, output = await prorl("cancel", "--group", "nosuch", url=url)
        assert code == 1
        assert "nosuch unknown" in output
        code, output = await prorl("cancel", "--group", group, url=url)
        assert code == 0
        assert f"{second} cancelled" in output


@pytest.mark.parametrize(("rows", "code"), [([GOOD], 0), ([GOOD, DEFECT], 1)])
async def test_submit_ends_with_1_where_a_rollout_was_not_scored(tmp_path: Path, rows: list[Any], code: int) -> None:
    async with service() as (url, _):
        ended, output = await prorl("submit", str(write(tmp_path / "rows.jsonl", *rows)), url=url)
    assert (ended, "1 succeeded, mean reward 1.000 over 1" in output) == (code, True), output


async def test_tail_prints_transitions(tmp_path: Path) -> None:
    async with service() as (url, _):
        retried = GOOD | {"plan": {"init": [{"how": "infrastructure"}, {"how": "ok"}]}}
        await prorl("submit", str(write(tmp_path / "rows.jsonl", retried)), url=url)
        process = await begin(url, "tail", "--after", "0")
        assert process.stdout is not None
        try:
            lines = [(await asyncio.wait_for(process.stdout.readline(), 30)).decode() for _ in range(8)]
        finally:
            process.send_signal(signal.SIGINT)
            await process.wait()
        assert process.returncode == 130
        assert [line.split()[3] for line in lines] == [
            "queued", "initializing", "queued", "initializing", "ready", "running", "evaluating", "succeeded",
        ]  # fmt: skip
        assert lines[2].endswith(" queued again after provider_unavailable\n")
        assert "reward 1" in lines[-1]


async def test_mistakes_are_one_line_that_names_them(tmp_path: Path) -> None:
    broken, empty = tmp_path / "broken.jsonl", write(tmp_path / "empty.jsonl", {})
    broken.write_text(json.dumps(GOOD) + "\n{oops\n")
    async with service() as (url, _):
        for command, complaint in {
            "cancel": "give either ids of rollouts or --group",
            "submit nothere.jsonl": f"ROWS: no file nothere.jsonl in {Path.cwd()}, ",
            "status nobody": "no rollout 'nobody'",
            f"submit {broken}": "broken.jsonl:2: is not JSON",
            f"submit {empty}": "empty.jsonl:1: row.responses_create_params: missing; make rows",
            "status --failed --token other": "; set PRORL_TOKEN",
            "status nobody --url nonsense": "must be a URL with http:// or https://, not 'nonsense'",
            "tail --url http://127.0.0.1:9": "127.0.0.1:9",
        }.items():
            code, output = await prorl(*command.split(), url=url)
            assert (code, complaint in output, "Traceback" in output) == (1, True, False), (command, output)


async def test_rows_have_gyms_short_names_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "resources_servers/prorl_math/data/example.jsonl"
    _, output = await prorl("submit", name, url="http://127.0.0.1:9")
    assert "no rollout service answers at http://127.0.0.1:9" in output


async def test_a_service_that_is_started_anew_is_found_at_its_new_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "FIND_S", 0.05)
    head_of_gym, at = FastAPI(), {"process_name": "a", "name": "prorl_agent", "url": "http://127.0.0.1:9"}
    instances = [at]
    head_of_gym.get("/server_instances")(lambda: instances)
    async with serve(head_of_gym) as head, service() as (url, _):
        monkeypatch.setenv("PRORL_HEAD", head)
        async with asyncio.timeout(20), submit.services(None, TOKEN) as [client], client:
            with pytest.raises(InfrastructureError):
                await client.status()
            at["url"] = url
            while client.url != url:
                await asyncio.sleep(0.02)
            assert (await client.status()).stages
        async with submit.services(url, TOKEN) as [client]:
            at["url"] = "http://127.0.0.1:9"
            await asyncio.sleep(0.2)
            assert client.url == url, "it was named"
        instances.append({"process_name": "b", "name": "prorl_agent", "url": "http://127.0.0.1:2"})
        with pytest.raises(CallerError, match=r" has a .*b .*not one prorl_agent"):
            await asyncio.to_thread(find_service, head)


@pytest.mark.parametrize(
    ("command", "key", "code", "told"),
    [("submit", TOKEN, 0, ""), ("submit", "wrong", 1, "HTTP 401: "), ("status", "", 1, "set PRORL_TOKEN")],
)
async def test_a_front_with_a_key_is_found_with_the_key(
    tmp_path: Path, command: str, key: str, code: int, told: str
) -> None:
    rows = write(tmp_path / "rows.jsonl", GOOD)
    words = {"submit": [str(rows)], "status": []}[command]
    async with fleet(1, key=TOKEN) as there:
        if command != "submit":
            await there.client.submit(GOOD, id="r")
        ended, output = await prorl(command, *words, PRORL_HEAD=there.url, PRORL_TOKEN=key)
    assert (ended, told in output) == (code, True), output
    assert "Traceback" not in output
    assert len(output.splitlines()) == 1 or code == 0, output


GATEWAY = Response(
    '{"type": "about:blank", "title": "t", "status": 503, "detail": "it starts"}', 503, headers={"Retry-After": "1"}
)


@pytest.mark.parametrize(
    ("command", "named_by", "answer", "said"),
    [
        ("status", "PRORL_URL", Response("<html>"), "the server at {} is not a rollout service"),
        ("submit", "PRORL_URL", Response('{"detail": "Not Found"}', 404), "the server at {} is no rollout service"),
        ("status", "PRORL_HEAD", Response("<html>oops</html>", 500), "no NeMo Gym deployment answers at {}: "),
        ("submit", "PRORL_HEAD", Response('[{"name": "prorl_agent"}]'), "no NeMo Gym deployment answers at {}: "),
        ("submit", "PRORL_HEAD", GATEWAY, "no NeMo Gym deployment answers at {}: "),
        ("submit", "PRORL_HEAD", None, "no NeMo Gym deployment answers at {}: Connection refused; start one, or set"),
    ],
    ids=["a page", "no route", "a broken head", "an odd head", "a head that starts", "nothing"],
)
async def test_an_address_of_something_else_is_named_in_a_line(
    tmp_path: Path, command: str, named_by: str, answer: Response | None, said: str
) -> None:
    app = FastAPI()
    app.get("/{path:path}")(lambda path: answer)
    rows = [str(write(tmp_path / "rows.jsonl", GOOD))] if command == "submit" else []
    async with serve(app) as url:
        url = url if answer else "http://127.0.0.1:9"
        code, output = await prorl(command, *rows, **{named_by: url})
    assert (code, said.format(url) in " ".join(output.split())) == (1, True), output
    assert "Traceback" not in output


async def test_a_key_is_sent_to_no_other_host() -> None:
    received: list[str] = []
    other, here = FastAPI(), FastAPI()

    @other.get("/{path:path}")
    def receive(path: str, request: Request) -> dict[str, Any]:
        received.append(f"{path} {request.headers.get('authorization')}")
        return {}

    async with serve(other) as elsewhere:
        here.get("/{path:path}")(lambda path: RedirectResponse(f"{elsewhere}/{path}"))
        async with serve(here) as url:
            code, _output = await prorl("status", token="secret", url=url)
    assert (code, received) == (1, [])


WEIGHTY = {"aiohttp", "fastapi", "nemo_gym", "numpy", "omegaconf", "pydantic", "ray", "starlette", "tokenizers"}
"""Packages that take a tenth of a second or more to import; pydantic is typer's own."""


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["--help"], {"pydantic"}),
        (["show", "{file}:1"], {"pydantic"}),
        (["status"], {"pydantic"}),
        (["submit", "{file}", "--run", "r"], {"pydantic", "aiohttp", "omegaconf"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
async def test_a_command_imports_what_it_needs(tmp_path: Path, arguments: list[str], needed: set[str]) -> None:
    file = write(tmp_path / "rows.jsonl", GOOD)
    program = (
        "import atexit, sys; from nemo_gym_prorl.cli.app import main\n"
        f"atexit.register(lambda: print('has', *sorted({WEIGHTY!r} & sys.modules.keys()))); main()"
    )
    ended = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, *(word.format(file=file) for word in arguments)),
        env=os.environ | {"PRORL_URL": "http://127.0.0.1:9"},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await ended.communicate()
    assert set(said.decode().rpartition("has")[2].split()) <= needed, said.decode()
