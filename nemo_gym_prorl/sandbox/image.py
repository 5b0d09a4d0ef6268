# SPDX-License-Identifier: Apache-2.0
"""The default sandbox image: a small Linux with bash, Python and git, for tasks that bring no image of their own.

It is an *unpacked root folder*, not an image file: a folder starts fastest, and needs no FUSE, which many machines
keep from ordinary users. Where apt is at hand it is made of the machine's own distribution's packages, in seconds and
with no container registry; elsewhere Apptainer builds it from a public image. Either way Apptainer has the last hand:
a bare root folder can be executed in, but only one that has Apptainer's own scripts can be started as an instance.

Its folder's name holds a hash of everything that decides what is in it, so that a changed recipe makes a new image and
never a half-changed old one. A folder with that name is complete: it was started and tried out before it got the name.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox import debian
from nemo_gym_prorl.sandbox.cache import Progress, cache_dir, machine
from nemo_gym_prorl.sandbox.runtime import Runtime, require_runtime
from nemo_gym_prorl.sandbox.store import tool
from nemo_gym_prorl.sandbox.store.shelf import Shelf


PACKAGES = (
    *("base-files", "base-passwd", "ncurses-base"),
    *("bash", "dash", "coreutils", "util-linux", "debianutils", "hostname", "login", "procps"),
    *("findutils", "grep", "sed", "mawk", "diffutils", "patch", "less", "gzip", "tar"),
    *("python3", "git", "ca-certificates"),
)

LINKS = {
    "usr/bin/awk": "mawk",
    "usr/bin/which": "which.debianutils",
    "usr/bin/pager": "less",
    "usr/bin/python": "python3",
}
"""What the packages' own set-up scripts would have linked, and ``python``, which models like to call."""

DROPPED = ("boot", "usr/share/doc", "usr/share/info", "usr/share/locale", "usr/share/man")

REGISTRY_RECIPE = """\
Bootstrap: docker
From: docker.io/library/python:3.12-slim

%post
    apt-get update
    apt-get install -y --no-install-recommends git procps patch less gawk ca-certificates
    rm -rf /var/lib/apt/lists/*
"""

TRIAL = """
set -e
for tool in awk bash cat diff find git grep less patch ps python sed tar which; do command -v $tool >/dev/null; done
git --version
python3 -c 'import json, ssl, sqlite3, subprocess'
python3 --version
"""
"""Run by bash in the fresh image; any failure means that the image is not published."""

TRIAL_TIMEOUT_S = 120.0
BUILD_TIMEOUT_S = 1800.0
"""For Apptainer's own build, which downloads some 200 MB from a public registry."""

_RECIPE_VERSION = 2


def default_image_path() -> Path:
    """Where the default image lies, or would lie: the path to give as the image of a sandbox."""
    recipe = json.dumps([_RECIPE_VERSION, PACKAGES, sorted(LINKS.items()), DROPPED, REGISTRY_RECIPE, TRIAL])
    key = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    return cache_dir() / "images" / f"default-{machine()}-{key}"


def ensure_default_image(progress: Progress) -> Path:
    """Build the default image unless it is there. About 10 s with apt; at once afterwards.

    Raises:
        InfrastructureError: no runtime, or no way to build worked; the message says why for each way tried.
    """
    image = default_image_path()
    if image.is_dir():
        return image
    runtime = require_runtime()
    shelf = Shelf(image.parent)
    with shelf.making(image.name, progress) as work:
        if work is not None:
            shelf.publish(_build(work, runtime, progress), image.name)
    return image


def try_image(image: Path, runtime: Runtime) -> str:
    """Start a container of the image, see that every tool answers, and return what was said.

    Raises:
        InfrastructureError: the container does not start, or something is missing in it.
    """
    command = [str(runtime.path), "exec", "--containall", str(image), "bash", "-c", TRIAL]
    return tool.run(command, runtime.environ(), TRIAL_TIMEOUT_S)


def packages_root(packages: Sequence[str], work: Path, progress: Progress) -> Path:
    """A root folder in ``work`` made of packages of the machine's distribution; no program of theirs has run.

    Raises:
        InfrastructureError: they can't be had; with apt's own words.
    """
    (work / "apt").mkdir()
    archives = debian.fetch(packages, debian.host_sources(), work / "apt", progress)
    progress(f"unpacking {len(archives)} packages")
    root = work / "packages"
    debian.unpack(archives, root)
    _finish(root)
    return root


def _build(work: Path, runtime: Runtime, progress: Progress) -> Path:
    """Try the ways to build in order; the first that gives a working image wins."""
    ways: list[tuple[str, Callable[[Path, Runtime, Progress], Path]]] = [("registry", _build_from_registry)]
    if not debian.missing_tools():
        ways.insert(0, ("packages", _build_from_packages))
    reasons = []
    for name, build in ways:
        place = work / name
        place.mkdir()
        try:
            root = build(place, runtime, progress)
            progress("trying it out")
            try_image(root, runtime)
        except InfrastructureError as error:
            reasons.append(f"{name}: {error.reason}")
            continue
        return root
    raise InfrastructureError("the default sandbox image could not be built; " + "; ".join(reasons))


def _build_from_packages(work: Path, runtime: Runtime, progress: Progress) -> Path:
    root = packages_root(PACKAGES, work, progress)
    progress(f"making an {runtime.flavor} image of it")
    return _runtime_build(work, runtime, str(root))


def _build_from_registry(work: Path, runtime: Runtime, progress: Progress) -> Path:
    progress("building from a public image")
    recipe = work / "image.def"
    recipe.write_text(REGISTRY_RECIPE)
    return _runtime_build(work, runtime, str(recipe))


def _runtime_build(work: Path, runtime: Runtime, source: str) -> Path:
    image = work / "image"
    tool.runtime_build(runtime, work, source, image, timeout_s=BUILD_TIMEOUT_S, unpacked=True)
    return image


def _finish(root: Path) -> None:
    """Do by hand the little that matters of what the packages' set-up scripts would do."""
    for name in ("passwd", "group"):
        shutil.copyfile(root / "usr/share/base-passwd" / f"{name}.master", root / "etc" / name)
    for link, target in LINKS.items():
        path = root / link
        if not path.is_symlink() and (path.parent / target).exists():
            path.symlink_to(target)
    certificates = sorted((root / "usr/share/ca-certificates").rglob("*.crt"))
    bundle = root / "etc/ssl/certs/ca-certificates.crt"
    bundle.parent.mkdir(parents=True, exist_ok=True)
    bundle.write_text("".join(path.read_text() for path in certificates))
    for name in DROPPED:
        shutil.rmtree(root / name, ignore_errors=True)
