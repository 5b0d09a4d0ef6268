# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How the tests of the datasets' repositories are run, and whose log parser reads that: rows do not say it. Pure.

Facts of SWE-bench's and SWE-Gym's own harnesses, which keep them by repository and version, with what these run before
each test run: exports, and the installation of the repository with the change in it. Tests to run are the files that
the row's ``test_patch`` changes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.tasks.swe.eval_script import OPTIONS


@dataclass(frozen=True, slots=True)
class How:
    """How a repository's tests are run.

    Attributes:
        command: what test files are added to.
        parser: swebench's name of the parser of what it prints.
        before: lines of a shell that come before it.
        network: the tests ask servers, or what comes before them has to download before it can test the change.
    """

    command: str
    parser: str
    before: str = "python -m pip install -e ."
    network: bool = False


Versions = Sequence[tuple[str, How]]
"""The first version of each kind, in their order."""

_PYTEST = "pytest -rA"
_SERIAL = "pytest -n0 -rA"
_VERBOSE = "pytest -rA --tb=long"

_EN_US = "export LANG=en_US.UTF-8\nexport LANGUAGE=en_US:en\nexport LC_ALL=en_US.UTF-8\n"
_EDITABLE = "python -m pip install -e ."
_DJANGO = How(
    "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
    "parse_log_django",
    _EN_US + "export PYTHONIOENCODING=utf8\npython setup.py install",
)
_ASTROPY = How(_PYTEST, "parse_log_astropy", "python -m pip install -e .[test] --verbose", network=True)
_MATPLOTLIB = How(_PYTEST, "parse_log_matplotlib", _EDITABLE, network=True)
_SEABORN = How("pytest --no-header -rA", "parse_log_seaborn", "python -m pip install -e .[dev]")


def _pytest(parser: str, before: str = _EDITABLE, *, network: bool = False) -> Versions:
    return [("0", How(_PYTEST, parser, before, network))]


_SWE_BENCH: Mapping[str, Versions] = {
    "astropy/astropy": [
        ("0", replace(_ASTROPY, command="pytest -rA -vv -o console_output_style=classic --tb=no -p no:nose")),
        ("3.0", _ASTROPY),
    ],
    "django/django": [
        ("0", replace(_DJANGO, before="python setup.py install")),
        ("1.7", _DJANGO),
        ("1.9", replace(_DJANGO, command="./tests/runtests.py --verbosity 2")),
        ("1.10", _DJANGO),
        (
            "3.0",
            replace(
                _DJANGO,
                before=f"sed -i '/en_US.UTF-8/s/^# //g' /etc/locale.gen && locale-gen\n{_EN_US}{_EDITABLE}",
            ),
        ),
        ("4.0", replace(_DJANGO, before=_EDITABLE)),
    ],
    "marshmallow-code/marshmallow": _pytest("parse_log_marshmallow", "python -m pip install -e '.[dev]'"),
    "matplotlib/matplotlib": [
        ("0", replace(_MATPLOTLIB, before="python setup.py build; python setup.py install", network=False)),
        ("3.0", _MATPLOTLIB),
        ("3.8", replace(_MATPLOTLIB, before='python -m pip install --no-build-isolation -e ".[dev]"', network=False)),
    ],
    "mwaskom/seaborn": [("0", replace(_SEABORN, before=_EDITABLE)), ("0.12", _SEABORN)],
    "pallets/flask": _pytest("parse_log_flask"),
    "psf/requests": _pytest("parse_log_requests", "python -m pip install .", network=True),
    "pvlib/pvlib-python": _pytest("parse_log_pvlib", "python -m pip install -e .[all]"),
    "pydata/xarray": _pytest("parse_log_xarray"),
    "pydicom/pydicom": _pytest("parse_log_pydicom"),
    "pylint-dev/astroid": _pytest("parse_log_astroid"),
    "pylint-dev/pylint": _pytest("parse_log_pylint"),
    "pytest-dev/pytest": _pytest("parse_log_pytest"),
    "pyvista/pyvista": _pytest("parse_log_pyvista"),
    "scikit-learn/scikit-learn": _pytest(
        "parse_log_scikit", "python -m pip install -v --no-use-pep517 --no-build-isolation -e ."
    ),
    "sphinx-doc/sphinx": [
        ("0", How("tox --current-env -epy39 -v -- -rA", "parse_log_sphinx", "python -m pip install -e .[test]"))
    ],
    "sqlfluff/sqlfluff": _pytest("parse_log_sqlfluff"),
    "sympy/sympy": [
        (
            "0",
            How("PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose", "parse_log_sympy"),
        )
    ],
}

_CONAN_PATH = "export PYTHONPATH=${PYTHONPATH:-}:$(pwd)\n"
_CONAN_OLD = "echo 'cython<3' > /tmp/constraint.txt; export PIP_CONSTRAINT=/tmp/constraint.txt\n"
_CONAN_NEEDS = "\n".join(
    f"python -m pip install -r conans/{name}.txt"
    for name in ("requirements", "requirements_server", "requirements_dev")
)
_CONAN = How(_SERIAL, "parse_log_pytest", _CONAN_PATH + _CONAN_NEEDS)
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
            How(
                "pytest -rA -n0",
                "parse_log_pytest",
                'pip install "setuptools<66" "jinja2<3.1"\nprintf "1\\n" | python setup.py develop\nbokeh sampledata',
            ),
        ),
        ("3.0", How("pytest -rA -n0", "parse_log_pytest", f"{_EDITABLE}\npython -m pip install bokeh_sampledata")),
    ],
    "conan-io/conan": [
        ("0", replace(_CONAN, before=_CONAN_PATH + _CONAN_OLD + _CONAN_NEEDS)),
        ("1.60", _CONAN),
        ("2.0", replace(_CONAN, before=_CONAN_PATH + _CONAN_OLD + _CONAN_NEEDS)),
        ("2.1", _CONAN),
    ],
    "dask/dask": [("0", How("pytest -n0 -rA --color=no", "parse_log_pytest", "python -m pip install --no-deps -e ."))],
    "facebookresearch/hydra": [
        ("0", How(_VERBOSE, "parse_log_pytest", f"{_HYDRA_OLD}\n{_HYDRA}")),
        ("1.3", How(_VERBOSE, "parse_log_pytest", _HYDRA)),
    ],
    "getmoto/moto": [("0", How(_SERIAL, "parse_log_pytest", "make init"))],
    "iterative/dvc": [
        (
            "0",
            How(
                _PYTEST,
                "parse_log_pytest",
                f'{_DVC}\npython -m pip install "numpy<=1.20"\npython -m pip install "pytest<8"',
            ),
        ),
        ("3.4", How(_PYTEST, "parse_log_pytest", _DVC)),
    ],
    "modin-project/modin": [
        ("0", How(_SERIAL, "parse_log_pytest", f"{_EDITABLE}\npython -m pip install numpy==1.23.1 protobuf==3.20.1")),
        ("0.20", How(_SERIAL, "parse_log_pytest")),
    ],
    "pandas-dev/pandas": [
        ("0", How(_VERBOSE, "parse_log_pytest", f"python -m pip install 'numpy<2'\n{_PANDAS}")),
        ("2.2", How(_VERBOSE, "parse_log_pytest", _PANDAS)),
    ],
    "project-monai/monai": _pytest("parse_log_pytest", _MONAI),
    "pydantic/pydantic": [
        (
            "0",
            How(
                "pytest -rA --tb=short -vv -o console_output_style=classic --no-header",
                "parse_log_pytest_v2",
                'export PATH="$HOME/.local/bin:$PATH"\npdm add pre-commit\nmake install',
            ),
        )
    ],
    "python/mypy": [
        ("0", How(_SERIAL, "parse_log_pytest", f"{_MYPY}\npip install pytest pytest-xdist\nhash -r")),
        ("1.0", How(_SERIAL, "parse_log_pytest", f"{_MYPY}\nhash -r")),
        ("1.7", How(_PYTEST, "parse_log_pytest", f"{_MYPY}\nhash -r")),
    ],
}

_CHANGED = re.compile(r"^diff --git a/.* b/(.*)$", re.MULTILINE)
_MYPY_CASE = re.compile(r"\[case ([^\]]+)\]")
_DATA = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
"""Files that belong to tests and are none."""


def swe_bench(repo: str, version: str, test_patch: str) -> How:
    """How a row of SWE-bench is tested.

    Raises:
        CallerError: nothing is known of its repository; or its patch changes no test.
    """
    how = _known(_SWE_BENCH, repo, repo, version)
    files = test_files(test_patch)
    if repo == "django/django":
        files = [file.removesuffix(".py").removeprefix("tests/").replace("/", ".") for file in files]
    return replace(how, command=f"{how.command} {shlex.join(files)}")


def swe_gym(repo: str, version: str, test_patch: str) -> How:
    """How a row of SWE-Gym is tested.

    Raises:
        CallerError: as of :func:`swe_bench`.
    """
    how = _known(_SWE_GYM, repo, repo.lower(), version)
    if repo == "python/mypy":
        # Its tests are cases in data files, which pytest knows by their names.
        if not (cases := _MYPY_CASE.findall(test_patch)):
            raise CallerError("names no case of mypy's", field="test_patch")
        return replace(how, command=f"{how.command} -k {shlex.quote(' or '.join(cases))}")
    return replace(how, command=f"{how.command} {shlex.join(test_files(test_patch))}")


def _known(table: Mapping[str, Versions], repo: str, key: str, version: str) -> How:
    if key not in table:
        raise CallerError(f"nothing is known of how to test {repo!r:.200}", field="repo")
    [first, *later] = table[key]
    [*_, (_, how)] = [first, *(kind for kind in later if _number(kind[0]) <= _number(version))]
    return replace(how, before=f"{OPTIONS}\n{how.before}")


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
