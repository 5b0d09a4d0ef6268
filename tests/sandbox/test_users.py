# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Several users in one sandbox: for root, and for an ordinary user with subordinate ids."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation import user_ids
from nemo_gym_prorl.sandbox.isolation.privilege import has_single_id, is_machine_root
from nemo_gym_prorl.sandbox.limits import usage
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.supervisor import state_dir
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxExhausted
from tests.sandbox.running import kill_supervisor, until


pytestmark = pytest.mark.sandbox

WHY_NOT = user_ids.multi_user_error()
HAVE_THEM = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@HAVE_THEM
async def test_users_have_files_of_their_own(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image, users=True), runtime) as container:
        made = await container.run(
            "cd /tmp && touch theirs && chown 33:33 theirs && stat -c %u:%g theirs && echo secret > s && chmod 600 s"
        )
        assert made.stdout == "33:33\n"
        assert (await container.run("id -un; echo $HOME; touch /tmp/own", user="www-data")).stdout == (
            "www-data\n/var/www\n"
        )
        assert (await container.run("cat /tmp/s", user="www-data")).exit_code == 1
        assert (await container.run("cat /tmp/s /proc/1/environ; kill -9 1", user=33)).stdout == ""
        assert (await container.run("stat -c %U /tmp/own")).stdout == "www-data\n"
        assert (await container.run("id -G", user="nobody")).stdout == "65534\n"
        assert (await container.run("grep CapEff /proc/self/status", user=33)).stdout.split()[1] == "0" * 16
        long = f": {'x' * (1 << 20)}; id -u > /dev/stdout"
        assert (await container.run(long, user=33)).stdout == "33\n", "the command's file and its output are his, too"
        with pytest.raises(CallerError, match="no user 'somebody'"):
            await container.run("id", user="somebody")


@HAVE_THEM
async def test_everybody_has_temporary_files(tiny_root: Path, runtime: Runtime, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(tiny_root, root, symlinks=True)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nweb:x:33:33::/:/bin/sh\n")
    (root / "tmp").chmod(0o755)  # as builds of ordinary users leave it
    async with await Container.start(ContainerSpec(image=root, users=True), runtime) as container:
        assert (await container.run("mkdir /tmp/own && ls -d /tmp/own", user=33, cwd="/")).stdout == "/tmp/own\n"


MANY = """
import os, time
for uid in range(1000, 1010):
    if not os.fork():
        os.setuid(uid)
        try:
            while os.fork():
                pass
        except OSError:
            pass
        time.sleep(60)
time.sleep(60)
"""


@HAVE_THEM
async def test_processes_of_all_users_together_are_bounded(image: Path, runtime: Runtime) -> None:
    spec = ContainerSpec(image=image, users=True, processes=50)
    async with await Container.start(spec, runtime) as container, await Container.start(spec, runtime) as neighbour:
        await container.run(f"cat > /tmp/many.py << 'END'\n{MANY}\nEND\nsetsid python3 /tmp/many.py >/dev/null 2>&1 &")
        await asyncio.sleep(1)
        space = int((container.folder / state_dir.PID_NAMESPACE_FILE).read_text().split()[2])
        assert 20 < len(usage.processes_by_namespace([space])[space]) <= 50
        for user in (None, 33):
            with pytest.raises(SandboxExhausted, match="processes"):
                await container.run("true", user=user)
        assert (await neighbour.run("id -u", user=33)).stdout == "33\n", "of others it is no part"


CLOSED = "mkdir -p /tmp/theirs/deep/er && touch /tmp/theirs/deep/er/x && chmod 0 /tmp/theirs"


@HAVE_THEM
@pytest.mark.parametrize("killed", [False, True])
async def test_what_they_wrote_goes_with_the_sandbox(image: Path, runtime: Runtime, killed: bool) -> None:
    """For an ordinary user's server these files belong to ids whose files it can't remove as itself."""
    container = await Container.start(ContainerSpec(image=image, users=True), runtime)
    await container.run("mkdir /tmp/theirs && chown 33 /tmp/theirs && chmod 700 /tmp/theirs")
    assert (await container.run(CLOSED, user=33)).exit_code == 0
    folder = container.folder
    if killed:
        kill_supervisor()
    await container.close()
    await until(lambda: not folder.exists())


@HAVE_THEM
async def test_root_false_is_a_user_among_others(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image, users=True, root=False), runtime) as container:
        assert (await container.run("id -u; id -un")).stdout == "1000\nsandbox\n"
        assert (await container.run("touch /etc/x")).exit_code != 0
        assert (await container.run("id -u; touch /etc/x && echo may", user="root")).stdout == "0\nmay\n"


async def test_without_a_range_the_fix_is_named(
    image: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_machine_root():
        pytest.skip("root has ids enough")
    monkeypatch.setattr(user_ids, "MAP_HELPERS", ("no-such-program",))
    fix = "has one id" if has_single_id() else "/etc/subuid and /etc/subgid.*newuidmap.*uidmap"
    with pytest.raises(CallerError, match=f"users: .*{fix}"):
        await Container.start(ContainerSpec(image=image, users=True), runtime)


async def test_the_runtime_can_not(image: Path, runtime: Runtime) -> None:
    with pytest.raises(CallerError, match="users"):
        await Container.start(ContainerSpec(image=image, users=True, start="runtime"), runtime)


def test_a_range_is_read_by_name_or_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    monkeypatch.setattr(user_ids.pwd, "getpwuid", lambda uid: type("Entry", (), {"pw_name": "someone"}))
    table = tmp_path / "subuid"
    table.write_text("root:1:2\nsomeone:100000:65536\n# note\nsomeone:nonsense\n4242:300000:10\n")
    assert list(user_ids.subordinate_ids(table)) == [(100000, 65536), (300000, 10)]
    assert list(user_ids.subordinate_ids(tmp_path / "none")) == []
