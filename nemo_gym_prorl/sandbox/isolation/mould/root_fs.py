# SPDX-License-Identifier: Apache-2.0
"""The file system of a sandbox that is made from a mould: an image, a layer of its own over it, and what is Linux's.

Steps of the first process's script, in mounts of its own, under the sandbox's own user id. The image is a stranger's,
and its links are followed as those inside would follow them; so that they lead nowhere else:

- what of the host is to be seen inside is taken hold of before the root is changed, under its own name, and the host's
  root is gone, with no open file that leads back, before the first name of the image is looked up;
- the kernel's file systems (:class:`Kernels`) are shown last. Until then no name leads to ``/proc``, whose links to
  open files are no paths, and settings are written by way of a mount that is nowhere yet;
- what they and ``/dev`` are mounted on is a folder of the image's own and no link (:func:`_own_folder`): what
  hides a setting of the kernel's, or is written to a file in place of one, is no wall.

Names in mount options are relative to the sandbox's folder: what can be read inside in ``/proc/self/mountinfo`` is no
path of the host.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.isolation import syscalls
from nemo_gym_prorl.sandbox.isolation.scripting.scripts import ANY, Argument, At, Script
from nemo_gym_prorl.sandbox.isolation.syscalls import (
    ATTRIBUTE_NODEV,
    ATTRIBUTE_NOEXEC,
    ATTRIBUTE_NOSUID,
    ATTRIBUTE_RDONLY,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_RDONLY,
)
from nemo_gym_prorl.sandbox.limits.kernel_shares import TERMINALS, shared_memory_options


SMALL_TMPFS = "size=16m,nr_inodes=16k"
"""Bound of each memory file system without a size of its own, which would otherwise hold half the machine's memory."""

_AT_FDCWD = -100
_CLONE = syscalls.CLONE_TREE | os.O_CLOEXEC
_DETACH = 2
_FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC, _FSCONFIG_CREATE = 1, 1, 6

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")

DEVICE_LINKS = {
    "ptmx": "pts/ptmx",
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "core": "/proc/kcore",
}

KERNELS = ("/proc", "/sys", "/dev")
"""Where each sandbox has file systems of the kernel's."""

HIDDEN = (
    *("/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/key-users"),
    *("/proc/latency_stats", "/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi"),
    *("/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags", "/proc/kallsyms"),
    *("/sys/firmware", "/sys/devices/virtual/powercap"),
)
"""What tells of the machine more than a program needs, as containers customarily hide it."""

READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

TERMINAL_GROUP = 5
"""``tty`` of every distribution: owner of terminals, where it exists."""


@dataclass(frozen=True, slots=True)
class Bind:
    """A file or folder of the host that is to be seen inside.

    Attributes:
        source: where it lies.
        target: where it is to be seen.
        read_only: whether it can't be changed there.
    """

    source: str
    target: str
    read_only: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """``HOST``, ``HOST:INSIDE`` or ``HOST:INSIDE:ro``, as the runtime has it.

        Raises:
            CallerError: it is none of these.
        """
        source, _, rest = text.partition(":")
        target, _, options = (rest or source).partition(":")
        if not source.startswith("/") or not target.startswith("/") or options not in ("", "ro", "rw"):
            raise CallerError(f"{text!r} is not HOST:INSIDE or HOST:INSIDE:ro with absolute paths", field="binds")
        return cls(source, target, options == "ro")

    def take_hold(self) -> int:
        """A descriptor of it as a mount that is nowhere yet; devices and changes of user mean nothing in it."""
        tree = syscalls.detached(self.source, recursive=True)
        syscalls.restrict(tree, self._attributes, recursive=True)
        return tree

    @property
    def is_folder(self) -> bool:
        """Whether it is one; one that is not there is none of anything, which the kernel will say."""
        return os.path.isdir(self.source)

    def add_to(self, script: Script) -> At:
        """As :meth:`take_hold`, as steps of a script."""
        tree = detached(script, self.source, recursive=True)
        restrict(script, tree, self._attributes, recursive=True)
        return tree

    @property
    def _attributes(self) -> int:
        return ATTRIBUTE_NOSUID | ATTRIBUTE_NODEV | (ATTRIBUTE_RDONLY if self.read_only else 0)


@dataclass(frozen=True, slots=True)
class Layout:
    """What a root file system is made of, beside its image.

    Attributes:
        folder: the sandbox's own on the host, with ``image`` and ``root`` to mount on, and ``overlay`` for its layer.
        image: the image's folder, for whom is not given it as a mount.
        binds: of the host.
        shared_memory_mib: size of ``/dev/shm``.
        host_network: whether the network, and with it ``/sys``, is the host's.
        resolver: text of ``/etc/resolv.conf``.
        several_users: whether there is a group for terminals.
        shown: more folders to be seen inside: as a mount that is nowhere yet, and where.
    """

    folder: str
    image: str
    binds: Sequence[Bind]
    shared_memory_mib: int
    host_network: bool
    resolver: str
    several_users: bool
    shown: Sequence[tuple[int, str]] = ()


@dataclass(frozen=True, slots=True)
class Kernels:
    """File systems of the kernel's own, as mounts that are nowhere yet."""

    proc: At
    sys: At


def enter(script: Script, layout: Layout, image: Argument | None) -> Kernels:
    """Make it, and make it the process's root, but for what :func:`show` shows in the end.

    Args:
        script: that of the first process.
        layout: what it is made of.
        image: the image as a detached mount, if there is one.
    """
    script.step = "mounts of its own"
    script.call("mount", b"none", b"/", 0, syscalls.MS_REC | syscalls.MS_PRIVATE, 0)
    devices = {name: detached(script, f"/dev/{name}") for name in DEVICES}
    held = [(bind.add_to(script), bind.target, bind.is_folder) for bind in layout.binds]
    # Only as long as the host's are still there may fresh ones be made.
    kernels = Kernels(_of_the_kernel(script, "proc", 0), _sys(script, layout))
    script.step = "its folder"
    script.call("chdir", os.fsencode(layout.folder))
    for name in ("image", "root"):
        script.call("mkdirat", _AT_FDCWD, name.encode(), 0o700)
    attach(script, detached(script, layout.image) if image is None else image, "image")
    layers = b"lowerdir=image,upperdir=overlay/upper,workdir=overlay/work,userxattr,volatile"
    # What a sandbox wrote goes with it: there is nothing to be gained by waiting for a disk.
    script.step = "mount of an overlay on root"
    script.call("mount", b"overlay", b"root", b"overlay", 0, layers)
    script.call("chdir", b"root")
    script.step = "pivot_root"
    script.call("pivot_root", b".", b".")
    # The host's root lies on ours now, and in it we are at its top: no open file is needed to name it.
    script.step = "unmount of the host"
    script.call("umount2", b".", _DETACH)
    script.call("chdir", b"/")
    _populate_dev(script, layout, devices)
    for tree, target, is_folder in held:
        _show(script, tree, target, is_folder=is_folder)
    for file, target in layout.shown:
        _show(script, file, target, is_folder=True)
    for folder, mode in (("/tmp", 0o1777), ("/var/tmp", 0o1777), ("/root", 0o700)):
        _folder(script, os.path.dirname(folder))
        script.step = folder
        script.call("mkdirat", _AT_FDCWD, folder.encode(), 0o755, tolerate=[errno.EEXIST], on_error=1)
        script.call("fchmodat", _AT_FDCWD, folder.encode(), mode)
        if mode & stat.S_ISVTX and layout.several_users:
            # An ordinary user's builder left it open to that user alone, who is root here.
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            found = script.call("openat", _AT_FDCWD, folder.encode(), flags, 0, tolerate=[ANY], on_error=2)
            script.call("fchmod", found, mode)
            script.call("close", found)
    return kernels


def show(script: Script, kernels: Kernels) -> None:
    """Show the kernel's file systems, and hide and lock in them what a program has no business with.

    No name of the image is looked up after that.
    """
    for tree, path in ((kernels.sys, "/sys"), (kernels.proc, "/proc")):
        folder = _own_folder(script, path)
        attach(script, tree, folder)
        script.call("close", folder)
    empty: At | None = None
    for path, is_folder in _hidden():
        script.step = path
        if not is_folder:
            attach(script, detached(script, "/dev/null"), path, tolerate=[errno.ENOENT])
        elif empty is None:
            # An empty folder in place of each folder.
            script.call("mount", b"none", path.encode(), b"tmpfs", MS_RDONLY, b"size=4k,nr_inodes=2,mode=755")
            flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
            empty = script.call("openat", _AT_FDCWD, path.encode(), flags, 0)
        else:
            attach(script, detached(script, empty), path)
    for path in READ_ONLY:
        script.step = path
        # Three steps that are nothing without the first.
        tree = script.call("open_tree", _AT_FDCWD, path.encode(), _CLONE, tolerate=[errno.ENOENT], on_error=3)
        restrict(script, tree, ATTRIBUTE_RDONLY)
        attach(script, tree, path)


@functools.cache
def _hidden() -> tuple[tuple[str, bool], ...]:
    """What there is on this machine to be hidden, and whether it is a folder."""
    return tuple((path, os.path.isdir(path)) for path in HIDDEN if os.path.lexists(path))


def _sys(script: Script, layout: Layout) -> At:
    if not layout.host_network:
        return _of_the_kernel(script, "sysfs", ATTRIBUTE_RDONLY)
    tree = detached(script, "/sys", recursive=True)
    restrict(script, tree, ATTRIBUTE_RDONLY | ATTRIBUTE_NOSUID, recursive=True)
    return tree


def _of_the_kernel(script: Script, kind: str, attributes: int) -> At:
    """A new mount of one of the kernel's file systems, of this process's namespaces, that is nowhere yet."""
    script.step = f"mount of {kind}"
    made = script.call("fsopen", kind.encode(), _FSOPEN_CLOEXEC)
    script.call("fsconfig", made, _FSCONFIG_CREATE, 0, 0, 0)
    attributes |= ATTRIBUTE_NOSUID | ATTRIBUTE_NODEV | ATTRIBUTE_NOEXEC
    tree = script.call("fsmount", made, _FSMOUNT_CLOEXEC, attributes)
    script.call("close", made)
    return tree


def _own_folder(script: Script, path: str) -> At:
    """A folder of the root that is no link, and is made if it is not there, to be mounted on; to be closed."""
    _folder(script, path)
    script.step = f"{path} of the image, which has to be a folder of its own"
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return script.call("openat", _AT_FDCWD, path.encode(), flags, 0)


def _populate_dev(script: Script, layout: Layout, devices: dict[str, At]) -> None:
    script.call("close", _own_folder(script, "/dev"))
    _mount(script, "tmpfs", "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, f"{SMALL_TMPFS},mode=755")
    for name, tree in devices.items():
        _show(script, tree, f"/dev/{name}", is_folder=False)
    for name, target in DEVICE_LINKS.items():
        script.call("symlinkat", target.encode(), _AT_FDCWD, f"/dev/{name}".encode())
    owner = f",gid={TERMINAL_GROUP}" if layout.several_users else ""
    terminals = f"newinstance,ptmxmode=0666,mode=620,max={TERMINALS}{owner}"
    _mount(script, "devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, terminals)
    size = f"{shared_memory_options(layout.shared_memory_mib)},mode=1777"
    _mount(script, "shm", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, size)
    _mount(script, "mqueue", "/dev/mqueue", "mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def _mount(script: Script, source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    _folder(script, target)
    script.step = f"mount on {target}"
    script.call("mount", source.encode(), target.encode(), kind.encode(), flags, data.encode() if data else 0)


def _folder(script: Script, path: str) -> None:
    """Make a folder, if it is not there, and those above it."""
    script.step = f"folder {path}"
    parts = os.fsencode(path).strip(b"/").split(b"/")
    for index, part in enumerate(parts, 1):
        if part:
            script.call("mkdirat", _AT_FDCWD, b"/" + b"/".join(parts[:index]), 0o755, tolerate=[errno.EEXIST])


def _show(script: Script, tree: Argument, target: str, *, is_folder: bool) -> None:
    """Mount ``tree`` on ``target``, which is made if it is not there: a folder or a file, as what is to be seen."""
    if is_folder:
        _folder(script, target)
    else:
        _folder(script, os.path.dirname(target))
        # What is there already, whatever it is, is only mounted on.
        flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        path = os.fsencode(target)
        made = script.call("openat", _AT_FDCWD, path, flags, 0o644, tolerate=[ANY], on_error=1)
        script.call("close", made)
    attach(script, tree, target)


# The calls of :mod:`.syscalls` for mounts, as steps


def detached(script: Script, source: str | At, *, recursive: bool = False) -> At:
    """As :func:`.syscalls.detached`."""
    flags = _CLONE | (syscalls.RECURSIVE if recursive else 0)
    if isinstance(source, At):
        return script.call("open_tree", source, b"", flags | syscalls.EMPTY_PATH)
    script.step = f"mount of {source}"
    return script.call("open_tree", _AT_FDCWD, os.fsencode(source), flags)


def restrict(script: Script, tree: Argument, attributes: int, *, recursive: bool = False) -> None:
    """As :func:`.syscalls.restrict`."""
    given = syscalls.mount_attributes(attributes)
    flags = syscalls.EMPTY_PATH | (syscalls.RECURSIVE if recursive else 0)
    script.call("mount_setattr", tree, b"", flags, script.data(given), len(given))


def attach(script: Script, tree: Argument, target: str | At, tolerate: Sequence[int] = ()) -> None:
    """As :func:`.syscalls.attach`, on what a name leads to or a descriptor is of: two steps."""
    flags = syscalls.FROM_EMPTY_PATH
    if isinstance(target, At):
        script.call("move_mount", tree, b"", target, b"", flags | syscalls.TO_EMPTY_PATH, tolerate=tolerate)
    else:
        script.step = f"mount on {target}"
        path = os.fsencode(target)
        script.call("move_mount", tree, b"", _AT_FDCWD, path, flags | syscalls.TO_LINKS, tolerate=tolerate)
    script.call("close", tree)
