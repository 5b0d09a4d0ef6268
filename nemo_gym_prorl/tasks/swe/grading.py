# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Grade a policy's changes in a fresh sandbox of the task's image.

The policy's changes that are not ignored and the hidden tests are applied to the base commit, and the tests run. Two
sources report outcomes (:mod:`.report`). If all tests have the expected outcome, the tests run again with changed
expectations (:mod:`.mutation_check`). Failures for which the policy is not charged are raised:

- :class:`InfrastructureError`: the sandbox, the machine or the log parser failed.
- :class:`TaskError`: the row is at fault. For example, no test has an outcome, neither with the policy's changes nor
  with the reference fix. The fix is tried once per row, and only if no test has an outcome.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from nemo_gym_prorl.failures import AgentError, CallerError, TaskError
from nemo_gym_prorl.tasks.swe.changes import Patch, ProtectedFiles, Solution, unquote
from nemo_gym_prorl.tasks.swe.instance import SweInstance, SweLimits, SweRow
from nemo_gym_prorl.tasks.swe.mutation_check import MutationCheck, mutation_check_for
from nemo_gym_prorl.tasks.swe.patches import AppliedSolution, PatchExtractionError, Repositories, error_tail
from nemo_gym_prorl.tasks.swe.report import LogParser, ParserTimeout, Report, compare
from nemo_gym_prorl.tasks.swe.testing import Run, apply_mutations, run_before, run_tests
from nemo_gym_prorl.tasks.task import EXHAUSTED, Grade, OpenSandbox


class SweVerdict(StrEnum):
    """Verdicts on software engineering tasks."""

    RESOLVED = "resolved"
    FAILED = "failed"
    """A test of FAIL_TO_PASS does not pass."""
    BROKE = "broke"
    """FAIL_TO_PASS passes, but a test of PASS_TO_PASS does not."""
    NO_PATCH = "no_patch"
    """There are no changes, or all changed files are left out of the patch."""
    NOT_TAKEN = "not_taken"
    """The changes could not be extracted: too large, or the repository is unreadable."""
    TAMPERED = "tampered"
    """The solution changed the test runner or the test files during the tests, or forged records."""
    ANY_ANSWER = "any_answer"
    """The solution passes tests regardless of the expected values."""
    CRASHED = "crashed"
    """The test runner or ``before_tests`` ended early, or the exit code contradicts the log."""
    TIMED_OUT = "timed_out"
    LOG_UNREADABLE = "log_unreadable"
    """The log is too long, or the log parser did not finish."""
    EXHAUSTED = EXHAUSTED


_POSSIBLY_ROW_FAULTS = (SweVerdict.FAILED, SweVerdict.CRASHED, SweVerdict.BROKE, SweVerdict.LOG_UNREADABLE)
"""Verdicts for which the row is at fault if no test has an outcome, not even with the reference fix."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Test results of a solution."""

    patch: Patch  # all changes, including ignored ones
    run: Run
    maps: Sequence[Mapping[str, str]] | None = None  # status by test, one map per source, if a log was parsed
    by_dataset: bool = False  # whether the dataset's own harness accepts the solution
    changed: frozenset[str] = frozenset()  # tests with changed expectations


class Grader:
    """Grader of solutions: runs the tests and decides the verdict; see the module."""

    def __init__(self, repositories: Repositories, limits: SweLimits) -> None:
        self._repositories = repositories
        self._limits = limits
        self._logs = LogParser()
        self._gradable: dict[str, bool] = {}
        self._effective_mutations: dict[str, frozenset[str]] = {}

    async def grade(self, row: SweRow, solution: Solution | PatchExtractionError, open_sandbox: OpenSandbox) -> Grade:
        """Grade a solution: reward 1.0 if resolved, else 0.0. The module lists the errors."""
        if isinstance(solution, PatchExtractionError):
            return Grade(0.0, SweVerdict.NOT_TAKEN, str(solution))
        fields = _solution_fields(solution)
        if not solution.changes:
            return Grade(0.0, SweVerdict.NO_PATCH, "there are no changes", fields)
        try:
            trial = await self._run_trial(row, solution, open_sandbox)
        except AgentError as error:
            return Grade(0.0, SweVerdict.EXHAUSTED, error.reason, fields)
        except CallerError as error:
            # The row passed the same checks when the session was seeded, so its submitter is not at fault.
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
                why = f"passes regardless of the expected value: {', '.join(sorted(passed)[:5])}"[:1000]
            fields["canaries_failed"] = failed
        fields["resolved_by_dataset"] = trial.by_dataset
        return Grade(float(verdict is SweVerdict.RESOLVED), verdict, why, fields)

    async def aclose(self) -> None:
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
            timeout_s = self._limits.parse_timeout_s
            parsed = await self._logs.parse(instance, run.logs, timeout_s, run.exit_code, row.instance_id)
        except ParserTimeout as error:
            return Trial(patch, Run(exit_code=run.exit_code, log=run.log, problem=str(error)))
        except CallerError as error:
            raise TaskError(error.reason) from error
        return Trial(patch, run, parsed.maps, parsed.resolved, changed)

    async def _run(
        self, instance: SweInstance, applied: AppliedSolution, check: MutationCheck | None
    ) -> tuple[Run, frozenset[str]]:
        """Run the tests and return the changed ones; with a ``check`` that can change no test, no test runs."""
        changed = frozenset[str]()
        if instance.before_tests:
            if ended := await run_before(applied.work, instance, self._limits):
                return ended, frozenset()
            try:
                await self._repositories.apply_tests(applied, instance)
            except PatchExtractionError as error:
                return Run(ended_early=f"the hidden tests could not be applied: {error}"), frozenset()
        if check is not None:
            applied, changed = await apply_mutations(instance, applied, check)
            if not changed:
                return Run(), changed
        return await run_tests(instance, applied, self._limits), changed

    async def _check_mutations(
        self, row: SweRow, solution: Solution, open_sandbox: OpenSandbox
    ) -> tuple[int, frozenset[str]]:
        """Return the number of changed deciding tests that failed, and the changed tests that should have failed."""
        check = mutation_check_for(row.swe.deciding, seed_of(row), row.swe.PASS_TO_PASS)
        try:
            trial = await self._run_trial(row, solution, open_sandbox, check)
        except AgentError:
            return 0, frozenset()  # an exceeded limit is no evidence against a resolved solution
        failed, passed = check.outcomes(trial.changed, trial.maps or ())
        if passed and not row.swe.patch:
            passed &= await self._passing_despite_failure(row, solution, check, open_sandbox)
        elif passed:
            if row.instance_id not in self._effective_mutations:
                effective = await self._mutations_failing_with_fix(row, check, open_sandbox)
                self._effective_mutations[row.instance_id] = effective
            passed &= self._effective_mutations[row.instance_id]
        return len(failed.intersection(check.tests)), passed

    async def _passing_despite_failure(
        self, row: SweRow, solution: Solution, check: MutationCheck, open_sandbox: OpenSandbox
    ) -> frozenset[str]:
        """Return the tests that pass with a failing line at the end; evidence for rows without a reference fix."""
        try:
            trial = await self._run_trial(row, solution, open_sandbox, replace(check, fail_at_end=True))
        except AgentError:
            return frozenset()
        return check.outcomes(trial.changed, trial.maps or ())[1]

    async def _mutations_failing_with_fix(
        self, row: SweRow, check: MutationCheck, open_sandbox: OpenSandbox
    ) -> frozenset[str]:
        """Return the changed tests that fail with the reference fix; none if the fix cannot be tested."""
        try:
            trial = await self._run_trial(row, await self._fix(row, open_sandbox), open_sandbox, check)
        except (AgentError, TaskError):
            return frozenset()
        return check.outcomes(trial.changed, trial.maps or ())[0]

    async def _require_gradable(self, row: SweRow, open_sandbox: OpenSandbox) -> None:
        """Raise TaskError if no test has an outcome with the reference fix; no-op without a fix."""
        if not row.swe.patch:
            return
        if row.instance_id not in self._gradable:
            self._gradable[row.instance_id] = await self._is_gradable(row, open_sandbox)
        if not self._gradable[row.instance_id]:
            raise TaskError(f"{row.instance_id}: no test has an outcome, not even with the reference fix")

    async def _is_gradable(self, row: SweRow, open_sandbox: OpenSandbox) -> bool:
        trial = await self._run_trial(row, await self._fix(row, open_sandbox), open_sandbox)
        return trial.by_dataset or (trial.maps is not None and compare(row.swe, trial.maps).seen > 0)

    async def _fix(self, row: SweRow, open_sandbox: OpenSandbox) -> Solution:
        async with open_sandbox() as sandbox:
            base, work = await self._repositories.prepare(sandbox, row.swe, hide=False)
            await work.write({"fix.patch": row.swe.patch})
            command = 'cd "$2" && git apply --whitespace=nowarn "$1/fix.patch"'
            done = await work.run(command, row.swe.repo_folder, timeout_s=60.0)
            if done.return_code:
                raise TaskError(f"{row.instance_id}: swe.patch does not apply: {error_tail(done)}")
            return await self._repositories.extract(sandbox, row.swe, base, ProtectedFiles(row.swe))


def seed_of(row: SweRow) -> str:
    """Return the seed of test changes: equal on all servers, so that the same patch gets the same verdict.

    The seed depends on the hidden tests and the reference fix, which the policy does not know.
    """
    return hashlib.sha256(f"{row.instance_id}\n{row.swe.model_dump_json()}".encode()).hexdigest()


def verdict_of(run: Run, report: Report | None, by_dataset: bool) -> tuple[SweVerdict, str]:
    """Return verdict and reason. A resolved solution needs the dataset's own harness and complete records to agree.

    ``report`` may be ``None`` only for a run without a parsed log.
    """
    if run.ended_early:
        return SweVerdict.CRASHED, run.ended_early
    if run.timed_out:
        return SweVerdict.TIMED_OUT, run.problem or "the tests exceeded their time limit"
    if run.problem:
        return SweVerdict.LOG_UNREADABLE, run.problem
    assert report is not None
    if tampering := _tampering(run):
        return SweVerdict.TAMPERED, tampering
    if run.records is not None and not (run.records.begun and run.records.ended):
        return SweVerdict.CRASHED, f"the test runner exited with {run.exit_code} before its end"
    if report.resolved and not by_dataset:
        return SweVerdict.CRASHED, f"the log reports no failure, but the runner exited with {run.exit_code}"
    if report.resolved:
        return SweVerdict.RESOLVED, "all tests have the expected outcome"
    regressed = [name for name in report.wrong if name == "PASS_TO_PASS"] if not _first_wrong(report) else []
    verdict = SweVerdict.BROKE if regressed else SweVerdict.FAILED
    tests = [f"{test}: {was}" for wrong in report.wrong.values() for test, was in wrong.items()]
    return verdict, "; ".join(tests[:5])[:1000]


def _first_wrong(report: Report) -> bool:
    return any(wrong for name, wrong in report.wrong.items() if name != "PASS_TO_PASS")


def _tampering(run: Run) -> str | None:
    if run.rewritten:
        return f"test files were modified during the tests: {', '.join(run.rewritten[:5])}"
    if run.records is None:
        return None
    return run.records.forged or "; ".join(run.records.tampering[:5])


def _solution_fields(solution: Solution) -> dict[str, Any]:
    return {
        "patch": "",
        "patch_files": [unquote(change.path)[:300] for change in solution.changes[:200]],
        "patch_ignored": _reasons_by_path(solution.ignored),
        "patch_left_out": _reasons_by_path(solution.left_out),
        "resolved_by_dataset": False,
        "test_report": {},
        "test_log": "",
        "canaries_failed": 0,
    }


def _reasons_by_path(reasons: Mapping[str, str]) -> dict[str, str]:
    return {unquote(path)[:300]: why for path, why in list(reasons.items())[:50]}
