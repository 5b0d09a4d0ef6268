# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Plugin for pytest 3.0 and later: reports outcomes and modifications of the runner.

Outcomes are recorded in the outermost hook around the creation of pytest's reports. pytest does not rewrite assertions
in a module with PYTEST_DONT_REWRITE in its docstring.
"""

import pytest

from .runner_monitor import CHANNEL, RunnerIntegrity


INTEGRITY = RunnerIntegrity()
_seen = {"xdist": False}


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():
    """Extend the runner's snapshot after installed plugins are loaded, and before code of the repository runs."""
    INTEGRITY.add_assertion_modules()


def pytest_configure(config):
    _seen["config"] = config
    _seen["xdist"] = config.pluginmanager.hasplugin("dsession")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session):
    CHANNEL.send("begin", pytest.__version__)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    raised = call.excinfo
    outcome = yield
    report = outcome.get_result()
    status = _status(report)
    if status == "passed" and raised is not None and call.when != "teardown":
        status = "failed"
    CHANNEL.send("report", _name(item.nodeid), call.when, status)
    if call.when != "call":
        INTEGRITY.report(CHANNEL)


def pytest_runtest_logreport(report):
    if _seen["xdist"] and hasattr(report, "node"):  # from an xdist worker; the controller runs no makereport
        CHANNEL.send("report", _name(report.nodeid), report.when, _status(report))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    INTEGRITY.report(CHANNEL)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    CHANNEL.send("end")


def _status(report):
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.outcome == "skipped" else "xpassed"
    return report.outcome


def _name(nodeid):
    """Return a test's name as in pytest's summary."""
    relative = getattr(_seen.get("config"), "cwd_relative_nodeid", None)
    return relative(nodeid) if relative else nodeid
