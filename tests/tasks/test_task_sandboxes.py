# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Sandbox requirements of rows: applied, or refused by the row's field."""

from typing import Any

import pytest

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.servers.task_sandboxes import TaskSandboxes
from nemo_gym_prorl.tasks.task import SandboxNeeds
from tests.tasks import containers


pytestmark = pytest.mark.sandbox


def ours(image: str | None = None, **options: Any) -> TaskSandboxes:
    return TaskSandboxes({"singularity": options}, image or containers.image(), rows_name_images=False)


async def test_unset_requirements_use_the_configuration() -> None:
    sandboxes = ours(processes=99, memory_mib=512)
    needs = [SandboxNeeds(), SandboxNeeds(image="default", cpu=2, memory_mib=256, disk_gib=1, processes=40)]
    started = [await sandboxes.start(need) for need in needs]
    plain, special = (sandbox._handle.raw.spec for sandbox in started)
    for sandbox in started:
        await sandbox.stop()
    await sandboxes.aclose()
    assert str(plain.image) == containers.image()
    assert (plain.processes, plain.memory_mib, plain.network) == (99, 512, "none")
    assert str(special.image) != containers.image()
    assert (special.processes, special.memory_mib, special.cpus, special.disk_mib) == (40, 256, 2, 1024)


@pytest.mark.parametrize(
    ("need", "value"),
    [
        ("image", "no-such-image"),
        ("network", "yes"),
        ("network", ["http://example.com"]),
        ("disk_gib", 0.5),
        ("processes", 0),
    ],
)
async def test_invalid_requirement_is_refused_by_field(need: str, value: Any) -> None:
    sandboxes = ours()
    for ask in (sandboxes.fetch_image, sandboxes.start):
        with pytest.raises(CallerError) as caught:
            await ask(SandboxNeeds(**{need: value}))
        assert caught.value.field == need


async def test_configuration_error_is_not_the_rows_fault() -> None:
    with pytest.raises(InfrastructureError, match=r"/nowhere/no\.sif"):
        await ours("/nowhere/no.sif").start(SandboxNeeds(memory_mib=256))
    nameless = TaskSandboxes({"singularity": {}}, None, rows_name_images=True)
    with pytest.raises(InfrastructureError, match="neither the row nor"):
        await nameless.start(SandboxNeeds())


def test_another_provider_is_refused() -> None:
    with pytest.raises(CallerError, match="must be singularity, not apptainer") as caught:
        TaskSandboxes({"apptainer": {}}, None, rows_name_images=True)
    assert caught.value.field == "sandbox_provider"
