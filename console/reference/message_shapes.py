"""Messages as the source has them: errors, refusals, lines of logs, and reasons in Lua.

A value within a message is shown by the name of what it is: `<path> must be a YAML file`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ROOMS = ("configs", "buffer", "broker", "actors", "learner", "console")
LEVELS = {"warning", "error", "exception", "critical"}
UNNAMED = "<…>"
OWN_STYLE = re.compile(r"[^ ].* must .*, got\b")
"""The form of most texts about something that a person has to change."""
OF_BYTES = {"RecordError", "WeightsError", "MalformedReply"}
"""Errors about bytes of a peer: they stand within other messages as their reason."""
OF_CALLERS = {"ValueError", "TypeError", "Stuck"}
"""Errors of code that calls ours wrongly, and of faults on purpose."""
LUA_REASON = re.compile(r"\b(?:charge|take_away|drop_unit)\(.*'([a-z_ ]+)'\)")


Nodes = Sequence[ast.AST]
"""All nodes of a module."""


class Found(NamedTuple):
    """A message, and the module that has it."""

    module: str
    text: str


@cache
def error_classes() -> frozenset[str]:
    """Find all classes of errors of this project, the base left out."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for _, nodes in _modules()
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    found = {"NyalaError"}
    while new := {name for name, of in bases.items() if of & found} - found:
        found |= new
    return frozenset(found - {"NyalaError"})


def texts_for_people() -> list[Found]:
    """Find what is said about something that a person has to change."""
    found: dict[Found, None] = {}
    for module, nodes in _modules():
        hidden, raised = _hidden(nodes), _raised(nodes)
        for node in nodes:
            if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in hidden:
                text = shape(node)
                if id(node) in raised or OWN_STYLE.match(text):
                    found[Found(module, text)] = None
    return list(found)


def refusals() -> set[str]:
    """Find the codes of the broker's refusals."""
    return _first_arguments("Refusal")


def alerts() -> set[str]:
    """Find the names of alerts."""
    return _first_arguments("Alert")


def log_lines() -> list[Found]:
    """Find lines of logs from warning on."""
    found: dict[Found, None] = {}
    for module, nodes in _modules():
        for node in nodes:
            if isinstance(node, ast.Call) and _is_warning(node.func):
                found |= {Found(module, text): None for text in _choices(node.args[0])}
    return list(found)


def lua_reasons() -> set[str]:
    """Find for which reasons scripts of the store end tasks and groups."""
    files = (ROOT / "buffer" / "lua").rglob("*.lua")
    lines = (line for path in files for line in path.read_text(encoding="utf-8").splitlines())
    return {reason for line in lines for reason in LUA_REASON.findall(line)}


def shape(node: ast.expr) -> str:
    """Write a text of the source with names for its values; `<…>` is one without a name."""
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(parts):
            return "".join(shape(part) for part in parts)
        case ast.FormattedValue(ast.Name(name) | ast.Attribute(attr=name)):
            return f"<{name}>"
        case _:
            return UNNAMED


def _is_warning(function: ast.expr) -> bool:
    match function:
        case ast.Attribute(value=ast.Name("log"), attr=level):
            return level in LEVELS
        case ast.Attribute(value=ast.Call(func=ast.Attribute(attr="get_logger")), attr=level):
            return level in LEVELS
        case _:
            return False


def _choices(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.IfExp):
        yield from (*_choices(node.body), *_choices(node.orelse))
    else:
        yield shape(node)


def _first_arguments(of: str) -> set[str]:
    return {
        shape(node.args[0])
        for _, nodes in _modules()
        for node in nodes
        if _is_call(node, {of}) and isinstance(node, ast.Call)
    }


def _is_call(node: ast.AST, names: Collection[str]) -> bool:
    match node:
        case ast.Call(func=ast.Name(name), args=[_, *_]):
            return name in names
        case _:
            return False


def _raised(nodes: Nodes) -> set[int]:
    """Find texts that errors of ours are made with."""
    ours = error_classes()
    return {id(n.args[0]) for n in nodes if isinstance(n, ast.Call) and _is_call(n, ours)}


def _hidden(nodes: Nodes) -> set[int]:
    """Find texts that are parts of others, of assertions, or of errors not shown alone."""
    hidden: set[int] = set()
    for node in nodes:
        match node:
            case ast.JoinedStr() | ast.Assert():
                within = set(ast.walk(node)) - {node}
            case ast.Expr(ast.Constant()):
                within = {node.value}
            case ast.Call() if _is_call(node, OF_BYTES | OF_CALLERS):
                within = set(ast.walk(node))
            case _:
                continue
        hidden |= {id(each) for each in within}
    return hidden


@cache
def _modules() -> list[tuple[str, Nodes]]:
    paths = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return [
        (str(path.relative_to(ROOT)), list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
        for path in paths
    ]
