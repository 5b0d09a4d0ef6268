# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Commands and files in a real container: what comes back, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor import state_dir
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxLost


pytestmark = [pytest.mark.sandbox, pytest.mark.usefixtures("way")]


async def test_output_errors_and_exit_code(container: Container) -> None:
    done = await container.run("echo out; echo err >&2; exit 3")
    assert (done.stdout, done.stderr, done.exit_code, done.timed_out) == ("out\n", "err\n", 3, False)
    assert (await container.run("kill -9 $$")).exit_code == 137
    assert (await container.run("no-such-program")).exit_code == 127
    assert (await container.run("cat")).stdout == "", "input is empty"


async def test_variables_and_folders(image: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "hidden")
    spec = ContainerSpec(image=image, env={"A": "a b\n'\"$X"}, workdir="/srv/dir")
    async with await Container.start(spec, runtime) as container:
        shown = (await container.run('printf %s "$A"; pwd', env={"B": "b"})).stdout
        assert shown == "a b\n'\"$X/srv/dir\n"
        environment = (await container.run("env", env={"B": "b"}, cwd="/")).stdout
        assert "HOST_SECRET" not in environment
        assert "APPTAINER" not in environment
        assert {"B=b", "HOME=/root", "PWD=/"} <= set(environment.split("\n"))
        command_lines = [Path(f"/proc/{pid}/cmdline") for pid in state_dir.process_ids()]
        assert not any(b"a b\n" in line.read_bytes() for line in command_lines if line.exists()), "secrets on argv"
        with pytest.raises(CallerError, match="working folder /nowhere"):
            await container.run("true", cwd="/nowhere")
        with pytest.raises(CallerError, match="env"):
            await container.run("true", env={"A=B": "c"})


@pytest.mark.parametrize(("letter", "letters"), [("a", 99_000), ("é", 70_000), ("🐸", 30_000), ("a", 140_000)])
async def test_a_command_of_any_length(container: Container, letter: str, letters: int) -> None:
    """The kernel takes no argument beyond 128 KiB, and counts bytes."""
    done = await container.run(f"printf %s '{letter * letters}' | wc -c")
    assert done.stdout.strip() == str(letters * len(letter.encode())), done.stderr


async def test_output_is_bounded(container: Container) -> None:
    done = await container.run("yes | head -c 30000000; echo end", output_limit=2000)
    assert done.stdout.endswith("end\n")
    assert len(done.stdout) < 2100


async def test_links_lead_nowhere_outside(container: Container, tmp_path: Path) -> None:
    """A link to a path of the host means the sandbox's own path of that name."""
    secret = tmp_path / "secret"
    secret.write_text("host")
    await container.run(f"ln -s {secret} /link; ln -s /proc/1/root{secret} /proclink; ln -s {tmp_path} /dirlink")
    for path in ("/link", "/proclink", "/dirlink/secret", f"/../../../..{secret}"):
        with pytest.raises(CallerError):
            await container.files.download(path, tmp_path / "stolen")
    (tmp_path / "new").write_text("sandbox")
    with pytest.raises(CallerError):
        await container.files.upload(tmp_path / "new", "/dirlink/secret")
    await container.run(f"mkdir -p {tmp_path}")
    await container.files.upload(tmp_path / "new", "/dirlink/secret")
    assert secret.read_text() == "host"
    assert (await container.run(f"cat {secret}")).stdout == "sandbox"


async def test_without_root(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image, root=False), runtime) as container:
        assert (await container.run("id -u; pwd; touch /tmp/x && echo ok")).stdout == "1000\n/tmp\nok\n"
        assert (await container.run("grep CapEff /proc/self/status")).stdout.split()[1] == "0" * 16


async def test_the_time_to_live(image: Path, runtime: Runtime) -> None:
    container = await Container.start(ContainerSpec(image=image, ttl_s=1), runtime)
    for command in ("sleep 1000", "true"):
        with pytest.raises(SandboxLost, match="time to live"):
            await container.run(command)
    await container.close()
