# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The tests of this folder once more, as a user without any right; in parts, that run beside each other.

``make test`` runs those of :data:`OTHER_FOR_A_USER` but :data:`SAME_FOR_A_USER`, ``make test-long`` all of them.
Whoever adds a branch on the user to the sandbox side names the file that tries it there, or the one test.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_gym_prorl.sandbox.isolation.privilege import is_machine_root
from nemo_gym_prorl.sandbox.isolation.user_ids import MAP_HELPERS
from nemo_gym_prorl.sandbox.limits import cgroups
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from tests.sandbox.as_user import ACCOUNT, HERE, USER, run_tests


OTHER_FOR_A_USER: dict[str, dict[str, tuple[str, ...]]] = {
    # Which ids a sandbox gets, whose its processes and files are, what is hidden, what it may use up.
    "walls": {
        "abuse": (
            "no_abuse_succeeds",
            "no_signal_reaches_a_process_of_the_host",
            "no_file_of_another_sandbox",
            "no_process_holds_a_file_of_the_host",
            "a_fork_bomb_ends_with_its_sandbox",
            "disk_use_is_bounded",
        ),
        "egress": ("no_way_leads_to_another_host", "an_allowed_host_is_reached_and_counted"),
        "policy_access": (
            "no_way_leads_to_another_policy_or_to_the_host",
            "a_program_calls_its_policy",
        ),
        "limits_told": ("a_full_process_table_is_the_agents_doing", "a_limit_that_costs_no_sandbox_leaves_a_note"),
        "nothing_of_the_host": (),
        "users": (),
        "old_kernel": ("a_sandbox_of_an_ordinary_user_lacks_nothing",),
    },
    # To a sandbox and out of it: how it starts, mounts, processes that end, files that are erased.
    "ways": {
        # What is refused before anything is made is refused by the same lines, but for what others own.
        "spec": ("what_can_be_bound_is",),
        "direct_start": (
            "both_ways_give_the_same_variables",
            "what_linux_brings_is_there",
            "files_that_reveal_the_machine_are_hidden_and_settings_read_only",
            "a_bind_is_read_only_where_asked_and_has_no_devices_or_setuid_programs",
            "an_idle_sandbox_is_one_small_process",
        ),
        # Who may signal and remove what is left of whom; what is counted of it is the supervisor's affair.
        "lifecycle": ("no_order_of_faults_leaves_anything_or_hangs",),
        "erase": (
            "links_are_not_followed_and_closed_folders_are_opened",
            "what_becomes_a_link_meanwhile_is_not_followed",
        ),
        "faults": (
            "a_full_disk_ends_no_sandbox_but_fails_new_ones",
            "a_supervisor_that_can_start_no_process_lives_on",
        ),
        "supervisor": (
            "only_processes_in_its_own_namespaces_are_heard",
            "no_bind_shows_the_way_to_the_host",
            "a_state_folder_that_cannot_be_used",
        ),
    },
    # Who may build, unpack, own and remove them.
    "images": {
        # One of each that is built on.
        "images_build": (
            "commands_of_a_definition_find_the_images_temporary_folders",
            "a_definition_becomes_an_image_that_starts_by_its_name",
        ),
        "images_confined": (),
        "images_dockerfile": ("a_sandbox_finds_what_the_dockerfile_says",),
        "images_entries": ("somebody_elses_folder_can_be_used_but_not_cleared",),
        "images_start": (
            "a_sif_is_unpacked_once_for_all_and_its_sandboxes_can_change_everything",
            "an_unpacked_copy_is_the_callers_own_and_harmless",
        ),
    },
    # With a control group of his own: groups; and one of each that is used as root uses it, files and commands, a
    # kernel, layers. What is counted, cut and kept of what is said is the server's affair.
    "equipped": {
        "hostile_images": (
            "links_to_open_files_lead_to_nothing_of_the_host",
            "nothing_of_an_image_outlives_its_sandbox",
        ),
        "cgroup": (),
        "lifecycle": ("whatever_is_killed_nothing_is_left",),
        "container": ("links_lead_nowhere_outside", "without_root"),
        "kernel": ("a_kernel_has_the_rights_of_any_program", "a_kernel_that_is_ended_says_by_whom"),
        # Files that are no snapshot are refused by the same lines.
        "snapshots": (
            "a_snapshot_keeps_names_attributes_holes_and_deletions",
            "a_snapshot_keeps_owners",
            "entries_of_a_snapshot_have_no_rights_outside",
            "nothing_of_a_snapshot_redirects_or_prevents_a_bind",
            "a_pause_stops_every_program",
        ),
    },
}
"""Of what the code branches on the user, the files that try it, without ``test_`` and ``.py``, and which of their
tests do if not all; parts that take about as long as each other."""

SAME_FOR_A_USER = (
    # Accounts are looked for inside.
    "test_an_invalid_line_of_accounts_names_no_user",
    # A limit is kept by the same lines whoever made the sandbox.
    "test_a_fork_bomb_ends_with_its_sandbox[runtime",
)
"""Tests of these files that say nothing of the user, by parts of their names."""

LONG = bool(os.environ.get("PRORL_TEST_LONG"))
PARTS = (*OTHER_FOR_A_USER, *(("others",) if LONG else ()))
NAMED = [(HERE / f"test_{file}.py", names) for part in OTHER_FOR_A_USER.values() for file, names in part.items()]

GRANTED = cgroups.probe_delegation()


def arguments_of(part: str) -> list[str]:
    """What pytest is given of a part."""
    if part == "others":
        named = {Path(__file__), *(file for file, _ in NAMED)}
        return [str(file) for file in sorted(HERE.glob("test_*.py")) if file not in named]
    files = {str(HERE / f"test_{file}.py"): () if LONG else names for file, names in OTHER_FOR_A_USER[part].items()}
    return [f"{file}{f'::test_{name}' if name else ''}" for file, names in files.items() for name in names or ("",)]


def test_what_root_skips_is_run_as_a_user() -> None:
    skipped = {file for file in HERE.glob("test_*.py") if "skipif(is_machine_root()" in file.read_text()}
    assert skipped - {Path(__file__)} <= {file for file, _ in NAMED}


def test_what_is_left_out_or_run_alone_is_there() -> None:
    texts = {file: file.read_text() for file, _ in NAMED}
    every = "".join(texts.values())
    assert [name for name in SAME_FOR_A_USER if name.partition("[")[0] not in every] == []
    assert [name for file, names in NAMED for name in names if f" test_{name}(" not in texts[file]] == []


@pytest.fixture
def delegated() -> Iterator[Path | None]:
    """A control group that belongs to the user, as systemd would delegate one; ``None`` where root has none itself."""
    if GRANTED is None:
        yield None
        return
    group = GRANTED.base / f"prorl-test-{secrets.token_hex(4)}"
    group.mkdir()
    for path in (group, group / "cgroup.procs", group / "cgroup.subtree_control", group / "cgroup.threads"):
        os.chown(path, USER, USER)
    yield group
    assert {inner.name for inner in group.iterdir() if inner.is_dir()} <= {cgroups.SERVER_GROUP}, "a group is left"
    deadline = time.monotonic() + 10
    while True:
        for inner in group.iterdir():
            if inner.is_dir():
                inner.rmdir()
        try:
            group.rmdir()
            return
        except OSError:
            assert time.monotonic() < deadline, (group / "cgroup.procs").read_text()
            time.sleep(0.05)


@pytest.mark.longer("all files, all of their tests")
@pytest.mark.sandbox
@pytest.mark.timeout(3600 if LONG else 900)
@pytest.mark.skipif(not is_machine_root(), reason="this is an ordinary user already")
@pytest.mark.parametrize("part", PARTS)
def test_everything_works_for_an_ordinary_user(
    image: Path, runtime: Runtime, part: str, delegated: Path | None
) -> None:
    chosen = () if LONG else ("-k", f"not ({' or '.join(SAME_FOR_A_USER)})")
    if part != "equipped":
        run_tests(runtime, *chosen, *arguments_of(part))
        return
    first: list[str] = []
    if delegated:
        first += ["/bin/sh", "-c", f'echo 0 > {delegated}/cgroup.procs && exec "$@"', "sh"]
    said = run_tests(runtime, *chosen, *arguments_of(part), first=first)
    assert not delegated or "no control group is delegated" not in said


@pytest.mark.sandbox
@pytest.mark.skipif(not is_machine_root(), reason="only root can give this user a range")
def test_a_user_with_a_range_and_without_the_programs_for_it_builds_images(runtime: Runtime, tmp_path: Path) -> None:
    """As Debian's ``useradd`` makes accounts, where the package ``uidmap`` is not installed."""
    table = tmp_path / "range"
    table.write_text(f"{ACCOUNT.pw_name}:100000:65536\n")
    covered = [f"mount --bind {table} /etc/sub{kind}" for kind in ("uid", "gid")]
    covered += [f"mount --bind /dev/null {found}" for name in MAP_HELPERS if (found := shutil.which(name))]
    first = ("unshare", "--mount", "sh", "-ec", "; ".join([*covered, 'exec "$@"']), "sh")
    test = "test_a_definition_becomes_an_image_that_starts_by_its_name"
    run_tests(runtime, f"{HERE / 'test_images_build.py'}::{test}", first=first)
