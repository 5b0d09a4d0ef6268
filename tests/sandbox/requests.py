# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Requests to start a sandbox, for tests of what the supervisor makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_gym_prorl.sandbox.container import ContainerSpec
from nemo_gym_prorl.sandbox.isolation.user_ids import draw_host_id
from nemo_gym_prorl.sandbox.supervisor.protocol import CreateRequest


def request_for(image: Path = Path("/image"), **changes: Any) -> CreateRequest:
    """A request for a sandbox as a default specification asks for it, with other values of some fields."""
    spec = ContainerSpec(image=image)
    same = (
        "users",
        "network",
        "memory_mib",
        "cpus",
        "processes",
        "disk_mib",
        "shared_memory_mib",
        "ttl_s",
        "start_timeout_s",
    )
    host_id = draw_host_id(several=False)
    request = CreateRequest(
        sandbox="b-000000000001",
        runtime="/usr/bin/apptainer",
        start="auto",
        image=str(image),
        image_identity=str(image),
        scripted=False,
        uid=0,
        host_uid=host_id,
        host_gid=host_id,
        binds=[],
        capabilities=[],
        snapshot_paths=[],
        snapshot="",
        **{name: getattr(spec, name) for name in same},
    )
    return replace(request, **changes)
