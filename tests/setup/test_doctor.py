# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``prorl doctor`` and ``prorl setup`` as a user sees them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl import filesystems
from nemo_gym_prorl.cli.doctor import (
    Check,
    Level,
    _administrator,
    _open_files,
    _state,
    examine,
    selinux_check,
    state_check,
    user_namespaces_check,
)
from nemo_gym_prorl.sandbox.isolation.privilege import (
    APPARMOR_USERNS_SYSCTL,
    MAX_USERNS_SYSCTL,
    USERNS_CLONE_SYSCTL,
    ProbeStep,
    UserNamespaceProbe,
    remedies,
)
from nemo_gym_prorl.sandbox.limits.rlimits import cgroup_remedy


def prorl(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from nemo_gym_prorl.cli.app import main; main()", *arguments]
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


def test_a_folder_in_whose_path_servers_do_not_start_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "my files"
    venv.create(folder, symlinks=True)
    code = "from nemo_gym_prorl.cli import doctor; c = doctor._python(); print(c.level, c.found, c.fix)"
    paths = [str(Path(__file__).parents[2]), sysconfig.get_path("purelib")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    said = subprocess.check_output([folder / "bin/python", "-c", code], env=environ, text=True)
    assert said == (
        f"missing Gym cannot start servers with {folder}/bin/python: the path contains a space "
        "install into a path without spaces\n"
    )


def test_on_a_bare_machine_it_says_what_to_do(empty_cache: Path) -> None:
    checks = {check.name: check for check in examine()}
    for name in ("Container runtime", "Default image"):
        assert checks[name].level is Level.MISSING
        assert "prorl setup" in checks[name].fix
    assert all(check.fix for check in checks.values() if check.level is not Level.OK)
    assert "Sandbox" not in checks, "what can't be tried is not reported"
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


MEMORY_V1 = "30 24 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
NAMED_V1 = "32 24 0:28 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
VERSION_2 = "31 24 0:27 / /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("mounts", "root", "systemd", "advice"),
    [
        (MEMORY_V1 + VERSION_2, False, True, "version 2 alone"),
        (NAMED_V1, False, True, "version 2 alone"),
        (NAMED_V1 + VERSION_2, False, True, "systemd-run --user"),
        (VERSION_2, True, True, "systemd-run --scope"),
        (VERSION_2, True, False, "--privileged"),
    ],
)
def test_the_advice_for_control_groups_fits_the_machine(mounts: str, root: bool, systemd: bool, advice: str) -> None:
    assert advice in cgroup_remedy(mounts, root=root, systemd=systemd)


def test_a_python_of_an_old_c_library_is_named() -> None:
    code = (
        "import fcntl, os; [delattr(fcntl, name) for name in dir(fcntl) if 'SEAL' in name]; del os.memfd_create\n"
        "from nemo_gym_prorl.cli import doctor; [c] = doctor.examine(); print(c.level, c.found, '|', c.fix)"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert re.match(r"missing 3.* built without os\.memfd_create.*\| create the environment with another build", said)


def test_a_low_limit_of_open_files_is_found() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024))\n"
        "from nemo_gym_prorl.cli import doctor; c = doctor._open_files()\n"
        "print(c.level, c.found, '|', c.fix)"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert said.startswith("warn limit 1,024 (currently 512; servers raise it); 1,000 concurrent rollouts need 4,256")
    assert "nofile" in said


def test_a_user_is_not_told_to_be_root(as_ordinary_user: Callable[[Callable[[Path], Any]], Any]) -> None:
    def fixes(home: Path) -> list[str]:
        return [check.fix for check in (_open_files(),) if check.fix] + [_administrator("sysctl a=b")]

    for fix in as_ordinary_user(fixes):
        assert fix.startswith("ask your administrator: "), fix
        assert "sudo" not in fix


@pytest.mark.sandbox
def test_one_sandbox_is_started_as_servers_do(image: Path) -> None:
    [check] = [check for check in examine() if check.name == "Sandbox"]
    assert check.level is Level.OK, check
    assert check.found.endswith("; started directly")


NONE_LEFT = (
    "uid = os.getuid(); os.unshare(os.CLONE_NEWUSER); open('/proc/self/uid_map', 'w').write(f'0 {uid} 1')\n"
    "open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
)
"""A machine that allows no user namespaces: the setting applies in the user namespace where it is made."""

FORBIDDEN = "syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1); filter_calls(seccomp.FILTER)\n"
"""A container with Docker's default filter."""

NO_RIGHTS = (
    "syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)\n"
    "table, mounts = seccomp.TABLES[os.uname().machine], frozenset({0x20000})\n"
    "rule = syscall_filter.ArgumentRule(0, mounts, syscall_filter.REFUSE, syscall_filter.ALLOW)\n"
    "rules = {table.refused['unshare']: rule}\n"
    "filter_calls(syscall_filter.compile_filter(table.audit, rules, seccomp.MAX_SYSCALL))\n"
)
"""A machine where user namespaces give no rights, as AppArmor does on Ubuntu."""

PREPARED = (
    "import os\nfrom nemo_gym_prorl import syscall_filter\n"
    "from nemo_gym_prorl.sandbox.isolation import seccomp, syscalls\n"
    "from nemo_gym_prorl.tasks.code.inside.process_hardening import filter_calls\n"
)


@pytest.mark.parametrize(
    ("machine", "found", "fix"),
    [
        (NONE_LEFT, "cannot be created", "sysctl user.max_user_namespaces=15000"),
        (FORBIDDEN, "cannot be created", "--security-opt seccomp=unconfined"),
        (NO_RIGHTS, "can be created, but give no rights", "--security-opt apparmor=unconfined"),
    ],
    ids=["none left", "in a container", "no rights"],
)
def test_without_user_namespaces_it_says_so_and_who_can_help(machine: str, found: str, fix: str) -> None:
    code = (
        f"{PREPARED}{machine}from nemo_gym_prorl.cli.doctor import UserNamespaceProbe, user_namespaces_check\n"
        "check = user_namespaces_check(UserNamespaceProbe.run()); print(check.level, check.found, check.fix)"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=100)
    assert said.startswith("missing ")
    assert f"{found}: sandboxes cannot run, not even with a setuid Apptainer" in said
    assert fix in said


@pytest.mark.parametrize(
    ("root", "settings", "fixes"),
    [
        (False, {MAX_USERNS_SYSCTL: "0"}, [MAX_USERNS_SYSCTL]),
        (False, {USERNS_CLONE_SYSCTL: "0"}, [USERNS_CLONE_SYSCTL]),
        (False, {APPARMOR_USERNS_SYSCTL: "1"}, [APPARMOR_USERNS_SYSCTL]),
        (True, {USERNS_CLONE_SYSCTL: "0", APPARMOR_USERNS_SYSCTL: "1"}, []),
        (False, {MAX_USERNS_SYSCTL: "9", USERNS_CLONE_SYSCTL: "1", APPARMOR_USERNS_SYSCTL: "0"}, []),
    ],
    ids=["maximum", "Debian", "Ubuntu", "root is exempt", "not by a setting"],
)
def test_settings_that_forbid_user_namespaces_are_named(
    root: bool, settings: dict[str, str], fixes: list[str]
) -> None:
    attempt = UserNamespaceProbe(ProbeStep.USE, 1, root, filtered=False, settings=settings)
    assert remedies(attempt)
    fix = user_namespaces_check(attempt).fix
    assert [name for name in (MAX_USERNS_SYSCTL, USERNS_CLONE_SYSCTL, APPARMOR_USERNS_SYSCTL) if name in fix] == fixes


@pytest.mark.parametrize(
    ("check", "level", "found", "not_found", "fix"),
    [
        (selinux_check("1\n"), Level.WARN, "untested", "", "ausearch"),
        (state_check("/x", "ext4", 10**10), Level.OK, "/x, ext4, 10 GB free", "memory", ""),
        (state_check("/x", "tmpfs", 10**10), Level.WARN, "take memory, up to 11 GB per", "", "PRORL_STATE"),
    ],
)
def test_a_finding_says_what_is_there_and_what_to_do(
    check: Check, level: Level, found: str, not_found: str, fix: str
) -> None:
    assert check.level is level
    assert found in check.found
    assert not not_found or not_found not in check.found
    assert fix in check.fix


def test_a_state_folder_that_machines_share_is_no_good(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRORL_STATE", str(tmp_path))
    monkeypatch.setattr(filesystems, "_SHARED_KINDS", re.compile(filesystems.filesystem_type(tmp_path)))
    check = _state()
    assert check.level is Level.MISSING
    assert str(tmp_path) in check.found
    assert "PRORL_STATE" in check.fix
