# SPDX-License-Identifier: Apache-2.0
"""Running the programs that make images, so that nothing of them outlives whoever wanted the image.

They start helpers and containers of their own, and a builder may be killed. So they run under a keeper
(:mod:`nemo_gym_prorl.processes`), which ends everything that they started when they end, and when we do.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.processes import ProcessMark, keeper_command
from nemo_gym_prorl.sandbox.lease import remove_tree
from nemo_gym_prorl.sandbox.runtime import Runtime


WORDS_KEPT = 800
"""Characters of a failed program's last words that become part of the error."""

_CREDENTIALS = ("DOCKER_USERNAME", "DOCKER_PASSWORD", "DOCKER_LOGIN", "AUTHFILE")


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
) -> str:
    """Run a program; returns what it printed. ``fine`` are the exit codes that are no failure.

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
        remove_tree(scratch)
    if keeper.returncode not in fine:
        said = " / ".join(line.strip() for line in (errors or output).splitlines() if _is_news(line))
        raise InfrastructureError(f"{what} failed: {said[-WORDS_KEPT:] or f'exit code {keeper.returncode}'}")
    return output.strip()


def runtime_build(
    runtime: Runtime,
    work: Path,
    source: str,
    target: Path,
    *,
    timeout_s: float,
    unpacked: bool,
    credentials: bool = False,
) -> None:
    """Let the runtime make an image, with all its temporary files in ``work``.

    Args:
        runtime: the one to use.
        work: an empty folder of the caller's.
        source: a root folder, a definition file, or an address.
        target: what is made.
        timeout_s: how long it may take.
        unpacked: make a root folder and not a SIF.
        credentials: let it send what the user has stored for registries; it is anonymous otherwise.

    Raises:
        InfrastructureError: it failed, with its own words.
    """
    _clear(target)
    environ = build_environ(runtime, work, credentials)
    options = ["--sandbox"] if unpacked else []
    if not credentials:
        # Its own stored logins, Docker's and Podman's are all looked for below the home folder.
        (work / "no-logins.json").write_text('{"auths": {}}')
        options += ["--authfile", str(work / "no-logins.json")]
    command = [str(runtime.path), "build", *options]
    if os.geteuid() == 0 or not source.endswith(".def"):
        run([*command, str(target), source], environ, timeout_s, work)
        return
    try:
        run([*command, "--fakeroot", str(target), source], environ, timeout_s, work)
    except InfrastructureError as error:
        # Where no user ids are delegated, Apptainer runs the host's fakeroot command in the image, to have packages
        # believe in other owners. Not every image can run it, nor needs it.
        if "libs/fakeroot" not in error.reason:
            raise
        _clear(target)
        run([*command, "--fakeroot", "--ignore-fakeroot-command", str(target), source], environ, timeout_s, work)


def build_environ(runtime: Runtime, work: Path, credentials: bool) -> dict[str, str]:
    """The environment of a build: downloads go to ``work``, and no logins unless they are wanted."""
    environ = runtime.environ()
    # A second try finds there what the first one has downloaded.
    environ[f"{runtime.flavor.upper()}_CACHEDIR"] = str(work / "downloads")
    if not credentials:
        for prefix in ("APPTAINER", "SINGULARITY"):
            for name in _CREDENTIALS:
                environ.pop(f"{prefix}_{name}", None)
    return environ


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
