# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The tools of a workspace: what a policy is told of them and what it may say. Pure.

What it reads back is in :mod:`.observations`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import Field

from nemo_gym_prorl.tasks.arguments import Arguments


MAX_INPUT = 1000
"""Longest line to type, in characters: a terminal takes no more than 4,096 bytes at once."""


class BashArguments(Arguments):
    """A persistent bash: folder, variables and background jobs stay from call to call. Give `command`, or `input` \
for the program that runs, or `restart`. The answer is the output (standard output and error in order) and a last \
line `[exit code: N]`. A command without output for a while is left running and reported as `[still running, ...]`: \
answer it with `input`, for example `C-c`. `[timed out after S s]`: it was ended. Of long output the middle is left \
out."""

    command: str | None = Field(default=None, min_length=1, description="The command to run.")
    input: str | None = Field(
        default=None,
        max_length=MAX_INPUT,
        description="Instead of a command: a line to type at the program that runs, followed by Enter. `C-c` presses "
        "Ctrl-C, `C-d` Ctrl-D (end of input). Empty: only wait for more output.",
    )
    restart: bool | None = Field(
        default=None, description="Instead of a command: end the shell with everything in it and start a new one."
    )
    timeout_s: float | None = Field(
        default=None, gt=0, description="Seconds until the command is ended; bounded by the environment."
    )

    def lacks(self) -> str | None:
        """Exactly one of three."""
        return _one_of("bash", command=self.command, input=self.input, restart=self.restart)


class PythonArguments(Arguments):
    """A persistent Python (IPython kernel): variables and imports stay from call to call. The answer is what was \
printed, the value of the last expression, the traceback if there is one, and a last line: `[ok]`, `[error]` or \
`[timed out after S s]`. Input cannot be read. Of long output the middle is left out."""

    code: str | None = Field(default=None, min_length=1, description="The code to run.")
    restart: bool | None = Field(default=None, description="Instead of code: end the kernel and start a new one.")
    timeout_s: float | None = Field(
        default=None, gt=0, description="Seconds until the code is interrupted; bounded by the environment."
    )

    def lacks(self) -> str | None:
        """Exactly one of two."""
        return _one_of("python", code=self.code, restart=self.restart)


class EditorArguments(Arguments):
    """View and edit text files. `view` shows a file with line numbers, or lists a folder; `create` writes a whole \
file; `str_replace` replaces a string that occurs exactly once; `insert` adds lines after a line; `undo_edit` takes \
back the last edit of a file."""

    command: Literal["view", "create", "str_replace", "insert", "undo_edit"] = Field(description="What to do.")
    path: str = Field(min_length=1, description="The file, relative to the working folder or absolute.")
    file_text: str | None = Field(default=None, description="For `create`: the whole content.")
    old_str: str | None = Field(default=None, description="For `str_replace`: the string to replace.")
    new_str: str | None = Field(default=None, description="For `str_replace` and `insert`: the new text.")
    insert_line: int | None = Field(
        default=None, ge=0, description="For `insert`: the line after which the text goes; 0 is the top."
    )
    view_range: tuple[int, int] | None = Field(
        default=None, description="For `view`: first and last line, counted from 1; last may be -1 for the end."
    )

    def lacks(self) -> str | None:
        """What its command takes."""
        missing = [name for name in _EDITOR_NEEDS[self.command] if getattr(self, name) is None]
        return f"{self.command} needs {' and '.join(missing)}" if missing else None


class SubmitArguments(Arguments):
    """Hand in what there is and end the task."""


TOOLS: Mapping[str, type[Arguments]] = {
    "bash": BashArguments,
    "python": PythonArguments,
    "str_replace_editor": EditorArguments,
    "submit": SubmitArguments,
}
"""The tools by name, each with the model of its arguments."""

_EDITOR_NEEDS = {
    "view": (),
    "create": ("file_text",),
    "str_replace": ("old_str",),
    "insert": ("insert_line", "new_str"),
    "undo_edit": (),
}


def _one_of(tool: str, **given: object) -> str | None:
    count = sum(value not in (None, False) for value in given.values())
    return None if count == 1 else f"{tool} needs one of {', '.join(given)}"


_HAVE_STATUS = frozenset({"bash", "python"})

_TROUBLE = ("Error: ", "Error in the arguments")

_STATUS = re.compile(r"\[(?P<status>[^\[\];]*)(?P<notes>(?:;[^\[\]]*)?)\]$")
_CUT = re.compile(r"; [0-9]+ bytes omitted")


@dataclass(slots=True)
class ToolCounts:
    """Of one tool.

    Attributes:
        calls: all of them.
        errors: not carried out, or ended with an error: wrong arguments, an exit code that is not 0, an exception.
        timeouts: ended because their time was up; errors as well.
        cut: observations of ``bash`` and ``python`` of which the middle is left out.
    """

    calls: int = 0
    errors: int = 0
    timeouts: int = 0
    cut: int = 0


class Tally:
    """Of one session."""

    def __init__(self) -> None:
        self._tools: dict[str, ToolCounts] = {}

    def count(self, tool: str, observation: str) -> None:
        """Count a call that was answered with this."""
        counts = self._tools.setdefault(tool, ToolCounts())
        counts.calls += 1
        said = _STATUS.match(observation, observation.rfind("\n") + 1) if tool in _HAVE_STATUS else None
        status = said["status"] if said else ""
        counts.timeouts += status.startswith("timed out")
        counts.cut += bool(said and _CUT.search(said["notes"]))
        failed = status == "error" or status.startswith("timed out")
        failed |= status.startswith("exit code: ") and status != "exit code: 0"
        counts.errors += failed or (not status and observation.startswith(_TROUBLE))

    def resume(self, counted: Mapping[str, Mapping[str, int]]) -> None:
        """Go on from what :meth:`as_json` gave."""
        self._tools = {tool: ToolCounts(**counts) for tool, counts in counted.items()}

    def as_json(self) -> Mapping[str, Mapping[str, int]]:
        """By tool, for a rollout's row."""
        return {tool: asdict(counts) for tool, counts in self._tools.items()}
