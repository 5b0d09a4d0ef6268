# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Folders of Harbor tasks become rows: what a row says, and what is refused by file or key."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from nemo_gym_prorl.cli.data.convert import convert_harbor
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.harbor import task_folder
from nemo_gym_prorl.tasks.harbor.located_task import LocatedTask
from nemo_gym_prorl.tasks.harbor.task_config import parse_task_config, resolve_variables
from nemo_gym_prorl.tasks.harbor.task_folder import (
    DockerfileFacts,
    HarborRow,
    built_image,
    folder_digest,
    make_row,
)
from tests.tasks.harbor.task_files import write_task


IMAGE = '[environment]\ndocker_image = "us/task:1"\n'
STEPS = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
STEP = ("one", "two")
STEP_FILES = {
    "instruction.md": None,
    "steps/one/instruction.md": "# harbor-canary GUID 1\nFirst.",
    "steps/two/instruction.md": "Second.",
}
SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'


def conf(text: str) -> dict[str, str | None]:
    return {"task.toml": text}


def env(text: str) -> dict[str, str | None]:
    return conf(f"[environment]\n{text}")


def agent(text: str) -> dict[str, str | None]:
    return conf(f"[agent]\n{text}")


def listed(text: str) -> dict[str, str | None]:
    return agent(f'network_mode = "allowlist"\n{text}')


def made(folder: Path, **options: Any) -> dict[str, Any]:
    row = make_row(folder, **options)
    HarborRow.parse(row)
    return row


def found(row: Mapping[str, Any], path: str) -> Any:
    value: Any = row
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list) else value.get(part)
        if value is None:
            return None
    return value


TWO = conf(STEPS) | STEP_FILES
PROMPT, TEXTS = "responses_create_params.input.0.content", "harbor.instructions"
COMPOSE, VERIFIER = "environment/docker-compose.yaml", "harbor.verifier_images."
TESTS_IMAGE = '[verifier.environment]\ndocker_image = "us/tests"'

# Number of the behaviour in the reference, changed files, options, path in the row, value (a start of a text, with …).
ROWS: list[tuple[str, Mapping[str, str | None], Mapping[str, Any], str, Any]] = [
    ("1: canary lines", {"instruction.md": "<!-- a CANARY -->\n# canary x\n\n \nDo it.\n# canary\n"}, {},
     PROMPT, "Do it.\n# canary\n"),
    ("1: no canary line", {"instruction.md": "# Title\nDo it."}, {}, PROMPT, "# Title\nDo it."),
    ("1: byte order mark", {"instruction.md": "\ufeffDo it."}, {}, PROMPT, "Do it."),
    ("2: image before Dockerfile", conf(IMAGE), {}, "image", "docker://us/task:1"),
    ("2: force_build", conf(IMAGE), {"force_build": True}, "image", "harbor-…"),
    ("2: force_build without Dockerfile", conf(IMAGE) | {"environment/Dockerfile": None}, {"force_build": True},
     "image", "docker://us/task:1"),
    ("2: Dockerfile", {}, {}, "image", "harbor-…"),
    ("name of the folder", {}, {}, "instance_id", "task"),
    ("name of the package", conf('[task]\nname = "us/sum"'), {}, "instance_id", "us/sum"),
    ("12: no network", env('allow_internet = false'), {}, "network", "none"),
    ("12: allow_internet loses", env('allow_internet = false\nnetwork_mode = "public"'), {}, "network", "public"),
    ("12: allowed hosts", env('network_mode = "allowlist"\nallowed_hosts = ["*.A.b", "10.0.0.0/8"]'), {},
     "network", ["*.a.b", "10.0.0.0/8"]),
    ("12: agent's phase", agent('network_mode = "no-network"'), {}, "network", "none"),
    ("12: step's phase", STEP_FILES | conf(STEPS.replace("\n[[", '\nagent = {network_mode = "public"}\n[[')
     + 'agent = {network_mode = "public"}'), {}, "network", "public"),
    ("limits: cpu", env("cpus = 2"), {}, "cpu", 2),
    ("limits: memory", env("memory_mb = 2048"), {}, "memory_mib", 2048),
    ("limits: old memory", env('memory = "2G"'), {}, "memory_mib", 2048),
    ("limits: old storage", env('storage = "1500M"'), {}, "disk_gib", 2),
    ("33: separate, with the task's image", conf(IMAGE + SEPARATE), {}, VERIFIER, {"image": "docker://us/task:1"}),
    ("33: own environment makes it separate", conf(IMAGE + "[verifier.environment]\ncpus = 1"), {},
     VERIFIER, {"image": "docker://us/task:1"}),
    ("33: separate, with the verifier's image", conf(SEPARATE + TESTS_IMAGE) | {"tests/Dockerfile": "FROM a"}, {},
     VERIFIER, {"image": "docker://us/tests", "has_tests": True}),
    ("33: the tests' Dockerfile", conf(SEPARATE) | {"tests/Dockerfile": "FROM a", "tests/test.sh": None}, {},
     f"{VERIFIER}.has_tests", True),
    ("33: Dockerfile of tests that are not separate", {"tests/Dockerfile": "FROM a"}, {},
     "harbor.verifier_images", None),
    ("36: steps", TWO, {}, TEXTS, ["First.", "Second."]),
    ("36: first step is asked", TWO, {}, PROMPT, "First."),
    ("37: a step's own tests", TWO | {"tests/test.sh": None} | {f"steps/{one}/tests/test.sh": "" for one in STEP},
     {}, "image", "harbor-…"),
    ("41: links inside", {"tests/data.txt": "-> ../environment/data.txt", "tests/all": "-> ../environment"}, {},
     "image", "harbor-…"),
    ("2: replaced image is told", conf(IMAGE), {"replaced": {"us/task:1": "mine"}},
     "harbor.replaced", {"us/task:1": "mine"}),
    ("42: replaced base", {}, {"replaced": {"debian:13": "mine"}}, "harbor.replaced", {"debian:13": "mine"}),
    ("6: working folder", {}, {"facts_of": lambda _: DockerfileFacts(workdir="/app")}, "harbor.image_workdir", "/app"),
    ("8: user", {}, {"facts_of": lambda _: DockerfileFacts(user="me")}, "harbor.image_user", "me"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "options", "path", "value"), [case[1:] for case in ROWS], ids=[case[0] for case in ROWS]
)
def test_row_of_a_folder(
    changes: Mapping[str, str | None], options: Mapping[str, Any], path: str, value: Any, tmp_path: Path
) -> None:
    row = made(write_task(tmp_path / "task", changes), **options)
    seen = found(row, path)
    if isinstance(value, str) and value.endswith("…"):
        assert seen.startswith(value.removesuffix("…"))
    else:
        assert seen == value


# What is wrong, changed files, field, part of the message.
REFUSED: list[tuple[str, Mapping[str, str | None], str, str]] = [
    ("no task.toml", {"task.toml": None}, "task.toml", "missing"),
    ("not TOML", conf("x"), "task.toml", "is not TOML"),
    ("later version", conf('schema_version = "2.0"'), "schema_version", "'2.0' is not supported"),
    ("GPU", env("gpus = 1"), "environment.gpus", "not supported"),
    ("TPU", conf('[environment.tpu]\ntype = "v6e"\ntopology = "2x2"'), "environment.tpu", "not supported"),
    ("MCP", conf('[[environment.mcp_servers]]\nname = "a"'), "environment.mcp_servers", "not supported"),
    ("Windows", env('os = "Windows"'), "environment.os", "'Windows' is not supported"),
    ("40: Compose", {COMPOSE: ""}, COMPOSE, "Compose"),
    ("40: Compose of tests", conf(SEPARATE) | {"tests/docker-compose.yaml": ""}, "tests/docker-compose.yaml",
     "Compose"),
    ("40: artifact of a service", conf('[[artifacts]]\nsource = "/a"\nservice = "db"'), "artifacts.0.service", "'db'"),
    ("40: hook of a service", conf('[[verifier.collect]]\ncommand = "a"\nservice = "db"'),
     "verifier.collect.0.service", "'db'"),
    ("2: no image", {"environment/Dockerfile": None}, "environment/Dockerfile", "there is no docker_image"),
    ("instruction", {"instruction.md": None}, "instruction.md", "missing"),
    ("long instruction", {"instruction.md": "x" * (1 << 21)}, "instruction.md", "MiB"),
    ("nested TOML", conf("x = " + "[" * 3000), "task.toml", "is not TOML"),
    ("long TOML", conf(".".join("a" * 300_000) + " = 1"), "task.toml", "more than 64 KiB"),
    ("prior trajectory", {"trajectory.json": "[]"}, "trajectory.json", "not supported"),
    ("tests", {"tests/test.sh": None}, "tests/test.sh", "missing"),
    ("step's instruction", TWO | {"steps/two/instruction.md": None}, "steps/two/instruction.md", "missing"),
    ("steps of one name", conf(STEPS + '[[steps]]\nname = "ONE"') | STEP_FILES, "steps", "'one'"),
    ("step outside", conf('[[steps]]\nname = ".."'), "steps.0.name", "no name of a folder"),
    ("13: networks of steps", STEP_FILES | conf(STEPS + 'agent = {network_mode = "no-network"}'), "steps", "networks"),
    ("hosts without a list", env('allowed_hosts = ["a.b"]'), "environment.allowed_hosts", "allowlist"),
    ("a URL as a host", listed('allowed_hosts = ["http://a.b"]'), "agent.allowed_hosts.0", "http"),
    ("sizes that differ", env('memory = "2G"\nmemory_mb = 1'), "environment.memory", "contradicts"),
    ("size", env('storage = "2X"'), "environment.storage", "'2X'"),
    ("shared with environment", conf('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1'),
     "verifier.environment_mode", "contradicts"),
    ("artifact outside", conf('artifacts = ["/a/../b"]'), "artifacts.0.source", "'..'"),
    ("artifact's place", conf('artifacts = [{source = "/a", destination = "/b"}]'), "artifacts.0.destination", "'/'"),
    ("name", conf('[task]\nname = "Sum of numbers"'), "task.name", "ORGANISATION/NAME"),
    ("41: file outside", {"tests/a": "-> /etc/hostname"}, "tests/a", "leaves the task's folder"),
    ("41: instruction outside", {"instruction.md": "-> /etc/hostname"}, "instruction.md", "leaves"),
    ("41: cycle", {"solution/a": "-> ."}, "solution/a", "a folder that contains it"),
    ("41: link to itself", {"tests/a": "-> a"}, "tests/a", "leads nowhere"),
    ("ignore rules", {"tests/a/.harborignore": "*.pyc"}, "tests/a/.harborignore", "remove it and the files"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "field", "said"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_folder_is_refused_by_file_or_key(
    changes: Mapping[str, str | None], field: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(CallerError) as caught:
        make_row(write_task(tmp_path / "task", changes))
    assert caught.value.field == field
    assert said in caught.value.complaint
    assert "\n" not in caught.value.reason.partition(" (given")[0]


OPEN, CLOSED = 'network_mode = "public"\n', 'network_mode = "no-network"\n'
OWN = "[verifier.environment]\n{}cpus = 2\nmemory_mb = 3\nstorage_mb = 1025\n"


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("", None),
        (f"[environment]\n{CLOSED}", "none"),
        (f"[environment]\n{OPEN}[agent]\n{CLOSED}", "public"),
        (f"[agent]\n{OPEN}", None),
        (f"[environment]\n{OPEN}[verifier]\n{CLOSED}", "none"),
        (f"[environment]\n{CLOSED}{OWN.format('')}", "none"),
        (f"[environment]\n{CLOSED}{OWN.format(OPEN)}", "public"),
        (f"[verifier]\n{CLOSED}{OWN.format(OPEN)}", "none"),
    ],
)
def test_the_verifiers_network_and_limits(text: str, network: str | None, tmp_path: Path) -> None:
    """Behaviours 12 and 34: the agent's network ends with its phase; a separate verifier has its own limits."""
    row = make_row(write_task(tmp_path / "task", conf(text)))
    needs = LocatedTask.of(row, tmp_path, {}).verifier_needs(None)
    assert needs.network == network
    limits = (2, 3, 2) if "verifier.environment" in text else (None, None, None)
    assert (needs.cpu, needs.memory_mib, needs.disk_gib) == limits


@pytest.mark.parametrize(
    ("text", "limit_s"),
    [
        ("", None),
        ("[agent]\ntimeout_sec = 5", 5.0),
        (f"[agent]\ntimeout_sec = 5\n{STEPS}agent = {{timeout_sec = 7}}", 12.0),
        (f"{STEPS}agent = {{timeout_sec = 7}}", None),
    ],
)
def test_the_agents_time(text: str, limit_s: float | None, tmp_path: Path) -> None:
    row = make_row(write_task(tmp_path / "task", conf(text) | (STEP_FILES if "steps" in text else {})))
    assert LocatedTask.of(row, tmp_path, {}).agent_total_s() == limit_s


def test_each_step_has_its_own_mode_and_image(tmp_path: Path) -> None:
    text = SEPARATE + '[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n[steps.verifier]\nenvironment_mode = "shared"\n'
    text += '[[steps]]\nname = "c"\n[steps.verifier.environment]\ndocker_image = "us/c"\n'
    files = {f"steps/{name}/instruction.md": name for name in "abc"} | {"steps/a/tests/Dockerfile": "FROM a"}
    row = HarborRow.parse(make_row(write_task(tmp_path / "task", conf(text) | files)))
    images = row.harbor.verifier_images
    assert set(images) == {"a", "c"}
    assert row.harbor.builds[images["a"].image] == "steps/a/tests"
    assert (images["c"].image, images["c"].has_tests) == ("docker://us/c", True)


def test_variables_are_replaced_only_where_they_are_the_whole_value() -> None:
    env = {"A": "${A}", "B": "${B:-x}", "C": "${C:-}", "D": "a${A}", "E": "$A"}
    assert resolve_variables(env, {"A": "1"}, "env") == {"A": "1", "B": "x", "C": "", "D": "a${A}", "E": "$A"}
    with pytest.raises(CallerError) as caught:
        resolve_variables({"A": "${NOT_SET}"}, {}, "verifier.env")
    assert caught.value.field == "verifier.env.A"


def test_unknown_keys_are_ignored() -> None:
    config = parse_task_config('color = "red"\n[environment]\nflavor = 1\n[[steps]]\nname = "a"\ndependencies = []\n')
    assert config.steps[0].name == "a"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"image": ""}, "image"),
        (
            {"harbor": {"folder": "/a", "digest": "0" * 64, "config": {"environment": {"gpus": 1}}}},
            "harbor.config.environment.gpus",
        ),
        ({"network": "some"}, "network"),
        ({"cpu": 0}, "cpu"),
    ],
)
def test_row_is_refused_by_field(changes: Mapping[str, Any], field: str, tmp_path: Path) -> None:
    row = make_row(write_task(tmp_path / "task")) | changes
    with pytest.raises(CallerError) as caught:
        HarborRow.parse(row)
    assert caught.value.field == field


# Digests and names of images.

EDITS: list[tuple[str, Callable[[Path], object], bool, bool]] = [
    ("test", lambda task: (task / "tests/test.sh").write_text("exit 1"), True, False),
    ("solution", lambda task: (task / "solution/more.sh").write_text(""), True, False),
    ("step", lambda task: write_task(task, {"steps/a/instruction.md": "x"}), True, False),
    ("executable", lambda task: (task / "tests/test.sh").chmod(0o755), True, False),
    ("renamed", lambda task: (task / "tests/test.sh").rename(task / "tests/x"), True, False),
    ("context", lambda task: (task / "environment/data.txt").write_text("43"), False, True),
    ("Dockerfile", lambda task: (task / "environment/Dockerfile").write_text("FROM b"), False, True),
    ("instruction, in the row", lambda task: (task / "instruction.md").write_text("x"), False, False),
    ("compiled", lambda task: write_task(task, {"tests/__pycache__/a": "", "environment/.git/x": ""}), False, False),
    ("empty folder", lambda task: (task / "tests/empty").mkdir(), False, False),
    ("behind a link", lambda task: (task / "shared.txt").write_text("2"), True, False),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "digest", "image"), [case[1:] for case in EDITS], ids=[case[0] for case in EDITS])
def test_edit_changes_the_digest_or_the_image(
    edit: Callable[[Path], object], digest: bool, image: bool, tmp_path: Path
) -> None:
    task = write_task(tmp_path / "task", {"shared.txt": "1", "tests/shared.txt": "-> ../shared.txt"})

    def now() -> tuple[str, str]:
        return folder_digest(task), built_image(task, "environment", {})

    before = now()
    edit(task)
    assert [one != other for one, other in zip(before, now(), strict=True)] == [digest, image]


def test_files_that_are_uploaded_are_in_the_digest(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", conf(IMAGE) | {"environment/Dockerfile": None})
    before = folder_digest(task)
    (task / "environment/data.txt").write_text("43")
    assert folder_digest(task) != before


def test_replaced_bases_make_another_image(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task")
    names = [built_image(task, "environment", bases) for bases in ({}, {"a": "b"}, {"a": "c"}, {"a": "b", "c": "d"})]
    assert len(set(names)) == 4
    assert built_image(task, "environment", {"c": "d", "a": "b"}) == names[3]


def test_dockerfile_that_cannot_be_built_is_refused_by_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path / "set/good")
    write_task(tmp_path / "set/bad", {"environment/Dockerfile": "FROM a\nRUN --mount=type=secret true\n"})
    assert not convert_harbor(str(tmp_path / "set"), None, replaced={})
    out, errors = capsys.readouterr()
    assert "task bad: environment/Dockerfile: line 2: RUN: --mount=type=secret" in " ".join(errors.split())
    assert out.count('"instance_id":"good"') == 1


def _links(task: Path) -> None:
    """Make 2^39 paths to empty folders."""
    for level in range(40):
        (task / f"tests/{level}").mkdir()
        for link in "ab" if level else "":
            (task / f"tests/{level - 1}/{link}").symlink_to(f"../{level}")


def _dockerfile(task: Path) -> Path:
    (task / "environment/Dockerfile").unlink()
    return task / "environment/Dockerfile"


# What a folder has, how it is made, part of the message.
HOSTILE: list[tuple[str, Callable[[Path], object], str]] = [
    ("Dockerfile that is a host's file", lambda task: _dockerfile(task).symlink_to(task.parents[1] / "secret"),
     "environment/Dockerfile: is a link that leaves"),
    ("Dockerfile that is a pipe", lambda task: os.mkfifo(_dockerfile(task)), "Dockerfile: is no file"),
    ("links to empty folders", _links, "tests: more than 2000 files"),
    ("tests with holes", lambda task: os.truncate(task / "tests/test.sh", 1 << 40), "2000 files, 4 GiB or"),
    ("pipe", lambda task: os.mkfifo(task / "tests/pipe"), "tests/pipe: is no file"),
    ("nested folders", lambda task: (task / f"tests/{'d/' * 120}").mkdir(parents=True), "or 100 levels of folders"),
    ("name of two lines", lambda task: (task / "task.toml").write_text("x") and task.rename(f"{task}\n\x1b[2J"),
     "task bad\\n\\x1b[2J: task.toml: is not TOML"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "said"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_hostile_folder_is_one_refused_line(
    make: Callable[[Path], object],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(task_folder, "MAX_FILES", 2000)
    (tmp_path / "secret").write_text("TOKEN=of-the-host")
    write_task(tmp_path / "set/good")
    make(write_task(tmp_path / "set/bad"))
    assert not convert_harbor(str(tmp_path / "set"), None, replaced={})
    out, errors = capsys.readouterr()
    [line] = [line for line in errors.splitlines() if line.startswith("task ")]
    assert said in line
    assert "TOKEN" not in errors
    assert out.count('"instance_id":"good"') == 1
