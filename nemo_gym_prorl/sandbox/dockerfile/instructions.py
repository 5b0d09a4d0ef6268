# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Dockerfiles: text to instructions, and expansion of variables in their words. Pure.

Follows the Dockerfile reference of BuildKit (docs.docker.com/reference/dockerfile). ``EXPOSE``, ``HEALTHCHECK``,
``LABEL``, ``MAINTAINER``, ``STOPSIGNAL`` and ``VOLUME`` change neither files, variables, user nor working folder, so
they have no effect. An instruction without support raises an error that names its line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from nemo_gym_prorl.failures import CallerError


_NO_EFFECT = frozenset({"EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "VOLUME"})
_KNOWN = _NO_EFFECT | {"ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "SHELL", "USER", "WORKDIR"}
_DIRECTIVE = re.compile(r"#\s*(syntax|escape|check)\s*=\s*(\S+)\s*$", re.IGNORECASE)
HEREDOC = re.compile(r"(?<!\S)\d*<<(-?)(?:\"([^\"\n]+)\"|'([^'\n]+)'|([^\s<>|&;()\"'$]+))")
_HEREDOC_OWNERS = frozenset({"ADD", "COPY", "RUN"})

MAX_BYTES = 1 << 20
"""Bytes of a Dockerfile, and characters of all values that are put in for its variables: it is untrusted."""

MAX_INSTRUCTIONS = 1000


@dataclass(frozen=True, slots=True)
class Heredoc:
    """A here-document of an instruction.

    Attributes:
        name: the delimiter; the file's name where a folder is the destination.
        body: text with a final newline, without leading tabs for ``<<-``.
        expand: whether variables in ``body`` are expanded (an unquoted delimiter).
        raw: the Dockerfile's lines unchanged, delimiter included.
    """

    name: str
    body: str
    expand: bool
    raw: str


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        line: first line, counted from 1.
        name: upper case.
        flags: ``--name=value`` options in order; the value of a bare ``--name`` is ``"true"``.
        text: text after the flags, with continued lines joined.
        heredocs: in order.
        expanded: characters put in for variables so far; one count for all instructions of a Dockerfile.
        escape: character that continues lines and, in words, takes the meaning of the next one (``# escape``).
    """

    line: int
    name: str
    flags: tuple[tuple[str, str], ...]
    text: str
    heredocs: tuple[Heredoc, ...] = ()
    escape: str = "\\"
    expanded: list[int] = field(default_factory=lambda: [0], compare=False)

    def error(self, reason: str) -> CallerError:
        """Return an error that names this instruction's line."""
        return CallerError(f"line {self.line}: {self.name}: {reason:.500}", field="Dockerfile")

    def words(self) -> list[str] | None:
        """Return the words of the exec form (a JSON list of texts), ``None`` for the shell form."""
        if not self.text.startswith("["):
            return None
        try:
            words = json.loads(self.text)
        except ValueError:
            return None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            return None
        if any(re.search("[\0\ud800-\udfff]", word) for word in words):
            raise self.error("a word has a character that no command line can hold")
        return words


def parse(text: str) -> list[Instruction]:
    """Return the instructions of a Dockerfile.

    Raises:
        CallerError: the text is no Dockerfile, or names an instruction or a frontend without support; names the line.
    """
    if "\0" in text:
        raise CallerError("has a NUL character", field="Dockerfile")
    lines = text.removeprefix("\ufeff").removesuffix("\n").split("\n")
    escape = _escape_character(lines)
    found: list[Instruction] = []
    expanded = [0]
    number = 0
    while number < len(lines):
        first = number
        joined, number = _logical_line(lines, number, escape)
        if not joined:
            continue
        name, _, rest = joined.partition(" ") if " " in joined else (joined, "", "")
        instruction = Instruction(first + 1, name.upper(), (), "", escape=escape, expanded=expanded)
        if len(found) == MAX_INSTRUCTIONS:
            raise instruction.error(f"more than {MAX_INSTRUCTIONS} instructions")
        if instruction.name not in _KNOWN:
            raise instruction.error("has no support here" if name.isalpha() else "is no instruction")
        flags, rest = _split_flags(rest.strip())
        heredocs: list[Heredoc] = []
        if instruction.name in _HEREDOC_OWNERS:
            for match in HEREDOC.finditer(_unquoted(rest)):
                heredoc, number = _read_heredoc(lines, number, match, instruction)
                heredocs.append(heredoc)
        found.append(replace(instruction, flags=flags, text=rest, heredocs=tuple(heredocs)))
    return found


def _escape_character(lines: Sequence[str]) -> str:
    """Return the line continuation character, by the directives at the top."""
    escape = "\\"
    for number, line in enumerate(lines, 1):
        match = _DIRECTIVE.fullmatch(line.strip())
        if match is None:
            break
        name, value = match[1].lower(), match[2]
        if name == "escape":
            if value not in ("\\", "`"):
                raise CallerError(f"line {number}: escape must be \\ or `, not {value}", field="Dockerfile")
            escape = value
        elif name == "syntax" and not re.match(r"(docker\.io/)?docker/dockerfile(:|$)", value):
            raise CallerError(f"line {number}: the frontend {value} has no support here", field="Dockerfile")
    return escape


def _logical_line(lines: Sequence[str], number: int, escape: str) -> tuple[str, int]:
    """Return a line with those that continue it, and the number of the next; empty for a comment or nothing."""
    parts: list[str] = []
    while number < len(lines):
        line = lines[number]
        number += 1
        stripped = line.strip()
        if stripped.startswith("#") or (parts and not stripped):
            if not parts:
                return "", number
            continue  # comments and empty lines inside an instruction do not end it
        body = line.rstrip()
        # Two escape characters mean the character itself.
        continued = body.endswith(escape) and not body[:-1].endswith(escape)
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
    """Return the text with quoted parts replaced, except a quoted here-document delimiter."""
    pattern = r"((?<!\S)\d*<<-?(?:\"[^\"\n]+\"|'[^'\n]+'))|\"(?:\\.|[^\"\\])*\"|'[^']*'|<<<|\\."
    return re.sub(pattern, lambda match: match[1] or "_" * len(match[0]), text)


def split_words(one: Instruction, text: str) -> list[str]:
    """Return the words of a text, split at blanks outside quotes; quotes and escapes stay."""
    escape = re.escape(one.escape)
    quoted = rf"\"(?:{escape}.|[^\"{escape}])*\"|'[^']*'"
    words, pattern = [], re.compile(rf"(?:{escape}.|{quoted}|[^\s\"'{escape}]|{escape}$)+")
    position = 0
    while position < len(text):
        if text[position].isspace():
            position += 1
        elif match := pattern.match(text, position):
            words.append(match[0])
            position = match.end()
        else:
            raise one.error(f"a quote has no end: {text[position : position + 40]}")
    return words


def expand_word(one: Instruction, text: str, scope: Mapping[str, str]) -> str:
    """Return a word with its variables expanded, its quotes removed and its escapes resolved.

    Raises:
        CallerError: an expansion has no support, or ``${name:?message}`` finds no value; names the line.
    """
    return _Expansion(one, text, scope, quotes=True).up_to("")


def expand_text(one: Instruction, text: str, scope: Mapping[str, str]) -> str:
    """Return a here-document's text with its variables expanded; quotes stay, the escape character escapes any."""
    return _Expansion(one, text, scope, quotes=False).up_to("")


_MAX_DEPTH = 50


@dataclass(slots=True)
class _Expansion:
    """Reader of one text, character by character as BuildKit reads it; ``quotes`` says whether quotes are special."""

    one: Instruction
    text: str
    scope: Mapping[str, str]
    quotes: bool
    position: int = 0
    depth: int = 0

    def up_to(self, end: str) -> str:
        """Return the expanded text up to the character ``end``, or to the end of the text if it is empty."""
        found: list[str] = []
        while self.position < len(self.text):
            character = self._next()
            if character == end:
                return "".join(found)
            if character == "$":
                found.append(self._variable())
            elif character == self.one.escape:
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
            elif character == self.one.escape:
                character = self._match(f'["${re.escape(character)}]') or character
            found.append(character)
        raise self.one.error(f"{self.text}: a quote has no end")

    def _variable(self) -> str:
        """Return the value of the variable whose ``$`` has just been read."""
        if self._match(r"\{"):
            name = self._match(r"[A-Za-z_]\w*|\d+|[@*#?$!-]")
            operator = self._match(r":?[-+?]|\}")
            if not name or not operator:
                raise self.one.error(f"{self.text}: the expansion has no support here")
        else:
            # A special parameter, such as $$, has no value here.
            name, operator = self._match(r"[A-Za-z_]\w*|\d+|[@*#?$!-]"), "}"
            if not name:
                return "$"
        found = self.scope.get(name)
        self.one.expanded[0] += len(found or "")
        if self.one.expanded[0] > MAX_BYTES:
            raise self.one.error(f"variables are expanded to more than {MAX_BYTES >> 20} MiB")
        if operator == "}":
            return found or ""
        if self.depth == _MAX_DEPTH:
            raise self.one.error(f"more than {_MAX_DEPTH} expansions are nested")
        self.depth += 1
        word = self.up_to("}")
        self.depth -= 1
        has = bool(found) if operator.startswith(":") else found is not None
        if operator.endswith("+"):
            return word if has else ""
        if operator.endswith("?") and not has:
            raise self.one.error(f"{name}: {word or 'has no value'}")
        return (found or "") if has else word
