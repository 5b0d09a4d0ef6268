# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Run a task's tests in a sandbox and collect log, records and exit code.

The secret that authenticates the plugin's records is written right before the tests start and passes through a pipe.
So no command line, environment or file contains the secret when the policy's code runs.
"""

from __future__ import annotations

import asyncio
import posixpath
import secrets
import shlex
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files as package_files

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.tasks.sandbox import ExecResult
from nemo_gym_prorl.tasks.swe.changes import hash_of
from nemo_gym_prorl.tasks.swe.instance import Runner, SweInstance, SweLimits
from nemo_gym_prorl.tasks.swe.mutation_check import MAX_SOURCE_BYTES, MutationCheck
from nemo_gym_prorl.tasks.swe.patches import BASH, AppliedSolution, WorkFolder
from nemo_gym_prorl.tasks.swe.report import RunnerRecords, read_records


ANSWER_MARGIN_S = 30.0
"""Seconds beyond a script's time limit until its result must arrive, including the 10 s grace of ``timeout -k``."""

TIMEOUT_EXIT_CODES = frozenset({124, 137})

MAX_RECORDS_BYTES = 64 << 20  # records of some 500,000 tests
MAX_STATE_BYTES = 4 << 20  # far more than the functions and options of a shell
MAX_TEST_FILE_BYTES = 8 << 20  # a larger test file counts as modified
MAX_TEST_FILES = 300  # bounds the time of reading test files back

_PLUGIN = ("__init__.py", "pytest_plugin.py", "unittest_plugin.py", "runner_monitor.py")

_SETUP = """\
work=$1 repo=$2
cd "$repo" || exit 90
LANG=$(unset LANG  # use the image's LANG, if any, instead of the sandbox's
    for file in /.singularity.d/env/10-docker2singularity.sh /.singularity.d/env/90-environment.sh; do
        [ ! -r "$file" ] || . "$file" > /dev/null 2>&1
    done
    printf %s "${LANG-}")
[ -n "$LANG" ] || unset LANG
{ . "$work/setup"; } > /dev/null 2>&1
"""

_BEFORE = (
    _SETUP
    + """\
export PIP_RETRIES=1  # fail fast: most sandboxes have no network
exec 7< "$work/before"
rm -f "$work/before"  # so that code which it runs cannot modify the rest
exec bash --noprofile --norc /dev/fd/7 > "$work/before.log" 2>&1 < /dev/null
"""
)

_STATE = """
{{ kill -9 -1; unset PIP_RETRIES
prorl_options=$(shopt -p; set +o); set +x
{{ export -p; printf 'cd %q\\n' "$PWD"; }} > {work}/state
{{ declare -f; printf '%s\\n' "$prorl_options"; }} > {work}/options
}} 2> /dev/null
"""
"""Script that kills all other processes, and saves the shell's state for the test command. ``kill -1`` is atomic, so
no process escapes by forking, and reaches only the sandbox's PID namespace."""

_RUN = (
    _SETUP
    + """\
[ ! -e "$work/state" ] || . "$work/state"
case $5 in
pytest) export PYTEST_ADDOPTS="-p $4.pytest_plugin ${PYTEST_ADDOPTS:-}" ;;
unittest) export PRORL_STARTS="$4.unittest_plugin" ;;
esac
: > "$work/records"
if [ "$5" != log ]; then
    export PYTHONPATH="$work/plugins${PYTHONPATH:+:$PYTHONPATH}"
    exec 8< <(cat "$work/secret"; rm -f "$work/secret") 9>> "$work/records"
    export PRORL_CHANNEL="8:$(stat -L -c %i /proc/$$/fd/8):9"
fi
exec timeout -k 10 "$3" bash --noprofile --norc "$work/command" > "$work/log" 2>&1 < /dev/null
"""
)


_END_OF_LOG = 'tail -c "$2" "$1/log" | tail -n +2 > "$1/log.end"'
"""Script that copies the end of the log, at most ``$2`` bytes in whole lines."""


@dataclass(frozen=True, slots=True)
class Run:
    """Results of a test run."""

    timed_out: bool = False  # also if ``before_tests`` exceeded its time limit
    exit_code: int = 0  # of the test command, or of ``before_tests`` if no tests ran
    log: str = ""
    records: RunnerRecords | None = None  # ``None`` if the runner has no plugin or did not start
    rewritten: tuple[str, ...] = ()  # test files that were modified during the run
    problem: str | None = None  # why the log cannot be parsed
    ended_early: str | None = None  # why no tests ran

    @property
    def logs(self) -> list[str]:
        """Sources for the log parser: the log, then the records in the same format, if any."""
        return [self.log] if self.records is None else [self.log, self.records.as_log()]


async def run_before(work: WorkFolder, instance: SweInstance, limits: SweLimits) -> Run | None:
    """Run ``before_tests``, such as the installation of the changed package.

    Returns:
        ``None`` if the tests may run next; a :class:`Run` if the shell timed out or ended early. Failing lines are
        ignored, as in the datasets' own harnesses.

    Raises:
        AgentError: the policy's code exceeded a limit of the sandbox.
        InfrastructureError: the sandbox has ended or failed.
    """
    if not instance.before_tests:
        return None
    state = _STATE.format(work=shlex.quote(work.path))
    await work.write({"before": f"{instance.before_tests}\n{state}"})
    timeout_s = limits.before_tests_timeout_s
    done = await work.run(_BEFORE, instance.repo_folder, timeout_s=timeout_s + ANSWER_MARGIN_S, shell=BASH)
    if _timed_out(done):
        return Run(timed_out=True, problem=f"before_tests exceeded {timeout_s:g} s")
    if (await work.read("options", limit=MAX_STATE_BYTES)).content is None:
        await work.sandbox.check()
        log = await work.read("before.log", limit=limits.log_kib << 10)
        ended = f"before_tests ended early with exit code {done.return_code}"
        return Run(exit_code=done.return_code, log=_text(log.content), ended_early=ended)
    return None


async def apply_mutations(
    instance: SweInstance, applied: AppliedSolution, check: MutationCheck
) -> tuple[AppliedSolution, frozenset[str]]:
    """Change the expectations of the hidden tests (:meth:`.MutationCheck.mutate`); return the applied solution with
    the hashes of the changed files, and the names of the changed tests."""
    work, hashes, changed = applied.work, dict(applied.files), frozenset[str]()
    paths = sorted(applied.tests & applied.files.keys())
    if instance.hidden:
        look = f"find {shlex.join(instance.hidden)} -type f -name '*.py' 2> /dev/null"
        done = await work.run(look, timeout_s=ANSWER_MARGIN_S)
        paths += sorted((done.stdout or "").splitlines())
    for path in [path for path in paths if path.endswith(".py")][:MAX_TEST_FILES]:
        target = posixpath.join(instance.repo_folder, path)
        taken = await work.read(target, limit=MAX_SOURCE_BYTES)
        content, tests = await asyncio.to_thread(check.mutate, path, taken.content or b"")
        if tests:
            await work.write({target: content.decode()})
            hashes[path] = hash_of(content)
            changed |= tests
    return replace(applied, files=hashes), changed


async def run_tests(instance: SweInstance, applied: AppliedSolution, limits: SweLimits) -> Run:
    """Run the row's test command with the runner's plugin; errors as of :func:`run_before`."""
    work = applied.work
    package, secret = f"prorl_{secrets.token_hex(6)}", secrets.token_hex(32)
    runner = instance.kind_of_runner
    timeout_s = min(limits.test_timeout_s, instance.test_timeout_s or limits.test_timeout_s)
    options = f". {shlex.quote(work.path)}/options 2> /dev/null\n" if instance.before_tests else ""
    await work.write(
        {
            **{f"plugins/{package}/{name}": _source(name) for name in _PLUGIN},
            **({"plugins/sitecustomize.py": _source("sitecustomize.py")} if runner is Runner.UNITTEST else {}),
            "command": f"{options}{instance.test_command}\n",
            "secret": secret,
        }
    )
    arguments = (instance.repo_folder, str(timeout_s), package, runner.value)
    done = await work.run(_RUN, *arguments, timeout_s=timeout_s + ANSWER_MARGIN_S, shell=BASH)
    await work.sandbox.check()
    if done.error_type == "sandbox":
        raise InfrastructureError(f"the tests could not run: {done.stderr}"[:600], kind=FailureKind.VERIFIER_ERROR)
    longest = limits.log_kib << 10
    log = await work.read("log", limit=longest)
    if log.content is None and runner is Runner.PYTEST:
        # pytest's summary comes last, so the end of a long log suffices.
        await work.run(_END_OF_LOG, str(longest), timeout_s=ANSWER_MARGIN_S)
        log = await work.read("log.end", limit=longest)
    runner_records = None
    if runner is not Runner.LOG:
        records = await work.read("records", limit=MAX_RECORDS_BYTES)
        if records.content is None:
            runner_records = RunnerRecords(forged=f"the test runner's records cannot be read: {records.problem}")
        else:
            runner_records = read_records(records.content, secret)
    rewritten = await _rewritten(instance, applied)
    return Run(_timed_out(done), done.return_code, _text(log.content), runner_records, rewritten, problem=log.problem)


def _text(content: bytes | None) -> str:
    return (content or b"").decode("utf-8", "replace").replace("\r\n", "\n")


async def _rewritten(instance: SweInstance, applied: AppliedSolution) -> tuple[str, ...]:
    found = []
    for path in sorted(applied.tests & applied.files.keys())[:MAX_TEST_FILES]:
        taken = await applied.work.read(posixpath.join(instance.repo_folder, path), limit=MAX_TEST_FILE_BYTES)
        if taken.content is None or hash_of(taken.content) != applied.files[path]:
            found.append(path)
    return tuple(found)


def _timed_out(done: ExecResult) -> bool:
    return done.error_type == "timeout" or done.return_code in TIMEOUT_EXIT_CODES


@cache
def _source(name: str) -> str:
    return package_files("nemo_gym_prorl.tasks.swe").joinpath(f"inside/{name}").read_text(encoding="utf-8")
