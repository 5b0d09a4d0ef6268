# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Dockerfiles: what each instruction means, what is refused and by which line. No container is started here."""

import os
import tarfile
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.dockerfile.build_steps import CopyStep, FolderStep, RunStep, Step, plan, split_stages
from nemo_gym_prorl.sandbox.dockerfile.context import (
    CopySource,
    IgnoreRules,
    plan_copy,
    read_ignore_rules,
    write_archive,
)
from nemo_gym_prorl.sandbox.dockerfile.instructions import parse
from nemo_gym_prorl.sandbox.images.oci_config import DEFAULT_PATH, OciConfig


def planned(text: str, base: OciConfig | None = None) -> tuple[list[Step], OciConfig]:
    """Steps and configuration of the last stage of a Dockerfile."""
    stages = split_stages(parse(text), "x86_64")
    return plan(stages[-1], base or OciConfig({}), "x86_64")


def commands(text: str) -> list[tuple[str, ...]]:
    steps, _config = planned(text)
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
        ("RUN a\\\\\nLABEL b=c", ("/bin/sh", "-c", "a\\\\")),
        ("RUN a \\ \t\r\n b\r\nLABEL b=c\r", ("/bin/sh", "-c", "a  b")),
        ("RUN echo $((1<<N)) a<<b", ("/bin/sh", "-c", "echo $((1<<N)) a<<b")),
        ("RUN cat 0<<my-end.txt\na\nmy-end.txt", ("/bin/sh", "-c", "cat 0<<my-end.txt\na\nmy-end.txt")),
        ("RUN a <<'the end' <<B\na\nthe end\nB", ("/bin/sh", "-c", "a <<'the end' <<B\na\nthe end\nB")),
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
        ("ARG V=1\nENV A=v$V", {"A": "v1"}),
        ("ARG TARGETARCH\nENV A=$TARGETARCH", {"A": "amd64"}),
        ("ENV PATH=/x:$PATH", {"PATH": f"/x:{DEFAULT_PATH}"}),
        ('ENV A ""', {"A": ""}),
        ('ENV A="\'\\"\'" B="it\'s "\'$x\' C="a\\b"', {"A": "'\"'", "B": "it's $x", "C": "a\\b"}),
    ],
)
def test_variables_are_expanded_as_buildkit_does(lines: str, env: dict[str, str]) -> None:
    _steps, config = planned(f"FROM x\n{lines}")
    assert config.env == {"PATH": DEFAULT_PATH, **env}


def test_arguments_reach_commands_and_the_stages_on_their_stage() -> None:
    text = "ARG V=1\nFROM x AS a\nARG V\nARG W=2\nENV W=3\nRUN one\nFROM A\nRUN two\nFROM x\nRUN three"
    stages = split_stages(parse(text), "x86_64")
    [first], config = plan(stages[0], OciConfig({}), "x86_64")
    assert isinstance(first, RunStep)
    assert (first.env["V"], first.env["W"]) == ("1", "3")
    [second], _config = plan(stages[1], config, "x86_64")
    assert isinstance(second, RunStep)
    assert (second.env["V"], second.env["W"]) == ("1", "3")
    [third], _config = plan(stages[2], OciConfig({}), "x86_64")
    assert isinstance(third, RunStep)
    assert not third.env.keys() & {"V", "W"}


def test_folder_and_user_are_carried_along() -> None:
    steps, config = planned(
        "FROM x\nWORKDIR /a\nWORKDIR b/../c\nUSER me:us\nRUN one\nUSER root\nRUN two", OciConfig({}, "/base", "app")
    )
    assert [step for step in steps if isinstance(step, FolderStep)] == [
        FolderStep(2, "/a", "app"),
        FolderStep(3, "/a/c", "app"),
    ]
    runs = [step for step in steps if isinstance(step, RunStep)]
    assert [(step.command[-1], step.workdir, step.user) for step in runs] == [
        ("one", "/a/c", "me:us"),
        ("two", "/a/c", ""),
    ]
    assert (config.workdir, config.user) == ("/a/c", "")
    assert planned("FROM x\nRUN one", OciConfig({}, "/base", "app"))[1].user == "app"


def test_the_shell_of_a_base_stays() -> None:
    _steps, config = planned('FROM x\nSHELL ["/bin/bash", "-c"]')
    steps, _config = planned("FROM x\nRUN a", OciConfig.parse(config.to_json()))
    assert [step.command for step in steps if isinstance(step, RunStep)] == [("/bin/bash", "-c", "a")]


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
        ("CMD --port 80", "line 2: CMD: --port is no flag of this instruction"),
        ("ENV A=${B:-x", "} is missing"),
        ("ENV A", "line 2: ENV: 'A': needs NAME=VALUE"),
        ("ENV A=a\\\n b", "line 2: ENV: 'b': needs NAME=VALUE"),
        ('RUN "' + '\\"' * 200_000 + " <<E", "line 2: RUN: the here-document E has no end"),
        ("FRMO y", "line 2: FRMO: has no support here"),
    ],
)
def test_what_has_no_support_is_refused_with_its_line(line: str, reason: str) -> None:
    with pytest.raises(CallerError) as refused:
        planned(f"FROM x\n{line}")
    assert reason in refused.value.reason


@pytest.mark.parametrize(
    "text", ["", "# nothing", "RUN x\nFROM y", "# syntax=my/frontend\nFROM x", "# escape=`\nFROM x"]
)
def test_what_is_no_dockerfile_is_refused(text: str) -> None:
    with pytest.raises(CallerError):
        split_stages(parse(text), "x86_64")


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    for name in ("app/main.py", "app/deep/x.pyc", "docs/a.md", "docs/b.md", ".git/HEAD", "secret.env", "run.sh"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "run.sh").chmod(0o755)
    (folder / "out").symlink_to("/etc")
    (folder / "loop").symlink_to("loop")
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
            ".git\n*.env\ndocs\n!docs/b.md\nout\nhost\nloop\nto-app\n.dockerignore\napp",
            {"docs", "docs/b.md", "run.sh"},
        ),
        ("COPY docs/*.md none* /x/", "", {"a.md", "b.md"}),
        ("COPY none* /x/", "", set()),
        ("COPY run.sh docs .", "", {"run.sh", "a.md", "b.md"}),
        ("COPY ../run.sh /x", "", {"run.sh"}),
        ("COPY * /x/", "*\n!.git\n!run.sh", {"HEAD", "run.sh"}),
        ("COPY to-app /x", "app/deep", {"main.py"}),
        ("COPY app/deep /x", "**.pyc", {"x.pyc"}),
        ("COPY app/deep /x", "**/x.*", set()),
        ("COPY . /x", "**\n!**/x.pyc", {"app", "app/deep", "app/deep/x.pyc"}),
        ('COPY ["run.sh", "/a b"]', "", {"run.sh"}),
        ("COPY <<a.txt <<'b c' /x/\na.txt\nb c", "", {"a.txt", "b c"}),
        ("COPY <<EOF <<OTHER /x/\na\nEOF\nb\nOTHER", "", {"EOF", "OTHER"}),
    ],
)
def test_what_a_line_copies(line: str, ignore: str, names: set[str], context: Path) -> None:
    assert set(copied(line, context, ignore)) == names


@pytest.mark.parametrize(
    "source", ["none", "../copied.tar", "out/hostname", "secret.env", "docs", "run.sh/x", "out", "loop"]
)
def test_a_source_outside_the_context_or_ignored_is_refused(source: str, context: Path) -> None:
    with pytest.raises(CallerError, match=r"line 2: .*no such file in the context"):
        copied(f"COPY {source} /x", context, "*.env\ndocs")


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


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("COPY <<E /x\n'$A' \"\\$A\" \\n\\\\ it's\nE", "'b' \"$A\" n\\ it's\n"),
        ("COPY <<'E' /x\n'$A' \\n\nE", "'$A' \\n\n"),
        ('COPY <<-"E" /x\r\n\t\ta\tb\r\n\tE\r\n', "a\tb\r\n"),
    ],
)
def test_the_text_of_a_here_document(lines: str, text: str, context: Path) -> None:
    copied(f"ARG A=b\n{lines}", context)
    with tarfile.open(context.parent / "copied.tar") as archive:
        file = archive.extractfile("E")
        assert file is not None
        assert file.read().decode() == text


def test_a_name_need_not_be_text(context: Path) -> None:
    (context / "docs" / os.fsdecode(b"\xff")).write_text("x")
    (context / "docs" / "a\nb").write_text("x")
    [step] = [one for one in planned("FROM x\nCOPY docs /x")[0] if isinstance(one, CopyStep)]
    assert len(plan_copy(step, CopySource(context)).digest()) == 64
    assert os.fsdecode(b"\xff") in copied("COPY docs /x", context)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x28\xb5\x2f\xfd....", "line 2: data: zstd has no support here"),
        (None, "line 2: data: the archive can't be read"),
    ],
)
def test_an_archive_that_cannot_be_read_is_refused(data: bytes | None, reason: str, context: Path) -> None:
    with tarfile.open(context / "whole", "w:gz") as packed:
        (context / "big").write_bytes(os.urandom(100_000))
        packed.add(context / "big", "big")
    (context / "data").write_bytes(data or (context / "whole").read_bytes()[:50_000])
    with pytest.raises(CallerError, match=reason):
        copied("ADD data /x/", context)
    assert set(copied("COPY data /x/", context)) == {"data"}


@pytest.mark.parametrize(
    ("pattern", "line", "reason"),
    [
        ("[z-a]", "COPY . /x", r"\[z-a\]: is no pattern"),
        ("", "COPY [z-a] /x", r"\[z-a\]: is no pattern"),
    ],
)
def test_what_is_no_pattern_is_refused(pattern: str, line: str, reason: str, context: Path) -> None:
    with pytest.raises(CallerError, match=reason):
        copied(line, context, pattern)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("*b", "abb", "abc/b/x"),
        ("a/**", "a/b/c", "b/a"),
        ("**/a/**/b", "x/a/a/y/b", "xa/b"),
        ("[^a-c]?[[x]\\*", "dq[*", "aq[*"),
        ("**", "a/b", ""),
    ],
)
def test_patterns_match_as_in_go(pattern: str, matching: str, others: str) -> None:
    rules = IgnoreRules.parse(pattern)
    assert rules.excludes(matching)
    assert not others or not rules.excludes(others)


def test_the_last_rule_that_matches_decides() -> None:
    rules = IgnoreRules.parse("# a comment\n\n/a\n!a/b\na/b/c\n")
    assert [path for path in ("a", "a/x", "a/b", "a/b/c", "b") if rules.excludes(path)] == ["a", "a/x", "a/b/c"]
