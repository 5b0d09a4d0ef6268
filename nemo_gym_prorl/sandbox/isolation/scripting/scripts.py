# SPDX-License-Identifier: Apache-2.0
"""Scripts of system calls, and the program that carries them out in place of a forked Python.

What a process does on its way into a sandbox is a list of system calls that is known before it begins. Here it is a
value: :class:`Script` puts it together, in the supervisor, and a program of 250 bytes carries it out, call by call,
in a process of a few pages. To fork that costs a fraction of forking the supervisor, and no line of Python, no library
and no memory of the supervisor's gets inside.

A *step* is eight words: the call's number and how its result is taken, six arguments, and room for the result. An
argument may be the address of a word to be taken instead, so that a step can use an earlier one's result. Errors end
the script, by way of steps that say which step it was and which error, unless they are tolerated. Four steps are none
of the kernel's: jump, store a word, write a number in digits, and say which steps come after an error.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from nemo_gym_prorl.sandbox.isolation.scripting import tiny_elf


CODE = {
    "x86_64": bytes.fromhex(
        # start: the frame into r13, the first step into r12
        "4c8b25f1000000 4d89e5 4983c440"
        # next: six arguments; of the first five those by address that bits of byte 2 name
        "498b7c2408 498b742410 498b542418 4d8b542420 4d8b442428 4d8b4c2430 418a5c2402"
        "f6c301 7403 488b3f f6c302 7403 488b36 f6c304 7403 488b12 f6c308 7403 4d8b12 f6c310 7403 4d8b00"
        # numbers from 0xfffc on are ours; else the system call, its result into word 7
        "410fb70424 6683f8fc 7353 0f05 4989442438 31c9 483d01f0ffff 7314"
        # on 0 skip as many steps as byte 6 says
        "4885c0 7505 418a4c2406"
        # advance
        "ffc1 c1e106 4901cc eb85"
        # failed: tolerated by bytes 4 and 5, 0xff for any: skip as byte 7 says; else to the frame, and on from there
        "f7d8 418a4c2407 413a442404 74e8 413a442405 74e1 41807c2404ff 74d9 4d896508 49894510 4d8b6500 e957ffffff"
        # which of ours
        "31c9 6683f8fd 722c 7424 6683f8fe 7419"
        # digits of argument 0, backwards, up to the address in argument 1
        "89f8 bf0a000000 31d2 f7f7 80c230 48ffce 8816 85c0 75f0 eb9f"
        # store; catch; jump
        "48893e eb9a 49897d00 eb94 4989fc e91bffffff 0f1f440000"
    ),
    "aarch64": bytes.fromhex(
        # The same with x19 for the step and x20 for the frame.
        "13080058 f40313aa 73020191"
        "608640a9 628e41a9 649642a9 690a4039"
        "49000036 000040f9 49000836 210040f9 49001036 420040f9 49001836 630040f9 49002036 840040f9"
        "68024079 8aff9f52 0b010a6b 02030054 010000d4 601e00f9 0a008052 1ffc3fb1 c2000054"
        "400000b5 6a1a4039"
        "4a050011 731a0a8b e5ffff17"
        "e003004b 6a1e4039 6b124039 6c164039 1f000b6b 00ffff54 1f000c6b c0feff54 7ffd0371 80feff54 938200a9 930240f9"
        "d8ffff17"
        "0a008052 0b020034 7f090071 83010054 20010054"
        "4c018052 0d08cc1a ae810c1b cec10011 2efc1f38 e0030d2a 60ffff35 e4ffff17"
        "200000f9 e2ffff17 800200f9 e0ffff17 f30300aa c5ffff17 1f2003d5"
    ),
}
"""The program for each architecture; behind it comes the address of the frame."""

CALLS = {
    "x86_64": {
        **{"read": 0, "write": 1, "close": 3, "sendto": 44, "recvmsg": 47, "execve": 59, "fcntl": 72, "chdir": 80},
        **{"umask": 95, "setsid": 112, "setgroups": 116, "setresuid": 117, "setresgid": 119, "prctl": 157},
        **{"exit_group": 231, "dup3": 292, "pipe2": 293, "prlimit64": 302, "setns": 308, "seccomp": 317},
        **{"rt_sigaction": 13, "ioctl": 16, "nanosleep": 35, "socket": 41, "fchdir": 81, "fchmod": 91, "capset": 126},
        **{"pivot_root": 155, "mount": 165, "umount2": 166, "sethostname": 170, "openat": 257, "mkdirat": 258},
        **{"unlinkat": 263, "symlinkat": 266, "fchmodat": 268, "execveat": 322},
    },
    "aarch64": {
        **{"read": 63, "write": 64, "close": 57, "sendto": 206, "recvmsg": 212, "execve": 221, "fcntl": 25},
        **{"chdir": 49, "nanosleep": 101, "umask": 166, "setsid": 157, "setgroups": 159, "setresuid": 147},
        **{"setresgid": 149, "prctl": 167, "exit_group": 94, "dup3": 24, "pipe2": 59, "prlimit64": 261},
        **{"setns": 268, "seccomp": 277, "rt_sigaction": 134, "ioctl": 29, "socket": 198, "fchdir": 50},
        **{"fchmod": 52, "capset": 91, "pivot_root": 41, "mount": 40, "umount2": 39, "sethostname": 161},
        **{"openat": 56, "mkdirat": 34, "unlinkat": 35, "symlinkat": 36, "fchmodat": 53, "execveat": 281},
    },
}
_EVERYWHERE = {"pidfd_open": 434, "clone3": 435, "close_range": 436, "jump": 0xFFFC, "catch": 0xFFFD, "store": 0xFFFE}
_EVERYWHERE |= {"digits": 0xFFFF, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432}
_EVERYWHERE |= {"mount_setattr": 442}

ANY = 0xFF
"""As an error that is tolerated: whichever it is."""

SIZE = 64
"""Bytes of a step, and of a frame."""

LARGEST = 60_000
"""Bytes of a script that can be carried out."""

BOOT_AT = tiny_elf.DATA_AT
SCRIPT_AT = BOOT_AT + 0x1000
"""Where what the program begins with is in memory, and the script that it is given."""

CLONE_AT = SCRIPT_AT
STEPS_AT = SCRIPT_AT + 2 * SIZE
"""Of a script: how it is to be forked, and what it does; behind that comes what its arguments point to."""

MEMORY = 0x1000 + LARGEST

ANSWER = struct.Struct("=q")
"""What it says of each: the number of the process, or less than 0 for an error."""

CLONE_PARENT, CLONE_INTO_CGROUP = 0x8000, 0x200000000
SIGCHLD = 17

_MSG_NOSIGNAL, _MSG_CMSG_CLOEXEC = 0x4000, 0x40000000
_CLONE_ARGUMENTS = struct.Struct("=11Q")

_STEP = struct.Struct("=HBBBBBB6QQ")
_NUMBER_WIDTH = 20


class UnfitError(Exception):
    """It is more than a script can be, or nothing that one can hold."""


@dataclass(frozen=True, slots=True)
class At:
    """An argument that is not known yet: the word at an address."""

    address: int


Argument = int | bytes | At


@cache
def numbers() -> dict[str, int]:
    """System calls by name, and the steps that are none."""
    return {**CALLS[os.uname().machine], **_EVERYWHERE}


class Script:
    """One script, of ``room`` steps at most; ``step`` tells in words what those that follow are for."""

    def __init__(self, room: int, steps_at: int = STEPS_AT) -> None:
        self.step = ""
        self._steps_at, self._data_at = steps_at, steps_at + room * SIZE
        self._steps: list[bytes] = []
        self._words: list[str] = []
        self._data = bytearray()
        self._numbers = numbers()

    def here(self) -> int:
        """The address of the next step."""
        return self._steps_at + SIZE * len(self._steps)

    def data(self, content: bytes) -> int:
        """Keep something that an argument is to point to; returns where it is."""
        self._data += bytes(-len(self._data) % 8)
        address = self._data_at + len(self._data)
        self._data += content
        return address

    def call(
        self, name: str, *arguments: Argument, tolerate: Sequence[int] = (), on_zero: int = 0, on_error: int = 0
    ) -> At:
        """Add a step; returns its result.

        Args:
            name: of the call.
            arguments: numbers, results of others, or what is pointed to: texts get an end.
            tolerate: errors that end nothing, two at most.
            on_zero: steps that are skipped if the result is 0.
            on_error: steps that are skipped after an error that is tolerated.
        """
        words = [0] * 6
        by_address = 0
        for index, argument in enumerate(arguments):
            if isinstance(argument, At):
                by_address |= 1 << index
                words[index] = argument.address
            elif isinstance(argument, bytes):
                words[index] = self.data(argument + b"\0")
            else:
                words[index] = argument & 0xFFFFFFFFFFFFFFFF
        first, second = (*tolerate, 0, 0)[:2]
        result = At(self.here() + SIZE - 8)
        number = self._numbers[name]
        self._steps.append(_STEP.pack(number, by_address, 0, first, second, on_zero, on_error, *words, 0))
        self._words.append(self.step)
        return result

    def limit(self, which: int, soft: int, hard: int) -> None:
        """Add a step that sets a limit of the process, ``resource.RLIMIT_*``."""
        limits = struct.pack("=2Q", *(value & 0xFFFFFFFFFFFFFFFF for value in (soft, hard)))
        self.call("prlimit64", 0, which, self.data(limits), 0)

    def call_or_end(self, name: str, *arguments: Argument, last: tuple[Argument, bytes] | None = None) -> At:
        """Add a step that ends the script if its result is 0, with a ``last`` message on a channel."""
        result = self.call(name, *arguments)
        self.call("jump", self.here() + (2 if last is None else 3) * SIZE)
        self.land(result)
        if last is not None:
            self.tell(*last, final=True)
        self.call("exit_group", 127)
        return result

    def land(self, forked: At) -> None:
        """Have a step go on here if its result is 0."""
        index = (forked.address - self._steps_at) // SIZE
        step = self._steps[index]
        self._steps[index] = step[:6] + bytes([len(self._steps) - index - 1]) + step[7:]

    def number_in(self, template: bytes, number: At) -> int:
        """Have a result written in digits where ``template`` has a ``#``, after as many bytes of the one before it as
        fit; returns where the text is."""
        before, _, after = template.partition(b"#")
        text = before + before[-1:] * _NUMBER_WIDTH + after
        address = self.data(text + b"\0")
        self.call("digits", number, address + len(before) + _NUMBER_WIDTH)
        return address

    def tell(self, channel: Argument, template: bytes, *results: At, final: bool = False) -> None:
        """Send a message with results in place of each ``#``; that nobody takes it is a failure, if not ``final``."""
        parts = template.split(b"#")
        text, ends = parts[0], []
        for part in parts[1:]:
            text += b" " * _NUMBER_WIDTH
            ends.append(len(text))
            text += part
        address = self.data(text)
        for end, result in zip(ends, results, strict=True):
            self.call("digits", result, address + end)
        self.call("sendto", channel, address, len(text), _MSG_NOSIGNAL, tolerate=[ANY] if final else [])

    def catch(self, channel: Argument) -> None:
        """From here on say on ``channel`` which step failed, and end."""
        # Past the jump over what is only for failures.
        self.call("catch", self.here() + 2 * SIZE)
        begin = len(self._steps)
        self._steps.append(b"")
        self._words.append("")
        self.tell(channel, b'{"step": #, "errno": #}', At(BOOT_AT + 8), At(BOOT_AT + 16), final=True)
        self.call("exit_group", 127)
        end = self.here()
        self._steps[begin] = _STEP.pack(self._numbers["jump"], *[0] * 6, end, *[0] * 6)

    def words(self, address: int) -> str:
        """What the step at ``address`` is for."""
        index, rest = divmod(address - self._steps_at, SIZE)
        return "" if rest or not 0 <= index < len(self._words) else self._words[index]

    def trouble(self, said: dict[str, int]) -> str:
        """In words what :meth:`catch` says."""
        return f"{self.words(said['step'])}: {os.strerror(said['errno'])}"

    def packed(self) -> bytes:
        """As it is in memory.

        Raises:
            UnfitError: it is more than the program takes.
        """
        steps = b"".join(self._steps)
        room = self._data_at - self._steps_at
        if len(steps) > room or self._data_at - SCRIPT_AT + len(self._data) > LARGEST:
            raise UnfitError("it takes more steps than a script can have")
        return steps.ljust(room, b"\0") + self._data


CHANNEL = 3
"""The open file of the program over which it is given scripts."""

FIRST_FILE = 4
"""What numbers the open files have that a script is sent with, from here on."""

CONTROL = 512
"""Bytes for those files."""

_PR_SET_PDEATHSIG, _SIGKILL, _PR_SET_DUMPABLE = 1, 9, 4


def _boot() -> bytes:
    """What the program does: take a script, fork a process that carries it out, and say which one that is, again and
    again until nobody is there to ask."""
    boot = Script(16, BOOT_AT + SIZE)
    control = boot.data(bytes(CONTROL))
    vector = boot.data(struct.pack("=2Q", SCRIPT_AT, LARGEST))
    header = boot.data(struct.pack("=7Q", 0, 0, vector, 1, control, 0, 0))
    boot.call("prctl", _PR_SET_PDEATHSIG, _SIGKILL)
    boot.call("prctl", _PR_SET_DUMPABLE, 0)
    _close_others(boot)
    again = boot.here()
    boot.call("store", CONTROL, header + 40)
    boot.call("recvmsg", CHANNEL, header, _MSG_CMSG_CLOEXEC, on_zero=5)
    forked = boot.call("clone3", CLONE_AT, _CLONE_ARGUMENTS.size, tolerate=[ANY], on_zero=3)
    boot.call("sendto", CHANNEL, forked.address, ANSWER.size, _MSG_NOSIGNAL)
    _close_others(boot)
    boot.call("jump", again)
    boot.call("jump", STEPS_AT)
    boot.call("exit_group", 0)
    failed = boot.here()
    boot.call("exit_group", 127)
    return struct.pack("=8Q", failed, *[0] * 7) + boot.packed()


def _close_others(boot: Script) -> None:
    boot.call("close_range", FIRST_FILE, 0xFFFFFFFF, 0)


def clone_arguments(flags: int, group: int = 0) -> bytes:
    """How a script is to be forked: as a child of the program's parent."""
    signal = 0 if flags & CLONE_PARENT else SIGCHLD
    return _CLONE_ARGUMENTS.pack(flags, 0, 0, 0, signal, 0, 0, 0, 0, 0, group)


def make() -> int:
    """The program, as a descriptor to be executed with its channel as file :data:`CHANNEL`.

    Raises:
        OSError: it is not known for this architecture, or this machine's memory files can't be executed.
    """
    machine = os.uname().machine
    if machine not in CODE:
        raise OSError(errno.ENOSYS, f"there is no program for {machine}")
    code = CODE[machine] + struct.pack("=Q", BOOT_AT)
    return tiny_elf.load("script", tiny_elf.image(tiny_elf.MACHINES[machine], code, _boot(), MEMORY))
