# SPDX-License-Identifier: Apache-2.0
"""What this machine has of what rollouts need, what it lacks, and how to get that.

Each check is data: what was looked at, what was found, how good that is, and the way to mend it. Where it can, a check
does the thing itself instead of reading settings that should allow it: whether a rootless container can be started
depends on half a dozen kernel, distribution and container settings, and starting one asks them all. Nothing that is
tried here stays.
"""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from nemo_gym_prorl import open_files
from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox import cgroup, debian
from nemo_gym_prorl.sandbox.cache import cache_dir
from nemo_gym_prorl.sandbox.image import default_image_path, try_image
from nemo_gym_prorl.sandbox.limits import DELEGATE, By, Facts, Limit, limits, shortcomings
from nemo_gym_prorl.sandbox.runtime import HOW_TO_GET_IT, Runtime, find_runtime


MIN_PYTHON = (3, 12)
MIN_GYM = (0, 4)
COMFORTABLE_DISK_GB = 5.0
"""Free space of the cache folder below which a warning is due: set-up takes 0.6 GB, task images and overlays more."""

ROLLOUTS = 1_000
"""Rollouts at once for which the limit of open files is judged."""

PROBE_TIMEOUT_S = 60.0
_SETUP = "prorl setup"


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
    """All checks in order, each made when it is asked for. Takes about 2 s."""
    yield _python()
    yield _gym()
    runtime = find_runtime()
    yield _runtime(runtime)
    yield _user_namespaces()
    image = default_image_path()
    yield _image(image)
    if runtime and image.is_dir():
        yield _container(runtime, image)
        yield _writable_layer(runtime, image)
        yield _no_network(runtime, image)
    yield _fuse()
    yield _limits()
    yield _image_source()
    yield _open_files()
    yield _uv()
    yield _disk()


def _python() -> Check:
    found = f"{'.'.join(map(str, sys.version_info[:3]))} in {sys.prefix}"
    if sys.version_info >= MIN_PYTHON:
        return Check("Python", Level.OK, found)
    return Check("Python", Level.MISSING, found, "make the environment with Python 3.12 or newer")


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
        return Check(name, Level.MISSING, "no apptainer or singularity", f"{_SETUP} (on Debian), or {HOW_TO_GET_IT}")
    extra = "".join(f", with {key}={value}" for key, value in runtime.env.items())
    return Check(name, Level.OK, f"{runtime.flavor} {runtime.version_text}, {runtime.path}{extra}")


def _user_namespaces() -> Check:
    name = "User namespaces"
    probe = [sys.executable, "-c", "import os; os.unshare(os.CLONE_NEWUSER)"]
    if subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0:
        return Check(name, Level.OK, "can be made")
    return Check(
        name,
        Level.WARN,
        "can't be made: containers then need an Apptainer installed with setuid",
        _administrator(
            "sysctl kernel.unprivileged_userns_clone=1 user.max_user_namespaces=15000 "
            "kernel.apparmor_restrict_unprivileged_userns=0 (those that the machine has)"
        ),
    )


def _image(image: Path) -> Check:
    name = "Default image"
    return Check(name, Level.OK, str(image)) if image.is_dir() else Check(name, Level.MISSING, "not built", _SETUP)


def _container(runtime: Runtime, image: Path) -> Check:
    name = "Container"
    rootless = "root" if os.geteuid() == 0 and not runtime.env else "rootless"
    try:
        said = try_image(image, runtime)
    except InfrastructureError as error:
        return Check(name, Level.MISSING, error.reason, "see 'User namespaces'; the runtime's own message says more")
    return Check(name, Level.OK, f"{rootless}; inside: {', '.join(said.splitlines())}")


def _writable_layer(runtime: Runtime, image: Path) -> Check:
    name = "Writable layer"
    script = "touch /prorl-probe && df -m / | awk 'NR == 2 { print $2 }'"
    done = _in_container(runtime, image, ["--writable-tmpfs"], script)
    if done.returncode == 0:
        return Check(name, Level.OK, f"tmpfs overlay, {done.stdout.strip()} MiB at most")
    return Check(
        name,
        Level.WARN,
        f"no tmpfs overlay: {_last_line(done.stderr)}",
        _administrator("a kernel with overlayfs in user namespaces (5.11 or newer), or the package fuse-overlayfs"),
    )


def _no_network(runtime: Runtime, image: Path) -> Check:
    name = "No-network sandbox"
    options = ["--net", "--network", "none"] + ([] if os.geteuid() == 0 else ["--fakeroot"])
    done = _in_container(runtime, image, options, "cut -d: -f1 -s /proc/net/dev")
    inside = done.stdout.split()
    # A kernel with tunnel modules puts their idle devices into every new namespace.
    if done.returncode == 0 and "lo" in inside and not any(name.startswith(("eth", "en", "wl")) for name in inside):
        return Check(name, Level.OK, "sandboxes can be cut off from the network")
    return Check(
        name,
        Level.WARN,
        _last_line(done.stderr) if done.returncode else f"devices inside: {' '.join(inside)}",
        _administrator("'allow net networks' and user namespaces in apptainer.conf"),
    )


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
    granted = cgroup.delegation()
    controllers = granted.controllers if granted else frozenset()
    return limits_check(limits(Facts.here(controllers)))


def limits_check(found: Sequence[Limit]) -> Check:
    """The finding about the limits of sandboxes."""
    name = "Sandbox limits"
    kept = "enforced: " + ", ".join(f"{limit.name} ({limit.how})" for limit in found if limit.by is By.KERNEL)
    weak = shortcomings(found)
    if not weak:
        return Check(name, Level.OK, kept)
    # The size of an overlay is watched everywhere; nothing is to be done about that.
    level = Level.OK if all(limit.name == "disk" for limit in found if limit.by is not By.KERNEL) else Level.WARN
    return Check(name, level, f"{kept}; {weak}", DELEGATE if level is Level.WARN else "")


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
    need = open_files.needed(ROLLOUTS)
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


def _in_container(runtime: Runtime, image: Path, options: list[str], script: str) -> subprocess.CompletedProcess[str]:
    command = [str(runtime.path), "exec", "--containall", *options, str(image), "sh", "-c", script]
    try:
        return subprocess.run(
            command,
            env=runtime.environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer in {PROBE_TIMEOUT_S:g} s")


def _administrator(fix: str) -> str:
    """A way to mend something that takes root's rights, for whoever reads it."""
    return fix if os.geteuid() == 0 else f"your administrator can: {fix}"


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2] or "no message"
