"""The bare HTML page of a report: styles, sections, tables, and figures with plotly's script inlined once.

Knows nothing of runs. The page has no address of any other file in it, so it opens without a network, and equal
content gives equal bytes.
"""

__all__ = ["Page"]

import re
from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

_STYLE = """
:root { --ink: #1f2933; --soft: #5f6b7a; --line: #e3e7ec; --tint: #f6f8fa; --blue: #0072b2; --green: #00785a;
        --red: #b94a00; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--tint); color: var(--ink);
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 0 0 4px; }
p { margin: 4px 0 10px; max-width: 85ch; }
.sub { color: var(--soft); margin: 2px 0 20px; }
.tag { display: inline-block; border: 1px solid currentColor; border-radius: 99px; padding: 0 10px; font-size: 13px;
       color: var(--blue); vertical-align: 4px; margin-left: 10px; font-weight: 600; }
section { background: white; border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px; margin: 16px 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.tile { background: white; border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
.tile .label { color: var(--soft); font-size: 13px; }
.tile .value { font-size: 24px; font-weight: 650; letter-spacing: -0.02em; white-space: nowrap; }
.tile .value small { font-size: 14px; font-weight: 400; color: var(--soft); letter-spacing: 0; }
.tile .aside { font-size: 13px; color: var(--soft); }
.ok { color: var(--green) !important; } .over { color: var(--red) !important; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); gap: 8px 36px; }
.columns h3 { font-size: 14px; margin: 8px 0 2px; color: var(--blue); }
dl { display: grid; grid-template-columns: fit-content(65%) 1fr; gap: 1px 12px; margin: 0; font-size: 14px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
tr:last-child td { border-bottom: none; }
.scroll { overflow-x: auto; }

.note { color: var(--soft); font-size: 13.5px; }
ul { margin: 6px 0; padding-left: 20px; }
@media print { body { background: white; } section, .tile { break-inside: avoid; } }
"""


_CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "plotlyServerURL": "",  # no button may lead out of the file
    "modeBarButtonsToRemove": ["sendChartToCloud", "lasso2d", "select2d"],
}


class Page:
    """Collects sections in order; `render` gives the file's text."""

    def __init__(self, title: str, subtitle: str, tag: str) -> None:
        self._title = title
        self._head = (
            f'<h1>{escape(title)}<span class="tag">{escape(tag)}</span></h1><p class="sub">{escape(subtitle)}</p>'
        )
        self._body: list[str] = []
        self._num_figures = 0

    def tiles(self, tiles: Sequence[tuple[str, str, str, str, str]]) -> None:
        """Large numbers: (label, value, unit, aside, class of the aside: '' | 'ok' | 'over')."""
        cells = [
            f'<div class="tile"><div class="label">{escape(label)}</div><div class="value">{escape(value)} '
            f'<small>{escape(unit)}</small></div><div class="aside {css}">{escape(aside)}</div></div>'
            for label, value, unit, aside, css in tiles
        ]
        self._body.append(f'<div class="tiles">{"".join(cells)}</div>')

    def facts(self, title: str, groups: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> None:
        """Labelled facts in columns."""
        columns = []
        for group, facts in groups:
            rows = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in facts)
            columns.append(f"<div><h3>{escape(group)}</h3><dl>{rows}</dl></div>")
        self._section(title, f'<div class="columns">{"".join(columns)}</div>')

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
        """A table whose first column is text and whose others are numbers."""
        head = "".join(f"<th>{escape(column)}</th>" for column in columns)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        self._section(title, f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>', note)

    def figure(self, title: str, figure: go.Figure, note: str = "") -> None:
        """A plot; the page carries plotly's script once however many there are."""
        self._num_figures += 1
        drawn: str = plotly.io.to_html(
            figure,
            include_plotlyjs=False,
            full_html=False,
            div_id=f"figure-{self._num_figures}",
            config=_CONFIG,
        )
        self._section(title, drawn, note)

    def picture(self, svg: str) -> None:
        """A drawing that brings its own title."""
        self._body.append(f'<section><div class="scroll">{svg}</div></section>')

    def list(self, title: str, items: Sequence[str]) -> None:
        """Sentences, one bullet each."""
        self._section(title, f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>")

    def _section(self, title: str, inner: str, note: str = "") -> None:
        tail = f'<p class="note">{escape(note)}</p>' if note else ""
        self._body.append(f"<section><h2>{escape(title)}</h2>{tail}{inner}</section>")

    def render(self) -> str:
        """The whole file."""
        script = f"<script>{_offline_script()}</script>" if self._num_figures else ""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self._title)}</title><style>{_STYLE}</style>{script}</head>"
            f"<body><main>{self._head}{''.join(self._body)}</main></body></html>\n"
        )


def _offline_script() -> str:
    """plotly.js as the package carries it, kept from ending the page's script element early."""
    script: str = get_plotlyjs()
    return re.sub(r"</(script)", r"<\\/\1", script, flags=re.IGNORECASE)
