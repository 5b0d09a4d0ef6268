# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What this machine has of what rollouts need, what it lacks, and how to get that.

Each check is data: what was looked at, what was found, how good that is, and the way to mend it. Where it can, a check
does the thing itself instead of reading settings that should allow it: whether a sandbox can be started depends on
half a dozen kernel, distribution and container settings, and starting one, as servers do, asks them all. Nothing that
is tried here stays.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from nemo_gym_prorl.deployment.venvs import cut_at_a_space
from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.filesystems import filesystem_type, is_in_memory
from nemo_gym_prorl.http.process import open_files_needed
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.images.builder import KERNEL, default_image_path, image_path
from nemo_gym_prorl.sandbox.images.entries import cache_dir
from nemo_gym_prorl.sandbox.isolation.mounts import namespace_without_overmounts, overmounts
from nemo_gym_prorl.sandbox.isolation.privilege import (
    ProbeStep,
    UserNamespaceProbe,
    has_single_id,
    in_user_namespace,
    is_machine_root,
    is_machine_root_in_namespace,
    remedies,
)
from nemo_gym_prorl.sandbox.limits import cgroups
from nemo_gym_prorl.sandbox.limits.rlimits import (
    Enforcement,
    HostFacts,
    Limit,
    cgroup_remedy_here,
    enforced_limits,
    weak_limits,
)
from nemo_gym_prorl.sandbox.runtime import debian
from nemo_gym_prorl.sandbox.runtime.apptainer import INSTALL_HINT, Runtime, find_runtime
from nemo_gym_prorl.sandbox.supervisor import state_dir
from nemo_gym_prorl.sandbox.supervisor.client import Link


MIN_PYTHON = (3, 12)
MIN_GYM = (0, 4)
COMFORTABLE_DISK_GB = 5.0
"""Free space of the cache folder below which a warning is due: set-up takes 0.6 GB, task images and overlays more."""

SINGULARITY_WITH_AUTHFILE = (4, 1)
"""The first SingularityCE that takes ``--authfile``, by which pulls and builds send no stored logins."""

ROLLOUTS = 1_000
"""Rollouts at once for which the limit of open files is judged."""

SELINUX = Path("/sys/fs/selinux/enforce")
"""There where the kernel has it switched on; says 1 if what it denies is refused."""

PROBE = ". /etc/os-release; echo $PRETTY_NAME; touch /probe && cut -d: -f1 -s /proc/net/dev"
"""Run in a sandbox: says which system it has, writes to its root, and names its network devices."""

_SETUP = "prorl setup"
_STATE = "set PRORL_STATE to a folder of yours on a local disk"


class Level(StrEnum):
    """How good a finding is."""

    OK = "ok"
    WARN = "warn"
    """Rollouts run; something is slower, less isolated or left out."""
    MISSING = "missing"
    """Rollouts with sandboxes can't run."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        name: what was looked at.
        level: how good it is.
        found: what was found, in a few words.
        fix: how to get what is not there; empty if nothing is wrong.
    """

    name: str
    level: Level
    found: str
    fix: str = ""


def examine() -> Iterator[Check]:
    """All checks in order, each made when it is asked for. Takes about 1 s."""
    yield _python()
    yield _gym()
    runtime = find_runtime()
    yield _runtime(runtime)
    namespaces = user_namespaces_check(UserNamespaceProbe.run())
    yield namespaces
    around = container_check() if in_user_namespace() else None
    if around:
        yield around
    if selinux := selinux_check(SELINUX.read_text() if SELINUX.exists() else ""):
        yield selinux
    image = default_image_path()
    yield _image("Default image", image if image.is_dir() else None)
    if kernel := image_path(KERNEL):  # else it is built when a task needs it
        yield _image("Image with IPython", kernel)
    if runtime and image.is_dir() and namespaces.level is Level.OK and not (around and around.level is Level.MISSING):
        yield _sandbox(runtime, image)
    yield _fuse()
    yield _limits()
    yield _image_source()
    yield _open_files()
    yield _uv()
    yield _disk()
    yield _state()


def _python() -> Check:
    found = f"{'.'.join(map(str, sys.version_info[:3]))} in {sys.prefix}"
    if sys.version_info < MIN_PYTHON:
        return Check("Python", Level.MISSING, found, "make the environment with Python 3.12 or newer")
    if trouble := cut_at_a_space(sys.executable):
        return Check("Python", Level.MISSING, trouble, "install into a folder whose path has none")
    return Check("Python", Level.OK, found)


def _gym() -> Check:
    name = "NeMo Gym"
    try:
        version = importlib.metadata.version("nemo-gym")
    except importlib.metadata.PackageNotFoundError:
        return Check(name, Level.MISSING, "not installed", "pip install nemo-gym")
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) >= MIN_GYM:
        return Check(name, Level.OK, version)
    return Check(name, Level.MISSING, version, "pip install --upgrade nemo-gym")


def _runtime(runtime: Runtime | None) -> Check:
    name = "Container runtime"
    if runtime is None:
        return Check(name, Level.MISSING, "no apptainer", f"{_SETUP} (on Debian), or {INSTALL_HINT}")
    if runtime.flavor != "apptainer":
        found = f"SingularityCE {runtime.version_text}, {runtime.path}: untested, only Apptainer is"
        if runtime.version < SINGULARITY_WITH_AUTHFILE:
            found += "; before 4.1 it knows no --authfile, and pulls and builds no images"
        return Check(name, Level.WARN, found, f"{_SETUP} (on Debian), or {INSTALL_HINT}")
    extra = "".join(f", with {key}={value}" for key, value in runtime.env.items())
    return Check(name, Level.OK, f"{runtime.flavor} {runtime.version_text}, {runtime.path}{extra}")


def user_namespaces_check(attempt: UserNamespaceProbe) -> Check:
    """The finding about user namespaces."""
    name = "User namespaces"
    if attempt.step is ProbeStep.DONE:
        return Check(name, Level.OK, "can be made")
    found = "can't be made" if attempt.step is ProbeStep.MAKE else "can be made, but give no rights"
    fix = _administrator("; ".join(remedies(attempt)))
    return Check(name, Level.MISSING, f"{found}: sandboxes can't run, also not with a setuid Apptainer", fix)


def container_check() -> Check:
    """The finding about the container around this process, where that is made with a user namespace."""
    name = "Container"
    ids = "one id" if has_single_id() else "several ids"
    found = f"in a user namespace with {ids}, as in containers of enroot, Pyxis and Apptainer"
    if (hidden := overmounts()) and not namespace_without_overmounts():
        fix = (
            "be root in the container, who can take that away for sandboxes (Pyxis: --container-remap-root, enroot: "
            "--root), or do without the devices whose drivers do it (NVIDIA_VISIBLE_DEVICES=void, "
            "MELLANOX_VISIBLE_DEVICES=void)"
        )
        if not any(place.startswith("/proc/") for place in hidden):
            found += f", which covers {', '.join(hidden)}: the runtime makes sandboxes, and they see its /sys"
            return Check(name, Level.WARN, found, fix)
        return Check(
            name, Level.MISSING, f"{found}, which covers {', '.join(hidden)}: the kernel gives no sandbox a /proc", fix
        )
    if is_machine_root_in_namespace():
        fix = "start the server outside of the namespace, or as an ordinary user"
        return Check(
            name, Level.WARN, f"{found}; the machine's root there, whose processes the kernel does not count", fix
        )
    return Check(name, Level.OK, f"{found}; each sandbox has one user")


def selinux_check(enforcing: str) -> Check | None:
    """The finding about SELinux, by the text of :data:`SELINUX`; nothing is said of one that refuses nothing."""
    if enforcing.strip() != "1":
        return None
    found = "enforcing: sandboxes are untested under it, and have the server's label, which confines them no further"
    fix = "where sandboxes fail, 'ausearch -m avc -ts recent' says what was denied"
    return Check("SELinux", Level.WARN, found, _administrator(fix))


def _image(name: str, image: Path | None) -> Check:
    return Check(name, Level.OK, str(image)) if image else Check(name, Level.MISSING, "not built", _SETUP)


def _sandbox(runtime: Runtime, image: Path) -> Check:
    name = "Sandbox"
    try:
        said, slow = asyncio.run(_try_sandbox(runtime, image))
    except InfrastructureError as error:
        return Check(name, Level.MISSING, error.reason, "what the message asks for")
    if slow:
        fix = "nothing to do: it only takes longer; to make them directly, root needs Linux 5.19, others 5.12"
        return Check(name, Level.WARN, f"{said}; sandboxes are made by the runtime: {slow}", fix)
    return Check(name, Level.OK, f"{said}; sandboxes are made directly")


async def _try_sandbox(runtime: Runtime, image: Path) -> tuple[str, str]:
    """Start one by way of a supervisor, as servers do, and use it; returns how that went, and why not faster.

    Raises:
        InfrastructureError: it can't be had, or is not as it should be.
    """
    await Link.get()
    took_ms = []
    # What is learnt of an image with its first sandbox, the next ones need not ask again.
    for _ in range(2):
        began = time.monotonic()
        async with await Container.start(ContainerSpec(image=image), runtime) as sandbox:
            done = await sandbox.run(PROBE)
            took_ms.append((time.monotonic() - began) * 1000)
    system, *devices = done.stdout.splitlines() or [""]
    if done.exit_code:
        raise InfrastructureError(f"a command failed in it: {_last_line(done.stderr)}")
    # A kernel with tunnel modules puts their idle devices into every new namespace.
    if any(device.strip().startswith(("eth", "en", "wl")) for device in devices):
        raise InfrastructureError(f"it has network devices: {' '.join(devices)}")
    first, second = took_ms
    said = f"{system}; first command after {first:.0f} ms, in the next one after {second:.0f} ms; writable, no network"
    return said, sandbox.fallback_reason


def _fuse() -> Check:
    name = "FUSE"
    device = Path("/dev/fuse")
    if not device.exists():
        return Check(name, Level.WARN, "no /dev/fuse: use unpacked images", _administrator("modprobe fuse"))
    if os.access(device, os.R_OK | os.W_OK):
        return Check(name, Level.OK, "/dev/fuse is usable")
    return Check(
        name,
        Level.WARN,
        "/dev/fuse is not ours to use: SIF images can't be mounted, unpacked ones can",
        _administrator("chmod 0666 /dev/fuse"),
    )


def _limits() -> Check:
    granted = cgroups.probe_delegation()
    controllers = granted.controllers if granted else frozenset()
    return limits_check(enforced_limits(HostFacts.of_host(controllers)))


def limits_check(found: Sequence[Limit]) -> Check:
    """The finding about the limits of sandboxes."""
    name = "Sandbox limits"
    kept = "enforced: " + ", ".join(
        f"{limit.name} ({limit.mechanism})" for limit in found if limit.enforcement is Enforcement.KERNEL
    )
    weak = weak_limits(found)
    if not weak:
        return Check(name, Level.OK, kept)
    # The size of an overlay is watched everywhere; nothing is to be done about that.
    level = (
        Level.OK
        if all(limit.name == "disk" for limit in found if limit.enforcement is not Enforcement.KERNEL)
        else Level.WARN
    )
    return Check(name, level, f"{kept}; {weak}", cgroup_remedy_here() if level is Level.WARN else "")


def _image_source() -> Check:
    name = "Source of images"
    if not debian.missing_tools():
        return Check(name, Level.OK, "apt: no container registry is needed")
    return Check(
        name,
        Level.WARN,
        "no apt: the default image is built from docker.io",
        "nothing to do if docker.io can be reached",
    )


def _open_files() -> Check:
    name = "Open files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = open_files_needed(ROLLOUTS)
    enough = hard == resource.RLIM_INFINITY or hard >= need
    limit = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    raised = "" if soft == hard else f" (now {soft:,}, our servers raise it)"
    found = f"limit {limit}{raised}; {ROLLOUTS:,} rollouts at once need {need:,}"
    if enough:
        return Check(name, Level.OK, found)
    fix = f"a hard limit of {need} (nofile in limits.conf, LimitNOFILE of a service)"
    return Check(name, Level.WARN, found, _administrator(fix))


def _uv() -> Check:
    name = "uv"
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if found := shutil.which("uv", path=search):
        return Check(name, Level.OK, found)
    return Check(name, Level.WARN, "not found: NeMo Gym makes its servers' environments with it", "pip install uv")


def _disk() -> Check:
    name = "Cache folder"
    folder = cache_dir()
    present = next(path for path in (folder, *folder.parents) if path.exists())
    free_gb = shutil.disk_usage(present).free / 1e9
    found = f"{folder}, {free_gb:.0f} GB free"
    if not present.is_dir() or not os.access(present, os.W_OK):
        return Check(name, Level.MISSING, f"{folder} can't be written", "set PRORL_CACHE to a folder of yours")
    if free_gb < COMFORTABLE_DISK_GB:
        return Check(name, Level.WARN, found, "set PRORL_CACHE to a folder on a bigger disk")
    return Check(name, Level.OK, found)


def _state() -> Check:
    name = "State folder"
    try:
        folder = state_dir.state_root()
    except OSError as error:
        return Check(name, Level.MISSING, str(error), _STATE)
    return state_check(str(folder), filesystem_type(folder), shutil.disk_usage(folder).free)


def state_check(folder: str, kind: str, free: int) -> Check:
    """The finding about the folder that sandboxes write in, on a disk of that kind with so many bytes free."""
    name = "State folder"
    found = f"{folder}, {kind}, {free / 1e9:.0f} GB free"
    if is_in_memory(kind):
        each = ContainerSpec(image=Path()).disk_mib * 2**20 / 1e9
        found += f": what sandboxes write takes memory, up to {each:.0f} GB each unless disk_mib says otherwise"
        return Check(name, Level.WARN, found, _STATE)
    return Check(name, Level.OK, found)


def _administrator(fix: str) -> str:
    """A way to mend something that takes root's rights, for whoever reads it."""
    return fix if is_machine_root() else f"your administrator can: {fix}"


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2] or "no message"
