"""How near an answer is to what was measured: a badge with its sentence, and the nearest measurements for a page."""

__all__ = ["trust_blocks", "trust_line"]

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from perfmodel.report.document import Block, Details, Line, Paragraph, Span, Table, Tone
from perfmodel.trust import Level, MeasuredCell, Trust, nearest_rows

_TONES: dict[Level, Tone] = {"validated": "good", "calibrated": "strong", "transferred": "warn", "datasheet": "bad"}


def trust_line(trust: Trust | None, of: str = "") -> Iterator[Block]:
    """The badge and its reason; nothing for None. of: the quantity trusted, where a result has several"""
    if trust is not None:
        yield Paragraph((f"Trust{of}: ", Span(trust.level, _TONES[trust.level]), str(trust).removeprefix(trust.level)))


def trust_blocks(trust: Trust | None, of: str = "") -> Iterator[Block]:
    """`trust_line`, and on pages the nearest measured cells and rows. of: as in `trust_line`"""
    yield from trust_line(trust, of)
    if trust is None:
        return
    rows = _Rows(trust)
    head = ("row", "metric", "predicted", "measured", "error")
    yield Details([_cells(trust.nearest), Table(head, rows, "Single rows near this setup", left=2)])


class _Rows(Sequence[Sequence[Line]]):
    """Single rows near a setup, read when a page asks for them: a terminal does not."""

    def __init__(self, trust: Trust) -> None:
        self._trust = trust

    @cached_property
    def _lines(self) -> list[Sequence[Line]]:
        return [
            (row.label, row.metric, f"{row.predicted:,.4g}", f"{row.measured:,.4g}", f"{row.error:+.1%}")
            for row in nearest_rows(self._trust)
        ]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: Any) -> Any:
        return self._lines[index]


def _cells(cells: Sequence[MeasuredCell]) -> Table:
    rows = [
        (
            f"{cell.low.model} {cell.low.weights}",
            f"{cell.low.device}, {cell.low.engine} {cell.low.version}".rstrip(),
            _range(cell.low.input_tokens, cell.high.input_tokens),
            _range(cell.low.output_tokens, cell.high.output_tokens),
            _range(cell.low.concurrency, cell.high.concurrency),
            cell.metric,
            f"{cell.rows:,}",
            f"{cell.median_error:.1%}",
        )
        for cell in cells
    ]
    head = ("model", "measured on", "input tokens", "output tokens", "concurrency", "metric", "rows", "median error")
    note = "Errors are |predicted / measured - 1| of rows whose engines' few numbers may have been fitted to them."
    return Table(head, rows, "The nearest measurements", left=2, texts=(5,), note=note if rows else "")


def _range(low: float, high: float) -> str:
    if not high:
        return "-"
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
