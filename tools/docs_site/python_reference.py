"""The page of the Python interface: every public name of the package with its signature, fields and docstring."""

__all__ = ["public_names", "python_page"]

import inspect
import re
from collections.abc import Iterator
from typing import Any

import perfmodel
from docs_site.tables import as_code, in_cell, table

_ENTRY = re.compile(r"^(\w+(?:, \w+)*): +(.*)$")


def python_page() -> str:
    """What the page has below its introduction."""
    groups = {"Functions": inspect.isfunction, "Classes": _is_result, "Errors": _is_error}
    text, names = "", public_names()
    for title, belongs in groups.items():
        result = [name for name in names if belongs(getattr(perfmodel, name))]
        text += f"## {title}\n\n" + "".join(_section(name, getattr(perfmodel, name)) for name in result)
    return text


def public_names() -> list[str]:
    """Those of `perfmodel` but its version."""
    return [name for name in perfmodel.__all__ if not name.startswith("__")]


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def _is_result(value: Any) -> bool:
    return inspect.isclass(value) and not _is_error(value)


def _section(name: str, value: Any) -> str:
    other = "" if value.__name__ == name else f"Another name of `{value.__name__}`.\n\n"
    text = f"### {name}\n\n{other}"
    if inspect.isfunction(value):
        return text + f"```python\n{_signature(name, value)}\n```\n\n{_prose(value)}\n\n"
    text += f"{_prose(value)}\n\n"
    return text if other or _is_error(value) else text + _members(value)


def _members(cls: type[Any]) -> str:
    fields = list(getattr(cls, "model_fields", None) or getattr(cls, "__dataclass_fields__", None) or ())
    members = f"Fields: {', '.join(as_code(field) for field in fields)}.\n\n" if fields else ""
    rows = [(as_code(name), in_cell(_first_sentence(member))) for name, member in _own(cls)]
    return members + (table(("member", "what it is"), rows) + "\n" if rows else "")


def _own(cls: type[Any]) -> Iterator[tuple[str, Any]]:
    for name, member in vars(cls).items():
        is_shown = isinstance(member, property) or inspect.isfunction(member) or isinstance(member, classmethod)
        if is_shown and not name.startswith("_") and inspect.getdoc(member):
            called = isinstance(member, property)
            signature = "" if called else _arguments(getattr(member, "__func__", member))
            yield name + signature, member


def _arguments(function: Any) -> str:
    names = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    return f"({', '.join(names)})"


def _first_sentence(value: Any) -> str:
    return (inspect.getdoc(value) or "").split("\n\n", 1)[0]


def _signature(name: str, function: Any) -> str:
    """Over one line or, where it is long, a line for each parameter."""
    signature = inspect.signature(function)
    whole = f"{name}{_typed(signature)}"
    if len(whole) <= 88:
        return whole
    parts = _parameters(signature)
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){_result(signature)}"


def _typed(signature: inspect.Signature) -> str:
    return f"({', '.join(_parameters(signature))}){_result(signature)}"


def _result(signature: inspect.Signature) -> str:
    return_annotation = signature.return_annotation
    return "" if return_annotation is inspect.Signature.empty else f" -> {_type(return_annotation)}"


def _default(value: Any) -> str:
    """A function by its name: where it lies differs from build to build."""
    return "" if value is inspect.Parameter.empty else f" = {getattr(value, '__name__', None) or repr(value)}"


def _parameters(signature: inspect.Signature) -> list[str]:
    """As written, with the marks between kinds of parameters."""
    parameters, kinds = list[str](), inspect.Parameter
    listed = list(signature.parameters.values())
    for at, item in enumerate(listed):
        is_first_named = item.kind is kinds.KEYWORD_ONLY and not any(
            before.kind in (kinds.KEYWORD_ONLY, kinds.VAR_POSITIONAL) for before in listed[:at]
        )
        parameters += ["*"] if is_first_named else []
        mark = "**" if item.kind is kinds.VAR_KEYWORD else "*" if item.kind is kinds.VAR_POSITIONAL else ""
        typed = "" if item.annotation is kinds.empty else f": {_type(item.annotation)}"
        parameters.append(f"{mark}{item.name}{typed}{_default(item.default)}")
        if item.kind is kinds.POSITIONAL_ONLY and not any(
            after.kind is kinds.POSITIONAL_ONLY for after in listed[at + 1 :]
        ):
            parameters.append("/")
    return parameters


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)


def _prose(value: Any) -> str:
    """A docstring as Markdown: its list of parameters as a list, indented lines as they are."""
    lines: list[str] = []
    for line in (inspect.getdoc(value) or "").splitlines():
        entry, before = _ENTRY.match(line), lines[-1] if lines else ""
        if entry:
            lines += [""] if before.strip() and not before.startswith("- ") and not before.startswith("    ") else []
            names = ", ".join(as_code(name) for name in entry[1].split(", "))
            lines.append(f"- {names}: {entry[2]}")
        elif line.startswith("  ") and before.startswith(("- ", "    ")):
            lines.append("    " + line.strip())
        else:
            lines.append(line)
    return "\n".join(lines)
