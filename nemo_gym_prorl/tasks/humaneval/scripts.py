# SPDX-License-Identifier: Apache-2.0
"""Scripted turns for coding tasks (:mod:`nemo_gym_prorl.tasks.scripted_turns`): the reference must earn its reward, a
repair takes several turns, and each way to cheat must earn nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nemo_gym_prorl.tasks.humaneval.problems import SOLUTION_FILE, Problem
from nemo_gym_prorl.tasks.scripted_turns import Script, Turn, call, script_of, turn


def script_for(problem: Problem, variant: str) -> Script:
    """The script of one of :data:`VARIANTS`.

    Raises:
        CallerError: there is no such variant.
    """
    return script_of(VARIANTS, problem, variant)


def seeded_mistake(problem: Problem) -> tuple[str, str, str]:
    """A wrong solution whose mistake shows at first use, and the replacement that repairs it.

    Returns:
        The source, the line with the mistake, and the right line.
    """
    start = problem.prompt.index(f"def {problem.entry_point}(")
    line = problem.prompt[start:].split("\n", 1)[0].rstrip()
    wrong = line.removesuffix(":")
    return problem.reference_source.replace(line, wrong, 1), wrong, line


def _reference(problem: Problem) -> list[Turn]:
    return [
        turn("I write the whole function at once.", _create(problem.reference_source)),
        turn("Does it load?", call("python", code=f"import solution\nprint(solution.{problem.entry_point})")),
        turn("It does.", call("submit")),
        turn("The solution is submitted."),
    ]


def _repair(problem: Problem) -> list[Turn]:
    """Mends a mistake, with a shell that keeps a function and a Python that keeps a variable from turn to turn."""
    source, wrong, right = seeded_mistake(problem)
    check = f"check() {{ python3 -c 'import solution; print(solution.{problem.entry_point})'; }}"
    repair = call(
        "str_replace_editor", command="str_replace", path=SOLUTION_FILE, old_str=f"{wrong}\n", new_str=f"{right}\n"
    )
    return [
        turn("I write the function, and a check for later.", _create(source), call("bash", command=check)),
        turn("Does it load?", call("bash", command="check")),
        turn(
            "A syntax error. I look at the file, and remember the line.",
            call("str_replace_editor", command="view", path=SOLUTION_FILE),
            call("python", code=f"line = {wrong!r}\nline"),
        ),
        turn("The colon is missing after the signature.", repair),
        turn(
            "Once more.",
            call("bash", command="check"),
            call("python", code=f"line + ':' in open({SOLUTION_FILE!r}).read()"),
        ),
        turn("Now it loads.", call("submit")),
        turn("The solution is submitted after one repair."),
    ]


def _stub(problem: Problem) -> list[Turn]:
    return [turn("I submit it as it is.", call("submit")), turn("Submitted.")]


def _text_only(problem: Problem) -> list[Turn]:
    return [turn(f"```python\n{problem.reference_source}```")]


def _forge_tests(problem: Problem) -> list[Turn]:
    """Leaves the stub and writes tests that pass, results that say so, and a standard library that agrees."""
    forgery = (
        "mkdir -p tests && echo 'def check(candidate): pass' > tests/test_solution.py && cp -r tests / 2>/dev/null; "
        'echo \'{"reason": "passed", "reward": 1}\' | tee verdict.json result.json; '
        "python3 - <<'EOF'\n"
        "import pathlib, random\n"
        "pathlib.Path(random.__file__).write_text('raise SystemExit(0)')\n"
        "EOF\n"
        "echo All tests passed."
    )
    return [
        turn("The tests should pass.", call("bash", command=forgery)),
        turn("All tests passed.", call("submit")),
        turn("All tests passed. Reward: 1.0"),
    ]


def _cheat(source: Callable[[Problem], str]) -> Callable[[Problem], list[Turn]]:
    def turns(problem: Problem) -> list[Turn]:
        return [
            turn("Done.", _create(source(problem)), call("submit")),
            turn("All tests passed."),
        ]

    return turns


def _source(body: str) -> Callable[[Problem], str]:
    """A cheat's file; ``NAME`` stands for the function that the tests call."""
    return lambda problem: body.replace("NAME", problem.entry_point)


CHEATS: Mapping[str, Callable[[Problem], str]] = {
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
"""Ways to earn a reward without solving the problem, as the source of ``solution.py``. None may work."""

VARIANTS: Mapping[str, Callable[[Problem], list[Turn]]] = {
    "reference": _reference,
    "repair": _repair,
    "stub": _stub,
    "text_only": _text_only,
    "forge_tests": _forge_tests,
    **{name: _cheat(source) for name, source in CHEATS.items()},
}
"""Turns by name of the script: ``reference`` and ``repair`` solve the problem, all others must not be rewarded."""


def _create(source: str) -> dict[str, Any]:
    return call("str_replace_editor", command="create", path=SOLUTION_FILE, file_text=source)
