# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Building for real: from templates and folders, SIFs, packages; what is reused, and what a failed build leaves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from nemo_gym.sandbox.providers.base import SandboxSpec

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.images import builder as build_module
from nemo_gym_prorl.sandbox.images.builder import Order, build
from nemo_gym_prorl.sandbox.images.entries import machine, silent
from nemo_gym_prorl.sandbox.images.reference import parse
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.provider import SingularityProvider
from nemo_gym_prorl.sandbox.runtime import debian
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from tests.sandbox.registry import layer, serve
from tests.sandbox.tiny import wait_until_nothing_runs_for


pytestmark = pytest.mark.sandbox

REPOSITORY = Path(__file__).parents[2]

LONG = bool(os.environ.get("PRORL_TEST_LONG"))

TEMPLATE = """\
{{ base }}

{% if locks %}
%files
{% for name, target in locks.items() %}
    locks/{{ name }} {{ target }}
{% endfor %}
{% endif %}

%post
    mkdir -p /made
    echo {{ word }} > /made/word

%environment
    export WORD={{ word }}
"""


@pytest.fixture
def order(tiny_root: Path, tmp_path: Path) -> Order:
    template = tmp_path / "own.def.j2"
    template.write_text(TEMPLATE)
    lock = tmp_path / "uv.lock"
    lock.write_text("locked")
    return Order(str(template), str(tiny_root), "mine", locks=[lock], variables={"word": "hello"})


async def test_a_template_becomes_an_image_that_starts_by_its_name(
    order: Order, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.activate()
    monkeypatch.setenv("PRORL_CACHE", str(tmp_path / "cache"))
    path = build(order, ImageStore(), runtime, silent)
    assert path.is_dir()
    provider = SingularityProvider()
    handle = await provider.create(SandboxSpec(image="mine"))
    try:
        done = await provider.exec(handle, "cat /made/word /opt/prorl/locks/uv.lock; echo; echo $WORD")
        assert done.stdout == "hello\nlocked\nhello\n"
    finally:
        await provider.close(handle)


def test_the_same_recipe_is_built_once_and_a_changed_one_again(
    order: Order, store: ImageStore, runtime: Runtime
) -> None:
    said: list[str] = []
    first = build(order, store, runtime, said.append)
    assert build(order, store, runtime, said.append) == first
    assert said == ["building mine"]
    assert store.all()[0].names == ("mine",)
    order.locks[0].write_text("changed")
    changed = build(order, store, runtime, said.append)
    assert changed != first
    assert store.locate(parse("mine")) == changed
    again = build(replace(order, fresh=True), store, runtime, said.append)
    assert again not in (first, changed)
    assert said.count("building mine") == 3
    removed, _ = store.collect(older_than_s=-10.0)
    assert len(removed) == 3
    with pytest.raises(CallerError, match="no image named 'mine', there are: none"):
        store.locate(parse("mine"))


def test_a_sif_of_a_sif(order: Order, store: ImageStore, tiny_sif: Path, runtime: Runtime) -> None:
    built = build(replace(order, base=str(tiny_sif), format="sif"), store, runtime, silent)
    assert built.name == "image.sif"
    start = store.open(built, runtime)
    assert (start.path / "made" / "word").read_text() == "hello\n"
    start.release()
    built_on_it = build(replace(order, base="mine", name="next", format="folder"), store, runtime, silent)
    assert (built_on_it / "usr/bin/sh").exists()


@pytest.mark.skipif(not is_machine_root(), reason="an ordinary user can't give files away")
def test_a_copy_of_somebody_elses_root_folder(
    order: Order, store: ImageStore, tiny_root: Path, runtime: Runtime, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    shutil.copytree(tiny_root, theirs, symlinks=True)
    for path in (theirs, *theirs.rglob("*")):
        os.lchown(path, 1234, 1234)
    os.mkfifo(theirs / "pipe")
    built = build(replace(order, template="plain", base=str(theirs)), store, runtime, silent)
    store.open(built, runtime).release()
    assert {path.lstat().st_uid for path in built.rglob("*")} == {0}


def test_an_image_on_one_of_a_registry(order: Order, store: ImageStore, tiny_root: Path, runtime: Runtime) -> None:
    with serve() as registry:
        base = registry.add("us/tiny:1", [layer(tiny_root)], machine())
        built = build(replace(order, base=base), store, runtime, silent)
    assert (built / "made" / "word").read_text() == "hello\n"


@pytest.mark.skipif(bool(debian.missing_tools()), reason="needs apt")
@pytest.mark.skipif(is_machine_root() and not LONG, reason="slow; by root in make test-long, and as it is set up")
def test_packages_of_the_machines_distribution_are_a_base(
    order: Order, store: ImageStore, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debian, "PACKAGES", ("base-files", "base-passwd", "dash", "coreutils"))
    said: list[str] = []
    built = build(replace(order, base="apt:", apt=["make"]), store, runtime, said.append)
    assert (built / "usr/bin/make").exists()
    assert (built / "made" / "word").read_text() == "hello\n"
    assert "downloading packages" in said


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"variables": {}}, "template: 'word' is undefined"),
        ({"template": "nosuch"}, "template: there is no 'nosuch'"),
        ({"template": "/no/such.j2"}, "template: /no/such.j2"),
        ({"base": "/no/such"}, "image: there is no /no/such"),
        ({"base": "nosuch"}, "no image named 'nosuch'"),
        ({"base": "library://x/y"}, "base: .*can't be had"),
        ({"name": "a/b"}, "name: "),
        ({"apt": ["a b"]}, "apt: 'a b'"),
        ({"locks": [Path("/no/such/lock")]}, "lock: /no/such/lock"),
    ],
)
def test_wrong_orders_are_refused_before_anything_is_built(
    order: Order, store: ImageStore, runtime: Runtime, change: dict[str, object], reason: str
) -> None:
    with pytest.raises(CallerError, match=reason):
        build(replace(order, **change), store, runtime, silent)  # type: ignore[arg-type]
    assert not store.images.folder.exists()


def test_a_failed_build_says_why_and_leaves_nothing(
    order: Order, store: ImageStore, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InfrastructureError, match=r"apptainer build failed.*|singularity build failed.*"):
        build(replace(order, variables={"word": "x; exit 3"}), store, runtime, silent)
    assert store.all() == []
    monkeypatch.setattr(build_module, "LEAST_FREE", 1 << 60)
    with pytest.raises(InfrastructureError, match=r"MiB are free.*prorl image gc"):
        build(order, store, runtime, silent)
    assert [path.name for path in store.images.folder.iterdir()] == [".locks"]


@pytest.mark.skipif(not is_machine_root(), reason="slow; Apptainer takes its time to end for an ordinary user")
def test_a_killed_build_leaves_no_image_and_the_next_one_makes_it(
    order: Order, store: ImageStore, runtime: Runtime, tmp_path: Path
) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from nemo_gym_prorl.sandbox.images.builder import Order, build\n"
        "from nemo_gym_prorl.sandbox.images.store import ImageStore\n"
        "from nemo_gym_prorl.sandbox.runtime.apptainer import *\n"
        "folder = Path(sys.argv[1]); store = ImageStore(folder / 'images', folder / 'unpacked')\n"
        "order = Order(sys.argv[2], sys.argv[3], 'mine', locks=[Path(sys.argv[4])], variables={'word': sys.argv[5]})\n"
        "build(order, store, require_runtime(), print)"
    )
    slow = order.template, order.base, str(order.locks[0]), "hello; sleep 1000"
    runtime.activate()
    building = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), *slow], cwd=REPOSITORY)
    try:
        for _ in range(600):
            if any(store.images.folder.glob(".mine-*/build-temp-*/rootfs/made")):
                break
            time.sleep(0.1)
        else:
            pytest.fail("it did not get to the template's commands")
    finally:
        building.send_signal(signal.SIGKILL)
        building.wait()
    assert store.all() == []
    assert (build(order, store, runtime, silent) / "made" / "word").read_text() == "hello\n"
    wait_until_nothing_runs_for(tmp_path)
    assert len(store.images.sweep()) == 1


def test_the_command_line_builds_and_shows(order: Order, runtime: Runtime, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from nemo_gym_prorl.cli.app import main; main()",
        "image",
        "build",
        order.template,
    ]
    command += ["--name", "mine", "--base", order.base, "--lock", str(order.locks[0]), "--set", "word=hello"]
    environ = {"PRORL_CACHE": str(tmp_path / "cache"), "PATH": f"{runtime.path.parent}:/usr/bin:/bin", **runtime.env}

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *more], env=environ, cwd=REPOSITORY, capture_output=True, text=True, check=False
        )

    shown = run("--show")
    assert "echo hello > /made/word" in shown.stdout
    assert not (tmp_path / "cache").exists()
    built = run()
    assert built.returncode == 0, built.stderr
    wrong = run("--format", "zip")
    assert (wrong.returncode, wrong.stderr) == (1, "prorl: --format: must be 'folder' or 'sif', not 'zip'\n")


@pytest.mark.parametrize("pip", [True, False], ids=["by pip", "by uv"])
def test_wheels_leave_nothing_but_packages(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip: bool
) -> None:
    """Recipes move what can be seen, and expect no more."""
    monkeypatch.setattr(build_module.importlib.util, "find_spec", lambda _name: pip or None)
    build_module._unpack_wheels(["six>=1.16"], image, tmp_path / "new")
    there = {path.name for path in (tmp_path / "new").iterdir()}
    assert "six.py" in there
    assert not [name for name in there if name.startswith(".")]
