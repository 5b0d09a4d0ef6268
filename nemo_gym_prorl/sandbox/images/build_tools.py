# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Running the programs that make images and the private runtime.

They start helpers and containers of their own, and a builder may be killed. So they run under a reaper
(:mod:`nemo_gym_prorl.processes`), which ends everything that they started when they end, and when we do.

For root they run in a user namespace whose root has no rights on this machine: they run commands of strangers
(``%post`` and ``%setup`` of a definition file) and read their files (layers of a registry, a squashfs). The namespace
has a block of host ids that no user has: its root may install packages and give files to other users. Invariants:

- the programs may write below the folder they work in, which is given to them, and where any user may (``/tmp``);
- of the folders above it, and above whatever else they need, that are closed to other users they see just that much:
  the rest of root's home folder, say, is not there;
- no process they start outlives them: they have a PID namespace of their own, which ends with its first process.

The network is the machine's: packages come from there. An ordinary user's programs run as that user.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.processes import ProcessMark, reaper_command
from nemo_gym_prorl.sandbox.images import rootfs
from nemo_gym_prorl.sandbox.images.rootfs import walk
from nemo_gym_prorl.sandbox.isolation import syscalls, user_ids
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.isolation.syscalls import first_untraversable_parent
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime, private_prefix
from nemo_gym_prorl.sandbox.supervisor.state_dir import remove_tree


MAX_ERROR_CHARS = 800
"""Characters of a failed program's last words that become part of the error."""

_live: set[subprocess.Popen[str]] = set()


def stop_all() -> None:
    """End whatever :meth:`run` runs, in whichever threads; they raise."""
    for reaper in list(_live):
        reaper.terminate()


def run(
    command: Sequence[str],
    environ: Mapping[str, str] | None,
    timeout_s: float,
    cwd: Path | None = None,
    *,
    fine: Container[int] = (0,),
    reads: Sequence[Path] | None = None,
) -> str:
    """Run a program; returns what it printed.

    Args:
        command: the program and its arguments.
        environ: its environment; ours if not given.
        timeout_s: how long it may take.
        cwd: the folder to run in, where its temporary files are, too.
        fine: the exit codes that are no failure.
        reads: if strangers have a hand in what it does: what it needs besides ``cwd`` and what all may read. For root
            it runs without root's rights then, and what it makes there has to be settled (:func:`.rootfs.settle`).

    Raises:
        InfrastructureError: it failed or was not done in time; with its last words.
    """
    what = " ".join([Path(command[0]).name, *(word for word in command[1:2] if not word.startswith("-"))])
    environ = os.environ if environ is None else environ
    mark = ProcessMark("PRORL_IMAGE_TOOL", secrets.token_hex(8))
    # Who has become another user may not reach the interpreter any more, and has to do without a reaper.
    kept = os.access(sys.executable, os.X_OK)
    scratch = Path(tempfile.mkdtemp(prefix="tool-", dir=cwd))
    # The two with prefixes are passed on to what runs in containers.
    marked = {f"{prefix}{mark.name}": mark.value for prefix in ("", "APPTAINERENV_", "SINGULARITYENV_")}
    temporary = {f"{prefix}TMPDIR": str(scratch) for prefix in ("", "APPTAINER_", "SINGULARITY_")}
    given = cwd if reads is not None and is_machine_root() else None
    if given and reads is not None:
        command = confined_command(command, given, reads)
        # There is no home folder for it, and no capability is missing.
        environ = {name: value for name, value in environ.items() if not name.endswith("_USERNS")} | {"HOME": "/"}
    try:
        with subprocess.Popen(
            reaper_command(mark, list(command), sys.executable, scratch) if kept else command,
            env={**environ, **temporary, **marked},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as reaper:
            _live.add(reaper)
            try:
                output, errors = reaper.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired as error:
                reaper.terminate()
                raise InfrastructureError(f"{what} was not done after {timeout_s:g} s") from error
            except BaseException:
                reaper.terminate()
                raise
            finally:
                _live.discard(reaper)
    finally:
        if given:
            take_back(given)
        remove_tree(scratch)
    if reaper.returncode not in fine:
        said = " / ".join(line.strip() for line in (errors or output).splitlines() if _is_news(line))
        raise InfrastructureError(f"{what} failed: {said[-MAX_ERROR_CHARS:] or f'exit code {reaper.returncode}'}")
    return output.strip()


def _is_news(line: str) -> bool:
    return bool(line.strip()) and not line.startswith(("INFO:", "WARNING:", "+ "))


_PACKAGES = str(Path(__file__).parents[3])
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from nemo_gym_prorl.sandbox.images import build_tools
sys.exit(build_tools.main(sys.argv[1:]))
"""


def confined_command(command: Sequence[str], work: Path, seen: Sequence[Path]) -> list[str]:
    """The command line that runs ``command`` so.

    Args:
        command: what to run; its program is found by its absolute path.
        work: the folder to work in, which it is given with all that is in it.
        seen: files and folders that it reads, wherever they lie; root's are its own there.
    """
    paths = [str(path) for path in (work, *seen)]
    return [sys.executable, "-ISc", _PROGRAM, _PACKAGES, *paths, "--", *command]


def main(arguments: Sequence[str]) -> int:
    """Run what :func:`confined` was given; its exit code."""
    split = arguments.index("--")
    work, *seen = map(Path, arguments[:split])
    # As a sandbox with several users has.
    first = user_ids.draw_host_id(several=True)
    ids = [(0, first, user_ids.IDS_PER_BLOCK)]
    owner = user_ids.create_user_namespace(lambda pid: user_ids.write_id_maps(pid, ids, ids))
    _give(work, first)
    syscalls.unshare_mounts()
    _show(work, seen, owner)
    os.setns(owner)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.chdir(work)
    os.unshare(os.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        _become(arguments[split + 1 :])
    with contextlib.suppress(KeyboardInterrupt):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF
    return 130


def _become(command: Sequence[str]) -> NoReturn:
    """Become the first process of the PID namespace, which ends with us."""
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.unshare(os.CLONE_NEWNS)
        syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NOEXEC)
        os.execv(command[0], list(command))
    except OSError as error:
        print(f"{command[0]}: {error}", file=sys.stderr)
    finally:
        os._exit(127)


def _give(work: Path, owner: int) -> None:
    for _path, name, folder in walk(work):
        os.chown(name, owner, owner, dir_fd=folder, follow_symlinks=False)


def take_back(work: Path) -> None:
    """By root: close a folder that was given away, so that nobody who was handed it names what is in it."""
    os.chown(work, os.geteuid(), os.getegid())
    work.chmod(0o700)


def _show(work: Path, seen: Sequence[Path], owner: int) -> None:
    """Let ``owner``'s root get to what he needs, and to nothing else that strangers may not get to."""
    # By their descriptors, since what covers the walls covers them, too.
    held = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in dict.fromkeys((work, *seen))}
    walls = {wall for path in held if (wall := syscalls.first_untraversable_parent(path))}
    for wall in walls:
        syscalls.mount("tmpfs", str(wall), "tmpfs", syscalls.MS_NOSUID, "mode=755,size=1m")
    for path, descriptor in held.items():
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                path.mkdir()
            else:
                path.touch()
        source = f"/proc/self/fd/{descriptor}"
        try:
            syscalls.mount_as_owner(source, str(path), None if path == work else owner)
        except OSError:
            # An old kernel or an odd file system: what all may read can be read as it is, too.
            syscalls.bind(source, str(path))
        os.close(descriptor)


DOWNLOADS_FOLDER = "downloads"
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
        run([*command, *what], environ, timeout_s, work)
    elif is_machine_root() or not source.endswith(".def"):
        reads = [path for path in (base, Path(source)) if path and path.is_dir() and not path.is_relative_to(work)]
        run([*command, *what], environ, timeout_s, work, reads=[*runtime_reads(runtime), *reads])
    else:
        if runtime.flavor == "apptainer" and not all(map(shutil.which, user_ids.MAP_HELPERS)):
            # It insists on them for who has a range of ids, as each account of some distributions, and can do without.
            command.append("--ignore-subuid")
        _build_as_user(command, what, environ, timeout_s, work)
    kind = target.lstat().st_mode if os.path.lexists(target) else 0
    if not (stat.S_ISDIR(kind) if unpacked else stat.S_ISREG(kind)):
        raise InfrastructureError(f"{source} put something else in place of the image that was made of it")
    if unpacked:
        rootfs.sanitize(target)
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
    environ[f"{runtime.flavor.upper()}_CACHEDIR"] = str(work / DOWNLOADS_FOLDER)
    settings = f"{runtime.flavor.upper()}_CONFIGDIR"
    if not credentials or (settings not in environ and not Path(f"~/.{runtime.flavor}").expanduser().exists()):
        # It would make itself a folder in the user's home for settings that there are none of.
        environ[settings] = str(work / "settings")
    if credentials:
        return environ
    return {name: value for name, value in environ.items() if _PASSED.fullmatch(name) and not _LOGIN.fullmatch(name)}


def runtime_reads(runtime: Runtime) -> list[Path]:
    """The folder of a runtime that strangers could not get to otherwise; for :func:`.build_tools.run` to read."""
    if not first_untraversable_parent(runtime.path):
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
