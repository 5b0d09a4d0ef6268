# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tests of commands and sessions that ``make test`` runs with both start methods (fixture ``way``).

After the start, both methods share their code. So of the files named here only these tests run with ``runtime``, too:
those of users and variables, joined namespaces, mounts and terminals. A new test with the fixture ``way`` in such a
file runs with ``direct`` unless it is listed; ``make test-long`` runs all tests with both.
"""

BY_THE_RUNTIME_TOO = {
    "abuse": ("no", "sandboxes_of_root", "every_memory_file_system", "a_fork_bomb"),
    "container": (
        "output_errors_and_exit_code",
        "variables_and_folders",
        "links_lead_nowhere_outside",
        "without_root",
        "the_time_to_live",
    ),
    "kernel": ("a_kernel_has_the_rights_of_any_program",),
    "limits_told": (
        "a_full_process_table_is_the_agents_doing",
        "a_limit_that_costs_no_sandbox_leaves_a_note[runtime-written",
        "a_limit_that_costs_no_sandbox_leaves_a_note[runtime-shared",
    ),
    "lifecycle": ("a_terminated_supervisor", "whatever_is_killed_nothing_is_left[runtime-first process, supervisor"),
    "provider": ("gyms_facade_from_start_to_stop", "an_entrypoint_runs_beside_the_commands"),
    "snapshots": (
        "a_snapshot_keeps_names_attributes_holes_and_deletions",
        "a_pause_stops_every_program",
        "a_shells_command_goes_on_after_a_snapshot",
    ),
    "shell": (
        "what_a_command_leaves_the_next_one_finds",
        "ctrl_c_ends_the_command_and_nothing_else",
        "the_hard_limit_gives_what_there_is_and_a_usable_shell[runtime-sleep",
        "an_end_of_the_shell_is_reported",
        "an_end_of_file_can_be_typed_and_the_window_changed",
    ),
}
"""By the names of files and tests, or what these begin with, without ``test_`` and ``.py``."""


def is_long(file: str, test: str) -> bool:
    """Whether a test of a sandbox that the runtime starts is left to ``make test-long``."""
    chosen = BY_THE_RUNTIME_TOO.get(file.removeprefix("test_"))
    return chosen is not None and not any(test.startswith(f"test_{name}") for name in chosen)
