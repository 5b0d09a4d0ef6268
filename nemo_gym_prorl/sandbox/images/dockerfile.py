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
from dataclasses import dataclass, replace

from nemo_gym_prorl.failures import CallerError


_NO_EFFECT = frozenset({"EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "VOLUME"})
_KNOWN = _NO_EFFECT | {"ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "SHELL", "USER", "WORKDIR"}
_DIRECTIVE = re.compile(r"#\s*(syntax|escape|check)\s*=\s*(\S+)\s*$", re.IGNORECASE)
HEREDOC = re.compile(r"<<(-?)([\"']?)([A-Za-z_][A-Za-z0-9_]*)\2")
_HEREDOC_OWNERS = frozenset({"ADD", "COPY", "RUN"})


@dataclass(frozen=True, slots=True)
class Heredoc:
    """A here-document of an instruction.

    Attributes:
        name: the delimiter; the file's name where a folder is the destination.
        body: text with a final newline, without leading tabs for ``<<-``.
        expand: whether variables in ``body`` are expanded (an unquoted delimiter).
        raw: the lines as they stand in the Dockerfile, delimiter included.
    """

    name: str
    body: str
    expand: bool
    raw: str


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        line: its first line, counted from 1.
        name: upper case.
        flags: ``--name=value`` options in order; the value of a bare ``--name`` is ``"true"``.
        text: what follows the flags, with continued lines joined.
        heredocs: in order.
    """

    line: int
    name: str
    flags: tuple[tuple[str, str], ...]
    text: str
    heredocs: tuple[Heredoc, ...] = ()

    def error(self, reason: str) -> CallerError:
        """Return an error that names this instruction's line."""
        return CallerError(f"line {self.line}: {self.name}: {reason}", field="Dockerfile")

    def words(self) -> list[str] | None:
        """Return the words of the exec form (a JSON list of texts), ``None`` for the shell form."""
        if not self.text.startswith("["):
            return None
        try:
            words = json.loads(self.text)
        except ValueError:
            return None
        return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def parse(text: str) -> list[Instruction]:
    """Return the instructions of a Dockerfile.

    Raises:
        CallerError: the text is no Dockerfile, or names an instruction or a frontend without support; names the line.
    """
    lines = text.removeprefix("\ufeff").splitlines()
    escape = _escape_character(lines)
    found: list[Instruction] = []
    number = 0
    while number < len(lines):
        first = number
        joined, number = _logical_line(lines, number, escape)
        if not joined:
            continue
        name, _, rest = joined.partition(" ") if " " in joined else (joined, "", "")
        instruction = Instruction(first + 1, name.upper(), (), "")
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
    """Return the line continuation character, by the directives at the top.

    Raises:
        CallerError: another frontend than Docker's is asked for.
    """
    escape = "\\"
    for number, line in enumerate(lines, 1):
        match = _DIRECTIVE.fullmatch(line.strip())
        if match is None:
            break
        name, value = match[1].lower(), match[2]
        if name == "escape":
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
        continued = body.endswith(escape) and bool(stripped)
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
    body: list[str] = []
    for index in range(number, len(lines)):
        line = lines[index].lstrip("\t") if match[1] else lines[index]
        if line == match[3]:
            raw = "\n".join(lines[number : index + 1])
            return Heredoc(match[3], "".join(f"{one}\n" for one in body), not match[2], raw), index + 1
        body.append(line)
    raise owner.error(f"the here-document {match[3]} has no end")


def _unquoted(text: str) -> str:
    """Return the text with what stands in quotes replaced, except a quoted here-document delimiter."""
    pattern = r"(<<-?[\"'][A-Za-z_]\w*[\"'])|\"(?:\\.|[^\"\\])*\"|'[^']*'|<<<"
    return re.sub(pattern, lambda match: match[1] or "_" * len(match[0]), text)


def split_words(one: Instruction, text: str) -> list[str]:
    """Return the words of a text, split at blanks outside quotes; quotes and escapes stay."""
    words, pattern = [], re.compile(r"(?:\\.|\"(?:\\.|[^\"\\])*\"|'[^']*'|[^\s\"'\\]|\\$)+")
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


_EXPANSION = re.compile(
    r"\\(?P<escaped>.)|'(?P<single>[^']*)'|(?P<double>\")|"
    r"\$(?:(?P<plain>[A-Za-z_]\w*|\d)|\{(?P<name>[A-Za-z_]\w*)(?:(?P<operator>:?[-+?])(?P<word>(?:[^{}]|\$\{[^{}]*\})*))?\})",
    re.DOTALL,
)


def expand_word(one: Instruction, text: str, scope: Mapping[str, str]) -> str:
    """Return a word with its variables expanded, its quotes removed and its escapes resolved.

    Raises:
        CallerError: an expansion has no support, or ``${name:?message}`` finds no value; names the line.
    """
    quoted = False

    def value(match: re.Match[str]) -> str:
        nonlocal quoted
        if (escaped := match["escaped"]) is not None:
            return match[0] if quoted and escaped not in '"$\\' else escaped
        if match["double"]:
            quoted = not quoted
            return ""
        if match["single"] is not None:
            return f"'{expand_text(one, match['single'], scope)}'" if quoted else match["single"]
        return _variable(one, match, scope)

    expanded = _EXPANSION.sub(value, text)
    if unknown := re.search(r"\$\{[^}]*\}?", _EXPANSION.sub("", text)):
        raise one.error(f"{unknown[0]}: the expansion has no support here")
    return expanded


def expand_text(one: Instruction, text: str, scope: Mapping[str, str]) -> str:
    """Return a here-document's text with its variables expanded; quotes stay."""

    def value(match: re.Match[str]) -> str:
        if (escaped := match["escaped"]) is not None:
            return escaped if escaped in "$\\`" else match[0]
        if match["single"] is not None:
            return f"'{expand_text(one, match['single'], scope)}'"
        return match[0] if match["double"] else _variable(one, match, scope)

    return _EXPANSION.sub(value, text)


def _variable(one: Instruction, match: re.Match[str], scope: Mapping[str, str]) -> str:
    name = match["plain"] or match["name"]
    found, operator = scope.get(name), match["operator"] or ""
    has = bool(found) if operator.startswith(":") else found is not None
    if operator.endswith("-") and not has:
        return expand_word(one, match["word"], scope)
    if operator.endswith("+"):
        return expand_word(one, match["word"], scope) if has else ""
    if operator.endswith("?") and not has:
        raise one.error(f"{name}: {match['word'] or 'has no value'}")
    return found or ""
