# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a template wrote of earlier messages, so that the next turn writes only what follows them.

A template is a program over the whole conversation. Most have one loop over the messages, and what that writes of a
message is told by the message, its neighbours, its number, and by what was set before the loop. Whether that is all is
read off the template's syntax once (:func:`with_recall`): every kind of node in the loop's body must be on a list of
those that neither keep nor change anything, and every name must be accounted for. Of such a loop, the messages that
are the same objects as in the last rendering, with the same facts around them, are not written again: their texts are
put in place. Everything before and after the loop is run as ever. A loop of which one node is not understood is left
as it is, and so is one that counts from the end, keeps a namespace, or calls a macro.

Invariant: a template writes the same with recall as without.

Pure: no task, socket, clock or thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jinja2 import Undefined, nodes

from nemo_gym_prorl.policy.text.messages import Tools, tool_for_template


MEMORY = "prorl_recall"
"""The variable of a template in which :class:`Rendering` is."""
OPENED = "add_generation_prompt"
"""The variable that says whether an assistant turn is opened at the end."""
_LOOP, _TEXT = "prorl_recall_loop", "prorl_recall_text"

_EXPRESSIONS = (
    *(nodes.Literal, nodes.Pair, nodes.Keyword, nodes.CondExpr, nodes.Test, nodes.Slice, nodes.Concat),
    *(nodes.Compare, nodes.Operand, nodes.BinExpr, nodes.UnaryExpr, nodes.Getitem, nodes.Getattr),
)
_FILTERS = frozenset(
    "capitalize count d default dictsort first float int items join last length list lower replace reverse safe sort"  # noqa: SIM905
    " string title tojson trim unique upper".split()
)
_METHODS = frozenset(
    "capitalize count endswith find get index isdigit items join keys lower lstrip partition removeprefix removesuffix"  # noqa: SIM905
    " replace rpartition rsplit rstrip split splitlines startswith strip title upper values".split()
)
_FUNCTIONS = frozenset({"range", "dict", "namespace", "raise_exception"})
_IMPURE = frozenset({"cycler", "joiner", "lipsum", "strftime_now", "self", "caller", "varargs", "kwargs", MEMORY})
_OF_INNER_LOOPS = frozenset({"index", "index0", "first", "last", "length", "revindex", "revindex0"})
_PLAIN = (str, int, bool, type(None))
"""Kinds of which equal ones are written alike; of all others (0.0 and -0.0, lists) only the same object is."""


@dataclass(slots=True)
class Recall:
    """What one conversation's renderings have written. Belongs to one template."""

    loops: dict[int, _Pass] = field(default_factory=dict)
    _tools: tuple[Tools, Tools] = ((), ())

    def tools(self, tools: Tools) -> Tools:
        """Tools in the form in which templates get them, the same objects for the same tools."""
        given, plain = self._tools
        if tools is not given:
            if repr(tools) != repr(given):
                plain = [tool_for_template(tool) for tool in tools]
            self._tools = tools, plain
        return plain


class Rendering:
    """One rendering: what it knows from those before, and what it writes.

    Args:
        recall: of the conversation; ``None`` to know nothing.
        variables: what the template is given, but for the messages, the clock, and whether a turn is opened.
    """

    def __init__(self, recall: Recall | None, variables: Mapping[str, object]) -> None:
        self._recall = recall
        self._facts = tuple(part for item in sorted(variables.items()) for part in item)
        self._passes: dict[int, _Pass] = {}

    def over(self, messages: object, number: int, before: int, behind: int, *facts: object) -> _Pass:
        """A loop begins."""
        known = self._recall.loops.get(number) if self._recall is not None else None
        told = tuple(messages) if self._recall is not None and isinstance(messages, list | tuple) else ()
        self._passes[number] = one = _Pass(told, (*self._facts, *facts), known, before, behind)
        return one

    def keep(self) -> None:
        """It came to its end: the next one knows what it wrote, unless a longer and another conversation is known."""
        if self._recall is None:
            return
        for number, one in self._passes.items():
            known = self._recall.loops.get(number)
            if known is None or one.alike or len(one.messages) >= len(known.messages):
                self._recall.loops[number] = one


class _Pass:
    """A loop that is run: what it writes of each message, and which it need not write.

    Those have their neighbours, ``before`` so many and ``behind`` so many, among the messages that are the same as in
    the last run.
    """

    def __init__(
        self, messages: Sequence[object], facts: Sequence[object], known: _Pass | None, before: int, behind: int
    ) -> None:
        self.messages, self.facts, self.texts = messages, facts, list[str]()
        same = known is not None and _same(facts, known.facts)
        self.alike = _alike(messages, known.messages) if known is not None and same else 0
        self._from, self._to = before, max(before, self.alike - behind)
        self._known = known.texts[self._from : self._to] if known is not None else []
        self._at = -1

    def due(self) -> bool:
        """Whether the next message is to be written."""
        self._at += 1
        return not self._from <= self._at < self._to

    def kept(self, text: str) -> str:
        """It was written."""
        self.texts.append(text)
        return text

    def known(self) -> str:
        """What is written instead of one that is not due: the first stands for all."""
        if self._at != self._from:
            return ""
        self.texts += self._known
        return "".join(self._known)


FILTERS = {
    "prorl_recall_over": Rendering.over,
    "prorl_recall_due": _Pass.due,
    "prorl_recall_kept": _Pass.kept,
    "prorl_recall_known": _Pass.known,
}


def _alike(one: Sequence[object], other: Sequence[object]) -> int:
    """How many messages at the beginning are the same objects."""
    at = 0
    for at, (mine, theirs) in enumerate(zip(one, other, strict=False), 1):
        if mine is not theirs:
            return at - 1
    return at


def _same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(_equal, one, other))


def _equal(one: object, other: object) -> bool:
    if one is other:
        return True
    kind = type(one)
    return kind is type(other) and (issubclass(kind, Undefined) or (kind in _PLAIN and one == other))


class _NotUnderstood(Exception):
    """What this loop writes may depend on more than is accounted for."""


def with_recall(template: nodes.Template) -> nodes.Template:
    """A template whose loops over messages recall what they wrote, where that is certain to be the same."""
    if MEMORY in {name.name for name in template.find_all(nodes.Name)}:
        return template
    others = (nodes.Import, nodes.FromImport, nodes.Include, nodes.Extends, nodes.Block, nodes.ImportedName)
    if next(template.find_all(others), None) is not None:
        return template
    for number, (block, loop) in enumerate(list(_loops(template.body))):
        try:
            body = _Body(template, block, loop)
        except _NotUnderstood:
            continue
        at = next(index for index, node in enumerate(block) if node is loop)
        block.insert(at, body.opening(number))
        loop.body = body.instead()
    return template


def _loops(block: list[nodes.Node]) -> Iterator[tuple[list[nodes.Node], nodes.For]]:
    """Loops that are run at most once, with the block that each is in."""
    for node in block:
        if isinstance(node, nodes.For):
            yield block, node
        elif isinstance(node, nodes.If):
            for inner in (node.body, *(other.body for other in node.elif_), node.else_):
                yield from _loops(inner)


class _Body:
    """The body of a loop, and all that it reads.

    Raises:
        _NotUnderstood: it may read, keep or change something that is not told here.
    """

    def __init__(self, template: nodes.Template, block: list[nodes.Node], loop: nodes.For) -> None:
        # It is read twice: no call, no filter.
        read = (loop.iter, *loop.iter.find_all(nodes.Node))
        if not isinstance(loop.target, nodes.Name) or not all(
            isinstance(one, (*_EXPRESSIONS, nodes.Name)) for one in read
        ):
            raise _NotUnderstood
        if loop.test is not None or loop.else_ or loop.recursive:
            raise _NotUnderstood
        self._loop, self._messages = loop, loop.iter.name if isinstance(loop.iter, nodes.Name) else ""
        self._outside = set(_set_in(template.body))
        self._inside = {name.name for name in loop.find_all(nodes.Name) if name.ctx in ("store", "param")}
        spaces = [one for one in template.find_all(nodes.Assign) if _is_namespace(one.node)]
        self._spaces = {one.target.name for one in spaces if isinstance(one.target, nodes.Name)}
        self._macros = {macro.name for macro in template.find_all(nodes.Macro)}
        self._before = self._behind = 0
        self._facts: dict[str, nodes.Expr] = {}
        anywhere = {name.name for name in template.find_all(nodes.Name) if name.ctx in ("store", "param")}
        taken = (self._macros | anywhere) & (_FUNCTIONS | {"loop"})
        if taken or self._inside & (self._outside | self._macros | {self._messages, "messages"}):
            raise _NotUnderstood
        for node in loop.body:
            self._statement(node, inner=False)

    def opening(self, number: int) -> nodes.Node:
        """What stands before the loop."""
        told = [nodes.Const(number), nodes.Const(self._before), nodes.Const(self._behind), *self._facts.values()]
        begun = _filter("over", nodes.Name(MEMORY, "load"), self._loop.iter, *told)
        return self._placed(nodes.Assign(nodes.Name(_LOOP, "store"), begun))

    def instead(self) -> list[nodes.Node]:
        """What stands in the place of the body."""
        run, text = nodes.Name(_LOOP, "load"), nodes.Name(_TEXT, "load")
        written = nodes.AssignBlock(nodes.Name(_TEXT, "store"), None, self._loop.body)
        kept, known = nodes.Output([_filter("kept", run, text)]), nodes.Output([_filter("known", run)])
        return [self._placed(nodes.If(_filter("due", run), [written, kept], [], [known]))]

    def _placed(self, node: nodes.Node) -> nodes.Node:
        node.set_environment(self._loop.environment)  # type: ignore[arg-type]
        for one in (node, *node.find_all(nodes.Node)):
            one.lineno = one.lineno or self._loop.lineno
        return node

    def _statement(self, node: nodes.Node, *, inner: bool) -> None:
        match node:
            case nodes.For(target=target, iter=over, body=body, else_=[], test=None, recursive=False):
                if any(name.name == "loop" for name in target.find_all(nodes.Name)):
                    raise _NotUnderstood
                self._expression(over, inner=inner)
                for one in body:
                    self._statement(one, inner=True)
            case nodes.Assign(target=nodes.Name(), node=value):
                self._expression(value, inner=inner)
            case nodes.Assign(target=nodes.NSRef(name=name), node=value) if name in self._inside - self._outside:
                self._expression(value, inner=inner)
            case nodes.AssignBlock(target=nodes.Name(), filter=None, body=body):
                for one in body:
                    self._statement(one, inner=inner)
            case nodes.If(test=test, body=body, elif_=others, else_=otherwise):
                self._expression(test, inner=inner)
                for one in (*body, *others, *otherwise):
                    self._statement(one, inner=inner)
            case nodes.Output(nodes=parts):
                for part in parts:
                    self._expression(part, inner=inner)
            case nodes.Break() | nodes.Continue() if inner:
                pass
            case _:
                raise _NotUnderstood

    def _expression(self, node: nodes.Node, *, inner: bool) -> None:
        match node:
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr):
                self._of_loop(attr, inner=inner)
                return
            case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Const(value=int(at))) if (
                name == self._messages and at >= 0
            ):
                self._facts[f"{name}[{at}]"] = node
                return
            case nodes.Getitem(node=nodes.Name(name=name), arg=index) if name == self._messages and not inner:
                self._neighbour(index)
                return
            case nodes.Getattr(node=nodes.Name(name=name), attr=attr) if name in self._spaces & self._outside:
                self._facts[f"{name}.{attr}"] = node
                return
            case nodes.Name(name=name, ctx="load"):
                self._name(name)
                return
            case nodes.Call(node=called, dyn_args=None, dyn_kwargs=None):
                if isinstance(called, nodes.Getattr) and called.attr in _METHODS:
                    self._expression(called.node, inner=inner)
                elif not isinstance(called, nodes.Name) or called.name not in _FUNCTIONS:
                    raise _NotUnderstood
                parts: Sequence[nodes.Node] = (*node.args, *node.kwargs)
            case nodes.Filter(node=nodes.Expr(), name=name, dyn_args=None, dyn_kwargs=None) if name in _FILTERS:
                parts = list(node.iter_child_nodes())
            case _ if isinstance(node, _EXPRESSIONS):
                parts = list(node.iter_child_nodes())
            case _:
                raise _NotUnderstood
        for part in parts:
            self._expression(part, inner=inner)

    def _of_loop(self, attr: str, *, inner: bool) -> None:
        if inner:
            if attr not in _OF_INNER_LOOPS:
                raise _NotUnderstood
        elif attr in ("last", "nextitem"):
            self._behind = max(self._behind, 1)
        elif attr == "previtem":
            self._before = max(self._before, 1)
        elif attr not in ("index", "index0", "first"):
            raise _NotUnderstood

    def _neighbour(self, index: nodes.Node) -> None:
        """A message so many places away. Before the first ones Python counts from the end: those are always due."""
        match index:
            case nodes.Sub(left=nodes.Getattr() as place, right=nodes.Const(value=int(value))):
                away = -value
            case nodes.Add(left=nodes.Getattr() as place, right=nodes.Const(value=int(away))):
                pass
            case nodes.Getattr() as place:
                away = 0
            case _:
                raise _NotUnderstood
        if (
            not isinstance(place.node, nodes.Name)
            or place.node.name != "loop"
            or place.attr not in ("index", "index0")
        ):
            raise _NotUnderstood
        away += place.attr == "index"
        self._before, self._behind = max(self._before, -away), max(self._behind, away)

    def _name(self, name: str) -> None:
        if name == self._loop.target.name:  # type: ignore[attr-defined]
            return
        if name in self._spaces & self._outside or name in self._macros | _FUNCTIONS | _IMPURE | {"loop"}:
            raise _NotUnderstood
        if name in (self._messages, "messages"):
            raise _NotUnderstood
        if name in self._outside or name == OPENED:
            self._facts[name] = nodes.Name(name, "load")


def _set_in(block: Sequence[nodes.Node]) -> Iterator[str]:
    """Names that are set in a block for all that follows."""
    for node in block:
        if isinstance(node, nodes.Assign | nodes.AssignBlock):
            yield from (name.name for name in node.target.find_all(nodes.Name))
            if isinstance(node.target, nodes.Name):
                yield node.target.name
        elif isinstance(node, nodes.If):
            yield from _set_in([*node.body, *node.elif_, *node.else_])


def _is_namespace(value: nodes.Node) -> bool:
    return isinstance(value, nodes.Call) and isinstance(value.node, nodes.Name) and value.node.name == "namespace"


def _filter(name: str, value: nodes.Expr, *args: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, f"prorl_recall_{name}", list(args), [], None, None)
