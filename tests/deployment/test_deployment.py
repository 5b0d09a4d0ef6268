# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Deployments of Gym's own servers: they start, answer, fail clearly, and leave no process behind."""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from nemo_gym_prorl.deployment import gym_cli
from nemo_gym_prorl.deployment.deployment import GymDeployment
from nemo_gym_prorl.deployment.gym_cli import MARK_NAME, DeploymentError, GymCli, start_error
from nemo_gym_prorl.processes import ProcessMark, reaper_command


pytestmark = pytest.mark.gym
STARTS_GYM = pytest.mark.long("starts Gym; test_init.py does so in the first tier")

REPOSITORY = Path(__file__).parents[2]
CODE = "environments/prorl_code/config.yaml"

ASLEEP = "import time; time.sleep(600)"
"""A server that never answers."""

ANSWERS = """
import http.server, os, yaml
config = yaml.safe_load(os.environ["NEMO_GYM_CONFIG_DICT"])["one"]["resources_servers"]["prorl_code"]
server = http.server.HTTPServer((config["host"], config["port"]), http.server.BaseHTTPRequestHandler)
server.serve_forever()
"""
"""One that says to everybody that it can do nothing."""


def of_one_server(folder: Path, program: str) -> dict[str, Any]:
    """Settings of a deployment whose only server is this program: how one begins and ends needs no other."""
    (folder / "app.py").write_text(program)
    # Gym takes no other path, and starts servers in their folders.
    entrypoint = os.path.relpath(folder / "app.py", REPOSITORY / "resources_servers/prorl_code")
    server = {"entrypoint": entrypoint, "host": "127.0.0.1", "domain": "other", "verified": False}
    config = folder / "one.yaml"
    config.write_text(yaml.safe_dump({"one": {"resources_servers": {"prorl_code": server}}}))
    return {"config_paths": [str(config)], "model_type": None}


@STARTS_GYM
async def test_a_death_while_it_is_in_use_is_noticed(shared_ray, tmp_path):
    on_interrupt = signal.getsignal(signal.SIGINT)
    settings = of_one_server(tmp_path, ANSWERS)
    async with GymDeployment(**settings, overrides=[shared_ray], work_dir=tmp_path / "gym") as gym:
        assert signal.getsignal(signal.SIGINT) is on_interrupt
        assert gym.instances.keys() == {"one"}
        assert gym.cli.mark.processes()
        with pytest.raises(DeploymentError, match=r"no instance 'nobody'.*; instances: one"):
            gym.url("nobody")
        assert await gym.guard(asyncio.sleep(0, "the work's own result")) == "the work's own result"
        async with asyncio.timeout(60):
            while "All 1 / 1 servers ready" not in gym.log.path.read_text():
                await asyncio.sleep(0.1)
        victim = next(pid for pid, command in gym.cli.mark.processes().items() if command.endswith("app.py"))
        # Gym would look within a minute, and say nothing to whoever uses the servers.
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(DeploymentError, match=r"of the deployment died; load .*gym\.log"):
            await asyncio.wait_for(gym.guard(asyncio.sleep(600)), 30)
    assert gym.cli.mark.processes() == {}


@STARTS_GYM
async def test_a_server_that_dies_at_start_is_an_error_with_its_log_and_leaves_nothing(shared_ray, tmp_path):
    settings = of_one_server(tmp_path, "raise SystemExit('not today')")
    gym = GymDeployment(**settings, overrides=[shared_ray], work_dir=tmp_path / "gym")
    with pytest.raises(DeploymentError, match=r"(?s)before its servers were up.*not today"):
        await gym.__aenter__()
    assert gym.cli.mark.processes() == {}


@pytest.mark.parametrize(
    ("work_dir", "python", "says"),
    [
        ("gym", "my work/.venv/bin/python", r"my work/\.venv/bin/python: the path contains a space"),
        ("file/gym", "python", r"cannot create \S+file/gym: Not a directory; choose another folder"),
    ],
)
async def test_a_folder_in_which_gym_cannot_start_is_refused(
    work_dir: str, python: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    gym = GymDeployment(config_paths=[CODE], work_dir=tmp_path / work_dir, python=f"/opt/{python}")
    with pytest.raises(DeploymentError, match=says):
        await gym.__aenter__()


TRACEBACK = 'Traceback (most recent call last):\n  File "app.py", line 1, in <module>\n    go()\n'
ENDED = f"{TRACEBACK}RuntimeError: Process `policy_model` finished unexpectedly!\nShutting down Ray\n"
STARTUP = "(policy_model) ERROR:    Traceback (most recent call last):\n(policy_model)   File\n"
CHAIN = "\nThe above exception was the direct cause of the following exception:\n\n"


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("INFO: up\n", None),
        (ENDED, None),
        (
            f"{TRACEBACK}nemo_gym_prorl.failures.CallerError: base_url: no\nINFO: up\n{ENDED}",
            "policy_model: base_url: no",
        ),
        (f"{TRACEBACK}KeyError: 'a'\n{CHAIN}{TRACEBACK}x.y.BadError: b\n{ENDED}", "policy_model: BadError: b"),
        (f"{TRACEBACK}KeyboardInterrupt\n{TRACEBACK}ValueError: no\n{ENDED}", "policy_model: ValueError: no"),
        (
            f"{TRACEBACK}pydantic_core._pydantic_core.ValidationError: 3 validation errors for Config\n"
            "  Value error, folder: must exist [type=value_error, input_value={'a': 1}, input_type=dict]\n"
            "    For further information visit it\nstages.run\n  Value error, must be odd [type=value_error]\n"
            f"    For further information visit it\n  Value error, port: no\nINFO: up\n{ENDED}",
            "policy_model: folder: must exist; stages.run: must be odd; port: no",
        ),
        (
            f"{TRACEBACK}ValueError: no\n(math) Traceback (most recent call last):\n(math)   File\n"
            f"(math) SystemExit: 15\n{ENDED}",
            "policy_model: ValueError: no",
        ),
        (f"{STARTUP}(policy_model) Bad: no\n(policy_model) ERROR:    Exiting.\n{ENDED}", "policy_model: Bad: no"),
        (f"{STARTUP}(math) INFO: up\n(policy_model) Bad: no\n{ENDED}", "policy_model: Bad: no"),
        (f"{STARTUP}(policy_model) ^^^^\n(policy_model) Bad: no\n{ENDED}", "policy_model: Bad: no"),
        (f"{STARTUP}(policy_model) Bad: no\n{ENDED.replace('policy_model', 'math')}", None),
        (f"{TRACEBACK}hydra.errors.OverrideParseException: mismatched\n", "OverrideParseException: mismatched"),
        (f"{TRACEBACK}Exception: The current node timed out\n", "Exception: The current node timed out"),
    ],
)
def test_why_a_deployment_did_not_start_is_a_line(log: str, error: str | None) -> None:
    assert start_error(log.splitlines()) == error


async def test_a_second_signal_leaves_no_folder(monkeypatch: pytest.MonkeyPatch):
    gym = GymDeployment(config_paths=[CODE])
    command = (
        ["sh", "-c", "trap 'sleep 2; exit' INT; echo up; while :; do sleep 0.1; done", "gym"],
        dict(os.environ),
        Path("/tmp"),
    )
    monkeypatch.setattr(gym.cli, "command", lambda *_words: _now(command))
    starting = asyncio.create_task(gym.__aenter__())
    while "up" not in gym.log.lines():
        await asyncio.sleep(0.1)
    starting.cancel()
    await asyncio.sleep(0.3)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert gym.cli.mark.processes() == {}
    assert not gym.work_dir.exists()


@STARTS_GYM
async def test_killing_the_owner_ends_the_deployment_and_its_ray(tmp_path):
    settings = of_one_server(tmp_path, ASLEEP)
    program = f"""
import asyncio
from pathlib import Path
from nemo_gym_prorl.deployment.deployment import GymDeployment
async def main():
    gym = GymDeployment(**{settings!r}, work_dir=Path({str(tmp_path / "gym")!r}))
    print(gym.cli.mark.value, gym._ray_dir, flush=True)
    async with gym:
        await asyncio.sleep(600)
asyncio.run(main())
"""
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    mark = None
    try:
        value, scratch = (await asyncio.wait_for(owner.stdout.readline(), 200)).decode().split()
        mark = ProcessMark(MARK_NAME, value)
        async with asyncio.timeout(200):
            # Ray comes first, and each server is a process that ends nothing by itself.
            while not any(command.endswith("app.py") for command in mark.processes().values()):
                assert owner.returncode is None
                await asyncio.sleep(0.1)
        assert any("gcs_server" in command for command in mark.processes().values())
        assert await asyncio.to_thread(Path(scratch).is_dir)
        owner.kill()
        await owner.wait()
        assert await mark.wait_gone(30) == {}
        assert not await asyncio.to_thread(Path(scratch).exists)
    finally:
        if owner.returncode is None:
            owner.kill()
        if mark:
            await mark.kill(settle_s=0, kill_s=10)


RAY_HEAD = """
import ray, sys
ray.init(num_cpus=1, include_dashboard=False, _temp_dir=sys.argv[1], log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
RAY_CLIENT = "import ray, sys; ray.init(sys.argv[1]); print(ray.nodes()[0]['Alive'])"


@pytest.mark.long("starts Ray")
async def test_ray_takes_only_clients_with_the_deployments_token(tmp_path: Path) -> None:
    async def client(env: dict[str, str]) -> bytes:
        words = (sys.executable, "-c", RAY_CLIENT, address)
        process = await asyncio.create_subprocess_exec(*words, env=env, stdout=PIPE, stderr=DEVNULL)
        return (await process.communicate())[0].strip()

    _, env, _ = await GymCli(tmp_path).command("env")
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="prorl-t-") as folder:  # Ray's socket paths are long
        words = (sys.executable, "-c", RAY_HEAD, folder)
        head = await asyncio.create_subprocess_exec(*words, env=env, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        try:
            assert head.stdout
            address = (await head.stdout.readline()).decode().strip()
            assert address
            without = {name: value for name, value in env.items() if not name.startswith("RAY_AUTH")}
            others = without, without | {"RAY_AUTH_MODE": "disabled"}
            answers = await asyncio.gather(*map(client, (env, *others)))
        finally:
            await head.communicate()  # the end of its input ends the head
    assert answers == [b"True", b"", b""]


async def test_an_interpreter_without_gym_is_refused(tmp_path):
    bare = tmp_path / "python"
    # A shell that only says what Python would say.
    bare.write_text("#!/bin/sh\necho \"No module named 'nemo_gym'\" >&2; exit 1\n")
    bare.chmod(0o755)
    with pytest.raises(DeploymentError, match="No module named 'nemo_gym'; install nemo-gym there"):
        await GymCli(tmp_path, python=str(bare)).prepare()


async def test_a_tree_ends_with_the_process_that_its_owner_knows(tmp_path: Path):
    """A worker of Ray that ends kills its children."""
    mark = ProcessMark("PRORL_TEST_MARK", os.urandom(8).hex())
    scratch, owners = tmp_path / "scratch", tmp_path / "owners"
    scratch.mkdir()
    owners.mkdir()
    known = await asyncio.create_subprocess_exec(
        *reaper_command(mark, ["sh", "-c", "setsid sleep 600 & exec sleep 600"], sys.executable, scratch, owners),
        env={**os.environ, mark.name: mark.value},
        start_new_session=True,
    )
    async with asyncio.timeout(20):
        while sum("sleep 600" in command for command in mark.processes().values()) < 4:
            await asyncio.sleep(0.02)
    known.kill()
    await known.wait()
    assert await mark.wait_gone(20) == {}
    async with asyncio.timeout(5):
        while await asyncio.to_thread(scratch.exists):
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    assert owners.exists(), "we live, and may want to read it"


async def test_what_the_dead_left_goes_with_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As after the end of a batch job, which kills owners and reapers alike."""
    monkeypatch.setattr(gym_cli, "RAY_FOLDERS", tmp_path)
    mark = ProcessMark("PRORL_TEST_MARK", os.urandom(8).hex())
    folder, temporary, another = tmp_path / "prorl-ray-1", tmp_path / "prorl-gym-1", tmp_path / "prorl-ray-2"
    for each in (folder, temporary, another):
        each.mkdir()
    lock = gym_cli.lock_deployment(folder, mark, temporary)
    known = await asyncio.create_subprocess_exec(
        *reaper_command(mark, ["sleep", "600"], sys.executable, folder, temporary),
        env={**os.environ, mark.name: mark.value},
        pass_fds=[lock],
    )
    async with asyncio.timeout(20):
        # Before its exec, the command looks like a reaper.
        while "sleep 600" not in (running := mark.processes().values()) or len(running) < 3:
            await asyncio.sleep(0.02)
    await gym_cli.remove_orphans()
    assert folder.exists(), "its owner lives"
    os.close(lock)
    await gym_cli.remove_orphans()
    assert folder.exists(), "its reaper lives"
    reapers = [pid for pid, command in mark.processes().items() if "processes.py" in command]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # at once
        for pid in reapers:
            os.kill(pid, number)
    await known.wait()
    async with asyncio.timeout(20):
        while [*mark.processes().values()] != ["sleep 600"]:
            await asyncio.sleep(0.02)
    assert temporary.exists()
    # A killed reaper has no variables left before the kernel closes its lock.
    async with asyncio.timeout(20):
        while mark.processes():
            await gym_cli.remove_orphans()
    assert not folder.exists()
    assert not temporary.exists()
    assert another.exists(), "nobody knows whose it is"


OWNER = """
import os, subprocess, sys
from pathlib import Path
from nemo_gym_prorl.processes import ProcessMark, reaper_command
scratch, owners, *mark = sys.argv[1:]
command = [sys.executable, "-c", ""]
subprocess.Popen(reaper_command(ProcessMark(*mark), command, sys.executable, Path(scratch), Path(owners)))
os._exit(0)
"""


async def test_a_reaper_whose_owner_is_gone_before_it_looks_starts_nothing(tmp_path: Path):
    mark = ProcessMark("PRORL_TEST_MARK", os.urandom(8).hex())
    for folder in ("scratch", "owners"):
        (tmp_path / folder).mkdir()
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER, str(tmp_path / "scratch"), str(tmp_path / "owners"), mark.name, mark.value),
        env={**os.environ, mark.name: mark.value},
    )
    await owner.wait()
    assert await mark.wait_gone(20) == {}
    assert not await asyncio.to_thread(lambda: [*tmp_path.iterdir()])


def test_the_policys_key_is_readable_by_the_user_only(tmp_path: Path):
    gym = GymDeployment(policy_base_url="http://127.0.0.1:1/v1", policy_api_key="secret", work_dir=tmp_path)
    gym._ray_dir.mkdir(mode=0o700)
    try:
        path = gym._write_private()
        assert path.stat().st_mode & 0o077 == 0
        assert "secret" in path.read_text()
    finally:
        shutil.rmtree(gym._ray_dir)


async def test_a_port_that_somebody_elses_deployment_has_is_named(tmp_path: Path):
    """It answers, with its own servers, while ours could not have the port."""
    theirs = web.Application()
    listed = [{"server_type": "x", "name": "x", "process_name": "x", "url": "http://127.0.0.1:1", "pid": 1}]
    theirs.router.add_get("/server_instances", lambda _request: _now(web.json_response(listed)))
    runner = web.AppRunner(theirs)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        gym = GymDeployment(work_dir=tmp_path, head_port=port)
        with pytest.raises(DeploymentError, match=f"port {port} of Gym's head server.*--head-port"):
            await asyncio.wait_for(gym._wait_ready(), 30)
    finally:
        await runner.cleanup()
    assert gym.instances == {}


async def _now(answer: web.Response) -> web.Response:
    return answer
