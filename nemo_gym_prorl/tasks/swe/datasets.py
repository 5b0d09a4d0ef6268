# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Convert records of SWE-bench, SWE-Gym, SWE-rebench and R2E-Gym to rows of ``prorl_swe``. Pure.

Each dataset has a pydantic model of its records; an error names the missing or malformed field.

SWE-bench records contain a script that swebench runs. The lines before the marker of the test output (exports,
installations, builds) become ``before_tests``, with swebench's shell options. git commands that apply hidden tests or
show changes are removed: the environment applies the tests itself, and its repository has a new history.

SWE-Gym records have no script; the table :data:`_SWE_GYM` contains the commands. The test command names the files that
``test_patch`` changes.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from nemo_gym_prorl.tasks.dataset_records import UnusableRecord, parsed
from nemo_gym_prorl.tasks.swe.instance import SweInstance, TestStatus
from nemo_gym_prorl.tasks.swe.report import R2E_PARSER, r2e_names
from nemo_gym_prorl.tasks.swe.task import make_row
from nemo_gym_prorl.tasks.task import validation_refusal


@dataclass(frozen=True, slots=True)
class TestSpec:
    """Commands that run a record's tests, which in :data:`_SWE_GYM` lack the test files; ``parser`` is swebench's name
    of the log parser."""

    command: str
    before: str = "python -m pip install -e ."
    parser: str = "parse_log_pytest"
    network: bool = False


OPTIONS = "set -uxo pipefail"
"""Shell options of swebench's scripts."""

Versions = Sequence[tuple[str, TestSpec]]
"""Test specs of a repository, each with the first version to which it applies, in ascending order."""

_PYTEST = "pytest -rA"
_SERIAL = "pytest -n0 -rA"
_VERBOSE = "pytest -rA --tb=long"
_EDITABLE = "python -m pip install -e ."

_CONAN_PATH = "export PYTHONPATH=${PYTHONPATH:-}:$(pwd)\n"
_CONAN_OLD = "echo 'cython<3' > /tmp/constraint.txt; export PIP_CONSTRAINT=/tmp/constraint.txt\n"
_CONAN_NEEDS = "\n".join(
    f"python -m pip install -r conans/{name}.txt"
    for name in ("requirements", "requirements_server", "requirements_dev")
)
_CONAN = TestSpec(_SERIAL, _CONAN_PATH + _CONAN_NEEDS)
_DVC = "\n".join(
    [
        "python -m pip install --upgrade pip wheel GitPython",
        'python -m pip install "cython<3.0.0" && python -m pip install --no-build-isolation pyyaml==5.4.1',
        "python -m pip install git+https://github.com/iterative/mock-ssh-server.git || true",
        "python -m pip install -r tests/requirements.txt || true",
        "python -m pip install -r test-requirements.txt || true",
        'python -m pip install -e ".[tests,dev,all_remotes,all,testing]"',
    ]
)
_PANDAS = "python -m pip install -ve . --no-build-isolation -Ceditable-verbose=true\npip uninstall pytest-qt -y"
_HYDRA = "pip install -r requirements/dev.txt\npip install -e ."
_HYDRA_OLD = "\n".join(
    [
        "sed -i 's|isort@git+git://github.com/timothycrosley/isort|isort@git+https://github.com/timothycrosley/isort|g'"
        " requirements/dev.txt",
        '{ tail -n1 requirements/requirements.txt | grep -q "." && echo ""; } >> requirements/requirements.txt',
        'echo "pip==24.0" >> requirements/requirements.txt',
        'pip install "pip==24.0"',
    ]
)
_MONAI = "\n".join(
    [
        r"sed -i '/^git+https:\/\/github.com\/Project-MONAI\//d' requirements-dev.txt",
        "python -m pip install types-pkg-resources==0.1.3 pytest",
        "pip install -r requirements-dev.txt",
        "python setup.py develop",
    ]
)
_MYPY = f"python -m pip install -r test-requirements.txt\n{_EDITABLE}"

_SWE_GYM: Mapping[str, Versions] = {
    "bokeh/bokeh": [
        (
            "0",
            TestSpec(
                "pytest -rA -n0",
                'pip install "setuptools<66" "jinja2<3.1"\nprintf "1\\n" | python setup.py develop\nbokeh sampledata',
            ),
        ),
        ("3.0", TestSpec("pytest -rA -n0", f"{_EDITABLE}\npython -m pip install bokeh_sampledata")),
    ],
    "conan-io/conan": [
        ("0", replace(_CONAN, before=_CONAN_PATH + _CONAN_OLD + _CONAN_NEEDS)),
        ("1.60", _CONAN),
        ("2.0", replace(_CONAN, before=_CONAN_PATH + _CONAN_OLD + _CONAN_NEEDS)),
        ("2.1", _CONAN),
    ],
    "dask/dask": [("0", TestSpec("pytest -n0 -rA --color=no", "python -m pip install --no-deps -e ."))],
    "facebookresearch/hydra": [
        ("0", TestSpec(_VERBOSE, f"{_HYDRA_OLD}\n{_HYDRA}")),
        ("1.3", TestSpec(_VERBOSE, _HYDRA)),
    ],
    "getmoto/moto": [("0", TestSpec(_SERIAL, "make init"))],
    "iterative/dvc": [
        ("0", TestSpec(_PYTEST, f'{_DVC}\npython -m pip install "numpy<=1.20"\npython -m pip install "pytest<8"')),
        ("3.4", TestSpec(_PYTEST, _DVC)),
    ],
    "modin-project/modin": [
        ("0", TestSpec(_SERIAL, f"{_EDITABLE}\npython -m pip install numpy==1.23.1 protobuf==3.20.1")),
        ("0.20", TestSpec(_SERIAL)),
    ],
    "pandas-dev/pandas": [
        ("0", TestSpec(_VERBOSE, f"python -m pip install 'numpy<2'\n{_PANDAS}")),
        ("2.2", TestSpec(_VERBOSE, _PANDAS)),
    ],
    "project-monai/monai": [("0", TestSpec(_PYTEST, _MONAI))],
    "pydantic/pydantic": [
        (
            "0",
            TestSpec(
                "pytest -rA --tb=short -vv -o console_output_style=classic --no-header",
                'export PATH="$HOME/.local/bin:$PATH"\npdm add pre-commit\nmake install',
                "parse_log_pytest_v2",
            ),
        )
    ],
    "python/mypy": [
        ("0", TestSpec(_SERIAL, f"{_MYPY}\npip install pytest pytest-xdist\nhash -r")),
        ("1.0", TestSpec(_SERIAL, f"{_MYPY}\nhash -r")),
        ("1.7", TestSpec(_PYTEST, f"{_MYPY}\nhash -r")),
    ],
}

_CHANGED = re.compile(r"^diff --git a/.* b/(.*)$", re.MULTILINE)
_MYPY_CASE = re.compile(r"\[case ([^\]]+)\]")
_DATA = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
"""Suffixes of data files in test patches, which are not passed to the test runner."""


def of_swe_gym(repo: str, version: str, test_patch: str) -> TestSpec:
    """Return the test spec of a SWE-Gym record; raises CallerError for an unknown repository, or without a test."""
    if repo.lower() not in _SWE_GYM:
        raise CallerError(f"no test command is known for the repository {repo!r:.200}", field="repo")
    [first, *later] = _SWE_GYM[repo.lower()]
    [*_, (_, spec)] = [first, *(kind for kind in later if _number(kind[0]) <= _number(version))]
    spec = replace(spec, before=f"{OPTIONS}\n{spec.before}")
    if repo == "python/mypy":
        # mypy's test cases are in data files, which pytest cannot select by path.
        if not (cases := _MYPY_CASE.findall(test_patch)):
            raise CallerError("contains no test case of mypy", field="test_patch")
        return replace(spec, command=f"{spec.command} -k {shlex.quote(' or '.join(cases))}")
    return replace(spec, command=f"{spec.command} {shlex.join(test_files(test_patch))}")


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def test_files(test_patch: str) -> list[str]:
    """Return the test files that a patch changes, without data files; raises CallerError if there are none."""
    files = [file for file in _CHANGED.findall(test_patch) if not file.endswith(_DATA)]
    if not files:
        raise CallerError("changes no test file", field="test_patch")
    return files


START, END = ">>>>> Start Test Output", ">>>>> End Test Output"

_OPENED = re.compile(r"(?<!<)<<(?P<tabs>-?)[ \t]*(?:\\?(?P<bare>[\w.-]+)|(['\"])(?P<quoted>[\w. -]+)\3)")
_GIT = re.compile(r"\s*git (?:-c \S+ )*(?:apply|checkout|status|show|diff)\b[^&|;]*(?:<<.*)?")
_DOWNLOADS = re.compile(
    r"\b(?:pip3?|uv|conda|mamba|apt-get|apt|npm|npx|yarn|pnpm|bun|go|cargo|mvnw?|gradlew?|ant|bundle|gem|composer|curl|"
    r"wget|make|tox)\b"
)


def of_script(script: str, parser: str) -> TestSpec:
    """Return the test spec of a SWE-bench record's ``eval_script``; raises CallerError without a test command."""
    lines = [line for line in script.strip().split("\n") if line not in ("#!/bin/bash", OPTIONS)]
    start = next((number for number, line in enumerate(lines) if START in line), len(lines))
    end = next((number for number, line in enumerate(lines) if END in line and number > start), start)
    if not (command := "\n".join(lines[start + 1 : end]).strip()):
        raise CallerError("has no command between the marks of the tests' output", field="eval_script")
    before = "\n".join([OPTIONS, *_without_git_commands(lines[:start])])
    return TestSpec(command, before, parser, network=may_download(f"{before}\n{command}"))


def may_download(before: str) -> bool:
    """Return whether shell lines call a program that downloads packages."""
    return bool(_DOWNLOADS.search(before))


def _without_git_commands(lines: Sequence[str]) -> Iterator[str]:
    rest = list(lines)
    while rest:
        end = _end_of_command(rest)
        command, rest = rest[:end], rest[end:]
        if _GIT.fullmatch(re.sub(r"\\\n", " ", "\n".join(command)).partition("\n")[0]):
            yield ":"  # bash refuses branches and functions without a command
        else:
            yield from command


def _end_of_command(lines: Sequence[str]) -> int:
    """Return the number of lines of the first shell command, including continuation lines and a here-document."""
    head = next((number for number, line in enumerate(lines) if not line.endswith("\\")), len(lines) - 1) + 1
    if opened := _OPENED.search("\n".join(lines[:head])):
        word = opened["bare"] or opened["quoted"]
        for number, line in enumerate(lines[head:], head + 1):
            if (line.lstrip("\t") if opened["tabs"] else line) == word:
                return number
    return head  # without an end marker, "<<" is a bit shift


R2E_TIMEOUT_S = 300.0
"""R2E-Gym's time limit for the tests of a row, in seconds."""

_R2E_TEST_FOLDERS = frozenset({"test", "tests", "Test", "Tests"})
_MARKS = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}

Record = Mapping[str, Any]
Converter = Callable[[Record, str | None], dict[str, Any]]


def _names(value: object) -> object:
    """Decode a list that some exports of the datasets store as JSON text; other values are returned unchanged."""
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
    """Record of SWE-bench (all editions) and SWE-Gym.

    ``image``, ``eval_script``, ``log_parser`` and ``eval_type`` exist only in the editions of swebench 5.
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
    """Installation and test commands of a SWE-rebench record."""

    test_cmd: Text
    log_parser: Annotated[str, StringConstraints(strict=True, pattern=r"^parse_log_\w+$")]
    pre_install: str | list[str] | None = None
    install: str | list[str] | None = None


class SweRebenchRecord(SweBenchRecord):
    """Record of SWE-rebench: the fields of SWE-bench, and the record's own image and test commands."""

    docker_image: Image
    install_config: Annotated[InstallConfig, BeforeValidator(parsed)]


def _r2e_fix(commit: Mapping[str, Any]) -> str:
    """Return a commit's patch to Python files that are not tests; may be empty."""
    try:
        lines = [line for part in commit["file_diffs"] if _belongs_to_fix(part) for line in _diff_lines(part)]
        return "".join(line + "\n" for line in lines)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"malformed commit: {error!r}") from error


def _belongs_to_fix(part: Mapping[str, Any]) -> bool:
    path = PurePosixPath(part["header"]["file"]["path"])
    is_test = path.name.startswith("test_") or path.name.endswith("_test.py") or _R2E_TEST_FOLDERS & {*path.parts}
    return path.suffix == ".py" and not is_test and not part.get("is_binary_file")


def _diff_lines(part: Mapping[str, Any]) -> Iterator[str]:
    path = part["header"]["file"]["path"]
    yield f"diff --git a/{path} b/{path}"
    if misc := part["header"].get("misc_line"):  # such as "new file mode 100644"
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
    length = lines.get("length")  # the dataset omits a length of 1
    return f"{lines['start']}" if length is None else f"{lines['start']},{length}"


class R2eGymRecord(_Record):
    """Record of R2E-Gym."""

    repo_name: Text
    docker_image: Image
    commit_hash: CommitId
    problem_statement: Text
    fix: Json[Annotated[Any, AfterValidator(_r2e_fix)]] = Field(alias="parsed_commit_content")
    expected_output_json: Json[Annotated[dict[str, TestStatus], AfterValidator(r2e_names), Field(min_length=1)]]


def swe_bench(record: Record, prefix: str | None) -> dict[str, Any]:
    """Convert a SWE-bench record to a row.

    Args:
        prefix: registry and folder of the images; ``None`` keeps the dataset's own images.

    Raises:
        CallerError: the record is malformed; names the field.
    """
    read = _read(SweBenchRecord, record)
    name = f"sweb.eval.x86_64.{read.instance_id.replace('__', '_1776_')}:latest".lower()
    image = read.image if read.image and prefix is None else f"{prefix or 'docker.io/swebench'}/{name}"
    if read.eval_script is None or read.log_parser is None:
        raise CallerError(
            "missing: this edition has no test script; use the edition of huggingface.co/SWE-bench",
            field="eval_script",
        )
    spec = of_script(read.eval_script, read.log_parser)
    return _swe_bench_row(read, "swe-bench", image, spec)


def swe_gym(record: Record, prefix: str | None) -> dict[str, Any]:
    read = _read(SweBenchRecord, record)
    name = f"sweb.eval.x86_64.{read.instance_id.replace('__', '_s_')}:latest".lower()
    spec = of_swe_gym(read.repo, read.version, read.test_patch)
    return _swe_bench_row(read, "swe-gym", f"{prefix or 'docker.io/xingyaoww'}/{name}", spec)


def swe_rebench(record: Record, prefix: str | None) -> dict[str, Any]:
    """Convert a SWE-rebench record; see :func:`swe_bench`.

    Raises:
        UnusableRecord: the record has no image, as in the dataset's unfiltered split.
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
    before = "\n".join([OPTIONS, *steps])
    command = f"{config.test_cmd} {shlex.join(test_files(read.test_patch))}"
    spec = TestSpec(command, before, config.log_parser, network=may_download(before))
    return _swe_bench_row(read, "swe-rebench", _address(read.docker_image, prefix), spec)


def r2e_gym(record: Record, prefix: str | None) -> dict[str, Any]:
    read = _read(R2eGymRecord, record)
    issue = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", read.problem_statement, re.DOTALL)
    instance = _instance(
        dataset="r2e-gym",
        repo=read.repo_name,
        version=read.commit_hash,
        problem_statement=(issue[1] if issue else read.problem_statement).strip(),
        patch=read.fix,
        # R2E-Gym's images keep the tests in /r2e_tests; their run_tests.sh expects r2e_tests in the repository.
        before_tests="[ -e r2e_tests ] || ln -s /r2e_tests r2e_tests",
        test_command="bash run_tests.sh",
        log_parser=R2E_PARSER,
        expected_output=read.expected_output_json,
        test_timeout_s=R2E_TIMEOUT_S,
    )
    return make_row(
        f"{read.repo_name}__{read.commit_hash}", f"docker://{_address(read.docker_image, prefix)}", instance
    )


CONVERTERS: Mapping[str, Converter] = {
    "swe-bench": swe_bench,
    "swe-gym": swe_gym,
    "swe-rebench": swe_rebench,
    "r2e-gym": r2e_gym,
}
"""Converters by the dataset's name."""


def _address(image: str, prefix: str | None) -> str:
    """Return an image's address below ``prefix``; ``None`` keeps the address, with docker.io as default registry."""
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
        raise validation_refusal(error) from error


def _instance(**fields: Any) -> SweInstance:
    try:
        return SweInstance(**fields)
    except ValidationError as error:
        raise validation_refusal(error) from error
