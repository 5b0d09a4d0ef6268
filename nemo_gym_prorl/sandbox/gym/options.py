# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a configuration and NeMo Gym's ``SandboxSpec`` ask for, as the provider's settings and a ``ContainerSpec``.

Gym's classes, its handles among them, hold whatever they were made with. So here is the border: from here on every
value has its type and can be had, and a wrong one is refused by the name under which its author knows it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from nemo_gym.sandbox.providers.base import SandboxHandle, SandboxSpec
from pydantic import TypeAdapter

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox import fields
from nemo_gym_prorl.sandbox.arguments import MOST_OUTPUT, Argv
from nemo_gym_prorl.sandbox.container import OUTPUT_LIMIT, Container, ContainerSpec
from nemo_gym_prorl.sandbox.spec import MOST_CPUS, MOST_START_TIMEOUT_S, check_fields


SPEC_OPTIONS = (
    *("network", "root", "users", "start", "binds", "capabilities"),
    *("memory_mib", "cpus", "processes", "disk_mib", "shared_memory_mib"),
)
"""Options of :class:`.container.ContainerSpec` that can be set for the provider, and per sandbox in
``provider_options``."""

SNAPSHOT = "snapshot_id"
"""The option of a specification that names a snapshot, as Gym's checkpoints give it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The provider's own options.

    Attributes:
        image: for sandboxes that name none; the default image if not given.
        exec_timeout_s: for commands without a time limit of their own; none if not given. Gym itself gives a command
            180 s, unless it is told that there is no limit, as for the services of its Compose.
        output_limit: bytes kept of each output stream of a command.
        pull: get images of registries that are not there yet.
        unpack: start SIFs from an unpacked copy on this machine's disk, where there is room for one.
        snapshots: folder for snapshots of sandboxes; one below the sandboxes' own if not given.
    """

    image: fields.Text | None = None
    exec_timeout_s: fields.Seconds | None = None
    output_limit: Annotated[fields.Whole, fields.between(0, MOST_OUTPUT)] = OUTPUT_LIMIT
    pull: fields.Flag = True
    unpack: fields.Flag = True
    snapshots: fields.Text | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """The fields of Gym's ``SandboxSpec`` that mean something here."""

    image: fields.Text | None
    ttl_s: fields.Seconds | None
    ready_timeout_s: Annotated[fields.Number, fields.above_zero(MOST_START_TIMEOUT_S)] | None
    workdir: fields.SandboxPath | None
    env: fields.Variables
    metadata: Mapping[fields.AnyText, Any]
    entrypoint: Argv | None
    provider_options: Mapping[fields.AnyText, Any]


@dataclass(frozen=True, slots=True)
class _Resources:
    """Gym's ``SandboxResources``; what is not given is the provider's to say."""

    cpu: Annotated[fields.Number, fields.above_zero(MOST_CPUS)] | None
    memory_mib: Annotated[fields.Whole, fields.between(1, fields.MOST_MIB)] | None
    disk_gib: Annotated[fields.Whole, fields.between(1, fields.MOST_MIB >> 10)] | None
    gpu: Any


_ASKED = TypeAdapter(_Asked)
_RESOURCES = TypeAdapter(_Resources)
_SETTINGS = TypeAdapter(Settings)


OPTIONS = frozenset(Settings.__dataclass_fields__) | frozenset(SPEC_OPTIONS)
"""All that the provider takes."""


def settings(options: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """The provider's own settings, and what its sandboxes are to be if nobody says otherwise.

    Raises:
        CallerError: an option is unknown or wrong; names it.
    """
    own = set(Settings.__dataclass_fields__)
    _refuse_unknown(options, own | set(SPEC_OPTIONS))
    defaults = {name: value for name, value in options.items() if name in SPEC_OPTIONS}
    check_fields(defaults)
    return fields.checked(_SETTINGS, {name: options[name] for name in own & set(options)}), defaults


def container_spec(spec: SandboxSpec, defaults: Mapping[str, Any]) -> ContainerSpec:
    """What Gym's specification asks for, but for the image, which may have to be pulled first.

    Args:
        spec: Gym's.
        defaults: of the provider.

    Raises:
        CallerError: a field is wrong; names it.
    """
    asked = fields.checked(_ASKED, {name: getattr(spec, name) for name in _Asked.__dataclass_fields__})
    given = {name: getattr(spec.resources, name) for name in _Resources.__dataclass_fields__}
    resources = fields.checked(_RESOURCES, given, inside="resources")
    if resources.gpu:
        raise CallerError("this provider gives sandboxes no GPU; leave it out", field="resources.gpu")
    options = dict(asked.provider_options)
    _refuse_unknown(options, {*SPEC_OPTIONS, SNAPSHOT}, inside="provider_options")
    snapshot = options.pop(SNAPSHOT, None)
    if snapshot is not None and not isinstance(snapshot, str):
        raise CallerError(f"must be the name of a snapshot, not {snapshot!r}", field=f"provider_options.{SNAPSHOT}")
    check_fields(options, inside="provider_options")
    wanted: dict[str, Any] = {**defaults, **options}
    limits = {
        "cpus": resources.cpu,
        "memory_mib": resources.memory_mib,
        "disk_mib": resources.disk_gib and resources.disk_gib << 10,
        "start_timeout_s": asked.ready_timeout_s,
    }
    wanted |= {name: value for name, value in limits.items() if value is not None}
    return ContainerSpec(image=Path(), env=dict(asked.env), workdir=asked.workdir, ttl_s=asked.ttl_s, **wanted)


def container_of(handle: SandboxHandle) -> Container:
    """Our own object behind Gym's handle.

    Raises:
        CallerError: it is another provider's.
    """
    container = handle.raw
    if not isinstance(container, Container):
        raise CallerError(f"{handle.sandbox_id} is not a sandbox of this provider", field="handle")
    return container


def _refuse_unknown(options: Mapping[str, Any], known: set[str], inside: str = "") -> None:
    if unknown := sorted(map(str, set(options) - known)):
        field = f"{inside}.{unknown[0]}" if inside else unknown[0]
        near = difflib.get_close_matches(unknown[0], sorted(known), 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise CallerError(f"there is no such option{meant}; there are {', '.join(sorted(known))}", field=field)
