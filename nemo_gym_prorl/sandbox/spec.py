# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a sandbox is to be: checked once, when a :class:`ContainerSpec` is made, and turned into a request to start it.

The words of a configuration and of NeMo Gym's ``SandboxSpec`` become a :class:`ContainerSpec` here
(:func:`container_spec`). Gym's classes hold whatever they were made with, so this is the border: from here on every
value has its type, and a wrong one is refused by the name under which its author knows it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, Strict
from pydantic import dataclasses as pydantic_dataclasses

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.fields import (
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
)
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
from nemo_gym_prorl.sandbox.supervisor.messages import CreateRequest, Start


if TYPE_CHECKING:
    from nemo_gym.sandbox.providers.base import SandboxSpec


MAX_CPUS = 4096

MAX_PROCESSES = 1 << 22  # the kernel has no more numbers for them

MAX_START_TIMEOUT_S = 86400.0

SNAPSHOT = "snapshot_id"
"""The option of a specification that names a snapshot, as Gym's checkpoints give it."""


@pydantic_dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxOptions(Checked):
    """Options that can be set for the provider, and per sandbox in ``provider_options``. A limit is the kernel's where
    this machine lets us have that, and watched otherwise (:mod:`.limits.report`).

    Attributes:
        network: share the host's network; otherwise there is only a loopback device.
        root: be root inside. Without it commands run as the user that the image was published with, else under user
            id 1000.
        users: have all user ids inside, not only one: for package managers, services, files of several users. Needs
            an unpacked image, and of an ordinary user a range of ids; see :mod:`.user_ids`.
        start: ``direct``: made by ourselves, by what the runtime said once of the image, fastest; ``runtime``:
            one process of the runtime's for each sandbox; ``auto``: the former where it works.
        binds: more of the host's files, as ``HOST:INSIDE`` or ``HOST:INSIDE:ro``.
        capabilities: of the kernel, that root inside is to have beyond the usual: ``SYS_PTRACE``, ``NET_ADMIN``.
        memory_mib: the largest process is killed when all together use more; 0 for no limit.
        cpus: most processors' worth of time; needs control groups. 0 for no limit.
        processes: most processes and threads at a time.
        disk_mib: the sandbox is ended when it has written more; no single file can be larger. 0 for no limit.
        shared_memory_mib: size of ``/dev/shm``.
    """

    network: Flag = False
    root: Flag = True
    users: Flag = False
    start: Start = "auto"
    binds: Texts = ()
    capabilities: Texts = ()
    memory_mib: Mib = 8192
    cpus: Annotated[Number, Field(ge=0, le=MAX_CPUS)] = 0.0
    processes: Annotated[Whole, Field(ge=1, le=MAX_PROCESSES)] = 512
    disk_mib: Mib = 10240
    shared_memory_mib: Annotated[Whole, Field(ge=1, le=MAX_MIB)] = 64


@pydantic_dataclasses.dataclass(frozen=True, kw_only=True)
class ContainerSpec(SandboxOptions):
    """What a sandbox is to be.

    Attributes:
        image: path of an unpacked root folder (fastest) or of a SIF.
        env: variables of every command, over those that the image sets.
        workdir: where commands start; made if it is not there. If not given, the one that the image was published
            with, else ``/root``, or ``/tmp`` without root.
        ttl_s: seconds after which the sandbox is ended, however busy it is.
        start_timeout_s: how long the runtime may take to start it.
    """

    image: Annotated[Path, Strict()]
    env: Variables = field(default_factory=dict)
    workdir: SandboxPath | None = None
    ttl_s: Seconds | None = None
    start_timeout_s: Annotated[Number, Field(gt=0, le=MAX_START_TIMEOUT_S)] = 60.0


@pydantic_dataclasses.dataclass(frozen=True, kw_only=True)
class ProviderOptions(SandboxOptions):
    """The provider's options; those of :class:`SandboxOptions` are defaults for its sandboxes.

    Attributes:
        image: for sandboxes that name none; the default image if not given.
        exec_timeout_s: for commands without a time limit of their own; none if not given. Gym itself gives a command
            180 s, unless it is told that there is no limit, as for the services of its Compose.
        output_limit: bytes kept of each output stream of a command.
        pull: get images of registries that are not there yet.
        unpack: start SIFs from an unpacked copy on this machine's disk, where there is room for one.
        snapshots: folder for snapshots of sandboxes; one below the sandboxes' own if not given.
    """

    image: Text | None = None
    exec_timeout_s: Seconds | None = None
    output_limit: OutputBytes = OUTPUT_LIMIT
    pull: Flag = True
    unpack: Flag = True
    snapshots: Text | None = None


SPEC_OPTIONS = tuple(option.name for option in fields(SandboxOptions))


def provider_options(options: Mapping[str, Any]) -> ProviderOptions:
    """Return the provider's options.

    Raises:
        CallerError: one is unknown or wrong; names it.
    """
    _refuse_unknown(options, [option.name for option in fields(ProviderOptions)])
    return ProviderOptions(**options)


def container_spec(spec: SandboxSpec, defaults: ProviderOptions) -> ContainerSpec:
    """Return what Gym's specification asks for, but for the image, which may have to be pulled first.

    Raises:
        CallerError: a field is wrong; names it as Gym does.
    """
    options, resources = spec.provider_options, spec.resources
    if not isinstance(options, Mapping):
        raise CallerError(
            f"must be a mapping of options; this is a {type(options).__name__}", field="provider_options"
        )
    _refuse_unknown(options, [*SPEC_OPTIONS, SNAPSHOT], "provider_options.")
    for value, kind, name in (
        (spec.image, Text | None, "image"),
        (spec.entrypoint, Argv | None, "entrypoint"),
        (options.get(SNAPSHOT), Text | None, f"provider_options.{SNAPSHOT}"),
        (resources.cpu, Annotated[Number, Field(gt=0)] | None, "resources.cpu"),
        (resources.memory_mib, Annotated[Whole, Field(gt=0)] | None, "resources.memory_mib"),
        (resources.disk_gib, Annotated[Whole, Field(gt=0)] | None, "resources.disk_gib"),
    ):
        checked(value, kind, name)
    if resources.gpu:
        raise CallerError("this provider gives sandboxes no GPU; leave it out", field="resources.gpu")
    gyms = {
        "workdir": ("workdir", spec.workdir),
        "ttl_s": ("ttl_s", spec.ttl_s),
        "start_timeout_s": ("ready_timeout_s", spec.ready_timeout_s),
        "cpus": ("resources.cpu", resources.cpu),
        "memory_mib": ("resources.memory_mib", resources.memory_mib),
        "disk_mib": ("resources.disk_gib", resources.disk_gib and resources.disk_gib << 10),
    }
    values = {name: getattr(defaults, name) for name in SPEC_OPTIONS}
    values |= {name: value for name, value in options.items() if name != SNAPSHOT}
    values |= {name: value for name, (_gyms, value) in gyms.items() if value is not None}
    try:
        return ContainerSpec(image=Path(), env=spec.env, **values)
    except CallerError as error:
        ours = (error.field or "").partition(".")[0]
        if ours in gyms and gyms[ours][1] is not None:
            raise CallerError(error.complaint, field=gyms[ours][0]) from error
        raise CallerError(error.complaint, field=f"provider_options.{ours}" if ours in options else ours) from error


def _refuse_unknown(options: Mapping[str, Any], known: list[str], inside: str = "") -> None:
    if unknown := sorted(map(str, set(options) - {*known})):
        near = difflib.get_close_matches(unknown[0], sorted(known), 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        reason = f"there is no such option{meant}; there are {', '.join(sorted(known))}"
        raise CallerError(reason, field=f"{inside}{unknown[0]}")


@dataclass(frozen=True, slots=True)
class ImageDefaults:
    """What an image sets for its sandboxes.

    Attributes:
        config: of the registry's image that it is or was made from, if it is or was.
        uid: the number of its user; 0 for root.
        home: the home folder of its user; empty for root, or if not known.
    """

    config: OciConfig | None = None
    uid: int = 0
    home: str = ""

    @classmethod
    def of(cls, image: Path) -> ImageDefaults:
        """Look an image's defaults up. A mounted SIF has no ``/etc/passwd`` yet to look names up in."""
        config = config_of(image)
        uid, home = (config and config.user and oci_config.lookup_account(config.user, image)) or (0, "")
        return cls(config, uid, home if uid else "")

    def environment(self, reported: Mapping[str, str], *, root: bool) -> dict[str, str]:
        """The variables of commands.

        Args:
            reported: by the runtime, which is asked only where scripts of the image may set some.
            root: whether commands are root's.
        """
        home = self.home or ("/root" if root else "/tmp")
        usual = {"HOME": home, "LANG": "C.UTF-8", "TERM": "dumb"}
        own = image_variables(reported)
        return {**usual, **(self.config.environment(own) if self.config else own)}


def create_request(name: str, spec: ContainerSpec, runtime: Runtime) -> tuple[CreateRequest, ImageDefaults]:
    """Return the supervisor's request to start a sandbox, if it can be had, and what its image sets.

    Args:
        name: the sandbox's.
        spec: what it is to be.
        runtime: what starts it, or says what the image sets.

    Raises:
        CallerError: no such sandbox can be had; names the field.
        InfrastructureError: sandboxes of this user can't be started with this runtime, or of such images.
    """
    # An image is shown to the sandbox's user elsewhere, but the runtime finds its parts by its own path.
    if is_machine_root() and (wall := first_untraversable_parent(runtime.path)):
        raise InfrastructureError(
            f"sandboxes of root run under unprivileged user ids, which can't enter {wall} to run {runtime.path}; set "
            "PRORL_CACHE to a folder that all may enter and run 'prorl setup'"
        )
    added = privilege.capability_numbers(spec.capabilities, root=spec.root, host_network=spec.network)
    # A runtime's first process has every right inside and no filter of system calls, so what may take over any process
    # must not meet one. A first process that is made directly has no right and is under the filter.
    traces = privilege.GRANTABLE_CAPABILITIES["SYS_PTRACE"] in added
    only_direct = {"start": spec.start == "direct", "users": spec.users, "capabilities": traces}
    if spec.start == "runtime" or os.path.isfile(spec.image):  # noqa: PTH113 - Path raises where a folder is closed
        for wanted in (option for option, given in only_direct.items() if given):
            said = "SYS_PTRACE" if wanted == "capabilities" else str(getattr(spec, wanted)).lower()
            raise CallerError(f"{said} needs an unpacked image, and not start: runtime", field=wanted)
    check_image(spec.image)
    if spec.users and (trouble := user_ids.multi_user_error()):
        raise CallerError(trouble, field="users")
    defaults = ImageDefaults.of(spec.image)
    start: Start = "direct" if any(only_direct.values()) else spec.start if spec.image.is_dir() else "runtime"
    host_id = user_ids.draw_host_id(several=spec.users)
    request = CreateRequest(
        sandbox=name,
        runtime=str(runtime.path),
        start=start,
        image=str(spec.image),
        image_identity=image_identity(spec.image) if start != "runtime" else "",
        scripted=defaults.config is None or defaults.config.extended,
        uid=0 if spec.root else defaults.uid or SANDBOX_UID,
        host_uid=host_id,
        host_gid=host_id if is_machine_root() else os.getegid(),
        users=spec.users,
        network=spec.network,
        binds=list(spec.binds),
        capabilities=sorted(added),
        memory_mib=spec.memory_mib,
        cpus=spec.cpus,
        processes=spec.processes,
        disk_mib=spec.disk_mib,
        shared_memory_mib=spec.shared_memory_mib,
        ttl_s=spec.ttl_s,
        start_timeout_s=spec.start_timeout_s,
        snapshot="",
    )
    return request, defaults


def image_identity(image: Path) -> str:
    """What tells an unpacked image from any other, also from what lay at its path before."""
    parts = [image, image / ".singularity.d" / "env", *sorted((image / ".singularity.d" / "env").glob("*"))]
    found = [path.stat() for path in parts if path.exists()]
    return f"{image} {[(stat.st_dev, stat.st_ino, stat.st_mtime_ns) for stat in found]}"
