# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What people do on a plain machine, done in a sandbox: packages, accounts, services, by root and by other users.

Everything here runs in the default image, or in one that has a service of the distribution's beside.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.container import Completed, Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation import user_ids
from nemo_gym_prorl.sandbox.runtime import debian
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from tests.sandbox.database import ensure_database_image


pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(300)]

WHY_NOT = user_ids.no_several_users()
SEVERAL_USERS = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
DEBIAN = pytest.mark.skipif(bool(debian.missing_tools()), reason="needs apt and dpkg")


async def done(container: Container, script: str, timeout_s: float = 60.0) -> str:
    """What a script of which each command must succeed has to say."""
    completed: Completed = await container.run(f"set -e\n{script}", timeout_s=timeout_s)
    assert completed.exit_code == 0, (script, completed.stdout[-2000:], completed.stderr[-2000:])
    return completed.stdout


@pytest_asyncio.fixture
async def machine(image: Path, runtime: Runtime) -> AsyncIterator[Container]:
    """A sandbox of the default image with several users."""
    async with await Container.start(ContainerSpec(image=image, users=True), runtime) as container:
        yield container


PACKAGE = r"""
mkdir -p /tmp/p/DEBIAN /tmp/p/srv
cat >/tmp/p/DEBIAN/control <<X
Package: thing
Version: 1
Architecture: all
Depends: adduser, python3
Maintainer: n <n@example.org>
Description: x
X
cat >/tmp/p/DEBIAN/postinst <<X
#!/bin/sh -e
useradd --system --user-group thing
chown thing:thing /srv/thing
X
cat >/tmp/p/DEBIAN/postrm <<'X'
#!/bin/sh -e
[ "$1" != purge ] || userdel thing
X
chmod 755 /tmp/p/DEBIAN /tmp/p/DEBIAN/post*
echo data > /tmp/p/srv/thing
dpkg-deb --root-owner-group -b /tmp/p /tmp/thing.deb >/dev/null
"""


@SEVERAL_USERS
async def test_a_package_that_adds_a_user_comes_and_goes(machine: Container) -> None:
    assert await done(machine, "dpkg --audit") == "", "nothing of the image is half installed"
    await done(machine, PACKAGE + "dpkg -i /tmp/thing.deb")
    assert await done(machine, "stat -c '%U %G' /srv/thing; dpkg -S /srv/thing; dpkg -V thing") == (
        "thing thing\nthing: /srv/thing\n"
    )
    await done(machine, "dpkg --purge thing")
    assert await done(machine, "getent passwd thing || echo gone; test -e /srv/thing || echo gone") == "gone\ngone\n"


@SEVERAL_USERS
async def test_accounts(machine: Container) -> None:
    await done(
        machine, "useradd -m alice; groupadd crew; useradd -m -G crew -s /bin/bash bob; echo bob:word | chpasswd"
    )
    await done(machine, "su - alice -c 'umask 077; echo secret > ~/file'")
    assert (await machine.run("cat /home/alice/file", user="bob")).exit_code == 1
    assert (await machine.run("cat file", cwd="/home/alice", user="alice")).stdout == "secret\n"
    assert (
        await done(machine, "su bob -c 'id -nG; cat /etc/shadow || echo closed' 2>/dev/null") == "bob crew\nclosed\n"
    )
    await done(
        machine, "chown alice:crew /home/alice /home/alice/file; chmod 750 /home/alice; chmod 640 /home/alice/file"
    )
    assert (await machine.run("cat /home/alice/file", user="bob")).stdout == "secret\n"
    await done(machine, "usermod -l carol alice; passwd -l bob; userdel -r bob 2>/dev/null; test ! -e /home/bob")
    assert await done(machine, "stat -c %U /home/alice/file; getent shadow carol | cut -d: -f1") == "carol\ncarol\n"


@SEVERAL_USERS
async def test_a_shell_changes_its_user_and_comes_back(machine: Container) -> None:
    await done(machine, "useradd -m -s /bin/bash alice")
    async with await Shell.start(machine) as shell:
        assert (await shell.run("su - alice", silence_s=0.5)).waiting
        await shell.send("whoami; touch own; exit 3\n")
        back = await shell.wait()
        assert (back.exit_code, "alice" in back.output) == (3, True), back
        assert (await shell.run("whoami; stat -c %U ~alice/own")).output == "root\nalice\n"


@pytest.fixture(scope="session")
def mirror() -> Iterator[Path]:
    """An archive as apt has it, with one package that needs others which the default image has."""
    # Not in pytest's own folder, which is closed: for root, it is somebody else who reads it in the sandbox.
    folder = Path(tempfile.mkdtemp(prefix="prorl-mirror-"))
    folder.chmod(0o755)
    tree = folder / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "usr/bin").mkdir(parents=True)
    (tree / "usr/bin/hello-there").write_text("#!/bin/sh\necho hello there\n")
    (tree / "usr/bin/hello-there").chmod(0o755)
    control = (
        "Package: hello-there\nVersion: 1.0\nArchitecture: all\nMaintainer: n <n@example.org>\n"
        "Depends: python3, git, passwd (>= 1:4)\nDescription: says hello\n"
    )
    (tree / "DEBIAN/control").write_text(control)
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-b", tree, folder / "hello.deb"], check=True, capture_output=True
    )
    shutil.rmtree(tree)
    data = (folder / "hello.deb").read_bytes()
    about = f"Filename: ./hello.deb\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"
    (folder / "Packages").write_text(control + about)
    yield folder
    shutil.rmtree(folder)


INSTALL = """
echo 'deb [trusted=yes] {mirror} ./' > /etc/apt/sources.list
apt-get -qq update
apt-get -qq install -y hello-there >/dev/null
hello-there
dpkg -s hello-there | grep Status
apt-get -qq purge -y hello-there >/dev/null
test ! -e /usr/bin/hello-there
"""
INSTALLED = "hello there\nStatus: install ok installed\n"


@DEBIAN
@pytest.mark.parametrize("way", ["users", "direct", "runtime"])
async def test_apt_installs_from_a_mirror_that_is_bound_in(
    image: Path, runtime: Runtime, mirror: Path, way: str
) -> None:
    """With one user as well, as long as no package wants another."""
    if way == "users" and WHY_NOT:
        pytest.skip(WHY_NOT)
    spec = ContainerSpec(image=image, binds=[f"{mirror}:/mirror:ro"])
    spec = replace(spec, users=True) if way == "users" else replace(spec, start=way)
    async with await Container.start(spec, runtime) as container:
        assert await done(container, INSTALL.format(mirror="file:/mirror")) == INSTALLED


@DEBIAN
@SEVERAL_USERS
@pytest.mark.long("downloads from the distribution's archive")
@pytest.mark.timeout(600)
async def test_apt_installs_a_service_from_the_distributions_archive(image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=image, users=True, network=True), runtime) as container:
        await done(container, "apt-get -qq update; apt-get -qq install -y --no-install-recommends redis-server", 500)
        script = "service redis-server start >/dev/null 2>&1; redis-cli set a 42 >/dev/null; redis-cli get a"
        assert await done(container, script) == "42\n"
        assert "redis" in await done(container, "ps -o user= -C redis-server")


@pytest.fixture(scope="module")
def database_image(runtime: Runtime) -> Path:
    try:
        return ensure_database_image(runtime)
    except InfrastructureError as error:
        pytest.skip(f"the packages can't be had: {error.reason}")


SERVER = """
export DEBIAN_FRONTEND=noninteractive
dpkg --configure -a >/tmp/configure.log 2>&1
dpkg --audit
config=$(echo /etc/postgresql/*/main)
echo "listen_addresses = '*'" >> $config/postgresql.conf
echo 'host all app 10.0.0.0/8 scram-sha-256' >> $config/pg_hba.conf
service postgresql start >/dev/null
su postgres -c 'psql -qtA' <<X
create role app login password 'word';
create database app owner app;
select 41 + 1;
X
stat -c %U $config/pg_hba.conf /var/lib/postgresql/*/main
"""


@DEBIAN
@SEVERAL_USERS
@pytest.mark.long("needs an image of its own; packages, accounts and servers of others are each tried above")
async def test_a_database_serves_its_own_sandbox(database_image: Path, runtime: Runtime) -> None:
    async with await Container.start(ContainerSpec(image=database_image, users=True), runtime) as server:
        assert (await done(server, SERVER, 120)).split() == ["42", "postgres", "postgres"]
        ask = "PGPASSWORD={word} $(echo /usr/lib/postgresql/*/bin)/psql -h localhost -U app -qtAc '{what}'"
        await done(server, ask.format(word="word", what="create table t (n int); insert into t values (40), (2)"))
        assert await done(server, ask.format(word="word", what="select sum(n) from t")) == "42\n"
        wrong = await server.run(ask.format(word="guess", what="select 1"))
        assert "authentication failed" in wrong.stderr
        # It runs on after the command that started it, and ends with its sandbox.
        assert "postgres" in await done(server, "ps -o user= -C postgres")
        await done(server, "service postgresql stop >/dev/null; ! ps -C postgres >/dev/null")
