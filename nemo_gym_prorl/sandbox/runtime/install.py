# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Install a private, rootless Apptainer on machines without one.

Debian's ``apptainer`` package is unpacked into the cache, with its dependencies. The package's programs may need a
newer C library than the machine's, so the programs are patched to load the C library that was unpacked with them. The
patched programs contain its path, so after a move of the cache folder the private copy is built again.

``pinned.json`` lists one version of each package with its SHA-256. Debian's mirrors have these versions while they are
current, and Debian's snapshot archive keeps them. A package with another checksum is refused. So mirrors and network
need not be trusted, and neither apt nor its keys are needed. The tool that patches, patchelf, is one of the packages.

Invariants: a folder with the final name is complete, and its ``apptainer`` has run once. The folder with ``apptainer``
contains no other program, so this folder on PATH hides none.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.images import build_tools
from nemo_gym_prorl.sandbox.images.entries import Entries, Progress, machine
from nemo_gym_prorl.sandbox.runtime import debian
from nemo_gym_prorl.sandbox.runtime.apptainer import (
    INSTALL_HINT,
    MARKER,
    Runtime,
    find_runtime,
    parse_version,
    private_prefix,
    require_runtime,
)


ARCHIVE = "http://deb.debian.org/debian"
SNAPSHOT = "https://snapshot.debian.org/archive/debian"

DOWNLOAD_TIMEOUT_S = 30.0
"""Seconds without data from a mirror after which a download fails."""

PARALLEL_DOWNLOADS = 6  # the packages are small, so latency would dominate a sequential download

STEP_TIMEOUT_S = 60.0
"""Time limit of a program that only uses local files."""

RUNTIME_PROGRAMS = ("fuse2fs", "unsquashfs", "mksquashfs", "fuse-overlayfs", "squashfuse", "squashfuse_ll")
"""Programs that Apptainer starts for image files and overlays."""


def ensure_runtime(progress: Progress) -> Runtime:
    """Return the machine's Apptainer; install a private copy in the cache if there is none.

    Raises:
        InfrastructureError: this machine has no runtime and can't install one; the message names other ways.
    """
    if runtime := find_runtime():
        return runtime
    prefix = private_prefix()
    entries = Entries(prefix.parent)
    # An entry that does not work was built for another path, before its cache folder was moved.
    with entries.making(prefix.name, progress, is_valid=lambda: find_runtime() is not None) as work:
        if work is not None:
            entries.publish(_install(prefix, work, progress), prefix.name)
    return require_runtime()


def _install(prefix: Path, work: Path, progress: Progress) -> Path:
    archives = _packages(work, progress)
    progress(f"unpacking {len(archives)} packages")
    built = work / "prefix"
    debian.unpack(archives, built)
    _arrange(built)
    progress("linking the programs to their own C library")
    _patch(built, prefix)
    progress("checking that it runs")
    _finish(built, prefix)
    return built


def _packages(work: Path, progress: Progress) -> list[Path]:
    if missing := [tool for tool in debian.missing_tools() if tool != "apt-get"]:
        raise InfrastructureError(f"the private Apptainer needs {', '.join(missing)} on PATH; or {INSTALL_HINT}")
    listed = json.loads((resources.files("nemo_gym_prorl.sandbox.runtime") / "pinned.json").read_text())
    if machine() not in listed["packages"]:
        raise InfrastructureError(f"the private Apptainer is not available for {machine()}: {INSTALL_HINT}")
    (work / "apt").mkdir()
    mirrors = (ARCHIVE, f"{SNAPSHOT}/{listed['snapshot']}")
    try:
        return fetch_pinned(listed["packages"][machine()], mirrors, work / "apt", progress)
    except InfrastructureError as error:
        raise InfrastructureError(f"{error.reason}; try again, or {INSTALL_HINT}") from error


def _arrange(built: Path) -> None:
    """Move the programs that Apptainer runs to the folder where Apptainer searches; remove all other programs."""
    starter = _one(built, "usr/lib/*/apptainer/bin/starter")
    binaries = built / "usr" / "bin"
    # Apptainer searches the folder of its starter before PATH.
    for name in RUNTIME_PROGRAMS:
        (binaries / name).rename(starter.parent / name)
    for entry in binaries.iterdir():
        if entry.name not in ("apptainer", "patchelf"):
            entry.unlink()
    # newuidmap and newgidmap were unpacked without setuid and would fail. Without these programs Apptainer maps only
    # root, which is enough.
    for name in ("usr/sbin", "usr/libexec", "usr/share"):
        shutil.rmtree(built / name, ignore_errors=True)
    # Apptainer's starter looks for its files below usr/lib, and its command line looks below usr.
    for name, target in {
        "usr/lib/etc": "../../etc",
        "usr/lib/var": "../../var",
        "usr/lib/bin": "../bin",
        "usr/etc": "../etc",
        "usr/var": "../var",
    }.items():
        (built / name).symlink_to(target)
    (built / "var/lib/apptainer/mnt/session").mkdir(parents=True, exist_ok=True)


def _patch(built: Path, prefix: Path) -> None:
    """Make the programs in ``built`` load the C library in ``prefix``, to which ``built`` will be renamed."""
    starter = _one(built, "usr/lib/*/apptainer/bin/starter")
    libraries = starter.parent.parent.parent
    loader = _one(built, f"usr/lib/{libraries.name}/ld-linux-*.so.*")
    final = prefix / "usr" / "lib" / libraries.name
    command = ["--set-interpreter", str(final / loader.name), "--force-rpath", "--set-rpath", str(final)]
    programs = [built / "usr" / "bin" / "apptainer", *starter.parent.iterdir()]
    _run_by_loader(built, "patchelf", *command, *map(str, programs))
    (built / "usr" / "bin" / "patchelf").unlink()


def _run_by_loader(built: Path, program: str, *arguments: str) -> str:
    """Run a program by the loader in ``built``: the machine's C library may be too old for the program, and a patched
    program looks for its loader in the final path."""
    loader = _one(built, "usr/lib/*/ld-linux-*.so.*")
    path = built / "usr" / "bin" / program
    return build_tools.run(
        [str(loader), "--library-path", str(loader.parent), str(path), *arguments], None, STEP_TIMEOUT_S
    )


def _finish(built: Path, prefix: Path) -> None:
    """Check that the Apptainer in ``built`` runs, then write the marker of a complete private copy."""
    try:
        version = parse_version(output := _run_by_loader(built, "apptainer", "--version"))
    except InfrastructureError as error:
        version, output = None, error.reason
    if version is None:
        raise InfrastructureError(f"the private Apptainer does not run ({output}): {INSTALL_HINT}")
    (built / MARKER).write_text(json.dumps({"prefix": str(prefix), "version": version}))


def _one(root: Path, pattern: str) -> Path:
    """Return the only match of ``pattern``, whose wildcards stand for names of the architecture in Debian's layout."""
    found = sorted(root.glob(pattern))
    if not found:
        raise InfrastructureError(f"the unpacked apptainer package lacks {pattern}: {INSTALL_HINT}")
    return found[0]


def fetch_pinned(packages: Mapping[str, str], mirrors: Sequence[str], work: Path, progress: Progress) -> list[Path]:
    """Download packages, given as SHA-256 by path in Debian's archive, into ``work``; return the paths of the files.

    Raises:
        InfrastructureError: no mirror has a package with the pinned checksum; quotes the error of each mirror.
    """
    progress(f"downloading {len(packages)} packages")
    with ThreadPoolExecutor(PARALLEL_DOWNLOADS) as pool:
        asked = [pool.submit(_fetch, path, checksum, mirrors, work) for path, checksum in packages.items()]
    return [each.result() for each in asked]


def _fetch(path: str, checksum: str, mirrors: Sequence[str], work: Path) -> Path:
    reasons = []
    for mirror in mirrors:
        url = f"{mirror.rstrip('/')}/{path}"
        try:
            with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as answer:  # HTTP: the checksum authenticates
                data = answer.read()
        # URLError covers errors before the response; an interrupted download raises another OSError.
        except (OSError, urllib.error.URLError) as error:
            reasons.append(f"{url}: {error}")
            continue
        if hashlib.sha256(data).hexdigest() != checksum:
            reasons.append(f"{url}: SHA-256 is not the pinned one")
            continue
        target = work / path.rpartition("/")[2]
        target.write_bytes(data)
        return target
    raise InfrastructureError(f"a package of Apptainer can't be downloaded: {'; '.join(reasons)}")
