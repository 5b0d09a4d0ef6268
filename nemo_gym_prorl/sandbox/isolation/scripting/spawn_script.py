# SPDX-License-Identifier: Apache-2.0
"""What :func:`.inside.spawn` does, as a script: start a program in a sandbox that was made from a mould.

For what is started most, commands without a terminal as the sandbox's own user. The walls are the same, in the same
order, and the same tests try them both ways; whatever a script has no words for is left to :mod:`.inside`: a terminal,
another user, whose account has to be read, and what no script has room for.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import struct
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from nemo_gym_prorl.sandbox.isolation import seccomp, syscalls
from nemo_gym_prorl.sandbox.isolation.capabilities import KEPT
from nemo_gym_prorl.sandbox.isolation.inside import Place
from nemo_gym_prorl.sandbox.isolation.scripting import scripts
from nemo_gym_prorl.sandbox.isolation.scripting.scripts import Argument, At, Script
from nemo_gym_prorl.sandbox.limits import descriptors
from nemo_gym_prorl.sandbox.limits.report import COUNTED_PER_NAMESPACE, Facts
from nemo_gym_prorl.sandbox.supervisor.processes.children import EXHAUSTED, KILLED


_F_DUPFD_CLOEXEC = 1030
GO = b"go"

_ROOM = 112
"""Steps at most."""

START_PAUSES_S = (0.005, 0.015, 0.03)
"""After each attempt to start a process where there is no room for one."""

_HIGH = 64
"""Numbers from here on are out of the way of the program's own files."""

JOINING = "the sandbox can't be joined"
"""What steps are for whose failure is the sandbox's end, and nobody's fault."""


def fits(place: Place, order: dict[str, Any]) -> bool:
    """Whether a script can start that program."""
    return place.rooted and not order["tty"] and order["user"] is None and os.uname().machine in scripts.CODE


def script(place: Place, order: dict[str, Any], files: int, first: int) -> Script:
    """The script; what it is sent with has the numbers from ``first`` on: the channel, and then ``files`` files.

    Nothing is started before :data:`GO` has come on the channel. Tells there what :func:`.inside.spawn` tells, or
    which step failed.

    Raises:
        UnfitError: it does not fit.
    """
    made = Script(_ROOM)
    channel = first
    made.call("prctl", syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    made.catch(channel)
    # What is stopped in there for ever must not keep what is the supervisor's.
    made.call("close_range", scripts.CHANNEL, first - 1, 0)
    made.step = JOINING
    made.call("prctl", syscalls.PR_SET_DUMPABLE, 0)
    process = made.call("pidfd_open", place.pid, 0)
    made.call("setns", process, place.spaces)
    made.call("close", process)
    # Refused in namespaces of ordinary users, whose groups mean nothing inside.
    made.call("setgroups", 0, 0, tolerate=[errno.EPERM])
    made.call("prctl", syscalls.PR_SET_SECUREBITS, syscalls.NO_SETUID_FIXUP)
    made.call("setresgid", *[place.uid] * 3)
    made.call("setresuid", *[place.uid] * 3)
    made.call("prctl", syscalls.PR_SET_DUMPABLE, 0)
    # The supervisor says so once it knows of us. If the runner was killed before it could tell, somebody else does it.
    made.call_or_end("read", channel, made.data(bytes(8)), 8)
    pipe = made.data(bytes(8))
    made.call("pipe2", pipe, os.O_CLOEXEC)
    # The lowest that are free.
    waiting, word = scripts.CHANNEL, scripts.FIRST_FILE if first > scripts.FIRST_FILE else first + 1 + files
    attempts, pid = _start_within(made, place.limits, channel)
    made.step = "start"
    made.tell(channel, b'{"pid": #}', pid)
    made.call("write", word, b"\n", 1)
    made.call("exit_group", 0)
    for attempt in attempts:
        made.land(attempt)
    _execute(made, place, order, files, first, waiting, word)
    return made


def _start_within(made: Script, limits: dict[int, int], channel: int) -> tuple[list[At], At]:
    """As in :mod:`.inside`: start a process, if the sandbox has room for it and for one more.

    Returns:
        The steps that may have done it, and where the process's number is then. If none did, that is told.
    """
    arguments = made.data(scripts.clone_arguments(scripts.CLONE_PARENT))
    start = partial(made.call, "clone3", arguments, len(scripts.clone_arguments(0)))
    number = made.data(bytes(8))
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    most = limits[resource.RLIMIT_NPROC] if Facts.here(frozenset()).kernel >= COUNTED_PER_NAMESPACE else soft
    # We are counted as long as we are here.
    made.limit(resource.RLIMIT_NPROC, most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
    started = made.here() + (4 * len(START_PAUSES_S) + 4) * scripts.SIZE
    attempts = []
    for pause_s in START_PAUSES_S:
        attempts.append(start(tolerate=[errno.EAGAIN], on_error=2))
        made.call("store", attempts[-1], number)
        made.call("jump", started)
        # Others like us, or what has just ended, may be about to go.
        made.call("nanosleep", made.data(struct.pack("=2q", 0, int(pause_s * 1e9))), 0)
    made.limit(resource.RLIMIT_NPROC, soft, hard)
    # That there is room without the sandbox's own limit is all that is asked: the process ends.
    start(on_zero=1)
    made.tell(channel, json.dumps(EXHAUSTED).encode())
    made.call("exit_group", 0)
    assert made.here() == started
    return attempts, At(number)


def _execute(
    made: Script, place: Place, order: dict[str, Any], files: int, first: int, waiting: int, word: int
) -> None:
    """The new process: wait for the word, and become the program."""
    made.call("close", word)
    # Who was to give it was killed. Unsaid, this end would be taken for that of the program.
    made.call_or_end("read", waiting, made.data(bytes(8)), 1, last=(first, json.dumps(KILLED).encode()))
    made.call("setsid")
    report: Argument = made.call("fcntl", first, _F_DUPFD_CLOEXEC, max(files, _HIGH))
    made.catch(report)
    for number in range(files):
        # Each source has a higher number than what it becomes, and so is still there.
        made.call("dup3", first + 1 + number, number, 0)
    if files < 3:
        made.call("close_range", files, 2, 0)
    made.call("umask", 0o022)
    made.step = f"working folder {order['cwd']}"
    made.call("chdir", os.fsencode(order["cwd"]))
    made.step = "limits"
    if files_allowed := descriptors.of_commands():
        made.limit(resource.RLIMIT_NOFILE, *files_allowed)
    for number in _dropped(place.capabilities):
        made.call("prctl", syscalls.PR_CAPBSET_DROP, number)
    made.call("prctl", syscalls.PR_SET_NO_NEW_PRIVS, 1)
    for limit, value in place.limits.items():
        made.limit(limit, value, value)
    made.call("prctl", syscalls.PR_SET_SECUREBITS, 0)
    seccomp.add_to(made)
    made.step = order["argv"][0]
    argv = _strings(made, order["argv"])
    env = _strings(made, [f"{name}={value}" for name, value in order["env"].items()])
    program = os.fsencode(order["argv"][0])
    paths = [program]
    if b"/" not in program:
        paths = [os.path.join(os.fsencode(folder), program) for folder in os.get_exec_path(order["env"])]
    for path in paths[:-1]:
        made.call("execve", path, argv, env, tolerate=[errno.ENOENT, errno.ENOTDIR])
    made.call("execve", paths[-1], argv, env)


def _strings(made: Script, texts: Sequence[str]) -> int:
    encoded = [os.fsencode(text) for text in texts]
    for text in encoded:
        if b"\0" in text:
            raise scripts.UnfitError
    places = [made.data(text + b"\0") for text in encoded]
    return made.data(struct.pack(f"={len(places) + 1}Q", *places, 0))


@cache
def _dropped(added: frozenset[int]) -> tuple[int, ...]:
    kept = added.union(KEPT.values())
    return tuple(number for number in range(syscalls.last_capability() + 1) if number not in kept)


def failure(script: Script, said: dict[str, Any]) -> dict[str, Any]:
    """What :func:`.inside.spawn` says of a step that failed, or of what the script has found out itself."""
    if "step" not in said:
        return said
    lost = script.words(said["step"]) == JOINING and said["errno"] != errno.EAGAIN
    return {"error": script.trouble(said), **({"lost": True} if lost else {"errno": said["errno"]})}
