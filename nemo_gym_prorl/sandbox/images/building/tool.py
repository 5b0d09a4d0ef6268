# SPDX-License-Identifier: Apache-2.0
"""Running the programs that make images, so that nothing of them outlives whoever wanted the image.

They start helpers and containers of their own, and a builder may be killed. So they run under a keeper
(:mod:`nemo_gym_prorl.processes`), which ends everything that they started when they end, and when we do; and what
root runs has no right of root's (:mod:`.build_namespace`).
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.processes import ProcessMark, keeper_command
from nemo_gym_prorl.sandbox.images import rootfs
from nemo_gym_prorl.sandbox.images.building import build_namespace
from nemo_gym_prorl.sandbox.isolation import user_domain
from nemo_gym_prorl.sandbox.isolation.syscalls import walled_in
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime, private_prefix
from nemo_gym_prorl.sandbox.supervisor.storage.erase import remove_tree


WORDS_KEPT = 800
"""Characters of a failed program's last words that become part of the error."""

_LOGIN = re.compile(r"(APPTAINER|SINGULARITY)_(DOCKER_(USERNAME|PASSWORD|LOGIN)|AUTHFILE)")
_PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LC_.*|TZ|(https?|ftp|all|no)_proxy|SSL_CERT_(FILE|DIR)|(APPTAINER|SINGULARITY).*",
    re.IGNORECASE,
)


_live: set[subprocess.Popen[str]] = set()


def stop_all() -> None:
    """End whatever :meth:`run` runs, in whichever threads; they raise."""
    for keeper in list(_live):
        keeper.terminate()


def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    timeout_s: float,
    cwd: Path | None = None,
    *,
    fine: Container[int] = (0,),
    reads: Sequence[Path] | None = None,
) -> str:
    """Run a program; returns what it printed.

    Args:
        command: the program and its arguments.
        environ: its environment.
        timeout_s: how long it may take.
        cwd: the folder to run in, where its temporary files are, too.
        fine: the exit codes that are no failure.
        reads: if strangers have a hand in what it does: what it needs besides ``cwd`` and what all may read. For root
            it runs without root's rights then, and what it makes there has to be settled (:func:`.rootfs.settle`).

    Raises:
        InfrastructureError: it failed or was not done in time; with its last words.
    """
    what = " ".join([Path(command[0]).name, *command[1:2]])
    mark = ProcessMark("PRORL_IMAGE_TOOL", secrets.token_hex(8))
    # Who has become another user may not reach the interpreter any more, and has to do without a keeper.
    kept = os.access(sys.executable, os.X_OK)
    scratch = Path(tempfile.mkdtemp(prefix="tool-", dir=cwd))
    # The two with prefixes are passed on to what runs in containers.
    marked = {f"{prefix}{mark.name}": mark.value for prefix in ("", "APPTAINERENV_", "SINGULARITYENV_")}
    temporary = {f"{prefix}TMPDIR": str(scratch) for prefix in ("", "APPTAINER_", "SINGULARITY_")}
    given = cwd if reads is not None and os.geteuid() == 0 else None
    if given and reads is not None:
        command = build_namespace.confined(command, given, reads)
        # There is no home folder for it, and no capability is missing.
        environ = {name: value for name, value in environ.items() if not name.endswith("_USERNS")} | {"HOME": "/"}
    try:
        with subprocess.Popen(
            keeper_command(mark, list(command), sys.executable, scratch) if kept else command,
            env={**environ, **temporary, **marked},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as keeper:
            _live.add(keeper)
            try:
                output, errors = keeper.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired as error:
                keeper.terminate()
                raise InfrastructureError(f"{what} was not done after {timeout_s:g} s") from error
            except BaseException:
                keeper.terminate()
                raise
            finally:
                _live.discard(keeper)
    finally:
        if given:
            build_namespace.take_back(given)
        remove_tree(scratch)
    if keeper.returncode not in fine:
        said = " / ".join(line.strip() for line in (errors or output).splitlines() if _is_news(line))
        raise InfrastructureError(f"{what} failed: {said[-WORDS_KEPT:] or f'exit code {keeper.returncode}'}")
    return output.strip()


def runtime_build(
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
        run([*command, *what], environ, timeout_s, work)
    elif os.geteuid() == 0 or not source.endswith(".def"):
        reads = [path for path in (base, Path(source)) if path and path.is_dir() and not path.is_relative_to(work)]
        run([*command, *what], environ, timeout_s, work, reads=[*closed_parts(runtime), *reads])
    else:
        if runtime.flavor == "apptainer" and not all(map(shutil.which, user_domain.HELPERS)):
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
        run([*command, "--fakeroot", *what], environ, timeout_s, work)
    except InfrastructureError as error:
        # Where no user ids are delegated, Apptainer runs the host's fakeroot command in the image, to have packages
        # believe in other owners. Not every image can run it, nor needs it.
        if "libs/fakeroot" not in error.reason:
            raise
        _clear(Path(what[0]))
        run([*command, "--fakeroot", "--ignore-fakeroot-command", *what], environ, timeout_s, work)


def build_environ(runtime: Runtime, work: Path, credentials: bool) -> dict[str, str]:
    """The environment of a build: downloads go to ``work``; no logins unless they are wanted, and no other secrets of
    the caller's, since commands of strangers can read it."""
    environ = runtime.environ()
    # A second try finds there what the first one has downloaded.
    environ[f"{runtime.flavor.upper()}_CACHEDIR"] = str(work / "downloads")
    settings = f"{runtime.flavor.upper()}_CONFIGDIR"
    if not credentials or (settings not in environ and not Path(f"~/.{runtime.flavor}").expanduser().exists()):
        # It would make itself a folder in the user's home for settings that there are none of.
        environ[settings] = str(work / "settings")
    if credentials:
        return environ
    return {name: value for name, value in environ.items() if _PASSED.fullmatch(name) and not _LOGIN.fullmatch(name)}


def closed_parts(runtime: Runtime) -> list[Path]:
    """The folder of a runtime that strangers could not get to otherwise; for :func:`run` to read."""
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


def _is_news(line: str) -> bool:
    return bool(line.strip()) and not line.startswith(("INFO:", "WARNING:", "+ "))
