# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Command ``prorl doctor``: checks of this machine, of an inference endpoint or of Harbor tasks, each with a fix.

Where possible, a check performs an operation instead of reading settings. For example, the doctor starts a sandbox,
which depends on many settings of kernel, distribution and container. Checks leave no files or processes behind.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nemo_gym_prorl.deployment.venvs import python_path_error
from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.filesystems import filesystem_type, is_in_memory
from nemo_gym_prorl.http.server_process import open_files_needed
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
from nemo_gym_prorl.sandbox.supervisor.client import SupervisorConnection


COMFORTABLE_DISK_GB = 5.0
"""Free space of the cache folder below which the doctor warns: setup takes 0.6 GB, task images and overlays more."""

ROLLOUTS = 1_000
"""Number of concurrent rollouts in one process for which the limit of open files must suffice."""

SELINUX = Path("/sys/fs/selinux/enforce")
"""Kernel file that exists if SELinux is enabled, and contains 1 if SELinux enforces its policy."""

PROBE = ". /etc/os-release; echo $PRETTY_NAME; touch /probe && cut -d: -f1 -s /proc/net/dev"
"""Shell command of the test sandbox: prints the distribution, writes to the root folder, prints network devices."""

_SETUP = "prorl setup"
_STATE = "set PRORL_STATE to a writable folder on a local disk"


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"
    """Rollouts run, but slower, less isolated, or with a feature missing."""
    MISSING = "missing"
    """Rollouts with sandboxes cannot run."""


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check.

    Attributes:
        name: what was checked.
        level: severity of the finding.
        found: the finding.
        fix: how to fix the problem; empty if there is no problem, or no fix.
    """

    name: str
    level: Level
    found: str
    fix: str = ""


def examine() -> Iterator[Check]:
    """Yield the results of this machine's checks; each check runs when its result is requested. An unusable Python
    ends the checks, and a sandbox is started only if earlier checks found no obstacle."""
    python = _python()
    yield python
    if python.level is Level.MISSING:
        return
    yield Check("NeMo Gym", Level.OK, importlib.metadata.version("nemo-gym"))
    runtime = find_runtime()
    yield _runtime(runtime)
    namespaces = user_namespaces_check(UserNamespaceProbe.run())
    yield namespaces
    container = container_check() if in_user_namespace() else None
    if container:
        yield container
    if selinux := selinux_check(SELINUX.read_text() if SELINUX.exists() else ""):
        yield selinux
    image = default_image_path()
    yield _image("Default image", image if image.is_dir() else None)
    if kernel := image_path(KERNEL):  # no finding if missing: a task that needs the image builds it
        yield _image("Image with IPython", kernel)
    unusable = namespaces.level is not Level.OK or (container is not None and container.level is Level.MISSING)
    if runtime and image.is_dir() and not unusable:
        yield _sandbox(runtime, image)
    yield _limits()
    yield _image_source()
    yield _open_files()
    yield _disk()
    yield _state()


def _python() -> Check:
    found = f"{'.'.join(map(str, sys.version_info[:3]))} in {sys.prefix}"
    if not hasattr(os, "memfd_create"):
        found += ", built without os.memfd_create, as for a C library before glibc 2.27"
        return Check("Python", Level.MISSING, found, "create the environment with another build of Python")
    if problem := python_path_error(sys.executable):
        return Check("Python", Level.MISSING, problem, "install into a path without spaces")
    return Check("Python", Level.OK, found)


def _runtime(runtime: Runtime | None) -> Check:
    name = "Container runtime"
    if runtime is None:
        return Check(name, Level.MISSING, "Apptainer not found", f"{_SETUP} (on Debian), or {INSTALL_HINT}")
    extra = "".join(f", with {key}={value}" for key, value in runtime.env.items())
    return Check(name, Level.OK, f"apptainer {runtime.version_text}, {runtime.path}{extra}")


def user_namespaces_check(attempt: UserNamespaceProbe) -> Check:
    """Check, by the result of a probe, whether user namespaces can be created and grant capabilities."""
    name = "User namespaces"
    if attempt.step is ProbeStep.DONE:
        return Check(name, Level.OK, "can be created")
    found = "cannot be created" if attempt.step is ProbeStep.MAKE else "can be created, but give no rights"
    fix = _administrator("; ".join(remedies(attempt)))
    return Check(name, Level.MISSING, f"{found}: sandboxes cannot run, not even with a setuid Apptainer", fix)


def container_check() -> Check:
    """Check the container around this process, which must be in a user namespace other than the initial one."""
    name = "Container"
    ids = "one id" if has_single_id() else "several ids"
    found = f"in a user namespace with {ids}, as in containers of enroot, Pyxis and Apptainer"
    if (hidden := overmounts()) and not namespace_without_overmounts():
        fix = (
            "be root in the container, which lets sandboxes remove the covers (Pyxis: --container-remap-root, "
            "enroot: --root), or start the container without the devices whose drivers add them "
            "(NVIDIA_VISIBLE_DEVICES=void, MELLANOX_VISIBLE_DEVICES=void)"
        )
        if not any(path.startswith("/proc/") for path in hidden):
            found += f", which covers {', '.join(hidden)}: the runtime starts sandboxes, and they see its /sys"
            return Check(name, Level.WARN, found, fix)
        return Check(
            name,
            Level.MISSING,
            f"{found}, which covers {', '.join(hidden)}: the kernel gives no sandbox a /proc",
            fix,
        )
    if is_machine_root_in_namespace():
        fix = "start the server outside of the namespace, or as an unprivileged user"
        return Check(
            name, Level.WARN, f"{found}; mapped to the machine's root, whose processes the kernel does not limit", fix
        )
    return Check(name, Level.OK, f"{found}; each sandbox has one user")


def selinux_check(enforcing: str) -> Check | None:
    """Check SELinux, given the content of the file :data:`SELINUX`; ``None`` unless SELinux enforces its policy."""
    if enforcing.strip() != "1":
        return None
    found = "enforcing: sandboxes are untested with SELinux, and run with the server's label"
    fix = "if sandboxes fail, 'ausearch -m avc -ts recent' shows what was denied"
    return Check("SELinux", Level.WARN, found, _administrator(fix))


def _image(name: str, image: Path | None) -> Check:
    return Check(name, Level.OK, str(image)) if image else Check(name, Level.MISSING, "not built", _SETUP)


def _sandbox(runtime: Runtime, image: Path) -> Check:
    name = "Sandbox"
    try:
        found, slow = asyncio.run(_try_sandbox(runtime, image))
    except InfrastructureError as error:
        return Check(name, Level.MISSING, error.reason, "see the message")
    if slow:
        fix = "optional, sandboxes only start slower: a direct start needs Linux 5.19 for root, 5.12 for other users"
        return Check(name, Level.WARN, f"{found}; started by the runtime: {slow}", fix)
    return Check(name, Level.OK, f"{found}; started directly")


async def _try_sandbox(runtime: Runtime, image: Path) -> tuple[str, str]:
    """Start two sandboxes through a supervisor, as servers do. Return the finding, and why sandboxes were started by
    the container runtime; the reason is empty after a direct start."""
    await SupervisorConnection.get()
    elapsed_ms = []
    # The first start inspects the image, and later starts reuse the result, so the finding has both durations.
    for _ in range(2):
        start = time.monotonic()
        async with await Container.start(ContainerSpec(image=image), runtime) as sandbox:
            done = await sandbox.run(PROBE)
            elapsed_ms.append((time.monotonic() - start) * 1000)
    system, *devices = done.stdout.splitlines() or [""]
    if done.exit_code:
        raise InfrastructureError(f"a command failed in a sandbox: {_last_line(done.stderr)}")
    # Other devices are allowed: kernels with tunnel modules add idle ones such as tunl0 to every network namespace.
    if any(device.strip().startswith(("eth", "en", "wl")) for device in devices):
        raise InfrastructureError(f"a sandbox has network devices: {' '.join(devices)}")
    first, second = elapsed_ms
    found = f"{system}; first command after {first:.0f} ms, in a second sandbox after {second:.0f} ms"
    return f"{found}; writable, no network", sandbox.fallback_reason


def _limits() -> Check:
    granted = cgroups.probe_delegation()
    controllers = granted.controllers if granted else frozenset()
    return limits_check(enforced_limits(HostFacts.of_host(controllers)))


def limits_check(found: Sequence[Limit]) -> Check:
    """Check the limits of sandboxes: warn if the kernel does not enforce a limit other than the disk's."""
    name = "Sandbox limits"
    enforced = "enforced: " + ", ".join(
        f"{limit.name} ({limit.mechanism})" for limit in found if limit.enforcement is Enforcement.KERNEL
    )
    weak = weak_limits(found)
    if not weak:
        return Check(name, Level.OK, enforced)
    # The disk limit is polled on every machine, so there is nothing to fix.
    level = (
        Level.OK
        if all(limit.name == "disk" for limit in found if limit.enforcement is not Enforcement.KERNEL)
        else Level.WARN
    )
    return Check(name, level, f"{enforced}; {weak}", cgroup_remedy_here() if level is Level.WARN else "")


def _image_source() -> Check:
    name = "Source of images"
    if not debian.missing_tools():
        return Check(name, Level.OK, "apt: images are built without a container registry")
    return Check(
        name,
        Level.WARN,
        "no apt: the default image is built from docker.io",
        "make sure that docker.io is reachable",
    )


def _open_files() -> Check:
    name = "Open files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = open_files_needed(ROLLOUTS)
    enough = hard == resource.RLIM_INFINITY or hard >= need
    limit = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    raised = "" if soft == hard else f" (currently {soft:,}; servers raise it)"
    found = f"limit {limit}{raised}; {ROLLOUTS:,} concurrent rollouts need {need:,}"
    if enough:
        return Check(name, Level.OK, found)
    fix = f"raise the hard limit to {need} (nofile in limits.conf, or LimitNOFILE of a service)"
    return Check(name, Level.WARN, found, _administrator(fix))


def _disk() -> Check:
    name = "Cache folder"
    folder = cache_dir()
    present = next(path for path in (folder, *folder.parents) if path.exists())
    free_gb = shutil.disk_usage(present).free / 1e9
    found = f"{folder}, {free_gb:.0f} GB free"
    if not present.is_dir() or not os.access(present, os.W_OK):
        return Check(name, Level.MISSING, f"{folder} is not writable", "set PRORL_CACHE to a writable folder")
    if free_gb < COMFORTABLE_DISK_GB:
        return Check(name, Level.WARN, found, "set PRORL_CACHE to a folder on a larger disk")
    return Check(name, Level.OK, found)


def _state() -> Check:
    name = "State folder"
    try:
        folder = state_dir.state_root()
    except OSError as error:
        return Check(name, Level.MISSING, str(error), _STATE)
    return state_check(str(folder), filesystem_type(folder), shutil.disk_usage(folder).free)


def state_check(folder: str, kind: str, free: int) -> Check:
    """Report the state folder's ``free`` bytes; warn if its file system, of the type ``kind``, is in memory."""
    name = "State folder"
    found = f"{folder}, {kind}, {free / 1e9:.0f} GB free"
    if is_in_memory(kind):
        each = ContainerSpec(image=Path()).disk_mib * 2**20 / 1e9
        found += f": files of sandboxes take memory, up to {each:.0f} GB per sandbox unless disk_mib is set"
        return Check(name, Level.WARN, found, _STATE)
    return Check(name, Level.OK, found)


def _administrator(fix: str) -> str:
    """Return a fix that needs root, addressed to an administrator unless this user is root."""
    return fix if is_machine_root() else f"ask your administrator: {fix}"


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2] or "no message"


_COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.MISSING: "red"}


def show(console: Console, policy: Mapping[str, Any] | None = None, checks: Iterable[Check] | None = None) -> bool:
    """Print the findings and their fixes; return whether rollouts can run, i.e. no level is ``MISSING``.

    Args:
        policy: settings of a :class:`PolicyConfig`, whose engine and tokenizer are checked; ``None`` checks no engine.
        checks: results to print if ``policy`` is ``None``; ``None`` checks this machine.
    """
    # Starting a sandbox logs warnings about limits, which the doctor already reports as a check.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with console.status("checking"):
            if policy is not None:
                checks = asyncio.run(_examine_policy(policy))
            checks = list(examine() if checks is None else checks)
    finally:
        logging.disable(before)
    # Fixes are printed below findings, so that both fit a terminal of 80 columns.
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        colour = _COLOURS[check.level]
        table.add_row(f"[{colour}]{check.level}[/]", check.name, _printable(check.found))
        if check.fix:
            table.add_row("", "", f"[{colour}]→ {_printable(check.fix)}[/]")
    console.print(table)
    return all(check.level is not Level.MISSING for check in checks)


def _printable(text: str) -> str:
    """Escape rich's markup and replace control characters, because an endpoint may send any text."""
    return escape("".join(char if char.isprintable() else " " for char in text))


async def _examine_policy(policy: Mapping[str, Any]) -> list[Check]:
    from nemo_gym_prorl.policy.engine_checks import check_engine  # slow: imports the model server
    from nemo_gym_prorl.policy.runtime import PolicyConfig

    config = PolicyConfig.model_validate(policy)
    return [Check(one.name, Level(one.level), one.found, one.fix) async for one in check_engine(config)]
