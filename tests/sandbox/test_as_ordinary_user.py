# SPDX-License-Identifier: Apache-2.0
"""The tests of this folder once more, as a user without any right; in parts, that run beside each other.

``make test`` runs those of :data:`OTHER_FOR_A_USER` but :data:`SAME_FOR_A_USER`, ``make test-long`` all of them.
Whoever adds a branch on the user to the sandbox side names the file that tries it there, or the one test.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import InfrastructureError
from nemo_gym_prorl.sandbox.isolation.user_ids import HELPERS
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from tests.sandbox.as_user import ACCOUNT, HERE, run_tests
from tests.sandbox.database import ensure_database_image


OTHER_FOR_A_USER = {
    # Which ids a sandbox gets, whose its processes and files are, what is hidden, what it may use up.
    "walls": ("abuse", "nothing_of_the_host", "users", "old_kernel", "kernel_shares", "cgroup"),
    # To a sandbox and out of it: how it starts, mounts, networks, processes that end, files that are erased.
    "ways": ("bad_binds", "bad_input", "direct_start", "network", "life", "erase", "trouble", "supervisor_boundary"),
    # Who may build, unpack, own and remove them.
    "images": ("images_build", "images_confined", "images_entries", "images_start", "hostile_images"),
    # One of each that is used as root uses it: files and commands, a kernel (never forked), layers.
    "uses": ("container", "kernel", "snapshots"),
}
"""Of what the code branches on the user, the files that try it, without ``test_`` and ``.py``; parts that take about
as long as each other."""

ONLY = {
    # What is refused before anything is made is refused by the same lines, but for what others own.
    "bad_binds": ("what_can_be_bound_is",),
    "bad_input": (
        "a_damaged_sif",
        "a_sif_is_as_good_as_a_folder",
        "a_sif_without_fuse",
        "an_image_of_somebody_else",
        "an_image_that_cannot_be_read",
        "a_state_folder_of_somebody_else",
        "a_state_folder_that_was_closed_meanwhile",
    ),
    # One of each that is used: what is counted, cut and kept of what is said is the server's affair.
    "container": (
        "output_errors_and_exit_code",
        "a_cancelled_command_is_ended",
        "files_go_in_and_come_out_unchanged",
        "links_lead_nowhere_outside",
        "without_root",
    ),
    "kernel": (
        "a_kernel_is_told_nothing_of_the_host",
        "a_kernel_has_the_rights_of_any_program",
        "cells_share_state_and_say_what_happened",
        "time_limit_interrupt_and_death",
        "its_sockets_are_its_sandboxes_own",
    ),
    "images_entries": ("somebody_elses_folder_can_be_used_but_not_cleared",),
    # One of each that is built on; layers of packages an ordinary user makes in tests/setup/test_install.py.
    "images_build": (
        "a_template_becomes_an_image_that_starts_by_its_name",
        "a_sif_of_a_sif",
        "an_image_on_one_of_a_registry",
        "a_failed_build_says_why_and_leaves_nothing",
    ),
    # Who may signal and remove what is left of whom; what is counted of it is the supervisor's affair.
    "life": (
        "a_killed_server_leaves_nothing",
        "a_killed_supervisor_leaves_nothing_and_its_sandboxes_end_as_lost",
        "whatever_is_killed_nothing_is_left",
        "killing_everything_inside_leaves_the_sandbox_usable",
        "teardown_ends_daemons_and_leaves_no_file",
        "cancelling_a_start_leaves_nothing",
    ),
    # What a sandbox's own user namespace may do with devices and addresses; names are kept by the supervisor.
    "network": (
        "a_client_reaches_a_server_in_another_sandbox_by_name",
        "strangers_and_the_host_reach_nobody",
        "members_reach_neither_host_nor_internet",
        "a_member_can_speak_for_no_other",
        "ports_of_one_appear_on_the_loopback_device_of_another",
        "nothing_is_left_when_the_owner_is_killed",
    ),
    "erase": (
        "links_are_not_followed_and_closed_folders_are_opened",
        "a_sandbox_with_a_bottomless_folder_closes",
        "an_accomplice_has_nothing_of_the_host_erased",
    ),
    "old_kernel": ("a_sandbox_of_an_ordinary_user_lacks_nothing",),
}
"""Of some of these files the tests that try it, without ``test_``."""

SAME_FOR_A_USER = (
    # That an abuse succeeds where its wall is missing says something of the abuse.
    "unprotected",
    # Images are looked at before there is anything of a user's.
    "refused_by_name",
    "in_place_of_a",
    "test_a_shell_that_is_no_file",
    # Accounts are read by the server, or looked for inside.
    "test_an_unknown_user_is_a_result",
    "test_a_line_that_is_no_account_is_nobodys",
    # What the server counts, cuts and keeps; what it asks the runtime once.
    "test_output_is_bounded",
    "test_the_runtime_is_asked_once_until_the_image_changes",
    "test_what_the_runtime_says_of_a_broken_image_is_told",
    "test_what_passes_while_one_is_made_is_no_fault_of_the_image",
    "test_accounts_that_are_no_file_hold_up_nobody",
    # One link of each kind: which file of the maker's it goes by is tried for the rest by root.
    "open_files_lead_to_nothing_of_the_host[etc/passwd",
    "open_files_lead_to_nothing_of_the_host[var",
)
"""Tests of these files that say nothing of the user, by parts of their names."""

LONG = bool(os.environ.get("PRORL_TEST_LONG"))
PARTS = (*OTHER_FOR_A_USER, *(("others",) if LONG else ()))


def files_of(part: str) -> list[Path]:
    every = {file for file in HERE.glob("test_*.py") if file != Path(__file__)}
    named = {part: [HERE / f"test_{name}.py" for name in names] for part, names in OTHER_FOR_A_USER.items()}
    return named.get(part) or sorted(every.difference(*named.values()))


def arguments_of(part: str) -> list[str]:
    """What pytest is given of a part."""
    if LONG:
        return [*map(str, files_of(part))]
    files = {file: ONLY.get(file.stem.removeprefix("test_"), ()) for file in files_of(part)}
    return [f"{file}::test_{name}" for file, names in files.items() for name in names] + [
        str(file) for file, names in files.items() if not names
    ]


def test_what_root_skips_is_run_as_a_user() -> None:
    skipped = [file.stem for file in HERE.glob("test_*.py") if "skipif(os.geteuid() == 0" in file.read_text()]
    named = {f"test_{name}" for names in OTHER_FOR_A_USER.values() for name in names}
    assert set(skipped) - {Path(__file__).stem} <= named


def test_what_is_left_out_is_there() -> None:
    texts = [file.read_text() for part in OTHER_FOR_A_USER for file in files_of(part)]
    assert [name for name in SAME_FOR_A_USER if not any(name.partition("[")[0] in text for text in texts)] == []


def test_what_is_run_alone_is_there() -> None:
    named = [(HERE / f"test_{file}.py", name) for file, names in ONLY.items() for name in names]
    assert {file for file, _ in named} <= {file for part in OTHER_FOR_A_USER for file in files_of(part)}
    assert [name for file, name in named if f" test_{name}(" not in file.read_text()] == []


@pytest.mark.longer("all files, all of their tests")
@pytest.mark.sandbox
@pytest.mark.timeout(3600 if LONG else 900)
@pytest.mark.skipif(os.geteuid() != 0, reason="this is an ordinary user already")
@pytest.mark.parametrize("part", PARTS)
def test_everything_works_for_an_ordinary_user(image: Path, runtime: Runtime, part: str) -> None:
    chosen = () if LONG else ("-k", f"not ({' or '.join(SAME_FOR_A_USER)})")
    with contextlib.suppress(InfrastructureError):
        # The user can't make images in root's cache.
        ensure_database_image(runtime)
    run_tests(runtime, *chosen, *arguments_of(part))


@pytest.mark.sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give this user a range")
def test_a_user_with_a_range_and_without_the_programs_for_it_builds_images(runtime: Runtime, tmp_path: Path) -> None:
    """As Debian's ``useradd`` makes accounts, where the package ``uidmap`` is not installed."""
    table = tmp_path / "range"
    table.write_text(f"{ACCOUNT.pw_name}:100000:65536\n")
    covered = [f"mount --bind {table} /etc/sub{kind}" for kind in ("uid", "gid")]
    covered += [f"mount --bind /dev/null {found}" for name in HELPERS if (found := shutil.which(name))]
    first = ("unshare", "--mount", "sh", "-ec", "; ".join([*covered, 'exec "$@"']), "sh")
    test = "test_a_template_becomes_an_image_that_starts_by_its_name"
    run_tests(runtime, f"{HERE / 'test_images_build.py'}::{test}", first=first)
