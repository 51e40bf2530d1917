"""Pages of metrics as text: what prometheus_client writes, byte for byte, in a fraction of the time.

A page of many engines is thousands of lines, and nothing else happens in the event loop while it is written. A line but
for its number is the same each time, so sets of labels are made once and remember how they are written.
"""

__all__ = ["LabelSet", "page_text"]

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString


class LabelSet(dict[str, str]):
    """Names and values; `text` is how a line has them."""

    __slots__ = ("_more", "text")

    def __init__(self, **labels: str) -> None:
        super().__init__(labels)
        written = ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items()))
        self.text = f"{{{written}}}" if written else ""
        self._more: dict[tuple[str, str], LabelSet] = {}

    def plus(self, name: str, value: str) -> "LabelSet":
        """These and another; the same object each time."""
        more = self._more.get((name, value))
        if more is None:
            more = self._more[name, value] = LabelSet(**self, **{name: value})
        return more


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def page_text(families: Iterable[Metric], openmetrics: bool) -> bytes:
    """The families, whose labels are `LabelSet`s, in Prometheus's text format or in OpenMetrics'."""
    lines: list[str] = []
    for family in families:
        name = family.name
        if family.type == "counter" and not openmetrics:
            name += "_total"
        lines.append(f"# HELP {name} {family.documentation}\n# TYPE {name} {family.type}\n")
        lines += [
            f"{sample.name}{sample.labels.text} {_number(sample.value)}\n"  # type: ignore[attr-defined]
            for sample in family.samples
        ]
    if openmetrics:
        lines.append("# EOF\n")
    return "".join(lines).encode()


def _number(value: float) -> str:
    if value < 1e6 and value.is_integer():
        return f"{value:.1f}"
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text
