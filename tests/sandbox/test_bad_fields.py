# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Whatever stands in a field that it can't be: a ``CallerError`` that names the field, and nothing was begun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from nemo_gym.sandbox.providers.base import SandboxHandle, SandboxResources, SandboxSpec

from nemo_gym_prorl.failures import CallerError, FailureKind
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.provider import SandboxStartError, SingularityProvider
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime


pytestmark = pytest.mark.sandbox

NAN, INF, HUGE, HALF = float("nan"), float("inf"), 1 << 70, "half a pair \ud800"

NUMBERS: list[object] = ["64", True, NAN, INF, HUGE, -1, None]
TEXTS: list[object] = [5, b"bytes", ["list"], "", "with\0nul", HALF]

WRONG = [
    *(("image", value) for value in ("/a/string", 5, None)),
    *(("env", value) for value in ({"A": 1}, {1: "a"}, ["A"], {"A=B": "x"}, {"A": "\0"}, {HALF: "x"})),
    ("env", {"LONG": "x" * 200_000}),
    *(("workdir", value) for value in (5, "", "relative", "/\0", "/" + "x" * 5000, f"/{HALF}")),
    *((name, value) for name in ("network", "root", "users") for value in (1, "true", None)),
    *((name, value) for name in ("memory_mib", "disk_mib", "cpus") for value in NUMBERS),
    *((name, value) for name in ("processes", "shared_memory_mib") for value in (*NUMBERS, 0)),
    *(("ttl_s", value) for value in NUMBERS if value is not None),
    *(("start_timeout_s", value) for value in (*NUMBERS, 0)),
    *(("start", value) for value in ("", "mold", 1, None)),
    *((name, value) for name in ("binds", "capabilities") for value in ("text", 5, None, [5], [""])),
    ("binds", ["/a\0b:/c"]),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda value: repr(value)[:30])
async def test_a_wrong_value_is_refused_by_the_name_of_its_field(
    image: Path, runtime: Runtime, state: Path, field: str, value: object
) -> None:
    with pytest.raises(CallerError) as caught:
        await Container.start(ContainerSpec(**{"image": image, field: value}), runtime)
    assert caught.value.field is not None
    assert caught.value.field.split(".")[0] == field
    assert len(caught.value.reason) < 1000
    assert not any(state.glob("*/b-*"))  # noqa: ASYNC240


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("exec_timeout_s", value) for value in (0, -1, NAN, INF, "10")),
        *(("output_limit", value) for value in (-1, 0.5, HUGE, "10")),
        *((name, value) for name in ("pull", "unpack", "root") for value in ("no", 0, None)),
        *((name, value) for name in ("image", "snapshots") for value in (5, "", "\0")),
        *(("memory_mib", value) for value in NUMBERS),
        ("start", "fast"),
        ("binds", "/a:/b"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_wrong_option_of_the_provider_is_refused_when_it_is_read(name: str, value: object) -> None:
    with pytest.raises(CallerError) as caught:
        SingularityProvider(**{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        *(({"image": value}, "image") for value in (5, "", "\0")),
        *(({"ttl_s": value}, "ttl_s") for value in (0, -1, NAN, INF, "10")),
        *(({"ready_timeout_s": value}, "ready_timeout_s") for value in (0, -1, NAN, INF, 1e9)),
        *(({"workdir": value}, "workdir") for value in (5, "", "x")),
        *(({"env": value}, "env") for value in ({"A": 1}, {"": "x"}, None)),
        *(({"entrypoint": value}, "entrypoint") for value in ("sleep 1", [], [""], [5], ["a\0"])),
        *(({"provider_options": value}, "provider_options") for value in (["root"], None)),
        ({"provider_options": {"memory_mib": "1"}}, "provider_options.memory_mib"),
        ({"provider_options": {"binds": "/a:/b"}}, "provider_options.binds"),
        ({"provider_options": {"snapshot_id": 5}}, "provider_options.snapshot_id"),
        *(({"resources": SandboxResources(cpu=value)}, "resources.cpu") for value in (0, -1, NAN, INF, "2")),
        *(({"resources": SandboxResources(memory_mib=value)}, "resources.memory_mib") for value in (0, -1, 0.5, HUGE)),
        *(({"resources": SandboxResources(disk_gib=value)}, "resources.disk_gib") for value in (0, -1, 0.5, HUGE)),  # type: ignore[arg-type]
        ({"resources": SandboxResources(gpu=1)}, "resources.gpu"),
    ],
    ids=lambda value: repr(value)[:50],
)
async def test_what_gym_asks_for_is_refused_by_gyms_names(
    image: Path, state: Path, spec: dict[str, Any], field: str
) -> None:
    provider = SingularityProvider(image=str(image))
    with pytest.raises(SandboxStartError) as caught:
        await provider.create(SandboxSpec(**spec))
    assert caught.value.reason.startswith(field)
    assert caught.value.kind is FailureKind.BAD_ROW
    assert not any(state.glob("*/b-*"))  # noqa: ASYNC240


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def handle(image: Path, runtime: Runtime) -> Any:
    """A sandbox for what is asked of a live one."""
    provider = SingularityProvider(image=str(image))
    live = await provider.create(SandboxSpec())
    yield live
    await provider.close(live)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("asked", "field"),
    [
        *(({"command": value}, "command") for value in (5, None, "a\0b", HALF)),
        *(({"cwd": value}, "cwd") for value in (5, "relative", "/\0")),
        *(({"env": value}, "env") for value in ({"A": 1}, {"": "x"}, ["A"], {"A": "x" * 200_000})),
        *(({"timeout_s": value}, "timeout_s") for value in (-1, NAN, INF, "10", True)),
        *(({"user": value}, "user") for value in (True, -1, 1.5, "", "a\0", 1 << 32)),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_a_wrong_command_did_not_run(handle: SandboxHandle, asked: dict[str, Any], field: str) -> None:
    done = await SingularityProvider().exec(handle, **{"command": "true", **asked})
    assert (done.return_code, done.error_type) == (125, "sandbox")
    assert (done.stderr or "").startswith(field)
