# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a sandbox is to be, whether that can be, and the supervisor's order to start it.

Nothing here starts or asks anything. What is wrong with a specification is found before anything is begun.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Strict, TypeAdapter

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox import fields
from nemo_gym_prorl.sandbox.images import oci_config
from nemo_gym_prorl.sandbox.images.info import config_of
from nemo_gym_prorl.sandbox.images.oci_config import OciConfig
from nemo_gym_prorl.sandbox.images.validate import check_image
from nemo_gym_prorl.sandbox.isolation import capabilities
from nemo_gym_prorl.sandbox.isolation.accounts import SANDBOX_UID
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.isolation.syscalls import walled_in
from nemo_gym_prorl.sandbox.isolation.user_ids import no_several_users
from nemo_gym_prorl.sandbox.limits import rlimits
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.runtime.command import image_variables
from nemo_gym_prorl.sandbox.supervisor.connection import Message


Start = Literal["auto", "direct", "runtime"]

MOST_CPUS = 4096
MOST_PROCESSES = 1 << 22
"""The kernel has no more numbers for them."""

MOST_START_TIMEOUT_S = 86400.0


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """What a sandbox is to be. A limit is the kernel's where this machine lets us have that, and watched otherwise,
    which is no wall; what holds here is said when the first sandbox starts (:mod:`.limits.report`).

    Attributes:
        image: path of an unpacked root folder (fastest) or of a SIF.
        env: variables of every command, over those that the image sets.
        workdir: where commands start; made if it is not there. If not given, the one that the image was published
            with, else ``/root``, or ``/tmp`` without root.
        network: share the host's network; otherwise there is only a loopback device.
        root: be root inside. Without it commands run as the user that the image was published with, else under user
            id 1000.
        binds: more of the host's files, as ``HOST:INSIDE`` or ``HOST:INSIDE:ro``.
        memory_mib: the largest process is killed when all together use more; 0 for no limit.
        cpus: most processors' worth of time; needs control groups. 0 for no limit.
        processes: most processes and threads at a time.
        disk_mib: the sandbox is ended when it has written more; no single file can be larger. 0 for no limit.
        shared_memory_mib: size of ``/dev/shm``.
        ttl_s: seconds after which the sandbox is ended, however busy it is.
        start_timeout_s: how long the runtime may take to start it.
        start: ``direct``: made by ourselves, by what the runtime said once of the image, fastest; ``runtime``:
            one process of the runtime's for each sandbox; ``auto``: the former where it works.
        users: have all user ids inside, not only one: for package managers, services, files of several users. Needs
            an unpacked image, and of an ordinary user a range of ids; see :mod:`.user_ids`.
        capabilities: of the kernel, that root inside is to have beyond the usual: ``SYS_PTRACE``, ``NET_ADMIN``.
    """

    image: Annotated[Path, Strict()]
    env: fields.Variables = field(default_factory=dict)
    workdir: fields.SandboxPath | None = None
    network: fields.Flag = False
    root: fields.Flag = True
    binds: fields.Texts = ()
    memory_mib: fields.Mib = 8192
    cpus: Annotated[fields.Number, fields.between(0, MOST_CPUS, "no limit")] = 0.0
    processes: Annotated[fields.Whole, fields.between(1, MOST_PROCESSES)] = 512
    disk_mib: fields.Mib = 10240
    shared_memory_mib: Annotated[fields.Whole, fields.between(1, fields.MOST_MIB)] = 64
    ttl_s: fields.Seconds | None = None
    start_timeout_s: Annotated[fields.Number, fields.above_zero(MOST_START_TIMEOUT_S)] = 60.0
    start: Start = "auto"
    users: fields.Flag = False
    capabilities: fields.Texts = ()


def check_fields(values: Mapping[str, object], inside: str = "") -> None:
    """Refuse values that fields of :class:`ContainerSpec` can't have, each by itself.

    Args:
        values: of fields, by name; ``image`` may be missing.
        inside: what they are fields of, for the caller.

    Raises:
        CallerError: one is wrong; names it.
    """
    fields.checked(_SPEC, {"image": Path(), **values}, inside=inside)


def check(spec: ContainerSpec, runtime: Runtime) -> None:
    """Refuse what can't be started.

    Raises:
        CallerError: the specification is wrong; names the field.
        InfrastructureError: sandboxes of this user can't be started with this runtime, or of such images.
    """
    check_fields({field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)})
    # An image is shown to the sandbox's user elsewhere, but the runtime finds its parts by its own path.
    if is_machine_root() and (wall := walled_in(runtime.path)):
        raise InfrastructureError(
            f"sandboxes of root run under unprivileged user ids, which can't enter {wall} to run {runtime.path}; set "
            "PRORL_CACHE to a folder that all may enter and run 'prorl setup'"
        )
    if spec.start == "direct" and spec.image.is_file():
        raise CallerError("only an unpacked image can be started directly", field="start")
    if spec.users:
        if spec.start == "runtime" or spec.image.is_file():
            raise CallerError("several users need an unpacked image, and not start: runtime", field="users")
        if trouble := no_several_users():
            raise CallerError(trouble, field="users")
    check_image(spec.image)
    if _may_trace(spec) and (spec.start == "runtime" or not spec.image.is_dir()):
        raise CallerError("SYS_PTRACE needs an unpacked image, and not start: runtime", field="capabilities")


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
        uid, home = (config and config.user and oci_config.account(config.user, image)) or (0, "")
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


def order(name: str, host_id: int, spec: ContainerSpec, runtime: Runtime, defaults: ImageDefaults) -> Message:
    """The supervisor's order to start a container: plain values, of which it makes command lines itself.

    Args:
        name: the sandbox's.
        host_id: the user id that it runs under on the host.
        spec: what it is to be; checked.
        runtime: what starts it, or says what the image sets.
        defaults: of its image.
    """
    start = "direct" if spec.users or _may_trace(spec) else spec.start if spec.image.is_dir() else "runtime"
    return {
        "do": "create",
        "sandbox": name,
        "runtime": str(runtime.path),
        "start": start,
        "users": spec.users,
        "network": spec.network,
        "binds": list(spec.binds),
        "image": str(spec.image),
        "image_identity": image_identity(spec.image) if start != "runtime" else "",
        "scripted": defaults.config is None or defaults.config.extended,
        "uid": 0 if spec.root else defaults.uid or SANDBOX_UID,
        "host_uid": host_id,
        "host_gid": host_id if is_machine_root() else os.getegid(),
        "limits": rlimits.of_programs(spec.processes, spec.disk_mib),
        "memory_mib": spec.memory_mib,
        "cpus": spec.cpus,
        "processes": spec.processes,
        "disk_mib": spec.disk_mib,
        "shared_memory_mib": spec.shared_memory_mib,
        "ttl_s": spec.ttl_s,
        "start_timeout_s": spec.start_timeout_s,
        "capabilities": sorted(capabilities.numbers(spec.capabilities, root=spec.root, host_network=spec.network)),
    }


def _may_trace(spec: ContainerSpec) -> bool:
    """Whether what runs inside may take over any process there. A runtime's first process has every right inside and
    no filter of system calls; one that is made directly has no right and is under the filter.

    Raises:
        CallerError: capabilities that can't be had.
    """
    added = capabilities.numbers(spec.capabilities, root=spec.root, host_network=spec.network)
    return capabilities.GRANTED["SYS_PTRACE"] in added


def image_identity(image: Path) -> str:
    """What tells an unpacked image from any other, also from what lay at its path before."""
    parts = [image, image / ".singularity.d" / "env", *sorted((image / ".singularity.d" / "env").glob("*"))]
    found = [path.stat() for path in parts if path.exists()]
    return f"{image} {[(stat.st_dev, stat.st_ino, stat.st_mtime_ns) for stat in found]}"


_SPEC = TypeAdapter(ContainerSpec)
