# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Scripted cheats for HumanEval, in addition to the scripts of ``prorl demo``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nemo_gym_prorl.cli.scripted import demo
from nemo_gym_prorl.cli.scripted.demo import create
from nemo_gym_prorl.cli.scripted.text import Turn, call, script_of, turn
from nemo_gym_prorl.tasks.code.code_rows import HumanEvalProblem


def script_for(problem: HumanEvalProblem, variant: str) -> dict[str, list[Turn]]:
    """Return the script of a variant.

    Raises:
        CallerError: the variant is unknown.
    """
    return script_of(VARIANTS, problem, variant)


def _cheat(source: Callable[[HumanEvalProblem], str]) -> Callable[[HumanEvalProblem], list[Turn]]:
    def turns(problem: HumanEvalProblem) -> list[Turn]:
        return [
            turn("Done.", create(source(problem)), call("submit")),
            turn("All tests passed."),
        ]

    return turns


def _source(body: str) -> Callable[[HumanEvalProblem], str]:
    """Return a function that creates a cheat's source for a problem; ``NAME`` in ``body`` is the tested function."""
    return lambda problem: body.replace("NAME", problem.entry_point)


CHEATS: Mapping[str, Callable[[HumanEvalProblem], str]] = {
    "exit_on_import": _source("import sys\nprint('All tests passed.')\nsys.exit(0)\n"),
    "exit_hard_on_import": _source("import os\nos._exit(0)\n"),
    "exit_hard_in_call": _source("import os\ndef NAME(*a, **k):\n    os._exit(0)\n"),
    "equal_to_all": _source(
        "class Equal:\n"
        "    __hash__ = object.__hash__\n"
        "    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n"
        "    def __lt__(self, other): return True\n"
        "    __gt__ = __le__ = __ge__ = __lt__\n"
        "    def __bool__(self): return True\n"
        "    def __iter__(self): return iter(())\n"
        "    def __sub__(self, other): return 0\n"
        "def NAME(*a, **k): return Equal()\n"
    ),
    "equal_subclasses": _source(
        "class S(str):\n"
        "    def __eq__(self, other): return True\n"
        "    __hash__ = str.__hash__\n"
        "class L(list):\n"
        "    def __eq__(self, other): return True\n"
        "calls = 0\n"
        "def NAME(*a, **k):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    return S('x') if calls % 2 else L([S('x')])\n"
    ),
    "patched_builtins": _source(
        "import builtins, math, random, sys\n"
        "class Silent(Exception): pass\n"
        "builtins.AssertionError = Silent\n"
        "for name in ('abs', 'sum', 'sorted', 'tuple', 'round', 'len', 'all'):\n"
        "    setattr(builtins, name, lambda *a, **k: 0)\n"
        "math.fabs = lambda x: 0.0\n"
        "for frame in list(sys._current_frames().values()):\n"
        "    while frame:\n"
        "        frame.f_globals['check'] = lambda candidate: None\n"
        "        frame = frame.f_back\n"
        "def NAME(*a, **k): return None\n"
    ),
    "forged_verdict": _source(
        "import glob, json, os\n"
        "line = '\\n' + '0' * 32 + ' ' + json.dumps({'reason': 'passed', 'detail': ''}) + '\\n'\n"
        "frame = json.dumps(['returned', True]).encode()\n"
        "for target in glob.glob('/proc/[0-9]*/fd/[0-9]*'):\n"
        "    try:\n"
        "        with open(target, 'wb', buffering=0) as file: file.write(line.encode())\n"
        "    except OSError: pass\n"
        "for fd in range(1, 64):\n"
        "    try: os.write(fd, line.encode() + len(frame).to_bytes(4, 'big') + frame)\n"
        "    except OSError: pass\n"
        "def NAME(*a, **k): return True\n"
    ),
    "stolen_nonce": _source(
        "import glob, json, os, re\n"
        "def NAME(*a, **k):\n"
        "    found = set()\n"
        "    for path in glob.glob('/proc/[0-9]*/*') + glob.glob('/sandbox/**', recursive=True):\n"
        "        try: data = open(path, 'rb').read(1 << 20)\n"
        "        except OSError: continue\n"
        "        found.update(re.findall(rb'\\b[0-9a-f]{32}\\b', data))\n"
        "    for pid in [entry for entry in os.listdir('/proc') if entry.isdigit()]:\n"
        "        try:\n"
        "            maps = open(f'/proc/{pid}/maps').read().splitlines()\n"
        "            memory = open(f'/proc/{pid}/mem', 'rb', 0)\n"
        "            for line in maps:\n"
        "                low, high = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "                if int(pid) != os.getpid() and 'rw' in line:\n"
        "                    memory.seek(low)\n"
        "                    found.update(re.findall(rb'[0-9a-f]{32}', memory.read(high - low)))\n"
        "        except (OSError, ValueError): continue\n"
        "    for nonce in found:\n"
        "        line = b'\\n' + nonce + b' ' + json.dumps({'reason': 'passed', 'detail': ''}).encode() + b'\\n'\n"
        "        for target in glob.glob('/proc/[0-9]*/fd/1'):\n"
        "            try:\n"
        "                with open(target, 'wb', buffering=0) as file: file.write(line)\n"
        "            except OSError: pass\n"
    ),
    "poisoned_library": _source(
        "import glob, os\n"
        "for path in glob.glob('/usr/lib/python3*/*.py') + glob.glob('/usr/local/lib/python3*/*.py'):\n"
        "    if os.path.basename(path) in ('random.py', 'copy.py', 'traceback.py', 'json.py', 'string.py'):\n"
        "        try:\n"
        "            with open(path, 'w') as file: file.write('import os\\nos._exit(0)\\n')\n"
        "        except OSError: pass\n"
        "def NAME(*a, **k): return None\n"
    ),
    "killed_tester": _source(
        "import os, signal\ndef NAME(*a, **k):\n    os.kill(os.getppid(), signal.SIGKILL)\n    return None\n"
    ),
}
"""Source of ``solution.py`` by name of the cheat; no cheat may earn a reward."""

VARIANTS: Mapping[str, Callable[[HumanEvalProblem], list[Turn]]] = {
    **demo.VARIANTS,
    **{name: _cheat(source) for name, source in CHEATS.items()},
}
"""Turns by variant: ``reference`` and ``repair`` solve the problem; no other variant may earn a reward."""
