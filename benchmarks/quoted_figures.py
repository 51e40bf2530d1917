"""Figures in README.md and docs/ beside the output of the commands that they are quoted from.

    python benchmarks/quoted_figures.py            # runs every command, lists what differs; exit status 1 if any does
    python benchmarks/quoted_figures.py --write    # and writes what the commands say now into the pages

Two kinds of quotes. A fenced block that begins with `$ perfmodel ...`, or follows `<!-- output of: COMMAND -->`, holds
lines of the command's output in their order; `...` stands for lines left out. And a comment names the figures
of the section that it stands in:

    <!-- figures of: perfmodel simulate summaries-8b-offline --json
    as given | 61.8 s = answer["duration"]
    -->

The text before ` = ` stands in the section, once; its last numbers are those of the expression, as many as it has.
The expression sees `text`, what the command prints; `answer`, the same as JSON; `number(pattern)`, what a pattern's
groups find in the text; and `cell(title, row, column)` of a report's table. A report stands for the command that wrote
it: `figures of: reports/study_routers_202611.md`. `figures, slow, of:` and `output, slow, of:` mark commands that take
longer than a few seconds: `tests/contract/test_quoted_figures.py` checks the others.
"""

__all__ = ["Quote", "changed", "quotes_of", "run_command", "written"]

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?")
_FENCE = re.compile(
    r"(?:<!-- output(?P<slow>, slow)?,? of: (?P<named>[^\n]*?) -->\n+)?"
    r"```[a-z]*\n(?P<body>(?:(?!```)[^\n]*\n)+)```",
)
_FIGURES = re.compile(r"<!-- figures(?P<slow>, slow)?,? of: (?P<command>[^\n]*)\n(?P<lines>.*?)\n-->", re.DOTALL)
_RELATIVE = 2e-3  # of a figure: how far the same sources may come out elsewhere (other math libraries)


@dataclass(frozen=True)
class Quote:
    """Lines of a page that a command printed, or figures that it gave.

    lines:    of output, as they stand in the page; () for figures
    figures:  (text in the page, expression) of each
    section:  where the figures stand: the page from the heading before them to the next
    """

    page: Path
    command: str
    is_slow: bool
    lines: tuple[str, ...] = ()
    figures: tuple[tuple[str, str], ...] = ()
    section: str = ""


def quotes_of(page: Path) -> list[Quote]:
    """All quotes of a page, in order of kind."""
    text = page.read_text(encoding="utf-8")
    return [*_output_of(page, text), *_figures_of(page, text)]


def _output_of(page: Path, text: str) -> Iterator[Quote]:
    for block in _FENCE.finditer(text):
        body, command = block["body"].splitlines(), block["named"]
        if body[0].startswith("$ perfmodel "):
            given = [body.pop(0)[2:]]
            while given[-1].endswith("\\"):
                given[-1:] = [given[-1][:-1], body.pop(0).strip()]
            command = " ".join(part.strip() for part in given)
        if command:
            lines = tuple(line for line in body if line.strip() and line.strip() != "...")
            yield Quote(page, command, bool(block["slow"]), lines)


def _figures_of(page: Path, text: str) -> Iterator[Quote]:
    for mark in _FIGURES.finditer(text):
        before, after = text[: mark.start()], text[mark.end() :]
        section = before[before.rfind("\n#") + 1 :] + re.split(r"^#", after, maxsplit=1, flags=re.MULTILINE)[0]
        pairs = (line.rpartition(" = ") for line in mark["lines"].splitlines())
        figures = tuple((quoted.strip(), expression.strip()) for quoted, _, expression in pairs)
        yield Quote(page, mark["command"].strip(), bool(mark["slow"]), (), figures, _FIGURES.sub("", section))


@cache
def run_command(command: str) -> str:
    """What a command prints on both streams, 110 columns wide, errors first; or the text of a report."""
    if (ROOT / command).is_file():
        return (ROOT / command).read_text(encoding="utf-8")
    python = [sys.executable, *(["-m", "perfmodel"] if command.startswith("perfmodel ") else [])]
    path = os.pathsep.join([str(ROOT), str(ROOT / "executors"), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [*python, *shlex.split(command)[1:]],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "110", "PYTHONPATH": path, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout if "--json" in command else found.stderr + found.stdout


def changed(quote: Quote, output: str) -> list[tuple[str, str]]:
    """(as quoted, as the command says it) of whatever differs by more than its digits show."""
    return [*_changed_lines(quote.lines, output.splitlines()), *_changed_figures(quote, output)]


def _changed_lines(quoted: tuple[str, ...], printed: list[str]) -> Iterator[tuple[str, str]]:
    at = 0
    for line in quoted:
        wording = _wording(line)
        found = next((n for n in range(at, len(printed)) if _wording(printed[n]) == wording), None)
        if found is None:
            yield line, "(no such line)"
            continue
        at = found + 1
        if not all(map(_agree, _numbers(line), _numbers(printed[found]))):
            yield line, printed[found].rstrip()


def _wording(line: str) -> str:
    return " ".join(_NUMBER.sub("#", re.sub("─+", "─", line)).split())


def _numbers(text: str) -> list[str]:
    return [found[0] for found in _NUMBER.finditer(text)]


def _agree(quoted: str, printed: str) -> bool:
    return _is_rounded(quoted, _value(printed))


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _is_rounded(quoted: str, value: float) -> bool:
    """Whether a value is what the quoted digits show, give or take `_RELATIVE`."""
    half = 0.5 * 10.0 ** -len(quoted.partition(".")[2])
    return abs(_value(quoted) - value) <= half * (1 + 1e-9) + _RELATIVE * abs(value)


def _changed_figures(quote: Quote, output: str) -> Iterator[tuple[str, str]]:
    names = _names(output)
    for text, expression in quote.figures:
        if quote.section.count(text) != 1:
            yield text, f"(stands {quote.section.count(text)} times in its section)"
            continue
        given = eval(expression, dict(names))
        values = [float(each) for each in (given if isinstance(given, (tuple, list)) else (given,))]
        shown = _numbers(text)[-len(values) :]
        if len(shown) < len(values):
            yield text, f"(has {len(shown)} numbers, the expression {len(values)})"
        elif not all(map(_is_rounded, shown, values)):
            yield text, _with_values(text, values)


def _with_values(text: str, values: list[float]) -> str:
    """The text with its last numbers replaced, each with as many decimals as it had."""
    spots = list(_NUMBER.finditer(text))[-len(values) :]
    for spot, value in reversed(list(zip(spots, values, strict=True))):
        text = f"{text[: spot.start()]}{value:,.{len(spot[0].partition('.')[2])}f}{text[spot.end() :]}"
    return text


def _names(output: str) -> dict[str, Any]:
    def number(pattern: str) -> tuple[float, ...]:
        found = re.search(pattern, output)
        if found is None:
            raise ValueError(f"nothing like {pattern!r} is in the output")
        return tuple(map(_value, found.groups()))

    def cell(title: str, row: str, column: str) -> float:
        return _cell(output.splitlines(), title, row, column)

    answer = json.loads(output) if output.startswith("{") else None
    return {"answer": answer, "text": output, "number": number, "cell": cell}


def _cell(lines: list[str], title: str, row: str, column: str) -> float:
    """Of the first Markdown table below a line that begins with `title`: its first number, thousands spelled out."""
    below = lines[next(n for n, line in enumerate(lines) if line.startswith(title)) :]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in below if line.startswith("|")]
    cells = next(cells for cells in rows if cells[0] == row)
    digits, suffix = re.match(r"([\d.,]+)(k?)", cells[rows[0].index(column)]).groups()  # type: ignore[union-attr]
    return _value(digits) * (1e3 if suffix else 1)


def written(quote: Quote, differences: list[tuple[str, str]], text: str) -> str:
    """The page's text with what can be written: lines and figures that the command still has."""
    for old, new in differences:
        if not new.startswith("("):
            text = text.replace(old, new)
    return text


def main(run: Callable[[str], str] = run_command) -> int:
    """Compare all pages. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="Write what commands say now into the pages.")
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES)
    given = parser.parse_args()
    count = 0
    for quote in (quote for page in given.pages for quote in quotes_of(page.resolve())):
        differences = changed(quote, run(quote.command))
        count += len(differences)
        for old, new in differences:
            print(f"{quote.page.relative_to(ROOT)}: {quote.command}\n  {old}\n  {new}")
        if given.write and differences:
            text = quote.page.read_text(encoding="utf-8")
            quote.page.write_text(written(quote, differences, text), encoding="utf-8")
    print(f"{count} figures differ")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
