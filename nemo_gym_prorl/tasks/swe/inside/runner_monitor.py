# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Authenticated channel for test outcomes, and detection of a modified test runner.

The module runs in the sandbox with the interpreter of the image: Python 3.5 and later.

The secret comes through a pipe, which is read once, before any code of the repository is imported. Each record has a
number and an HMAC, so other processes that write to the channel cannot forge records.

Code of the repository can replace functions of the test runner or builtins. :class:`RunnerIntegrity` checks objects
that legitimate code never changes, or restores after each test.
"""

import builtins
import hashlib
import hmac
import json
import os
import sys


_write, _getpid, _dumps, _sha256, _new = os.write, os.getpid, json.dumps, hashlib.sha256, hmac.new


class Channel:
    """Write-only channel to the process that started the tests; forked processes cannot send.

    Args:
        named: ``SECRET:INODE:RECORDS``: descriptor and inode of the pipe with the secret, and descriptor of the file
            for records. With any other text, the channel is closed.
    """

    def __init__(self, named):
        self._pid = None
        try:
            secret, inode, records = [int(part) for part in named.split(":")]
            if os.fstat(secret).st_ino != inode:
                return
            self._secret = b""
            while True:
                part = os.read(secret, 4096)
                if not part:
                    break
                self._secret += part
            os.close(secret)
            if not self._secret:
                return
            self._records = os.dup(records)  # unlike ``records``, the copy is not inherited by programs
            os.close(records)
        except (ValueError, OSError):
            return
        self._count = 0
        self._pid = _getpid()

    @property
    def open(self):
        """Return whether this process may send because this process, and not its parent, opened the channel."""
        return self._pid == _getpid()

    def send(self, kind, *values):
        if not self.open:
            return
        self._count += 1
        body = _dumps([self._count, kind] + list(values)).encode("ascii")
        _write(self._records, _new(self._secret, body, _sha256).hexdigest().encode("ascii") + b" " + body + b"\n")


CHANNEL = Channel(os.environ.pop("PRORL_CHANNEL", ""))


BUILTINS = """
AssertionError BaseException Exception all any abs bool dict enumerate filter float getattr hasattr int isinstance
issubclass len list map max min range repr reversed round set sorted str sum tuple type zip
""".split()

MODULES = """
_pytest.runner _pytest.python _pytest.unittest _pytest.reports _pytest.outcomes _pytest.main _pytest.nodes
_pytest.skipping _pytest._code.code pluggy pluggy._callers pluggy._hooks pluggy._manager pluggy._result
pluggy.callers pluggy.hooks pluggy.manager unittest.case unittest.result unittest.loader unittest.runner
unittest.suite math cmath operator
""".split()

ASSERTION_MODULES = """
pytest _pytest.python_api _pytest.raises _pytest.recwarn _pytest.assertion _pytest.assertion.util
_pytest.assertion.rewrite
""".split()
"""pytest's modules with assertions, which installed plugins may modify while they load."""

_SUBTESTS = "_pytest.unittest.TestCaseFunction.addSkip"
"""Not checked, since pytest-subtests replaces this method. A cheat gains nothing: a skipped test does not pass."""


def _parts(module):
    """Yield name and object of a module's callables, and of the methods of classes that the module defines."""
    for name, value in list(vars(module).items()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            for inner, part in list(vars(value).items()):
                if callable(part) or isinstance(part, (staticmethod, classmethod, property)):
                    yield name + "." + inner, part
        if callable(value):
            yield name, value


def _state(part):
    part = getattr(part, "__func__", part)
    code = getattr(part, "__code__", None)
    return (id(part), id(code), id(getattr(part, "__defaults__", None)))


class RunnerIntegrity:
    """Snapshot of the runner's functions by ``id``. References keep the objects alive, so that ids stay unique."""

    def __init__(self):
        self._held = []
        self._states = {}
        self._modules = []
        self._reported = set()
        self._add(MODULES)
        self._builtins = {name: getattr(builtins, name) for name in BUILTINS}

    def add_assertion_modules(self):
        self._add(ASSERTION_MODULES)

    def report(self, channel):
        """Send the name of each object that differs from the snapshot, once."""
        if channel.open:
            for name in self._changed():
                if name not in self._reported:
                    self._reported.add(name)
                    channel.send("changed", name)

    def _changed(self):
        """Return the names of at most 20 objects that differ from the snapshot or are gone; new objects are fine."""
        found = [
            "builtins." + name for name, was in self._builtins.items() if getattr(builtins, name, None) is not was
        ]
        now = {}
        for name, module in self._modules:
            if sys.modules.get(name) is not module:
                found.append(name)
            now.update((name + "." + inner, _state(part)) for inner, part in _parts(module))
        found += [name for name, was in self._states.items() if now.get(name) != was and name != _SUBTESTS]
        return sorted(found)[:20]

    def _add(self, names):
        for name in names:
            module = sys.modules.get(name)
            if module is not None:
                self._modules.append((name, module))
            for inner, part in _parts(module) if module else ():
                self._held.append((part, getattr(part, "__code__", None)))
                self._states[name + "." + inner] = _state(part)
