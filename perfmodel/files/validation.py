"""From a mapping to a spec, or one sentence per mistake: `file:line: field: got X; expected Y`."""

import pathlib
import types
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

from perfmodel.errors import SpecError, did_you_mean
from perfmodel.files.base import VariantSpec, drop_unused_fields
from perfmodel.files.blocks import Block, block_class
from perfmodel.files.sandbox import refuse_path
from perfmodel.files.yaml_loader import Path, Positions, load_yaml

_S = TypeVar("_S", bound=BaseModel)
_MAX_SHOWN, _MAX_READ = 5, 100

# pydantic's error type -> expectation, with limits from the error's context.
_ALLOWED = {
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "too_short": "at least {min_length} of them",
    "too_long": "at most {max_length} of them",
    "finite_number": "a finite number",
    "int_from_float": "a whole number",
}
_ALLOWED_BY_STEM = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "list": "a list",
    "dict": "a mapping",
    "date": "a date such as 2026-03-10",
}


def parse(model_class: type[_S], data: Any, positions: Positions) -> _S:
    """Validate the mapping of one document. Raises SpecError with a line and place per mistake, at most five."""
    _drop_unused_fields(model_class, data, positions)
    try:
        return model_class.model_validate(data, context=positions)
    except ValidationError as error:
        first = islice(_sentences(error, model_class, data, positions), _MAX_READ)
        by_line = sorted(first, key=lambda item: item[0])
        lines = list(dict.fromkeys(sentence for _, sentence in by_line))
        count = max(len(lines), error.error_count() if len(by_line) == _MAX_READ else 0)
    more = [f"... and {count - _MAX_SHOWN} more"] if count > _MAX_SHOWN else []
    raise SpecError("\n".join(lines[:_MAX_SHOWN] + more))


def load_spec(model_class: type[_S], file: pathlib.Path) -> _S:
    """Spec of a YAML file, cached by modification. Raises SpecError as `load_yaml` and `parse` do."""
    refuse_path(file)
    written_at = file.stat().st_mtime_ns if file.is_file() else 0  # reading reports a missing one
    return cast(_S, _loaded(model_class, file, written_at))


@lru_cache(maxsize=512)
def _loaded(model_class: type[BaseModel], file: pathlib.Path, _written_at: int) -> BaseModel:
    loaded = load_yaml(file)
    return parse(model_class, loaded.data, loaded.positions)


def _drop_unused_fields(model_class: type[BaseModel], data: Any, positions: Positions) -> None:
    """Drop fields made unused by an override that selects another variant."""
    for place in {path[:-1] for path in positions.overridden}:
        model, block = _model_at(model_class, place), data
        for key in place:
            block = block[key] if _has(block, key) else None
        if isinstance(block, dict) and model is not None and issubclass(model, VariantSpec):
            given = {str(path[-1]) for path in positions.overridden if path[:-1] == place}
            drop_unused_fields(model, block, given)


def show_value(value: Any) -> str:
    """`value` as in the file, shortened."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value) if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _sentences(
    error: ValidationError, model_class: type[BaseModel], data: Any, positions: Positions
) -> Iterator[tuple[int, str]]:
    for item in error.errors(include_url=False):
        if item["type"] == "too_short" and len(item["input"]) >= item["ctx"]["min_length"]:
            continue  # pydantic counts only the items without mistakes, and these have their own sentences
        path = _path_in_data(item["loc"], data, item["type"])
        parts = [positions.where(path), ".".join(map(str, path)), _sentence(item, path, model_class)]
        sentence = ": ".join(part for part in parts if part)
        yield positions.line(path) or 0, sentence if sentence.endswith("?") else f"{sentence}."


def _path_in_data(loc: tuple[str | int, ...], data: Any, kind: str) -> Path:
    """`loc` without pydantic's parts for unions and functions, which are not in the data."""
    path: list[str | int] = []
    for position, key in enumerate(loc):
        is_last = position == len(loc) - 1
        if _has(data, key):
            data = data[key]
        elif not (is_last and kind == "missing"):
            continue
        path.append(key)
    return tuple(path)


def _has(data: Any, key: str | int) -> bool:
    if isinstance(data, (list, tuple)):
        return isinstance(key, int) and key < len(data)
    return isinstance(data, Mapping) and key in data


def _sentence(item: Any, path: Path, model_class: type[BaseModel]) -> str:
    """Value and expectation, without the place."""
    kind: str = item["type"]
    context: dict[str, Any] = item.get("ctx", {})
    sentence = show_value(item["input"])
    if kind == "missing":
        around = _model_at(model_class, path[:-1])
        choices = get_args(around.model_fields[str(path[-1])].annotation) if around is not None else ()
        expected = ", ".join(choice for choice in choices if isinstance(choice, str))
        return "is missing and has no default" + (f"; expected one of {expected}" if expected else "")
    if kind == "extra_forbidden":
        return unknown_key(str(path[-1]), _model_at(model_class, path[:-1]))
    if kind in ("value_error", "assertion_error"):
        return str(context["error"]).rstrip(".")
    if kind in ("literal_error", "enum"):
        near = did_you_mean(str(item["input"]), context["expected"].replace("'", "").replace(" or ", ", ").split(", "))
        return f"got {sentence}; expected {context['expected']}" + (f".{near}" if near else "")
    if kind in _ALLOWED:
        limits = {name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in context.items()}
        return f"got {sentence}; expected {_ALLOWED[kind].format(**limits)}"
    if kind in ("model_type", "model_attributes_type", "dataclass_type"):
        model = _model_at(model_class, path)
        keys = f" of {', '.join(model.model_fields)}" if model else ""
        return f"got {sentence}; expected a mapping{keys}"
    allowed = _ALLOWED_BY_STEM.get(kind.split("_")[0])
    if allowed is not None:
        return f"got {sentence}; expected {allowed}"
    message: str = item["msg"]
    return f"got {sentence}: {message[:1].lower()}{message[1:]}"


def unknown_key(key: str, model: type[BaseModel] | None) -> str:
    """Sentence for an unknown field of `model`: its meaning elsewhere, the nearest field, or all."""
    known = list(model.model_fields) if model is not None else []
    about = getattr(model, "about_key", None)
    if about is not None and (meaning := about(key)):
        return f"is no field here; it is {meaning}"
    near = did_you_mean(key, known)
    if near:
        return f"unknown key {key!r}.{near}"
    return f"unknown key {key!r}; expected {', '.join(known)}" if known else f"unknown key {key!r}"


def _model_at(model_class: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """Spec of the mapping at `path`."""
    kind: Any = model_class
    for key in path:
        if isinstance(key, int):
            kind = next((arg for arg in get_args(kind) if arg is not Ellipsis), None)
        elif isinstance(kind, type) and issubclass(kind, BaseModel) and key in kind.model_fields:
            kind = kind.model_fields[key].annotation
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        else:
            return None
        while get_origin(kind) in (Annotated, Union, types.UnionType):  # the inner type of an optional or annotated one
            members = [arg for arg in get_args(kind) if arg is not type(None)]
            block = next((arg for arg in members if isinstance(arg, Block)), None)
            kind = members[0] if block is None else block_class(block.name)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
