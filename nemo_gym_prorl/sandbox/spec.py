# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Specification of a sandbox: validated once by :class:`ContainerSpec`, then converted to a :class:`.CreateRequest`.

:func:`container_spec` creates a :class:`ContainerSpec` from the provider's options and NeMo Gym's ``SandboxSpec``.
Gym's classes do not validate types, so this module does. An error names the field as the author of the configuration
or specification wrote it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, Strict
from pydantic import dataclasses as pydantic_dataclasses

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.network_access import HOST, NONE, Hosts, Network, egress_hosts, proxy_variables
from nemo_gym_prorl.sandbox.images import oci_config
from nemo_gym_prorl.sandbox.images.oci_config import OciConfig
from nemo_gym_prorl.sandbox.images.rootfs import check_image
from nemo_gym_prorl.sandbox.images.store import config_of
from nemo_gym_prorl.sandbox.isolation import privilege, user_ids
from nemo_gym_prorl.sandbox.isolation.mounts import SANDBOX_UID
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.isolation.syscalls import first_untraversable_parent
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.runtime.launch import image_variables
from nemo_gym_prorl.sandbox.sessions.commands import OUTPUT_LIMIT
from nemo_gym_prorl.sandbox.strict_types import (
    MAX_MIB,
    Argv,
    Checked,
    Flag,
    Mib,
    Number,
    OutputBytes,
    SandboxPath,
    Seconds,
    Text,
    Texts,
    Variables,
    Whole,
    checked,
    listed,
)
from nemo_gym_prorl.sandbox.supervisor.protocol import CreateRequest, Start


if TYPE_CHECKING:
    from nemo_gym.sandbox.providers.base import SandboxSpec


# Defined once: pydantic compiles each new type, and ``checked`` caches compiled types.
_PositiveNumber = Annotated[Number, Field(gt=0)]
_PositiveWhole = Annotated[Whole, Field(gt=0)]

SNAPSHOT = "snapshot_id"
"""Option of a specification with the id of a snapshot to restore; Gym defines the option's name."""

SNAPSHOT_PATHS = "snapshot_paths"
"""Option of a specification with the paths in the sandbox to restore from the snapshot; all by default."""


@pydantic_dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxOptions(Checked):
    """Options of the provider that ``provider_options`` may override per sandbox.

    The supervisor's watchdog enforces the disk limit, and the memory limit on machines without usable control groups.
    The CPU limit needs control groups. The kernel enforces all other limits.

    Attributes:
        network: ``none``, ``package-mirrors``, ``public``, ``host`` or a list of hosts.
        package_mirrors: further hosts of ``package-mirrors``.
        root: run commands as root. Otherwise commands run as the image's published user, or under user id 1000.
        users: map all the sandbox's user ids, not only one. Needs an unpacked image, and for an ordinary user a range
            of subordinate ids; see :mod:`.user_ids`.
        start: ``direct`` without Apptainer, ``runtime`` with Apptainer, ``auto``: direct where possible.
        binds: host files or folders: ``HOST:INSIDE`` or ``HOST:INSIDE:ro``.
        capabilities: further capabilities for root: ``SYS_PTRACE``, ``NET_ADMIN``.
        memory_mib: memory of all processes, above which the largest is killed. 0 for no limit.
        cpus: CPU limit; needs control groups. 0 for no limit.
        processes: maximum processes and threads.
        disk_mib: written data, above which the sandbox is ended. 0 for no limit.
        shared_memory_mib: size of ``/dev/shm``.
    """

    network: Network = NONE
    package_mirrors: Hosts = ()
    root: Flag = True
    users: Flag = False
    start: Start = "auto"
    binds: Texts = ()
    capabilities: Texts = ()
    memory_mib: Mib = 8192
    cpus: Annotated[Number, Field(ge=0)] = 0.0
    processes: Annotated[Whole, Field(ge=1)] = 512
    disk_mib: Mib = 10240
    shared_memory_mib: Annotated[Whole, Field(ge=1, le=MAX_MIB)] = 64


@pydantic_dataclasses.dataclass(frozen=True, kw_only=True)
class ContainerSpec(SandboxOptions):
    """Complete, valid specification of a sandbox.

    Attributes:
        image: path of an unpacked root folder.
        env: environment variables of every command, which override the image's variables.
        workdir: working directory of commands; created if missing. ``None`` for the image's published one, else
            ``/root``, or ``/tmp`` without root.
        ttl_s: seconds after which the sandbox is ended, also while commands run; ``None`` for no limit.
        start_timeout_s: seconds within which the sandbox must have started.
        snapshot_paths: paths in the sandbox that are restored from a snapshot; all paths if empty.
    """

    image: Annotated[Path, Strict()]
    env: Variables = field(default_factory=dict)
    workdir: SandboxPath | None = None
    ttl_s: Seconds | None = None
    start_timeout_s: Seconds = 60.0
    snapshot_paths: Annotated[Sequence[SandboxPath], BeforeValidator(listed)] = ()


@pydantic_dataclasses.dataclass(frozen=True, kw_only=True)
class ProviderOptions(SandboxOptions):
    """Options of the provider; fields of :class:`SandboxOptions` are the defaults of the provider's sandboxes.

    Attributes:
        image: image of sandboxes that name none. If unset, the default image.
        exec_timeout_s: default time limit of commands. Gym sets no limit for commands of Compose services.
        output_limit: bytes kept of each output stream of a command.
        pull: pull missing images.
        snapshots: folder of snapshots; below ``PRORL_STATE`` if unset.
    """

    image: Text | None = None
    exec_timeout_s: Seconds | None = None
    output_limit: OutputBytes = OUTPUT_LIMIT
    pull: Flag = True
    snapshots: Text | None = None


SPEC_OPTIONS = tuple(option.name for option in fields(SandboxOptions))


def provider_options(options: Mapping[str, Any]) -> ProviderOptions:
    """Return validated options of the provider.

    Raises:
        CallerError: an option is unknown or wrong; names the option.
    """
    _refuse_unknown(options, [option.name for option in fields(ProviderOptions)])
    return ProviderOptions(**options)


def container_spec(spec: SandboxSpec, defaults: ProviderOptions) -> ContainerSpec:
    """Convert Gym's specification, with ``defaults`` for options that it does not set.

    The result's ``image`` is empty, because the image may have to be pulled first.

    Raises:
        CallerError: a field is wrong; the error has Gym's name of the field.
    """
    options, resources = spec.provider_options, spec.resources
    if not isinstance(options, Mapping):
        raise CallerError(
            f"must be a mapping of options; this is a {type(options).__name__}", field="provider_options"
        )
    _refuse_unknown(options, [*SPEC_OPTIONS, SNAPSHOT, SNAPSHOT_PATHS], "provider_options.")
    for value, kind, name in (
        (spec.image, Text | None, "image"),
        (spec.entrypoint, Argv | None, "entrypoint"),
        (options.get(SNAPSHOT), Text | None, f"provider_options.{SNAPSHOT}"),
        (resources.cpu, _PositiveNumber | None, "resources.cpu"),
        (resources.memory_mib, _PositiveWhole | None, "resources.memory_mib"),
        (resources.disk_gib, _PositiveWhole | None, "resources.disk_gib"),
    ):
        checked(value, kind, name)
    if resources.gpu:
        raise CallerError("sandboxes of this provider have no GPU; remove the field", field="resources.gpu")
    gym_fields = {
        "workdir": ("workdir", spec.workdir),
        "ttl_s": ("ttl_s", spec.ttl_s),
        "start_timeout_s": ("ready_timeout_s", spec.ready_timeout_s),
        "cpus": ("resources.cpu", resources.cpu),
        "memory_mib": ("resources.memory_mib", resources.memory_mib),
        "disk_mib": ("resources.disk_gib", resources.disk_gib and resources.disk_gib << 10),
    }
    values = {name: getattr(defaults, name) for name in SPEC_OPTIONS}
    values |= {name: value for name, value in options.items() if name != SNAPSHOT}
    values |= {name: value for name, (_field, value) in gym_fields.items() if value is not None}
    try:
        return ContainerSpec(image=Path(), env=spec.env, **values)
    except CallerError as error:
        name = (error.field or "").partition(".")[0]
        if name in gym_fields and gym_fields[name][1] is not None:
            raise CallerError(error.complaint, field=gym_fields[name][0]) from error
        raise CallerError(error.complaint, field=f"provider_options.{name}" if name in options else name) from error


def _refuse_unknown(options: Mapping[str, Any], known: list[str], prefix: str = "") -> None:
    if unknown := sorted(map(str, set(options) - {*known})):
        near = difflib.get_close_matches(unknown[0], sorted(known), 1)
        suggestion = f" (did you mean {near[0]}?)" if near else ""
        reason = f"there is no such option{suggestion}; there are {', '.join(sorted(known))}"
        raise CallerError(reason, field=f"{prefix}{unknown[0]}")


@dataclass(frozen=True, slots=True)
class ImageDefaults:
    """Variables and user that an image defines for its sandboxes.

    Attributes:
        config: registry configuration of the image; ``None`` if the image did not come from a registry.
        uid: user id of the image's user; 0 for root.
        home: home folder of that user; empty for root, or if unknown.
    """

    config: OciConfig | None = None
    uid: int = 0
    home: str = ""

    @classmethod
    def of(cls, image: Path) -> ImageDefaults:
        """Return an image's defaults. A user's name is resolved only in an unpacked image, by its ``/etc/passwd``."""
        config = config_of(image)
        uid, home = (config and config.user and oci_config.lookup_account(config.user, image)) or (0, "")
        return cls(config, uid, home if uid else "")

    def environment(self, reported: Mapping[str, str], spec: ContainerSpec) -> dict[str, str]:
        """Return the environment variables of commands, without those of ``spec.env``.

        Args:
            reported: variables that the runtime reported; empty unless the image's scripts may set variables.
        """
        home = self.home or ("/root" if spec.root else "/tmp")
        usual = {"HOME": home, "LANG": "C.UTF-8", "TERM": "dumb"}
        own = image_variables(reported)
        image = self.config.environment() if self.config else own
        return {**usual, **image, **proxy_variables(spec.network)}


def create_request(
    name: str, spec: ContainerSpec, runtime: Runtime, snapshot: Path | None = None
) -> tuple[CreateRequest, ImageDefaults]:
    """Return the request to start a sandbox, and the defaults of its image.

    Args:
        snapshot: archive from which the writable layer is restored.

    Raises:
        CallerError: the specification contradicts itself, or needs what this machine lacks; names the field.
        InfrastructureError: this user's sandboxes cannot be started with this runtime or image.
    """
    # The sandbox's user must be able to enter the parent folders of the runtime, but not of the image: it is mounted.
    if is_machine_root() and (blocked := first_untraversable_parent(runtime.path)):
        raise InfrastructureError(
            f"sandboxes of root run under unprivileged user ids, which can't enter {blocked} to run {runtime.path}; "
            "set PRORL_CACHE to a folder that all may enter and run 'prorl setup'"
        )
    added = privilege.capability_numbers(spec.capabilities, root=spec.root, host_network=spec.network == HOST)
    # Programs with SYS_PTRACE could control the sandbox's first process. A first process that the runtime starts has
    # more capabilities than the programs; after a direct start the first process has none.
    traces = privilege.GRANTABLE_CAPABILITIES["SYS_PTRACE"] in added
    only_direct = {"start": spec.start == "direct", "users": spec.users, "capabilities": traces}
    if spec.start == "runtime":
        for wanted in (option for option, given in only_direct.items() if given):
            value = "SYS_PTRACE" if wanted == "capabilities" else str(getattr(spec, wanted)).lower()
            raise CallerError(f"{value} needs a direct start, and not start: runtime", field=wanted)
    check_image(spec.image)
    if spec.users and (trouble := user_ids.multi_user_error()):
        raise CallerError(trouble, field="users")
    defaults = ImageDefaults.of(spec.image)
    start: Start = "direct" if any(only_direct.values()) else spec.start
    host_id = user_ids.draw_host_id(several=spec.users)
    request = CreateRequest(
        sandbox=name,
        runtime=str(runtime.path),
        start=start,
        image=str(spec.image),
        image_identity=image_identity(spec.image) if start != "runtime" else "",
        scripted=defaults.config is None,
        uid=0 if spec.root else defaults.uid or SANDBOX_UID,
        host_uid=host_id,
        host_gid=host_id if is_machine_root() else os.getegid(),
        users=spec.users,
        network=egress_hosts(spec.network, spec.package_mirrors),
        binds=list(spec.binds),
        capabilities=sorted(added),
        memory_mib=spec.memory_mib,
        cpus=spec.cpus,
        processes=spec.processes,
        disk_mib=spec.disk_mib,
        shared_memory_mib=spec.shared_memory_mib,
        ttl_s=spec.ttl_s,
        start_timeout_s=spec.start_timeout_s,
        snapshot=str(snapshot or ""),
        snapshot_paths=list(spec.snapshot_paths),
    )
    return request, defaults


def image_identity(image: Path) -> str:
    """Return a text that identifies an unpacked image, and changes when the folder at the image's path is replaced."""
    parts = [image, image / ".singularity.d" / "env", *sorted((image / ".singularity.d" / "env").glob("*"))]
    found = [path.stat() for path in parts if path.exists()]
    return f"{image} {[(stat.st_dev, stat.st_ino, stat.st_mtime_ns) for stat in found]}"
