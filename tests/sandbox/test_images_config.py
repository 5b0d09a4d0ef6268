# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sandboxes have the variables, working folder and user that a registry's image was published with, byte for byte."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.images.entries import Format, machine
from nemo_gym_prorl.sandbox.images.oci_config import DEFAULT_PATH
from nemo_gym_prorl.sandbox.images.pull import Puller
from nemo_gym_prorl.sandbox.images.reference import parse_registry
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.provider import SingularityProvider
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from tests.conftest import tiered
from tests.sandbox.registry import Registry, layer, serve
from tests.sandbox.running import created


pytestmark = pytest.mark.sandbox

USUAL = {"PATH": DEFAULT_PATH, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb"}

PASSWD = "root:x:0:0:root:/root:/bin/sh\napp:x:1234:1234::/home/app:/bin/sh\n"

EVERY = {
    "PLAIN": "1",
    "EMPTY": "",
    "EQUALS": "b=c",
    "COMMAND": "$(id -u)",
    "BACKQUOTE": "`id -u",
    "VARIABLE": "$HOME/x",
    "DEFAULT": "${X:-y}",
    "QUOTES": 'it\'s "so"',
    "NEWLINES": "a\nb\n",
    "TAB": "a\tb",
    "BACKSLASHES": "\\n\\\\x\\",
    "UNICODE": "Grüße ☃",
    "SPECIAL": "a!b;c&d|e<f>*?[~]#",
    "A": "  a  b  ",
    "a.b": "1",
    "a-b": "1",
    "1a": "1",
    "_JAVA_OPTIONS": "-Xmx1g",
    "PS1_STYLE": "x",
    "UID": "5",
    "PATH": "/opt/x/bin:/usr/bin:/bin",
    "LD_LIBRARY_PATH": "/opt/lib",
    "LANG": "de_DE.UTF-8",
    "TERM": "xterm-256color",
    "HOME": "/srv",
}
"""Values that shells change, and names that shells or the runtime treat specially."""


@pytest.fixture
def served() -> Iterator[Registry]:
    with serve() as live:
        yield live


@pytest.fixture(scope="module")
def published(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    root = tmp_path_factory.mktemp("published") / "root"
    shutil.copytree(tiny_root, root, symlinks=True)
    (root / "etc/passwd").write_text(PASSWD)
    return layer(root)


async def _variables(container: Container) -> dict[str, str]:
    done = await container.execute(["/usr/bin/env", "-0"], output_limit=1 << 20)
    assert done.exit_code == 0, done.stderr
    return dict(line.split("=", 1) for line in done.stdout.split("\0") if line)


@pytest.mark.parametrize("way", ["direct", "runtime"])
@pytest.mark.parametrize("kept", ["folder", "sif"])
async def test_all_variables_arrive_from_every_kind_of_image(
    kept: Format,
    way: str,
    served: Registry,
    published: bytes,
    store: ImageStore,
    runtime: Runtime,
) -> None:
    env = [f"{name}={value}" for name, value in EVERY.items()] + ["=x", "A_NAME_ALONE"]
    wanted = parse_registry(served.add("us/tiny", [published], machine(), Env=env, WorkingDir="/srv/app", User="1234"))
    path = Puller(store, runtime, format=kept).pull(wanted)
    start = store.open(path, runtime)
    try:
        spec = ContainerSpec(image=start.path, start="direct" if way == "direct" else "runtime")
        async with await Container.start(spec, runtime) as container:
            assert await _variables(container) == EVERY
            assert (await container.run("/bin/ls -d /srv/app; echo $PWD")).stdout == "/srv/app\n/srv/app\n"
    finally:
        start.release()


USERS = {
    # Published user; then id, home folder and working folder with root: true and with root: false.
    "none": ("", "0 /root /root", "1000 /tmp /tmp"),
    "a name": ("app", "0 /home/app /root", "1234 /home/app /tmp"),
    "a number": ("1234", "0 /home/app /root", "1234 /home/app /tmp"),
    "a number without an account": ("4321:1", "0 / /root", "4321 / /tmp"),
    "a name without an account": ("nobody-here", "0 /root /root", "1000 /tmp /tmp"),
}


@pytest.mark.parametrize("user", tiered(USERS, ["a name", "a number without an account"]))
async def test_the_published_user(
    user: str, served: Registry, published: bytes, store: ImageStore, runtime: Runtime
) -> None:
    written, *expected = USERS[user]
    path = Puller(store, runtime).pull(parse_registry(served.add("us/tiny", [published], machine(), User=written)))
    for root, line in zip((True, False), expected, strict=True):
        async with await Container.start(ContainerSpec(image=path, root=root), runtime) as container:
            assert (await container.run('echo "$(id -u) $HOME $PWD"')).stdout == f"{line}\n"


async def test_what_a_caller_asks_for_goes_before_what_was_published(
    served: Registry, published: bytes, store: ImageStore, runtime: Runtime, tmp_path: Path, monkeypatch: Any
) -> None:
    runtime.activate()
    monkeypatch.setenv("PRORL_CACHE", str(tmp_path / "cache"))
    address = served.add(
        "us/tiny", [published], machine(), Env=["A=1", "B=2"], WorkingDir="/srv", Entrypoint=["/bin/touch", "/never"]
    )
    provider = SingularityProvider()
    async with created(provider, image=address, env={"B": "own", "TERM": "vt100"}, workdir="/own") as handle:
        said = await provider.exec(handle, "echo $A $B $TERM $PWD; ls /never")
        assert said.stdout == "1 own vt100 /own\n"
        assert (await provider.exec(handle, "echo $PWD $A", cwd="/tmp", env={"A": "now"})).stdout == "/tmp now\n"
