# SPDX-License-Identifier: Apache-2.0
"""The tools of a coding task: what the model is told of them and what it may say. Pure.

A mistake in the arguments is an observation for the model, never an error of the rollout: :class:`BadArguments`
carries text that says what was wrong and what the tool takes. What the model reads back is in :mod:`.observations`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError


SOLUTION_FILE = "solution.py"
"""The artefact of a coding task: the one file that leaves the sandbox."""

MAX_ARGUMENT_BYTES = 64_000
"""Longest JSON of one call's arguments. A command may travel as one argv string, which Linux caps at 128 KiB."""

MAX_INPUT = 1000
"""Longest line to type, in characters: a terminal takes no more than 4,096 bytes at once."""


class BadArguments(Exception):
    """The model called a tool wrongly; the message is its observation."""


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid")


class BashArguments(_Arguments):
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


class PythonArguments(_Arguments):
    """A persistent Python (IPython kernel): variables and imports stay from call to call. The answer is what was \
printed, the value of the last expression, the traceback if there is one, and a last line: `[ok]`, `[error]` or \
`[timed out after S s]`. Input cannot be read. Of long output the middle is left out."""

    code: str | None = Field(default=None, min_length=1, description="The code to run.")
    restart: bool | None = Field(default=None, description="Instead of code: end the kernel and start a new one.")
    timeout_s: float | None = Field(
        default=None, gt=0, description="Seconds until the code is interrupted; bounded by the environment."
    )


class EditorArguments(_Arguments):
    """View and edit text files. `view` shows a file with line numbers, or lists a folder; `create` writes a whole \
file; `str_replace` replaces a string that occurs exactly once; `insert` adds lines after a line."""

    command: Literal["view", "create", "str_replace", "insert"] = Field(description="What to do.")
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


class SubmitArguments(_Arguments):
    """Hand in solution.py and end the task."""


TOOLS: Mapping[str, type[_Arguments]] = {
    "bash": BashArguments,
    "python": PythonArguments,
    "str_replace_editor": EditorArguments,
    "submit": SubmitArguments,
}
"""The tools by name, each with the model of its arguments."""

_ONE_OF = {"bash": ("command", "input", "restart"), "python": ("code", "restart")}
"""Arguments of which a call has exactly one."""

_EDITOR_NEEDS = {
    "view": (),
    "create": ("file_text",),
    "str_replace": ("old_str",),
    "insert": ("insert_line", "new_str"),
}


def tool_schemas() -> list[dict[str, Any]]:
    """The tools as the Responses API wants them."""
    return [
        {
            "type": "function",
            "name": name,
            "description": model.__doc__,
            "parameters": _parameters(model),
            "strict": False,
        }
        for name, model in TOOLS.items()
    ]


def parse_arguments(tool: str, arguments: object) -> _Arguments:
    """Check what the model gave a tool.

    Raises:
        BadArguments: with the text that the model should read.
    """
    model = TOOLS[tool]
    if not isinstance(arguments, Mapping):
        raise BadArguments(f"Error: the arguments of {tool} must be a JSON object. {_usage(tool)}")
    try:
        parsed = model.model_validate(arguments)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:5])
        raise BadArguments(f"Error in the arguments of {tool}: {faults}. {_usage(tool)}") from None
    size = len(parsed.model_dump_json().encode("utf-8", "replace"))
    if size > MAX_ARGUMENT_BYTES:
        raise BadArguments(
            f"Error: the arguments of {tool} are {size} bytes long, the limit is {MAX_ARGUMENT_BYTES}. "
            "Split the work into several calls."
        )
    if tool in _ONE_OF:
        given = [name for name in _ONE_OF[tool] if getattr(parsed, name) not in (None, False)]
        if len(given) != 1:
            raise BadArguments(f"Error: {tool} needs one of {', '.join(_ONE_OF[tool])}. {_usage(tool)}")
    if isinstance(parsed, EditorArguments):
        missing = [name for name in _EDITOR_NEEDS[parsed.command] if getattr(parsed, name) is None]
        if missing:
            raise BadArguments(f"Error: {parsed.command} needs {' and '.join(missing)}. {_usage(tool)}")
    return parsed


def _parameters(model: type[_Arguments]) -> dict[str, Any]:
    """A small JSON schema: models read it, so no titles, defaults or nullable unions."""
    schema = model.model_json_schema()
    properties = {}
    for name, field in schema.get("properties", {}).items():
        options = [option for option in field.get("anyOf", [field]) if option.get("type") != "null"]
        kept = {key: options[0][key] for key in ("type", "enum") if key in options[0]}
        if kept["type"] == "array":
            kept["items"] = {"type": "integer"}
        properties[name] = kept | {"description": field["description"]}
    return {
        "type": "object",
        "properties": properties,
        "required": schema.get("required", []),
        "additionalProperties": False,
    }


def _usage(tool: str) -> str:
    schema = _parameters(TOOLS[tool])
    if not schema["properties"]:
        return f"{tool} takes no arguments."
    parts = [
        f"{name} ({field['type']}{', required' if name in schema['required'] else ''})"
        for name, field in schema["properties"].items()
    ]
    return f"{tool} takes: {', '.join(parts)}."
