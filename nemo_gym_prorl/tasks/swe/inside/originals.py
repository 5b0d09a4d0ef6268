# SPDX-License-Identifier: Apache-2.0
"""Whether code in memory is what its file says. Part of a program in the sandbox, for Python 3.5 and later.

A file is compiled as pytest would, with its assertions rewritten and without, before anything of the repository is
imported. A function that the file defines once, with no decorator but marks of pytest's, must then have that code
whenever it is looked at. It protects from another ``__code__``, another function in its place, and another test's
function. Not from what code is made of at run time: values in globals, closures and fixtures; nor from what a
decorator, a metaclass or a base class in another file makes of a function.
"""

import ast
import importlib
import os
import types
import warnings


_compile, _open, _realpath, _stat = compile, open, os.path.realpath, os.stat
_parsed = ast.PyCF_ONLY_AST
LARGEST_FILE = 4 << 20


def shape(code):
    """All of a code object that decides what it does, as something that can be compared."""
    return (
        code.co_name, code.co_argcount, code.co_kwonlyargcount, code.co_flags, code.co_code, code.co_names,
        code.co_varnames, code.co_freevars, code.co_cellvars, tuple(_constant(value) for value in code.co_consts),
    )  # fmt: skip


def _constant(value):
    if isinstance(value, types.CodeType):
        return shape(value)
    if isinstance(value, tuple):
        return ("tuple",) + tuple(_constant(part) for part in value)
    if isinstance(value, frozenset):
        return ("frozenset", frozenset(_constant(part) for part in value))
    return (type(value).__name__, repr(value))


def _directly_in(code):
    return [value for value in code.co_consts if isinstance(value, types.CodeType)]


def _nested(code):
    for part in _directly_in(code):
        yield part
        for inner in _nested(part):
            yield inner


class Originals:
    """What files said when they were read.

    Args:
        rewrite: pytest's ``rewrite_asserts``, where it is pytest that imports the tests.
    """

    def __init__(self, rewrite=None):
        self._rewrite = rewrite
        self._files = {}
        self._defined = {}
        self._shapes = {}

    def read(self, path, config=None):
        """Remember a file; what can't be compiled has no original."""
        tree, codes = self._versions(path, config)
        if not codes:
            return
        self._files[_realpath(path)] = {shape(inner) for code in codes for inner in _nested(code)}
        self._defined[_realpath(path)] = _plain_functions(tree, codes)

    def shape(self, code):
        """As :func:`shape`, once for each code object."""
        held = self._shapes.get(id(code))
        if held is None or held[0] is not code:
            held = self._shapes[id(code)] = (code, shape(code))
        return held[1]

    def anywhere(self, code):
        """Some file that was read has such a code in it."""
        said = self.shape(code)
        return any(said in codes for codes in self._files.values())

    def defines(self, path, name):
        """The file defines it so that its code is known; ``name`` is e.g. ``"TestAll.test_one"``."""
        return name in self._defined.get(_realpath(path), ())

    def is_genuine(self, code, since):
        """Whether the file that a code object names says so, and has not been written since a time."""
        path = _realpath(code.co_filename)
        if path in self._files:
            return self.shape(code) in self._files[path]
        try:
            if _stat(path).st_ctime > since:
                return False
        except OSError:
            return False
        _, codes = self._versions(path, None)
        return any(shape(inner) == shape(code) for whole in codes for inner in _nested(whole))

    def changed(self, path, namespace):
        """Names of functions of a module that are not what its file says. For those that are no tests, another
        function of the tests' own files is fine: tests replace their helpers."""
        for name, shapes in self._defined.get(_realpath(path), {}).items():
            function = find(namespace, name)
            code = getattr(function, "__code__", None)
            if not isinstance(code, types.CodeType):
                yield name
            elif self.shape(code) in shapes and function.__globals__ is namespace:
                continue
            elif name.rpartition(".")[2].startswith("test") or not self.anywhere(code):
                yield name

    def _versions(self, path, config):
        """The syntax tree of a file, and its code without and with rewritten assertions; none if it can't be had."""
        try:
            with _open(path, "rb") as file:
                source = file.read(LARGEST_FILE)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = _compile(source, path, "exec", _parsed, True)
                codes = [_compile(source, path, "exec", 0, True)]
                if self._rewrite is not None:
                    codes.append(_compile(self._rewritten(source, path, config), path, "exec", 0, True))
            return tree, codes
        except Exception:  # of whatever pytest there is; nothing of the repository has been imported yet
            return None, []

    def _rewritten(self, source, path, config):
        tree = _compile(source, path, "exec", _parsed, True)
        code = self._rewrite.__code__
        if "source" in code.co_varnames[: code.co_argcount]:
            self._rewrite(tree, source, path, config)
        else:  # before pytest 5
            self._rewrite(tree, importlib.import_module("py").path.local(path), config)
        return tree


def find(namespace, name):
    """A function by its qualified name, or ``None``; descriptors are not asked."""
    for part in name.split("."):
        if part not in namespace:
            return None
        found = namespace[part]
        found = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
        namespace = vars(found) if isinstance(found, type) else {}
    return found


def _plain_functions(tree, codes):
    """Qualified name to shapes."""
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and _is_stored(node)}
    bound |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_stored(node)}
    bound |= {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    found = {}

    def look(body, inside, wholes, prefix):
        definitions = [node for node in body if isinstance(node, _DEFINITIONS)]
        names = [node.name for node in definitions]
        for node in definitions:
            if node.name in bound or names.count(node.name) > 1 or not all(map(_marks, node.decorator_list)):
                continue
            parts = [[part for part in _directly_in(whole) if part.co_name == node.name] for whole in wholes]
            if any(len(part) != 1 for part in parts):
                continue
            below = [part[0] for part in parts]
            if not isinstance(node, ast.ClassDef):
                found[prefix + node.name] = {shape(code) for code in below}
            elif not node.keywords and not inside:
                look(node.body, True, below, node.name + ".")

    look(tree.body, False, codes, "")
    return found


def _is_stored(node):
    return not isinstance(node.ctx, ast.Load)


_DEFINITIONS = (ast.FunctionDef, ast.ClassDef) + ((ast.AsyncFunctionDef,) if hasattr(ast, "AsyncFunctionDef") else ())


def _marks(decorator):
    """``pytest.mark.NAME`` and ``pytest.mark.NAME(...)`` give a function back as it was."""
    mark = decorator.func if isinstance(decorator, ast.Call) else decorator
    if isinstance(mark, ast.Name):
        return mark.id in ("staticmethod", "classmethod")
    of = mark.value if isinstance(mark, ast.Attribute) else None
    return isinstance(of, ast.Attribute) and of.attr == "mark" and getattr(of.value, "id", "") == "pytest"
