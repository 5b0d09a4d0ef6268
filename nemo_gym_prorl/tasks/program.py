# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A grader and the modules it imports as one program for ``python3 -I -c``, under their own names."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


BYTE_ORDER_MARK = "\ufeff"
"""Python skips it at a file's beginning, and takes none at that of a text."""

_LOADER = """\
import sys, types
def load(name, source):
    parent, _, child = name.rpartition(".")
    if parent and parent not in sys.modules:
        load(parent, "")
        sys.modules[parent].__path__ = []
    module = types.ModuleType(name)
    sys.modules[name] = module
    if parent:
        setattr(sys.modules[parent], child, module)
    exec(compile(source, name, "exec"), module.__dict__)
"""


@cache
def program(main: str, *modules: str) -> str:
    """The source.

    Args:
        main: full name of the module that is run.
        modules: full names of those of ours that it imports, each after what it imports itself.
    """
    loads = [f"load({name!r}, {_read(name)!r})\n" for name in modules]
    return "".join([_LOADER, *loads, f"exec(compile({_read(main)!r}, 'grader', 'exec'))\n"])


def _read(name: str) -> str:
    package, _, module = name.rpartition(".")
    return files(package).joinpath(f"{module}.py").read_text(encoding="utf-8")
