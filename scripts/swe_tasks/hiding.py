# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Remove test functions from a test file. Pure."""

from __future__ import annotations

import ast
import io
from collections.abc import Iterable, Mapping


def by_file(tests: Iterable[str]) -> dict[str, set[str]]:
    """Group test functions by file: `tests/test_a.py::TestA::test_b[1]` is `TestA::test_b` of `tests/test_a.py`."""
    found: dict[str, set[str]] = {}
    for test in tests:
        file, _, name = test.partition("::")
        found.setdefault(file, set()).add(name.partition("[")[0])
    return found


def without(source: str, functions: Iterable[str]) -> str:
    """Return a test file without some of its functions.

    Args:
        source: the file's source.
        functions: names such as ``test_a`` and ``TestA::test_b``.

    Raises:
        KeyError: a function does not exist or is inherited; contains its name.
        SyntaxError: the file is not valid Python.
    """
    places = _places(ast.parse(source).body, "")
    wanted = set(functions)
    if missing := wanted - places.keys():
        raise KeyError(min(missing))
    lines = list(io.StringIO(source, newline=""))  # lines as the compiler counts them
    gone: set[int] = set()
    for first, last in (_lines(places[name]) for name in wanted):
        gone.update(range(first, last + 1))
    text = "".join(line for number, line in enumerate(lines, 1) if number not in gone)
    return _filled(text, places, wanted, source)


def _filled(text: str, places: Mapping[str, ast.stmt], wanted: set[str], source: str) -> str:
    """Return the remaining source; classes without a body are removed too."""
    try:
        ast.parse(text)
    except SyntaxError:
        whole = {name.rpartition("::")[0] for name in wanted}
        whole.discard("")
        if not whole or whole <= wanted:
            raise
        return without(source, {name for name in wanted if name.rpartition("::")[0] not in whole} | whole)
    return text


def _places(body: Iterable[ast.stmt], prefix: str) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[prefix + node.name] = node
        if isinstance(node, ast.ClassDef):
            found |= _places(node.body, f"{prefix}{node.name}::")
    return found


def _lines(node: ast.stmt) -> tuple[int, int]:
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    assert node.end_lineno is not None
    return first, node.end_lineno
