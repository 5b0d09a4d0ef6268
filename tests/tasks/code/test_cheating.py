# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Ways to be rewarded without a solution: each works on an obvious grader, and earns nothing here."""

import asyncio

import pytest

from nemo_gym_prorl.tasks.code.grading import CodeLimits, grade_in
from nemo_gym_prorl.tasks.code.rows import Case, Problem
from nemo_gym_prorl.tasks.task import Grade
from tests.tasks import containers
from tests.tasks.code import naive
from tests.tasks.code.conftest import Judge


pytestmark = [pytest.mark.sandbox, pytest.mark.asyncio(loop_scope="module")]

LINES = {"kind": "lines"}
VALUES = {"kind": "lines", "absolute": 1e-6, "relative": 1e-6, "wrapped": False}
PROGRAM = Problem([Case(f"{i}\n", f"{i * i + 90210}\n") for i in range(3)], None, LINES)
FUNCTION = Problem([Case([i], [i, i * i]) for i in range(3)], "f", VALUES)

IN_PROCESS = {
    "exit before the comparison": "import os\nos.write(1, b'all passed\\n')\nos._exit(0)\n",
    "edited tests": (
        "import json, sys\n"
        "number = int(sys.stdin.read())\n"
        "for place in ('.', '/tmp', '/sandbox'):\n"
        "    try:\n"
        "        tests = json.load(open(place + '/tests.json'))\n"
        "        print(tests[number]['expected'])\n"
        "    except OSError: pass\n"
    ),
    "patched grader": (
        "import __main__, sys\n"
        "for module in list(sys.modules.values()) + [__main__]:\n"
        "    for name in ('same', 'right', 'lines', 'tokens', 'examine', 'judge'):\n"
        "        if hasattr(module, name): setattr(module, name, lambda *a, **k: True)\n"
    ),
    "patched builtins": (
        "import builtins, io, os, sys\n"
        "class Output(str):\n"
        "    def __eq__(self, other): return True\n"
        "    def split(self, *a): return Any()\n"
        "class Any(list):\n"
        "    def __eq__(self, other): return True\n"
        "    __hash__ = None\n"
        "class Sink:\n"
        "    def write(self, text): pass\n"
        "    def flush(self): pass\n"
        "    def getvalue(self): return Output()\n"
        "sys.stdout = Sink()\n"
        "builtins.open = builtins.input = builtins.len = builtins.all = lambda *a, **k: True\n"
    ),
    "expected outputs in memory": (
        "import gc, sys\n"
        "number = sys.stdin.read()\n"
        "def search(value):\n"
        "    if isinstance(value, dict) and value.get('input') == number and 'expected' in value:\n"
        "        return value['expected']\n"
        "found = [search(v) for o in gc.get_objects() for v in ([o, *o] if isinstance(o, list) else [o])]\n"
        "print(*[text for text in found if text][:1])\n"
    ),
    "huge memory": "kept = []\nwhile True: kept.append(bytearray(1 << 20))\n",
}
"""Programs; the first is also told by a line that the obvious grader prints."""

CALLED = {
    "equal to everything": (
        "class Equal:\n"
        "    __hash__ = object.__hash__\n"
        "    def __eq__(self, other): return True\n"
        "def f(*a): return Equal()\n"
    ),
    "a list that is equal": (
        "class L(list):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(*a): return L()\n"
    ),
    "expected value in a frame": (
        "import sys\n"
        "def f(*a):\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        for scope in (frame.f_locals, frame.f_globals):\n"
        "            if isinstance(scope.get('test'), dict): return scope['test'].get('expected')\n"
        "        frame = frame.f_back\n"
    ),
}

A_PROCESS_EACH = {
    "background process that writes later": (
        "import glob, json, os, time\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os.setsid()\n"
        "    if os.fork(): os._exit(0)\n"
        "    os.close(1); os.close(0)\n"
        "    expected = [t['expected'] for t in json.load(open('tests.json'))]\n"
        "    for _ in range(2000):\n"
        "        for number, text in enumerate(expected):\n"
        "            try:\n"
        "                if not os.path.getsize(f'out{number}'): open(f'out{number}', 'w').write(text)\n"
        "            except OSError: pass\n"
        "        time.sleep(0.001)\n"
        "    os._exit(0)\n"
        "time.sleep(0.5)\n"
    ),
    "memory of the grader": (
        "import json, os, re\n"
        "number = input()\n"
        "pid = os.getppid()\n"
        "answers = {}\n"
        "for line in open(f'/proc/{pid}/maps'):\n"
        "    low, high = (int(part, 16) for part in line.split()[0].split('-'))\n"
        "    if 'rw' not in line: continue\n"
        "    memory = open(f'/proc/{pid}/mem', 'rb', 0)\n"
        "    try:\n"
        "        memory.seek(low)\n"
        "        data = memory.read(high - low)\n"
        "    except (OSError, OverflowError): continue\n"
        "    for text in re.findall(rb'902[0-9][0-9]', data): answers[int(text)] = text\n"
        "print(answers[int(number) ** 2 + 90210].decode())\n"
    ),
    "a wrong verdict for no verdict": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n",
    "infinite output": (  # and where no more fits, no end either
        "import os, time\nwhile True:\n    try: os.write(1, b'x' * 65536)\n    except OSError: time.sleep(60)\n"
    ),
    "fork bomb": ("import os, time\nwhile True:\n    try: os.fork()\n    except OSError: break\ntime.sleep(60)\n"),
}
NO_VERDICT = frozenset({"huge memory", *list(A_PROCESS_EACH)[2:]})
"""Attacks that are after no verdict at all, which would be masked or tried again."""

TRUE_REASONS = {
    "exit before the comparison": "wrong_answer",
    "edited tests": "wrong_answer",
    "patched grader": "wrong_answer",
    "patched builtins": "wrong_answer",
    "expected outputs in memory": "wrong_answer",
    "equal to everything": "wrong_answer",
    "a list that is equal": "wrong_answer",
    "expected value in a frame": "wrong_answer",
    "background process that writes later": "crashed",
    "memory of the grader": "crashed",
    "a wrong verdict for no verdict": "crashed",
    "infinite output": "output_limit",
    "fork bomb": "timed_out",
    "huge memory": "memory",
}

ATTACKS = [
    *((naive.IN_PROCESS, PROGRAM, name, source) for name, source in IN_PROCESS.items()),
    *((naive.IN_PROCESS, FUNCTION, name, source) for name, source in CALLED.items()),
    *((naive.A_PROCESS_EACH, PROGRAM, name, source) for name, source in A_PROCESS_EACH.items()),
]
IDS = [name for _, _, name, _ in ATTACKS]


@pytest.mark.parametrize(("grader", "problem", "name", "source"), ATTACKS, ids=IDS)
async def test_it_works_on_an_obvious_grader(grader: str, problem: Problem, name: str, source: str) -> None:
    async with containers.running_ours(memory_mib=512, processes=64, disk_mib=256) as sandbox:
        passed, said = await naive.grades(sandbox, grader, problem, source)
    assert not said if name in NO_VERDICT else passed


@pytest.mark.parametrize(("grader", "problem", "name", "source"), ATTACKS, ids=IDS)
async def test_it_earns_nothing(judge: Judge, grader: str, problem: Problem, name: str, source: str) -> None:
    grade = await judge(problem, source, time_s=10 if name == "huge memory" else 1, memory_mib=192)
    assert (grade.reward, grade.verdict) == (0.0, TRUE_REASONS[name]), grade
    again = await judge(problem, RIGHT[problem.function])
    assert again.passed, "the sandbox is as it was"


RIGHT = {None: "print(int(input()) ** 2 + 90210)\n", "f": "def f(n): return n, n * n\n"}


async def test_a_forged_report_is_not_believed() -> None:
    """Whatever it writes to the descriptor on which it reports, in the words of its grader."""
    forgery = (
        "import json, os\n"
        "for fd in range(1, 256):\n"
        "    for said in (['passed', ''], ['returned', True], {'verdict': 'passed', 'tests': {'passed': 3}}):\n"
        "        try: os.write(fd, json.dumps(said).encode() + b'\\n')\n"
        "        except OSError: pass\n"
        "os._exit(%d)\n"
    )
    async with containers.running_ours() as sandbox:
        for status in (0, 3):
            outcome = await grade_in(sandbox, PROGRAM, forgery % status, CodeLimits(), containers.ROOT)
            assert isinstance(outcome, Grade)
            assert (outcome.reward, outcome.verdict) == (0.0, "crashed" if status else "wrong_answer")


PLANTS = (
    "import os, sys\n"
    "names = '''\n"
    "sitecustomize.py usercustomize.py json.py math.py os.py re.py random.py heapq.py\n"
    "io.py types.py builtins.py numpy.py solution.py checker.py grader.py tests.json\n"
    "expected.txt verdict.json result.json report.json conftest.py __main__.py __init__.py pyvenv.cfg\n"
    "python3 python3._pth evil.pth .pdbrc .pythonrc.py .env out0 out1\n"
    "input.txt core\n"
    "'''.split()\n"
    "places = '. /tmp /var/tmp /dev/shm /sandbox /root /'.split() + [os.path.dirname(os.__file__), *sys.path]\n"
    "number = int(input())\n"
    'said = "print(90210); print(90211); print(90214)\\nraise SystemExit(0)\\n"\n'
    "for folder in places:\n"
    "    for name in names:\n"
    "        try: open(os.path.join(folder, name), 'w').write(said)\n"
    "        except OSError: pass\n"
    "if number == 0: print(90210)\n"
    "else: import heapq, types, numpy\n"
)
"""Leaves files under names that a grader, an interpreter or a library looks for, for the next test to find."""

MORE = {
    "nothing": "",
    "all that it could be": "print(*range(90210, 90300))\n",
    "the input": "print(open(0).read())\n",
    "plants files": PLANTS,
    "a status of a signal": "import os\nos._exit(137)\n",
    "half of the output": "import os\nprint(90210, end='', flush=True)\nos._exit(0)\n",
    "closed files": "import os\nfor n in range(64):\n    try: os.close(n)\n    except OSError: pass\n",
    "replaced files": "import os\nfor n in range(4): os.dup2(os.open('/dev/null', os.O_RDWR), n)\n",
    "a file of the other end": (
        "import os\n"
        "for n in range(9):\n"
        "    try: print(open(f'/proc/{os.getppid()}/fd/{n}').read())\n"
        "    except OSError: pass\n"
    ),
    "output as an error": "raise SystemExit('90210')\n",
    "a thread that goes on": (
        "import os, threading, time\nthreading.Thread(target=lambda: time.sleep(99), daemon=True).start()\n"
    ),
    "an end that does not end": "import atexit\natexit.register(lambda: atexit.register(print, 90210))\n",
    "finalizers": "class A:\n    def __del__(self):\n        global a\n        a = A()\na = A()\n",
    "a patched end": (
        "import os, sys\nos._exit = sys.exit = lambda *a: None\nimport gc\ngc.collect = lambda *a: print(90210)\n"
    ),
    "a patched report": (
        "import json, os\njson.dumps = lambda *a, **k: '[\"passed\", true]'\nos.write = lambda *a: 1\n1 / 0\n"
    ),
    "a main of its own": "import sys, types\nsys.modules['__main__'] = types.ModuleType('x')\nsys.modules.clear()\n",
    "an interpreter's flags": (
        "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\nsys.stdout = None\n"
    ),
    "a deep end": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()\n",
    "signals to itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n",
    "an alarm": "import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\ntime.sleep(1)\n",
    "time that stands still": "import time\ntime.time = time.monotonic = lambda: 0\nwhile True: pass\n",
    "a trusted name": "print('passed', 'reward: 1.0', '{\"verdict\": \"passed\"}')\n",
    "no text": "import os\nos.write(1, bytes(range(256)))\n",
    "signs of space": "print('9\\u20600210\\u00a0\\x00')\n",
}
"""Attacks that no obvious grader falls for, each."""


async def test_nothing_else_earns_anything(judge: Judge) -> None:
    gate = asyncio.Semaphore(3)

    async def attempt(source: str) -> Grade:
        async with gate:
            return await judge(PROGRAM, source, time_s=1, memory_mib=192)

    grades = await asyncio.gather(*map(attempt, MORE.values()))
    assert {name: grade for name, grade in zip(MORE, grades, strict=True) if grade.reward or grade.passed} == {}
    assert (await judge(PROGRAM, RIGHT[None])).passed, "the sandbox is as it was"
