# SPDX-License-Identifier: Apache-2.0
"""What pytest collected, held against what it is when it is played. Part of a program in the sandbox, Python 3.5 on.

A test has passed only if our own call of its function came back. Right before that call, and after it, the item, its
function, what makes its fixtures and its parameters must be the objects that were collected, and the functions of its
module what their file says (:mod:`.originals`). What a fixture gives, and what is inside of a parameter, is not looked
at; nor whether a comparison in a test means anything.
"""

import functools
import types

import pytest

from .originals import find


_UNFINISHED = 0x20 | 0x100 | 0x200
"""Flags of code that is not over when a call returns, and that has no await: generators."""

_COROUTINE = 0x80
RUNNING = "running"
_METHODS = ("runtest", "setup", "teardown", "repr_failure", "ihook")
_DEEP = 5
_id, _vars = id, vars

try:
    from _pytest.unittest import TestCaseFunction
except ImportError:
    TestCaseFunction = ()

_SETS_ITS_FUNCTION = [int(part) for part in pytest.__version__.split(".")[:1] if part.isdigit()] >= [6]
"""From there on a ``TestCase`` calls what its item has for a function."""


class _Item:
    """One item as it was collected; ``function`` is ``None`` if pytest calls none for it."""

    def __init__(self, item, originals):
        self.item = item
        self.nodeid = item.nodeid
        self.type = type(item)
        self.function = None
        self.wrong = []
        self.path, self.module = _place(item)
        self.shadows = _shadows(item)
        self.codes = {}
        self.made = []
        self.parameters = {}
        self.played = "never called"
        self.expects_failure = "xfail" in item.keywords
        if isinstance(item, pytest.Function):
            self._look_at_function(item, originals)

    def _look_at_function(self, item, originals):
        self.function = _collected_function(item)
        name = _qualified(item)
        if self.module is not None and originals.defines(self.path, name):
            defined = find(_vars(self.module), name)
            if not _leads_to(self.function, defined):
                self.wrong.append(name)
            self.function = defined
        self.expects_failure |= hasattr(self.function, "__unittest_expecting_failure__")
        self.codes["its function"] = (self.function, _codes(self.function))
        for name, fixtures in getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {}).items():
            for fixture in fixtures:
                maker = _function(fixture.func)
                self.made.append((name, fixture, maker))
                self.codes["fixture " + name] = (maker, _codes(maker))
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        # Placeholders of pytest-lazyfixture give way to values.
        self.parameters = {
            name: value for name, value in parameters.items() if "lazy" not in type(value).__name__.lower()
        }

    def changed(self):
        """What of the item is not as it was."""
        item = self.item
        if type(item) is not self.type or _place(item)[1] is not self.module:
            yield "type or module"
        for name, value in _shadows(item).items():
            if self.shadows.get(name) is not value:
                yield name
        if self.function is None:
            return
        for label, (function, codes) in self.codes.items():
            if any(now is not was for now, was in zip(_codes(function), codes)):  # noqa: B905 - Python 3.5
                yield label
        for name, fixture, maker in self.made:
            if not _leads_to(fixture.func, maker):
                yield "fixture " + name
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        for name, value in self.parameters.items():
            if parameters.get(name) is not value:
                yield "parameter " + name
        if not _leads_to(item.obj, self.function):
            yield "its function"


class Collected:
    """The items of a run.

    Args:
        originals: what files say.
    """

    def __init__(self, originals):
        self._originals = originals
        self._items = {}

    def add(self, items):
        """Remember them; yields each with what is wrong already."""
        modules = {}
        for item in items:
            found = self._items[_id(item)] = _Item(item, self._originals)
            modules[_id(found.module)] = found
            for name in found.wrong:
                yield item, name
        for found in modules.values():
            for name in self._module(found):
                yield found.item, name

    def wrong(self, item):
        """Of an item that is about to be called, or has been: what is not as it was collected."""
        found = self._items.get(_id(item))
        return list(found.changed()) if found else []

    def wrong_in_module(self, item):
        """Functions of its module that are not what their file says."""
        found = self._items.get(_id(item))
        return list(self._module(found)) if found else []

    def nodeid(self, item):
        """As it was collected; ``None`` if it was not."""
        found = self._items.get(_id(item))
        return found.nodeid if found else None

    def expects_failure(self, item):
        """It had a mark for that when it was collected."""
        found = self._items.get(_id(item))
        return found is not None and found.expects_failure

    def wrapper(self, item):
        """The code that stands before an item's function, or ``None``."""
        found = self._items.get(_id(item))
        if found is None or found.function is None:
            return None
        code = getattr(_function(item.obj), "__code__", None)
        return None if code is getattr(found.function, "__code__", None) else code

    def witnessed(self, item):
        """The item's function, such that it is known how a call of it ended; ``None`` if that can't be known."""
        found = self._items.get(_id(item))
        if found is None or found.function is None:
            return None
        function = item.obj
        flags = getattr(getattr(_function(function), "__code__", None), "co_flags", 0)
        if flags & _UNFINISHED:
            found.played = None
            return None
        found.played = "never called"
        owner = getattr(function, "__self__", None)
        witness = functools.wraps(function)(_witness(found, function, bool(flags & _COROUTINE), owner is not None))
        return witness if owner is None else types.MethodType(witness, owner)

    def how_played(self, item):
        """How the last call of its function ended, or :data:`RUNNING`; ``None`` if that can't be known."""
        found = self._items.get(_id(item))
        if found is None:
            return "never collected"
        if found.function is None:
            return None
        if found.played == "never called" and isinstance(item, TestCaseFunction) and not _SETS_ITS_FUNCTION:
            return None
        return found.played

    def _module(self, found):
        return self._originals.changed(found.path, _vars(found.module)) if found.module is not None else ()


def _witness(found, function, is_coroutine, bound):
    skipped = 1 if bound else 0

    def witness(*args, **kwargs):
        found.played = RUNNING
        try:
            returned = function(*args[skipped:], **kwargs)
        except BaseException:
            found.played = "raised"
            raise
        found.played = "returned"
        return returned

    async def witness_of_coroutine(*args, **kwargs):
        found.played = RUNNING
        try:
            returned = await function(*args[skipped:], **kwargs)
        except BaseException:
            found.played = "raised"
            raise
        found.played = "returned"
        return returned

    return witness_of_coroutine if is_coroutine else witness


def _function(thing):
    return getattr(thing, "__func__", thing)


def _codes(function):
    return [getattr(function, label, None) for label in ("__code__", "__defaults__", "__kwdefaults__")]


def _place(item):
    return str(getattr(item, "path", None) or item.fspath), getattr(item.getparent(pytest.Module), "obj", None)


def _shadows(item):
    return {name: _vars(item)[name] for name in _METHODS if name in _vars(item)}


def _qualified(item):
    classes = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    return ".".join(classes + [getattr(item, "originalname", None) or item.name.partition("[")[0]])


def _collected_function(item):
    if isinstance(item, TestCaseFunction):  # it has its function of the object that is made for it
        for cls in item.getparent(pytest.Class).obj.__mro__:
            if item.name in _vars(cls):
                return _function(_vars(cls)[item.name])
    return _function(item.obj)


def _leads_to(thing, function, deep=_DEEP):
    """It is the function, or a wrapper that holds it."""
    thing = _function(thing)
    if thing is function or not isinstance(function, types.FunctionType):
        return True
    if not deep:
        return False
    held = [cell.cell_contents for cell in getattr(thing, "__closure__", None) or () if _is_full(cell)]
    held += list(getattr(thing, "__dict__", {}).values())
    held.append(getattr(thing, "func", None))
    return any(callable(part) and _leads_to(part, function, deep - 1) for part in held)


def _is_full(cell):
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
