# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Run a candidate's tests, each in its own process, in a sandbox that the agent never touched.

Three kinds of processes:

- The *grader* (this process) holds the job: inputs, expected outputs and the nonce. The grader never runs candidate
  code, and candidates cannot inspect or signal it.
- A *zygote* (:mod:`.zygote`) forks *children* and never receives an expected output.
- A *child* runs one test and receives the input of that test only.

A second zygote runs the row's checker program, if there is one, with the same restrictions, since the checker program
reads untrusted output.

Output and results of children arrive as text over pipes and are compared here. The grader prints two lines that start
with the nonce: one before the candidate's source runs, and the report.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
import time
from typing import Any

from nemo_gym_prorl.tasks.code.inside import checkers, process_hardening
from nemo_gym_prorl.tasks.code.inside.zygote import (
    WHY_CHARS,
    ChannelClosed,
    Zygote,
    allow_long_integers,
    file_of,
    receive,
    send,
    waiting_s,
    write_all,
)


CHUNK = 1 << 16  # bytes per read: the default capacity of a pipe
ANSWER_BYTES = 8 << 20
"""Maximum bytes of a function's JSON result, to bound memory."""

MAX_INT_DIGITS = 1 << 16
"""Maximum digits of an integer read from a candidate: parsing takes quadratic time."""

EXCERPT_CHARS = 200
"""Maximum characters of the input and of each output in the detail of the first failure."""

RETURNED = '["returned", '
"""Beginning of a child's report of a result."""

MAX_FAILURES_REPORTED = 20
"""Maximum failed tests in the report, to bound its size."""

WALL_FACTOR = 3
WALL_EXTRA_S = 2.0
"""Wall-clock limit of a test: this multiple of the CPU limit plus a constant, since machines are shared and programs
sleep.
"""

KILL_TIMEOUT_S = 60.0
"""Maximum seconds that a killed child needs to end on a loaded machine."""

CHILD_VERDICTS = frozenset({"crashed", "memory", "no_solution"})
"""Verdicts that an untrusted child may report; none earns a reward."""


class ChildResult:
    """Result of one child. ``verdict``: ``None`` without a failure. ``killed``: a SIGKILL that is not the grader's."""

    __slots__ = ("cpu_s", "killed", "mib", "output", "report", "spent_s", "status", "verdict", "why")

    def __init__(self) -> None:
        self.output = bytearray()
        self.report = bytearray()
        self.verdict: str | None = None
        self.why = ""
        self.status = 0
        self.cpu_s = 0.0
        self.spent_s = 0.0
        self.mib = 0
        self.killed = False


class BrokenChecker(Exception):
    """The row's checker program is not valid Python, or fails even on the expected output."""


class ChildRunner:
    """Runner of the tests of one source (a candidate or a checker program) in children of a zygote."""

    def __init__(
        self,
        zygote: Zygote,
        limits: dict[str, Any],
        source: str,
        function: str | None,
        name: str,
        scratch: ScratchFolder,
        applied: str | None = None,
    ) -> None:
        self.channel = zygote.channel
        self.limits = limits
        self.called = function is not None
        self.time_s = limits["time_s"]
        self.scratch = scratch
        settings = {"source": source, "function": function, "name": name, "folder": scratch.folder}
        settings["applied"] = applied
        # RLIMIT_CPU counts ticks coarsely, so the limit has a margin; the measured CPU time decides.
        given = file_of(json.dumps({**settings, **limits, "cpu_s": math.ceil(1.25 * self.time_s) + 1}).encode())
        send(self.channel, "load", (given,))
        os.close(given)
        self.null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def ready(self, patience_s: float) -> dict[str, Any]:
        """Wait until the source is compiled.

        Returns:
            ``ready``: Landlock's ABI version; or ``refused``: a reason, with ``killed`` if the compiler crashed.

        Raises:
            RuntimeError: the zygote ended before its limits were set.
        """
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        if not poll.poll(patience_s * 1000):
            return {"refused": f"not compiled within {patience_s:g} s"}
        try:
            receive(self.channel)
        except ChannelClosed as error:
            raise RuntimeError("the process that compiles the source could not be limited") from error
        if not poll.poll(patience_s * 1000):
            return {"refused": f"not compiled within {patience_s:g} s"}
        try:
            answer, _ = receive(self.channel)
        except ChannelClosed:
            return {"refused": "the compiler crashed on the source", "killed": True}
        return dict(answer)

    def run(self, given: bytes) -> ChildResult:
        """Run one child with ``given`` on standard input, and return its result."""
        ended = ChildResult()
        stdin = file_of(given)
        report, report_end = os.pipe()
        output, output_end = (-1, self.null) if self.called else os.pipe()
        send(self.channel, "run", (stdin, output_end, report_end))
        os.close(stdin)
        os.close(report_end)
        into = {report: (ended.report, ANSWER_BYTES if self.called else CHUNK)}
        if output >= 0:
            os.close(output_end)
            into[output] = (ended.output, self.limits["output_bytes"])
        try:
            self._attend(ended, into)
        finally:
            for descriptor in into:
                os.close(descriptor)
        self.scratch.renew()
        return ended

    def _attend(self, ended: ChildResult, into: dict[int, tuple[bytearray, int]]) -> None:
        channel = self.channel.fileno()
        poll = select.poll()
        for descriptor in (channel, *into):
            poll.register(descriptor, select.POLLIN)
        started = time.monotonic()
        patience_s = deadline_s(self.time_s)
        deadline, killed = started + patience_s, False
        pid = 0
        reading = set(into)
        exit_report: list[Any] | None = None
        while exit_report is None or reading:
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            for descriptor, _ in ready:
                if descriptor == channel:
                    message, _ = receive(self.channel)
                    if pid:
                        exit_report = message
                        poll.unregister(channel)
                    else:
                        pid = message
                    continue
                kept, limit = into[descriptor]
                data = os.read(descriptor, CHUNK)
                kept += data
                if not data:
                    poll.unregister(descriptor)
                    reading.discard(descriptor)
                elif len(kept) > limit:
                    del kept[limit:]
                    self._end(pid, ended, "output_limit", f"more than {limit} bytes of output")
            if ready:
                continue
            # The time for which the child waited for a processor does not count.
            if pid and not killed and time.monotonic() < (deadline := started + patience_s + waiting_s(pid)):
                continue
            if not pid or killed:
                raise RuntimeError("the zygote does not answer")
            self._end(pid, ended, "timed_out", f"{patience_s:g} s by the clock")
            deadline, killed = time.monotonic() + KILL_TIMEOUT_S, True
        ended.spent_s = max(exit_report[1], time.monotonic() - started - exit_report[2])
        self._judge_end(ended, *exit_report)

    def _end(self, pid: int, ended: ChildResult, verdict: str, why: str) -> None:
        if ended.verdict is None:
            ended.verdict, ended.why = verdict, why
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _judge_end(self, ended: ChildResult, status: int, cpu_s: float, _: float, mib: int) -> None:
        ended.status, ended.cpu_s, ended.mib = status, cpu_s, mib
        if ended.verdict is not None:
            return
        by_signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if cpu_s > self.time_s:
            ended.verdict, ended.why = "timed_out", f"{cpu_s:.2f} s of processor time"
        elif by_signal:
            ended.killed = by_signal == signal.SIGKILL
            ended.verdict, ended.why = "crashed", f"ended by signal {by_signal}"
        elif os.WEXITSTATUS(status):
            kind, why = parse_report(ended.report)
            ended.verdict = kind if kind in CHILD_VERDICTS else "crashed"
            ended.why = str(why)[:WHY_CHARS] or f"exit status {os.WEXITSTATUS(status)}"


def deadline_s(time_s: float) -> float:
    return WALL_FACTOR * time_s + WALL_EXTRA_S


def parse_report(report: bytes | bytearray) -> tuple[str, Any]:
    """Return kind and value of a child's untrusted report; two empty strings if malformed."""
    try:
        kind, value = json.loads(report.decode("ascii"), parse_int=bounded_int)
    except (ValueError, TypeError, RecursionError):
        return "", ""
    return (kind, value) if isinstance(kind, str) else ("", "")


def bounded_int(digits: str) -> int:
    """Parse an integer of at most :data:`MAX_INT_DIGITS` digits; raises :class:`ValueError` for more."""
    if len(digits) > MAX_INT_DIGITS:
        raise ValueError("too many digits")
    return int(digits)


class ScratchFolder:
    """Writable folder of a child, emptied after each test."""

    def __init__(self) -> None:
        token = os.urandom(8).hex()
        self.folder = f"/tmp/work-{token}"
        self._spent = f"/tmp/spent-{token}"
        self._moved = 0
        os.mkdir(self.folder, 0o700)
        os.mkdir(self._spent, 0)

    def renew(self) -> None:
        """Move the files of the last test into a folder that children cannot access."""
        left = os.listdir(os.fsencode(self.folder))
        if not left:
            return
        os.chmod(self._spent, 0o700)
        for name in left:
            self._moved += 1
            os.rename(os.path.join(os.fsencode(self.folder), name), f"{self._spent}/{self._moved}".encode())
        os.chmod(self._spent, 0)


class Checker:
    """Comparison of answers with expected answers, by a built-in checker or the row's checker program."""

    def __init__(self, job: dict[str, Any], zygote: Zygote) -> None:
        self._checker = job["checker"]
        self._program: ChildRunner | None = None
        self._sane: bool | None = None
        if self._checker["kind"] == "program":
            limits = {**job["limits"], **job["checker_limits"]}
            self._program = ChildRunner(
                zygote, limits, self._checker["source"], "check", "checker.py", ScratchFolder()
            )
            answer = self._program.ready(deadline_s(limits["time_s"]))
            if "refused" in answer:
                raise BrokenChecker(f"the checker is not valid Python: {answer['refused']}")

    def judge(self, ended: ChildResult, test: dict[str, Any], *, called: bool) -> tuple[bool, str]:
        """Return whether a child's answer is correct, and the reason if not; may raise :class:`BrokenChecker`."""
        if called:
            kind, value = parse_report(ended.report)
            if kind != "returned":
                return False, str(value)[:WHY_CHARS] or "nothing that can be read was returned"
            if self._program is not None:
                return self._ask(test, value)
            try:
                return checkers.values_match(value, test["expected"], self._checker), ""
            except RecursionError:
                return False, "nested too deeply"
        output = ended.output.decode("utf-8", "surrogateescape")
        if self._program is not None:
            return self._ask(test, output)
        return checkers.outputs_match(output, test["expected"], self._checker), ""

    def accepts_strictly(self, ended: ChildResult, test: dict[str, Any], *, called: bool) -> bool:
        """Return whether an accepted answer is also correct without the tolerance of the checker ``lines``."""
        if self._checker["kind"] != "lines":
            return True
        if called:
            return checkers.values_match(parse_report(ended.report)[1], test["expected"], self._checker, strict=True)
        output = ended.output.decode("utf-8", "surrogateescape")
        return checkers.outputs_match(output, test["expected"], self._checker, strict=True)

    def _ask(self, test: dict[str, Any], answer: Any) -> tuple[bool, str]:
        judged, why = self._run(test, answer)
        if judged is None:
            if self._sane is None:
                self._sane = self._run(test, test["expected"])[0] is not None
            if not self._sane:
                raise BrokenChecker(why)
        return judged is True, why

    def _run(self, test: dict[str, Any], answer: Any) -> tuple[bool | None, str]:
        assert self._program is not None
        ended = self._program.run(json.dumps([test["input"], answer, test["expected"]]).encode())
        if ended.killed:
            raise RuntimeError("the checker was killed")
        kind, value = parse_report(ended.report)
        if ended.verdict is not None or kind != "returned":
            return None, f"the checker did not judge it: {ended.why or value}"[:WHY_CHARS]
        why = ""
        if isinstance(value, list) and len(value) == 2:
            value, why = value[0], str(value[1])[:WHY_CHARS]
        return (value, why) if isinstance(value, bool) else (None, "the checker said neither True nor False")


class CandidateReport:
    """Results of all tests of a candidate, and the verdict on the candidate."""

    def __init__(self, total: int) -> None:
        self.fields: dict[str, Any] = {
            "total": total, "run": 0, "passed": 0, "strict": 0, "cpu_s": 0.0, "slowest_s": 0.0, "peak_mib": 0,
            "failures": [],
        }  # fmt: skip
        self.verdict = "passed"
        self.detail = ""
        self.killed = False

    def add(self, index: int, verdict: str, why: str, ended: ChildResult | None = None, values: str = "") -> None:
        """Add a test's result. The first failure becomes the candidate's verdict; ``values`` extend its detail."""
        fields = self.fields
        if ended is not None:
            fields["run"] += 1
            fields["cpu_s"] = round(fields["cpu_s"] + ended.cpu_s, 6)
            fields["slowest_s"] = max(fields["slowest_s"], round(ended.cpu_s, 6))
            fields["peak_mib"] = max(fields["peak_mib"], ended.mib)
            self.killed |= ended.killed
        if verdict == "passed":
            fields["passed"] += 1
            return
        if self.verdict == "passed":
            detail = "; ".join(filter(None, (why, values)))
            self.verdict, self.detail = verdict, f"test {index + 1} of {fields['total']} failed: {detail}"
        if len(fields["failures"]) < MAX_FAILURES_REPORTED:
            fields["failures"].append({"test": index, "verdict": verdict, "why": why})


def excerpt(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except RecursionError:
        return "(nested too deeply)"
    return repr(text) if len(text) <= EXCERPT_CHARS else f"{text[:EXCERPT_CHARS]!r} ({len(text)} characters)"


def details(test: dict[str, Any], ended: ChildResult, verdict: str, *, called: bool) -> str:
    """Return a failed test's input and, for a wrong answer, the expected and the actual output."""
    given = f"input {excerpt(test['input'])}"
    if verdict != "wrong_answer":
        return given
    # The report of a call is not parsed here, since it may be nested too deeply.
    actual = (ended.report[len(RETURNED) : -1] if called else ended.output).decode("utf-8", "replace")
    return f"{given}, expected {excerpt(test['expected'])}, got {excerpt(actual)}"


def examine(job: dict[str, Any], candidate: Zygote, checker: Checker, scratch: ScratchFolder) -> CandidateReport:
    tests, report = job["tests"], CandidateReport(len(job["tests"]))
    spent_s = 0.0
    applied = job["checker"].get("applied")
    runner = ChildRunner(candidate, job["limits"], job["source"], job["function"], "solution.py", scratch, applied)
    answer = runner.ready(deadline_s(runner.time_s))
    if "refused" in answer:
        report.verdict, report.detail = "syntax_error", answer["refused"]
        report.killed = answer.get("killed", False)
        return report
    report.fields["landlock"] = answer["ready"]
    for index, test in enumerate(tests):
        if spent_s > job["total_s"]:
            report.add(index, "timed_out", f"all tests together have {job['total_s']:g} s")
            break
        given = json.dumps(test["input"]) if runner.called else test["input"]
        ended = runner.run(given.encode("utf-8", "surrogatepass"))
        spent_s += ended.spent_s
        verdict, why = ended.verdict, ended.why
        if verdict is None:
            right, why = checker.judge(ended, test, called=runner.called)
            verdict = "passed" if right else "wrong_answer"
            report.fields["strict"] += right and checker.accepts_strictly(ended, test, called=runner.called)
        first = verdict != "passed" and report.verdict == "passed"
        report.add(index, verdict, why, ended, details(test, ended, verdict, called=runner.called) if first else "")
        if verdict in ("no_solution",) or (verdict != "passed" and job["stop_at_failure"]):
            break
    return report


def tell(nonce: str, what: Any) -> None:
    write_all(1, f"\n{nonce} {json.dumps(what)}\n".encode())


def long_integer(value: dict[str, Any]) -> Any:
    """Decode an object with the single key :data:`.checkers.LONG_INTEGER`; return any other object unchanged."""
    digits = value.get(checkers.LONG_INTEGER)
    return int(digits) if len(value) == 1 and isinstance(digits, str) else value


def main() -> None:
    """Fork the zygotes, read the job, run it and print the report."""
    process_hardening.hide()
    zygotes = Zygote(), Zygote()
    allow_long_integers(MAX_INT_DIGITS)
    job = json.loads(sys.stdin.buffer.read(), object_hook=long_integer)
    sys.meta_path.clear()  # a later import could load a file that a candidate has modified
    scratch = ScratchFolder()
    # After this message the candidate may be the cause of a missing verdict.
    tell(job["nonce"], "begun")
    try:
        report = examine(job, zygotes[0], Checker(job, zygotes[1]), scratch)
    except BrokenChecker as error:
        tell(job["nonce"], {"row": str(error)})
        return
    tell(
        job["nonce"],
        {"verdict": report.verdict, "detail": report.detail, "tests": report.fields, "killed": report.killed},
    )


if __name__ == "__main__":
    main()
