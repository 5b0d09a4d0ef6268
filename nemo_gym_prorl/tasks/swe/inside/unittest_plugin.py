# SPDX-License-Identifier: Apache-2.0
"""Tells outcomes of unittest through the channel: of whatever runner gives them to a ``unittest.TestResult``."""

import atexit
import os
import sys
import unittest.case
import unittest.loader
import unittest.result
import unittest.runner
import unittest.suite
from unittest.result import TestResult

from .channel import CHANNEL
from .originals import Originals, find
from .watch import Watch


WATCH = Watch()
ORIGINALS = Originals()
_seen = {"changed": set(), "tests": 0}


def _name(result, test):
    """As the runner prints it: its last line, which is the docstring's first where there is one."""
    describe = getattr(result, "getDescription", str)
    return describe(test).splitlines()[-1]


def _told(method, status):
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


def _look(test):
    found = WATCH.changed()
    module = sys.modules.get(type(test).__module__)
    if module is not None:
        path = getattr(module, "__file__", None) or ""
        names = list(ORIGINALS.changed(path, vars(module)))
        method = getattr(test, "_testMethodName", "")
        name = "{}.{}".format(type(test).__name__, method)
        if ORIGINALS.defines(path, name) and find(vars(module), name) is not vars(type(test)).get(method):
            names.append(name)
        found += ["{} of {}".format(name, module.__name__) for name in names]
    for name in found:
        if name not in _seen["changed"]:
            _seen["changed"].add(name)
            CHANNEL.send("changed", name)


def _start(self, test, _original=TestResult.startTest):
    _look(test)
    return _original(self, test)


def _stop(self, test, _original=TestResult.stopTest):
    _look(test)
    return _original(self, test)


def _start_run(self, _original=TestResult.startTestRun):
    if not _seen["tests"]:
        CHANNEL.send("begin", "unittest")
        CHANNEL.send("canary", _canary())
    _seen["tests"] += 1
    return _original(self)


class _Canary(unittest.case.TestCase):
    def runTest(self):
        self.assertEqual(os.getpid(), -1)


def _canary():
    """What becomes of a test that can only fail."""
    result = unittest.result.TestResult.__new__(TestResult)
    TestResult.__init__(result)
    unittest.case.TestCase.run(_Canary(), result)
    return "failed" if result.failures else "passed"


if CHANNEL.open:
    for _method, _status in (
        ("addSuccess", "passed"),
        ("addFailure", "failed"),
        ("addError", "failed"),
        ("addSkip", "skipped"),
        ("addExpectedFailure", "xfailed"),
        ("addUnexpectedSuccess", "failed"),
    ):
        _told(_method, _status)
    TestResult.addSubTest = _subtest
    TestResult.startTest = _start
    TestResult.stopTest = _stop
    TestResult.startTestRun = _start_run
    for _path in CHANNEL.files:
        ORIGINALS.read(_path)
    WATCH = Watch()
    atexit.register(CHANNEL.send, "end")
