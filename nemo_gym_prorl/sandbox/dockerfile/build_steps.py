# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Group a Dockerfile's instructions into stages, and convert a stage's instructions to build steps. Pure.

Variables are expanded as BuildKit does: ``$name``, ``${name}``, ``${name:-word}`` and ``${name:+word}`` in every
instruction but ``RUN``, ``CMD`` and ``ENTRYPOINT``, whose text the image's shell expands. An unsupported flag raises
an error that names the line. Only instructions and flags that do not change the image are ignored.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.dockerfile.instructions import HEREDOC, Instruction, expand_text, expand_word, split_words
from nemo_gym_prorl.sandbox.images.oci_config import DEFAULT_PATH, OciConfig


DEFAULT_SHELL = ("/bin/sh", "-c")

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WITHOUT_FLAGS = frozenset({"ARG", "CMD", "ENTRYPOINT", "ENV", "SHELL", "USER", "WORKDIR"})
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class RunStep:
    """A command that runs in the image in ``workdir``, with the variables ``env``, as ``user``: ``USER[:GROUP]``, or
    empty for root."""

    line: int
    command: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str
    user: str


@dataclass(frozen=True, slots=True)
class CopyStep:
    """Files that are copied into the image.

    Attributes:
        line: line number of the instruction.
        sources: patterns of paths, relative to the context or to the root of ``origin``.
        texts: contents by file name, of here-documents.
        target: absolute path in the image; ends with ``/`` if it must be a folder.
        origin: stage name, stage number or image reference of ``--from``; ``None`` for the build context.
        owner: ``USER``, ``USER:GROUP`` or empty for root.
        mode: permission bits of ``--chmod``; ``None`` keeps the permissions of the source.
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


@dataclass(frozen=True, slots=True)
class FolderStep:
    """A folder that is created, with missing parents, unless the folder exists; ``owner`` as in :class:`CopyStep`."""

    line: int
    path: str
    owner: str


type Step = RunStep | CopyStep | FolderStep


@dataclass(frozen=True, slots=True)
class Stage:
    """One ``FROM`` and its instructions.

    Attributes:
        name: name after ``AS``, in lower case; empty if unnamed.
        base: image reference, or name or number of an earlier stage.
        instructions: instructions after ``FROM``, preceded by the ``ARG`` instructions of the base if that is a stage.
        global_args: values of ``ARG`` before the first ``FROM``, visible once the stage declares them.
    """

    name: str
    base: str
    instructions: tuple[Instruction, ...]
    global_args: Mapping[str, str]


def split_stages(instructions: Sequence[Instruction], machine: str) -> list[Stage]:
    """Return the stages of a Dockerfile in order.

    Raises:
        CallerError: there is no ``FROM``, an instruction other than ``ARG`` precedes it, or a base is unusable.
    """
    scope = platform_args(machine)
    global_args: dict[str, str] = {}
    stages: list[Stage] = []
    for one in instructions:
        if one.name == "FROM":
            stages.append(_open_stage(one, {**scope, **global_args}, global_args, machine, stages))
        elif stages:
            stages[-1] = replace(stages[-1], instructions=(*stages[-1].instructions, one))
        elif one.name == "ARG":
            for name, default in _arg_pairs(one, {**scope, **global_args}):
                if default is not None:
                    global_args[name] = default
        else:
            raise one.error("stands before the first FROM")
    if not stages:
        raise CallerError("has no FROM instruction", field="Dockerfile")
    return stages


def platform_args(machine: str) -> dict[str, str]:
    """Return BuildKit's predefined platform arguments, such as ``TARGETARCH``, for an architecture of ``uname -m``."""
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
    env: dict[str, str]
    workdir: str
    user: str
    shell: tuple[str, ...]
    args: dict[str, str] = field(default_factory=dict)

    def scope(self) -> dict[str, str]:
        return {**self.args, **self.env}


def plan(stage: Stage, base: OciConfig, machine: str) -> tuple[list[Step], OciConfig]:
    """Return a stage's build steps in order, and the configuration of the resulting image.

    Raises:
        CallerError: an instruction is wrong or not supported; names the line.
    """
    env = {"PATH": DEFAULT_PATH, **base.env}
    state = _State(env, base.workdir or "/", base.user, base.shell or DEFAULT_SHELL)
    steps: list[Step] = []
    for one in stage.instructions:
        if one.name in _WITHOUT_FLAGS and one.flags:
            raise one.error(f"--{one.flags[0][0]} is no flag of this instruction")
        match one.name:
            case "ARG":
                for name, default in _arg_pairs(one, state.scope()):
                    known = stage.global_args.get(name, platform_args(machine).get(name))
                    value = known if default is None else default
                    if value is not None:
                        state.args[name] = value
            case "ENV":
                state.env |= _env_pairs(one, state.scope())
            case "WORKDIR":
                state.workdir = _absolute(_own_word(one, state), state.workdir)
                steps.append(FolderStep(one.line, state.workdir, _owner_of(state.user)))
            case "USER":
                state.user = _own_word(one, state)
            case "SHELL":
                words = one.words()
                if not words:
                    raise one.error('needs a JSON list, such as ["/bin/bash", "-c"]')
                state.shell = tuple(words)
            case "RUN":
                steps.append(_run_step(one, state))
            case "COPY" | "ADD":
                steps.append(_copy_step(one, state))
            case _:
                pass  # instructions without effect on the image: instructions.parse refuses unknown ones
    user = _owner_of(state.user).partition(":")[0]
    config = OciConfig(state.env, state.workdir, user, shell=state.shell)
    return steps, config


def _owner_of(user: str) -> str:
    return "" if user.partition(":")[0] in ("root", "0") else user


def find_stage(stages: Sequence[Stage], name: str) -> int | None:
    """Return the number of the last stage with this name or number, counted from 0; ``None`` if there is none."""
    found = [index for index, stage in enumerate(stages) if name.lower() == stage.name or name == str(index)]
    return found[-1] if found else None


def _open_stage(
    one: Instruction,
    scope: Mapping[str, str],
    global_args: Mapping[str, str],
    machine: str,
    earlier: Sequence[Stage],
) -> Stage:
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
        raise one.error("the base is empty; give its ARG a default")
    parent = find_stage(earlier, words[0])
    inherited = () if parent is None else tuple(arg for arg in earlier[parent].instructions if arg.name == "ARG")
    return Stage(words[2].lower() if len(words) == 3 else "", words[0], inherited, dict(global_args))


def _run_step(one: Instruction, state: _State) -> RunStep:
    for name, value in one.flags:
        kind = dict(part.partition("=")[::2] for part in value.split(",")).get("type", "bind")
        # Cache and tmpfs mounts only save time and disk space, so a command can use the image's folder instead.
        if not (name == "mount" and kind in ("cache", "tmpfs")) and not (name == "network" and value == "default"):
            raise one.error(f"--{name}={value} has no support here")
    words = one.words()
    if words is None:
        text = one.text
        if one.heredocs:
            only = HEREDOC.fullmatch(one.text.strip())
            if only and one.heredocs[0].body.startswith("#!"):
                return _run_script(one, state)
            text = one.heredocs[0].body if only else "\n".join([one.text, *(doc.raw for doc in one.heredocs)])
        words = [*state.shell, text]
    return RunStep(one.line, tuple(words), state.scope(), state.workdir, _owner_of(state.user))


def _run_script(one: Instruction, state: _State) -> RunStep:
    run = 'f=$(mktemp) && cat > "$f" && chmod +x "$f" && { "$f"; s=$?; rm "$f"; exit $s; }'
    script = f"{{ {run}; }} <<'PRORL_SCRIPT'\n"
    text = f"{script}{one.heredocs[0].body}PRORL_SCRIPT\n"
    return RunStep(one.line, (*DEFAULT_SHELL, text), state.scope(), state.workdir, _owner_of(state.user))


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
                pass  # only changes how Docker stores layers
            case _:
                raise one.error(f"--{name}={value} has no support here")
    words = one.words() or split_words(one, one.text)
    words = [expand_word(one, word, scope) for word in words if not HEREDOC.fullmatch(word)]
    if not words or (len(words) == 1 and not one.heredocs):
        raise one.error("needs at least one source, and a target")
    *sources, target = words
    for source in sources:
        if re.match(r"[a-z][a-z0-9+.-]*://|git@", source):
            raise one.error(f"{source}: a download has no support here; use RUN with curl or git")
    folder = "/" if target.rpartition("/")[2] in ("", ".", "..") else ""
    if len(sources) + len(one.heredocs) > 1 and not folder:
        raise one.error(f"{target}: must end with / where there are several sources")
    path = _absolute(target, state.workdir)
    texts = {doc.name: expand_text(one, doc.body, scope) if doc.expand else doc.body for doc in one.heredocs}
    return CopyStep(
        one.line, tuple(sources), texts, path.rstrip("/") + folder or "/", origin, owner, mode, one.name == "ADD"
    )


def _arg_pairs(one: Instruction, scope: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    for word in split_words(one, one.text):
        name, equals, value = word.partition("=")
        if not _IDENTIFIER.fullmatch(name):
            raise one.error(f"{name!r} is no name of a variable")
        yield name, expand_word(one, value, scope) if equals else None


def _env_pairs(one: Instruction, scope: Mapping[str, str]) -> dict[str, str]:
    words = split_words(one, one.text)
    if words and "=" not in words[0]:
        name, *rest = one.text.split(maxsplit=1)  # the old form: ENV NAME VALUE, where VALUE may have blanks
        if not rest:
            raise one.error(f"{name!r}: needs NAME=VALUE")
        return {expand_word(one, name, scope): expand_word(one, rest[0], scope)}
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise one.error(f"{word!r}: needs NAME=VALUE")
        pairs[expand_word(one, name, scope)] = expand_word(one, value, scope)
    if not pairs:
        raise one.error("needs NAME=VALUE")
    return pairs


def _own_word(one: Instruction, state: _State) -> str:
    value = expand_word(one, one.text, state.scope())
    if not value:
        raise one.error("needs a value")
    return value


def _absolute(path: str, workdir: str) -> str:
    return posixpath.normpath(posixpath.join(workdir, path)).replace("//", "/")
