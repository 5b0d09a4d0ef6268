# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The base ``apt:``: a small Linux made of packages of this machine's own distribution, in seconds and without a
container registry.

The packages are unpacked and none of their programs runs, so building takes neither root nor a container. What the
packages' set-up scripts would do for accounts and logins is done here. The image has no package database: ``dpkg`` and
``apt`` need an image of a registry.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from nemo_gym_prorl.sandbox.images.cache import Progress
from nemo_gym_prorl.sandbox.runtime import debian


PACKAGES = (
    *("base-files", "base-passwd", "ncurses-base", "ncurses-bin"),
    *("bash", "dash", "coreutils", "util-linux", "bsdutils", "debianutils", "hostname", "login", "procps"),
    *("findutils", "grep", "sed", "mawk", "diffutils", "patch", "less", "gzip", "tar"),
    # The C++ library is what wheels are linked to.
    *("python3", "git", "ca-certificates", "libstdc++6"),
    *("passwd", "adduser", "libpam-runtime", "libc-bin", "perl-base", "sysvinit-utils"),
)

LINKS = {
    "usr/bin/awk": "mawk",
    "usr/bin/which": "which.debianutils",
    "usr/bin/pager": "less",
    "usr/bin/python": "python3",
}
"""What the packages' own set-up scripts would have linked, and ``python``, which models like to call."""

COPIES = {
    "usr/share/base-passwd/passwd.master": "etc/passwd",
    "usr/share/base-passwd/group.master": "etc/group",
    "usr/share/base-files/profile": "etc/profile",
    "usr/share/base-files/dot.profile": "root/.profile",
    "usr/share/libc-bin/nsswitch.conf": "etc/nsswitch.conf",
}
"""What they would have copied."""

FOLDERS = {
    **dict.fromkeys(("mnt", "srv", "opt", "media", "var/opt", "run/lock"), 0o755),
    **{f"usr/local/{name}": 0o755 for name in ("bin", "etc", "include", "lib", "sbin", "share", "src")},
    "var/mail": 0o775,
}
"""What they would have made."""

RUNTIME_FOLDERS = {"var/run": "/run", "var/lock": "/run/lock"}
"""Folders that they would have replaced by links."""

PAM = {
    "auth": "[success=1 default=ignore] pam_unix.so nullok",
    "account": "[success=1 new_authtok_reqd=done default=ignore] pam_unix.so",
    "password": "[success=1 default=ignore] pam_unix.so obscure yescrypt",
    "session": "[default=1] pam_permit.so",
    "session-noninteractive": "[default=1] pam_permit.so",
}
"""How logins are decided, by what of them: as ``pam-auth-update`` has it with no module but the usual one."""

DROPPED = ("boot", "usr/share/doc", "usr/share/info", "usr/share/locale", "usr/share/man")

_STEPS = 7
"""Version of what this module does with the packages; part of the base's identity."""


def identity() -> str:
    """What tells this base from what it is on another distribution, or was in another version of this package."""
    made_of = [_STEPS, debian.distribution(), PACKAGES, sorted(LINKS.items()), DROPPED]
    return f"apt:{hashlib.sha256(json.dumps(made_of).encode()).hexdigest()}"


def make_root(more: Sequence[str], work: Path, progress: Progress) -> Path:
    """Return a new root folder in ``work``, made of :data:`PACKAGES` and ``more`` of the machine's distribution.

    Raises:
        InfrastructureError: the packages cannot be had; with apt's own words.
    """
    (work / "apt").mkdir()
    archives = debian.fetch([*PACKAGES, *more], debian.host_sources(), work / "apt", progress)
    progress(f"unpacking {len(archives)} packages")
    root = work / "packages"
    debian.unpack(archives, root)
    _finish(root)
    return root


def _finish(root: Path) -> None:
    """Do by hand the little that matters of what the packages' set-up scripts would do."""
    for name, mode in FOLDERS.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(mode)
    for source, target in COPIES.items():
        if (root / source).exists():
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / source, root / target)
    for link, target in LINKS.items():
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
    for name in DROPPED:
        shutil.rmtree(root / name, ignore_errors=True)


def _trust(shipped: Path, etc: Path) -> None:
    """Trust all authorities that are shipped; and have them named, for when the list is made anew."""
    certificates = sorted(shipped.rglob("*.crt"))
    bundle = etc / "ssl/certs/ca-certificates.crt"
    bundle.parent.mkdir(parents=True, exist_ok=True)
    bundle.write_text("".join(path.read_text() for path in certificates))
    names = "".join(f"{path.relative_to(shipped)}\n" for path in certificates)
    (etc / "ca-certificates.conf").write_text(names)


def _prepare_logins(etc: Path) -> None:
    """Passwords have files of their own, and PAM a rule for each of its questions."""
    for name, shadow, rest in (("passwd", "shadow", ":19000:0:99999:7:::"), ("group", "gshadow", "::")):
        lines = (etc / name).read_text().splitlines()
        accounts = [line.split(":", 2) for line in lines]
        (etc / name).write_text("".join(f"{account}:x:{others}\n" for account, _password, others in accounts))
        (etc / shadow).write_text("".join(f"{account}:*{rest}\n" for account, *_ in accounts))
        (etc / shadow).chmod(0o640)
    (etc / "pam.d").mkdir(exist_ok=True)
    for name, first in PAM.items():
        kind = name.partition("-")[0]
        last = [f"{kind} required pam_unix.so"] if kind == "session" else []
        rules = [f"{kind} {first}", f"{kind} requisite pam_deny.so", f"{kind} required pam_permit.so", *last]
        (etc / "pam.d" / f"common-{name}").write_text("".join(f"{rule}\n" for rule in rules))
