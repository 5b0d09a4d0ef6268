# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How a record's tests are run, and whose log parser reads what they print. Pure.

Records of SWE-bench have a script of their own, which swebench runs: what stands before the mark of the tests' output
(exports, installations, builds) is run before the tests, as it is written and with the options of the shell that
swebench sets. Left out are git's commands by which the script lays the hidden tests and shows what was changed: the
environment lays them itself, and its repository has another history.

Records of SWE-Gym have none, and its harness is in no package: its commands are here, by repository and version. Tests
to run are the files that the row's ``test_patch`` changes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nemo_gym_prorl.failures import CallerError


@dataclass(frozen=True, slots=True)
class TestSpec:
    """How a record's tests are run.

    Attributes:
        command: runs the tests; in the table of SWE-Gym without the files to run.
        before: lines of a shell that come before it.
        parser: swebench's name of the parser of what it prints.
        network: the tests ask servers, or what comes before them has to download before it can test the change.
    """

    command: str
    before: str = "python -m pip install -e ."
    parser: str = "parse_log_pytest"
    network: bool = False


OPTIONS = "set -uxo pipefail"
"""Under which swebench runs every such script."""

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"

_OPENED = re.compile(r"(?<!<)<<(?P<tabs>-?)[ \t]*(?:\\?(?P<bare>[\w.-]+)|(['\"])(?P<quoted>[\w. -]+)\3)")
_GIT = re.compile(r"\s*git (?:-c \S+ )*(?:apply|checkout|status|show|diff)\b[^&|;]*(?:<<.*)?")
_DOWNLOADS = re.compile(
    r"\b(?:pip3?|uv|conda|mamba|apt-get|apt|npm|npx|yarn|pnpm|bun|go|cargo|mvnw?|gradlew?|ant|bundle|gem|composer|curl|"
    r"wget|make|tox)\b"
)


def of_script(script: str, parser: str) -> TestSpec:
    """What a record's own script runs.

    Raises:
        CallerError: it has no marks, or nothing between them.
    """
    lines = [line for line in script.strip().split("\n") if line not in ("#!/bin/bash", OPTIONS)]
    start = next((number for number, line in enumerate(lines) if START in line), len(lines))
    end = next((number for number, line in enumerate(lines) if END in line and number > start), start)
    if not (command := "\n".join(lines[start + 1 : end]).strip()):
        raise CallerError("runs nothing between the marks of the tests' output", field="eval_script")
    before = "\n".join([OPTIONS, *_without_gits_part(lines[:start])])
    return TestSpec(command, before, parser, network=may_download(f"{before}\n{command}"))


def may_download(before: str) -> bool:
    """Whether lines of a shell call what fetches packages."""
    return bool(_DOWNLOADS.search(before))


def _without_gits_part(lines: Sequence[str]) -> Iterator[str]:
    rest = list(lines)
    while rest:
        end = _end_of_command(rest)
        command, rest = rest[:end], rest[end:]
        if _GIT.fullmatch(re.sub(r"\\\n", " ", "\n".join(command)).partition("\n")[0]):
            yield ":"  # it may be all that a branch or a function has
        else:
            yield from command


def _end_of_command(lines: Sequence[str]) -> int:
    """How many lines the first command has, with its continuations and its here-document."""
    head = next((number for number, line in enumerate(lines) if not line.endswith("\\")), len(lines) - 1) + 1
    if opened := _OPENED.search("\n".join(lines[:head])):
        word = opened["bare"] or opened["quoted"]
        for number, line in enumerate(lines[head:], head + 1):
            if (line.lstrip("\t") if opened["tabs"] else line) == word:
                return number
    return head  # what has no end is a shift of bits


Versions = Sequence[tuple[str, TestSpec]]
"""The first version of each kind, in their order."""

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
        (
            "0",
            TestSpec(
                _PYTEST,
                f'{_DVC}\npython -m pip install "numpy<=1.20"\npython -m pip install "pytest<8"',
            ),
        ),
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
"""Files that belong to tests and are none."""


def of_swe_gym(repo: str, version: str, test_patch: str) -> TestSpec:
    """How a row of SWE-Gym is tested.

    Raises:
        CallerError: nothing is known of its repository; or its patch changes no test.
    """
    if repo.lower() not in _SWE_GYM:
        raise CallerError(f"nothing is known of how to test {repo!r:.200}", field="repo")
    [first, *later] = _SWE_GYM[repo.lower()]
    [*_, (_, spec)] = [first, *(kind for kind in later if _number(kind[0]) <= _number(version))]
    spec = replace(spec, before=f"{OPTIONS}\n{spec.before}")
    if repo == "python/mypy":
        # Its tests are cases in data files, which pytest knows by their names.
        if not (cases := _MYPY_CASE.findall(test_patch)):
            raise CallerError("names no case of mypy's", field="test_patch")
        return replace(spec, command=f"{spec.command} -k {shlex.quote(' or '.join(cases))}")
    return replace(spec, command=f"{spec.command} {shlex.join(test_files(test_patch))}")


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def test_files(test_patch: str) -> list[str]:
    """The files to run: those that a test patch changes, without data.

    Raises:
        CallerError: it changes none.
    """
    files = [file for file in _CHANGED.findall(test_patch) if not file.endswith(_DATA)]
    if not files:
        raise CallerError("changes no test file", field="test_patch")
    return files
