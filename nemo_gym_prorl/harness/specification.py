# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Description of a harness: an agent program that runs inside the sandbox and calls the policy by itself.

A harness is a YAML file with the fields of :class:`Harness`. ``programs/`` contains the shipped files; other files are
named by path. Texts may contain placeholders, which :meth:`Harness.launch` fills::

    {prompt}    task of the row          {model}   name of the model
    {base_url}  policy's URL with /v1    {key}     key of the policy; a dummy, since the proxy adds the real one
    {origin}    policy's URL, no /v1     {home}    HOME of the program
    {bundle}    folder of the bundle     {context} context window in tokens
    {cpu}       x64 or arm64             {machine} x86_64 or aarch64
    {musl}      ``-musl`` in a bundle for musl, else empty

``{{name}}`` is a literal ``{name}``. An unknown name is an error, except in ``files``, which may contain code with
braces. No key enters the sandbox. Each text is filled once, so placeholders in a prompt are not replaced.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from nemo_gym_prorl.failures import CallerError, suggest
from nemo_gym_prorl.http.problem_document import field_errors, in_words
from nemo_gym_prorl.sandbox.images.entries import machine


BUNDLE_FOLDER = "/opt/harness"
"""Folder inside the sandbox with the bundles, one per C library, mounted read-only."""

DUMMY_KEY = "sk-sandbox"
"""Placeholder that programs send as the policy's key; the sandbox's egress proxy inserts the real key."""

MAX_ARGUMENT_BYTES = (128 << 10) - 1
"""Longest argument that Linux passes to a program (MAX_ARG_STRLEN)."""

HARNESS_EXIT = "harness_exit"
"""Finish reason of a program whose exit code is not in :attr:`Harness.exit_codes`."""

Libc = Literal["glibc", "musl"]

_PROGRAMS = Path(__file__).parent / "programs"
_KNOWN = {"prompt", "base_url", "origin", "model", "key", "home", "bundle", "cpu", "musl", "machine", "context"}
_PLACEHOLDER = re.compile(r"\{(\{[a-z_]+\})\}|\{([a-z_]+)\}")
_NPM_PART = r"([A-Za-z0-9-][A-Za-z0-9._~-]*|\{(cpu|musl|machine)\})+"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Bundle(_Table):
    """Packages of a bundle; either from npm or from PyPI.

    Attributes:
        npm: version by npm package. Names of packages for one platform contain ``{cpu}`` and ``{musl}``.
        pip: requirements of Python packages.
        python: version of the relocatable Python that runs the packages.
        libc: C libraries for which the packages exist.
        before: day up to which packages are considered, so that every machine resolves the same versions.
    """

    npm: dict[Annotated[str, Field(pattern=rf"^(@{_NPM_PART}/)?{_NPM_PART}$")], str] = {}
    pip: list[Annotated[str, Field(pattern=r"^[^-\s][^\r\n]*$")]] = []
    python: Annotated[str, Field(pattern=r"^3\.[0-9]{1,2}$")] = "3.12"
    libc: Annotated[list[Libc], Field(min_length=1)] = ["glibc"]
    before: date

    @model_validator(mode="after")
    def _check_one_registry(self) -> Self:
        if bool(self.npm) == bool(self.pip):
            raise ValueError("name packages of npm or of pip, not both")
        return self


@dataclass(frozen=True, slots=True)
class Launch:
    """Filled command, environment variables besides the sandbox's, and texts of files by absolute path."""

    command: list[str]
    env: dict[str, str]
    files: dict[str, str]


class Harness(_Table):
    """One agent program.

    Attributes:
        name: name of the program, in rows, metrics and reports.
        version: version of the program.
        api: wire API over which the program calls the policy.
        bundle: packages that ``prorl harness build`` installs; ``None`` if the image contains the program.
        command: program and arguments. The program runs in the task's working folder as the agent's user, and ends by
            itself.
        env: environment variables besides HOME.
        files: text of files by path, written before the start; ``~`` at the beginning is the program's HOME.
        exit_codes: finish reasons by exit code; :data:`HARNESS_EXIT` for other codes.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}$")]
    api: Literal["responses", "chat", "messages"]
    bundle: Bundle | None = None
    command: Annotated[list[str], Field(min_length=1)]
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = {}
    files: dict[str, str] = {}
    exit_codes: dict[Annotated[int, Field(ge=0, le=255)], Annotated[str, Field(pattern=r"^[a-z_]{1,40}$")]] = {
        0: "stop"
    }

    @field_validator("command", "env", "files")
    @classmethod
    def _check_texts[T: (list[str], dict[str, str])](cls, texts: T, info: ValidationInfo) -> T:
        for text in texts.values() if isinstance(texts, dict) else texts:
            for _, name in _PLACEHOLDER.findall(text):
                if name and name not in _KNOWN and info.field_name != "files":
                    hint = f"write {{{{{name}}}}} for a literal {{{name}}}"
                    raise ValueError(f"{{{name}}} is no placeholder{suggest(name, _KNOWN)}; {hint}")
        return texts

    @field_validator("files")
    @classmethod
    def _check_paths(cls, files: dict[str, str]) -> dict[str, str]:
        for path in files:
            if not path.startswith(("/", "~/")) or posixpath.basename(path) in ("", ".", ".."):
                raise ValueError(f"{path} must begin with / or ~/ and end with a file's name")
        return files

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        texts = (*self.command, *self.env.values(), *self.files.values())
        if not any(name == "prompt" for text in texts for _, name in _PLACEHOLDER.findall(text)):
            raise ValueError("no text of command, env or files has {prompt}, so the program would not know its task")
        return self

    def launch(self, *, prompt: str, origin: str, model: str, home: str, context: int, libc: Libc) -> Launch:
        """Return the filled command, variables and files.

        Args:
            prompt: task of the row.
            origin: the policy's base URL inside the sandbox, without ``/v1``.
            model: name of the model.
            home: HOME of the program, writable in the sandbox; not below ``/tmp``, where Codex creates no helpers.
            context: context window of the model, in tokens.
            libc: C library of the sandbox's image.

        Raises:
            CallerError: the prompt or model has a NUL, or an argument or environment variable is too long.
        """
        values = {"prompt": prompt, "origin": origin, "base_url": f"{origin}/v1", "model": model, "home": home}
        values |= {"context": str(context), "key": DUMMY_KEY, "bundle": f"{BUNDLE_FOLDER}/{libc}"}
        values |= platform_values(libc)
        command = [fill(text, values) for text in self.command]
        env = {"HOME": home} | {name: fill(text, values) for name, text in self.env.items()}
        size = max(len(text.encode()) for text in (*command, *(f"{name}={text}" for name, text in env.items())))
        if size > MAX_ARGUMENT_BYTES:
            raise CallerError(f"has {size} bytes, more than the {MAX_ARGUMENT_BYTES} of an argument", field="prompt")
        for field, text in (("prompt", prompt), ("model", model)):
            if "\0" in text:
                raise CallerError("has the character NUL, which no argument can have", field=field)
        files = {path.replace("~", home, 1): fill(text, values) for path, text in self.files.items()}
        return Launch(command, env, files)


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders that have a value, and ``{{name}}`` by ``{name}``; other placeholders stay."""
    return _PLACEHOLDER.sub(lambda match: match[1] or values.get(match[2], match[0]), text)


def platform_values(libc: Libc) -> dict[str, str]:
    """Return the values of the placeholders ``cpu``, ``machine`` and ``musl`` on this machine."""
    return {
        "cpu": {"x86_64": "x64", "aarch64": "arm64"}.get(machine(), machine()),
        "musl": "-musl" if libc == "musl" else "",
        "machine": machine(),
    }


def shipped_harnesses() -> list[str]:
    """Return the names of the harnesses in ``programs/``."""
    return sorted(path.stem for path in _PROGRAMS.glob("*.yaml"))


def load_harness(name: str) -> Harness:
    """Return a harness by name, or by the path of its YAML file.

    Raises:
        CallerError: the harness or file does not exist, or is invalid; names the field.
    """
    is_own = name.endswith((".yaml", ".yml"))
    path = Path(name) if is_own else _PROGRAMS / f"{name}.yaml"
    try:
        if not (path.is_file() if is_own else name in shipped_harnesses()):
            raise CallerError(f"no harness {name!r}{suggest(name, shipped_harnesses())}; or name a YAML file")
        return Harness.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise CallerError(f"{path} can't be read: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise CallerError(f"{path}: {in_words(field_errors(error.errors()))}") from error
