"""YAML 1.2 with source positions.

PyYAML implements YAML 1.1 (`4.8e12` and `1e9` are strings, `no` is false), so it (in C if available) only builds the
node tree. Scalars follow YAML 1.2's core schema, keys are text, duplicates are refused, lines are looked up on errors.
Size, depth and values are limited: nested aliases can be a billion values in nine lines."""

import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import yaml

from perfmodel.errors import SpecError
from perfmodel.files.sandbox import read_limited_text

Path = tuple[str | int, ...]  # ("memory", 0, "capacity_bytes")

# Of one file. A megabyte takes two to four seconds; the largest of ours has 26 kB, and lists of lengths have their own
# files.
_MAX_BYTES = 2_000_000
_MAX_VALUES = 300_000  # an alias counts as its content
_MAX_DEPTH = 50
_SAFE_DEPTH = 1000  # beyond, the recursive C parser would overflow the stack
_LONGEST_NUMBER = 400  # digits: more than a double has before its point

_TAG = "tag:yaml.org,2002:"
_TAGS = {yaml.ScalarNode: f"{_TAG}str", yaml.SequenceNode: f"{_TAG}seq", yaml.MappingNode: f"{_TAG}map"}
_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Parser):  # type: ignore[misc]  # whichever of the two is there
    """Tags nodes by kind; `_scalar` resolves plain ones. YAML 1.1's resolvers took half of the time."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        return _TAGS[kind]

    def descend_resolver(self, node: Any, index: Any) -> None: ...

    def ascend_resolver(self) -> None: ...


_BRACKETS = re.compile(r"[][{}]")
_BEFORE_WORDS = re.compile(r"^[-?: \t]+", re.MULTILINE)
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


@dataclass
class Positions:
    """Source positions of a document: lines, or the `--set` that set a field."""

    file: str
    root: yaml.Node | None = None
    overridden: dict[Path, str] = field(default_factory=dict)
    named: Mapping[Path, str] = field(default_factory=dict)  # how errors name fields of a document without a file

    def where(self, path: Path) -> str:
        """`file:line` of the nearest enclosing field in the file, or its `--set ...`."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.overridden:
                return f"--set {self.overridden[path[:end]]}"
            if path[:end] in self.named:
                return self.named[path[:end]]
        made = next((text for place, text in self.overridden.items() if place[: len(path)] == path and path), None)
        if made is not None and len(self._nodes(path)) <= len(path):
            return f"--set {made}"
        line = self.line(path)
        return self.file if line is None else f"{self.file}:{line}"

    def error(self, path: Path, sentence: object) -> SpecError:
        """An error about the field at `path`: `file:line: field: sentence`."""
        return SpecError(f"{self.where(path)}: {'.'.join(map(str, path))}: {sentence}")

    def written(self, path: Path) -> str | None:
        """Scalar at `path` as written (`0.10`), or None."""
        if path in self.overridden:
            return self.overridden[path].partition("=")[2].strip().strip("\"'")
        node = self.node(path)
        return node.value if isinstance(node, yaml.ScalarNode) else None

    def line(self, path: Path) -> int | None:
        """Line (from 1) at `path`, else of the nearest enclosing key or item."""
        nodes = self._nodes(path)
        return nodes[-1][0] + 1 if nodes else None

    def node(self, path: Path) -> yaml.Node | None:
        """Node at `path`, or None."""
        nodes = self._nodes(path)
        return nodes[-1][1] if len(nodes) > len(path) else None

    def _nodes(self, path: Path) -> list[tuple[int, yaml.Node]]:
        """(line from 0, node) of the document and each existing key or item towards `path`."""
        if self.root is None:
            return []
        nodes: list[tuple[int, yaml.Node]] = [(self.root.start_mark.line, self.root)]
        for key in path:
            node = nodes[-1][1]
            inner: list[tuple[int, yaml.Node]] = []
            if isinstance(node, yaml.MappingNode):
                inner = [(name.start_mark.line, value) for name, value in node.value if name.value == str(key)]
            elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and 0 <= key < len(node.value):
                inner = [(node.value[key].start_mark.line, node.value[key])]
            if not inner:
                break
            nodes.append(inner[0])
        return nodes


@dataclass(frozen=True, slots=True)
class LoadedYaml:
    """A document's mapping and positions."""

    data: dict[str, Any]
    positions: Positions

    def block(self, path: Sequence[str]) -> "LoadedYaml":
        """The mapping at `path` as a document with the file's lines."""
        data = self.data
        for key in path:
            data = data[key]
        return LoadedYaml(data, Positions(self.positions.file, self.positions.node(tuple(path)))) if path else self


def load_yaml(path: str | pathlib.Path) -> LoadedYaml:
    """Mapping of a YAML file. Raises SpecError (`file:line: ...`) if it is missing, a folder, not UTF-8, empty, no
    mapping, invalid YAML, tab-indented, or has duplicate keys."""
    try:
        text = read_limited_text(pathlib.Path(path), _MAX_BYTES)
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file.") from None
    except IsADirectoryError:
        raise SpecError(f"{path}: is a folder; the path of a YAML file is needed.") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8.") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}.") from None
    return load_yaml_text(text, str(path))


def load_yaml_text(text: str, name: str) -> LoadedYaml:
    """See `load_yaml`; `name` stands for the file in errors."""
    root = _compose(text, name)
    if root is None:
        raise SpecError(f"{name}: the file is empty; expected a mapping of `key: value` lines.")
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else f"{root.value!r}"
        raise SpecError(f"{name}:{root.start_mark.line + 1}: got {kind}; expected a mapping of `key: value` lines.")
    return LoadedYaml(_Values(name).of(root), Positions(name, root))


def dump_yaml(data: dict[str, Any]) -> str:
    """YAML that `load_yaml` reads back, keys in order."""
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110)
    return text


def flow_yaml(value: Any) -> str:
    """One-line YAML: `{process: poisson, rate: 4.0}`."""
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=True, width=10**9)
    return text.strip().removesuffix("...").strip()


def parse_value(text: str, origin: str) -> Any:
    """One YAML 1.2 value (`64`, `1e9`, `[1, 2]`, `{rate: 4}`); `origin` names it in errors."""
    root = _compose(text, origin)
    return None if root is None else _Values(origin).of(root)


def _compose(text: str, name: str) -> yaml.Node | None:
    # Deeper, by brackets or indentation, than any parser's stack allows.
    depths = accumulate(1 if bracket in "[{" else -1 for bracket in _BRACKETS.findall(text))
    is_flat = text.count("[") + text.count("{") <= _SAFE_DEPTH or max(depths) <= _SAFE_DEPTH
    if not is_flat or any(len(indent) > _SAFE_DEPTH for indent in _BEFORE_WORDS.findall(text)):
        raise SpecError(f"{name}: nested more than {_MAX_DEPTH} levels deep.")
    loader = None
    try:
        loader = _Loader(text)
        node: yaml.Node | None = loader.get_single_node()
    except (yaml.YAMLError, UnicodeEncodeError) as error:
        raise SpecError(_syntax_error(error, text, name)) from None
    finally:
        if loader is not None:
            loader.dispose()
    return node


def _syntax_error(error: yaml.YAMLError | UnicodeEncodeError, text: str, name: str) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    if mark is None:
        return f"{name}: not valid YAML: {' '.join(str(problem).split())}."
    lines = text.splitlines()
    for number in (mark.line, mark.line - 1):
        if 0 <= number < len(lines) and re.match(r"\s*\t", lines[number]):
            return f"{name}:{number + 1}: got a tab in the indentation; YAML allows only spaces there."
    if "multiple documents" in str(problem) or "single document" in str(getattr(error, "context", "")):
        return f"{name}:{mark.line + 1}: got a second document (`---`); one file holds one."
    opened = getattr(error, "context_mark", None)
    if mark.line >= len(lines) and opened is not None:
        return f"{name}:{opened.line + 1}: not valid YAML: what is opened here is not closed ({problem})."
    shown = lines[mark.line].strip() if mark.line < len(lines) else "the end of the file"
    return f"{name}:{mark.line + 1}: not valid YAML at {shown!r}: {problem}."


class _Values:
    """Python values of nodes; `name`: file in errors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0

    def of(self, node: yaml.Node, parents: tuple[int, ...] = ()) -> Any:
        """Value of `node`; `parents`: enclosing node ids, to refuse recursive anchors."""
        self._count += 1
        if self._count > _MAX_VALUES:
            way_out = "aliases (*) included; write long lists into files of their own."
            raise self._refused(node, f"more than {_MAX_VALUES:,} values, {way_out}")
        if not node.tag.startswith(_TAG) and node.tag != "!":
            raise self._refused(node, f"got the tag {node.tag}; tags have no meaning here.")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if id(node) in parents:
            raise self._refused(node, "an anchor (&) contains itself.")
        if len(parents) > _MAX_DEPTH:
            raise self._refused(node, f"nested more than {_MAX_DEPTH} levels deep.")
        inside = (*parents, id(node))
        if isinstance(node, yaml.SequenceNode):
            return [self.of(item, inside) for item in node.value]
        result: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._refused(key_node, "got a list or mapping as a key; keys are strings.")
            key = str(key_node.value)
            if key in lines:
                raise self._refused(key_node, f"key {key!r} is given twice, first on line {lines[key]}; keep one.")
            lines[key] = key_node.start_mark.line + 1
            result[key] = self.of(value_node, inside)
        return result

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text: str = node.value
        if node.style or node.tag == "!":  # quoted, or a block scalar
            return text
        if text in _WORDS:
            return _WORDS[text]
        is_whole = _INT.fullmatch(text)
        if (is_whole or _FLOAT.fullmatch(text)) and len(text) > _LONGEST_NUMBER:
            raise self._refused(node, f"got a number of {len(text):,} digits; expected at most {_LONGEST_NUMBER}.")
        if is_whole:
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        return float(text) if _FLOAT.fullmatch(text) else text

    def _refused(self, node: yaml.Node, what: str) -> SpecError:
        return SpecError(f"{self._name}:{node.start_mark.line + 1}: {what}")
