# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Specifications: a wrong field is refused by name, with the fix, before anything is made."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from nemo_gym.sandbox.providers.base import SandboxHandle, SandboxResources, SandboxSpec

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.sandbox.binds import check_binds
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.provider import SandboxStartError, SingularityProvider
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.kernel import Kernel
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from nemo_gym_prorl.sandbox.supervisor.protocol import Start


pytestmark = pytest.mark.sandbox

as_root = pytest.mark.skipif(not is_machine_root(), reason="of root's sandboxes")
as_user = pytest.mark.skipif(is_machine_root(), reason="of an ordinary user's sandboxes")

WAYS: tuple[Start, ...] = ("direct", "runtime")

NAN, INF, HUGE, HALF = float("nan"), float("inf"), 1 << 70, "half a pair \ud800"


@pytest.fixture(autouse=True)
def nothing_is_begun(state: Path) -> Iterator[None]:
    before = set(state.glob("*/b-*"))
    yield
    assert set(state.glob("*/b-*")) <= before


# Fields of ContainerSpec


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("image", value) for value in ("/a/string", None)),
        *(("env", value) for value in ({"A": 1}, {"A=B": "x"}, {"A": "\0"}, {HALF: "x"}, {"LONG": "x" * 200_000})),
        *(("workdir", value) for value in (5, "relative")),
        *((name, value) for name in ("network", "root", "users") for value in (1, "true")),
        *((name, value) for name in ("memory_mib", "disk_mib", "cpus") for value in ("64", True, -1, None)),
        *(("memory_mib", value) for value in (HUGE, 4 << 30)),
        *((name, value) for name in ("processes", "shared_memory_mib") for value in ("64", 0)),
        *((name, value) for name in ("ttl_s", "start_timeout_s") for value in (NAN, INF, 0)),
        *(("start", value) for value in ("mold", None)),
        *((name, value) for name in ("binds", "capabilities") for value in ("text", [5], [""])),
        ("binds", ["/a\0b:/c"]),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(field: str, value: object) -> None:
    with pytest.raises(CallerError) as caught:
        ContainerSpec(**{"image": Path("/image"), field: value})
    assert caught.value.field is not None
    assert caught.value.field.split(".")[0] == field
    assert len(caught.value.reason) < 1000


@pytest.mark.parametrize(
    ("options", "field", "reason"),
    [
        *(({"exec_timeout_s": value}, "exec_timeout_s", "must be") for value in (0, NAN, "10")),
        *(({"output_limit": value}, "output_limit", "must be") for value in (-1, 0.5)),
        *(({name: value}, name, "must be") for name in ("pull", "root") for value in ("no", None)),
        *(({name: value}, name, "must") for name in ("image", "snapshots") for value in (5, "")),
        ({"memory_mib": "1"}, "memory_mib", "must be a valid integer, not '1'"),
        ({"start": "fast"}, "start", "'auto', 'direct' or 'runtime'"),
        ({"memory_mb": 1}, "memory_mb", r"did you mean memory_mib\?\); there are .*users"),
        ({"exec_timeout": 1}, "exec_timeout", "did you mean exec_timeout_s"),
        ({"xyz": 1}, "xyz", "no such option; there are .*users"),
    ],
    ids=repr,
)
def test_a_wrong_option_of_the_provider_is_refused_when_it_is_read(
    options: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(CallerError, match=reason) as caught:
        SingularityProvider(**options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        *(({"image": value}, "image") for value in (5, "", "/no/such/image", "no-such-image", "library://debian")),
        *(({"ttl_s": value}, "ttl_s") for value in (0, INF, "10")),
        *(({"ready_timeout_s": value}, "ready_timeout_s") for value in (0, NAN, 1e9)),
        *(({"workdir": value}, "workdir") for value in ("x", "/etc/passwd")),
        *(({"env": value}, "env") for value in ({"A": 1}, None)),
        *(({"entrypoint": value}, "entrypoint") for value in ("sleep 1", [], [""], ["/no/such/program"])),
        ({"provider_options": ["root"]}, "provider_options"),
        ({"provider_options": {"memory_mib": "1"}}, "provider_options.memory_mib"),
        ({"provider_options": {"image": "x"}}, "provider_options.image"),
        ({"provider_options": {"snapshot_id": 5}}, "provider_options.snapshot_id"),
        ({"provider_options": {"binnds": [], "proceses": 1}}, "provider_options.binnds"),
        *(({"resources": SandboxResources(cpu=value)}, "resources.cpu") for value in (0, NAN, "2")),
        *(({"resources": SandboxResources(memory_mib=value)}, "resources.memory_mib") for value in (0, 0.5, HUGE)),
        *(({"resources": SandboxResources(disk_gib=value)}, "resources.disk_gib") for value in (0, 0.5, HUGE)),  # type: ignore[arg-type]
        ({"resources": SandboxResources(gpu=1)}, "resources.gpu"),
    ],
    ids=lambda value: repr(value)[:50],
)
async def test_what_gym_asks_for_is_refused_by_gyms_names(
    image: Path, runtime: Runtime, spec: dict[str, Any], field: str
) -> None:
    runtime.activate()
    with pytest.raises(SandboxStartError) as caught:
        await SingularityProvider(image=str(image)).create(SandboxSpec(**spec))
    assert caught.value.field == field
    assert caught.value.reason.startswith(field)
    assert caught.value.kind is FailureKind.BAD_ROW


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def handle(image: Path, runtime: Runtime) -> Any:
    """A live sandbox."""
    runtime.activate()
    provider = SingularityProvider(image=str(image))
    live = await provider.create(SandboxSpec())
    yield live
    await provider.close(live)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("command", value) for value in (5, "a\0b", HALF)),
        *(("cwd", value) for value in (5, "relative")),
        *(("env", value) for value in ({"A": 1}, {"": "x"}, ["A"], {"A": "x" * 200_000})),
        *(("timeout_s", value) for value in (-1, NAN, True)),
        *(("user", value) for value in (True, -1, "", 1 << 32)),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_a_wrong_command_did_not_run(handle: SandboxHandle, field: str, value: Any) -> None:
    done = await SingularityProvider().exec(handle, **{"command": "true", field: value})
    assert (done.return_code, done.error_type) == (125, "sandbox")
    assert (done.stderr or "").startswith(field)


# Images


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path, _sif: None, "prorl setup"),
        (lambda path, _sif: path.mkdir(), "/bin/sh"),
        (lambda path, _sif: path.write_bytes(b"hello"), "neither a root folder nor a SIF"),
        (lambda path, sif: path.symlink_to(sif), "is a SIF: unpack it"),
        pytest.param(lambda path, _sif: path.touch(0), "chmod", marks=as_user),
        pytest.param(lambda path, _sif: path.symlink_to("/"), "belongs to user 0, not to you", marks=as_user),
        (lambda path, _sif: path.symlink_to("/"), "this machine's own files|belongs to user 0"),
        (lambda path, _sif: path.symlink_to("/proc/1/root"), "is not readable|this machine's own files"),
    ],
    ids=["none", "folder", "text", "SIF", "closed", "somebody else's", "the host's root", "by another name"],
)
async def test_what_is_no_image(make: Any, reason: str, runtime: Runtime, tiny_sif: Path, tmp_path: Path) -> None:
    make(tmp_path / "image", tiny_sif)
    with pytest.raises(CallerError, match=reason) as caught:
        await Container.start(ContainerSpec(image=tmp_path / "image"), runtime)
    assert caught.value.field == "image"
    assert str(tmp_path / "image") in caught.value.reason


async def test_an_image_without_the_program_of_a_session(
    runtime: Runtime, tiny_root: Path, container: Container
) -> None:
    async with await Container.start(ContainerSpec(image=tiny_root), runtime) as tiny:
        with pytest.raises(InfrastructureError, match="needs bash in the image"):
            await Shell.start(tiny)
        with pytest.raises(InfrastructureError, match="needs python3 with IPython in the image"):
            await Kernel.start(tiny)
        assert (await tiny.run("echo alive")).stdout == "alive\n"
    with pytest.raises(InfrastructureError, match=r"needs python3 with IPython in the image: .*No module"):
        await Kernel.start(container)


@as_root
async def test_root_starts_an_image_of_somebody_else(runtime: Runtime, tiny_root: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    shutil.copytree(tiny_root, theirs, symlinks=True)
    for path in (theirs, *theirs.rglob("*")):
        os.chown(path, 1001, 1002, follow_symlinks=False)
    async with await Container.start(ContainerSpec(image=theirs), runtime) as container:
        done = await container.run("touch /tmp/x /root/x /usr/bin/x && mkdir /etc/x && echo written")
        assert done.stdout == "written\n", done
    assert not (theirs / "usr/bin/x").exists()


# Binds


@pytest.fixture
def host(open_folder: Path) -> Path:
    """A folder of the host with files, open to every user."""
    (open_folder / "file").write_text("of the host\n")
    (open_folder / "folder").mkdir()
    (open_folder / "folder" / "deep").touch()
    (open_folder / "with,comma").mkdir()
    (open_folder / "dangling").symlink_to("nowhere")
    return open_folder


@pytest.mark.parametrize(
    ("binds", "reason"),
    [
        (["{host}/dangling:/mnt"], "there is no {host}/dangling"),
        (["{host}/file/below:/mnt"], "Not a directory"),
        (["{host}/file:/home"], "/home is a folder in the image.*name /home/file"),
        (["{host}/folder:/etc/os-release"], "/etc/os-release is a file in the image"),
        (["{host}/folder:/etc/mine/../.."], "must not have '..'"),
        (["{host}/folder:/usr/lib/os-release/x"], "/usr/lib/os-release is no folder in the image"),
        (["{host}/file:/etc/passwd"], "/etc/passwd has files that are made"),
        (["{host}/folder://.//"], "would hide the image"),
        (["{host}/folder:/proc/1/root/x"], "/proc is the sandbox's own"),
        (["{host}/file:/dev/null"], "/dev is the sandbox's own"),
        (["{host}/folder:/usr"], "would hide the image's /usr/bin"),
        (["{host}/with,comma:/mnt"], "has a comma"),
        (["{host}/folder:relative"], "is not HOST:INSIDE"),
        (["{host}/folder:/mnt:rx"], "is not HOST:INSIDE"),
        (["{host}/folder:/mnt", "{host}:/mnt/"], "has the same path inside as"),
        (["{host}/folder:/mnt", "{host}/file:/mnt/none"], "there is no /none in .*make it first"),
        (["{host}/folder:/mnt", "{host}/folder:/mnt/deep"], "/mnt/deep is a file in"),
        (["{host}/file:/mnt/deep", "{host}/folder:/mnt"], "would hide .*list that bind after"),
    ],
    ids=repr,
)
async def test_a_bind_that_cannot_be_mounted(
    image: Path, runtime: Runtime, host: Path, binds: list[str], reason: str
) -> None:
    named = [bind.format(host=host) for bind in binds]
    with pytest.raises(CallerError, match=reason.format(host=host)) as caught:
        await Container.start(ContainerSpec(image=image, binds=named), runtime)
    assert caught.value.field == "binds"
    assert named[-1] in caught.value.reason


@as_root
@pytest.mark.parametrize("start", WAYS)
async def test_roots_sandboxes_are_shown_what_is_below_a_closed_folder(
    image: Path, runtime: Runtime, host: Path, start: Start
) -> None:
    host.chmod(stat.S_IRWXU)  # noqa: ASYNC240
    binds = [f"{host}/file:/opt/file:ro", f"{host}/folder:/mnt"]
    async with await Container.start(ContainerSpec(image=image, binds=binds, start=start), runtime) as container:
        assert (await container.run("cat /opt/file; ls /mnt")).stdout == "of the host\ndeep\n"


@pytest.mark.parametrize("start", WAYS)
async def test_what_can_be_bound_is(image: Path, runtime: Runtime, host: Path, start: Start) -> None:
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(str(host / "socket"))
        binds = [
            f"{host}/file:/etc/os-release:ro",
            f"{host}/file:/made/for/it",
            f"{host}/folder:/mnt",
            f"{host}/file:/mnt/deep",
            f"{host}/socket:/opt/socket",
            f"{host}:/var/lock",
            f"{host}/folder:/mnt of/memory",
        ]
        spec = ContainerSpec(image=image, start=start, binds=binds)
        async with await Container.start(spec, runtime) as container:
            look = "cat /etc/os-release /made/for/it /mnt/deep; test -S /opt/socket && ls /var/lock/file"
            assert (await container.run(look)).stdout == "of the host\n" * 3 + "/var/lock/file\n"


def test_links_of_an_image_are_followed_inside_of_it(tmp_path: Path, host: Path) -> None:
    image = tmp_path / "image"
    for folder in ("bin", "etc", "usr"):
        (image / folder).mkdir(parents=True)
    for name, target in {"p": "/proc", "r": "../../..", "l1": "l2", "l2": "l1", "conf": "/etc", "out": "/usr"}.items():
        (image / name).symlink_to(target)
    for bind, reason in {"/p/x": "/proc is", "/r": "hide the image", "/conf": "made for", "/l1": "nowhere"}.items():
        with pytest.raises(CallerError, match=reason):
            check_binds([f"{host}/folder:{bind}"], tmp_path / "state", image)
    for fine in ("/out/x", "/l3", "/usr"):
        assert check_binds([f"{host}/folder:{fine}"], tmp_path / "state", image)


def test_only_contents_of_a_scratch_folder_are_shown_of_the_state(tmp_path: Path, host: Path) -> None:
    state, scratch = host / "state", host / "state" / "scratch" / "s-1" / "one"
    (scratch / "logs").mkdir(parents=True)
    for shown in (scratch.parents[1], scratch.parent):
        with pytest.raises(CallerError, match="sandboxes' own folder"):
            check_binds([f"{shown}:/mnt"], state, tmp_path)
    for shown in (scratch, scratch / "logs"):
        assert check_binds([f"{shown}:/mnt"], state, tmp_path)
