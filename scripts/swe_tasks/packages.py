# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Packages for task generation, and the download of their sources.

The packages are pure Python with fast, self-contained tests. Dependencies of pytest are excluded, since the image
would contain a correct copy.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import uv

from nemo_gym_prorl.failures import InfrastructureError


TIMEOUT_S = 900.0  # for downloads over a slow connection

_BACKENDS = (
    "pip>=25",
    "setuptools>=77",
    "setuptools-scm>=8",
    "wheel",
    "hatchling",
    "hatch-vcs",
    "flit-core",
    "poetry-core",
)
"""pip and the build backends that it needs to download source distributions."""

_NOT_OURS = re.compile(r"PKG-INFO|.*\.egg-info|\.git.*")
"""Files that packaging adds to a source distribution."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package with tests.

    Attributes:
        name: name on the package index.
        version: version.
        sha256: hash of the source distribution.
        repo: upstream repository.
        code: glob patterns of source files to mutate.
        tests: arguments of pytest.
    """

    name: str
    version: str
    sha256: str
    repo: str
    code: tuple[str, ...]
    tests: str


PACKAGES = (
    Package(
        "inflection",
        "0.5.1",
        "1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417",
        "jpvanhal/inflection",
        ("inflection/*.py",),
        "test_inflection.py",
    ),
    Package(
        "toolz",
        "1.0.0",
        "2c86e3d9a04798ac556793bced838816296a2f085017664e4995cb40a1047a02",
        "pytoolz/toolz",
        ("toolz/itertoolz.py", "toolz/dicttoolz.py", "toolz/functoolz.py", "toolz/recipes.py"),
        "toolz",
    ),
    Package(
        "tabulate",
        "0.10.0",
        "e2cfde8f79420f6deeffdeda9aaec3b6bc5abce947655d17ac662b126e48a60d",
        "astanin/python-tabulate",
        ("tabulate/__init__.py",),
        "test",
    ),
    Package(
        "sqlparse",
        "0.6.1",
        "ca722573f848ff2d30e40ea30f53a104b7dea7635ea9285891263eb2c58fb6e7",
        "andialbrecht/sqlparse",
        ("sqlparse/*.py", "sqlparse/engine/*.py", "sqlparse/filters/*.py"),
        "tests",
    ),
    Package(
        "boltons",
        "26.2.0",
        "d39cfd15c1a1c3bd4d705c82252fa9edb8e4f5e8cc039f8e39afac7b1b47e92c",
        "mahmoud/boltons",
        (
            "boltons/strutils.py",
            "boltons/dictutils.py",
            "boltons/iterutils.py",
            "boltons/urlutils.py",
            "boltons/setutils.py",
            "boltons/timeutils.py",
        ),
        "tests/test_strutils.py tests/test_dictutils.py tests/test_iterutils.py tests/test_urlutils.py "
        "tests/test_setutils.py tests/test_timeutils.py",
    ),
    Package(
        "parse",
        "1.22.4",
        "706d458feed5a81b02768d3156e8070baf6cee7d150a3a3c0cd43101a875c3b5",
        "r1chardj0n3s/parse",
        ("parse/*.py",),
        "tests",
    ),
    Package(
        "humanize",
        "4.17.0",
        "1d6a36c453dbfbb3f0b34601d2e0b4ce5d48d780305cd45714843f0068fde6ac",
        "python-humanize/humanize",
        ("src/humanize/filesize.py", "src/humanize/number.py", "src/humanize/lists.py"),
        "tests/test_filesize.py tests/test_number.py tests/test_lists.py",
    ),
    Package(
        "simpleeval",
        "1.0.8",
        "b417f869c11f2de034eb919820a825f35d12ce99f63a43971947ce73679eb9ba",
        "danthedeckie/simpleeval",
        ("simpleeval.py",),
        "tests",
    ),
)


def fetch(packages: tuple[Package, ...], folder: Path) -> None:
    """Download missing source distributions into ``folder`` with pip and the user's pip settings.

    pip runs set-up code of the packages.

    Raises:
        InfrastructureError: a download failed, or a hash differs; contains pip's output.
    """
    missing = [package for package in packages if find(package, folder) is None]
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    wanted = folder / "wanted.txt"
    wanted.write_text("".join(f"{one.name}=={one.version} --hash=sha256:{one.sha256}\n" for one in missing))
    environment = folder / "pip"
    for command in (
        [uv.find_uv_bin(), "venv", "--quiet", "--clear", f"--python={sys.executable}", str(environment)],
        [uv.find_uv_bin(), "pip", "install", "--quiet", f"--python={environment}", *_BACKENDS],
        [
            *(str(environment / "bin/python"), "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--no-binary=:all:", "--no-build-isolation", "--require-hashes"),
            *(f"--requirement={wanted}", f"--dest={folder}"),
        ],
    ):
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise InfrastructureError(f"the download of the packages exceeded {TIMEOUT_S:g} s") from error
        if done.returncode:
            raise InfrastructureError(f"the packages could not be downloaded: {done.stderr.strip()[-600:]}")
    shutil.rmtree(environment)


def find(package: Package, folder: Path) -> Path | None:
    """Return a package's source distribution in ``folder``; ``None`` if missing or with another hash."""
    archive = folder / f"{package.name.replace('-', '_')}-{package.version}.tar.gz"
    if not archive.is_file():
        return None
    with archive.open("rb") as file:
        return archive if hashlib.file_digest(file, "sha256").hexdigest() == package.sha256 else None


def unpack(package: Package, folder: Path, target: Path) -> Path:
    """Unpack a package's source distribution to the new folder ``target``, without files added by packaging.

    Raises:
        InfrastructureError: the source distribution is missing.
    """
    archive = find(package, folder)
    if archive is None:
        raise InfrastructureError(f"{package.name} {package.version} was not downloaded to {folder}")
    around = target.with_name(f".{target.name}.unpacked")
    with tarfile.open(archive) as members:
        members.extractall(around, filter="data")
    [top] = around.iterdir()
    for entry in top.iterdir():
        if _NOT_OURS.fullmatch(entry.name):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    top.rename(target)
    around.rmdir()
    return target


def sources(package: Package, tree: Path) -> list[Path]:
    """Return the source files to mutate."""
    return sorted({file for pattern in package.code for file in tree.glob(pattern)})
