"""Small bugs: what each node of a syntax tree could be by mistake, and a sample of all of them by a fixed seed."""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {
    "engine": ("engine",),
    "cost": ("cost",),
    "ops": ("ops",),
    "sim": ("sim",),
    "planning": ("planning",),
    "specs": ("specs", "models", "files"),
}
SEED, PER_ROOM = 202611, 25
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add, ast.Pow: ast.Mult, ast.And: ast.Or, ast.Or: ast.And, ast.Lt: ast.LtE, ast.LtE: ast.Lt,
    ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
TWINS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "ceil": "floor", "floor": "ceil"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Bug:
    """`before` at (line, column) up to (end_line, end_column) of `path` becomes `after`; columns in bytes."""

    room: str
    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}: `{self.before}` -> `{self.after}`"

    def applied(self, source: bytes) -> bytes:
        lines = source.splitlines(keepends=True)
        head = b"".join(lines[: self.line - 1]) + lines[self.line - 1][: self.column]
        tail = lines[self.end_line - 1][self.end_column :] + b"".join(lines[self.end_line :])
        return head + self.after.encode() + tail


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """What the node could be by mistake."""
    match node:
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            yield ast.BinOp(left, OPERATORS[type(op)](), right)  # type: ignore[arg-type]
        case ast.BoolOp(op, values):
            yield ast.BoolOp(OPERATORS[type(op)](), values)  # type: ignore[arg-type]
        case ast.Compare(left, [op], right) if type(op) in OPERATORS:
            yield ast.Compare(left, [OPERATORS[type(op)]()], right)  # type: ignore[list-item]
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() as value):
            yield ast.Constant(value + 1)
        case ast.Constant(float() as value):
            yield ast.Constant(value * 1.5 or 1.0)
        case ast.Call(ast.Name(name), args, keywords) if name in TWINS:
            yield ast.Call(ast.Name(TWINS[name]), args, keywords)
        case ast.Call(ast.Attribute(value, name), args, keywords) if name in TWINS:
            yield ast.Call(ast.Attribute(value, TWINS[name]), args, keywords)
        case ast.Call(func, [one, two, *rest], keywords) if ast.dump(one) != ast.dump(two):
            if not any(isinstance(item, ast.Starred) for item in (one, two)):
                yield ast.Call(func, [two, one, *rest], keywords)
        case ast.Return(ast.Tuple([one, two, *rest])) if ast.dump(one) != ast.dump(two):
            yield ast.Return(ast.Tuple([two, one, *rest]))
        case ast.Return(ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
            yield ast.Pass()
        case ast.Assign([ast.Attribute()]) | ast.Assign([ast.Subscript()]):
            yield ast.Pass()


def mutable(node: ast.AST) -> Iterator[ast.AST]:
    """The node and what is in it, but for annotations and texts."""
    if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
        return
    if isinstance(node, FUNCTIONS) and node.name in ("__repr__", "__str__"):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases", "slice"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from mutable(child)


def bugs_of(room: str, path: Path) -> Iterator[Bug]:
    source = path.read_bytes()
    lines = source.splitlines()
    for node in mutable(ast.parse(source)):
        for other in changed(node):
            text = ast.unparse(ast.fix_missing_locations(other))
            after = f"({text})" if isinstance(other, ast.expr) else text
            place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
            before = b"\n".join(lines[node.lineno - 1 : node.end_lineno])  # type: ignore[attr-defined]
            cut = len(lines[node.end_lineno - 1]) - node.end_col_offset  # type: ignore[attr-defined]
            text = before[node.col_offset : len(before) - cut].decode()  # type: ignore[attr-defined]
            yield Bug(room, str(path.relative_to(ROOT)), *place, " ".join(text.split()), after)


def sample() -> list[Bug]:
    """As many from each room, in turns, so that a run that is stopped has a fair sample."""
    drawn = []
    for room, folders in ROOMS.items():
        files = [path for folder in folders for path in sorted((ROOT / "perfmodel" / folder).rglob("*.py"))]
        bugs = [bug for path in files for bug in bugs_of(room, path)]
        drawn.append(random.Random(f"{SEED} {room}").sample(bugs, min(PER_ROOM, len(bugs))))
    return [bug for turn in zip(*drawn, strict=False) for bug in turn]
