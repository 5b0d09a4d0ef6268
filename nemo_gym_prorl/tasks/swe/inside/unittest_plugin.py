# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Report the outcomes of any runner that uses ``unittest.TestResult``, by patching the class."""

import atexit
from unittest import TestResult

from .runner_monitor import CHANNEL, RunnerIntegrity


INTEGRITY = RunnerIntegrity()
_seen = {"begun": False}


def _name(result, test):
    """Return a test's name as in the log: the last line of the test's description."""
    describe = getattr(result, "getDescription", str)
    return describe(test).splitlines()[-1]


def _report_outcome(method, status):
    original = getattr(TestResult, method)

    def wrapper(self, test, *args, **kwargs):
        if hasattr(test, "_testMethodName"):
            CHANNEL.send("report", _name(self, test), "call", status)
        return original(self, test, *args, **kwargs)

    setattr(TestResult, method, wrapper)


def _subtest(self, test, subtest, err, _original=TestResult.addSubTest):
    if err is not None:
        CHANNEL.send("report", _name(self, test), "teardown", "failed")
    return _original(self, test, subtest, err)


def _start(self, test, _original=TestResult.startTest):
    INTEGRITY.report(CHANNEL)
    return _original(self, test)


def _stop(self, test, _original=TestResult.stopTest):
    INTEGRITY.report(CHANNEL)
    return _original(self, test)


def _start_run(self, _original=TestResult.startTestRun):
    if not _seen["begun"]:
        CHANNEL.send("begin", "unittest")
    _seen["begun"] = True
    return _original(self)


if CHANNEL.open:
    for _method, _status in (
        ("addSuccess", "passed"),
        ("addFailure", "failed"),
        ("addError", "failed"),
        ("addSkip", "skipped"),
        ("addExpectedFailure", "xfailed"),
        ("addUnexpectedSuccess", "failed"),
    ):
        _report_outcome(_method, _status)
    TestResult.addSubTest = _subtest
    TestResult.startTest = _start
    TestResult.stopTest = _stop
    TestResult.startTestRun = _start_run
    INTEGRITY = RunnerIntegrity()
    atexit.register(CHANNEL.send, "end")
