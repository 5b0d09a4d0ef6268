# SPDX-License-Identifier: Apache-2.0
"""What a sandbox is to be, whether that can be, and the supervisor's order to start it.

Nothing here starts or asks anything. What is wrong with a specification is found before anything is begun.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.linux import walled_in
from nemo_gym_prorl.sandbox.runtime import Runtime
from nemo_gym_prorl.sandbox.wire import Message


SHARED_FOLDER = "/.prorl"
"""Where a sandbox sees the folder that it shares with its server, for sockets."""

_RUNTIME_VARIABLES = ("APPTAINER_", "SINGULARITY_", "PS1", "PROMPT_COMMAND", "PWD", "SHLVL", "_")


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """What a sandbox is to be.

    Attributes:
        image: path of an unpacked root folder (fastest) or of a SIF.
        env: variables of every command, over those that the image sets.
        workdir: where commands start; made if it is not there. ``/root``, or ``/tmp`` without root, if not given.
        network: share the host's network; otherwise there is only a loopback device.
        root: be root inside. Without it commands run under user id 1000.
        binds: more of the host's files, as ``HOST:INSIDE`` or ``HOST:INSIDE:ro``.
        memory_mib: the largest process is killed when all together use more; 0 for no limit.
        processes: most processes and threads at a time.
        disk_mib: the sandbox is ended when it has written more; no single file can be larger. 0 for no limit.
        shared_memory_mib: size of ``/dev/shm``.
        ttl_s: seconds after which the sandbox is ended, however busy it is.
        start_timeout_s: how long the runtime may take to start it.
    """

    image: Path
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    network: bool = False
    root: bool = True
    binds: Sequence[str] = ()
    memory_mib: int = 8192
    processes: int = 512
    disk_mib: int = 10240
    shared_memory_mib: int = 64
    ttl_s: float | None = None
    start_timeout_s: float = 60.0


def check(spec: ContainerSpec, runtime: Runtime) -> None:
    """Refuse what can't be started.

    Raises:
        CallerError: the specification is wrong; names the field.
        InfrastructureError: sandboxes of this user can't be started with this runtime.
    """
    # An image is shown to the sandbox's user elsewhere, but the runtime finds its parts by its own path.
    if os.geteuid() == 0 and (wall := walled_in(runtime.path)):
        raise InfrastructureError(
            f"sandboxes of root run under unprivileged user ids, which can't enter {wall} to run {runtime.path}; set "
            "PRORL_CACHE to a folder that all may enter and run 'prorl setup'"
        )
    if not spec.image.exists():
        raise CallerError(f"there is no {spec.image}; 'prorl setup' builds the default image", field="image")
    if spec.workdir is not None:
        check_path(spec.workdir, "workdir")
    for name, value in spec.env.items():
        check_variable(name, value)
    for name in ("memory_mib", "disk_mib"):
        if getattr(spec, name) < 0:
            raise CallerError("must be 0 (no limit) or more", field=name)
    for name in ("processes", "shared_memory_mib", "start_timeout_s"):
        if getattr(spec, name) <= 0:
            raise CallerError("must be more than 0", field=name)


def order(name: str, host_id: int, spec: ContainerSpec, runtime: Runtime, folder: Path) -> Message:
    """The supervisor's order to start a container."""
    overlay = str(folder / name / "overlay")
    shared = str(folder / name / "shared")
    command = [str(runtime.path), "exec", "--userns", "--containall", "--cleanenv", "--no-init"]
    command += ["--hostname", "sandbox", "--bind", f"{shared}:{SHARED_FOLDER}"]
    command += ["--no-mount", "home,tmp", "--overlay", overlay]
    if not spec.network:
        command += ["--net", "--network", "none"]
    for bind in spec.binds:
        command += ["--bind", bind]
    limits = {resource.RLIMIT_NPROC: spec.processes, resource.RLIMIT_CORE: 0}
    if spec.disk_mib:
        limits[resource.RLIMIT_FSIZE] = spec.disk_mib << 20
    return {
        "do": "create",
        "sandbox": name,
        "argv": command,
        "image": str(spec.image),
        "overlay": overlay,
        "shared": shared,
        "env": {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/", "PRORL_SANDBOX_OWNER": str(folder)},
        "uid": 0 if spec.root else 1000,
        "host_uid": host_id,
        "host_gid": os.getegid() if os.geteuid() else host_id,
        "limits": limits,
        "memory_mib": spec.memory_mib,
        "disk_mib": spec.disk_mib,
        "shared_memory_mib": spec.shared_memory_mib,
        "ttl_s": spec.ttl_s,
    }


def command_environment(found: Mapping[str, str], spec: ContainerSpec) -> dict[str, str]:
    """The variables of commands: what the image sets, less what the runtime says about itself."""
    own = {name: value for name, value in found.items() if not name.startswith(_RUNTIME_VARIABLES)}
    home = "/root" if spec.root else "/tmp"
    return {**own, "HOME": home, "LANG": "C.UTF-8", "TERM": "dumb"}


def check_variable(name: str, value: str) -> None:
    """Refuse what the kernel takes for no variable."""
    if not name or "=" in name or "\0" in name + value:
        raise CallerError(f"{name!r} can't be the name or value of a variable", field="env")


def check_path(path: str, name: str) -> None:
    """Refuse all but absolute paths; ``name`` is the field's."""
    refuse_nul(path, name)
    if not path.startswith("/"):
        raise CallerError(f"must be an absolute path in the sandbox, not {path!r}", field=name)


def refuse_nul(text: str, name: str) -> None:
    """Refuse what would be cut off where the kernel takes it over."""
    if "\0" in text:
        raise CallerError("must not hold a NUL character", field=name)
