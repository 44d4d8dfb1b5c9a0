"""Small wrong changes to a source file, one at a time.

Each operator stands for a mistake that a person makes, or for a step that is left out:

    arithmetic  + for −, * for /, and so on, also in `x += y`
    operand     one of the two operands alone: a term, a factor or the noise is left out
    boundary    < for <=, > for >=, == for !=, `in` for `not in`, `is` for `is not`
    condition   the test of an if, a while, a choice or a filter is negated
    logic       `and` for `or`, and the other way round
    not         a `not` or a minus sign is left out
    constant    a whole number is one larger, another number twice as large, True is False; defaults of parameters included
    extreme     min for max, any for all, floor for ceil, clamp_min for clamp_max, and the other way round
    drop        a statement that is one call (a charge, a check, an fsync), an augmented assignment or a raise is left out
    argument    a function returns its argument instead of what it makes of it

What can't change a result is left alone: annotations, docstrings, messages, assertions (they are for the type checker), decorators,
the tolerances and sizes named in `KNOBS`, and numbers below 1e-6 or above 1e6, which are tolerances and limits as well.
"""

import ast
import hashlib
from dataclasses import dataclass
from typing import Any

KNOBS = frozenset({"xtol", "rtol", "xatol", "maxsize", "stacklevel", "maxiter", "separators", "ensure_ascii", "indent"})
_SMALLEST, _LARGEST = 1e-6, 1e6

_PAIRS = (
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr), (ast.LShift, ast.RShift)),
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *(("min", "max"), ("any", "all"), ("floor", "ceil"), ("clamp_min", "clamp_max"), ("minimum", "maximum")),
)
_OTHER: dict[Any, Any] = {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])}
_OTHER |= dict.fromkeys((ast.FloorDiv, ast.Mod, ast.Pow), ast.Mult)


@dataclass(frozen=True)
class Mutant:
    """One change: the text between two byte offsets of a file is replaced.

    file       relative to the package
    line       the source line that it begins on, stripped: what the mutant is recognized by when lines move
    change     "before → after"
    number     which of several equal changes in the file this is
    lines      the first and last line of the statement, by which the tests that reach it are found
    on_import  whether the code runs when the module is imported rather than in a test
    """

    file: str
    operator: str
    line: str
    change: str
    number: int
    lines: tuple[int, int]
    on_import: bool
    start: int
    end: int
    after: str

    @property
    def id(self) -> str:
        parts = (self.file, self.operator, self.line, self.change, str(self.number))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def apply(self, source: str) -> str:
        data = source.encode()
        return (data[: self.start] + self.after.encode() + data[self.end :]).decode()


def mutants(source: str, file: str) -> list[Mutant]:
    """Every mutant of a file that compiles, in the order of the file."""
    walker = _Walker(source)
    walker.visit(ast.parse(source))
    found, seen = [], {}
    for operator, node, after, statement, on_import in walker.changes:
        start, end = walker.offset(node.lineno, node.col_offset), walker.offset(node.end_lineno, node.end_col_offset)
        before = " ".join(source.encode()[start:end].decode().split())
        line = source.splitlines()[node.lineno - 1].strip()
        key = (operator, line, before, after)
        seen[key] = seen.get(key, 0) + 1
        lines = (statement.lineno, _last_header_line(statement))
        change = f"{before} → {after}"
        found.append(Mutant(file, operator, line, change, seen[key], lines, on_import, start, end, after))
    return [mutant for mutant in found if _compiles(mutant.apply(source))]


def sample(everything: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of them, chosen by a hash of each and of the seed: an edit elsewhere in the file does not change the choice."""
    ranked = sorted(everything, key=lambda mutant: hashlib.sha256(f"{seed} {mutant.id}".encode()).digest())
    return sorted(ranked[:count], key=lambda mutant: (mutant.file, mutant.start, mutant.id))


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def _last_header_line(statement: ast.stmt) -> int:
    """Of a compound statement only its first line or lines, not its body."""
    body = getattr(statement, "body", None)
    return max(statement.lineno, body[0].lineno - 1) if body else statement.end_lineno or statement.lineno


class _Walker(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self.changes: list[tuple[str, ast.AST, str, ast.stmt, bool]] = []
        self._starts = [0]
        for line in source.encode().splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._statement: ast.stmt | None = None
        self._depth = 0

    def offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _add(self, operator: str, node: ast.AST, after: str) -> None:
        self.changes.append((operator, node, after, self._statement, self._depth == 0))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            outer, self._statement = self._statement, node
            super().visit(node)
            self._statement = outer
        else:
            super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self._depth += 1
        self._each(node.body)
        self._depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._each(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def _skip(self, node: ast.AST) -> None: ...

    visit_Import = visit_ImportFrom = visit_Assert = visit_JoinedStr = _skip

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add("drop", node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add("drop", node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("drop", node, "pass")
        if type(node.op) in _OTHER and not _is_text(node.value):
            swapped = ast.AugAssign(node.target, _OTHER[type(node.op)](), node.value)
            self._add("arithmetic", node, ast.unparse(ast.fix_missing_locations(swapped)))
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if isinstance(node.value, ast.Call):
            argument = _argument(node.value)
            if argument is not None:
                self._add("argument", node, f"return {ast.unparse(argument)}")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self._negate(node.test)
        self.visit(node.test)
        self._each(node.body)
        self._each(node.orelse)

    visit_While = visit_If

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.visit(node.iter)
        self._each(node.ifs)

    def visit_match_case(self, node: ast.match_case) -> None:
        if node.guard is not None:
            self._negate(node.guard)
        self._each(node.body)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        self._add("logic", node, _text(other))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            self._add("not", node, _text(node.operand))
        self.visit(node.operand)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if _is_text(node.left) or _is_text(node.right) or (isinstance(node.op, ast.BitOr) and self._depth == 0):
            return
        if type(node.op) in _OTHER:
            self._add("arithmetic", node, _text(ast.BinOp(node.left, _OTHER[type(node.op)](), node.right)))
            self._add("operand", node, _text(node.left))
            self._add("operand", node, _text(node.right))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for at, operator in enumerate(node.ops):
            operators = [*node.ops[:at], _OTHER[type(operator)](), *node.ops[at + 1 :]]
            self._add("boundary", node, _text(ast.Compare(node.left, operators, node.comparators)))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _OTHER:
            other = _OTHER[name]
            func = ast.Attribute(node.func.value, other) if isinstance(node.func, ast.Attribute) else ast.Name(other)
            self._add("extreme", node.func, ast.unparse(ast.fix_missing_locations(func)))
        if name.endswith("Error") or name == "isinstance":
            return
        self.visit(node.func)
        self._each(node.args[:1] if name == "require" else node.args)
        self._each([keyword.value for keyword in node.keywords if keyword.arg not in KNOBS])

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add("constant", node, repr(not value))
        elif isinstance(value, int) and abs(value) <= _LARGEST:
            self._add("constant", node, repr(value + 1))
        elif isinstance(value, float) and (value == 0.0 or _SMALLEST <= abs(value) <= _LARGEST):
            self._add("constant", node, repr(2.0 * value if value else 1.0))

    def _negate(self, test: ast.expr) -> None:
        self._add("condition", test, f"(not {_text(test)})")

    def _each(self, nodes: list) -> None:
        for node in nodes:
            self.visit(node)


def _text(node: ast.expr) -> str:
    text = ast.unparse(ast.fix_missing_locations(node))
    return text if isinstance(node, ast.Name | ast.Constant | ast.Call | ast.Attribute | ast.Subscript) else f"({text})"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _argument(call: ast.Call) -> ast.expr | None:
    """x in f(x, …); the object in x.f() where it is a value and not a module."""
    if call.args and not isinstance(call.args[0], ast.Starred | ast.Lambda | ast.JoinedStr):
        return call.args[0]
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call | ast.BinOp | ast.Subscript):
        return call.func.value
    return None
