# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of published datasets, with their own fields, as rows of ``prorl_swe``. Pure.

Each dataset has a model of its records; what is missing in one, or of another type, is refused by its name there.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    StringConstraints,
    ValidationError,
)

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.records import UnusableRecord, parsed
from nemo_gym_prorl.tasks.swe import test_commands
from nemo_gym_prorl.tasks.swe.instance import SweInstance, TestStatus, refusal
from nemo_gym_prorl.tasks.swe.log_parsing import R2E_PARSER, r2e_names
from nemo_gym_prorl.tasks.swe.task import make_row
from nemo_gym_prorl.tasks.swe.test_commands import TestSpec


R2E_TIMEOUT_S = 300.0
"""How long R2E-Gym lets the tests of a row run, in seconds."""

_R2E_TEST_FOLDERS = frozenset({"test", "tests", "Test", "Tests"})
_MARKS = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}

Record = Mapping[str, Any]
Converter = Callable[[Record, str | None], dict[str, Any]]


def _names(value: object) -> object:
    """Some exports have lists, others JSON of them."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


Text = Annotated[str, StringConstraints(strict=True, min_length=1)]
Names = Annotated[tuple[Text, ...], BeforeValidator(_names)]
InstanceId = Annotated[str, StringConstraints(strict=True, pattern=r"^[\w.-]+$", max_length=200)]
Image = Annotated[str, StringConstraints(strict=True, pattern=r"^[\w./:-]+$")]
CommitId = Annotated[str, StringConstraints(strict=True, pattern=r"^[0-9a-f]{7,64}$")]


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class SweBenchRecord(_Record):
    """A record of SWE-bench in all its editions, and of SWE-Gym.

    ``image``, ``eval_script``, ``log_parser`` and ``eval_type`` are in the editions of swebench 5 only.
    """

    instance_id: InstanceId
    repo: Text
    version: Annotated[str, StringConstraints(strict=True)]
    base_commit: CommitId
    problem_statement: Text
    patch: Text
    test_patch: Text
    FAIL_TO_PASS: Names = Field(min_length=1)
    PASS_TO_PASS: Names
    image: Text | None = None
    eval_script: Text | None = None
    log_parser: Text | None = None
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail"


class InstallConfig(_Record):
    """How SWE-rebench installs and tests a repository."""

    test_cmd: Text
    log_parser: Annotated[str, StringConstraints(strict=True, pattern=r"^parse_log_\w+$")]
    pre_install: str | list[str] | None = None
    install: str | list[str] | None = None


class SweRebenchRecord(SweBenchRecord):
    """A record of SWE-rebench: SWE-bench's, with an image and a way to test of its own."""

    docker_image: Image
    install_config: Annotated[InstallConfig, BeforeValidator(parsed)]


def _r2e_fix(commit: Mapping[str, Any]) -> str:
    """A commit's patch without tests; empty if there is nothing else in it.

    Raises:
        ValueError: it is no commit.
    """
    try:
        lines = [line for part in commit["file_diffs"] if _is_of_the_fix(part) for line in _diff_lines(part)]
        return "".join(line + "\n" for line in lines)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no commit that was taken apart: {error!r}") from error


def _is_of_the_fix(part: Mapping[str, Any]) -> bool:
    """As the dataset counts: Python, and no test."""
    path = PurePosixPath(part["header"]["file"]["path"])
    is_test = path.name.startswith("test_") or path.name.endswith("_test.py") or _R2E_TEST_FOLDERS & {*path.parts}
    return path.suffix == ".py" and not is_test and not part.get("is_binary_file")


def _diff_lines(part: Mapping[str, Any]) -> Iterator[str]:
    """A file's part of the patch."""
    path = part["header"]["file"]["path"]
    yield f"diff --git a/{path} b/{path}"
    if misc := part["header"].get("misc_line"):  # that it is new, or gone
        yield misc
    if index := part.get("index_line"):
        yield f"index {index['old_commit_hash']}..{index['new_commit_hash']} {index.get('mode', '')}".rstrip()
    if part.get("minus_file") and part.get("plus_file"):
        yield f"--- {part['minus_file']['path']}"
        yield f"+++ {part['plus_file']['path']}"
    for hunk in part.get("hunks", ()):
        head = hunk["descriptor"]
        yield f"@@ -{_range(head['old_range'])} +{_range(head['new_range'])} @@ {head.get('section', '')}".rstrip()
        for line in hunk["line_group"].get("all_lines", ()):
            yield _MARKS[line["type"]] + line["content"]


def _range(lines: Mapping[str, int | None]) -> str:
    length = lines.get("length")  # left out where it is 1
    return f"{lines['start']}" if length is None else f"{lines['start']},{length}"


class R2eGymRecord(_Record):
    """A record of R2E-Gym."""

    repo_name: Text
    docker_image: Image
    commit_hash: CommitId
    problem_statement: Text
    fix: Json[Annotated[Any, AfterValidator(_r2e_fix)]] = Field(alias="parsed_commit_content")
    expected_output_json: Json[Annotated[dict[str, TestStatus], AfterValidator(r2e_names), Field(min_length=1)]]


def swe_bench(record: Record, prefix: str | None) -> dict[str, Any]:
    """The row of a record of SWE-bench.

    Args:
        record: its fields.
        prefix: registry and folder of the images; ``None`` for the dataset's own.

    Raises:
        CallerError: it makes none; names the field.
    """
    read = _read(SweBenchRecord, record)
    name = f"sweb.eval.x86_64.{read.instance_id.replace('__', '_1776_')}:latest".lower()
    image = read.image if read.image and prefix is None else f"{prefix or 'docker.io/swebench'}/{name}"
    if read.eval_script is None or read.log_parser is None:
        raise CallerError(
            "missing: this edition does not say how its tests are run. Use that of huggingface.co/SWE-bench",
            field="eval_script",
        )
    spec = test_commands.of_script(read.eval_script, read.log_parser)
    return _swe_bench_row(read, "swe-bench", image, spec)


def swe_gym(record: Record, prefix: str | None) -> dict[str, Any]:
    """As :func:`swe_bench`, of SWE-Gym."""
    read = _read(SweBenchRecord, record)
    name = f"sweb.eval.x86_64.{read.instance_id.replace('__', '_s_')}:latest".lower()
    spec = test_commands.of_swe_gym(read.repo, read.version, read.test_patch)
    return _swe_bench_row(read, "swe-gym", f"{prefix or 'docker.io/xingyaoww'}/{name}", spec)


def swe_rebench(record: Record, prefix: str | None) -> dict[str, Any]:
    """As :func:`swe_bench`, of SWE-rebench.

    Raises:
        UnusableRecord: the record has no image, as in the part of the set that was not filtered.
    """
    if record.get("docker_image", "") is None:
        raise UnusableRecord("the set has no image for this record", field="docker_image")
    read = _read(SweRebenchRecord, record)
    config = read.install_config
    steps = [
        step
        for part in (config.pre_install, config.install)
        for step in ([part] if isinstance(part, str) else part or [])
    ]
    before = "\n".join([test_commands.OPTIONS, *steps])
    command = f"{config.test_cmd} {shlex.join(test_commands.test_files(read.test_patch))}"
    spec = TestSpec(command, before, config.log_parser, network=test_commands.may_download(before))
    return _swe_bench_row(read, "swe-rebench", _moved(read.docker_image, prefix), spec)


def r2e_gym(record: Record, prefix: str | None) -> dict[str, Any]:
    """As :func:`swe_bench`, of R2E-Gym."""
    read = _read(R2eGymRecord, record)
    issue = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", read.problem_statement, re.DOTALL)
    instance = _instance(
        dataset="r2e-gym",
        repo=read.repo_name,
        version=read.commit_hash,
        problem_statement=(issue[1] if issue else read.problem_statement).strip(),
        patch=read.fix,
        # The image has the tests beside the repository, and a script in it that looks for them there.
        before_tests="[ -e r2e_tests ] || ln -s /r2e_tests r2e_tests",
        test_command="bash run_tests.sh",
        log_parser=R2E_PARSER,
        expected_output=read.expected_output_json,
        test_timeout_s=R2E_TIMEOUT_S,
    )
    return make_row(f"{read.repo_name}__{read.commit_hash}", f"docker://{_moved(read.docker_image, prefix)}", instance)


CONVERTERS: Mapping[str, Converter] = {
    "swe-bench": swe_bench,
    "swe-gym": swe_gym,
    "swe-rebench": swe_rebench,
    "r2e-gym": r2e_gym,
}
"""By the dataset's name."""


def _moved(image: str, prefix: str | None) -> str:
    """An image of a record with its registry, or under another registry and folder."""
    if prefix is not None:
        return f"{prefix}/{image.rpartition('/')[2]}"
    return image if image.count("/") >= 2 else f"docker.io/{image}"


def _swe_bench_row(read: SweBenchRecord, dataset: str, image: str, spec: TestSpec) -> dict[str, Any]:
    instance = _instance(
        dataset=dataset,
        repo=read.repo,
        version=read.version,
        base_commit=read.base_commit,
        problem_statement=read.problem_statement,
        patch=read.patch,
        test_patch=read.test_patch,
        FAIL_TO_PASS=read.FAIL_TO_PASS,
        PASS_TO_PASS=read.PASS_TO_PASS,
        before_tests=spec.before,
        test_command=spec.command,
        tests_network=spec.network,
        log_parser=spec.parser,
        eval_type=read.eval_type,
    )
    return make_row(read.instance_id, f"docker://{image.removeprefix('docker://')}", instance)


def _read[Model: BaseModel](model: type[Model], record: Record) -> Model:
    try:
        return model.model_validate(record)
    except ValidationError as error:
        raise refusal(error) from error


def _instance(**fields: Any) -> SweInstance:
    try:
        return SweInstance(**fields)
    except ValidationError as error:
        raise refusal(error) from error
