# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Download and unpack Debian packages, without root and without touching the machine's package state.

The private Apptainer and the base ``apt:`` of images are folders of unpacked packages. Invariants:

- apt uses a state of its own in the caller's folder, and writes no other files: sources, lists, archives, and an
  *empty* status file, so that apt downloads all dependencies.
- apt checks signatures with the machine's archive keyring, and uses the machine's proxy settings.
- Unpacked files belong to the caller, are readable by all, and have no setuid or setgid bit. No maintainer script
  runs. A setuid program in a cache folder would give its owner's rights to every user.

The base ``apt:`` is a small Linux made of packages of the machine's own distribution, without a container registry.
Unpacking runs no program of a package, so it needs neither root nor a container. This module creates the accounts
that maintainer scripts would create. The image has no package database, so ``dpkg`` and ``apt`` do not work in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.images import build_tools
from nemo_gym_prorl.sandbox.images.entries import Progress


APT_TIMEOUT_S = 600.0
"""Time limit of one apt call, for slow mirrors."""

_ARCHIVE = re.compile(r"/(debian|ubuntu)(-security|-ports)?/?$")
_TOOLS = ("apt-get", "dpkg-deb", "tar")


@dataclass(frozen=True, slots=True)
class AptSource:
    """One line of a sources list: mirror, suite and component."""

    uri: str
    suite: str
    component: str = "main"


def distribution() -> str:
    """Return ``ID`` of ``os-release``, e.g. ``debian``; empty if unknown."""
    try:
        return platform.freedesktop_os_release().get("ID", "")
    except OSError:
        return ""


def missing_tools() -> list[str]:
    """Return the programs that this module needs and that are not on PATH; Debian and Ubuntu have all of them."""
    return [tool for tool in _TOOLS if shutil.which(tool) is None]


def parse_sources(listing: str) -> list[AptSource]:
    """Return the sources with the component ``main`` among lines ``SITE SUITE COMPONENT``, without duplicates: the
    distribution's own archives, or if there are none, those of third parties.

    Raises:
        InfrastructureError: no line has the component ``main``.
    """
    sources = [
        AptSource(fields[0], fields[1])
        for fields in (line.split() for line in listing.splitlines())
        if len(fields) == 3 and fields[2] == "main"
    ]
    if not sources:
        raise InfrastructureError("apt has no package source with a 'main' component: see /etc/apt/sources.list.d")
    unique = list(dict.fromkeys(sources))
    return [source for source in unique if _ARCHIVE.search(source.uri)] or unique


def fetch(packages: Sequence[str], sources: Iterable[AptSource], work: Path, progress: Progress) -> list[Path]:
    """Download packages and their dependencies.

    Args:
        packages: names of packages; recommended packages are left out.
        sources: archives to use.
        work: existing folder for apt's state and a few hundred MB of archives; temporary.
        progress: receives one line for each step.

    Returns:
        The ``.deb`` files.

    Raises:
        InfrastructureError: apt is missing, a mirror is unreachable, or the packages can't be resolved; quotes apt.
    """
    config = _private_apt(sources, work)
    progress("reading the package lists")
    _apt("update", "-c", config)
    progress("downloading packages")
    _apt("install", "-c", config, "--no-install-recommends", "--download-only", *packages)
    archives = sorted((work / "cache" / "archives").glob("*.deb"))
    if not archives:
        raise InfrastructureError(
            "apt downloaded no packages and printed no error: try again, or use a registry's image as the base"
        )
    size = sum(archive.stat().st_size for archive in archives) / 1e6
    progress(f"downloaded {len(archives)} packages, {size:.0f} MB")
    return archives


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


def _private_apt(sources: Iterable[AptSource], work: Path) -> Path:
    for folder in ("lists/partial", "cache/archives/partial", "dpkg"):
        (work / folder).mkdir(parents=True)
    status = work / "dpkg" / "status"
    status.touch()
    keyring = Path(f"/usr/share/keyrings/{distribution()}-archive-keyring.gpg")
    signed_by = f" [signed-by={keyring}]" if keyring.exists() else ""
    listing = work / "sources.list"
    listing.write_text("".join(f"deb{signed_by} {s.uri} {s.suite} {s.component}\n" for s in sources))
    settings = {
        "Dir::Etc::sourcelist": listing,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::State": work,
        "Dir::State::lists": work / "lists",
        "Dir::State::status": status,
        "Dir::Cache": work / "cache",
        "Dir::Log": work,
        "APT::Update::Error-Mode": "any",  # by default an unreachable mirror is a mere warning
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
        "Acquire::http::Timeout": "30",
        "APT::Sandbox::User": "",  # apt's own user can't write to the caller's folder
        "APT::Get::Assume-Yes": "true",
    }
    hooks = ("APT::Update::Pre-Invoke", "APT::Update::Post-Invoke", "APT::Update::Post-Invoke-Success")
    lines = [f"#clear {hook};" for hook in hooks]
    lines += [f'{name} "{value}";' for name, value in settings.items()]
    config = work / "apt.conf"
    config.write_text("\n".join(lines) + "\n")
    return config


def _apt(do: str, *arguments: str | Path) -> str:
    if missing := missing_tools():
        raise InfrastructureError(f"{', '.join(missing)} not found: this needs a Debian-like machine")
    # Errors quote apt's output, which must be in English.
    environ = {**os.environ, "LC_ALL": "C.UTF-8"}
    return build_tools.run(["apt-get", do, "-q", *map(str, arguments)], environ, APT_TIMEOUT_S)


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

PACKAGE_FOLDERS = {
    **dict.fromkeys(("mnt", "srv", "opt", "media", "var/opt", "run/lock"), 0o755),
    **{f"usr/local/{name}": 0o755 for name in ("bin", "etc", "include", "lib", "sbin", "share", "src")},
    "var/mail": 0o775,
}
"""Permissions by path of the folders that maintainer scripts would create."""

RUNTIME_FOLDERS = {"var/run": "/run", "var/lock": "/run/lock"}
"""Symlink target by path of the folders that maintainer scripts would replace by symlinks."""

PAM_RULES = {
    "auth": "[success=1 default=ignore] pam_unix.so nullok",
    "account": "[success=1 new_authtok_reqd=done default=ignore] pam_unix.so",
    "password": "[success=1 default=ignore] pam_unix.so obscure yescrypt",
    "session": "[default=1] pam_permit.so",
    "session-noninteractive": "[default=1] pam_permit.so",
}
"""First PAM rule of each file ``common-*``, as ``pam-auth-update`` writes the rule if only ``pam_unix`` is enabled."""

REMOVED_FOLDERS = ("boot", "usr/share/doc", "usr/share/info", "usr/share/locale", "usr/share/man")

_RECIPE_VERSION = 7
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
    (work / "apt").mkdir()
    listing = _apt("indextargets", "--format", "$(SITE) $(RELEASE) $(COMPONENT)", "Created-By: Packages")
    archives = fetch([*PACKAGES, *more], parse_sources(listing), work / "apt", progress)
    progress(f"unpacking {len(archives)} packages")
    root = work / "packages"
    unpack(archives, root)
    _finish(root)
    return root


def _finish(root: Path) -> None:
    """Make the changes of the packages' maintainer scripts on which programs in the image rely."""
    for name, mode in PACKAGE_FOLDERS.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(mode)
    for source, target in PACKAGE_COPIES.items():
        if (root / source).exists():
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / source, root / target)
    for link, target in PACKAGE_LINKS.items():
        path = root / link
        if not path.is_symlink() and (path.parent / target).exists():
            path.symlink_to(target)
    for name, target in RUNTIME_FOLDERS.items():
        path = root / name
        if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            path.rmdir()
            path.symlink_to(target)
    _trust(root / "usr/share/ca-certificates", root / "etc")
    _prepare_logins(root / "etc")
    for name in REMOVED_FOLDERS:
        shutil.rmtree(root / name, ignore_errors=True)


def _trust(shipped: Path, etc: Path) -> None:
    """Write all shipped CA certificates into the trusted bundle, and list them for ``update-ca-certificates``."""
    certificates = sorted(shipped.rglob("*.crt"))
    bundle = etc / "ssl/certs/ca-certificates.crt"
    bundle.parent.mkdir(parents=True, exist_ok=True)
    bundle.write_text("".join(path.read_text() for path in certificates))
    names = "".join(f"{path.relative_to(shipped)}\n" for path in certificates)
    (etc / "ca-certificates.conf").write_text(names)


def _prepare_logins(etc: Path) -> None:
    for name, shadow, rest in (("passwd", "shadow", ":19000:0:99999:7:::"), ("group", "gshadow", "::")):
        lines = (etc / name).read_text().splitlines()
        accounts = [line.split(":", 2) for line in lines]
        (etc / name).write_text("".join(f"{account}:x:{others}\n" for account, _password, others in accounts))
        (etc / shadow).write_text("".join(f"{account}:*{rest}\n" for account, *_ in accounts))
        (etc / shadow).chmod(0o640)
    (etc / "pam.d").mkdir(exist_ok=True)
    for name, first in PAM_RULES.items():
        kind = name.partition("-")[0]
        last = [f"{kind} required pam_unix.so"] if kind == "session" else []
        rules = [f"{kind} {first}", f"{kind} requisite pam_deny.so", f"{kind} required pam_permit.so", *last]
        (etc / "pam.d" / f"common-{name}").write_text("".join(f"{rule}\n" for rule in rules))
