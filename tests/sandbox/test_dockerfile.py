# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Dockerfiles: what each instruction means, what is refused and by which line. No container is started here."""

import tarfile
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.images.build_context import (
    CopySource,
    IgnoreRules,
    plan_copy,
    read_ignore_rules,
    write_archive,
)
from nemo_gym_prorl.sandbox.images.dockerfile import parse
from nemo_gym_prorl.sandbox.images.dockerfile_stages import CopyStep, RunStep, Step, plan, split_stages
from nemo_gym_prorl.sandbox.images.oci_config import DEFAULT_PATH, OciConfig


def planned(text: str, base: OciConfig | None = None, **args: str) -> tuple[list[Step], OciConfig]:
    """Steps and configuration of the last stage of a Dockerfile."""
    stages = split_stages(parse(text), args, "x86_64")
    return plan(stages[-1], base or OciConfig({}), args, "x86_64")


def commands(text: str, **args: str) -> list[tuple[str, ...]]:
    steps, _config = planned(text, **args)
    return [step.command for step in steps if isinstance(step, RunStep)]


@pytest.mark.parametrize(
    ("lines", "command"),
    [
        ("RUN a && b", ("/bin/sh", "-c", "a && b")),
        ('RUN ["a", "b c"]', ("a", "b c")),
        ("RUN [ -f /x ] && y", ("/bin/sh", "-c", "[ -f /x ] && y")),
        ("run a \\\n  # a comment\n\n  b", ("/bin/sh", "-c", "a   b")),
        ("RUN echo $A '${B}' \\$C", ("/bin/sh", "-c", "echo $A '${B}' \\$C")),
        ('SHELL ["/bin/bash", "-lc"]\nRUN a', ("/bin/bash", "-lc", "a")),
        ("RUN <<EOF\na\n  b\nEOF", ("/bin/sh", "-c", "a\n  b\n")),
        ("RUN <<-EOF\n\ta\n\tEOF\n", ("/bin/sh", "-c", "a\n")),
        ("RUN python3 <<'E' && c\nprint('$x')\nE", ("/bin/sh", "-c", "python3 <<'E' && c\nprint('$x')\nE")),
        ("RUN echo '<<EOF' a", ("/bin/sh", "-c", "echo '<<EOF' a")),
        ("RUN cat <<< word", ("/bin/sh", "-c", "cat <<< word")),
        ("RUN --mount=type=cache,target=/c pip install x", ("/bin/sh", "-c", "pip install x")),
    ],
)
def test_run_lines_reach_the_shell_as_they_stand(lines: str, command: tuple[str, ...]) -> None:
    assert commands(f"FROM x\n{lines}") == [command]


def test_a_script_in_a_here_document_runs_by_its_own_interpreter() -> None:
    [(*_shell, text)] = commands("FROM x\nRUN <<EOF\n#!/usr/bin/env python3\nprint('$a')\nEOF")
    assert "#!/usr/bin/env python3\nprint('$a')\n" in text


@pytest.mark.parametrize(
    ("lines", "env"),
    [
        ("ENV A=1 B=2", {"A": "1", "B": "2"}),
        ("ENV A some words", {"A": "some words"}),
        ("ENV A=\"a b\" B=c\\ d C='$A'", {"A": "a b", "B": "c d", "C": "$A"}),
        ("ENV A=1\nENV A=2 B=$A", {"A": "2", "B": "1"}),
        ("ENV B=${A:-x} C=${A-y} D=${PATH:+z} E=${A:+w}", {"B": "x", "C": "y", "D": "z", "E": ""}),
        ("ENV A=x\nENV B=${NONE:-$A/y}", {"A": "x", "B": "x/y"}),
        ('ENV A=\\$HOME B="\\$x"', {"A": "$HOME", "B": "$x"}),
        ("ENV A=a\\\n b", {"A": "a"} | {"b": ""}),
        ("ARG V=1\nENV A=v$V", {"A": "v1"}),
        ("ARG V\nENV A=v$V", {"A": "vgiven"}),
        ("ARG TARGETARCH\nENV A=$TARGETARCH", {"A": "amd64"}),
        ("ENV PATH=/x:$PATH", {"PATH": f"/x:{DEFAULT_PATH}"}),
    ],
)
def test_variables_are_expanded_as_buildkit_does(lines: str, env: dict[str, str]) -> None:
    if "b" in env:
        with pytest.raises(CallerError, match="line 2: ENV: 'b': needs NAME=VALUE"):
            planned(f"FROM x\n{lines}")
        return
    args = {} if "V=1" in lines else {"V": "given"}
    _steps, config = planned(f"FROM x\n{lines}", **args)
    assert config.env == {"PATH": DEFAULT_PATH, **env}


def test_arguments_reach_commands_and_end_with_their_stage() -> None:
    text = "ARG V=1\nFROM x AS a\nARG V\nARG W=2\nENV W=3\nRUN one\nFROM a\nRUN two"
    stages = split_stages(parse(text), {}, "x86_64")
    [first], config = plan(stages[0], OciConfig({}), {}, "x86_64")
    assert isinstance(first, RunStep)
    assert (first.env["V"], first.env["W"]) == ("1", "3")
    [second], _config = plan(stages[1], config, {}, "x86_64")
    assert isinstance(second, RunStep)
    assert "V" not in second.env
    assert second.env["W"] == "3"


def test_folder_and_user_are_carried_along() -> None:
    steps, config = planned(
        "FROM x\nWORKDIR /a\nWORKDIR b/../c\nUSER me:us\nRUN one\nUSER root\nRUN two", OciConfig({}, "/base", "app")
    )
    runs = [step for step in steps if isinstance(step, RunStep)]
    assert [(step.command[-1], step.workdir, step.user) for step in runs] == [
        ("/a", "/", ""),
        ("/a/c", "/", ""),
        ("one", "/a/c", "me"),
        ("two", "/a/c", ""),
    ]
    assert (config.workdir, config.user) == ("/a/c", "")
    assert planned("FROM x\nRUN one", OciConfig({}, "/base", "app"))[1].user == "app"


@pytest.mark.parametrize(
    ("lines", "entrypoint"),
    [
        ("", ("base",)),
        ('CMD ["a"]', ("a",)),
        ('ENTRYPOINT ["e"]\nCMD ["a"]', ("e", "a")),
        ('CMD ["a"]\nENTRYPOINT ["e"]', ("e", "a")),
        ("ENTRYPOINT e f", ("/bin/sh", "-c", "e f")),
    ],
)
def test_the_program_of_the_image(lines: str, entrypoint: tuple[str, ...]) -> None:
    assert planned(f"FROM x\n{lines}", OciConfig({}, entrypoint=("base",)))[1].entrypoint == entrypoint


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("ONBUILD RUN x", "line 2: ONBUILD: has no support here"),
        ("RUN --mount=type=secret,id=x y", "line 2: RUN: --mount=type=secret,id=x has no support here"),
        ("RUN --mount=target=/x y", "line 2: RUN: --mount=target=/x has no support here"),
        ("RUN --security=insecure y", "line 2: RUN: --security=insecure has no support here"),
        ("ADD https://example.org/x /y", "line 2: ADD: https://example.org/x: a download has no support here"),
        ("ADD git@example.org:x.git /y", "a download has no support here"),
        ("COPY --parents a b", "line 2: COPY: --parents=true has no support here"),
        ("COPY a b c", "line 2: COPY: c: must end with / where there are several sources"),
        ("COPY a", "line 2: COPY: needs at least one source, and a target"),
        ("FROM scratch", "line 2: FROM: an empty base has no support"),
        ("FROM --platform=linux/riscv64 y", "line 2: FROM: --platform=linux/riscv64 has no support here"),
        ("SHELL bash", "line 2: SHELL: needs a JSON list"),
        ("RUN <<EOF\nx", "line 2: RUN: the here-document EOF has no end"),
        ("ENV A=${B/x/y}", "the expansion has no support here"),
        ('ENV A="${B:?is missing}"', "line 2: ENV: B: is missing"),
        ('ENV A="x', "line 2: ENV: a quote has no end"),
        ("FRMO y", "line 2: FRMO: has no support here"),
    ],
)
def test_what_has_no_support_is_refused_with_its_line(line: str, reason: str) -> None:
    with pytest.raises(CallerError) as refused:
        planned(f"FROM x\n{line}")
    assert reason in refused.value.reason


@pytest.mark.parametrize("text", ["", "# nothing", "RUN x\nFROM y", "# syntax=my/frontend\nFROM x"])
def test_what_is_no_dockerfile_is_refused(text: str) -> None:
    with pytest.raises(CallerError):
        split_stages(parse(text), {}, "x86_64")


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    for name in ("app/main.py", "app/deep/x.pyc", "docs/a.md", "docs/b.md", ".git/HEAD", "secret.env", "run.sh"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "run.sh").chmod(0o755)
    (folder / "out").symlink_to("/etc")
    (folder / "host").symlink_to("/etc/hostname")
    (folder / "to-app").symlink_to("app")
    return folder


def copied(line: str, context: Path, ignore: str = "") -> dict[str, tarfile.TarInfo]:
    """Archive members of a COPY or ADD line by name."""
    (context / ".dockerignore").write_text(ignore)
    [step] = [one for one in planned(f"FROM x\n{line}")[0] if isinstance(one, CopyStep)]
    source = CopySource(context, read_ignore_rules(context, context / "Dockerfile"))
    archive = context.parent / "copied.tar"
    write_archive(plan_copy(step, source), step, archive)
    with tarfile.open(archive) as opened:
        return {member.name: member for member in opened}


@pytest.mark.parametrize(
    ("line", "ignore", "names"),
    [
        ("COPY app /x", "", {"main.py", "deep", "deep/x.pyc"}),
        ("COPY to-app /x", "", {"main.py", "deep", "deep/x.pyc"}),
        ("COPY run.sh /x", "", {"run.sh"}),
        ("COPY docs/*.md run.sh /x/", "", {"a.md", "b.md", "run.sh"}),
        ("COPY docs/[a]?md /x/", "", {"a.md"}),
        ("COPY . /x", "*\n!app/main.py", {"app", "app/main.py"}),
        ("COPY app /x", "**/*.pyc", {"main.py", "deep"}),
        (
            "COPY . /x",
            ".git\n*.env\ndocs\n!docs/b.md\nout\nhost\nto-app\n.dockerignore\napp",
            {"docs", "docs/b.md", "run.sh"},
        ),
        ("COPY <<EOF <<OTHER /x/\na\nEOF\nb\nOTHER", "", {"EOF", "OTHER"}),
    ],
)
def test_what_a_line_copies(line: str, ignore: str, names: set[str], context: Path) -> None:
    assert set(copied(line, context, ignore)) == names


@pytest.mark.parametrize("source", ["none", "../copied.tar", "out/hostname", "secret.env"])
def test_a_source_outside_the_context_or_ignored_is_refused(source: str, context: Path) -> None:
    with pytest.raises(CallerError, match=r"line 2: .*no such file in the context"):
        copied(f"COPY {source} /x", context, "*.env")


def test_links_are_copied_as_links_and_never_followed_to_this_machine(context: Path) -> None:
    members = copied("COPY . /x", context)
    assert members["host"].issym()
    assert members["out"].issym()


def test_owner_permissions_and_archives(context: Path) -> None:
    members = copied("COPY --chown=7:me --chmod=750 run.sh /x", context)
    assert (members["run.sh"].uid, members["run.sh"].gname, members["run.sh"].mode) == (7, "me", 0o750)
    assert copied("COPY run.sh /x", context)["run.sh"].mode & 0o777 == 0o755
    with tarfile.open(context / "data.tgz", "w:gz") as packed:
        packed.add(context / "docs", "docs")
    assert set(copied("ADD data.tgz /x/", context)) == {"docs", "docs/a.md", "docs/b.md"}
    assert set(copied("COPY data.tgz /x/", context)) == {"data.tgz"}


def test_the_last_rule_that_matches_decides() -> None:
    rules = IgnoreRules.parse("# a comment\n\n/a\n!a/b\na/b/c\n")
    assert [path for path in ("a", "a/x", "a/b", "a/b/c", "b") if rules.excludes(path)] == ["a", "a/x", "a/b/c"]
