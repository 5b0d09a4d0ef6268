# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How the process that runs the tests tells their outcomes past its own output, and what of the runner was replaced.

Part of a program in the sandbox, for whatever interpreter the datasets' images have: Python 3.5 and later.

The secret comes through a pipe, which can be read once, before anything of the repository is imported; each record
bears a number and an authentication code, so that who merely writes to the channel, or prints what a runner prints,
says nothing.

A package can replace functions of the test runner, or builtins, from its first import on. :class:`RunnerIntegrity` looks at what
legitimate code leaves alone, or puts back when a test is over.
"""

import builtins
import hashlib
import hmac
import json
import os
import sys


_write, _getpid, _dumps, _sha256, _new = os.write, os.getpid, json.dumps, hashlib.sha256, hmac.new


class Channel:
    """One way, to whoever started the tests; silent in every process but the first.

    Args:
        named: ``SECRET:INODE:RECORDS``, two descriptors and what the first should be. The pipe has the secret, and on
            a line of its own the JSON of a list.
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
            self._records = os.dup(records)  # and closed when another program is started
            os.close(records)
        except (ValueError, OSError):
            return
        self._count = 0
        self._pid = _getpid()

    @property
    def open(self):
        """Somebody listens."""
        return self._pid == _getpid()

    def send(self, kind, *values):
        """One record."""
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

DECIDING = """
pytest _pytest.python_api _pytest.raises _pytest.recwarn _pytest.assertion _pytest.assertion.util
_pytest.assertion.rewrite
""".split()
"""What tests assert with; installed plugins may have changed it when they were loaded."""

_SUBTESTS = "_pytest.unittest.TestCaseFunction.addSkip"
"""The plugin pytest-subtests replaces it; a test that skips itself has not come back, so nothing is won by that."""


def _parts(module):
    """Functions of a module, and what its own classes are made of."""
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
    """Remembers the state at its making. What it remembers it also holds, so no address is given out twice."""

    def __init__(self):
        self._held = []
        self._states = {}
        self._modules = []
        self._told = set()
        self._add(MODULES)
        self._builtins = {name: getattr(builtins, name) for name in BUILTINS}

    def add_deciding(self):
        """Remember :data:`DECIDING` too."""
        self._add(DECIDING)

    def tell(self, channel):
        """Tell what is not as it was, each once."""
        if channel.open:
            for name in self._changed():
                if name not in self._told:
                    self._told.add(name)
                    channel.send("changed", name)

    def _changed(self):
        """Names of what is not as it was; what was added is none of them."""
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
