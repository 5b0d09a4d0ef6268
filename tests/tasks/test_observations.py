# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Format and invariants of observations, and the counting of calls."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nemo_gym_prorl.tasks.workbench import observations
from nemo_gym_prorl.tasks.workbench.observations import (
    Output,
    ToolCallStats,
    error_text,
    exit_code,
    observation,
    result_text,
)


LIMIT = 1000
LAST_LINE = re.compile(r"\[[^\n]*\]\Z")
OMITTED = re.compile(r"; (\d+) bytes omitted[;\]]")

text = st.text(max_size=600) | st.sampled_from(
    [
        "Error: no",
        "\n[error]\n",
        "[timed out after 1 s]",
        "[exit code: 0]",
        "a\n[... 7 bytes omitted ...]\nz",
        "é" * 400,
        "\ud800",
    ]
)
outputs = st.builds(
    lambda head, omitted, tail: Output(head, omitted, tail if omitted else ""), text, st.integers(0, 10**9), text
)
statuses = st.sampled_from([exit_code(0), exit_code(130), observations.timed_out(0.5), observations.waiting(10), "ok"])
notes = st.lists(
    st.sampled_from([observations.ended("shell"), observations.had_ended("kernel"), observations.ONLY_FILES_KEPT]),
    max_size=2,
)


@given(output=outputs, status=statuses, said=notes)
@example(output=Output("x" * 2000), status="ok", said=[])
def test_status_line_cannot_be_forged_and_limit_holds(output: Output, status: str, said: list[str]) -> None:
    shown = observation(output, status, said, limit=LIMIT)
    assert len(shown.encode()) <= LIMIT
    last = LAST_LINE.search(shown)
    assert last
    # The status line contains no output.
    omitted = OMITTED.search(last[0])
    count = [f"{omitted[1]} bytes omitted"] if omitted else []
    assert last[0] == f"[{'; '.join([status, *count, *said])}]"
    body = shown[: last.start()]
    if not omitted:
        whole = output.head.encode("utf-8", "replace").decode()
        assert body in (whole, whole + "\n")
        return
    # Shown and omitted bytes add up to the output.
    mark = f"\n[... {omitted[1]} bytes omitted ...]\n"
    printed = (
        len(output.head.encode("utf-8", "replace")) + output.omitted + len(output.tail.encode("utf-8", "replace"))
    )
    shown_bytes = len(body.encode()) - len(mark)
    assert mark in body
    assert shown_bytes + int(omitted[1]) in (printed, printed + 1)  # one for a newline before the last line


@given(head=st.text(max_size=50), omitted=st.integers(1, 10**6), tail=st.text(max_size=50))
def test_omission_mark_is_parsed(head: str, omitted: int, tail: str) -> None:
    marked = f"{head}\n[... {omitted} bytes omitted ...]\n{tail}"
    output = Output.of(marked, omitted)
    assert output.omitted == omitted
    assert str(output) == marked
    assert Output.of(marked) == Output(marked)
    assert Output.of(marked, omitted + 1) == Output(head, omitted + 1, tail)


@given(reason=st.text(max_size=5000))
def test_errors_are_bounded(reason: str) -> None:
    said = error_text(reason, limit=LIMIT)
    assert said.startswith("Error: ")
    assert len(said.encode()) <= LIMIT


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"text/html": "<b>42</b>"}, "<b>42</b>"),
        ({"image/png": "iVBO"}, "<image/png>"),
        ({"text/plain": 42, "image/png": None}, "<image/png, text/plain>"),
    ],
)
def test_rich_results_are_text(data: dict[str, object], expected: str) -> None:
    assert result_text(data) == expected


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


def counted(tool: str, text: str) -> object:
    stats = ToolCallStats()
    stats.count(tool, text)
    return stats.as_json()[tool]


@given(tool=st.sampled_from(["bash", "python"]), text=text, status=st.sampled_from(sorted(STATUSES)), said=notes)
def test_counts_depend_on_the_status_only(tool: str, text: str, status: str, said: list[str]) -> None:
    shown = observation(Output(text), status, said, limit=LIMIT)
    cut = int(" bytes omitted" in shown.rpartition("\n")[2])
    assert counted(tool, shown) == {**FINE, **STATUSES[status], "cut": cut}


@pytest.mark.parametrize(
    ("tool", "text", "errors"),
    [
        ("bash", "Error in the arguments of bash: command: Field required.", 1),
        ("str_replace_editor", "Error: a.py: No such file", 1),
        ("str_replace_editor", "     1\t[exit code: 1]", 0),
        ("str_replace_editor", "[error]", 0),  # a folder that holds a file of this name
    ],
)
def test_errors_of_other_tools_are_counted(tool: str, text: str, errors: int) -> None:
    assert counted(tool, text) == {**FINE, "errors": errors}
