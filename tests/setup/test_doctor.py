# SPDX-License-Identifier: Apache-2.0
"""``prorl doctor`` and ``prorl setup`` as a user sees them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.doctor import (
    Level,
    _administrator,
    _fuse,
    _open_files,
    examine,
    limits_check,
)
from nemo_gym_prorl.sandbox.limits import Facts, limits


def prorl(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from nemo_gym_prorl.cli import main; main()", *arguments]
    environ = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **environ}
    return subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


@pytest.mark.sandbox
def test_after_setup_nothing_is_missing(image: Path) -> None:
    again = prorl("setup")
    assert again.returncode == 0, again.stderr
    assert "unpacking" not in again.stdout, "what is there is not built again"
    assert "git version" in again.stdout
    healthy = prorl("doctor")
    assert healthy.returncode == 0, healthy.stdout
    assert str(image) in healthy.stdout.replace("\n", "")


def test_on_a_bare_machine_it_says_what_to_do(empty_cache: Path) -> None:
    checks = {check.name: check for check in examine()}
    for name in ("Container runtime", "Default image"):
        assert checks[name].level is Level.MISSING
        assert "prorl setup" in checks[name].fix
    assert all(check.fix for check in checks.values() if check.level is not Level.OK)
    assert "Container" not in checks, "what can't be tried is not reported"
    assert not empty_cache.exists(), "looking changes nothing"
    assert prorl("doctor").returncode == 1


def test_a_cache_that_cannot_be_written_is_named(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PRORL_CACHE", str(tmp_path / "file" / "cache"))
    check = next(check for check in examine() if check.name == "Cache folder")
    assert check.level is Level.MISSING
    assert "PRORL_CACHE" in check.fix
    failed = prorl("setup")
    assert failed.returncode == 1
    assert "set PRORL_CACHE" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_errors_of_ours_are_one_line(tmp_path: Path) -> None:
    failed = prorl("setup", PATH=str(tmp_path), PRORL_CACHE=str(tmp_path / "cache"))
    assert failed.returncode == 1
    assert failed.stderr.startswith("prorl: ")
    assert "Traceback" not in failed.stderr


def test_help_waits_for_no_framework() -> None:
    code = (
        "import sys\nfrom nemo_gym_prorl.cli import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "print([name for name in ('nemo_gym', 'fastapi', 'aiohttp', 'ray', 'pydantic') if name in sys.modules])"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert "setup" in said
    assert "doctor" in said
    assert said.splitlines()[-1] == "[]"


@given(
    st.frozensets(st.sampled_from(["cpu", "memory", "pids"])),
    st.sampled_from([(4, 18), (5, 14), (6, 1)]),
)
def test_every_limit_is_named_with_how_it_is_kept(controllers: frozenset[str], kernel: tuple[int, int]) -> None:
    found = limits(Facts(controllers, kernel))
    check = limits_check(found)
    assert all(limit.name in check.found and limit.how in check.found for limit in found)
    bounded = "pids" in controllers or kernel >= (5, 14)
    assert (check.level is Level.OK) is (bounded and {"cpu", "memory"} <= controllers)
    assert bool(check.fix) is (check.level is not Level.OK)
    assert ("not enforced: cpu" in check.found) is ("cpu" not in controllers)


def test_the_limits_of_this_machine_are_reported() -> None:
    said = next(check for check in examine() if check.name == "Sandbox limits")
    assert "watched: " in said.found
    assert "disk" in said.found


def test_at_80_columns_every_finding_can_be_read() -> None:
    said = prorl("doctor", COLUMNS="80").stdout
    lines = said.splitlines()
    assert max(map(len, lines)) <= 80
    # A finding has 50 columns or more, and its remedy stands below it: no column of a word or two.
    assert len(lines) < 45, said
    for check in examine():
        assert check.name in said


def test_a_low_limit_of_open_files_is_found() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024))\n"
        "from nemo_gym_prorl.doctor import _open_files; c = _open_files(); print(c.level, c.found, '|', c.fix)"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert said.startswith("warn limit 1,024 (now 512, our servers raise it); 1,000 rollouts at once need 4,256")
    assert "nofile" in said


def test_a_user_is_not_told_to_be_root(as_ordinary_user: Callable[[Callable[[Path], Any]], Any]) -> None:
    def fixes(home: Path) -> list[str]:
        return [check.fix for check in (_fuse(), _open_files()) if check.fix] + [_administrator("sysctl a=b")]

    for fix in as_ordinary_user(fixes):
        assert fix.startswith("your administrator can: "), fix
        assert "sudo" not in fix
