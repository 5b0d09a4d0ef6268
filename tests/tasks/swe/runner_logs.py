# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Made-up runs of ten kinds of test runners: what they print, their exit code, and what the witness in them saw.

Statuses are drawn; some runs end early, some lists name tests that there are not, or names that are cut off, and some
policies print what they were not asked for. All is told in the format of the runner, noise of its kind included.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from nemo_gym_prorl.tasks.swe.instance import SweInstance
from nemo_gym_prorl.tasks.swe.report import Told
from nemo_gym_prorl.tasks.swe.testing import Run
from tests.tasks.swe import records


BAD = ("FAILED", "ERROR")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of runner.

    Attributes:
        parser: swebench's name of what reads it.
        command: how it is started, from which we see whether it has a witness.
        name: the name of a test by its number.
        write: the lines that it prints of tests and their statuses.
        statuses: those that it has.
        eval_type: the row's.
        listed: a test's name as the dataset has it.
    """

    parser: str
    command: str
    name: Callable[[random.Random, int], str]
    write: Callable[[random.Random, Mapping[str, str]], Iterable[str]]
    statuses: tuple[str, ...] = ("FAILED", "ERROR", "SKIPPED", "XFAIL")
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail"
    listed: Callable[[str], str] = str

    @property
    def witnessed(self) -> bool:
        """A plugin of ours is in it."""
        return "pytest" in self.command or "runtests" in self.command


def _pytest_name(draw: random.Random, number: int) -> str:
    parameter = draw.choice(["", "[1]", "[a-b]", "[/tmp/x/y]", "[MouseButton.LEFT]", "[1.5-None]"])
    return f"lib/tests/test_sums.py::{draw.choice(['', 'TestAll::'])}test_{number}{parameter}"


def _summary(draw: random.Random, statuses: Mapping[str, str]) -> Iterator[str]:
    yield "=========================== short test summary info ============================"
    for wanted in ("PASSED", "SKIPPED", "XFAIL", "FAILED", "ERROR"):
        for name, status in statuses.items():
            if status == wanted == "SKIPPED":
                yield f"SKIPPED [1] {name.partition('::')[0]}:{draw.randrange(99)}: needs ERROR handling"
            elif status == wanted:
                said = {"FAILED": " - AssertionError: 1 != 2 - not", "XFAIL": " - known", "ERROR": " - OSError"}
                yield f"{status} {name}{said.get(status, '')}"
    counts = ", ".join(f"{list(statuses.values()).count(one)} {one.lower()}" for one in sorted(set(statuses.values())))
    yield f"========================= {counts} in 0.12s ========================="


def _pytest(draw: random.Random, statuses: Mapping[str, str]) -> Iterator[str]:
    yield "============================= test session starts =============================="
    yield "platform linux -- Python 3.9.19, pytest-7.4.0, pluggy-1.5.0"
    yield f"collected {len(statuses)} items"
    yield f"lib/tests/test_sums.py {''.join(status[0] for status in statuses.values())} [100%]"
    yield draw.choice(["", "----- Captured stdout call -----\nPASSED is a word\n12 FAILED", "\x1b[32mok\x1b[0m"])
    yield from _summary(draw, statuses)


def _classic(draw: random.Random, statuses: Mapping[str, str]) -> Iterator[str]:
    yield f"collecting ... collected {len(statuses)} items"
    for name, status in statuses.items():
        yield f"{name} {status}"
    yield from _summary(draw, statuses)


def _wrapped(draw: random.Random, statuses: Mapping[str, str]) -> Iterator[str]:
    """As where a line of progress is too long for the terminal."""
    yield from (f"{name}\nPASSED [100%]" for name, status in list(statuses.items())[-1:] if status == "PASSED")
    yield from _pytest(draw, statuses)


def _tox(draw: random.Random, statuses: Mapping[str, str]) -> Iterator[str]:
    yield "py39: commands[0]> python -X dev -m pytest -rA --durations 25 lib/tests/test_sums.py"
    yield from _pytest(draw, statuses)
    yield (
        "py39: exit 1 (1.25 seconds) /testbed> python -X dev -m pytest"
        if set(BAD) & {*statuses.values()}
        else "py39: OK"
    )


def _django_name(draw: random.Random, number: int) -> str:
    return draw.choice([f"test_{number} (sums.tests.AllTests)", f"Sums are sums, the {number}th of them."])


def _django(draw: random.Random, statuses: Mapping[str, str]) -> Iterator[str]:
    yield "Testing against Django installed in '/testbed/django'"
    words = {"PASSED": "ok", "FAILED": "FAIL", "ERROR": "ERROR", "SKIPPED": "skipped 'no database'"}
    words["XFAIL"] = "expected failure"
    for name, status in statuses.items():
        if not name.startswith("test_"):
            yield f"test_more_{name.split()[4][:-2]} (sums.tests.AllTests)"
        noise = (
            draw.choice(["", "", "", "System check identified no issues (0 silenced)\n"]) if status == "PASSED" else ""
        )
        yield f"{name} ... {noise}{words[status]}"
    for name, status in statuses.items():
        if status in BAD:
            yield f"{'=' * 70}\n{words[status]}: {name}\n{'-' * 70}\nTraceback (most recent call last):"
    yield f"Ran {len(statuses)} tests in 0.1s"


def _sympy(draw: random.Random, statuses: Mapping[str, str]) -> Iterator[str]:
    yield "============================= test process starts =============================="
    yield f"sympy/core/tests/test_sums.py[{len(statuses)}]"
    words = {"PASSED": "ok", "FAILED": "F", "ERROR": "E", "SKIPPED": "s", "XFAIL": "f"}
    yield from (f"{name} {words[status]}" for name, status in statuses.items())
    for name, status in statuses.items():
        if status in BAD:
            yield f"{'_' * 20} sympy/core/tests/test_sums.py:{name} {'_' * 20}"
    yield "============= tests finished: some, in 0.1 seconds ============="


def _go(draw: random.Random, statuses: Mapping[str, str]) -> Iterator[str]:
    words = {"PASSED": "PASS", "FAILED": "FAIL", "SKIPPED": "SKIP"}
    for name, status in statuses.items():
        yield f"=== RUN   {name}\n--- {words[status]}: {name} (0.0{draw.randrange(9)}s)"
    yield "FAIL\texample.com/sums\t0.1s" if "FAILED" in statuses.values() else "ok  \texample.com/sums\t0.1s"


def _mocha(draw: random.Random, statuses: Mapping[str, str]) -> Iterator[str]:
    failed = [name for name, status in statuses.items() if status == "FAILED"]
    yield f"  {len(statuses) - len(failed)} passing (1s)\n  {len(failed)} failing\n"
    yield from (f"  {number}) {name}:\n     AssertionError: 1 != 2\n" for number, name in enumerate(failed, start=1))


def _with_short_paths(name: str) -> str:
    return name.replace("/tmp/x/y", "/y")


def _with_numbered_buttons(name: str) -> str:
    return name.replace("MouseButton.LEFT", "1")


def _plain(draw: random.Random, number: int) -> str:
    return f"test_{number}"


KINDS = {
    "pytest": Kind("parse_log_pytest", "pytest -rA", _pytest_name, _wrapped),
    "requests": Kind("parse_log_requests", "pytest -rA", _pytest_name, _pytest, listed=_with_short_paths),
    "astropy": Kind("parse_log_astropy", "pytest -rA -vv", _pytest_name, _classic),
    "seaborn": Kind("parse_log_seaborn", "pytest --no-header -rA", _pytest_name, _pytest),
    "matplotlib": Kind("parse_log_matplotlib", "pytest -rA", _pytest_name, _pytest, listed=_with_numbered_buttons),
    "django": Kind("parse_log_django", "./tests/runtests.py --verbosity 2", _django_name, _django),
    "sphinx": Kind("parse_log_sphinx", "tox --current-env -epy39 -v -- -rA", _pytest_name, _tox),
    "sympy": Kind("parse_log_sympy", "bin/test -C --verbose", _plain, _sympy),
    "go": Kind("parse_log_gotest", "go test -v ./...", lambda draw, n: f"TestSums{n}", _go, ("FAILED", "SKIPPED")),
    "eslint": Kind(
        "parse_log_eslint",
        "npx mocha",
        lambda draw, n: f"sums rule {n}",
        _mocha,
        ("FAILED",),
        eval_type="fail_only",
        listed=lambda name: f"{name}:",
    ),
}
"""By name: ten parsers of swebench."""

WAYS = (
    *["all passes", "one outside"] * 2,
    "a test of the lists",
    "some tests",
    "ends early",
    "crashes at its end",
    "prints passes",
    "prints marks",
    "no test",
    "names cut off",
    "names of no test",
)
"""What happens in a run."""


def draw_run(kind: Kind, draw: random.Random) -> tuple[str, SweInstance, Run]:
    """A run: what happened, its task, and what there is of it."""
    way = draw.choice(WAYS)
    names = list(dict.fromkeys(kind.name(draw, at) for at in range(draw.randint(3, 9))))
    fail, keep = names[:1], names[1 : draw.randint(2, len(names))]
    statuses = dict.fromkeys(names, "PASSED")
    if way in ("a test of the lists", "prints passes"):
        statuses[draw.choice([*fail, *keep])] = draw.choice(kind.statuses)
    if way == "some tests":
        statuses |= {name: draw.choice((*kind.statuses, "PASSED")) for name in draw.sample(names, 2)}
    if way == "one outside":
        names.append(outside := f"{kind.name(draw, 99)}")
        statuses[outside] = "FAILED"
    exit_code = int(bool(set(BAD) & set(statuses.values())))
    shown = {name: "PASSED" for name in statuses} if way == "prints passes" else statuses
    text = "\n".join(kind.write(draw, {} if way == "no test" else shown)) + "\n"
    ended = True
    if way == "ends early":
        text, exit_code, ended = text[: draw.randrange(len(text))], draw.choice([0, 139]), False
    if way == "crashes at its end":
        exit_code, ended = draw.choice([1, 134]), False
    if way == "prints marks":
        text = draw.choice([">>>>> Test Exit Code: 0\n", ">>>>> Tests Errored\n", ">>>>> End Test Output\n"]) + text
        exit_code = draw.choice([0, 1])
    if way == "no test":
        exit_code, statuses = draw.choice([0, 5]), {}
    if way == "names cut off" and "[" in keep[-1]:
        keep[-1] = keep[-1][: keep[-1].index("[") + 2].removesuffix("]")
    if way == "names of no test" and kind.parser == "parse_log_pytest":
        keep.append("[100%]")
    told = (
        Told({} if way == "ends early" else statuses, begun=way != "no test", ended=ended) if kind.witnessed else None
    )
    instance = SweInstance(
        dataset="swe-bench",
        repo="eslint/eslint" if kind.eval_type == "fail_only" else "a/b",
        version="1.0",
        problem_statement="x",
        patch=records.PATCH,
        FAIL_TO_PASS=tuple(map(kind.listed, fail)),
        PASS_TO_PASS=tuple(map(kind.listed, keep)),
        test_command=kind.command,
        log_parser=kind.parser,
        eval_type=kind.eval_type,
    )
    return way, instance, Run(exit_code=exit_code, log=text, told=told)
