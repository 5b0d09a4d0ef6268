# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tests that run with both start methods although they test code after the start.

From there on both ways are the same code: one way to join a sandbox, to start something in it and to end that. So of
the files about commands and sessions only these tests are run by the runtime, too, where one may see what
it makes otherwise: users and variables, namespaces to be joined, mounts, terminals. Nor is it tried by both that an
abuse succeeds where its wall is missing, which says something of the abuse. ``make test-long`` runs all.
"""

BY_THE_RUNTIME_TOO = {
    # What is used up is counted and cut by the supervisor.
    "abuse": ("no", "sandboxes_of_root", "every_memory_file_system", "a_fork_bomb"),
    "container": (
        "output_errors_and_exit_code",
        "variables_and_folders",
        "a_cancelled_command_is_ended",
        "links_lead_nowhere_outside",
        "without_root",
        "the_time_to_live",
    ),
    "foreground": ("nothing_of_a_command_whose_time_is_up_is_left[runtime-an orphan-this-]",),
    "kernel": ("a_kernel_has_the_rights_of_any_program",),
    "limits_told": (
        "memory_that_is_hard_to_see_counts[runtime-files",
        "a_full_process_table_is_the_agents_doing",
        "a_limit_that_costs_no_sandbox_leaves_a_note[runtime-written",
        "a_limit_that_costs_no_sandbox_leaves_a_note[runtime-shared",
    ),
    "provider": (
        "gyms_facade_from_start_to_stop",
        "an_entrypoint_runs_beside_the_commands",
        "a_paused_sandbox_does_nothing_until_it_is_resumed",
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
    later = chosen is not None and not any(test.startswith(f"test_{name}") for name in chosen)
    return later or "unprotected" in test
