# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which changes count, by their names and by what they say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.tasks.swe.changes import LINK, Change, Entry, Protection, hash_of, ignored, places, same_settings
from nemo_gym_prorl.tasks.swe.instance import SweInstance
from tests.tasks.swe import records


INSTANCE = SweInstance(
    dataset="made",
    repo="a/b",
    problem_statement="x",
    patch=records.PATCH,
    test_patch=records.TEST_PATCH,
    FAIL_TO_PASS=("lib/tests/test_sums.py::test_add", "checks/sums.py::test_all"),
    test_command="bin/check lib/tests/test_sums.py",
)
BASE = places(
    ["lib/sums.py", "json/data.txt", "packaging/build.sh", "attr/__init__.py", "setup.cfg", "src/own/__init__.py"],
    "folder lib\nmodule execnet\nmodule own\nno words\n",
)
FOLDERS = st.lists(st.sampled_from(["a", "lib", "src", "deep", "x y"]), max_size=4).map(lambda parts: "/".join(parts))
PROTECTED = ["conftest.py", "test_a.py", "a_test.py", "pytest.ini", ".pytest.toml", "tox.ini", "sitecustomize.py",
             "x.pth", "x.dist-info/entry_points.txt", "tests/any.txt", "testing/helper.py", "tests"]  # fmt: skip


@given(FOLDERS, st.sampled_from(PROTECTED))
def test_what_tests_and_runners_go_by_is_protected_in_any_folder(folder: str, name: str) -> None:
    assert Protection(INSTANCE).why(f"{folder}/{name}" if folder else name, BASE) is not None


@given(FOLDERS, st.sampled_from(["setup.cfg", "pyproject.toml"]))
def test_settings_are_looked_at_in_any_folder(folder: str, name: str) -> None:
    path = f"{folder}/{name}" if folder else name
    assert Protection(INSTANCE).by_content(path)
    content = b"[tool:pytest]\naddopts = -p a\n" if name == "setup.cfg" else b"[tool.pytest.ini_options]\na = 1\n"
    for mode, text in (("100644", content), (LINK, b"plain.cfg")):
        change = Change(path, Entry(mode, hash_of(text)), True)
        assert path in ignored([change], {}, {hash_of(text): text}, Protection(INSTANCE), BASE)
    harmless = Change(path, Entry("100644", hash_of(b"[metadata]\nname = 1\n")), True)
    contents = {hash_of(b"[metadata]\nname = 1\n"): b"[metadata]\nname = 1\n"}
    assert path not in ignored([harmless], {}, contents, Protection(INSTANCE), BASE)


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("pygments.py", False),
        ("pygments", False),
        ("lib/pygments/__init__.py", False),
        ("src/execnet.py", False),
        ("json/__init__.py", False),
        ("packaging/__init__.py", False),
        ("string.cpython-312-x86_64-linux-gnu.so", False),
        ("json/more.txt", True),
        ("attr/new.py", True),
        ("own.py", True),
        ("deep/json.py", True),
        ("lib/sums.py", True),
        ("new.py", True),
        ("bin/check", False),
        ("checks/sums.py", False),
        ("checks", False),
        ("lib/test/checks.py", False),
        ("lib/deep/testutils/base.py", False),
        ("lib/testing_utils.py", False),
        ("lib/_testlib.py", False),
        ("lib/commands/test.py", True),
        ("lib/contest.py", True),
    ],
)
def test_a_module_in_the_place_of_an_installed_one_does_not_count(path: str, counts: bool) -> None:
    assert (Protection(INSTANCE).why(path, BASE) is None) is counts


def test_helpers_count_if_the_fix_is_in_one_of_them() -> None:
    for path in ("lib/test/client.py", "lib/testutils/deep/base.py"):
        row = INSTANCE.model_copy(update={"patch": records.PATCH.replace("lib/sums.py", path)})
        folder = "/".join(path.split("/")[:2])
        assert Protection(row).why(path, BASE) is None
        assert Protection(row).why(f"{folder}/other.py", BASE) is None
        assert Protection(row).why(f"{folder}/pytest.ini", BASE) is not None
        assert Protection(row).why("deep/test/other.py", BASE) is not None


BEFORE = b"[metadata]\nname = a\n\n[tool:pytest]\naddopts = -q\n"


@pytest.mark.parametrize(
    ("after", "same"),
    [
        (BEFORE.replace(b"name = a", b"name = b\nversion = 2"), True),
        (b"[new]\na = 1\n" + BEFORE, True),
        (BEFORE.replace(b"-q", b"-q -p a\nAddopts = -q"), False),
        (BEFORE.replace(b"-q", b"-q\n  -p a"), False),
        (BEFORE.replace(b"[tool:pytest]", b"[tool:pytest] # ]"), False),
        (BEFORE.replace(b"-q\n", b"-q\n[x]\n[pytest] ; a\n"), False),
        (BEFORE.replace(b"-q", b"-q\x0c[x]\n -p a"), False),
        (BEFORE.replace(b"-q\n", b"-q\n\r -p a\n"), False),
        (b"\xef\xbb\xbf" + BEFORE, False),
        (BEFORE + b"\xff", False),
        (b"", False),
    ],
)
def test_settings_are_the_same_to_every_parser_or_differ(after: bytes, same: bool) -> None:
    assert same_settings("setup.cfg", BEFORE, after) is same


@given(st.binary(max_size=200))
def test_any_content_is_compared(content: bytes) -> None:
    for name in ("setup.cfg", "pyproject.toml"):
        assert same_settings(name, content, content) in (True, False)
        assert not same_settings(name, b"[tool:pytest]\na=1\n[tool.pytest]\na=1\n", content)
