#!/usr/bin/env python3
# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Holds our verdicts on made-up logs of ten kinds of test runners against swebench's own ``get_eval_report``.

Prints a table: how many each resolves, and why they differ where they do. Exit code 1 if a difference has no reason
of those that docs/swe.md gives.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from nemo_gym_prorl.tasks.swe.grading import Verdict, judged  # noqa: E402
from nemo_gym_prorl.tasks.swe.instance import Row, SweInstance  # noqa: E402
from nemo_gym_prorl.tasks.swe.log_parsing import answer, job_of  # noqa: E402
from nemo_gym_prorl.tasks.swe.report import compare  # noqa: E402
from nemo_gym_prorl.tasks.swe.testing import Run  # noqa: E402
from tests.tasks.swe.runner_logs import KINDS, draw_run  # noqa: E402


@dataclass(frozen=True, slots=True)
class Compared:
    """One run: what we say and what swebench says, and why they differ; ``None`` if nobody knows."""

    kind: str
    way: str
    ours: bool
    theirs: bool
    reason: str | None


def compared(kind: str, way: str, instance: SweInstance, run: Run) -> Compared:
    row = Row(instance_id="a__b-1", image="none", swe=instance)
    said = answer(job_of(instance, run.logs, run.exit_code, row.instance_id))
    assert said is not None
    report = compare(instance, said["maps"])
    ours = judged(run, report, said["resolved"])[0] is Verdict.RESOLVED
    theirs = resolved_by_swebench(instance, run)
    return Compared(kind, way, ours, theirs, reason(instance, run, said["maps"]) if ours != theirs else None)


def resolved_by_swebench(instance: SweInstance, run: Run) -> bool:
    """swebench's own function on a file as its scripts leave one."""
    from swebench.harness.grading import get_eval_report
    from swebench.types import TestSpec

    spec = TestSpec(
        instance_id="a__b-1",
        image="",
        eval_script_list=[],
        repo=instance.repo,
        version=instance.version,
        FAIL_TO_PASS=list(instance.FAIL_TO_PASS),
        PASS_TO_PASS=list(instance.PASS_TO_PASS),
        log_parser=instance.log_parser,
        eval_type=instance.eval_type,
    )
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write("+ git status\nOn branch main\n+ : '>>>>> Start Test Output'\n")
        file.write(f"+ {instance.test_command}\n{run.log}")
        file.write("+ SWEBENCH_TEST_EXIT_CODE=1\n+ : '>>>>> End Test Output'\n")
        file.write(f"+ echo '>>>>> Test Exit Code'\n>>>>> Test Exit Code: {run.exit_code}\n+ git checkout a b\n")
        file.flush()
        prediction = {"instance_id": "a__b-1", "model_patch": "x"}
        return bool(get_eval_report(spec, prediction, file.name, False)["a__b-1"]["resolved"])


def reason(instance: SweInstance, run: Run, maps: list[Mapping[str, str]]) -> str | None:
    """Why we may differ."""
    if run.told is not None and not (run.told.begun and run.told.ended):
        return "the witness in the runner did not see its end"
    if run.told is not None and not compare(instance, [maps[1]]).resolved:
        return "the witness in the runner did not see a test pass"
    if ">>>>> Test Exit Code: 0" in run.log and run.exit_code:
        return "swebench takes the exit code that the tests print for their own"
    return None


def all_compared(count: int, seed: int) -> Iterator[Compared]:
    draw = random.Random(seed)
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        yield compared(kind, *draw_run(KINDS[kind], draw))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--logs", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found = list(all_compared(options.logs, options.seed))
    table = Table("parser", "logs", "swebench resolves", "we resolve", "we alone", "differences")
    for kind in [*KINDS, "all"]:
        some = [one for one in found if kind in (one.kind, "all")]
        reasons = Counter(f"{one.way}: {one.reason or 'nobody knows why'}" for one in some if one.ours != one.theirs)
        table.add_row(
            kind,
            str(len(some)),
            str(sum(one.theirs for one in some)),
            str(sum(one.ours for one in some)),
            str(sum(one.ours and not one.theirs for one in some)),
            "\n".join(f"{count} × {why}" for why, count in reasons.most_common()),
        )
    Console(width=140).print(table)
    return int(any(one.ours != one.theirs and one.reason is None for one in found))


if __name__ == "__main__":
    sys.exit(main())
