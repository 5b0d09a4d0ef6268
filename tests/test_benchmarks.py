# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Benchmarks import, measure what is known, report what they measured, and judge goals by the ratio to the peer."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

import benchmarks
from benchmarks import plots, processes, report
from benchmarks.report import Row


@pytest.mark.parametrize("name", sorted(path.stem for path in Path(benchmarks.__file__).parent.glob("[a-z]*.py")))
def test_a_benchmark_imports(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (Row("a", "ms", 1.0, 4.0, "peer", "<= 0.25"), "met"),
        (Row("a", "ms", 1.1, 4.0, "peer", "<= 0.25"), "missed"),
        (Row("a", "1/s", 8.0, 4.0, "peer", ">= 2"), "met"),
        (Row("a", "1/s", 7.9, 4.0, "peer", ">= 2"), "missed"),
        (Row("a", "ms", float("nan"), 4.0, "peer", "<= 1"), "missed"),
        (Row("a", "ms", 1.0, None, "peer", "<= 1"), "missed"),
        (Row("a", "ms", 1.0, 0.0, "peer", "<= 1"), "missed"),
        (Row("a", "ms", 1.0, 4.0, "peer"), "no goal"),
    ],
)
def test_a_goal_is_judged_by_the_ratio(row: Row, verdict: str) -> None:
    assert row.verdict == verdict


@pytest.mark.parametrize("quick", [True, False])
def test_a_run_is_written_and_only_a_full_one_changes_the_table(
    quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{report.BEGIN}old\n{report.END}after\n")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "QUICK_RESULTS", tmp_path / "quick")
    monkeypatch.setattr(report, "PAGE", page)
    rows = [Row("start", "ms", 3.0, 2.0, "peer", "<= 1"), Row("end", "ms", 5.0)]
    report.publish("shell", rows, quick=quick)
    if quick:
        assert (tmp_path / "quick" / "shell.json").exists()
        assert "old" in page.read_text()
        return
    setting, read = report.read("shell")
    assert read == rows
    assert {"machine", "load", "date", "tree", "packages"} <= setting.keys()
    line = "| shell | start | 3 ms | 2 (peer) | 1.5 | <= 1 | **missed** |"
    assert page.read_text() == f"before\n{report.BEGIN}{report.table()}{report.END}after\n"
    assert page.read_text().splitlines()[4] == line


def test_the_page_and_the_plots_are_those_of_the_results() -> None:
    assert report.table() in report.PAGE.read_text(), "run: python -m benchmarks.report"
    for name, text in plots.drawings().items():
        assert (report.RESULTS / name).read_text() == text, "run: python -m benchmarks.plots"


BURN = "import time\nwhile time.process_time() < 0.2: pass\n"
BURNING = {
    "itself": BURN,
    "a child that is dead": f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])\n",
    "an orphan": "import os\n"
    f"if not os.fork():\n    if not os.fork():\n        exec({BURN!r})\n    os._exit(0)\nos.wait()\n",
}


@pytest.mark.parametrize("program", BURNING.values(), ids=BURNING)
def test_cpu_of_a_process_is_also_that_of_what_it_started(program: str) -> None:
    program += "print(flush=True)\nimport time\ntime.sleep(60)\n"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, preexec_fn=processes.subreaper
    ) as burning:
        assert burning.stdout is not None
        burning.stdout.readline()
        until = time.monotonic() + 30
        while processes.core_seconds(burning.pid) < 0.2 and time.monotonic() < until:
            time.sleep(0.05)
        assert 0.2 <= processes.core_seconds(burning.pid) < 0.6
        burning.kill()
