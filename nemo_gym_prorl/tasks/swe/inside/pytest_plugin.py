# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A plugin for any pytest from 3.0 on that tells outcomes through the channel, and what of the runner was replaced.

PYTEST_DONT_REWRITE. Outcomes are taken where pytest makes its reports, outside of every other plugin. Whether a test
means anything that passes is not asked here: the same tests are run again, asking for something else.
"""

import pytest

from .runner_monitor import CHANNEL, RunnerIntegrity


INTEGRITY = RunnerIntegrity()
_seen = {"xdist": False}


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():
    """Installed plugins are there, and nothing of the repository is."""
    INTEGRITY.add_deciding()


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
        INTEGRITY.tell(CHANNEL)


def pytest_runtest_logreport(report):
    if _seen["xdist"] and hasattr(report, "node"):  # of another process
        CHANNEL.send("report", _name(report.nodeid), report.when, _status(report))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    INTEGRITY.tell(CHANNEL)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    CHANNEL.send("end")


def _status(report):
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.outcome == "skipped" else "xpassed"
    return report.outcome


def _name(nodeid):
    """As the summary prints it."""
    relative = getattr(_seen.get("config"), "cwd_relative_nodeid", None)
    return relative(nodeid) if relative else nodeid
