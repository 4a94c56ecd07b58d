"""Names and short texts of the source that need no dictionary: a few rules over the syntax tree.

Each rule has the number of places that still break it. A number may only fall: lower it with the
change that mends a place.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("actors", "agents", "broker", "buffer", "configs", "console", "lab", "learner")

EMPTY_NOUNS = {"each", "found", "own", "given", "made", "known"}
MOST_BARE = 5  # classes that may define the same verb before it says nothing any more
CONVENTIONAL = {"close", "start", "stop", "run", "wait", "open", "read", "send", "receive"} | {
    *("add", "load", "log", "decode", "kill", "submit", "step", "forward", "backward", "score")
}
"""Verbs that mean the same on every class, as in Python's library, torch and gymnasium."""
LEAST_WORDS = 4

Tree = tuple[str, ast.Module]


@cache
def trees() -> list[Tree]:
    paths = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return [(str(p.relative_to(ROOT)), ast.parse(p.read_text(encoding="utf-8"))) for p in paths]


def bare_verbs(trees: list[Tree]) -> Iterator[str]:
    """Public methods of one word that many classes define: a search finds all or none of them.

    The methods of a protocol count once, with the protocol and not with each class that has them.
    """
    classes = [
        (file, node)
        for file, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    protocols = {node.name: public_methods(node) for _, node in classes if is_protocol(node)}
    places: dict[str, list[str]] = defaultdict(list)
    for file, node in classes:
        methods = public_methods(node)
        borrowed = {
            name
            for protocol, names in protocols.items()
            if protocol != node.name and len(names) > 1 and names <= methods
            for name in names
        }
        for name in set(bare_methods(node)) - borrowed:
            places[name].append(f"{file}: {node.name}.{name}")
    for verb, those in places.items():
        if len(those) > MOST_BARE and verb not in CONVENTIONAL:
            yield from those


def is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).split("[")[0] == "Protocol" for base in node.bases)


def public_methods(node: ast.ClassDef) -> set[str]:
    methods = [
        part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {method.name for method in methods if not method.name.startswith("_")}


def bare_methods(node: ast.ClassDef) -> Iterator[str]:
    for method in node.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and "_" not in method.name:
            decorators = {ast.unparse(decorator) for decorator in method.decorator_list}
            if not decorators & {"property", "cached_property"}:
                yield method.name


def shared_class_names(trees: list[Tree]) -> Iterator[str]:
    """Names of classes that two modules define."""
    places: dict[str, list[str]] = defaultdict(list)
    for file, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file}: class {node.name}")
    for those in places.values():
        yield from those[1:]


def empty_nouns(trees: list[Tree]) -> Iterator[str]:
    """Variables and arguments whose name says nothing of what they hold."""
    for file, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            elif isinstance(node, ast.arg):
                name = node.arg
            else:
                continue
            if name in EMPTY_NOUNS:
                yield f"{file}:{node.lineno} {name}"


def texts_of_nothing(trees: list[Tree]) -> Iterator[str]:
    """Texts of arguments and fields that begin with "Of", and so never say what is there."""
    for file, tree in trees:
        for node in ast.walk(tree):
            body = node.body if isinstance(node, ast.ClassDef | ast.Module) else []
            for before, after in pairwise(body):
                is_field = isinstance(before, ast.Assign | ast.AnnAssign)
                if is_field and text_of(after).startswith("Of "):
                    yield f"{file}:{after.lineno} {text_of(after)[:60]}"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                text = ast.get_docstring(node) or ""
                for line in re.findall(r"^\s*\w+: Of\b.*", text, re.MULTILINE):
                    yield f"{file}:{node.lineno} {line.strip()[:60]}"


def text_of(node: ast.stmt) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    value = node.value.value if is_text else ""  # type: ignore[attr-defined]
    return value if isinstance(value, str) else ""


def short_docstrings(trees: list[Tree]) -> Iterator[str]:
    """Docstrings of public names that are too short to say anything."""
    for file, tree in trees:
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            title = (ast.get_docstring(node) or "").split("\n\n")[0]
            if title and not node.name.startswith("_") and len(title.split()) < LEAST_WORDS:
                yield f"{file}:{node.lineno} {node.name}: {title}"


Rule = Callable[[list[Tree]], Iterator[str]]
LEFT: dict[Rule, int] = {
    bare_verbs: 0,
    shared_class_names: 0,
    empty_nouns: 0,
    texts_of_nothing: 0,
    short_docstrings: 0,
}
"""Places that break a rule today."""
BROKEN: dict[Rule, str] = {
    bare_verbs: "".join(f"class C{n}:\n    def take(self): ...\n" for n in range(6)),
    shared_class_names: "class Part: ...\nclass Part: ...",
    empty_nouns: "found = [each for each in ()]\ndef f(own): ...",
    texts_of_nothing: 'class C:\n    a: int = 0\n    """Of a run."""\n',
    short_docstrings: 'def load():\n    """Load it."""\n',
}
COUNTS: dict[Rule, int] = {bare_verbs: 6, shared_class_names: 1, empty_nouns: 3}


@pytest.mark.parametrize("rule", LEFT, ids=lambda rule: rule.__name__)
def test_no_more_names_and_texts_need_a_dictionary(rule: Rule) -> None:
    places = list(rule(trees()))

    assert len(places) == LEFT[rule], "\n".join(places)


@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_a_rule_sees_what_breaks_it(rule: Rule) -> None:
    assert len(list(rule([("made.py", ast.parse(BROKEN[rule]))]))) == COUNTS.get(rule, 1)
