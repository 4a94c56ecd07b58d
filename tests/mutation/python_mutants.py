"""Mutants of a Python module: operators, comparisons, constants, dropped lines, swapped arguments.

Words for people are left alone: log lines, texts of errors, docstrings and annotations.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .mutant import DROPPED, Mutant

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "+",
    ast.BitOr: "&",
    ast.BitAnd: "|",
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


def python_mutants(file: str, source: str) -> Iterator[Mutant]:
    """Make all mutants of a module that still compile.

    Args:
        file: Path that the mutants carry.
        source: Its text.
    """
    visitor = _Visitor(file, source)
    visitor.visit(ast.parse(source))
    original = ast.dump(ast.parse(source))
    for mutant in visitor.found:
        try:
            if ast.dump(ast.parse(mutant.apply(source))) != original:
                yield mutant
        except SyntaxError:
            continue


class _Visitor(ast.NodeVisitor):
    def __init__(self, file: str, source: str) -> None:
        self.found: list[Mutant] = []
        self._file = file
        self._source = source
        self._lines = [0]
        for line in source.encode().split(b"\n"):
            self._lines.append(self._lines[-1] + len(line) + 1)
        self._bytes = source.encode()

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant) or _is_log(node.value):
            return
        self._drop(node)
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._drop(node)  # its text is for people

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave assertions alone: they are tests."""

    def visit_Assign(self, node: ast.Assign) -> None:
        if not all(isinstance(target, ast.Name) for target in node.targets):
            self._drop(node)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._drop(node)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        """Leave annotations alone."""

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for child in node.body:  # a class that is frozen or has slots decides nothing by it
            self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for child in [*node.args.defaults, *(d for d in node.args.kw_defaults if d), *node.body]:
            self.visit(child)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave texts alone."""

    def visit_Continue(self, node: ast.Continue) -> None:
        self._drop(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._drop(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self._drop(node)
        else:
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            self._between(node.left, node.comparators[0], COMPARISONS.get(type(node.ops[0])))
        else:
            for i, op in enumerate(node.ops):
                left = node.left if i == 0 else node.comparators[i - 1]
                self._between(left, node.comparators[i], COMPARISONS.get(type(op)))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._between(node.left, node.right, OPERATORS.get(type(node.op)), kind="operator")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        new = "or" if isinstance(node.op, ast.And) else "and"
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, new, kind="operator")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace(node, self._text(node.operand), "operator")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._replace(node.test, f"not ({self._text(node.test)})", "operator")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value), "constant")
        elif isinstance(node.value, int):
            self._replace(node, str(node.value + 1), "constant")
        elif isinstance(node.value, float):
            self._replace(node, repr(node.value * 2 + 1), "constant")

    def visit_Call(self, node: ast.Call) -> None:
        if _is_log(node):
            return
        if isinstance(node.func, ast.Name) and node.func.id in CALLS:
            self._replace(node.func, CALLS[node.func.id], "operator")
        elif len(node.args) >= 2:  # of those the order is nothing
            left, right = node.args[-2:]
            a, b, c, d = *self._span(left), *self._span(right)
            text = self._cut(c, d) + self._cut(b, c) + self._cut(a, b)
            self._add(a, d, text, "swapped arguments")
        self.generic_visit(node)

    def _drop(self, node: ast.stmt) -> None:
        self._replace(node, "pass", DROPPED)

    def _between(
        self, left: ast.expr, right: ast.expr, new: str | None, *, kind: str = "comparison"
    ) -> None:
        """Replace the operator between two operands, with the brackets around them kept."""
        if new is None:
            return
        start, end = self._span(left)[1], self._span(right)[0]
        between = self._cut(start, end)
        core = between.strip("() \n\t")
        if core and "#" not in between:
            self._add(start, end, between.replace(core, new, 1), kind)

    def _replace(self, node: ast.expr | ast.stmt, new: str, kind: str) -> None:
        self._add(*self._span(node), new, kind)

    def _add(self, start: int, end: int, new: str, kind: str) -> None:
        """Keep a mutant whose place is given in bytes."""
        begin = len(self._bytes[:start].decode())
        self.found.append(Mutant(self._file, begin, begin + len(self._cut(start, end)), new, kind))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _cut(self, start: int, end: int) -> str:
        return self._bytes[start:end].decode()

    def _text(self, node: ast.expr) -> str:
        return self._cut(*self._span(node))


def _is_log(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "log"
    )
