"""The value of a shell's `$(( ... ))` on whole numbers, + - * / % and brackets: POSIX.1-2024, 2.6.4. Nothing is run."""

__all__ = ["shell_arithmetic"]

import ast
import operator
import re
from collections.abc import Callable, Mapping

_LONGEST, _LARGEST = 200, 10**15
_ALLOWED = re.compile(r"[\w\s+\-*/%()${}]*")
_NAME = re.compile(r"\$?\{?\b([A-Za-z_]\w*)\b\}?")
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),  # towards zero, as C does
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
}


def shell_arithmetic(text: str, values: Mapping[str, str]) -> int | None:
    """The number that `text`, what stands between the brackets, comes to; None for what is not as plain as that.

    values: of variables, which may stand with and without `$`
    """
    if len(text) > _LONGEST or _ALLOWED.fullmatch(text) is None:
        return None
    plain = _NAME.sub(lambda name: f"({values.get(name[1], 'unknown')})", text)
    try:
        found = _value(ast.parse(plain.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return found


def _value(node: ast.expr) -> int:
    """Raises ValueError for what is no whole number or no operation on two."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        found = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        found = -_value(node.operand) if isinstance(node.op, ast.USub) else _value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        found = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError
    if abs(found) > _LARGEST:
        raise ValueError
    return found
