"""The small changes of `python dev/mutate.py`: a comparison turned, a constant moved, a call left out."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

SWAPS: Mapping[type, type] = {
    **dict(zip((ast.Lt, ast.LtE, ast.Gt, ast.GtE), (ast.LtE, ast.Lt, ast.GtE, ast.Gt))),
    **dict(zip((ast.Eq, ast.NotEq, ast.Is, ast.IsNot), (ast.NotEq, ast.Eq, ast.IsNot, ast.Is))),
    **dict(zip((ast.In, ast.NotIn, ast.And, ast.Or), (ast.NotIn, ast.In, ast.Or, ast.And))),
    **dict(zip((ast.Add, ast.Sub, ast.Mult, ast.Div), (ast.Sub, ast.Add, ast.Div, ast.Mult))),
    **dict(zip((ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult), (ast.Div, ast.Mult, ast.Mult, ast.Mult))),
    **dict(zip((ast.BitOr, ast.BitAnd), (ast.BitAnd, ast.BitOr))),
}
MODULE = "<module>"
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
TYPES = ("annotation", "returns")
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class Mutant:
    """A file with one small change."""

    file: str
    """Relative to the checkout."""
    function: str
    before: str
    """The changed lines as they were, and below as they are, with single spaces."""
    after: str
    source: bytes

    def __str__(self) -> str:
        return f"{self.file}: {self.function}\n- {self.before}\n+ {self.after}"


def changes(node: ast.AST) -> Iterator[str]:
    """Yield the texts that may stand in a node's place."""
    other = copy.copy(node)
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield repr(node.value - 1 if node.value == 1 else node.value + 1)
    elif isinstance(node, ast.Compare) and isinstance(other, ast.Compare):
        other.ops = [SWAPS[type(node.ops[0])](), *node.ops[1:]]
        yield f"({ast.unparse(other)})"
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPS:
        other.op = SWAPS[type(node.op)]()  # type: ignore[attr-defined]
        yield ast.unparse(other) if isinstance(node, ast.AugAssign) else f"({ast.unparse(other)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
        yield NAMES[node.func.id] + ast.unparse(node)[3:]
    if isinstance(node, ast.Return) and node.value and ast.unparse(node.value) != "None":
        yield "return None"
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    if isinstance(node, ast.Raise | ast.Delete | ast.Break | ast.Continue | ast.AugAssign):
        yield "pass"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "pass"
    elif isinstance(node, ast.Assign) and isinstance(targets[0], ast.Attribute | ast.Subscript):
        yield "pass"


def negated(test: ast.expr) -> str | None:
    """Return a bare condition (`if x:`) as its opposite; one with operators has changes of its own."""
    return f"(not {ast.unparse(test)})" if isinstance(test, ast.Name | ast.Attribute | ast.Call) else None


def mutants(file: str, source: bytes) -> Iterator[Mutant]:
    """Yield every mutant of a file: of what it does, not of types and texts."""
    lines = source.splitlines(keepends=True)

    def place(node: ast.AST, function: str, text: str) -> Mutant:
        first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
        head, tail = lines[first][: node.col_offset], lines[last][node.end_col_offset :]  # type: ignore[attr-defined]
        after = head + text.encode() + tail
        changed = b"".join([*lines[:first], after, *lines[last + 1 :]])
        before = b"".join(lines[first : last + 1])
        return Mutant(file, function, *(" ".join(t.decode().split()) for t in (before, after)), changed)

    def visit(node: ast.AST, function: str) -> Iterator[Mutant]:
        if isinstance(node, Function):
            function = getattr(node, "name", function)
        for text in changes(node):
            yield place(node, function, text)
        if isinstance(node, ast.Raise):
            return
        if isinstance(test := getattr(node, "test", None), ast.expr) and (text := negated(test)):
            yield place(test, function, text)
        skipped = [getattr(node, field, None) for field in TYPES] + getattr(node, "decorator_list", [])
        for child in ast.iter_child_nodes(node):
            if child not in skipped and not isinstance(child, ast.JoinedStr):
                yield from visit(child, function)

    yield from visit(ast.parse(source), MODULE)
