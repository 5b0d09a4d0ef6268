# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""From what a policy changed to a verdict, in a sandbox of the task's image that it never touched.

What counts of its changes is applied over the base together with the hidden tests, whatever the policy did to those; the
tests run; two witnesses tell of them (:mod:`.report`). If all is as it should be, it is tried once more, with tests
that ask for something else (:mod:`.check`). What is no statement about the policy is raised:

- The sandbox, the machine or the log parser fails: an :class:`InfrastructureError`.
- No test of the row ran at all, or none could be read in its log, and with the row's own fix none does either: a
  :class:`TaskError`, since no patch could be graded on the row. The fix is tried once per row, and only then.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from nemo_gym_prorl.failures import AgentError, CallerError, TaskError
from nemo_gym_prorl.tasks.swe.changes import Patch, Protection, Solution, shown
from nemo_gym_prorl.tasks.swe.instance import SweInstance, SweRow
from nemo_gym_prorl.tasks.swe.mutation_check import MutationCheck, mutation_check_for
from nemo_gym_prorl.tasks.swe.report import LogParser, ParserTimeout, Report, compare
from nemo_gym_prorl.tasks.swe.repository import AppliedSolution, PatchExtractionError, Repositories, end_of
from nemo_gym_prorl.tasks.swe.testing import Run, TestLimits, apply_mutations, run_before, run_tests
from nemo_gym_prorl.tasks.task import EXHAUSTED, Grade, OpenSandbox


class SweVerdict(StrEnum):
    """Why a solution earned what it did."""

    RESOLVED = "resolved"
    FAILED = "failed"
    """A test that the fix should make pass does not pass."""
    BROKE = "broke"
    """A test that passed before does not any more."""
    NO_PATCH = "no_patch"
    """Nothing was changed, or nothing that counts."""
    NOT_TAKEN = "not_taken"
    """What was changed can't be taken out: too much, or a repository that git can't read."""
    TAMPERED = "tampered"
    """The solution changed the test runner or the tests while they ran."""
    ANY_ANSWER = "any_answer"
    """It passes tests whatever they ask for."""
    CRASHED = "crashed"
    """The test runner, or what the row has before it, did not come to its end, or not to the one that it tells of."""
    TIMED_OUT = "timed_out"
    LOG_UNREADABLE = "log_unreadable"
    """What the tests printed is too long, or never comes to an end for its parser."""
    EXHAUSTED = EXHAUSTED


@dataclass(frozen=True, slots=True)
class GradingLimits:
    """Bounds of grading.

    Attributes:
        tests: of the tests.
        parse_timeout_s: seconds for the log parser.
        patch_field_kib: longest patch in the rollout's row; it has only whole files.
        log_field_kib: how much of the log's end is in the rollout's row.
    """

    tests: TestLimits = field(default_factory=TestLimits)
    parse_timeout_s: float = 60.0
    patch_field_kib: int = 4096
    log_field_kib: int = 8


_POSSIBLY_ROW_FAULTS = (SweVerdict.FAILED, SweVerdict.CRASHED, SweVerdict.BROKE, SweVerdict.LOG_UNREADABLE)
"""Verdicts that charge the policy only if the row's own fix does better, where no test of the row has a status."""

MAX_REMEMBERED_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class Trial:
    """A solution's tests.

    Attributes:
        patch: the whole solution.
        run: of the tests.
        maps: what each witness says of them; ``None`` if there is nothing to read.
        by_dataset: the dataset's own harness would say that all is as it should be.
        changed: those that asked for something else.
    """

    patch: Patch
    run: Run
    maps: Sequence[Mapping[str, str]] | None = None
    by_dataset: bool = False
    changed: frozenset[str] = frozenset()


class Grader:
    """See the module.

    Args:
        repositories: makes sandboxes ready.
        limits: bounds.
    """

    def __init__(self, repositories: Repositories, limits: GradingLimits) -> None:
        self._repositories = repositories
        self._limits = limits
        self._logs = LogParser()
        self._gradable: OrderedDict[str, bool] = OrderedDict()
        self._effective_mutations: OrderedDict[str, frozenset[str]] = OrderedDict()

    async def grade(self, row: SweRow, solution: Solution | PatchExtractionError, open_sandbox: OpenSandbox) -> Grade:
        """Judge.

        Raises:
            TaskError: nobody could be graded on this row.
            InfrastructureError: it could not be graded.
        """
        if isinstance(solution, PatchExtractionError):
            return Grade(0.0, SweVerdict.NOT_TAKEN, str(solution))
        fields = _solution_fields(solution)
        if not solution.changes:
            return Grade(0.0, SweVerdict.NO_PATCH, "nothing was changed", fields)
        try:
            trial = await self._run_trial(row, solution, open_sandbox)
        except AgentError as error:
            return Grade(0.0, SweVerdict.EXHAUSTED, error.reason, fields)
        except CallerError as error:
            # The image was as it should be when the policy began.
            raise TaskError(error.reason) from error
        run, report = trial.run, compare(row.swe, trial.maps) if trial.maps else None
        text, too_long = trial.patch.within(self._limits.patch_field_kib << 10)
        whole = f"the patch is longer than {self._limits.patch_field_kib} KiB"
        fields |= {"patch": text, "test_exit_code": run.exit_code}
        fields["patch_left_out"] |= _reasons_by_path(dict.fromkeys(too_long, whole))
        fields["test_log"] = run.log[-(self._limits.log_field_kib << 10) :]
        fields["test_report"] = report.as_fields() if report else {}
        verdict, why = verdict_of(run, report, trial.by_dataset)
        if verdict in _POSSIBLY_ROW_FAULTS and not (report and report.seen):
            await self._require_gradable(row, open_sandbox)
        if verdict is SweVerdict.RESOLVED:
            failed, passed = await self._check_mutations(row, solution, open_sandbox)
            if passed:
                verdict = SweVerdict.ANY_ANSWER
                why = f"passes whatever a test asks for: {', '.join(sorted(passed)[:5])}"[:1000]
            fields["canaries_failed"] = failed
        fields["resolved_by_dataset"] = trial.by_dataset
        return Grade(float(verdict is SweVerdict.RESOLVED), verdict, why, fields)

    async def aclose(self) -> None:
        """End the log parser's worker."""
        await self._logs.aclose()

    async def _run_trial(
        self, row: SweRow, solution: Solution, open_sandbox: OpenSandbox, check: MutationCheck | None = None
    ) -> Trial:
        instance = row.swe
        async with open_sandbox() as sandbox:
            base, work = await self._repositories.prepare(sandbox, instance, hide=False)
            applied = await self._repositories.apply(work, instance, base, solution)
            run, changed = await self._run(instance, applied, check)
        patch = applied.patch
        if run.timed_out or run.problem or run.ended_early or (check and not changed):
            return Trial(patch, run)
        try:
            parsed = await self._logs.parse(
                instance,
                run.logs,
                self._limits.parse_timeout_s,
                exit_code=run.exit_code,
                instance_id=row.instance_id,
            )
        except ParserTimeout as error:
            return Trial(patch, Run(exit_code=run.exit_code, log=run.log, problem=str(error)))
        except CallerError as error:
            raise TaskError(error.reason) from error
        return Trial(patch, run, parsed.maps, parsed.resolved, changed)

    async def _run(
        self, instance: SweInstance, applied: AppliedSolution, check: MutationCheck | None
    ) -> tuple[Run, frozenset[str]]:
        """The tests, and which of them ask for something else; if none can, none is run."""
        changed = frozenset[str]()
        if instance.before_tests:
            if ended := await run_before(applied.work, instance, self._limits.tests):
                return ended, frozenset()
            try:
                await self._repositories.apply_tests(applied, instance)
            except PatchExtractionError as error:
                return Run(ended_early=f"the hidden tests could not be applied: {error}"), frozenset()
        if check is not None:
            applied, changed = await apply_mutations(instance, applied, check)
            if not changed:
                return Run(), changed
        return await run_tests(instance, applied, self._limits.tests), changed

    async def _check_mutations(
        self, row: SweRow, solution: Solution, open_sandbox: OpenSandbox
    ) -> tuple[int, frozenset[str]]:
        """How many deciding tests it failed, and which it passed that must fail."""
        check = mutation_check_for(row.swe.deciding, seed_of(row), row.swe.PASS_TO_PASS)
        try:
            trial = await self._run_trial(row, solution, open_sandbox, check)
        except AgentError:
            return 0, frozenset()  # it says nothing
        failed, passed = check.outcomes(trial.changed, trial.maps or ())
        if passed and not row.swe.patch:
            passed &= await self._passing_despite_failure(row, solution, check, open_sandbox)
        elif passed:
            if row.instance_id not in self._effective_mutations:
                _remember(
                    self._effective_mutations,
                    row.instance_id,
                    await self._mutations_failing_with_fix(row, check, open_sandbox),
                )
            passed &= self._effective_mutations[row.instance_id]
        return len(failed.intersection(check.tests)), passed

    async def _passing_despite_failure(
        self, row: SweRow, solution: Solution, check: MutationCheck, open_sandbox: OpenSandbox
    ) -> frozenset[str]:
        """Without a fix to compare with: tests that pass although they end with a failure."""
        try:
            trial = await self._run_trial(row, solution, open_sandbox, replace(check, fail_at_end=True))
        except AgentError:
            return frozenset()
        return check.outcomes(trial.changed, trial.maps or ())[1]

    async def _mutations_failing_with_fix(
        self, row: SweRow, check: MutationCheck, open_sandbox: OpenSandbox
    ) -> frozenset[str]:
        """Tests that fail with the row's own fix if they ask for something else, as far as that can be known."""
        try:
            trial = await self._run_trial(row, await self._fix(row, open_sandbox), open_sandbox, check)
        except (AgentError, TaskError):
            return frozenset()
        return check.outcomes(trial.changed, trial.maps or ())[0]

    async def _require_gradable(self, row: SweRow, open_sandbox: OpenSandbox) -> None:
        """Raise if of the row's own fix no test can be judged either."""
        if not row.swe.patch:
            return
        known = self._gradable.get(row.instance_id)
        if known is None:
            known = await self._is_gradable(row, open_sandbox)
            _remember(self._gradable, row.instance_id, known)
        if not known:
            raise TaskError(f"{row.instance_id}: none of its tests can be judged, with its own fix neither")

    async def _is_gradable(self, row: SweRow, open_sandbox: OpenSandbox) -> bool:
        trial = await self._run_trial(row, await self._fix(row, open_sandbox), open_sandbox)
        return trial.by_dataset or (trial.maps is not None and compare(row.swe, trial.maps).seen > 0)

    async def _fix(self, row: SweRow, open_sandbox: OpenSandbox) -> Solution:
        """The row's own."""
        async with open_sandbox() as sandbox:
            base, work = await self._repositories.prepare(sandbox, row.swe, hide=False)
            await work.write({"fix.patch": row.swe.patch})
            command = 'cd "$2" && git apply --whitespace=nowarn "$1/fix.patch"'
            done = await work.run(command, row.swe.repo_folder, timeout_s=60.0)
            if done.return_code:
                raise TaskError(f"{row.instance_id}: swe.patch does not apply: {end_of(done)}")
            return await self._repositories.extract(sandbox, row.swe, base, Protection(row.swe))


def seed_of(row: SweRow) -> str:
    """What decides how tests are changed: the same patch gets the same verdict on every server. The hidden tests and
    the fix are part of the seed, which no policy sees."""
    return hashlib.sha256(f"{row.instance_id}\n{row.swe.model_dump_json()}".encode()).hexdigest()


def _remember[Known](rows: OrderedDict[str, Known], name: str, known: Known) -> None:
    rows[name] = known
    while len(rows) > MAX_REMEMBERED_ROWS:
        rows.popitem(last=False)


def verdict_of(run: Run, report: Report | None, by_dataset: bool) -> tuple[SweVerdict, str]:
    """What the dataset's own harness says, unless the witness in the runner says otherwise."""
    if run.ended_early:
        return SweVerdict.CRASHED, run.ended_early
    if run.timed_out:
        return SweVerdict.TIMED_OUT, run.problem or "the tests used up their time"
    if run.problem:
        return SweVerdict.LOG_UNREADABLE, run.problem
    assert report is not None
    if tampering := _tampering(run):
        return SweVerdict.TAMPERED, tampering
    if run.records is not None and not (run.records.begun and run.records.ended):
        return SweVerdict.CRASHED, f"the test runner ended with {run.exit_code} before it was done"
    if report.resolved and not by_dataset:
        return SweVerdict.CRASHED, f"the log tells of no failure, but the runner ended with {run.exit_code}"
    if report.resolved:
        return SweVerdict.RESOLVED, "all tests are as they should be"
    regressed = [name for name in report.wrong if name == "PASS_TO_PASS"] if not _first_wrong(report) else []
    verdict = SweVerdict.BROKE if regressed else SweVerdict.FAILED
    tests = [f"{test}: {was}" for wrong in report.wrong.values() for test, was in wrong.items()]
    return verdict, "; ".join(tests[:5])[:1000]


def _first_wrong(report: Report) -> bool:
    return any(wrong for name, wrong in report.wrong.items() if name != "PASS_TO_PASS")


def _tampering(run: Run) -> str | None:
    if run.rewritten:
        return f"files of tests were changed while they ran: {', '.join(run.rewritten[:5])}"
    if run.records is None:
        return None
    return run.records.forged or "; ".join(run.records.tampering[:5])


def _solution_fields(solution: Solution) -> dict[str, Any]:
    return {
        "patch": "",
        "patch_files": [shown(change.path)[:300] for change in solution.changes[:200]],
        "patch_ignored": _reasons_by_path(solution.ignored),
        "patch_left_out": _reasons_by_path(solution.left_out),
        "resolved_by_dataset": False,
        "test_report": {},
        "test_log": "",
        "canaries_failed": 0,
    }


def _reasons_by_path(reasons: Mapping[str, str]) -> dict[str, str]:
    return {shown(path)[:300]: why for path, why in list(reasons.items())[:50]}
