# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Download and unpack Debian packages, without root and without touching the machine's package state.

The private Apptainer and the base ``apt:`` of images are folders of unpacked packages. Invariants:

- apt reads the machine's sources, keys and proxy settings, and writes only to the caller's folder, with an *empty*
  status file, so that apt downloads all dependencies.
- Unpacked files belong to the caller, are readable by all, and have no setuid or setgid bit. No maintainer script
  runs. A setuid program in a cache folder would give its owner's rights to every user.

The base ``apt:`` is a small Linux made of packages of the machine's own distribution, without a container registry.
Unpacking runs no program of a package, so it needs neither root nor a container. The image has no package database, so
``dpkg`` and ``apt`` do not work in it. Its ``su`` asks for no password, since only root of a sandbox can use ``su``.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import stat
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.images import build_tools
from nemo_gym_prorl.sandbox.images.entries import Progress


APT_TIMEOUT_S = 600.0
"""Time limit of one apt call, for slow mirrors."""

_TOOLS = ("apt-get", "dpkg-deb", "tar")


def distribution() -> str:
    """Return ``ID`` of ``os-release``, e.g. ``debian``; empty if unknown."""
    try:
        return platform.freedesktop_os_release().get("ID", "")
    except OSError:
        return ""


def missing_tools() -> list[str]:
    """Return the programs that this module needs and that are not on PATH; Debian and Ubuntu have all of them."""
    return [tool for tool in _TOOLS if shutil.which(tool) is None]


def unpack(archives: Iterable[Path], root: Path) -> None:
    """Unpack packages into ``root`` in the merged-/usr layout, in which ``bin`` is a symlink to ``usr/bin``.

    Raises:
        InfrastructureError: a package can't be unpacked.
    """
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        if not (root / name).is_symlink():
            (root / name).symlink_to(f"usr/{name}")
    for archive in archives:
        with subprocess.Popen(
            ["dpkg-deb", "--fsys-tarfile", archive], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        ) as reader:
            tar = ["tar", "-x", "-f", "-", "-C", str(root), "--keep-directory-symlink", "--no-same-owner"]
            writer = subprocess.run(tar, stdin=reader.stdout, capture_output=True, text=True, check=False)
        if reader.returncode or writer.returncode:
            raise InfrastructureError(f"{archive.name} could not be unpacked: {writer.stderr[-800:]}")
    _normalize_modes(root)


def _normalize_modes(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        if path.is_symlink():
            continue
        mode = stat.S_IMODE(path.lstat().st_mode)
        wanted = (mode | 0o644) & ~0o6000
        if path.is_dir() or mode & 0o111:
            wanted |= 0o111
        if wanted != mode:
            path.chmod(wanted)


def _private_apt(work: Path) -> Path:
    for folder in ("lists/partial", "cache/archives/partial", "dpkg"):
        (work / folder).mkdir(parents=True)
    (work / "dpkg" / "status").touch()
    settings = {
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::State": work,
        "Dir::State::lists": work / "lists",
        "Dir::State::status": work / "dpkg" / "status",
        "Dir::Cache": work / "cache",
        "Dir::Log": work,
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
        "Acquire::http::Timeout": "30",
        "APT::Sandbox::User": "",  # apt's own user can't write to the caller's folder
        "APT::Get::Assume-Yes": "true",
    }
    # Hooks of the machine, such as in Docker's images, clean the machine's own cache.
    hooks = ("APT::Update::Pre-Invoke", "APT::Update::Post-Invoke", "APT::Update::Post-Invoke-Success")
    lines = [*(f"#clear {hook};" for hook in hooks), *(f'{name} "{value}";' for name, value in settings.items())]
    config = work / "apt.conf"
    config.write_text("\n".join(lines) + "\n")
    return config


def _apt(do: str, *arguments: str | Path) -> None:
    if missing := missing_tools():
        raise InfrastructureError(f"{', '.join(missing)} not found: this needs a Debian-like machine")
    # Errors quote apt's output, which must be in English.
    environ = {**os.environ, "LC_ALL": "C.UTF-8"}
    build_tools.run(["apt-get", do, "-q", *map(str, arguments)], environ, APT_TIMEOUT_S)


PACKAGES = (
    *("base-files", "base-passwd", "ncurses-base", "ncurses-bin"),
    *("bash", "dash", "coreutils", "util-linux", "bsdutils", "debianutils", "hostname", "login", "procps"),
    *("findutils", "grep", "sed", "mawk", "diffutils", "patch", "less", "gzip", "tar"),
    # Compiled Python packages link to the C++ library.
    *("python3", "git", "ca-certificates", "libstdc++6"),
    *("passwd", "adduser", "libpam-runtime", "libc-bin", "perl-base", "sysvinit-utils"),
)

PACKAGE_LINKS = {
    "usr/bin/awk": "mawk",
    "usr/bin/which": "which.debianutils",
    "usr/bin/pager": "less",
    "usr/bin/python": "python3",
}
"""Target by path of symlinks that maintainer scripts would create, and of ``python``, which models often call."""

PACKAGE_COPIES = {
    "usr/share/base-passwd/passwd.master": "etc/passwd",
    "usr/share/base-passwd/group.master": "etc/group",
    "usr/share/base-files/profile": "etc/profile",
    "usr/share/base-files/dot.profile": "root/.profile",
    "usr/share/libc-bin/nsswitch.conf": "etc/nsswitch.conf",
}
"""Target by source of the files that maintainer scripts would copy."""

PACKAGE_FOLDERS = ("mnt", "srv", "opt", "media", "run/lock", "var/mail", "usr/local/bin", "usr/local/lib")
"""Folders that maintainer scripts would create."""

REMOVED_FOLDERS = ("boot", "usr/share/doc", "usr/share/info", "usr/share/locale", "usr/share/man")

_RECIPE_VERSION = 8
"""Version of this module's changes to unpacked packages; part of the identity of the base ``apt:``."""


def base_identity() -> str:
    """Return a text that identifies the base ``apt:``; changes with the distribution and with this module's recipe."""
    made_of = [_RECIPE_VERSION, distribution(), PACKAGES, sorted(PACKAGE_LINKS.items()), REMOVED_FOLDERS]
    return f"apt:{hashlib.sha256(json.dumps(made_of).encode()).hexdigest()}"


def make_root(more: Sequence[str], work: Path, progress: Progress) -> Path:
    """Build a root folder in ``work`` from :data:`PACKAGES` and the packages ``more`` of the machine's distribution.

    Raises:
        InfrastructureError: the packages can't be downloaded (quotes apt) or unpacked.
    """
    config = _private_apt(work / "apt")
    progress("reading the package lists")
    update = ""
    try:
        _apt("update", "-c", config)
    except InfrastructureError as error:  # one broken source of several, which may have no needed package
        update = f"; 'apt-get update' failed: {error.reason}"
    progress("downloading packages")
    try:
        _apt("install", "-c", config, "--no-install-recommends", "--download-only", *PACKAGES, *more)
    except InfrastructureError as error:
        raise InfrastructureError(f"{error.reason}{update or '; are the mirrors reached?'}") from error
    archives = sorted((work / "apt" / "cache" / "archives").glob("*.deb"))
    size = sum(archive.stat().st_size for archive in archives) / 1e6
    progress(f"unpacking {len(archives)} packages, {size:.0f} MB")
    root = work / "packages"
    unpack(archives, root)
    _finish(root)
    return root


def _finish(root: Path) -> None:
    """Make the changes of the packages' maintainer scripts on which programs in the image rely."""
    for name in PACKAGE_FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
    for source, target in PACKAGE_COPIES.items():
        if (root / source).exists():
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / source, root / target)
    for link, target in PACKAGE_LINKS.items():
        path = root / link
        if not path.is_symlink() and (path.parent / target).exists():
            path.symlink_to(target)
    shipped = root / "usr/share/ca-certificates"
    certificates = sorted(shipped.rglob("*.crt"))
    names = "".join(f"{path.relative_to(shipped)}\n" for path in certificates)
    (root / "etc/ca-certificates.conf").write_text(names)  # for update-ca-certificates
    bundle = root / "etc/ssl/certs/ca-certificates.crt"
    bundle.parent.mkdir(parents=True, exist_ok=True)
    bundle.write_text("".join(path.read_text() for path in certificates))
    (root / "etc/pam.d").mkdir(exist_ok=True)
    for kind in ("auth", "account", "password", "session"):
        (root / f"etc/pam.d/common-{kind}").write_text(f"{kind} required pam_permit.so\n")
    for name in REMOVED_FOLDERS:
        shutil.rmtree(root / name, ignore_errors=True)
