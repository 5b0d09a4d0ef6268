# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Operations that a candidate's process cannot perform, tried from inside.

A program reports its findings in the exception that ends it, since its output is discarded.
"""

import pytest

from nemo_gym_prorl.sandbox.isolation import seccomp
from nemo_gym_prorl.syscall_filter import ALLOW, REFUSE
from nemo_gym_prorl.tasks.code import grading as filters
from nemo_gym_prorl.tasks.code.code_rows import CodeProblem, CodeTestCase
from tests.sandbox.test_seccomp import judge as run_filter
from tests.tasks.code.conftest import Judge


of_one_loop = pytest.mark.asyncio(loop_scope="module")

LINES = {"kind": "lines"}
NEEDLES = CodeProblem([CodeTestCase(f"NEEDLE-IN-{i}\n", f"NEEDLE-OUT-{i}\n") for i in range(3)], None, LINES)
ONE = CodeProblem([CodeTestCase("", "right\n")], None, LINES)


async def told(judge: Judge, source: str, problem: CodeProblem = ONE) -> str:
    """Return the exception text that ends the program."""
    grade = await judge(problem, source, time_s=5)
    assert grade.verdict == "crashed", grade
    return grade.detail


TRY = """
import ctypes, os, signal, sys, resource, fcntl, socket
parent, machine = os.getppid(), os.uname().machine
libc = ctypes.CDLL(None, use_errno=True)
refused, done = [], []
def attempt(name, action):
    try:
        result = action()
        failed = isinstance(result, int) and result < 0
    except OSError:
        failed = True
    (refused if failed else done).append(name)
def call(number, *arguments):
    return libc.syscall(number, *arguments)
"""

FOREIGN = """
attempt('signal', lambda: os.kill(parent, 0))
attempt('signal to a group', lambda: os.kill(-parent, 0))
attempt('signal to all', lambda: os.kill(-1, 0))
attempt('pidfd', lambda: os.pidfd_open(parent))
attempt('prlimit', lambda: resource.prlimit(parent, resource.RLIMIT_CPU, (1, 1)))
attempt('priority', lambda: os.setpriority(os.PRIO_PROCESS, parent, 19))
attempt('priority of all', lambda: os.setpriority(os.PRIO_USER, 0, 19))
attempt('affinity', lambda: os.sched_setaffinity(parent, {0}))
attempt('scheduler', lambda: os.sched_setscheduler(parent, os.SCHED_IDLE, os.sched_param(0)))
attempt('ptrace', lambda: libc.ptrace(16, parent, 0, 0))
attempt('memory', lambda: open(f'/proc/{parent}/mem', 'rb'))
attempt('maps', lambda: open(f'/proc/{parent}/maps'))
attempt('environ', lambda: open(f'/proc/{parent}/environ'))
attempt('a file', lambda: open(f'/proc/{parent}/fd/0'))
attempt('link to a file', lambda: os.readlink(f'/proc/{parent}/fd/0'))
attempt('oom', lambda: open(f'/proc/{parent}/oom_score_adj', 'w').write('1000'))
one, other = socket.socketpair()
attempt('owner of signals', lambda: fcntl.fcntl(one, fcntl.F_SETOWN, parent))
attempt('its signal', lambda: fcntl.fcntl(one, fcntl.F_SETSIG, signal.SIGKILL))
attempt('owner by ioctl', lambda: fcntl.ioctl(one, 0x8901, parent.to_bytes(4, 'little')))
"""

CHILDREN = """
import subprocess, threading
attempt('fork', os.fork)
attempt('vfork', lambda: call(58) if machine == 'x86_64' else -1)
attempt('clone3', lambda: call(435, ctypes.c_char_p((17).to_bytes(88, 'little')), 88))
attempt('subprocess', lambda: subprocess.run(['true']))
attempt('posix_spawn', lambda: os.posix_spawn('/bin/true', ['true'], {}))
thread = threading.Thread(target=lambda: done.append('thread'))
thread.start()
thread.join()
"""

NOTES = """
attempt('tmp', lambda: open('/tmp/note', 'w'))
attempt('shm', lambda: open('/dev/shm/note', 'w'))
attempt('home', lambda: os.mkdir(os.path.expanduser('~/note')))
attempt('library', lambda: open(os.__file__, 'a'))
attempt('mode', lambda: os.chmod('/tmp', 0o1777))
attempt('owner', lambda: os.chown('/tmp', 0, 0))
attempt('times', lambda: os.utime('/tmp'))
attempt('attribute', lambda: os.setxattr('/tmp', 'user.note', b'1'))
attempt('segment', lambda: call(29 if machine == 'x86_64' else 194, 77, 4096, 0o1777))
attempt('queue', lambda: call(240 if machine == 'x86_64' else 180, b'note', 0o102, 0o777, None))
attempt('socket', lambda: socket.socket() and 0)
attempt('name without a file', lambda: socket.socket(socket.AF_UNIX).bind('\\0note'))
attempt('link', lambda: os.link('/etc/passwd', '/etc/note'))
attempt('rename', lambda: os.rename('/etc/passwd', '/etc/note'))
attempt('truncate', lambda: os.truncate('/etc/passwd', 0))
attempt('remove', lambda: os.unlink('/etc/passwd'))
attempt('here', lambda: open('note', 'w').write('1'))
attempt('there', lambda: open(os.environ['TMPDIR'] + '/other', 'w'))
attempt('null', lambda: open('/dev/null', 'w').write('1'))
attempt('pair', lambda: socket.socketpair() and 0)
"""


@of_one_loop
@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("tried", "allowed"),
    [(FOREIGN, []), (CHILDREN, ["thread"]), (NOTES, ["here", "there", "null", "pair"])],
    ids=["other processes", "children", "notes for the next test"],
)
async def test_candidate_operations_are_refused(judge: Judge, tried: str, allowed: list[str]) -> None:
    said = await told(judge, f"{TRY}{tried}\nraise Exception(done, len(refused))\n")
    refused = tried.count("attempt(") - len([name for name in allowed if f"attempt('{name}'" in tried])
    assert f"Exception: ({allowed}, {refused})" in said


@of_one_loop
@pytest.mark.sandbox
async def test_other_tests_and_expected_outputs_are_unreachable(judge: Judge) -> None:
    """The last of three tests searches its address space and all readable files."""
    source = (
        "import ctypes, glob, os, re, sys\n"
        "mine = sys.stdin.read().strip()\n"
        "number = mine[-1]\n"
        "if number != '2':\n"
        "    open('left-behind', 'w').write('NEEDLE-IN-' + number)\n"
        "    print('NEEDLE' + '-OUT-' + number)\n"
        "    sys.exit()\n"
        "data = []\n"
        "for line in open('/proc/self/maps'):\n"
        "    low, high = (int(part, 16) for part in line.split()[0].split('-'))\n"
        "    if ' rw' in line and '[v' not in line: data.append(ctypes.string_at(low, high - low))\n"
        "where = glob.glob('/tmp/**', recursive=True) + glob.glob('/sandbox/**', recursive=True)\n"
        "where += [p for p in glob.glob('/proc/[0-9]*/fd/*') if f'/{os.getpid()}/' not in p]\n"
        "where += glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/dev/shm/*')\n"
        "for path in where:\n"
        "    try: data.append(open(path, 'rb').read(1 << 24))\n"
        "    except OSError: pass\n"
        "found = {match.decode() for match in re.findall(rb'NEEDLE-(?:IN|OUT)-[0-9]', b''.join(data))}\n"
        "opened = sorted(map(int, os.listdir('/proc/self/fd')))[:-1]\n"  # the last is the listing's own
        "raise Exception(sorted(found), os.listdir('.'), opened, len(b''.join(data)) > 1 << 20, len(where) > 20)\n"
    )
    said = await told(judge, source, NEEDLES)
    assert said.startswith("test 3 of 3 failed: Exception: (['NEEDLE-IN-2'], [], [0, 1, 2, 3], True, True)"), said


@of_one_loop
@pytest.mark.sandbox
async def test_candidate_has_no_capabilities(judge: Judge) -> None:
    source = "raise Exception({line.split()[1] for line in open('/proc/self/status') if line.startswith('Cap')})\n"
    assert "Exception: {'0000000000000000'}" in await told(judge, source)


@of_one_loop
@pytest.mark.sandbox
async def test_leftover_files_are_removed_between_tests(judge: Judge) -> None:
    """Nested folders, folders without permissions and names that are not text."""
    source = (
        "import os\n"
        "assert os.listdir('.') == [], os.listdir('.')\n"
        "here = os.getcwd()\n"
        "for _ in range(500):\n"
        "    os.mkdir('d')\n"
        "    os.chdir('d')\n"
        "os.chdir(here)\n"
        "os.mkdir('closed', 0)\n"
        "os.mkdir(b'\\xff')\n"
        "os.symlink('/etc', 'link')\n"
        "open('file', 'w').write('1')\n"
        "print('right')\n"
    )
    problem = CodeProblem([CodeTestCase("", "right\n")] * 3, None, LINES)
    grade = await judge(problem, source)
    assert grade.passed, grade


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_syscall_numbers_match_the_sandbox_tables(machine: str) -> None:
    table = seccomp.TABLES[machine]
    known = {**table.refused, **table.conditional}
    ours = {**filters.COMMON_SYSCALLS, **filters.SYSCALLS[machine]}
    assert len(set(ours.values())) == len(ours)
    assert len(ours.keys() & known.keys()) > 10
    for name in ours.keys() & known.keys():
        assert ours[name] == known[name], name
    assert filters.ARCHITECTURES[machine] == table.audit


@pytest.mark.parametrize("machine", filters.ARCHITECTURES)
def test_filters_allow_own_limits_and_threads_only(machine: str) -> None:
    strict, lone = map(bytes.fromhex, filters.filters()[machine])

    def said(program: bytes, name: str, *arguments: int) -> int:
        given = (*arguments, *[0] * (6 - len(arguments)))
        return run_filter(program, (filters.ARCHITECTURES[machine], filters.SYSCALLS[machine][name], given))

    for which, who, verdict in ((0, 0, ALLOW), (0, 7, REFUSE), (1, 0, REFUSE), (2, 0, REFUSE)):
        assert said(strict, "setpriority", which, who, 19) == verdict
    assert [said(strict, "prlimit64", pid) for pid in (0, 7)] == [ALLOW, REFUSE]
    assert [said(strict, "socketpair", family) for family in (1, 2, 30)] == [ALLOW, REFUSE, REFUSE]
    assert [said(strict, "clone", flags) for flags in (17, 0x10F00)] == [ALLOW, ALLOW]
    assert [said(lone, "clone", flags) for flags in (17, 0x10F00)] == [REFUSE, ALLOW]
