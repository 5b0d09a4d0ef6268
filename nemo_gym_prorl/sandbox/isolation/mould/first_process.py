# SPDX-License-Identifier: Apache-2.0
"""The first process of a sandbox that is made from a mould: makes the sandbox, and then only waits.

What it does is a script (:mod:`.scripts`), the end of which is that it becomes :mod:`.idle_program`: no program of the
image is in its place, and the kernel collects its orphans unasked. Nothing in it is of use to those inside: it has no
capability, no open file, no variable, no memory of the supervisor's, and can't be traced.
"""

from __future__ import annotations

import errno
import os
import signal
import struct
from collections.abc import Iterable

from nemo_gym_prorl.sandbox.isolation import accounts, seccomp, syscalls
from nemo_gym_prorl.sandbox.isolation.mould import idle_program, root_fs
from nemo_gym_prorl.sandbox.isolation.mould.root_fs import Layout
from nemo_gym_prorl.sandbox.isolation.scripting.scripts import ANY, At, Script
from nemo_gym_prorl.sandbox.limits import kernel_shares


READY = b"\n"
"""All that it says if the sandbox can be joined; anything else is why it can't."""

_AT_EMPTY_PATH = 0x1000
_MSG_NOSIGNAL, _MSG_CMSG_CLOEXEC = 0x4000, 0x40000000
_CONTROL = struct.Struct("=24s")
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_SIG_IGN = 1


def add_to(
    script: Script,
    layout: Layout,
    uid: int,
    gid: int,
    channel: int,
    program: int,
    added: Iterable[tuple[str, str]],
    *,
    given_image: bool,
) -> None:
    """Make the sandbox when the supervisor says so, and live until killed.

    Args:
        script: to be carried out in the new namespaces.
        layout: of its file system.
        uid: the user of the sandbox, as numbered inside.
        gid: his group.
        channel: to the supervisor, which sends word once this process is mapped, by root with the image as a mount.
            It is closed when the sandbox is ready.
        program: of :mod:`.idle_program`.
        added: lines of files in ``/etc`` that its user takes.
        given_image: whether the image comes with the word.
    """
    script.step = "start"
    script.call("prctl", syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    script.catch(channel)
    image = _wait_for_word(script, channel)
    script.call("setsid")
    script.call("umask", 0o022)
    # Refused to ordinary users without a range of groups; what that means is told in docs/sandbox.md.
    script.call("setgroups", 0, 0, tolerate=[errno.EPERM])
    # Until the end it has them all, whoever it is.
    script.call("prctl", syscalls.PR_SET_SECUREBITS, syscalls.NO_SETUID_FIXUP)
    script.call("setresgid", gid, gid, gid)
    script.call("setresuid", uid, uid, uid)
    # Changed ids made the kernel forget it.
    script.call("prctl", syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernels = root_fs.enter(script, layout, image if given_image else None)
    script.step = "host name"
    script.call("sethostname", accounts.HOST_NAME.encode(), len(accounts.HOST_NAME))
    if not layout.host_network:
        _raise_loopback(script)
    # In a user namespace of its own a process would have every capability again.
    forbid_user_namespaces(script, kernels.proc)
    _settle_shares(script, kernels.proc, layout.shared_memory_mib)
    accounts.add_to(script, layout.resolver, added)
    root_fs.show(script, kernels)
    script.step = "rights"
    script.call("prctl", syscalls.PR_SET_NO_NEW_PRIVS, 1)
    script.call("capset", *map(script.data, syscalls.no_capability_sets()))
    seccomp.add_to(script)
    # Children that nobody waits for are reaped by the kernel then, also after an exec.
    script.call("rt_sigaction", signal.SIGCHLD, script.data(struct.pack("=4Q", _SIG_IGN, 0, 0, 0)), 0, 8)
    script.step = "idle program"
    # Those that are not closed by themselves; an ordinary user's sandbox could count them.
    script.call("close_range", 0, 2, 0)
    script.call("sendto", channel, script.data(READY), len(READY), _MSG_NOSIGNAL)
    arguments = script.data(struct.pack("=2Q", script.data(idle_program.NAME.encode() + b"\0"), 0))
    script.call("execveat", program, b"", arguments, script.data(bytes(8)), _AT_EMPTY_PATH)


def _wait_for_word(script: Script, channel: int) -> At:
    """Returns the file that comes with it. No word is that the supervisor has died, or has changed its mind."""
    control = script.data(bytes(_CONTROL.size))
    vector = script.data(struct.pack("=2Q", script.data(bytes(16)), 16))
    header = script.data(struct.pack("=7Q", 0, 0, vector, 1, control, _CONTROL.size, 0))
    script.call_or_end("recvmsg", channel, header, _MSG_CMSG_CLOEXEC)
    return At(control + 16)


def _raise_loopback(script: Script) -> None:
    script.step = "loopback device"
    device = script.call("socket", 2, 2, 0)
    script.call("ioctl", device, _SIOCSIFFLAGS, script.data(struct.pack("16sh22x", b"lo", _IFF_UP)))
    script.call("close", device)


def forbid_user_namespaces(script: Script, proc: At) -> None:
    """Let none be made inside. ``proc`` is the kernel's, whatever an image has of that name."""
    path = b"sys/user/max_user_namespaces"
    script.step = os.fsdecode(path)
    setting = script.call("openat", proc, path, os.O_WRONLY | os.O_CLOEXEC, 0)
    script.call("write", setting, b"0", 1)
    script.call("close", setting)


def _settle_shares(script: Script, proc: At, shared_memory_mib: int) -> None:
    """As :func:`.kernel_shares.settle`, and for the same reasons whatever is refused stays as it is."""
    for name, value in kernel_shares.settings(shared_memory_mib).items():
        path = f"sys/{name}".encode()
        setting = script.call("openat", proc, path, os.O_WRONLY | os.O_CLOEXEC, 0, tolerate=[ANY], on_error=2)
        script.call("write", setting, value.encode(), len(value), tolerate=[ANY])
        script.call("close", setting)
