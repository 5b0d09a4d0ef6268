# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Folders of Harbor tasks become rows: what a row says, and what is refused by file or key."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_gym_prorl.cli.data.convert import convert_harbor
from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.harbor import task_folder
from nemo_gym_prorl.tasks.harbor.located_task import LocatedTask
from nemo_gym_prorl.tasks.harbor.task_config import parse_task_config, resolve_variables
from nemo_gym_prorl.tasks.harbor.task_folder import (
    DockerfileFacts,
    built_image,
    folder_digest,
    make_row,
    parse_row,
    tree,
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
    parse_row(row)
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
COMPOSE = "environment/docker-compose.yaml"

# Number of the behaviour in the reference, changed files, options, path in the row, value (a start of a text, with …).
ROWS: list[tuple[str, Mapping[str, str | None], Mapping[str, Any], str, Any]] = [
    ("1: canary lines", {"instruction.md": "<!-- a CANARY -->\n# canary x\n\n \nDo it.\n# canary\n"}, {},
     PROMPT, "Do it.\n# canary\n"),
    ("1: no canary line", {"instruction.md": "# Title\nDo it."}, {}, PROMPT, "# Title\nDo it."),
    ("1: long line of canaries", {"instruction.md": "<!--" + "canary" * 170_000}, {}, PROMPT, "<!--canarycanary…"),
    ("1: byte order mark", {"instruction.md": "\ufeffDo it."}, {}, PROMPT, "Do it."),
    ("2: image before Dockerfile", conf(IMAGE), {}, "image", "docker://us/task:1"),
    ("2: nothing is built then", conf(IMAGE), {}, "harbor.builds", None),
    ("2: force_build", conf(IMAGE), {"force_build": True}, "image", "harbor-…"),
    ("2: force_build without Dockerfile", conf(IMAGE) | {"environment/Dockerfile": None}, {"force_build": True},
     "image", "docker://us/task:1"),
    ("2: Dockerfile", {}, {}, "image", "harbor-…"),
    ("2: a scheme is kept once", conf(IMAGE.replace("us/", "docker://us/")), {}, "image", "docker://us/task:1"),
    ("name of the folder", {}, {}, "instance_id", "task"),
    ("name of the package", conf('[task]\nname = "us/sum"'), {}, "instance_id", "us/sum"),
    ("data set", {}, {"data_source": "mine"}, "data_source", "mine"),
    ("tools", {}, {}, "responses_create_params.tools.0.name", "bash"),
    ("12: no network", env('allow_internet = false'), {}, "network", "none"),
    ("12: allow_internet loses", env('allow_internet = false\nnetwork_mode = "public"'), {}, "network", "public"),
    ("12: allowed hosts", env('network_mode = "allowlist"\nallowed_hosts = ["*.A.b", "10.0.0.0/8"]'), {},
     "network", ["*.a.b", "10.0.0.0/8"]),
    ("12: agent's phase", agent('network_mode = "no-network"'), {}, "network", "none"),
    ("12: step's phase", STEP_FILES | conf(STEPS.replace("\n[[", '\nagent = {network_mode = "public"}\n[[')
     + 'agent = {network_mode = "public"}'), {}, "network", "public"),
    ("12: unset", {}, {}, "network", None),
    ("limits: cpu", env("cpus = 2"), {}, "cpu", 2),
    ("limits: memory", env("memory_mb = 2048"), {}, "memory_mib", 2048),
    ("limits: old memory", env('memory = "2G"'), {}, "memory_mib", 2048),
    ("limits: old storage", env('storage = "1500M"'), {}, "disk_gib", 2),
    ("limits: unset", {}, {}, "memory_mib", None),
    ("14: explicit default", conf("[verifier]\ntimeout_sec = 600.0"), {}, "harbor.config.verifier.timeout_sec", 600.0),
    ("27: no solution", {"solution/solve.sh": None}, {}, "image", "harbor-…"),
    ("32: separate, same image", conf(SEPARATE), {}, "harbor.verifier_images..has_tests", None),
    ("36: steps", TWO, {}, TEXTS, ["First.", "Second."]),
    ("36: first step is asked", TWO, {}, PROMPT, "First."),
    ("36: one step has no list", {}, {}, TEXTS, None),
    ("36: names with blanks", conf('[[steps]]\nname = "a b"') | {"steps/a b/instruction.md": "x"}, {}, TEXTS, ["x"]),
    ("37: a step's own tests", TWO | {"tests/test.sh": None} | {f"steps/{one}/tests/test.sh": "" for one in STEP},
     {}, "image", "harbor-…"),
    ("41: links inside", {"tests/data.txt": "-> ../environment/data.txt", "tests/all": "-> ../environment"}, {},
     "image", "harbor-…"),
    ("2: replaced image", conf(IMAGE), {"replaced": {"us/task:1": "mine"}}, "image", "mine"),
    ("2: replaced image is told", conf(IMAGE), {"replaced": {"us/task:1": "mine"}},
     "harbor.replaced", {"us/task:1": "mine"}),
    ("42: replaced base", {}, {"replaced": {"debian:13": "mine"}}, "harbor.replaced", {"debian:13": "mine"}),
    ("42: base of another", {}, {"replaced": {"x": "mine"}, "facts_of": lambda _: DockerfileFacts()},
     "harbor.replaced", None),
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
    ("number as version", conf("version = 1.0"), "schema_version", "valid string"),
    ("GPU", env("gpus = 1"), "environment.gpus", "not supported"),
    ("TPU", conf('[environment.tpu]\ntype = "v6e"\ntopology = "2x2"'), "environment.tpu", "not supported"),
    ("MCP", conf('[[environment.mcp_servers]]\nname = "a"'), "environment.mcp_servers", "not supported"),
    ("Windows", env('os = "Windows"'), "environment.os", "'Windows' is not supported"),
    ("verifier's GPU", conf("[verifier.environment]\ngpus = 2"), "verifier.environment.gpus", "not supported"),
    ("40: Compose", {COMPOSE: ""}, COMPOSE, "Compose"),
    ("40: Compose beside an image", conf(IMAGE) | {COMPOSE: ""},
     COMPOSE, "Compose"),
    ("40: Compose of tests", conf(SEPARATE) | {"tests/docker-compose.yaml": ""}, "tests/docker-compose.yaml",
     "Compose"),
    ("40: artifact of a service", conf('[[artifacts]]\nsource = "/a"\nservice = "db"'), "artifacts.0.service", "'db'"),
    ("40: hook of a service", conf('[[verifier.collect]]\ncommand = "a"\nservice = "db"'),
     "verifier.collect.0.service", "'db'"),
    ("2: no image", {"environment/Dockerfile": None}, "environment/Dockerfile", "there is no docker_image"),
    ("2: empty image", env('docker_image = " "'), "environment.docker_image", "empty"),
    ("instruction", {"instruction.md": None}, "instruction.md", "missing"),
    ("empty instruction", {"instruction.md": "# canary\n\n"}, "instruction.md", "empty"),
    ("long instruction", {"instruction.md": "x" * (1 << 21)}, "instruction.md", "MiB"),
    ("nested TOML", conf("x = " + "[" * 3000), "task.toml", "is not TOML"),
    ("long number", conf("x = " + "1" * 5000), "task.toml", "is not TOML"),
    ("long TOML", conf(".".join("a" * 300_000) + " = 1"), "task.toml", "more than 64 KiB"),
    ("prior trajectory", {"trajectory.json": "[]"}, "trajectory.json", "not supported"),
    ("tests", {"tests/test.sh": None}, "tests/test.sh", "missing"),
    ("37: a step's tests", TWO | {"tests/test.sh": None, "steps/one/tests/test.sh": ""},
     "steps/two/tests/test.sh", "missing"),
    ("step's instruction", TWO | {"steps/two/instruction.md": None}, "steps/two/instruction.md", "missing"),
    ("steps of one name", conf(STEPS + '[[steps]]\nname = "ONE"') | STEP_FILES, "steps", "'one'"),
    ("step outside", conf('[[steps]]\nname = ".."'), "steps.0.name", "no name of a folder"),
    ("step below", conf('[[steps]]\nname = "a/b"'), "steps.0.name", "no name of a folder"),
    ("13: networks of steps", STEP_FILES | conf(STEPS + 'agent = {network_mode = "no-network"}'), "steps", "networks"),
    ("hosts without a list", env('allowed_hosts = ["a.b"]'), "environment.allowed_hosts", "allowlist"),
    ("a URL as a host", listed('allowed_hosts = ["http://a.b"]'), "agent.allowed_hosts.0", "http"),
    ("a port", listed('allowed_hosts = ["a.b:80"]'), "agent.allowed_hosts.0", "a.b:80"),
    ("host bits", listed('allowed_hosts = ["10.0.0.1/8"]'), "agent.allowed_hosts.0", "10.0"),
    ("sizes that differ", env('memory = "2G"\nmemory_mb = 1'), "environment.memory", "contradicts"),
    ("size", env('storage = "2X"'), "environment.storage", "'2X'"),
    ("cpus", env("cpus = nan"), "environment.cpus", ""),
    ("shared with environment", conf('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1'),
     "verifier.environment_mode", "contradicts"),
    ("artifact outside", conf('artifacts = ["/a/../b"]'), "artifacts.0.source", "'..'"),
    ("artifact's place", conf('artifacts = [{source = "/a", destination = "/b"}]'), "artifacts.0.destination", "'/'"),
    ("artifact's manifest", conf('artifacts = [{source = "/a", destination = "manifest.json"}]'),
     "artifacts.0.destination", "manifest.json"),
    ("name", conf('[task]\nname = "Sum of numbers"'), "task.name", "ORGANISATION/NAME"),
    ("user", agent("user = 1.5"), "agent.user", ""),
    ("41: file outside", {"tests/a": "-> /etc/hostname"}, "tests/a", "leaves the task's folder"),
    ("41: folder outside", {"environment/a": "-> ../.."}, "environment/a", "leaves the task's folder"),
    ("41: folder itself", {"tests/test.sh": None, "tests": "-> /etc"}, "tests", "leaves the task's folder"),
    ("41: instruction outside", {"instruction.md": "-> /etc/hostname"}, "instruction.md", "leaves"),
    ("41: cycle", {"solution/a": "-> ."}, "solution/a", "a folder that contains it"),
    ("41: cycle of two", {"tests/a/b": "-> ../c", "tests/c/d": "-> ../a"}, "tests/a/b/d", "a folder that contains it"),
    ("41: link to itself", {"tests/a": "-> a"}, "tests/a", "leads nowhere"),
    ("41: link to nothing", {"tests/a": "-> b"}, "tests/a", "leads nowhere"),
    ("ignore rules", {"tests/a/.harborignore": "*.pyc"}, "tests/a/.harborignore", "remove it and the files"),
    ("ignore rules of a step", TWO | {"steps/one/solution/.harborignore": ""}, "steps/one/solution/.harborignore", ""),
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


@pytest.mark.parametrize(
    ("changes", "image", "has_tests", "builds"),
    [
        (conf(SEPARATE), "task", False, 1),
        (conf(SEPARATE + '[verifier.environment]\ndocker_image = "us/tests"'), "docker://us/tests", True, 1),
        (conf("[verifier.environment]\ncpus = 1"), "task", False, 1),
        (conf(SEPARATE) | {"tests/Dockerfile": "FROM a", "tests/test.sh": None}, "harbor", True, 2),
        (conf(SEPARATE + '[verifier.environment]\ndocker_image = "us/tests"') | {"tests/Dockerfile": "FROM a"},
         "docker://us/tests", True, 1),
        (conf(IMAGE + SEPARATE), "docker://us/task:1", False, 0),
        ({"tests/Dockerfile": "FROM a"}, None, False, 1),
        (conf(""), None, False, 1),
    ],
)  # fmt: skip
def test_image_of_a_separate_verifier(
    changes: Mapping[str, str | None], image: str | None, has_tests: bool, builds: int, tmp_path: Path
) -> None:
    """Behaviour 33: the verifier's image, else that of tests/Dockerfile, which has the tests, else the task's."""
    row = parse_row(make_row(write_task(tmp_path / "task", changes)))
    assert len(row.harbor.builds) == builds
    if image is None:
        assert row.harbor.verifier_images == {}
        return
    used = row.harbor.verifier_images[""]
    assert used.has_tests == has_tests
    assert used.image == {"task": row.image}.get(image, used.image)
    assert used.image.startswith(image if image != "task" else "")
    assert used.image in row.harbor.builds or ":" in used.image


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
    row = parse_row(make_row(write_task(tmp_path / "task", conf(text) | files)))
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
        ({"instance_id": None}, "instance_id"),
        ({"harbor": {}}, "harbor.folder"),
        ({"network": "some"}, "network"),
        ({"network": 7}, "network"),
        ({"cpu": 0}, "cpu"),
    ],
)
def test_row_is_refused_by_field(changes: Mapping[str, Any], field: str, tmp_path: Path) -> None:
    row = make_row(write_task(tmp_path / "task")) | changes
    with pytest.raises(CallerError) as caught:
        parse_row(row)
    assert caught.value.field == field


def test_row_names_a_wrong_key_of_its_configuration(tmp_path: Path) -> None:
    row = make_row(write_task(tmp_path / "task"))
    row["harbor"]["config"]["environment"] = {"gpus": 1}
    with pytest.raises(CallerError) as caught:
        parse_row(row)
    assert caught.value.field == "harbor.config.environment.gpus"


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


NAMES = st.text("abc._-", min_size=1, max_size=6).filter(lambda name: name not in (".", ".."))
TREES = st.recursive(
    st.binary(max_size=8), lambda inner: st.dictionaries(NAMES, inner, max_size=4), max_leaves=8
).filter(lambda tree: isinstance(tree, dict))


def lay(tree: Mapping[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, inner in tree.items():
        if isinstance(inner, bytes):
            (folder / name).write_bytes(inner)
        else:
            lay(inner, folder / name)
    return folder


def files(tree: Mapping[str, Any], above: str = "") -> dict[str, bytes]:
    flat: dict[str, bytes] = {}
    for name, inner in tree.items():
        flat |= {above + name: inner} if isinstance(inner, bytes) else files(inner, f"{above}{name}/")
    return flat


@settings(max_examples=60, deadline=None)
@given(first=TREES, second=TREES)
def test_digest_tells_trees_apart_and_not_their_order(
    first: dict[str, Any], second: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root, listed = tmp_path_factory.mktemp("trees"), Path.iterdir
    tasks = [lay(content, root / name / "tests").parent for name, content in (("a", first), ("b", second))]
    digests = [folder_digest(task) for task in tasks]
    assert (digests[0] == digests[1]) == (files(first) == files(second))
    for backwards in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "iterdir", lambda folder: iter(sorted(listed(folder), reverse=backwards)))  # noqa: B023
            assert folder_digest(tasks[0]) == digests[0]


def test_links_that_multiply_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_folder, "MAX_FILES", 500)
    levels = {f"tests/{level}/{link}": f"-> ../{level + 1}" for level in range(20) for link in "ab"}
    task = write_task(tmp_path / "task", levels | {"tests/20/end": ""})
    with pytest.raises(CallerError, match="more than 500 files"):
        folder_digest(task)


def test_pipe_is_refused(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task")
    os.mkfifo(task / "tests/pipe")
    with pytest.raises(CallerError, match=r"tests/pipe: is no file"):
        list(tree(task / "tests", task))


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
    ("Dockerfile that is endless", lambda task: _dockerfile(task).symlink_to("/dev/zero"), "is a link that leaves"),
    ("Dockerfile that is a pipe", lambda task: os.mkfifo(_dockerfile(task)), "Dockerfile: is no file"),
    ("long Dockerfile", lambda task: os.truncate(task / "environment/Dockerfile", 1 << 30), "more than 1 MiB"),
    ("links to empty folders", _links, "tests: more than 2000 files"),
    ("tests with holes", lambda task: os.truncate(task / "tests/test.sh", 1 << 40), "2000 files, 4 GiB or"),
    ("nested folders", lambda task: (task / f"tests/{'d/' * 120}").mkdir(parents=True), "or 100 levels of folders"),
    ("undecodable name", lambda task: task.rename(task.parent / os.fsdecode(b"\xff")), "task \\udcff: "),
    ("name of two lines", lambda task: (task / "task.toml").write_text("x") and task.rename(f"{task}\n\x1b[2J"),
     "task bad\\n\\x1b[2J: task.toml: is not TOML"),
    ("deep table", lambda task: (task / "task.toml").write_text(f"schema_version.{'a.' * 2000}a = 1"),
     "task bad: cannot be read: RecursionError"),
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
