# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Run the programs that build images and the private Apptainer.

These programs start helpers and containers of their own, and this process may be killed. So the programs run under a
reaper (:mod:`nemo_gym_prorl.processes`), which ends all descendants when the programs or this process end.

The programs run untrusted commands (``%post`` and ``%setup`` of a definition file) and read untrusted files (layers of
a registry, a squashfs). For machine root the programs therefore run in a user namespace whose root has no rights on
the host. The namespace maps a block of unassigned host ids, so its root may install packages and set the owners of
files. Invariants:

- The programs may write only below their working folder, which they own, and in folders such as ``/tmp``.
- In folders closed to other users, such as root's home folder, the programs see only the files that they need.
- No process outlives the build: the programs have a PID namespace, which ends with its first process.

The programs use the machine's network, to download packages. An ordinary user's programs run as that user.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
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
"""Number of characters at the end of a failed program's output that the error quotes: enough for the cause."""

_live: set[subprocess.Popen[str]] = set()


def stop_all() -> None:
    """End all programs that calls of :func:`run`, in any thread, have started; these calls raise."""
    for reaper in list(_live):
        reaper.terminate()


def run(
    command: Sequence[str],
    environ: Mapping[str, str] | None,
    timeout_s: float,
    cwd: Path | None = None,
    *,
    reads: Sequence[Path] | None = None,
) -> str:
    """Run a program; return its standard output, stripped.

    Args:
        environ: environment variables of the program; ``None`` for those of this process.
        timeout_s: seconds until the program is ended.
        cwd: working folder, also for temporary files; ``None`` for this process's, with the system's temporary folder.
        reads: ``None`` for trusted input. Otherwise the files that the program needs besides ``cwd`` and
            world-readable files: machine root confines the program, whose results need :func:`.rootfs.sanitize`.

    Raises:
        InfrastructureError: the program failed (the error quotes its last output) or timed out.
    """
    what = " ".join([Path(command[0]).name, *(word for word in command[1:2] if not word.startswith("-"))])
    environ = os.environ if environ is None else environ
    mark = ProcessMark("PRORL_IMAGE_TOOL", secrets.token_hex(8))
    # After a change of user id the interpreter may be inaccessible; the program then runs without a reaper.
    has_reaper = os.access(sys.executable, os.X_OK)
    scratch = Path(tempfile.mkdtemp(prefix="tool-", dir=cwd))
    # Apptainer passes variables with the prefix APPTAINERENV_ into containers, whose processes also need the mark.
    marked = {f"{prefix}{mark.name}": mark.value for prefix in ("", "APPTAINERENV_")}
    temporary = {f"{prefix}TMPDIR": str(scratch) for prefix in ("", "APPTAINER_")}
    given = cwd if reads is not None and is_machine_root() else None
    if given and reads is not None:
        command = confined_command(command, given, reads)
        # Root's home folder is hidden in the namespace, whose root has all capabilities and needs no USERNS option.
        environ = {name: value for name, value in environ.items() if not name.endswith("_USERNS")} | {"HOME": "/"}
    try:
        with subprocess.Popen(
            reaper_command(mark, list(command), sys.executable, scratch) if has_reaper else command,
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
                raise InfrastructureError(f"{what} did not finish within {timeout_s:g} s") from error
            except BaseException:
                reaper.terminate()
                raise
            finally:
                _live.discard(reaper)
    finally:
        if given:
            take_back(given)
        remove_tree(scratch)
    if reaper.returncode:
        lines = " / ".join(line.strip() for line in (errors or output).splitlines() if _is_relevant(line))
        raise InfrastructureError(f"{what} failed: {lines[-MAX_ERROR_CHARS:] or f'exit code {reaper.returncode}'}")
    return output.strip()


def _is_relevant(line: str) -> bool:
    return bool(line.strip()) and not line.startswith(("INFO:", "WARNING:", "+ "))


_PACKAGES = str(Path(__file__).parents[3])
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from nemo_gym_prorl.sandbox.images import build_tools
sys.exit(build_tools.main(sys.argv[1:]))
"""


def confined_command(command: Sequence[str], work: Path, seen: Sequence[Path]) -> list[str]:
    """Return the command line that runs ``command`` in a user namespace without rights on the host. The namespace's
    root owns the folder ``work``, and the files of machine root in ``seen``."""
    paths = [str(path) for path in (work, *seen)]
    return [sys.executable, "-ISc", _PROGRAM, _PACKAGES, *paths, "--", *command]


def main(arguments: Sequence[str]) -> int:
    """Confine this process, started by :func:`confined_command`, and run the command; return the exit code."""
    split = arguments.index("--")
    work, *seen = map(Path, arguments[:split])
    first = user_ids.draw_host_id(several=True)
    ids = [(0, first, user_ids.IDS_PER_BLOCK)]
    owner = user_ids.create_user_namespace(lambda pid: user_ids.write_id_maps(pid, ids, ids))
    for _path, name, folder in walk(work):
        os.chown(name, first, first, dir_fd=folder, follow_symlinks=False)
    syscalls.unshare_mounts()
    _mount_visible(work, seen, owner)
    os.setns(owner)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.chdir(work)
    os.unshare(os.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        _exec_as_init(arguments[split + 1 :])
    with contextlib.suppress(KeyboardInterrupt):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF
    return 130


def _exec_as_init(command: Sequence[str]) -> NoReturn:
    """Execute ``command`` as the first process of the PID namespace; the kernel ends the namespace with it."""
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.unshare(os.CLONE_NEWNS)
        syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NOEXEC)
        os.execv(command[0], list(command))
    except OSError as error:
        print(f"{command[0]}: {error}", file=sys.stderr)
    finally:
        os._exit(127)


def take_back(work: Path) -> None:
    """As machine root, take ownership of the folder ``work`` without its contents, and close it to other users."""
    os.chown(work, os.geteuid(), os.getegid())
    work.chmod(0o700)


def _mount_visible(work: Path, seen: Sequence[Path], owner: int) -> None:
    """Hide folders that are closed to other users, except for ``work`` and ``seen``. Files of machine root in ``seen``
    belong to root of the user namespace with the descriptor ``owner``."""
    # Open the paths first: a tmpfs over a folder also hides the paths in the folder.
    held = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in dict.fromkeys((work, *seen))}
    hidden = {folder for path in held if (folder := syscalls.first_untraversable_parent(path))}
    for folder in hidden:
        syscalls.mount("tmpfs", str(folder), "tmpfs", syscalls.MS_NOSUID, "mode=755,size=1m")
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
            # The kernel or file system lacks idmapped mounts; world-readable files are still readable.
            syscalls.bind(source, str(path))
        os.close(descriptor)


DOWNLOADS_FOLDER = "downloads"
"""Name of the folder with Apptainer's download cache, in the working folder of a build."""

_LOGIN = re.compile(r"(APPTAINER|SINGULARITY)_(DOCKER_(USERNAME|PASSWORD|LOGIN)|AUTHFILE)")
_PASSED = re.compile(
    r"PATH|LD_LIBRARY_PATH|HOME|USER|LOGNAME|LANG|LC_.*|TZ|"
    r"(https?|ftp|all|no)_proxy|SSL_CERT_(FILE|DIR)|(APPTAINER|SINGULARITY).*",
    re.IGNORECASE,
)

_TEMPORARY = {"tmp": "/tmp", "var-tmp": "/var/tmp"}

_SETUP = """

%setup
    # The runtime shows this machine's /tmp and /var/tmp to commands. Folders of the image are bound over them, through
    # links to where the image lies during the build. A link of the image could lead to a folder of this machine.
    cd "$APPTAINER_ROOTFS"
    if [ -L tmp ]; then rm tmp; fi
    mkdir -p -m 1777 tmp
    ln -sfn "$PWD/tmp" {work}/tmp
    if [ -L var ] || [ -L var/tmp ]; then
        ln -sfn "$PWD/tmp" {work}/var-tmp
    else
        mkdir -p -m 1777 var/tmp
        ln -sfn "$PWD/var/tmp" {work}/var-tmp
    fi
"""


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
    """Build an image in ``work`` with Apptainer; return the path of the root folder or SIF, which the caller owns.

    Args:
        work: private folder of the build.
        source: path of a root folder or SIF, of a definition file in ``work``, or a registry address.
        timeout_s: seconds until the build fails.
        unpacked: whether to build a root folder instead of a SIF.
        credentials: whether to send the user's stored registry logins; only for pulls, which are not confined then.
        base: root folder on which the definition file builds; ``%post`` uses its ``/tmp`` and not the machine's.

    Raises:
        InfrastructureError: the build failed; quotes Apptainer.
    """
    target = work / "made"
    _clear(target)
    environ = build_environ(runtime, work, credentials)
    options = ["--sandbox"] if unpacked else []
    if base:
        with Path(source).open("a") as definition:
            definition.write(_SETUP.format(work=shlex.quote(str(work))))  # Apptainer joins sections of one name
        for name, mount_point in _TEMPORARY.items():
            options += ["--bind", f"{work / name}:{mount_point}"]
    if not credentials:
        # By default Apptainer reads its own, Docker's and Podman's logins below the home folder.
        (work / "no-logins.json").write_text('{"auths": {}}')
        options += ["--authfile", str(work / "no-logins.json")]
    command = [str(runtime.path), "build", *options]
    what = [str(target), source]
    if credentials:
        # A confined program could not read the logins in the home folder. A pull runs no untrusted commands.
        run([*command, *what], environ, timeout_s, work)
    elif is_machine_root() or not source.endswith(".def"):
        reads = [path for path in (base, Path(source)) if path and path.exists() and not path.is_relative_to(work)]
        run([*command, *what], environ, timeout_s, work, reads=[*runtime_reads(runtime), *reads])
    else:
        if not all(map(shutil.which, user_ids.MAP_HELPERS)):
            # With subordinate ids Apptainer fails without newuidmap and newgidmap, unless it ignores the ids.
            command.append("--ignore-subuid")
        _build_as_user(command, what, environ, timeout_s, work)
    kind = target.lstat().st_mode if os.path.lexists(target) else 0
    if not (stat.S_ISDIR(kind) if unpacked else stat.S_ISREG(kind)):
        raise InfrastructureError(
            f"the build of {source} replaced the image by something else: check its %post and %setup"
        )
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
        # Without subordinate ids Apptainer runs the host's fakeroot command in the image, so that packages can set
        # owners. The command fails in some images; not all definitions need it.
        if "libs/fakeroot" not in error.reason:
            raise
        _clear(Path(what[0]))
        run([*command, "--fakeroot", "--ignore-fakeroot-command", *what], environ, timeout_s, work)


def build_environ(runtime: Runtime, work: Path, credentials: bool) -> dict[str, str]:
    """Return the environment variables of a build, whose downloads are stored in ``work``. Untrusted commands can read
    the variables. So without ``credentials`` only variables without secrets are passed."""
    environ = runtime.environ()
    # A retry in the same folder reuses the downloads.
    environ["APPTAINER_CACHEDIR"] = str(work / DOWNLOADS_FOLDER)
    settings = "APPTAINER_CONFIGDIR"
    if not credentials or (settings not in environ and not Path("~/.apptainer").expanduser().exists()):
        # Without this variable Apptainer would create a settings folder in the user's home folder.
        environ[settings] = str(work / "settings")
    if credentials:
        return environ
    return {name: value for name, value in environ.items() if _PASSED.fullmatch(name) and not _LOGIN.fullmatch(name)}


def runtime_reads(runtime: Runtime) -> list[Path]:
    """Return the ``reads`` of :func:`run` for a runtime: its folder, or none if all users can reach the runtime."""
    if not first_untraversable_parent(runtime.path):
        return []
    return [private_prefix() if runtime.origin == "cache" else runtime.path.resolve().parents[1]]


def _clear(target: Path) -> None:
    if target.is_dir():
        remove_tree(target)
    else:
        target.unlink(missing_ok=True)
