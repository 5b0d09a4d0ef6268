# SPDX-License-Identifier: Apache-2.0
"""A plugin for any pytest from 3.0 on that tells outcomes through the channel, and whether they can be believed.

PYTEST_DONT_REWRITE. Outcomes are taken where pytest makes its reports, outside of every other plugin, and are held
against how our own call of the test's function ended. From time to time a test is played that can only fail (a
*canary*), under the name and in the place of a real one: a runner in which it passes lets anything pass.
"""

import hashlib
import os
import random
import time

import pytest
from _pytest import runner
from _pytest.assertion.rewrite import rewrite_asserts

from .channel import CHANNEL
from .items import RUNNING, Collected
from .originals import Originals
from .watch import Watch


WATCH = Watch()
ORIGINALS = Originals(rewrite_asserts)
COLLECTED = Collected(ORIGINALS)
STARTED = time.time()
CANARIES = 5
_DECIDING = ("pytest_runtest_call", "pytest_runtest_makereport", "pytest_pyfunc_call", "pytest_runtest_protocol",
             "pytest_runtest_setup", "pytest_runtest_teardown", "pytest_collection_modifyitems", "pytest_runtestloop",
             "pytest_sessionfinish", "pytest_runtest_logreport", "pytest_fixture_setup",
             "pytest_assertrepr_compare")  # fmt: skip
_open, _sha1, _realpath = open, hashlib.sha1, os.path.realpath
_seen = {"items": 0, "canaries": set(), "changed": set(), "playing": False, "hooks": {}, "xdist": False}


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    """Installed plugins are there, and nothing of the repository is."""
    for path in CHANNEL.files:
        ORIGINALS.read(path, early_config)
    WATCH.add_deciding()
    for _, code in _hooks(early_config):
        _seen["hooks"][id(code)] = code


def pytest_configure(config):
    _seen["config"] = config
    _seen["xdist"] = config.pluginmanager.hasplugin("dsession")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session):
    CHANNEL.send("begin", pytest.__version__)
    random.seed()
    count = len(session.items)
    _seen["canaries"] = {0, count - 1} | {random.randrange(count) for _ in range(CANARIES - 2)} if count else set()
    if not CHANNEL.open:
        return
    for path in sorted({str(item.fspath) for item in session.items}):
        CHANNEL.send("file", _realpath(path), _blob(path))
    for item, name in COLLECTED.add(session.items):
        _tell_changed(item, name)


@pytest.hookimpl(hookwrapper=True, trylast=True)
def pytest_runtest_call(item):
    """The innermost: nothing but the item itself stands between this and its function."""
    if not CHANNEL.open:
        yield
        return
    for name in COLLECTED.wrong(item):
        _tell_changed(item, name)
    _look_at_hook("the function of a test", COLLECTED.wrapper(item))
    witness = COLLECTED.witnessed(item)
    if witness is None:
        yield
    else:
        function, item.obj = item.obj, witness
        yield
        if item.obj is witness:
            item.obj = function
    for name in COLLECTED.wrong(item) + COLLECTED.wrong_in_module(item):
        _tell_changed(item, name)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    raised = call.excinfo
    outcome = yield
    if not CHANNEL.open or _seen["playing"]:
        return
    report = outcome.get_result()
    status = report.outcome
    if status == "passed" and raised is not None and call.when != "teardown":
        status = "failed"
    if hasattr(report, "wasxfail"):
        status = _expected(item, raised) if status == "skipped" else "xpassed"
    if call.when == "call":
        how = COLLECTED.how_played(item)
        if status == "passed" and how == RUNNING:
            return  # of a subtest
        if status == "passed" and how not in ("returned", None):
            status = "failed"
            CHANNEL.send("unplayed", _name(item.nodeid), how)
    CHANNEL.send("report", _name(COLLECTED.nodeid(item) or item.nodeid), call.when, status)
    if call.when == "setup":
        if _seen["items"] in _seen["canaries"]:
            CHANNEL.send("canary", _canary(item))
        _seen["items"] += 1
    if call.when != "call":
        _look()


def _expected(item, raised):
    """Of a failure that was expected: whether it had been before the test began. Who expects it later is told."""
    if raised is not None and isinstance(raised.value, pytest.xfail.Exception):
        _look_at_hook("a failure that it expects", _raiser(raised.tb))
    elif not COLLECTED.expects_failure(item):
        return "expected late"
    return "xfailed"


def _raiser(traceback):
    """The code that calls for a test's end."""
    codes = []
    while traceback is not None:
        codes.append(traceback.tb_frame.f_code)
        traceback = traceback.tb_next
    own = getattr(pytest.xfail, "__code__", None) or type(pytest.xfail).__call__.__code__  # from pytest 9 on
    theirs = [code for code in codes if code is not own]
    return theirs[-1] if theirs else None


def pytest_runtest_logreport(report):
    if _seen["xdist"] and hasattr(report, "node"):  # of another process
        status = report.outcome
        if hasattr(report, "wasxfail"):
            status = "xfailed" if status == "skipped" else "xpassed"
        CHANNEL.send("report", _name(report.nodeid), report.when, status)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    _look()
    for hook, code in _hooks(session.config):
        _look_at_hook(hook, code)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    CHANNEL.send("end")


def _name(nodeid):
    """As the summary prints it."""
    relative = getattr(_seen.get("config"), "cwd_relative_nodeid", None)
    return relative(nodeid) if relative else nodeid


def _look():
    for name in WATCH.changed():
        _tell(name)


def _tell_changed(item, name):
    _tell("{} of {}".format(name, os.path.basename(str(item.fspath))))


def _tell(name):
    if name not in _seen["changed"]:
        _seen["changed"].add(name)
        CHANNEL.send("changed", name)


def _hooks(config):
    """Hook and code, of what has a say in outcomes."""
    for hook in _DECIDING:
        for implementation in getattr(config.hook, hook).get_hookimpls() if hasattr(config.hook, hook) else ():
            function = getattr(implementation.function, "__func__", implementation.function)
            yield hook, getattr(function, "__code__", None)


def _look_at_hook(hook, code):
    """Tell of a hook that was not there when installed plugins had been loaded, and whether its file says so too."""
    if id(code) in _seen["hooks"]:
        return
    _seen["hooks"][id(code)] = code
    if code is None:
        return
    CHANNEL.send("hook", hook, _realpath(code.co_filename), ORIGINALS.is_genuine(code, STARTED))


def _blob(path):
    try:
        with _open(path, "rb") as file:
            content = file.read()
    except OSError:
        return ""
    return _sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _must_fail(item):
    """A function that can only fail, with the name, file and line of an item's own."""
    name = getattr(item, "originalname", None) or item.name.partition("[")[0]
    code = getattr(getattr(item.obj, "__func__", item.obj), "__code__", None)
    name = name if name.isidentifier() else "test_{:08x}".format(random.getrandbits(32))
    source = "def {}():\n    assert {!r} == {!r}".format(name, random.random(), random.random() + 2)
    namespace = {}
    line = code.co_firstlineno if code else 1
    exec(compile("\n" * (line - 1) + source, str(item.fspath), "exec", 0, True), namespace)
    return namespace[name]


def _canary(item):
    """What becomes of a test that can only fail; ``failed`` in a runner that nobody has tampered with."""
    _seen["playing"] = True
    try:
        parent = item.getparent(pytest.Module) or item.parent
        make = getattr(pytest.Function, "from_parent", None)
        if make:
            test = make(parent, name=item.name, callobj=_must_fail(item))
        else:
            test = pytest.Function(item.name, parent, callobj=_must_fail(item))
        play = getattr(runner.CallInfo, "from_call", None) or runner.CallInfo
        call = play(test.runtest, when="call")
        return item.ihook.pytest_runtest_makereport(item=test, call=call).outcome
    except Exception as error:
        return "unknown: {}: {}".format(type(error).__name__, error)[:200]
    finally:
        _seen["playing"] = False
