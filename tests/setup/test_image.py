# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The default image: complete, usable with NeMo Gym's own provider, and rebuilt when its recipe changes."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest
from nemo_gym.sandbox import AsyncSandbox
from nemo_gym.sandbox.providers.base import SandboxSpec

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.images.builder import DEFAULT, KERNEL, ensure_image, run_self_test
from nemo_gym_prorl.sandbox.images.entries import ignore_progress
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime


pytestmark = pytest.mark.sandbox


def test_it_has_the_tools_that_agents_use(image: Path, runtime: Runtime) -> None:
    script = r"""
        set -e
        cd "$(mktemp -d)"
        git init -q . && git config user.email a@example.com && git config user.name a
        printf 'one\ntwo\n' > file && git add file && git commit -qm first
        sed -i s/two/three/ file && git diff | tee change.patch | awk '/^[+]t/ { print }'
        git checkout -q file && patch -p1 < change.patch > /dev/null && grep -c three file
        ps -e -o comm= | grep -c bash; whoami; locale 2>/dev/null | head -1
        python -c 'import ssl; print(len(ssl.create_default_context().get_ca_certs()) > 50)'
    """
    command = [str(runtime.path), "exec", "--containall", str(image), "bash", "-c", script]
    said = subprocess.check_output(command, env=runtime.environ(), text=True).split()
    assert said[:2] == ["+three", "1"]
    assert said[-1] == "True", "the certificate bundle is there"


def test_nothing_in_it_is_privileged_or_unreadable(image: Path) -> None:
    for path in image.rglob("*"):
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode):
            assert not mode & (stat.S_ISUID | stat.S_ISGID), path
            assert mode & stat.S_IROTH, path


def test_a_broken_image_fails_its_trial(runtime: Runtime, tmp_path: Path) -> None:
    (tmp_path / "root" / "bin").mkdir(parents=True)
    with pytest.raises(InfrastructureError, match="apptainer test failed"):
        run_self_test(tmp_path / "root", runtime)


def test_set_up_gives_the_names_back_to_its_own_images(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = ensure_image(KERNEL, ignore_progress)
    # A separate cache, since other tests use these names concurrently.
    folder = tmp_path / "images"
    folder.mkdir()
    for path in (image, kernel):
        (folder / path.parent.name).symlink_to(path.parent)
    image, kernel = (folder / path.parent.name / path.name for path in (image, kernel))
    monkeypatch.setenv("PRORL_CACHE", str(tmp_path))
    store = ImageStore()
    # A package version with other recipes leaves the names so.
    store.name("default", kernel.parent.name)
    store.name("kernel", image.parent.name)
    assert (store.find("default"), store.find("kernel")) == (kernel, image)
    ensure_image(KERNEL, ignore_progress)
    ensure_image(DEFAULT, ignore_progress)
    assert (store.find("default"), store.find("kernel")) == (image, kernel)


async def test_gyms_own_provider_starts_it(image: Path, runtime: Runtime) -> None:
    runtime.activate()
    spec = SandboxSpec(image=str(image), ready_timeout_s=60)
    sandbox = AsyncSandbox({"apptainer": {}})
    await sandbox.start(spec)
    try:
        result = await sandbox.exec("echo from-inside; python3 -c 'print(6 * 7)'", timeout_s=60)
    finally:
        await sandbox.stop()
    assert result.return_code == 0
    assert (result.stdout or "").split() == ["from-inside", "42"]
