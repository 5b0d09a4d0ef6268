# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Images built from Dockerfiles, without Docker: what a sandbox finds in them, and what is built again."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.dockerfile.builder import DockerfileRequest, build_dockerfile
from nemo_gym_prorl.sandbox.images.entries import ignore_progress
from nemo_gym_prorl.sandbox.images.store import ImageStore
from nemo_gym_prorl.sandbox.provider import SingularityProvider
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from tests.conftest import tiered
from tests.sandbox.running import created


pytestmark = pytest.mark.sandbox

BASE = "python:3.13-slim"

DOCKERFILE = """\
# syntax=docker/dockerfile:1
ARG WORD=hello
FROM python:3.13-slim AS tools
RUN mkdir -p /opt/tool && printf '#!/bin/sh\\necho tool "$@"\\n' > /opt/tool/run && chmod 755 /opt/tool/run && \\
    ln -s /opt/tool/run /usr/local/bin/tool

FROM python:3.13-slim
ARG WORD
ENV GREETING="$WORD, world" PATH=/opt/tool:$PATH
WORKDIR /srv/app
COPY --from=tools /opt/tool /opt/tool
COPY --from=tools /usr/local/bin/tool /usr/local/bin/renamed
COPY . .
COPY --chmod=600 notes.txt /etc/notes
COPY notes.txt /etc
ADD data.tar.gz /srv/data/
COPY <<EOF /etc/greeting
$GREETING
EOF
RUN ["/bin/sh", "-c", "echo $GREETING > said"]
RUN <<EOF
set -e
pwd > where
test -x deep/run.sh
run from-a-run-line >> where
EOF
RUN python3 - <<'EOF'
open("percent", "w").write("%post\\n")
EOF
LABEL a=b
EXPOSE 80
CMD ["tool"]
"""


@pytest.fixture
def order(tmp_path: Path, image: Path) -> DockerfileRequest:
    import tarfile

    folder = tmp_path / "task"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/run.sh").write_text("#!/bin/sh\n")
    (folder / "deep/run.sh").chmod(0o755)
    (folder / "notes.txt").write_text("a note\n")
    (folder / "secret").write_text("x")
    (folder / "link").symlink_to("notes.txt")
    (folder / ".dockerignore").write_text("secret\nDockerfile\n")
    (folder / "Dockerfile").write_text(DOCKERFILE)
    with tarfile.open(folder / "data.tar.gz", "w:gz") as archive:
        archive.add(folder / "notes.txt", "inner/notes.txt")
    return DockerfileRequest(folder, "task", replaced={BASE: str(image)})


async def said(image: Path, *commands: str) -> list[str]:
    """Output of commands in one sandbox."""
    provider = SingularityProvider()
    async with created(provider, image=str(image)) as handle:
        return [(await provider.exec(handle, command)).stdout for command in commands]


async def test_a_sandbox_finds_what_the_dockerfile_says(
    order: DockerfileRequest, store: ImageStore, runtime: Runtime
) -> None:
    runtime.activate()
    built = build_dockerfile(order, store, runtime, ignore_progress)
    looked = {
        "pwd; ls -A": "/srv/app\n.dockerignore\ndata.tar.gz\ndeep\nlink\nnotes.txt\npercent\nsaid\nwhere\n",
        "cat said where percent": "hello, world\n/srv/app\ntool from-a-run-line\n%post\n",
        "cat /etc/notes /etc/notes.txt /etc/greeting; stat -c %a /etc/notes": "a note\na note\nhello, world\n600\n",
        "readlink link; cat /srv/data/inner/notes.txt": "notes.txt\na note\n",
        "run; renamed; echo $GREETING; ls -d /.prorl-build": "tool\ntool\nhello, world\n",
    }
    assert dict(zip(looked, await said(built, *looked), strict=True)) == looked


def test_an_unchanged_stage_is_built_once(order: DockerfileRequest, store: ImageStore, runtime: Runtime) -> None:
    steps: list[str] = []

    def build(order: DockerfileRequest) -> list[str]:
        steps.clear()
        build_dockerfile(order, store, runtime, steps.append)
        return [step for step in steps if step.startswith("building")]

    text = "FROM python:3.13-slim AS one\nRUN true\nFROM one\nCOPY notes.txt /"
    order.dockerfile.write_text(text)
    assert build(order) == ["building stage one on python:3.13-slim", "building stage 1 on one"]
    assert build(order) == []
    order.dockerfile.write_text(f"# a comment\n{text}")
    assert build(order) == []
    (order.context / "notes.txt").write_text("changed\n")
    assert build(order) == ["building stage 1 on one"]
    assert build(replace(order, name="another")) == [], "stages are shared under any name"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("RUN echo first >&2; exit 7", "line 2 failed with exit code 7"),
        ("RUN no-such-program", "line 2 failed with exit code 127"),
        ("COPY nothing /x", "line 2: nothing: no such file in the context"),
        ("COPY --from=3 /x /y", "--from=3: there is no such stage"),
        (
            "RUN rm $(command -v chroot)\nUSER 1234\nRUN true",
            "USER 1234: needs coreutils .* line 4 failed with exit code 1",
        ),
    ],
)
def test_a_step_that_fails_is_named_by_its_line_and_leaves_no_image(
    line: str, says: str, order: DockerfileRequest, store: ImageStore, runtime: Runtime
) -> None:
    order.dockerfile.write_text(f"FROM python:3.13-slim\n{line}\nRUN echo never")
    with pytest.raises((CallerError, InfrastructureError), match=says):
        build_dockerfile(order, store, runtime, ignore_progress)
    assert store.all() == []


def test_a_base_is_replaced_only_by_the_users_word(
    order: DockerfileRequest, store: ImageStore, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_gym_prorl.sandbox.images.pull.time.sleep", lambda _seconds: None)
    order.dockerfile.write_text("FROM localhost:9/none:1\nRUN true")
    with pytest.raises(CallerError, match=f"--replace: no FROM names '{BASE}', only localhost:9/none:1"):
        build_dockerfile(order, store, runtime, ignore_progress)
    with pytest.raises(InfrastructureError, match="localhost:9/none:1"):
        build_dockerfile(replace(order, replaced={}), store, runtime, ignore_progress)


def test_names_of_this_machines_images_are_not_confused_with_others(
    order: DockerfileRequest, store: ImageStore, runtime: Runtime
) -> None:
    with pytest.raises(CallerError, match="--name: 'kernel' is the name of a shipped image"):
        build_dockerfile(replace(order, name="kernel"), store, runtime, ignore_progress)
    store.name("mine", "any")
    for local in ("default", "mine"):
        order.dockerfile.write_text(f"FROM {local}\nRUN true")
        with pytest.raises(CallerError, match=f"FROM: .*add --replace {local}={local} "):
            build_dockerfile(replace(order, replaced={}), store, runtime, ignore_progress)


def test_a_base_with_devices_is_refused(
    order: DockerfileRequest, store: ImageStore, runtime: Runtime, tmp_path: Path
) -> None:
    device = tmp_path / "base/dev/null"
    device.parent.mkdir(parents=True)
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("this user cannot make devices")
    with pytest.raises(CallerError, match="dev/null is a device, which cannot be copied; empty"):
        build_dockerfile(replace(order, replaced={BASE: str(tmp_path / "base")}), store, runtime, ignore_progress)


USERS = """\
RUN printf '%s\\n' app:*:1000:1000::/home/app:/bin/sh 'last:*:77:77::/l:/bin/sh' | head -c -1 >> /etc/passwd
RUN printf '%s\\n' app:x:1000: us:x:55:app >> /etc/group
RUN mkdir -m 770 /of-root /of-us && { chgrp us /of-us || true; }
"""
AS_DOCKER = {
    "temporary folders are the image's": [
        ("RUN touch /tmp/made /var/tmp/made", "cd /; ls -d tmp/made var/tmp/made", "tmp/made\nvar/tmp/made\n"),
        ("WORKDIR /tmp/work\nCOPY notes.txt /tmp/a\nRUN cat ../a > b", "cat /tmp/a /tmp/work/b", "a note\na note\n"),
    ],
    "variables are the image's": [
        ("ARG user=u\nARG group=g\nENV owners=o\nRUN echo $user $group $owners > /1", "cat /1", "u g o\n"),
        ("RUN env | grep -c -E '^(APPTAINER|SINGULARITY|LD_|LANG|OLDPWD)' > /2 || true", "cat /2", "0\n"),
        ("ENV HOME=/h\nRUN echo $HOME > /3", "cat /3", "/h\n"),
        ("ENV PATH=/none\nRUN echo $PATH > /4", "/bin/cat /4", "/none\n"),
    ],
    "processes end with their command": [
        ("RUN sleep 987 & true\nRUN cat; cat /proc/*/cmdline | tr '\\0' ' ' > /1", "grep -c 'sleep 987' /1", "0\n"),
        ("RUN <<EOF\n#!/bin/sh\necho $0 > /2; exit 0\nEOF", "test -s /2; ls $(cat /2) 2> /dev/null | wc -l", "0\n"),
    ],
    "files have their places": [
        ("COPY notes.txt deep .", "cd /; ls notes.txt run.sh", "notes.txt\nrun.sh\n"),
        ("RUN mkdir /d; ln -s d /l; ln -s /d/f /m\nCOPY notes.txt /l\nCOPY notes.txt /m", "ls /d", "f\nnotes.txt\n"),
        ("COPY rootfs /", "test -L /bin && ls /bin/placed", "/bin/placed\n"),
        ('COPY ["sp ace/-it\\\\\'s \\\\$HOME", "/q q/"]', "ls '/q q'", "-it's $HOME\n"),
        ("COPY sp?ace/* /q/name", "cat /q/name", "x"),
        ("COPY none* notes.txt /n/", "ls /n", "notes.txt\n"),
        ("COPY empty /e/f", "ls -A /e/f; stat -c %a /e/f", "755\n"),
        ("COPY --chmod=711 deep /c/d", "stat -c %a /c /c/d /c/d/run.sh", "711\n711\n711\n"),
    ],
    "users have their folders and groups": [
        (f"{USERS}USER app\nWORKDIR /a/b\nRUN touch x", "ls /a/b", "x\n"),
        ("USER root\nCOPY --chown=app deep /c/d\nUSER app\nRUN touch /c/d/x", "ls /c/d", "run.sh\nx\n"),
        ("RUN touch /of-us/1\nUSER 9:us\nRUN touch /of-us/2", "ls /of-us", "1\n2\n"),
        ("USER 77\nRUN echo $HOME > /tmp/1", "cat /tmp/1", "/l\n"),
        ("USER 1234\nRUN touch /of-root/1", "ls /of-root", "1\n"),
    ],
    "users need no coreutils": [
        (f"{USERS}RUN rm $(command -v chroot)\nUSER app\nRUN echo \"$HOME it's\" > /of-us/3", "cat /of-us/3",
         "/home/app it's\n"),
        ("USER 1000:1000\nRUN env | grep -c -e ^USER= -e ^LOGNAME= > /tmp/4 || true", "cat /tmp/4", "0\n"),
        ("USER root\nRUN test $(id -u) = 0 && touch /5", "ls /5", "/5\n"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", tiered(AS_DOCKER, [name for name in AS_DOCKER if "have their" in name]))
async def test_an_image_is_as_docker_builds_it(
    what: str, order: DockerfileRequest, store: ImageStore, runtime: Runtime
) -> None:
    runtime.activate()
    cases = AS_DOCKER[what]
    for name in ("rootfs/bin/placed", "sp ace/-it's $HOME"):
        (order.context / name).parent.mkdir(parents=True)
        (order.context / name).write_text("x")
    (order.context / "empty").mkdir(0o700)
    order.dockerfile.write_text("\n".join([f"FROM {BASE}", *(lines for lines, _command, _output in cases)]))
    built = build_dockerfile(order, store, runtime, ignore_progress)
    commands = [command for _lines, command, _output in cases]
    found = await said(built, *(f"PATH=/bin:/usr/bin; {command}" for command in commands))
    assert dict(zip(commands, found, strict=True)) == {command: output for _lines, command, output in cases}
