"""Mutants of a Lua script: operators, comparisons, constants, dropped lines, swapped arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from .mutant import DROPPED, Mutant

TOKEN = re.compile(
    r"""(?P<comment>--[^\n]*)
      | (?P<string>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")
      | (?P<number>\d+)
      | (?P<name>[A-Za-z_][A-Za-z_0-9.]*)
      | (?P<operator>\.\.|==|~=|<=|>=|[-+*/%^#<>=(){}\[\],;:])""",
    re.VERBOSE,
)

SWAPS = {
    "<": ("<=", "comparison"),
    "<=": ("<", "comparison"),
    ">": (">=", "comparison"),
    ">=": (">", "comparison"),
    "==": ("~=", "comparison"),
    "~=": ("==", "comparison"),
    "+": ("-", "operator"),
    "-": ("+", "operator"),
    "*": ("/", "operator"),
    "/": ("*", "operator"),
    "and": ("or", "operator"),
    "or": ("and", "operator"),
    "not": ("", "operator"),
    "math.max": ("math.min", "operator"),
    "math.min": ("math.max", "operator"),
    "true": ("false", "constant"),
    "false": ("true", "constant"),
}
BEFORE_OPERAND = {"=", "(", ",", "{", "[", "..", "return", "and", "or", "==", "~=", "<", ">"}
"""A minus after one of these is a sign."""
STATEMENT = re.compile(r"^[ \t]*(?:call\(.*\)|[\w.\[\]# +-]+ = .*|\w+\(.*\)|return\b.*)$")


class Token(NamedTuple):
    """A piece of source that is neither blank nor a comment."""

    text: str
    start: int
    end: int
    kind: str


def lua_mutants(file: str, source: str) -> Iterator[Mutant]:
    """Make all mutants of a script.

    Args:
        file: Path that the mutants carry.
        source: Its text.
    """
    tokens = list(_tokens(source))
    for before, token in pairwise([Token("", 0, 0, ""), *tokens]):
        if token.text in SWAPS and not (token.text == "-" and before.text in BEFORE_OPERAND):
            new, kind = SWAPS[token.text]
            yield Mutant(file, token.start, token.end, new, kind)
        elif token.kind == "number":
            yield Mutant(file, token.start, token.end, str(int(token.text) + 1), "constant")
    yield from _dropped_lines(file, source)
    yield from _swapped_arguments(file, tokens, source)


def _tokens(source: str) -> Iterator[Token]:
    for match in TOKEN.finditer(source):
        if match.lastgroup != "comment":
            yield Token(match[0], match.start(), match.end(), match.lastgroup or "")


def _dropped_lines(file: str, source: str) -> Iterator[Mutant]:
    start = 0
    for line in source.split("\n"):
        code = line.split(" --")[0]
        if STATEMENT.match(code) and not code.lstrip().startswith("local") and _is_balanced(code):
            yield Mutant(file, start, start + len(line), "", DROPPED)
        start += len(line) + 1


def _is_balanced(code: str) -> bool:
    bare = re.sub(r"'(?:\\.|[^'\\])*'", "", code)
    words = re.findall(r"\b(?:function|do|then|end)\b", bare)
    is_closed = all(bare.count(a) == bare.count(b) for a, b in ("()", "{}", "[]"))
    return is_closed and words.count("end") == len(words) - words.count("end")


def _swapped_arguments(file: str, tokens: list[Token], source: str) -> Iterator[Mutant]:
    """Swap the last two arguments of each call that has two or more."""
    for i, (name, bracket) in enumerate(pairwise(tokens)):
        is_definition = i > 0 and tokens[i - 1].text == "function"
        if name.kind != "name" or bracket.text != "(" or is_definition or name.text in SWAPS:
            continue
        arguments = _arguments(tokens, i + 2)
        is_unordered = tokens[i + 2].text == "'UNLINK'" and len(arguments) > 2
        if len(arguments) < 2 or is_unordered:
            continue
        (a, b), (c, d) = arguments[-2:]
        left, right = source[a:b], source[c:d]
        if left != right:
            yield Mutant(file, a, d, right + source[b:c] + left, "swapped arguments")


def _arguments(tokens: list[Token], first: int) -> list[tuple[int, int]]:
    """Return where the arguments of a call begin and end, of which `first` is the first token."""
    found: list[tuple[int, int]] = []
    depth, begin = 0, first
    for i in range(first, len(tokens)):
        text = tokens[i].text
        if depth == 0 and text in {",", ")"} and i > begin:
            found.append((tokens[begin].start, tokens[i - 1].end))
            begin = i + 1
        if text in {"(", "{", "["}:
            depth += 1
        elif text in {")", "}", "]"}:
            depth -= 1
        if depth < 0:
            break
    return found
