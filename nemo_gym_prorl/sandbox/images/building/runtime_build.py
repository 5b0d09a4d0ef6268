# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Having the container runtime make an image: with which rights, variables and logins, and for whom the result is."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.images import rootfs
from nemo_gym_prorl.sandbox.images.building import programs
from nemo_gym_prorl.sandbox.isolation import user_ids
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.isolation.syscalls import walled_in
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime, private_prefix
from nemo_gym_prorl.sandbox.supervisor.state_dir import remove_tree


DOWNLOADS = "downloads"
"""The runtime's cache folder for what it downloads, below the folder of a build."""

_LOGIN = re.compile(r"(APPTAINER|SINGULARITY)_(DOCKER_(USERNAME|PASSWORD|LOGIN)|AUTHFILE)")
_PASSED = re.compile(
    r"PATH|LD_LIBRARY_PATH|HOME|USER|LOGNAME|LANG|LC_.*|TZ|"
    r"(https?|ftp|all|no)_proxy|SSL_CERT_(FILE|DIR)|(APPTAINER|SINGULARITY).*",
    re.IGNORECASE,
)


def build(
    runtime: Runtime,
    work: Path,
    source: str,
    *,
    timeout_s: float,
    unpacked: bool,
    credentials: bool = False,
    base: Path | None = None,
) -> Path:
    """Let the runtime make an image in ``work``; gives the root folder or SIF, which belongs to the caller.

    Args:
        runtime: the one to use.
        work: a folder of the caller's.
        source: a root folder, a definition file in ``work``, or an address.
        timeout_s: how long it may take.
        unpacked: make a root folder and not a SIF.
        credentials: let it send what the user has stored for registries; it is anonymous otherwise.
        base: the root folder that the definition file names.

    Raises:
        InfrastructureError: it failed, with its own words.
    """
    target = work / "made"
    _clear(target)
    environ = build_environ(runtime, work, credentials)
    options = ["--sandbox"] if unpacked else []
    if not credentials:
        # Its own stored logins, Docker's and Podman's are all looked for below the home folder.
        (work / "no-logins.json").write_text('{"auths": {}}')
        options += ["--authfile", str(work / "no-logins.json")]
    command = [str(runtime.path), "build", *options]
    what = [str(target), source]
    if credentials:
        # They are below the home folder. No commands of strangers are run: such an image is pulled, not built.
        programs.run([*command, *what], environ, timeout_s, work)
    elif is_machine_root() or not source.endswith(".def"):
        reads = [path for path in (base, Path(source)) if path and path.is_dir() and not path.is_relative_to(work)]
        programs.run([*command, *what], environ, timeout_s, work, reads=[*closed_parts(runtime), *reads])
    else:
        if runtime.flavor == "apptainer" and not all(map(shutil.which, user_ids.HELPERS)):
            # It insists on them for who has a range of ids, as each account of some distributions, and can do without.
            command.append("--ignore-subuid")
        _build_as_user(command, what, environ, timeout_s, work)
    kind = target.lstat().st_mode if os.path.lexists(target) else 0
    if not (stat.S_ISDIR(kind) if unpacked else stat.S_ISREG(kind)):
        raise InfrastructureError(f"{source} put something else in place of the image that was made of it")
    if unpacked:
        rootfs.settle(target)
    else:
        os.chown(target, os.geteuid(), os.getegid())
        target.chmod(0o644)
    return target


def _build_as_user(
    command: Sequence[str], what: Sequence[str], environ: Mapping[str, str], timeout_s: float, work: Path
) -> None:
    try:
        programs.run([*command, "--fakeroot", *what], environ, timeout_s, work)
    except InfrastructureError as error:
        # Where no user ids are delegated, Apptainer runs the host's fakeroot command in the image, to have packages
        # believe in other owners. Not every image can run it, nor needs it.
        if "libs/fakeroot" not in error.reason:
            raise
        _clear(Path(what[0]))
        programs.run([*command, "--fakeroot", "--ignore-fakeroot-command", *what], environ, timeout_s, work)


def build_environ(runtime: Runtime, work: Path, credentials: bool) -> dict[str, str]:
    """The environment of a build: downloads go to ``work``; no logins unless they are wanted, and no other secrets of
    the caller's, since commands of strangers can read it."""
    environ = runtime.environ()
    # A second try finds there what the first one has downloaded.
    environ[f"{runtime.flavor.upper()}_CACHEDIR"] = str(work / DOWNLOADS)
    settings = f"{runtime.flavor.upper()}_CONFIGDIR"
    if not credentials or (settings not in environ and not Path(f"~/.{runtime.flavor}").expanduser().exists()):
        # It would make itself a folder in the user's home for settings that there are none of.
        environ[settings] = str(work / "settings")
    if credentials:
        return environ
    return {name: value for name, value in environ.items() if _PASSED.fullmatch(name) and not _LOGIN.fullmatch(name)}


def closed_parts(runtime: Runtime) -> list[Path]:
    """The folder of a runtime that strangers could not get to otherwise; for :func:`.programs.run` to read."""
    if not walled_in(runtime.path):
        return []
    return [private_prefix() if runtime.origin == "cache" else runtime.path.resolve().parents[1]]


def find_unsquashfs(runtime: Runtime) -> str | None:
    """The program that unpacks a SIF without mounting it: the machine's, else the one that came with the runtime."""
    if found := shutil.which("unsquashfs"):
        return found
    prefix = runtime.path.resolve().parents[1]
    folders = [*prefix.glob("lib/*/apptainer/bin"), prefix / "libexec/apptainer/bin", prefix / "utils/bin"]
    return shutil.which("unsquashfs", path=os.pathsep.join(map(str, folders)))


def _clear(target: Path) -> None:
    """Remove what a former try left."""
    if target.is_dir():
        remove_tree(target)
    else:
        target.unlink(missing_ok=True)
