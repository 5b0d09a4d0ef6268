# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Dockerfiles: text to instructions, and a stage's instructions to build steps. Pure.

Follows the Dockerfile reference of BuildKit (docs.docker.com/reference/dockerfile) for the parts that task images use.
An instruction or flag without support raises an error that names its line; none is skipped in a way that changes the
image. ``EXPOSE``, ``HEALTHCHECK``, ``LABEL``, ``MAINTAINER``, ``STOPSIGNAL`` and ``VOLUME`` do not change files,
variables, user or working folder, so they have no effect here.

Variables are expanded as BuildKit does: ``$name``, ``${name}``, ``${name:-word}`` and ``${name:+word}`` in every
instruction but ``RUN``, ``CMD`` and ``ENTRYPOINT``, whose text is expanded by the image's shell.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.images.oci_config import DEFAULT_PATH, OciConfig


DEFAULT_SHELL = ("/bin/sh", "-c")

_NO_EFFECT = frozenset({"EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "VOLUME"})
_KNOWN = _NO_EFFECT | {"ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "SHELL", "USER", "WORKDIR"}
_DIRECTIVE = re.compile(r"#\s*(syntax|escape|check)\s*=\s*(\S+)\s*$", re.IGNORECASE)
_HEREDOC = re.compile(r"<<(-?)([\"']?)([A-Za-z_][A-Za-z0-9_]*)\2")
_HEREDOC_OWNERS = frozenset({"ADD", "COPY", "RUN"})
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


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


@dataclass(frozen=True, slots=True)
class RunStep:
    """A command that runs in the image, in ``workdir``, with ``env`` set, as ``user`` (empty: root)."""

    line: int
    command: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str
    user: str


@dataclass(frozen=True, slots=True)
class CopyStep:
    """Files that are copied into the image.

    Attributes:
        line: the instruction's.
        sources: patterns, relative to the context or to the root of ``origin``.
        texts: file name to contents, of here-documents.
        target: absolute path in the image; ends with ``/`` if it must be a folder.
        origin: stage name, stage number or image reference of ``--from``; ``None`` for the build context.
        owner: ``USER``, ``USER:GROUP`` or empty for root.
        mode: permission bits of ``--chmod``; ``None`` keeps those of the source.
        unpack: whether local tar archives are unpacked (``ADD``).
    """

    line: int
    sources: tuple[str, ...]
    texts: Mapping[str, str]
    target: str
    origin: str | None
    owner: str
    mode: int | None
    unpack: bool


type Step = RunStep | CopyStep


@dataclass(frozen=True, slots=True)
class Stage:
    """One ``FROM`` and its instructions.

    Attributes:
        name: of ``AS``, lower case; empty without.
        base: image reference, or name or number of an earlier stage.
        instructions: those after ``FROM``.
        global_args: values of ``ARG`` before the first ``FROM``, which a stage sees once it declares them.
    """

    name: str
    base: str
    instructions: tuple[Instruction, ...]
    global_args: Mapping[str, str]


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
            for match in _HEREDOC.finditer(_unquoted(rest)):
                heredoc, number = _read_heredoc(lines, number, match, instruction)
                heredocs.append(heredoc)
        found.append(replace(instruction, flags=flags, text=rest, heredocs=tuple(heredocs)))
    return found


def split_stages(instructions: Sequence[Instruction], args: Mapping[str, str], machine: str) -> list[Stage]:
    """Return the stages of a Dockerfile in order.

    Args:
        instructions: of :func:`parse`.
        args: build arguments given by the user.
        machine: the processor as ``uname -m`` names it.

    Raises:
        CallerError: there is no ``FROM``, something else stands before it, or a base is not usable here.
    """
    scope = platform_args(machine)
    global_args: dict[str, str] = {}
    stages: list[Stage] = []
    for one in instructions:
        if one.name == "FROM":
            stages.append(_open_stage(one, {**scope, **global_args}, global_args, machine))
        elif stages:
            stages[-1] = replace(stages[-1], instructions=(*stages[-1].instructions, one))
        elif one.name == "ARG":
            for name, default in _arg_pairs(one, {**scope, **global_args}):
                value = args.get(name, default)
                if value is not None:
                    global_args[name] = value
        else:
            raise one.error("stands before the first FROM")
    if not stages:
        raise CallerError("has no FROM instruction", field="Dockerfile")
    return stages


def platform_args(machine: str) -> dict[str, str]:
    """Return BuildKit's predefined platform arguments for a processor."""
    architecture = _MACHINES.get(machine, machine)
    return {
        f"{side}{name}": value
        for side in ("TARGET", "BUILD")
        for name, value in (
            ("PLATFORM", f"linux/{architecture}"),
            ("OS", "linux"),
            ("ARCH", architecture),
            ("VARIANT", ""),
        )
    }


@dataclass(slots=True)
class _State:
    """What instructions of a stage have set so far."""

    env: dict[str, str]
    workdir: str
    user: str
    args: dict[str, str] = field(default_factory=dict)
    shell: tuple[str, ...] = DEFAULT_SHELL
    entrypoint: tuple[str, ...] | None = None
    command: tuple[str, ...] | None = None

    def scope(self) -> dict[str, str]:
        return {**self.args, **self.env}


def plan(stage: Stage, base: OciConfig, args: Mapping[str, str], machine: str) -> tuple[list[Step], OciConfig]:
    """Return a stage's build steps in order, and the configuration of the image that they make.

    Args:
        stage: of :func:`split_stages`.
        base: configuration of the base image.
        args: build arguments given by the user.
        machine: the processor as ``uname -m`` names it.

    Raises:
        CallerError: an instruction is wrong or has no support; names its line.
    """
    state = _State({"PATH": DEFAULT_PATH, **base.env}, base.workdir or "/", base.user)
    steps: list[Step] = []
    for one in stage.instructions:
        match one.name:
            case "ARG":
                for name, default in _arg_pairs(one, state.scope()):
                    known = stage.global_args.get(name, platform_args(machine).get(name))
                    value = args.get(name, known if default is None else default)
                    if value is not None:
                        state.args[name] = value
            case "ENV":
                state.env |= _env_pairs(one, state.scope())
            case "WORKDIR":
                _refuse_flags(one)
                state.workdir = _absolute(_own_word(one, state), state.workdir)
                steps.append(RunStep(one.line, ("mkdir", "-p", state.workdir), {}, "/", ""))
            case "USER":
                state.user = _own_word(one, state).partition(":")[0]
            case "SHELL":
                words = one.words()
                if not words:
                    raise one.error('needs a JSON list, such as ["/bin/bash", "-c"]')
                state.shell = tuple(words)
            case "RUN":
                steps.append(_run_step(one, state))
            case "COPY" | "ADD":
                steps.append(_copy_step(one, state))
            case "CMD":
                state.command = _program(one, state)
            case "ENTRYPOINT":
                state.entrypoint = _program(one, state)
            case _:
                pass  # of _NO_EFFECT
    # A base's entrypoint holds its arguments already, so a CMD of the stage replaces both.
    own = (*(state.entrypoint or ()), *(state.command or ()))
    entrypoint = base.entrypoint if state.entrypoint is None and state.command is None else own
    return steps, OciConfig(state.env, state.workdir, _user_of(state.user), entrypoint)


def _user_of(user: str) -> str:
    return "" if user in ("root", "0") else user


def _open_stage(one: Instruction, scope: Mapping[str, str], global_args: Mapping[str, str], machine: str) -> Stage:
    words = [expand_word(one, word, scope) for word in one.text.split()]
    if len(words) not in (1, 3) or (len(words) == 3 and words[1].lower() != "as"):
        raise one.error("needs IMAGE or IMAGE AS NAME")
    for name, value in one.flags:
        here = platform_args(machine)["TARGETPLATFORM"]
        if name != "platform" or expand_word(one, value, scope) != here:
            raise one.error(f"--{name}={value} has no support here; this machine builds {here}")
    if words[0] == "scratch":
        raise one.error("an empty base has no support; start from an image with a shell and tar")
    if not words[0]:
        raise one.error("the base is empty; give its build argument a value")
    return Stage(words[2].lower() if len(words) == 3 else "", words[0], (), dict(global_args))


def _run_step(one: Instruction, state: _State) -> RunStep:
    for name, value in one.flags:
        kind = dict(part.partition("=")[::2] for part in value.split(",")).get("type", "bind")
        # A cache or a memory file system only saves time and room: the command finds an ordinary folder instead.
        if not (name == "mount" and kind in ("cache", "tmpfs")) and not (name == "network" and value == "default"):
            raise one.error(f"--{name}={value} has no support here")
    words = one.words()
    if words is None:
        text = one.text
        if one.heredocs:
            only = _HEREDOC.fullmatch(one.text.strip())
            if only and one.heredocs[0].body.startswith("#!"):
                return _run_script(one, state)
            text = one.heredocs[0].body if only else "\n".join([one.text, *(doc.raw for doc in one.heredocs)])
        words = [*state.shell, text]
    return RunStep(one.line, tuple(words), state.scope(), state.workdir, _user_of(state.user))


def _run_script(one: Instruction, state: _State) -> RunStep:
    """Run a here-document that names its own interpreter, as a file."""
    script = '{ f=$(mktemp) && cat > "$f" && chmod +x "$f" && "$f"; } <<\'PRORL_SCRIPT\'\n'
    text = f"{script}{one.heredocs[0].body}PRORL_SCRIPT\n"
    return RunStep(one.line, (*DEFAULT_SHELL, text), state.scope(), state.workdir, _user_of(state.user))


def _copy_step(one: Instruction, state: _State) -> CopyStep:
    scope = state.scope()
    origin, owner, mode = None, "", None
    for name, value in one.flags:
        value = expand_word(one, value, scope)
        match name:
            case "from" if one.name == "COPY":
                origin = value
            case "chown":
                owner = value
            case "chmod" if re.fullmatch("[0-7]{3,4}", value):
                mode = int(value, 8)
            case "link" if value in ("true", "false"):
                pass  # says how layers are stored
            case _:
                raise one.error(f"--{name}={value} has no support here")
    words = one.words() or _split_words(one, one.text)
    words = [expand_word(one, word, scope) for word in words if not _HEREDOC.fullmatch(word)]
    if not words or (len(words) == 1 and not one.heredocs):
        raise one.error("needs at least one source, and a target")
    *sources, target = words
    for source in sources:
        if re.match(r"[a-z][a-z0-9+.-]*://|git@", source):
            raise one.error(f"{source}: a download has no support here; use RUN with curl or git")
    if len(sources) + len(one.heredocs) > 1 and not target.endswith("/"):
        raise one.error(f"{target}: must end with / where there are several sources")
    folder = "/" if target.endswith("/") or target in (".", "..") or target.endswith("/.") else ""
    path = _absolute(target, state.workdir)
    texts = {doc.name: expand_text(one, doc.body, scope) if doc.expand else doc.body for doc in one.heredocs}
    return CopyStep(
        one.line, tuple(sources), texts, path.rstrip("/") + folder or "/", origin, owner, mode, one.name == "ADD"
    )


def _program(one: Instruction, state: _State) -> tuple[str, ...]:
    words = one.words()
    return tuple(words) if words is not None else (*state.shell, one.text)


def _arg_pairs(one: Instruction, scope: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    for word in _split_words(one, one.text):
        name, equals, value = word.partition("=")
        if not _IDENTIFIER.fullmatch(name):
            raise one.error(f"{name!r} is no name of a variable")
        yield name, expand_word(one, value, scope) if equals else None


def _env_pairs(one: Instruction, scope: Mapping[str, str]) -> dict[str, str]:
    words = _split_words(one, one.text)
    if words and "=" not in words[0]:
        name, _, value = one.text.partition(" ")  # ENV NAME VALUE WITH SPACES
        words = [f"{name}={value.strip()}"] if value else words
        value = expand_word(one, value.strip(), scope)
        if not value:
            raise one.error("needs NAME=VALUE")
        return {name: value}
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise one.error(f"{word!r}: needs NAME=VALUE")
        pairs[name] = expand_word(one, value, scope)
    if not pairs:
        raise one.error("needs NAME=VALUE")
    return pairs


def _own_word(one: Instruction, state: _State) -> str:
    value = expand_word(one, one.text, state.scope())
    if not value:
        raise one.error("needs a value")
    return value


def _refuse_flags(one: Instruction) -> None:
    for name, value in one.flags:
        raise one.error(f"--{name}={value} has no support here")


def _absolute(path: str, workdir: str) -> str:
    return posixpath.normpath(posixpath.join(workdir, path)).replace("//", "/")


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


def _split_words(one: Instruction, text: str) -> list[str]:
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
