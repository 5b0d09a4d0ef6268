# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Pulls from a registry on loopback that speaks the real protocol: anonymous, retried, and in bulk."""

from __future__ import annotations

import base64
import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from nemo_gym.sandbox.providers.base import SandboxCreateError, SandboxSpec

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.images.entries import machine
from nemo_gym_prorl.sandbox.images.pull import Puller
from nemo_gym_prorl.sandbox.images.reference import parse_registry
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.provider import SingularityProvider
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from tests.sandbox.registry import Registry, layer, serve
from tests.sandbox.running import running_with, until


pytestmark = pytest.mark.sandbox

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def served() -> Iterator[Registry]:
    with serve() as live:
        yield live


@pytest.fixture(scope="module")
def tiny_layer(tiny_root: Path) -> bytes:
    """The tiny root as a layer with another owner and a setuid program."""

    def change(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        if entry.name == "./etc/group":
            entry.uid = entry.gid = 33
        if entry.name == "./usr/bin/id":
            entry.mode = 0o4755
        return entry

    return layer(tiny_root, change)


@pytest.fixture
def puller(store: ImageStore, runtime: Runtime) -> Puller:
    return Puller(store, runtime, tries=2)


@pytest.fixture
def logins(served: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user with a stored login for the registry in every place that runtimes read."""
    stored = json.dumps({"auths": {served.host: {"auth": base64.b64encode(b"me:secret").decode()}}})
    for name in (".docker/config.json", ".apptainer/docker-config.json", "containers/auth.json"):
        (tmp_path / "home" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "home" / name).write_text(stored)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("APPTAINER_DOCKER_USERNAME", "me")
    monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", "secret")


def test_an_image_is_pulled_once_and_no_login_is_sent(
    served: Registry, tiny_layer: bytes, puller: Puller, logins: None
) -> None:
    wanted = parse_registry(served.add("us/tiny:1", [tiny_layer], machine(), Env=["A=from the image"]))
    path = puller.pull(wanted)
    assert served.credentials == []
    assert stat.S_IMODE((path / "usr/bin/id").stat().st_mode) == 0o755
    assert (path / "etc/group").stat().st_uid == os.geteuid()
    asked = len(served.requests)
    assert puller.pull(wanted) == path
    assert len(served.requests) == asked
    (image,) = puller.store.all()
    assert (image.info.kind, image.info.source, image.unpacked) == ("pulled", wanted.uri, True)


def test_logins_are_sent_when_they_are_wanted(
    served: Registry, tiny_layer: bytes, store: ImageStore, runtime: Runtime, logins: None
) -> None:
    wanted = parse_registry(served.add("us/tiny", [tiny_layer], machine()))
    Puller(store, runtime, credentials=True, format="sif").pull(wanted)
    assert set(served.credentials) == {"Basic " + base64.b64encode(b"me:secret").decode()}
    (image,) = store.all()
    assert (image.info.format, image.unpacked) == ("sif", False)


def test_trouble_is_tried_again_and_what_can_not_be_is_not(
    served: Registry, tiny_layer: bytes, puller: Puller
) -> None:
    wanted = parse_registry(served.add("us/tiny", [tiny_layer], machine()))
    said: list[str] = []
    # The runtime itself tries a few times.
    served.failures = 4
    puller.pull(wanted, said.append)
    assert [line.split()[0] for line in said] == ["pulling", "pulling"]
    assert "again" in said[1]
    served.requests.clear()
    with pytest.raises(CallerError, match=r"image: the registry has no docker://127.*/us/none:latest"):
        puller.pull(parse_registry(f"{served.host}/us/none"), said.append)
    assert len(said) == 3, "it was asked for once"
    with pytest.raises(InfrastructureError, match=r"127.0.0.1:9/a/b:latest could not be pulled: .*refused"):
        puller.pull(parse_registry("127.0.0.1:9/a/b"))
    assert len(puller.store.all()) == 1
    assert puller.store.images.sweep() == []


def test_an_image_for_another_processor_is_refused(served: Registry, tmp_path: Path, puller: Puller) -> None:
    (tmp_path / "root" / "bin").mkdir(parents=True)
    (tmp_path / "root" / "bin" / "sh").write_bytes(b"\x7fELF\x02\x01" + bytes(12) + (183).to_bytes(2, "little"))
    with pytest.raises(CallerError, match="for aarch64, but this machine is"):
        puller.pull(parse_registry(served.add("us/foreign", [layer(tmp_path / "root")], machine())))
    assert puller.store.all() == []


async def test_a_sandbox_of_an_address(
    served: Registry, tiny_layer: bytes, runtime: Runtime, tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.activate()
    monkeypatch.setenv("PRORL_CACHE", str(tmp_path / "cache"))
    address = served.add("us/tiny:1", [tiny_layer], machine(), Env=["A=from the image"])
    with pytest.raises(SandboxCreateError, match=f"image: {address} is not pulled yet: run 'prorl image pull"):
        await SingularityProvider(pull=False).create(SandboxSpec(image=address))
    assert served.requests == []
    provider = SingularityProvider()
    handle = await provider.create(SandboxSpec(image=address))
    assert (await provider.exec(handle, "echo $A; echo x >> /etc/group; id -u")).stdout == "from the image\n0\n"
    await provider.close(handle)
    served.manifests.clear()
    await provider.close(await provider.create(SandboxSpec(image=address)))
    with pytest.raises(SandboxCreateError, match=r"image: the registry has no .*/us/none:1"):
        await provider.create(SandboxSpec(image=f"docker://{served.host}/us/none:1"))
    assert not any(state.glob("*/b-*"))  # noqa: ASYNC240


def prorl(tmp_path: Path, runtime: Runtime, *arguments: str) -> subprocess.Popen[str]:
    environ = {
        **os.environ,
        "PRORL_CACHE": str(tmp_path / "cache"),
        "PATH": os.pathsep.join([str(runtime.path.parent), os.environ["PATH"]]),
    }
    program = "from nemo_gym_prorl.cli.app import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program, "image", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        cwd=REPOSITORY,
    )


def test_the_command_line_pulls_lists_and_removes(
    served: Registry, tiny_layer: bytes, runtime: Runtime, tmp_path: Path
) -> None:
    names = [served.add(f"us/tiny:{number}", [tiny_layer], machine()) for number in range(2)]
    missing = f"docker://{served.host}/us/none:1"
    pulling = prorl(tmp_path, runtime, "pull", *names, missing, names[0], "--jobs", "2")
    output = pulling.communicate(timeout=60)[0]
    assert pulling.returncode == 1
    assert "2 made (8 MiB, " in output
    assert "0 already present, 1 failed" in output
    assert missing in output
    again = prorl(tmp_path, runtime, "pull", *names)
    assert "2 already present, 0 failed" in again.communicate(timeout=60)[0]
    assert again.returncode == 0
    listing = prorl(tmp_path, runtime, "list").communicate(timeout=60)[0]
    assert listing.count("pulled") == 2
    shown = prorl(tmp_path, runtime, "gc", "--max-gb", "0", "--dry-run").communicate(timeout=60)[0]
    assert shown.count("pulled") == 2
    prorl(tmp_path, runtime, "gc", "--max-gb", "0").communicate(timeout=60)
    assert [path.name for path in (tmp_path / "cache" / "images").iterdir()] == [".locks"]


async def test_a_killed_pull_leaves_no_image_no_process_and_is_collected(
    served: Registry, tiny_layer: bytes, runtime: Runtime, tmp_path: Path
) -> None:
    address = served.add("us/tiny", [tiny_layer], machine())
    served.hold.clear()
    pulling = prorl(tmp_path, runtime, "pull", address)
    try:
        assert served.reached.wait(60)
    finally:
        pulling.send_signal(signal.SIGKILL)
        pulling.communicate()
    store = ImageStore(tmp_path / "cache" / "images", tmp_path / "cache" / "unpacked")
    assert store.all() == []
    await until(lambda: not running_with(str(tmp_path)))
    served.hold.set()
    assert "left by a killed process" in prorl(tmp_path, runtime, "gc").communicate(timeout=60)[0]
    assert [path.name for path in store.images.folder.iterdir()] == [".locks"]
    assert Puller(store, runtime).pull(parse_registry(address)).is_dir()
