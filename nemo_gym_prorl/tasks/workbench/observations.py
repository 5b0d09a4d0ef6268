# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Schemas, arguments and observations of the workbench tools. Pure.

``docs/environments.md`` describes observations for users. An observation of ``bash`` or ``python`` is the output,
followed by one status line: ``[STATUS]`` or ``[STATUS; NOTE; ...]``. A command cannot print below or into the status
line, so the status cannot be forged.

Output is UTF-8 with invalid bytes as U+FFFD. The middle of long output is replaced by a line ``[... N bytes omitted
...]``, and the status line repeats the number. A line of that form without the number in the status line is ordinary
output. An observation never exceeds its limit.

The docstring of an argument model describes its tool; descriptions of fields describe arguments. An invalid argument
becomes an observation and never fails the rollout: :class:`BadArguments` names the error and the accepted arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError


MAX_ARGUMENT_BYTES = 64_000
"""Maximum bytes of a call's arguments as JSON. A command may be one argv string, which Linux limits to 128 KiB."""


class BadArguments(Exception):
    """Invalid tool arguments; the message is the policy's observation."""


class Arguments(BaseModel):
    """Base class of tool argument models."""

    model_config = ConfigDict(extra="forbid")

    def lacks(self) -> str | None:
        """Return a complaint about combined arguments, such as ``create needs file_text``; ``None`` if valid."""
        return None


def tool_schema(name: str, model: type[Arguments], description: str | None = None) -> dict[str, Any]:
    """Return a tool's function schema of the Responses API; ``description`` replaces the model's docstring."""
    return {
        "type": "function",
        "name": name,
        "description": description or model.__doc__,
        "parameters": _parameters(model),
        "strict": False,
    }


def parse_arguments[A: Arguments](tool: str, model: type[A], arguments: object) -> A:
    """Validate the arguments that the policy passed to a tool; raises :class:`BadArguments`."""
    if not isinstance(arguments, Mapping):
        raise BadArguments(f"Error: the arguments of {tool} must be a JSON object. {_usage(tool, model)}")
    try:
        parsed = model.model_validate(arguments)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:5])
        raise BadArguments(f"Error in the arguments of {tool}: {faults}. {_usage(tool, model)}") from None
    size = len(parsed.model_dump_json().encode("utf-8", "replace"))
    if size > MAX_ARGUMENT_BYTES:
        raise BadArguments(
            f"Error: the arguments of {tool} are {size} bytes long, the limit is {MAX_ARGUMENT_BYTES}. "
            "Split the work into several calls."
        )
    if lacking := parsed.lacks():
        raise BadArguments(f"Error: {lacking}. {_usage(tool, model)}")
    return parsed


@cache
def _json_schema(model: type[Arguments]) -> dict[str, Any]:
    """Return the JSON schema of an argument model; cached, since conversion writes the schemas into every row."""
    return model.model_json_schema()


def _parameters(model: type[Arguments]) -> dict[str, Any]:
    """Return a minimal JSON schema, without titles, defaults and nullable unions, to save prompt tokens."""
    schema = _json_schema(model)
    properties = {}
    for name, field in schema.get("properties", {}).items():
        options = [option for option in field.get("anyOf", [field]) if option.get("type") != "null"]
        kept = {key: options[0][key] for key in ("type", "enum") if key in options[0]}
        if kept["type"] == "array":
            [kind] = {item["type"] for item in options[0].get("prefixItems", [options[0].get("items")])}
            kept["items"] = {"type": kind}
        properties[name] = kept | {"description": field["description"]}
    return {
        "type": "object",
        "properties": properties,
        "required": [*schema.get("required", [])],
        "additionalProperties": False,
    }


def _usage(tool: str, model: type[Arguments]) -> str:
    schema = _parameters(model)
    if not schema["properties"]:
        return f"{tool} takes no arguments."
    parts = [
        f"{name} ({field['type']}{', required' if name in schema['required'] else ''})"
        for name, field in schema["properties"].items()
    ]
    return f"{tool} takes: {', '.join(parts)}."


ONLY_FILES_KEPT = "only files are kept for the next call"
"""Note for images without IPython, whose ``python`` keeps nothing."""

OK = "ok"
FAILED = "error"

_LOST = {"shell": "folder, variables and jobs", "kernel": "variables"}

_MARK = re.compile(r"\n\[\.\.\. [0-9]+ bytes omitted \.\.\.\]\n")

_MAX_OMITTED = 10**18
"""Maximum number of omitted bytes, for whose digits an observation's limit reserves space."""


def exit_code(code: int) -> str:
    return f"exit code: {code}"


def timed_out(limit_s: float) -> str:
    return f"timed out after {limit_s:g} s"


def waiting(silence_s: float) -> str:
    return f"still running, no output for {silence_s:g} s: it may wait for input"


def restarted(what: str) -> str:
    return f"a new {what} was started"


def ended(what: str) -> str:
    """Return the note about a session that ended during the call."""
    return f"the {what} ended and a new one was started: {_LOST[what]} are gone"


def had_ended(what: str) -> str:
    """Return the note about a session that ended before the call."""
    return f"the {what} had ended and a new one was started before this call: {_LOST[what]} are gone"


def stopped_programs() -> str:
    """Return the note that a restored sandbox has no background programs."""
    return "programs that ran in the background have ended"


def ended_before(code: int | None) -> str:
    """Return the note that a command that was left running has ended; the exit code may be unknown."""
    return "the command before has ended" + ("" if code is None else f" with exit code {code}")


@dataclass(frozen=True, slots=True)
class Output:
    """Output of a command, possibly truncated.

    Attributes:
        head: beginning of the output, or the whole output.
        omitted: number of bytes omitted after ``head``.
        tail: end of the output, if bytes were omitted.
    """

    head: str = ""
    omitted: int = 0
    tail: str = ""

    @classmethod
    def of(cls, text: str, omitted: int = 0) -> Self:
        """Parse output in which a session has marked omitted bytes.

        ``omitted`` may exceed the marked number if the session omitted data that is not text. If the command printed
        such a mark, the output may be split at that mark; the number in the status line is correct in any case.
        """
        if not omitted:
            return cls(text)
        head, found, tail = text.partition(_mark(omitted))
        if not found and (other := _MARK.search(text)):
            head, tail = text[: other.start()], text[other.end() :]
        return cls(head, omitted, tail)

    def then(self, more: Output) -> Output:
        """Return this output followed by later output, which starts on a new line."""
        if not self.omitted:
            return Output(_with_newline(self.head) + more.head, more.omitted, more.tail)
        if not more.omitted:
            return Output(self.head, self.omitted, _with_newline(self.tail) + more.head)
        between = len(_bytes(self.tail)) + len(_bytes(more.head))
        return Output(self.head, self.omitted + between + more.omitted, more.tail)

    def within(self, limit: int) -> Output:
        """Return the output truncated to ``limit`` bytes, half from the beginning and half from the end."""
        head, tail = _bytes(self.head), _bytes(self.tail)
        if len(head) + len(tail) <= limit:
            return Output(head.decode(), self.omitted, tail.decode())
        half = limit // 2
        if not self.omitted:
            head, tail = head + tail, head + tail
        # A character that would be split is dropped.
        first = head[:half].decode("utf-8", "ignore")
        last = tail[max(0, len(tail) - half) :].decode("utf-8", "ignore")
        total = len(head) + len(tail) if self.omitted else len(head)
        return Output(first, self.omitted + total - len(_bytes(first)) - len(_bytes(last)), last)

    def __str__(self) -> str:
        return f"{self.head}{_mark(self.omitted)}{self.tail}" if self.omitted else self.head + self.tail


def observation(output: Output, status: str, notes: Sequence[str] = (), *, limit: int) -> str:
    """Format an observation of at most ``limit`` bytes, at least 1000."""
    room = limit - len(_mark(_MAX_OMITTED)) - len(_last_line(status, notes, _MAX_OMITTED)) - 1
    kept = output.within(room)
    return _with_newline(str(kept)) + _last_line(status, notes, kept.omitted)


def error_text(reason: str, *, limit: int) -> str:
    """Format the observation of a failed call in ``limit`` bytes; ``reason`` may contain text from the sandbox."""
    text = f"Error: {reason}"
    return str(Output(text).within(limit - len(_mark(_MAX_OMITTED))))


def result_text(data: Mapping[str, Any]) -> str:
    """Return a kernel's display data (content by MIME type, untrusted) as text; plain text is preferred."""
    for kind in ("text/plain", "text/markdown", "text/latex", "text/html"):
        content = data.get(kind)
        if isinstance(content, list) and all(isinstance(part, str) for part in content):
            content = "".join(content)
        if isinstance(content, str):
            return content
    return f"<{', '.join(sorted(map(str, data))) or 'nothing'}>"


def _last_line(status: str, notes: Sequence[str], omitted: int) -> str:
    return f"[{'; '.join([status, *([f'{omitted} bytes omitted'] if omitted else []), *notes])}]"


def _mark(omitted: int) -> str:
    return f"\n[... {omitted} bytes omitted ...]\n"


def _with_newline(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"


def _bytes(text: str) -> bytes:
    """Encode as UTF-8; lone surrogates from the sandbox become ``?``."""
    return text.encode("utf-8", "replace")


MAX_INPUT = 1000
"""Maximum characters of an input line: a terminal buffers at most 4,096 bytes, and a character has up to four."""


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
"""Argument models by tool name."""

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
class ToolCallCounts:
    """Call counts of one tool."""

    calls: int = 0
    errors: int = 0  # invalid arguments, a non-zero exit code, an exception or an exceeded time limit
    timeouts: int = 0
    cut: int = 0  # truncated observations of ``bash`` and ``python``


class ToolCallStats:
    """Counter of one session's calls by tool."""

    def __init__(self) -> None:
        self._tools: dict[str, ToolCallCounts] = {}

    def count(self, tool: str, observation: str) -> None:
        counts = self._tools.setdefault(tool, ToolCallCounts())
        counts.calls += 1
        match = _STATUS.match(observation, observation.rfind("\n") + 1) if tool in _HAVE_STATUS else None
        status = match["status"] if match else ""
        counts.timeouts += status.startswith("timed out")
        counts.cut += bool(match and _CUT.search(match["notes"]))
        failed = status == "error" or status.startswith("timed out")
        failed |= status.startswith("exit code: ") and status != "exit code: 0"
        counts.errors += failed or (not status and observation.startswith(_TROUBLE))

    def resume(self, counted: Mapping[str, Mapping[str, int]]) -> None:
        self._tools = {tool: ToolCallCounts(**counts) for tool, counts in counted.items()}

    def as_json(self) -> Mapping[str, Mapping[str, int]]:
        """Return the counts by tool, for a rollout's row."""
        return {tool: asdict(counts) for tool, counts in self._tools.items()}
