# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How tool calls are counted, from what the policy read of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.tasks.workbench import tools as observations
from nemo_gym_prorl.tasks.workbench.tools import Output, Tally, observation


FINE = {"calls": 1, "errors": 0, "timeouts": 0, "cut": 0}
STATUSES = {
    observations.exit_code(0): {},
    observations.exit_code(10): {"errors": 1},
    observations.OK: {},
    observations.FAILED: {"errors": 1},
    observations.timed_out(0.5): {"errors": 1, "timeouts": 1},
    observations.waiting(10): {},
    observations.restarted("kernel"): {},
}

printed = st.text(max_size=1500) | st.sampled_from(
    ["Error: no", "[exit code: 1]", "\n[error]\n", "[timed out after 1 s]", "[exit code: 1; 7 bytes omitted]"]
)
notes = st.lists(
    st.sampled_from([observations.ended("shell"), observations.ended_before(3), observations.ONLY_FILES]), max_size=2
)


def counted(tool: str, text: str) -> object:
    tally = Tally()
    tally.count(tool, text)
    return tally.as_json()[tool]


@given(tool=st.sampled_from(["bash", "python"]), text=printed, status=st.sampled_from(sorted(STATUSES)), notes=notes)
def test_the_status_counts_and_nothing_that_was_printed(tool: str, text: str, status: str, notes: list[str]) -> None:
    said = observation(Output(text), status, notes, limit=1000)
    cut = int(" bytes omitted" in said.rpartition("\n")[2])
    assert counted(tool, said) == {**FINE, **STATUSES[status], "cut": cut}


@pytest.mark.parametrize(
    ("tool", "text", "errors"),
    [
        ("bash", "Error in the arguments of bash: command: Field required.", 1),
        ("str_replace_editor", "Error: a.py: No such file", 1),
        ("str_replace_editor", "     1\t[exit code: 1]", 0),
        ("str_replace_editor", "[error]", 0),  # a folder that holds a file of this name
        ("search", "Errors in measurement ...", 0),
        ("search", "nothing was found", 0),
    ],
)
def test_other_tools_begin_with_error(tool: str, text: str, errors: int) -> None:
    assert counted(tool, text) == {**FINE, "errors": errors}


def test_calls_add_up_by_tool() -> None:
    tally = Tally()
    for code in (0, 1, 0):
        tally.count("bash", observation(Output(), observations.exit_code(code), limit=1000))
    tally.count("submit", "Submitted.")
    assert tally.as_json() == {"bash": {**FINE, "calls": 3, "errors": 1}, "submit": FINE}
