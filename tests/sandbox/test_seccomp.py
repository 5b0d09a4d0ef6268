# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The system call filter applies in every sandbox, and allows what programs need; capabilities that are added.

Each refused call is also made on the host without the filter, where the result must differ. So the tests show the
filter and not a missing capability.
"""

from __future__ import annotations

import ast
import asyncio
import errno
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_gym_prorl import syscall_filter
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation import seccomp
from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.spec import Start
from nemo_gym_prorl.syscall_filter import ALLOW, KILL, REFUSE, UNKNOWN, ArgumentRule, FilterAction


TABLE = seccomp.TABLES[os.uname().machine]
X32 = 0x40000000


Call = tuple[int, int, tuple[int, ...]]
"""Architecture, number, arguments."""


def judge(program: bytes, call: Call) -> int:
    """Interpret a filter program as the kernel does; returns its action."""
    architecture, number, arguments = call
    shown = struct.pack("=iIQ6Q", number - (1 << 32) * (number >> 31), architecture, 0, *arguments)
    code = list(struct.iter_unpack("=HBBI", program))
    assert len(code) <= 4096, "the kernel takes no more"
    at, held = 0, 0
    while True:
        operation, if_true, if_false, operand = code[at]
        at += 1
        match operation:
            case 0x20:
                held = struct.unpack_from("=I", shown, operand)[0]
            case 0x54:
                held &= operand
            case 0x05:
                at += operand
            case 0x15:
                at += if_true if held == operand else if_false
            case 0x35:
                at += if_true if held >= operand else if_false
            case 0x06:
                return int(operand)
            case _:
                raise AssertionError(f"no such instruction: {operation:#x}")


def read(actions: Mapping[int, FilterAction], last: int, call: Call) -> int:
    """Return the action by the table."""
    _architecture, number, arguments = call
    if number > last:
        return UNKNOWN
    action = actions.get(number, ALLOW)
    while isinstance(action, ArgumentRule):
        seen = arguments[action.index] & 0xFFFFFFFF & action.mask
        action = action.then if seen in action.values else action.otherwise
    return action


WORDS = st.integers(0, 0xFFFFFFFF)
SIMPLE = st.sampled_from([ALLOW, REFUSE, UNKNOWN, KILL])
CONDITIONS = st.builds(ArgumentRule, st.integers(0, 5), st.frozensets(WORDS, max_size=40), SIMPLE, SIMPLE, WORDS)
ARGUMENTS = st.tuples(*[st.integers(0, 2**64 - 1)] * 6)


@settings(max_examples=30)
@given(
    st.dictionaries(st.integers(0, 300), SIMPLE | CONDITIONS, max_size=300),
    st.integers(0, 300),
    st.lists(st.tuples(st.just(7), st.integers(0, 310) | WORDS, ARGUMENTS), min_size=1),
    st.data(),
)
def test_a_filter_program_decides_by_its_table(
    actions: dict[int, FilterAction], last: int, calls: list[Call], data: st.DataObject
) -> None:
    program = syscall_filter.compile_filter(7, actions, last)
    conditions = [number for number, action in actions.items() if isinstance(action, ArgumentRule) and action.values]
    if conditions:
        # Add a call that meets a condition, since random ones rarely do.
        number = data.draw(st.sampled_from(conditions))
        condition = actions[number]
        assert isinstance(condition, ArgumentRule)
        value = data.draw(st.sampled_from(sorted(condition.values))) | data.draw(WORDS) << 32
        calls.append((7, number, tuple(value if place == condition.index else 0 for place in range(6))))
    for call in calls:
        assert judge(program, call) == read(actions, last, call)
        assert judge(program, (8, *call[1:])) == KILL, "another architecture"


@pytest.mark.parametrize("machine", seccomp.TABLES)
def test_no_number_stands_for_two_calls(machine: str) -> None:
    table = seccomp.TABLES[machine]
    numbers = [*table.refused.values(), *table.conditional.values(), seccomp.CLONE3]
    assert len(numbers) == len(set(numbers))
    assert not any(number in gap for number in numbers for gap in table.unused)
    assert set(table.conditional) == set(seccomp.CONDITIONAL_RULES)


def test_the_machine_itself_numbers_them_so() -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to ask")
    ours = {**TABLE.refused, **TABLE.conditional, "clone3": seccomp.CLONE3}
    lines = "".join(f"#ifdef SYS_{name}\n{name}! SYS_{name}\n#endif\n" for name in ours)
    header = f"#include <sys/syscall.h>\n{lines}"
    said = subprocess.run([compiler, "-E", "-P", "-"], input=header, capture_output=True, text=True, check=True).stdout
    numbers = {name: int(number) for name, number in re.findall(r"^(\w+)! (\d+)$", said, re.MULTILINE)}
    assert len(numbers) > len(ours) // 2
    assert numbers == {name: ours[name] for name in numbers}


def number_of(name: str) -> int:
    return {**TABLE.refused, **TABLE.conditional, "clone3": seccomp.CLONE3}[name]


REFUSED: dict[str, tuple[str, tuple[int, ...]]] = {
    "keyctl": ("keyctl", (0, -3, 0)),
    "bpf": ("bpf", (9999, 0, 0)),
    "perf_event_open": ("perf_event_open", (0, 0, 0, 0, 0)),
    "userfaultfd": ("userfaultfd", (1,)),
    "mount": ("mount", (0, 0, 0, 0, 0)),
    "umount2": ("umount2", (0, 0xFFFF)),
    "open_tree": ("open_tree", (-100, 0, 0xFFFF)),
    "fsopen": ("fsopen", (0, 0)),
    "setns": ("setns", (-1, 0)),
    "unshare": ("unshare", (0,)),
    "clone with a new user namespace": ("clone", (0x10000200, 0, 0, 0, 0)),
    "clone with new mounts": ("clone", (0x00020200, 0, 0, 0, 0)),
    "clone3": ("clone3", (0, 0)),
    "io_setup": ("io_setup", (0, 0)),
    "io_uring_enter": ("io_uring_enter", (-1, 0, 0, 0, 0, 0)),
    "open_by_handle_at": ("open_by_handle_at", (-1, 0, 0)),
    "kcmp": ("kcmp", (0, 0, 99, 0, 0)),
    "fanotify_init": ("fanotify_init", (0xFFFFFFFF, 0)),
    "personality without random addresses": ("personality", (0x0040000,)),
    "socket of ciphers": ("socket", (38, 5, 0)),
    "socket to the host of a machine": ("socket", (40, 1, 0)),
    "the same with something in the upper half": ("socket", (1 << 32 | 40, 1, 0)),
    "socket of packets": ("socket", (17, 3, 0)),
    "socket of packets by its old name": ("socket", (2, 10, 0)),
    "the same with flags": ("socket", (2, 10 | 0o2000000 | 0o4000, 0)),
    "socket of two families' bits": ("socket", (3, 1, 0)),
    "socket of all families' bits": ("socket", (27, 1, 0)),
    "socket of a family that is none": ("socket", (46, 1, 0)),
    "socket of a high number": ("socket", (64 | 2, 1, 0)),
    "pair of IPv4": ("socketpair", (2, 1, 0, 0)),
    "input of a terminal": ("ioctl", (0, 0x5412, 0)),
    "input of a console": ("ioctl", (0, 0x541C, 0)),
    "limits of another process": ("prlimit64", (2, 99, 0, 0)),
    "tracing the first process": ("ptrace", (99, 1, 0, 0)),
}
"""Calls whose result differs for root on the host without a filter; most have invalid arguments and no effect."""

ALLOWED: dict[str, tuple[str, tuple[int, ...]]] = {
    "personality, asked": ("personality", (0xFFFFFFFF,)),
    "socket of IPv4": ("socket", (2, 1, 0)),
    "socket of the kernel's own news": ("socket", (16, 3, 0)),
    "socket of Unix": ("socket", (1, 1, 0)),
    "socket of IPv6": ("socket", (10, 2, 0)),
    "socket with flags": ("socket", (2, 1 | 0o2000000 | 0o4000, 0)),
    "limits of one's own": ("prlimit64", (0, 7, 0, 0)),
}

CALLER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
for line in sys.stdin.read().split(";"):
    number, *arguments = map(int, line.split())
    ctypes.set_errno(0)
    libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    print(ctypes.get_errno())
"""


def orders(calls: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    return ";".join(f"{number_of(name)} {' '.join(map(str, arguments))}" for name, arguments in calls.values())


def expected(name: str) -> int:
    return errno.ENOSYS if name == "clone3" else errno.EPERM


async def make_calls(container: Container, given: str) -> list[int]:
    done = await container.run(f"echo '{given}' | python3 -c '{CALLER}'")
    assert done.exit_code == 0, done
    return [int(line) for line in done.stdout.split()]


@pytest.mark.sandbox
@pytest.mark.parametrize("start", ["direct", "runtime"])
@pytest.mark.parametrize("root", [True, False], ids=["root", "user"])
async def test_a_sandbox_is_refused_what_the_table_refuses(
    image: Path, runtime: Runtime, root: bool, start: Start
) -> None:
    async with await Container.start(ContainerSpec(image=image, root=root, start=start), runtime) as container:
        answers = await make_calls(container, orders(REFUSED))
        assert dict(zip(REFUSED, answers, strict=True)) == {
            name: expected(call) for name, (call, _) in REFUSED.items()
        }
        assert await make_calls(container, orders(ALLOWED)) == [0] * len(ALLOWED)
        newest, old_abi = await make_calls(container, f"{seccomp.MAX_SYSCALL + 1} -1 0 0;{X32 + 39}")
        assert newest == old_abi == errno.ENOSYS


@pytest.mark.skipif(
    not is_machine_root() or "Seccomp:\t0" not in Path("/proc/self/status").read_text(),
    reason="some are refused here in any case",
)
def test_without_the_filter_none_of_them_is_refused_so() -> None:
    command = [sys.executable, "-c", CALLER]
    said = subprocess.run(command, input=orders(REFUSED), capture_output=True, text=True, check=True).stdout
    for (name, (call, _arguments)), answer in zip(REFUSED.items(), said.split(), strict=True):
        assert int(answer) != expected(call), name


CAP_SYS_PTRACE, CAP_SYS_RESOURCE = 19, 24

TAKE_OVER = """
import ctypes
libc = ctypes.CDLL(None)
print("taken" if libc.ptrace(16, 1, 0, 0) == 0 else "refused", open("/proc/1/status").read())
"""


@pytest.mark.sandbox
@pytest.mark.parametrize("start", ["direct", "runtime"])
@pytest.mark.parametrize("root", [True, False], ids=["root", "user"])
async def test_who_takes_over_the_first_process_gets_no_more(
    image: Path, runtime: Runtime, root: bool, start: Start
) -> None:
    async with await Container.start(ContainerSpec(image=image, root=root, start=start), runtime) as container:
        found, _, status = (await container.run(f"python3 -c '{TAKE_OVER}'")).stdout.partition(" ")
        assert "Seccomp:\t2" in status, status
        assert found == "refused"
        # The first process may be the image's own program.
        rights = int(re.findall(r"^CapEff:\s(\w+)$", status, re.MULTILINE)[0], 16)
        assert not rights & (1 << CAP_SYS_PTRACE | 1 << CAP_SYS_RESOURCE)


@pytest.mark.sandbox
async def test_who_may_trace_everything_gains_nothing_by_the_first_process(image: Path, runtime: Runtime) -> None:
    spec = ContainerSpec(image=image, capabilities=["SYS_PTRACE"])
    async with await Container.start(spec, runtime) as container:
        status = (await container.run(f"python3 -c '{TAKE_OVER}'")).stdout
        assert "Seccomp:\t2" in status
        assert "CapPrm:\t0000000000000000" in status
        assert "CapAmb:\t0000000000000000" in status
    # A first process of the runtime has all capabilities.
    with pytest.raises(CallerError, match="SYS_PTRACE needs") as caught:
        await Container.start(replace(spec, start="runtime"), runtime)
    assert caught.value.field == "capabilities"


HUNT = """
import os
caught = set()
open('/tmp/hunting', 'w').close()
while not os.path.exists('/tmp/enough'):
    for number in {*filter(str.isdigit, os.listdir('/proc'))} - {'1'}:
        try:
            caught.add(os.readlink(f'/proc/{number}/exe'))
        except OSError:
            pass
print(caught)
"""
"""Reads the executable of every process but the first."""


@pytest.mark.sandbox
async def test_a_debugger_is_given_what_it_needs_and_sees_its_own_only(image: Path, runtime: Runtime) -> None:
    spec = ContainerSpec(image=image, capabilities=["SYS_PTRACE", "NET_ADMIN"])
    async with await Container.start(spec, runtime) as container:
        bounding = (await container.run("grep CapBnd /proc/self/status")).stdout.split()[1]
        assert int(bounding, 16) >> 19 & 1
        assert int(bounding, 16) >> 12 & 1
        assert not int(bounding, 16) >> 21 & 1
        # A joiner must be closed to ptrace until it has executed a program of the sandbox.
        hunting = asyncio.create_task(container.execute(["python3", "-c", HUNT]))
        await container.run("until test -e /tmp/hunting; do sleep 0.05; done")
        for _ in range(40):
            await container.run("true")
        await container.run("touch /tmp/enough")
        caught = set(ast.literal_eval((await hunting).stdout))
        assert any(name.startswith("/usr/bin/") for name in caught)
        assert not {name for name in caught if not name.startswith(("/usr/bin/", "/bin/"))}


@pytest.mark.sandbox
@pytest.mark.parametrize("name", ["SYS_ADMIN", "ALL", "NONSENSE"])
async def test_other_capabilities_are_refused_by_name(image: Path, runtime: Runtime, name: str) -> None:
    with pytest.raises(CallerError, match=f"{name} can.t be granted to a sandbox; choose from NET_ADMIN, SYS_PTRACE"):
        await Container.start(ContainerSpec(image=image, capabilities=[name]), runtime)


TAKEN_OVER = """
import glob, os, struct, sys, time
calls = [tuple(map(int, line.split())) for line in sys.argv[1].split(";")]
stack, at = (int(number, 16) for number in open("/proc/1/syscall").read().split()[-2:])
code = b""
for place, (number, *arguments) in enumerate(calls):
    for register, value in zip((0xBF, 0xBE, 0xBA, 0xB8), (*arguments, 0, 0, 0)[:3] + (number,)):
        code += struct.pack("<BI", register, value & 0xFFFFFFFF)
    code += b"\\x0f\\x05\\x89\\x84\\x24" + struct.pack("<i", 4 * place)
with open("/proc/1/mem", "r+b", buffering=0) as memory:
    memory.seek(stack)
    memory.write(struct.pack("<i", 1) * len(calls))
    memory.seek(at)
    memory.write(code + b"\\xeb\\xfe")
    for path in glob.glob("/proc/[0-9]*"):
        if int(path[6:]) not in (1, os.getpid(), os.getppid()):
            os.kill(int(path[6:]), 9)
    answers = (1,)
    while 1 in answers:
        time.sleep(0.01)
        memory.seek(stack)
        answers = struct.unpack("<" + "i" * len(calls), memory.read(4 * len(calls)))
print(*(-answer for answer in answers), sep="\\n")
"""
"""Makes the first process make calls and report their results, then loop."""


@pytest.mark.sandbox
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="these are instructions of that")
async def test_a_first_process_with_the_rights_of_commands_is_refused_what_they_are(
    image: Path, runtime: Runtime
) -> None:
    """Commands can write to that process's memory without the right to trace, and so make it call anything."""
    tried = {name: call for name, call in REFUSED.items() if call[0] in seccomp.CONDITIONAL_RULES}
    assert {name for name, _ in tried.values()} == set(seccomp.CONDITIONAL_RULES)
    async with await Container.start(ContainerSpec(image=image, root=False, start="runtime"), runtime) as container:
        done = await container.execute(["python3", "-c", TAKEN_OVER, orders(tried)], timeout_s=20)
        assert done.stdout.split() == [str(errno.EPERM)] * len(tried), done
