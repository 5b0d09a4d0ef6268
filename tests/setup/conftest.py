# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Fixtures of set-up tests: a cache of their own, and an ordinary user."""

from __future__ import annotations

import encodings.idna  # noqa: F401  who may not read the interpreter's files has what was imported before
import os
import pickle
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


NOBODY = 65534
"""An ordinary user with an entry in /etc/passwd (required by Apptainer) on every Linux."""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for this test, and no runtime on PATH."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("PRORL_CACHE", str(cache))
    monkeypatch.setenv("PATH", without_runtimes(tmp_path / "tools"))
    return cache


def without_runtimes(folder: Path) -> str:
    """Return a PATH with links to all programs but the container runtimes."""
    folder.mkdir(parents=True)
    for directory in map(Path, os.get_exec_path()):
        for program in directory.iterdir() if directory.is_dir() and os.access(directory, os.R_OK) else ():
            link = folder / program.name
            if program.name not in ("apptainer", "singularity") and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


@pytest.fixture
def as_ordinary_user() -> Iterator[Callable[[Callable[[Path], Any]], Any]]:
    """Call a function in a process of an ordinary user, with that user's empty home folder; returns its result.

    The process is forked, since the user may not be able to read the interpreter's files.
    """
    home = Path(tempfile.mkdtemp(prefix="prorl-nobody-"))
    if os.geteuid() == 0:
        os.chown(home, NOBODY, NOBODY)

    def call(function: Callable[[Path], Any]) -> Any:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            try:
                answer = (True, _run_as_user(function, home))
            except BaseException:
                answer = (False, traceback.format_exc())
            with os.fdopen(writer, "wb") as stream:
                pickle.dump(answer, stream)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as stream:
            succeeded, value = pickle.load(stream)
        os.waitpid(child, 0)
        assert succeeded, value
        return value

    yield call
    shutil.rmtree(home)


def _run_as_user(function: Callable[[Path], Any], home: Path) -> Any:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    os.chdir(home)
    os.environ.clear()
    os.environ.update(HOME=str(home), PATH="/usr/bin:/bin")
    return function(home)
