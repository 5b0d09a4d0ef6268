# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Parse a Dockerfile into instructions, and expand variables in an instruction's words. Pure.

Follows the Dockerfile reference of BuildKit (docs.docker.com/reference/dockerfile). ``EXPOSE``, ``HEALTHCHECK``,
``LABEL``, ``MAINTAINER``, ``STOPSIGNAL`` and ``VOLUME`` change neither files, variables, user nor working folder, so
these instructions are ignored. An unsupported instruction raises an error that names its line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nemo_gym_prorl.failures import CallerError


_NO_EFFECT = frozenset({"EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "VOLUME"})
_KNOWN = _NO_EFFECT | {"ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "SHELL", "USER", "WORKDIR"}
_DIRECTIVE = re.compile(r"#\s*(syntax|escape|check)\s*=\s*(\S+)\s*$", re.IGNORECASE)
_DIRECTIVE_VALUES = {"escape": r"\\$", "syntax": r"(docker\.io/)?docker/dockerfile(:|$)"}
HEREDOC = re.compile(r"(?<!\S)\d*<<(-?)(?:\"([^\"\n]+)\"|'([^'\n]+)'|([^\s<>|&;()\"'$]+))")
_HEREDOC_INSTRUCTIONS = frozenset({"ADD", "COPY", "RUN"})

MAX_BYTES = 1 << 20
"""Maximum bytes of a Dockerfile or ``.dockerignore``; a larger file is none."""


@dataclass(frozen=True, slots=True)
class Heredoc:
    """A here-document of an instruction.

    Attributes:
        name: the delimiter, which is also the file's name if the target is a folder.
        body: text with a final newline, without leading tabs for ``<<-``.
        expand: whether variables in ``body`` are expanded (an unquoted delimiter).
        raw: the lines of the Dockerfile, unchanged, with the delimiter.
    """

    name: str
    body: str
    expand: bool
    raw: str


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        line: number of the first line, counted from 1.
        name: name in upper case.
        flags: ``--name=value`` options in order; the value of a bare ``--name`` is ``"true"``.
        text: text after the flags, with continued lines joined.
        heredocs: here-documents in order.
    """

    line: int
    name: str
    flags: tuple[tuple[str, str], ...]
    text: str
    heredocs: tuple[Heredoc, ...] = ()

    def error(self, reason: str) -> CallerError:
        """Return an error that names this instruction's line."""
        return CallerError(f"line {self.line}: {self.name}: {reason:.500}", field="Dockerfile")

    def words(self) -> list[str] | None:
        """Return the words of the exec form (a JSON list of strings); ``None`` for the shell form."""
        if not self.text.startswith("["):
            return None
        try:
            words = json.loads(self.text)
        except ValueError:
            return None
        return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def parse(text: str) -> list[Instruction]:
    """Parse the text of a Dockerfile into instructions.

    Raises:
        CallerError: the text is no Dockerfile, or has an unsupported instruction or frontend; names the line.
    """
    lines = text.removeprefix("\ufeff").removesuffix("\n").split("\n")
    _check_frontend(lines)
    found: list[Instruction] = []
    number = 0
    while number < len(lines):
        first = number
        joined, number = _logical_line(lines, number)
        if not joined:
            continue
        name, _, rest = joined.partition(" ") if " " in joined else (joined, "", "")
        instruction = Instruction(first + 1, name.upper(), (), "")
        if instruction.name not in _KNOWN:
            raise instruction.error("has no support here" if name.isalpha() else "is no instruction")
        flags, rest = _split_flags(rest.strip())
        heredocs: list[Heredoc] = []
        if instruction.name in _HEREDOC_INSTRUCTIONS:
            for match in HEREDOC.finditer(_unquoted(rest)):
                heredoc, number = _read_heredoc(lines, number, match, instruction)
                heredocs.append(heredoc)
        found.append(replace(instruction, flags=flags, text=rest, heredocs=tuple(heredocs)))
    return found


def _check_frontend(lines: Sequence[str]) -> None:
    """Refuse directives at the top of a Dockerfile that name another frontend or another escape character."""
    for number, line in enumerate(lines, 1):
        match = _DIRECTIVE.fullmatch(line.strip())
        if match is None:
            return
        name, value = match[1].lower(), match[2]
        if not re.match(_DIRECTIVE_VALUES.get(name, ""), value):
            raise CallerError(f"line {number}: {name}={value} has no support here", field="Dockerfile")


def _logical_line(lines: Sequence[str], number: int) -> tuple[str, int]:
    """Return the line at index ``number`` joined with its continuation lines, and the index of the next line. The text
    is empty for a comment or an empty line."""
    parts: list[str] = []
    while number < len(lines):
        line = lines[number]
        number += 1
        stripped = line.strip()
        if stripped.startswith("#") or (parts and not stripped):
            if not parts:
                return "", number
            continue  # comments and empty lines do not end an instruction
        body = line.rstrip()
        # Two backslashes stand for a backslash, and do not continue the line.
        continued = body.endswith("\\") and not body.endswith("\\\\")
        parts.append(body[:-1] if continued else body)
        if not continued:
            break
    joined = "".join(parts).strip()
    return re.sub(r"^(\S+)\s+", r"\1 ", joined), number


def _split_flags(text: str) -> tuple[tuple[tuple[str, str], ...], str]:
    flags = []
    while match := re.match(r"--([a-z-]+)(?:=(\"[^\"]*\"|\S*))?(?:\s+|$)", text):
        flags.append((match[1], (match[2] or "true").strip('"')))
        text = text[match.end() :]
    return tuple(flags), text


def _read_heredoc(lines: Sequence[str], number: int, match: re.Match[str], owner: Instruction) -> tuple[Heredoc, int]:
    name = match[2] or match[3] or match[4]
    body: list[str] = []
    for index in range(number, len(lines)):
        line = lines[index].lstrip("\t") if match[1] else lines[index]
        if line.rstrip("\r") == name:
            raw = "\n".join([*lines[number:index], lines[index].rstrip("\r")])
            return Heredoc(name, "".join(f"{one}\n" for one in body), bool(match[4]), raw), index + 1
        body.append(line)
    raise owner.error(f"the here-document {name} has no end")


def _unquoted(text: str) -> str:
    """Mask quoted parts of a text by ``_``, except quoted delimiters, so that ``<<`` in quotes is no here-document."""
    pattern = r"((?<!\S)\d*<<-?(?:\"[^\"\n]+\"|'[^'\n]+'))|\"(?:\\.|[^\"\\])*\"|'[^']*'|<<<|\\."
    return re.sub(pattern, lambda match: match[1] or "_" * len(match[0]), text)


_WORD = re.compile(r"(?:\\.|\"(?:\\.|[^\"\\])*\"|'[^']*'|[^\s\"'\\]|\\$)+")


def split_words(one: Instruction, text: str) -> list[str]:
    """Split a text into words at blanks outside of quotes; quotes and escape characters stay.

    Raises:
        CallerError: a quote has no end; names the line.
    """
    words, position = [], 0
    while position < len(text):
        if text[position].isspace():
            position += 1
        elif match := _WORD.match(text, position):
            words.append(match[0])
            position = match.end()
        else:
            raise one.error(f"a quote has no end: {text[position : position + 40]}")
    return words


def expand_word(one: Instruction, text: str, scope: Mapping[str, str]) -> str:
    """Return a word with its variables expanded, its quotes removed and its escapes resolved.

    Raises:
        CallerError: an expansion is not supported, or a variable with ``:?message`` has no value; names the line.
    """
    return _Expansion(one, text, scope, quotes=True).up_to("")


def expand_text(one: Instruction, text: str, scope: Mapping[str, str]) -> str:
    """Return a here-document's text with its variables expanded and its escapes resolved; quotes stay."""
    return _Expansion(one, text, scope, quotes=False).up_to("")


@dataclass(slots=True)
class _Expansion:
    """Expansion of one text, read character by character as in BuildKit; ``quotes``: whether quotes are removed."""

    one: Instruction
    text: str
    scope: Mapping[str, str]
    quotes: bool
    position: int = 0

    def up_to(self, end: str) -> str:
        """Expand the text up to the character ``end``, or if ``end`` is empty, to the end of the text."""
        found: list[str] = []
        while self.position < len(self.text):
            character = self._next()
            if character == end:
                return "".join(found)
            if character == "$":
                found.append(self._variable())
            elif character == "\\":
                found.append(self._next())
            elif character == "'" and self.quotes:
                found.append(self._single_quoted())
            elif character == '"' and self.quotes:
                found.append(self._double_quoted())
            else:
                found.append(character)
        if end:
            raise self.one.error(f"{self.text}: {end} is missing")
        return "".join(found)

    def _next(self) -> str:
        self.position += 1
        return self.text[self.position - 1 : self.position]

    def _match(self, pattern: str) -> str:
        match = re.compile(pattern).match(self.text, self.position)
        self.position = match.end() if match else self.position
        return match[0] if match else ""

    def _single_quoted(self) -> str:
        inner = self._match("[^']*")
        if not self._next():
            raise self.one.error(f"{self.text}: a quote has no end")
        return inner

    def _double_quoted(self) -> str:
        found: list[str] = []
        while character := self._next():
            if character == '"':
                return "".join(found)
            if character == "$":
                character = self._variable()
            elif character == "\\":
                character = self._match(r'["$\\]') or character
            found.append(character)
        raise self.one.error(f"{self.text}: a quote has no end")

    def _variable(self) -> str:
        """Return the value of the expansion of which the leading ``$`` has just been read."""
        if self._match(r"\{"):
            name = self._match(r"[A-Za-z_]\w*|\d+|[@*#?$!-]")
            operator = self._match(r":?[-+?]|\}")
            if not name or not operator:
                raise self.one.error(f"{self.text}: the expansion has no support here")
        else:
            # Special parameters of a shell, such as $$, expand to an empty text.
            name, operator = self._match(r"[A-Za-z_]\w*|\d+|[@*#?$!-]"), "}"
            if not name:
                return "$"
        found = self.scope.get(name)
        if operator == "}":
            return found or ""
        word = self.up_to("}")
        is_set = bool(found) if operator.startswith(":") else found is not None
        if operator.endswith("+"):
            return word if is_set else ""
        if operator.endswith("?") and not is_set:
            raise self.one.error(f"{name}: {word or 'has no value'}")
        return (found or "") if is_set else word
