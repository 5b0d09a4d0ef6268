# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Test commands of SWE-Gym's repositories, by repository and version. Pure.

SWE-Gym's records contain no test commands, and its harness is not packaged.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nemo_gym_prorl.failures import CallerError


@dataclass(frozen=True, slots=True)
class TestSpec:
    """Commands that run a record's tests.

    Attributes:
        command: test command; in :data:`_SWE_GYM` without the test files.
        before: shell lines that run before the tests.
        parser: swebench's name of the log parser.
        network: whether the tests or the lines before them need the network.
    """

    command: str
    before: str = "python -m pip install -e ."
    parser: str = "parse_log_pytest"
    network: bool = False


OPTIONS = "set -uxo pipefail"
"""Shell options of swebench's scripts."""

Versions = Sequence[tuple[str, TestSpec]]
"""First version of each range with its test spec, in ascending order."""

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
"""Suffixes of data files in test patches."""


def of_swe_gym(repo: str, version: str, test_patch: str) -> TestSpec:
    """Return the test spec of a SWE-Gym record.

    Raises:
        CallerError: the repository is unknown, or the patch changes no test; names the field.
    """
    if repo.lower() not in _SWE_GYM:
        raise CallerError(f"no test command is known for the repository {repo!r:.200}", field="repo")
    [first, *later] = _SWE_GYM[repo.lower()]
    [*_, (_, spec)] = [first, *(kind for kind in later if _number(kind[0]) <= _number(version))]
    spec = replace(spec, before=f"{OPTIONS}\n{spec.before}")
    if repo == "python/mypy":
        # Test cases are in data files; pytest selects them by name.
        if not (cases := _MYPY_CASE.findall(test_patch)):
            raise CallerError("contains no test case of mypy", field="test_patch")
        return replace(spec, command=f"{spec.command} -k {shlex.quote(' or '.join(cases))}")
    return replace(spec, command=f"{spec.command} {shlex.join(test_files(test_patch))}")


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def test_files(test_patch: str) -> list[str]:
    """Return the test files that a patch changes, without data files.

    Raises:
        CallerError: the patch changes no test file.
    """
    files = [file for file in _CHANGED.findall(test_patch) if not file.endswith(_DATA)]
    if not files:
        raise CallerError("changes no test file", field="test_patch")
    return files
