"""`PageState`: everything a page shows, as in its address; `request_of`: a command's request of a state. Knows no view
and no file.

Keys are flags (`model`, `hardware`, `rate` ...), scenario paths (`engine.tensor_parallel_size`), which become `--set`,
and view options (`batch`, `context`). Deployments to compare with are nested states in values of `with`."""

import base64
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode

from perfmodel.commands.request import FLAG_FIELDS, ScenarioRequest
from perfmodel.commands.request import RUN_FLAGS as FLAGS
from perfmodel.errors import SpecError, did_you_mean

_OF_SCENARIOS = (
    *("engine", "traffic", "slo", "cluster", "price", "hardware", "model_changes", "sampling", "plan"),
    *("overheads", "prompt_compression", "routing", "site"),
)
_OF_VIEWS = (
    *("batch", "context", "prefill", "low", "high", "vary", "metric", "against", "devices", "family", "technique"),
    *("speed", "results"),
)
_ALONE = ("scenario", "seed")
_OTHER = "with"
MAX_DEPLOYMENTS = 4  # side by side
_LONGEST_QUERY, _LONGEST_VALUE, _MAX_FIELDS = 16_000, 4_000, 120
PACKED = "z="  # begins a compressed query
_LONG_QUERY = 400  # characters; chats and mail break longer links
_SCENARIO = re.compile(r"(drop:[0-9a-f]{16}/)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
_PATH = re.compile(r"[a-z_]+(\.[A-Za-z0-9_-]+)+")
_START = {"model": "llama-3.1-8b", "hardware": "h100-sxm-80gb"}


@dataclass(frozen=True, slots=True)
class PageState:
    """fields: key -> value as typed, in address order; others: deployments to compare with; left_out: unknown keys,
    with the nearest known ones"""

    fields: tuple[tuple[str, str], ...] = ()
    others: tuple["PageState", ...] = ()
    left_out: tuple[str, ...] = field(default=(), compare=False)

    def get(self, key: str, default: str = "") -> str:
        """Value of a key, or `default`."""
        return next((value for name, value in self.fields if name == key), default)

    @property
    def flags(self) -> dict[str, str]:
        """Flags of the deployment; a default one if there are neither flags nor a scenario."""
        result = {key: value for key, value in self.fields if key in FLAGS}
        return result if self.get("scenario") else {**_START, **result}

    @property
    def overrides(self) -> tuple[str, ...]:
        """Scenario fields as `--set` arguments."""
        paths = [f"{key}={value}" for key, value in self.fields if "." in key]
        return (*paths, f"seed={seed}") if (seed := self.get("seed")) else tuple(paths)

    @property
    def query(self) -> str:
        pairs = [*self.fields, *((_OTHER, other.query) for other in self.others)]
        return urlencode(pairs)

    def changed(self, values: Mapping[str, str | None]) -> "PageState":
        """A copy with other values; None removes a key."""
        kept = [(key, value) for key, value in self.fields if key not in values]
        return PageState((*kept, *((key, value) for key, value in values.items() if value is not None)), self.others)

    def alone(self) -> "PageState":
        """The deployment without comparisons and view options."""
        kept = tuple((key, value) for key, value in self.fields if key not in _OF_VIEWS)
        return PageState(kept, left_out=self.left_out)


Kind = TypeVar("Kind", bound=ScenarioRequest)


def request_of(kind: type[Kind], state: PageState, *overrides: str, **options: Any) -> Kind:
    """Request of command `kind` for a state, with further overrides and request fields (`options`)."""
    scenario, named = state.get("scenario") or None, tuple[str, ...]()
    given = {key: value for key, value in state.flags.items() if key in kind.scenario_flags}
    if scenario is not None:
        named, given = tuple(f"{FLAG_FIELDS[key]}={value}" for key, value in given.items()), {}
    if hasattr(kind, "workers"):
        options["workers"] = 1  # others work for other pages
    all_overrides = (*named, *state.overrides, *overrides)
    return kind(scenario, flags=tuple(given.items()), overrides=all_overrides, **options)


def packed(query: str) -> str:
    """A query to share: compressed if it is long and becomes shorter. `unpacked` restores it exactly."""
    text = base64.urlsafe_b64encode(zlib.compress(query.encode(), 9)).decode().rstrip("=")
    return PACKED + text if len(query) > max(_LONG_QUERY, len(PACKED + text)) else query


def unpacked(query: str) -> str:
    """The query that `packed` was given. Raises SpecError for one that was cut off or changed."""
    if not query.startswith(PACKED):
        return query
    text, stream = query.removeprefix(PACKED), zlib.decompressobj()
    try:
        content = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        plain = stream.decompress(content, _LONGEST_QUERY + 1).decode()
    except (ValueError, zlib.error):
        plain = ""
    if not plain or not (stream.eof or len(plain) > _LONGEST_QUERY):
        raise SpecError("the address: its compressed part was cut off or changed; copy the whole link again.")
    return plain


def read_state(query: str) -> PageState:
    """State of an address query, without empty and unknown fields. SpecError for duplicate keys, or too long."""
    query = unpacked(query)
    if len(query) > _LONGEST_QUERY:
        expected = f"expected at most {_LONGEST_QUERY:,}; change fewer fields."
        raise SpecError(f"the address has {len(query):,} characters; {expected}")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=_MAX_FIELDS, errors="strict")
    except ValueError:
        raise SpecError(f"the address: not a query of at most {_MAX_FIELDS} fields in UTF-8.") from None
    others = tuple(read_state(value).alone() for key, value in pairs if key == _OTHER)
    if len(others) > MAX_DEPLOYMENTS - 1:
        expected = f"expected at most {MAX_DEPLOYMENTS}; take one out."
        raise SpecError(f"the address: {1 + len(others)} deployments; {expected}")
    own = [(key, value) for key, value in pairs if key != _OTHER]
    known = (*FLAGS, *_ALONE, *_OF_VIEWS)
    unknown = [
        f"The address has the unknown key {key!r}, which is left out.{did_you_mean(key, known)}"
        for key in (name[:60] for name, _ in own if not _is_known(name))
    ]
    left_out = dict.fromkeys((*unknown, *(sentence for other in others for sentence in other.left_out)))
    return PageState(tuple(_checked(item for item in own if _is_known(item[0]))), others, tuple(left_out))


def _checked(pairs: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Those with a value. Raises SpecError for a key that comes twice, and for what the command line would read as an
    option, a path or stdin."""
    seen = set()
    for key, text in pairs:
        if key in seen:
            raise SpecError(f"the address: {key} comes twice; say it once.")
        seen.add(key)
        if len(text) > _LONGEST_VALUE or not text.isprintable():
            raise SpecError(f"{key}: expected at most {_LONGEST_VALUE:,} printable characters.")
        value = text.strip()
        if value and key == _ALONE[0] and _SCENARIO.fullmatch(value) is None:
            raise SpecError(f"scenario: got {value[:60]!r}; expected a name of `perfmodel scenarios list`.")
        if key in (*FLAGS, *_OF_VIEWS) and value.startswith("-"):
            raise SpecError(f"{key}: got {value[:60]!r}, which begins with a minus; no such value does.")
        if value:
            yield key, value


def _is_known(key: str) -> bool:
    if key in (*FLAGS, *_ALONE, *_OF_VIEWS):
        return True
    return _PATH.fullmatch(key) is not None and key.split(".")[0] in _OF_SCENARIOS
