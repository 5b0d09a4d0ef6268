# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tools as models: what a policy is told of a tool, and what it may say to one. Pure.

A tool's arguments are a model: its docstring describes the tool, its fields' descriptions the arguments. A mistake in
what the policy gives is an observation, never an error of the rollout: :class:`BadArguments` carries text that says
what was wrong and what the tool takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


MAX_ARGUMENT_BYTES = 64_000
"""Longest JSON of one call's arguments. A command may travel as one argv string, which Linux caps at 128 KiB."""


class BadArguments(Exception):
    """The policy called a tool wrongly; the message is its observation."""


class Arguments(BaseModel):
    """Base of the models."""

    model_config = ConfigDict(extra="forbid")

    def lacks(self) -> str | None:
        """What a call must have besides, though each field is fine by itself, as in ``bash needs a command``."""
        return None


def tool_schema(name: str, model: type[Arguments], description: str | None = None) -> dict[str, Any]:
    """A tool as the Responses API wants it.

    Args:
        name: the tool's.
        model: its arguments.
        description: instead of the model's docstring.
    """
    return {
        "type": "function",
        "name": name,
        "description": description or model.__doc__,
        "parameters": _parameters(model),
        "strict": False,
    }


def parse_arguments[A: Arguments](tool: str, model: type[A], arguments: object) -> A:
    """Check what the policy gave a tool.

    Raises:
        BadArguments: with the text that the policy should read.
    """
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
    """Conversion writes the schemas into each of a million rows."""
    return model.model_json_schema()


def _parameters(model: type[Arguments]) -> dict[str, Any]:
    """A small JSON schema: models read it, so no titles, defaults or nullable unions."""
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
