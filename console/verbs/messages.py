"""All messages of a run with cause and cure, for `nyala messages` and docs/messages.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

from configs.markdown import table

# --------------------------------------------------------------------------------------------------
# Messages as the source has them: classes of errors, and texts for whoever has to change something.
#
# A value within a message is shown by the name of what it is: `<path> must be a YAML file`.

ROOT = Path(__file__).parents[2]
ROOMS = ("configs", "buffer", "broker", "actors", "agents", "learner", "console")
UNNAMED = "<…>"
OWN_STYLE = re.compile(r"[^ ].* must .*, got\b")
"""The form of most texts about something that a person has to change."""
AS_IT_IS = {"quoted", "printable", "repr", "str", "tuple", "list", "sorted"}
"""Calls that show a value as what it is."""
OF_BYTES = {"RecordError", "WeightsError", "MalformedReply"}
"""Errors about bytes of a peer: they stand within other messages as their reason."""
OF_CALLERS = {"ValueError", "TypeError"}
"""Errors of code that calls ours wrongly."""


Nodes = Sequence[ast.AST]
"""All nodes of a module."""


class ModuleMessage(NamedTuple):
    """A message, and the module that has it."""

    module: str
    text: str


@cache
def error_classes() -> frozenset[str]:
    """Find all classes of errors of this project, the base left out."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for _, nodes in modules()
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    classes = {"NyalaError"}
    while new := {name for name, of in bases.items() if of & classes} - classes:
        classes |= new
    return frozenset(classes - {"NyalaError"})


def texts_for_people() -> list[ModuleMessage]:
    """Find the texts about something that a person has to change."""
    texts: dict[ModuleMessage, None] = {}
    for module, nodes in modules():
        hidden, raised = _hidden(nodes), _raised(nodes)
        for node in nodes:
            if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in hidden:
                text = shape(node)
                if id(node) in raised or OWN_STYLE.match(text):
                    texts[ModuleMessage(module, text)] = None
    return list(texts)


def shape(node: ast.expr) -> str:
    """Write a text of the source with names for its values; `<…>` is one without a name."""
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(parts):
            return "".join(shape(part) for part in parts)
        case ast.FormattedValue(ast.Call(ast.Name(how), [argument, *_])) if how in AS_IT_IS:
            return shape(ast.FormattedValue(argument, -1))
        case ast.FormattedValue(ast.Name(name) | ast.Attribute(attr=name)):
            return f"<{name}>"
        case _:
            return UNNAMED


def _is_call(node: ast.AST, names: Collection[str]) -> bool:
    match node:
        case ast.Call(func=ast.Name(name), args=[_, *_]):
            return name in names
        case _:
            return False


def _raised(nodes: Nodes) -> set[int]:
    """Find texts with which errors of Nyala are raised."""
    ours = error_classes()
    return {id(n.args[0]) for n in nodes if isinstance(n, ast.Call) and _is_call(n, ours)}


def _hidden(nodes: Nodes) -> set[int]:
    """Find texts that are parts of other texts, of assertions, or of errors not shown alone."""
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
        hidden |= {id(part) for part in within}
    return hidden


@cache
def modules() -> list[tuple[str, Nodes]]:
    """List the modules of the source."""
    paths = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return [
        (str(path.relative_to(ROOT)), list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
        for path in paths
    ]


# --------------------------------------------------------------------------------------------------
# All messages of a run with cause and cure, as lines of a terminal and as docs/messages.md.

CAUSES = Path(__file__).parent / "causes.yaml"
VALUE = re.compile(r"<\w+>|<…>|%s")
LEAST_FIXED = 12  # characters beside values: fewer would fit any text
HEAD = """\
# Messages

All messages of Nyala, with their causes and cures. `<name>` and `<…>` stand for a value.
In a terminal, paste what you see: `nyala messages "no answer from the broker yet"`. Prometheus'
alerts are in [operations](operations.md), advice about training in
[when reward does not rise](when-reward-does-not-rise.md).

This page is generated by `nyala messages --markdown > docs/messages.md` from the source and
`console/verbs/causes.yaml`.
"""
ABOUT = {
    "exit codes": "Codes of every role and of `nyala` itself. A role's process is started again "
    "if that can help.",
    "errors": "Classes of errors in tracebacks and in `import nyala`.",
    "refusals of the broker": "Actors and observers get them as `(refused as CODE)`; the "
    "broker's metrics count them by code.",
    "dead letters": "Reasons in `nyala buffer dead list RUN`: tasks that are no longer tried.",
    "dropped groups": "Reasons in `dropped_groups` of metrics.jsonl: groups that were not trained.",
    "alerts": "Names in `alerts` of metrics.jsonl, and in the learner's log as `ALERT`.",
    "lines of nyala up": "Lines of `nyala up` itself, above or instead of the live view.",
    "log lines": "Lines of `warning` and above in `nyala logs RUN`. Where the cure is nothing, the "
    "run continues by itself.",
}
REFUSED = (
    "Error texts of `nyala` and of starting roles, by the package that checks. Each has the "
    "requirement and then the value that it got, which is the cause. The cure is the requirement, "
    "or the text after the semicolon."
)


class ExplainedMessage(NamedTuple):
    """One message, its cause and its cure."""

    family: str
    text: str
    cause: str
    cure: str


@cache
def explained() -> dict[str, dict[str, list[str]]]:
    """Return family -> message -> cause and cure."""
    causes: dict[str, dict[str, list[str]]] = yaml.safe_load(CAUSES.read_text(encoding="utf-8"))
    return causes


def messages() -> list[ExplainedMessage]:
    """List the messages that are explained by hand, then the refusals."""
    by_hand = [
        ExplainedMessage(family, text, *why)
        for family, rows in explained().items()
        for text, why in rows.items()
    ]
    return [*by_hand, *(message for _, message in _refused())]


def as_lines(wanted: str | None) -> str:
    """Write the messages that fit a text from a terminal or a log, else those with these words."""
    every = messages()
    if wanted is not None:
        fitting = [message for message in every if _fits(message, wanted)]
        words = wanted.lower()
        every = fitting or _with_words(words.split(), every)
    if not every:
        return "no message has this text; try a few words of it\n"
    return "\n".join(
        f"{message.text}  ({message.family})\n    cause: {message.cause}\n"
        f"    cure: {message.cure}\n"
        for message in every
    )


def _with_words(words: Sequence[str], every: Sequence[ExplainedMessage]) -> list[ExplainedMessage]:
    """Choose the messages with these words side by side, values between them, else with all."""
    beside = re.compile(r"\s+(?:<\S+>\s+)*".join(map(re.escape, words)))
    texts = {message: " ".join(message).lower() for message in every}
    chosen = [message for message, text in texts.items() if beside.search(text)]
    return chosen or [
        message for message, text in texts.items() if all(word in text for word in words)
    ]


def as_markdown() -> str:
    """Write the text of docs/messages.md."""
    parts = [HEAD]
    for family, rows in explained().items():
        lines = [(f"`{text}`", *why) for text, why in rows.items()]
        parts += [f"## {family.capitalize()}\n", f"{ABOUT[family]}\n"]
        parts += [table(("message", "cause", "cure"), lines) + "\n"]
    parts += ["## What is refused\n", f"{REFUSED}\n"]
    by_room: dict[str, list[tuple[str, str]]] = {}
    for module, message in _refused():
        of_room = by_room.setdefault(module.partition("/")[0], [])
        of_room.append((f"`{message.text}`", message.cure))
    for room, texts in by_room.items():
        parts += [f"### {room}\n", table(("message", "cure"), texts) + "\n"]
    return "\n".join(parts)


def _refused() -> Iterator[tuple[str, ExplainedMessage]]:
    for module, text in texts_for_people():
        shown, _, then = text.partition("; ")
        what, _, got = shown.partition(", got ")
        cure = then or what.removeprefix(f"{UNNAMED} ")
        yield module, ExplainedMessage("refused", " ".join(shown.split()), f"got {got}", cure)


def _fits(message: ExplainedMessage, seen: str) -> bool:
    """Whether a text that a person has seen is this message, with values filled in."""
    fixed = VALUE.split(message.text)
    if sum(map(len, fixed)) < LEAST_FIXED:
        return False
    return re.search(".*".join(map(re.escape, fixed)), seen) is not None
